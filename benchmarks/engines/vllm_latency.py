"""Latency of vLLM offline, tensor parallel, with its own reductions and with allnorm.

Runs a dense model with the dimensions of a configuration and random weights. Measures time to first
token (TTFT), time per output token (TPOT), greedy tokens and logprobs, and the reductions that ran
fused, counted by kernels in a profile. Each arm is a separate engine in a separate process.

    python benchmarks/engines/vllm_latency.py --model DIR --tp 4 --json rows.jsonl

DIR must have a config.json; weights are not read. Arms:

    default   vLLM as its package installs it: on Hopper, its all-reduce + RMSNorm fusion is on and
              runs FlashInfer's kernel, without NVLink multicast. Needs flashinfer-python.
    unfused   vLLM without that fusion
    nccl      like unfused, with reductions by NCCL
    allnorm   vLLM with this package's plugin

With --fp8 the linear layers have FP8 weights and quantized inputs. latency.py defines TPOT and
TTFT.

With --hosts 2 this machine simulates two hosts with vLLM's own launcher (nnodes). Each has half of
the GPUs and its own /dev/shm, which needs root, and NCCL connects them by loopback sockets. The
times do not predict those of a real network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import latency

ARMS = ("default", "unfused", "nccl", "allnorm")
PACKAGES = ("vllm", "torch", "allnorm", "flashinfer-python")
NO_MULTICAST_OF_VLLM = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
HERE = pathlib.Path(__file__).resolve().parent
# Starts a command as if on a separate host; allnorm and vLLM identify hosts by their shared memory.
ON_A_HOST = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs host /dev/shm && exec "$@"', "host")
# NCCL identifies hosts by NCCL_HOSTID; within a host it uses NVLink.
OVER_LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
# Maps the quantization of activations to the `quantization_config` of FP8 checkpoints.
FP8 = {
    "static": {"quant_method": "fp8", "activation_scheme": "static"},
    "per_token": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = latency.parser(__doc__.split("\n\n")[0], ARMS, "default,unfused,allnorm")
    parser.add_argument("--fp8", choices=FP8, help="FP8 linear layers with these activation scales")
    parser.add_argument("--hosts", type=int, default=1, help="number of hosts to simulate")
    parser.add_argument(
        "--host", type=int, default=0, help="host to run; used by the script itself"
    )
    return parser.parse_args(given)


# ---- one arm, in a separate process --------------------------------------------------------------


def environment(arm: str) -> dict[str, str]:
    """Returns the environment of an arm, with a separate compile cache per arm."""
    cache = pathlib.Path(os.environ.get("VLLM_CACHE_ROOT") or tempfile.gettempdir()) / f"vllm-{arm}"
    more = {
        **NO_MULTICAST_OF_VLLM,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
        **({} if arm == "allnorm" else {"VLLM_PLUGINS": "none"}),
    }
    return latency.environment("VLLM_PLUGINS", more)


def settings_of(options: argparse.Namespace, arm: str, batches: list[int]) -> dict[str, Any]:
    """Returns the engine's arguments, merged with the arguments in --engine."""
    most = max(batches)
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": latency.graph_sizes(batches)}
    if arm in ("unfused", "nccl"):
        compilation["pass_config"] = {"fuse_allreduce_rms": False}
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
        "disable_log_stats": False,  # provides token times
        "gpu_memory_utilization": options.memory,
        "compilation_config": compilation,
        # FlashInfer has nothing to tune in dense models.
        "kernel_config": {"enable_flashinfer_autotune": False},
        "worker_extension_cls": "vllm_worker.WorkerTools",
    }
    if options.hosts > 1:
        settings |= {"nnodes": options.hosts, "node_rank": options.host}
        settings |= {"master_addr": "127.0.0.1", "master_port": 29517}
    overrides: dict[str, Any] = {}
    if options.layers:
        overrides["num_hidden_layers"] = options.layers
    if options.fp8:
        overrides["quantization_config"] = FP8[options.fp8]
    if overrides:
        settings["hf_overrides"] = overrides
    return merged(settings, json.loads(options.engine))


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Merges dictionaries recursively; values of `more` take precedence."""
    result = dict(base)
    for name, value in more.items():
        mine = base.get(name)
        if isinstance(mine, dict) and isinstance(value, dict):
            value = merged(mine, value)
        result[name] = value
    return result


def engine(options: argparse.Namespace, arm: str, batches: list[int]) -> Any:
    from vllm import LLM

    return LLM(**settings_of(options, arm, batches))


def be_host(options: argparse.Namespace) -> None:
    """Selects this host's GPUs; the first host starts the other hosts."""
    gpus = options.tp // options.hosts
    first = options.host * gpus
    os.environ.update(OVER_LOOPBACK, NCCL_HOSTID=f"host{options.host}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + gpus)))
    if options.host == 0:
        command = (*ON_A_HOST, sys.executable, str(HERE / "vllm_latency.py"), *sys.argv[1:])
        for host in range(1, options.hosts):
            subprocess.Popen([*command, "--host", str(host)])  # killed with the arm's processes


def serve_host(options: argparse.Namespace, batches: list[int]) -> None:
    """Runs the workers of a host other than the first, like `vllm serve --headless`."""
    from vllm import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    settings = settings_of(options, options.arm, batches)
    config = EngineArgs(**settings).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def run_arm(options: argparse.Namespace) -> None:
    """Builds the engine, measures its latency and appends rows."""
    arm, batches = options.arm, [int(b) for b in options.batch.split(",")]
    began = time.perf_counter()
    if options.hosts > 1:
        be_host(options)
    if options.host > 0:
        return serve_host(options, batches)
    llm = engine(options, arm, batches)
    row = {
        **latency.row_of(options, PACKAGES),
        "fp8": options.fp8,
        "engine": options.engine,
        "hosts": options.hosts,
    }
    llm.collective_rpc("fill_weights")
    facts = llm.collective_rpc("facts")[0]
    start_s = round(time.perf_counter() - began, 1)
    latency.emit(options, {**row, "kind": "engine", "start_s": start_s, "facts": facts})
    count = max([*batches, options.logprob_prompts])
    prompts = latency.make_prompts(options.model, count, options.input)
    if options.logprob_prompts:
        measured = logprobs(llm, prompts[: options.logprob_prompts], options.output)
        latency.emit(options, {**row, "kind": "logprobs", **measured})
    for batch in batches:
        measured = latency.latency(timed(llm), prompts[:batch], options.output, options.repeats)
        latency.emit(options, {**row, "kind": "latency", "batch": batch, **measured})
    for batch in sorted({min(batches), max(batches)}):
        counted = kernels(llm, prompts[:batch])
        latency.emit(options, {**row, "kind": "kernels", "batch": batch, **counted})
    faults = [fault for fault in llm.collective_rpc("check_allnorm") if fault]
    if faults:
        raise SystemExit(f"ranks recorded faults: {faults}")


def generate(
    llm: Any, prompts: list[list[int]], tokens: int, **more: Any
) -> tuple[float, list[Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    began = time.perf_counter()
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    return time.perf_counter() - began, outputs


def timed(llm: Any) -> latency.Generate:
    """Returns a `latency.Generate` for this engine."""

    def call(prompts: list[list[int]], tokens: int) -> latency.Generation:
        seconds, outputs = generate(llm, prompts, tokens)
        made = [list(output.outputs[0].token_ids) for output in outputs]
        return latency.Generation(seconds, made, decode_seconds(outputs))

    return call


def decode_seconds(outputs: list[Any]) -> float | None:
    """Returns the time from the last request's first token to the last token, by vLLM's clock."""
    stats = [output.metrics for output in outputs]
    if any(getattr(one, "last_token_ts", 0.0) <= 0.0 for one in stats):
        return None
    last: float = max(one.last_token_ts for one in stats)
    return last - max(one.first_token_ts for one in stats)


def logprobs(llm: Any, prompts: list[Any], tokens: int) -> dict[str, Any]:
    """Returns logprobs of prompt tokens and of generated tokens, one prompt at a time."""
    of_prompts, generated, of_generated = [], [], []
    for prompt in prompts:
        _, (output,) = generate(llm, [prompt], tokens, prompt_logprobs=0, logprobs=0)
        given = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        of_prompts.append([scores[token].logprob for token, scores in given])
        completion = output.outputs[0]
        generated.append(list(completion.token_ids))
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        of_generated.append([scores[token].logprob for token, scores in chosen])
    return {"prompt": of_prompts, "tokens": generated, "generated": of_generated}


def kernels(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Counts rank 0's reductions and norms in five steps, by kernel.

    Uses only the first token of each prompt, so that the prefill step is as large as the decode
    steps.
    """
    llm.collective_rpc("start_trace")
    generate(llm, [prompt[:1] for prompt in prompts], 5)
    return latency.kernel_counts(llm.collective_rpc("stop_trace")[0], passes=5)


# ---- all arms, and the summary ------------------------------------------------------------------


def missing(arm: str) -> str:
    """Returns why an arm cannot run here, or ""."""
    if arm == "default" and importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python, which vLLM's package requires, is not installed"
    return ""


def run_all(options: argparse.Namespace) -> int:
    """Runs every arm in a separate process; returns the exit code."""
    prefix = ON_A_HOST if options.hosts > 1 else ()
    script = HERE / "vllm_latency.py"
    return latency.run_arms(options, script, ARMS, environment, missing, prefix)[1]


if __name__ == "__main__":
    parsed = arguments()
    if parsed.arm:
        run_arm(parsed)
    else:
        sys.exit(run_all(parsed))
