"""Latency of vLLM offline, tensor parallel, with its own reductions and with allnorm.

A dense model of a configuration's dimensions with random weights: time to the first token (TTFT),
time per output token (TPOT), greedy tokens and logprobs, and the reductions that really ran fused,
counted by kernels in a profile. Each arm is an engine of its own, in a process of its own.

    python benchmarks/engines/vllm_latency.py --model DIR --tp 4 --json rows.jsonl

DIR has a config.json; no weights are read. Arms:

    default   vLLM without plugins
    allnorm   vLLM with this package's plugin
    nccl      as default, reductions by NCCL: how far vLLM's own paths differ from each other
    own       vLLM's own fusion, which needs flashinfer

TPOT is (time of N tokens - time of one) / (N - 1), TTFT the time of one token; medians.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ARMS = ("default", "allnorm", "nccl", "own")
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
HERE = pathlib.Path(__file__).resolve().parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--arms", default="default,allnorm,nccl", help=", ".join(ARMS))
    parser.add_argument("--arm", help="run this one arm here; the script does it for each")
    parser.add_argument("--batch", default="1,8,32,64")
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, help="instead of those of the configuration")
    parser.add_argument("--logprob-prompts", type=int, default=4, help="0: compare no logprobs")
    parser.add_argument("--memory", type=float, default=0.6, help="of each GPU, for the engine")
    parser.add_argument("--engine", default="{}", help="JSON of more arguments of vllm.LLM")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one arm")
    parser.add_argument("--json", default="vllm_latency.jsonl", help="rows are appended")
    return parser.parse_args()


# ---- one arm, in a process of its own ------------------------------------------------------------


def environment(arm: str) -> dict[str, str]:
    """For one arm. Each has a compile cache of its own, so that no arm finds another's graphs."""
    cache = pathlib.Path(os.environ.get("VLLM_CACHE_ROOT") or tempfile.gettempdir()) / f"vllm-{arm}"
    python_path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A plugin's users leave this variable alone.
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    return {
        **inherited,
        **NO_MULTICAST,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(python_path),
        **({} if arm == "allnorm" else {"VLLM_PLUGINS": "none"}),
    }


def engine(options: argparse.Namespace, arm: str, batches: list[int]) -> Any:
    from vllm import LLM

    most = max(batches)
    sizes = sorted({*batches, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": sizes}
    if arm == "own":
        compilation["pass_config"] = {"fuse_allreduce_rms": True}
    settings: dict[str, Any] = {
        "model": options.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "bfloat16",
        "seed": 0,
        "tensor_parallel_size": options.tp,
        "distributed_executor_backend": "mp",
        "disable_custom_all_reduce": arm == "nccl",
        "max_model_len": max(1024, options.input + options.output + 16),
        "max_num_seqs": most,
        "max_num_batched_tokens": max(2048, most * options.input),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": options.memory,
        "compilation_config": compilation,
        "worker_extension_cls": "vllm_worker.WorkerTools",
    }
    if options.layers:
        settings["hf_overrides"] = {"num_hidden_layers": options.layers}
    return LLM(**(settings | json.loads(options.engine)))


def run_arm(options: argparse.Namespace) -> None:
    """Builds the engine, measures, appends rows."""
    arm, batches = options.arm, [int(b) for b in options.batch.split(",")]
    began = time.perf_counter()
    llm = engine(options, arm, batches)
    row: dict[str, Any] = {
        "arm": arm,
        "model": pathlib.Path(options.model).name,
        "layers": options.layers,
        "tp": options.tp,
        "input": options.input,
        "output": options.output,
        "versions": versions(),
    }
    llm.collective_rpc("fill_weights")
    facts = llm.collective_rpc("facts")[0]
    start_s = round(time.perf_counter() - began, 1)
    emit(options, {**row, "kind": "engine", "start_s": start_s, "facts": facts})
    prompts = make_prompts(options.model, max([*batches, options.logprob_prompts]), options.input)
    if options.logprob_prompts:
        measured = logprobs(llm, prompts[: options.logprob_prompts], options.output)
        emit(options, {**row, "kind": "logprobs", **measured})
    for batch in batches:
        measured = latency(llm, prompts[:batch], options.output, options.repeats)
        emit(options, {**row, "kind": "latency", "batch": batch, **measured})
    emit(options, {**row, "kind": "kernels", **kernels(llm, prompts[0])})
    faults = [fault for fault in llm.collective_rpc("check_allnorm") if fault]
    if faults:
        raise SystemExit(f"faults were recorded: {faults}")


def make_prompts(model: str, count: int, length: int) -> list[dict[str, list[int]]]:
    vocabulary = json.loads((pathlib.Path(model) / "config.json").read_text())["vocab_size"]
    generator = random.Random(1234)
    return [
        {"prompt_token_ids": [generator.randrange(1000, vocabulary - 1000) for _ in range(length)]}
        for _ in range(count)
    ]


def generate(llm: Any, prompts: list[Any], tokens: int, **more: Any) -> tuple[float, list[Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more
    )
    began = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began, outputs


def latency(llm: Any, prompts: list[Any], tokens: int, repeats: int) -> dict[str, Any]:
    generate(llm, prompts, min(8, tokens))
    generate(llm, prompts, 1)
    whole, first, seen = [], [], []
    for _ in range(repeats):
        seconds, outputs = generate(llm, prompts, tokens)
        whole.append(seconds)
        seen.append([list(output.outputs[0].token_ids) for output in outputs])
        first.append(generate(llm, prompts, 1)[0])
    total, ttft = statistics.median(whole), statistics.median(first)
    tpot = (total - ttft) / (tokens - 1)
    return {
        "tpot_ms": round(tpot * 1e3, 4),
        "ttft_ms": round(ttft * 1e3, 3),
        "tokens_per_s": round(len(prompts) * tokens / total, 1),
        "total_ms": [round(seconds * 1e3, 2) for seconds in whole],
        "first_ms": [round(seconds * 1e3, 2) for seconds in first],
        "repeats_equal": all(tokens == seen[0] for tokens in seen),
        "tokens": seen[0],
    }


def logprobs(llm: Any, prompts: list[Any], tokens: int) -> dict[str, Any]:
    """Of every prompt token, given the ones before, and of what is generated, one prompt a time."""
    of_prompts, generated, of_generated = [], [], []
    for prompt in prompts:
        _, (output,) = generate(llm, [prompt], tokens, prompt_logprobs=0, logprobs=0)
        ids = prompt["prompt_token_ids"]
        given = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        of_prompts.append([scores[token].logprob for token, scores in given])
        completion = output.outputs[0]
        generated.append(list(completion.token_ids))
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        of_generated.append([scores[token].logprob for token, scores in chosen])
    return {"prompt": of_prompts, "tokens": generated, "generated": of_generated}


def kernels(llm: Any, prompt: Any) -> dict[str, Any]:
    """Reductions and norms of rank 0 in one prefill and four decode steps, by kernel."""
    llm.collective_rpc("start_trace")
    generate(llm, [prompt], 5)
    entries = llm.collective_rpc("stop_trace")[0]
    passes = 5
    counted = {
        f"{kind}: {what}": [calls / passes, round(time_us / calls, 2)]
        for kind, what, calls, time_us in entries
    }
    return {"passes": passes, "per_pass_and_us": counted}


def versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for package in ("vllm", "torch", "allnorm", "flashinfer-python"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def emit(options: argparse.Namespace, row: dict[str, Any]) -> None:
    with open(options.json, "a") as file:
        file.write(json.dumps(row) + "\n")
    shown = {key: value for key, value in row.items() if key not in ("tokens", "prompt")}
    print(f"[{row['arm']}]", json.dumps(shown)[:1500], flush=True)


# ---- all arms, and what they say ----------------------------------------------------------------


def run_all(options: argparse.Namespace) -> int:
    """Runs every arm in its process; returns the exit code."""
    start, failed = rows_in(options.json), []
    for arm in options.arms.split(","):
        if arm not in ARMS:
            raise SystemExit(f"--arms {arm}: expected some of {', '.join(ARMS)}")
        if arm == "own" and importlib.util.find_spec("flashinfer") is None:
            print("[own] missing: vLLM's own fusion needs flashinfer, which is not installed")
            continue
        command = [sys.executable, str(HERE / "vllm_latency.py"), *sys.argv[1:], "--arm", arm]
        print("$", " ".join(command), flush=True)
        process = subprocess.Popen(command, env=environment(arm), start_new_session=True)
        try:
            code = process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            code = -1
            print(f"[{arm}] not done after {options.timeout:.0f} s", flush=True)
        if code:
            failed.append(arm)
        # Workers of an engine that died would keep their GPUs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    summarise(read(options.json)[start:])
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def rows_in(path: str) -> int:
    return len(read(path)) if os.path.exists(path) else 0


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def summarise(rows: list[dict[str, Any]]) -> None:
    """Prints latencies beside the default arm's, kernels, and how far tokens are apart."""
    measured = {(r["arm"], r["batch"]): r for r in rows if r["kind"] == "latency"}
    print(f"\n{'batch':>5} {'arm':8} {'TPOT ms':>9} {'':>8} {'TTFT ms':>9} {'':>8} {'tokens/s':>9}")
    for arm, batch in sorted(measured, key=lambda key: (key[1], ARMS.index(key[0]))):
        row, base = measured[arm, batch], measured.get(("default", batch))
        change = {
            name: f"{row[name] / base[name] - 1:+8.1%}" if base else " " * 8
            for name in ("tpot_ms", "ttft_ms")
        }
        print(
            f"{batch:5} {arm:8} {row['tpot_ms']:9.3f} {change['tpot_ms']} {row['ttft_ms']:9.1f} "
            f"{change['ttft_ms']} {row['tokens_per_s']:9.1f}"
            + ("" if row["repeats_equal"] else "  repeats differ")
        )
    for row in rows:
        if row["kind"] == "kernels":
            print(f"\n[{row['arm']}] calls in a forward pass, us each")
            for name, (calls, time_us) in row["per_pass_and_us"].items():
                print(f"  {calls:7.1f} {time_us:8.2f}  {name}")
    found = {row["arm"]: row for row in rows if row["kind"] == "logprobs"}
    arms = [arm for arm in ARMS if arm in found]
    for i, arm in enumerate(arms):
        for other in arms[:i]:
            print(f"\n{other} and {arm}: {distance(found[other], found[arm])}")


def distance(a: dict[str, Any], b: dict[str, Any]) -> str:
    """How far the logprobs of two arms are from each other, on the same tokens."""
    prompt = [
        abs(x - y)
        for xs, ys in zip(a["prompt"], b["prompt"], strict=True)
        for x, y in zip(xs, ys, strict=True)
    ]
    decode, same, total = [], 0, 0
    for i, tokens in enumerate(a["tokens"]):
        total += len(tokens)
        for position, token in enumerate(tokens):
            if b["tokens"][i][position] != token:
                break
            same += 1
            decode.append(abs(a["generated"][i][position] - b["generated"][i][position]))
    return (
        f"logprobs of prompts differ by {statistics.mean(prompt):.5f} on average, "
        f"{max(prompt):.5f} at most; {same} of {total} generated tokens until the first other one, "
        f"their logprobs differ by {statistics.mean(decode or [0.0]):.5f} on average"
    )


if __name__ == "__main__":
    parsed = arguments()
    if parsed.arm:
        run_arm(parsed)
    else:
        sys.exit(run_all(parsed))
