"""Latency of SGLang offline, tensor parallel, with its own reductions and with allnorm.

Runs a dense model with the dimensions of a configuration and random weights. Measures time to first
token, time per output token, greedy tokens and logprobs, the number of fused norms, and the
reductions that ran, counted by kernels in a profile. Each arm is a separate engine in a separate
process.

    python benchmarks/engines/sglang_latency.py --model DIR --tp 2 --json rows.jsonl

DIR must have a config.json; weights are not read. Arms:

    default   SGLang as installed, with its fusion: FlashInfer's kernel, without NVLink multicast
    unfused   SGLang without that fusion
    nccl      like unfused, with reductions by NCCL
    allnorm   SGLang with this package's plugin

The fusion's backend is always `trtllm`, because other backends may use NVLink multicast.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import latency
import sglang_worker

ARMS = ("default", "unfused", "nccl", "allnorm")
PACKAGES = ("sglang", "sglang-kernel", "torch", "allnorm", "flashinfer-python")
_TRACED_TOKENS = 5


def arguments() -> argparse.Namespace:
    parser = latency.parser(__doc__.split("\n\n")[0], ARMS, "default,unfused,allnorm")
    parser.add_argument("--attention", default="triton", help="SGLang's attention backend")
    return parser.parse_args()


def environment(arm: str) -> dict[str, str]:
    """Returns the environment of an arm."""
    return latency.environment(
        "SGLANG_PLUGINS", {} if arm == "allnorm" else {"SGLANG_PLUGINS": "none"}
    )


class Engine:
    """SGLang's engine, with a method to call functions on its ranks."""

    def __init__(self, options: argparse.Namespace, batches: list[int], folder: str) -> None:
        os.environ["SGLANG_LATENCY_DIR"] = folder  # inherited by the engine's processes
        import sglang

        most = max(batches)
        settings: dict[str, Any] = {
            "model_path": options.model,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "random_seed": 0,
            "tp_size": options.tp,
            "disable_custom_all_reduce": options.arm == "nccl",
            "enforce_disable_flashinfer_allreduce_fusion": options.arm in ("unfused", "nccl"),
            "flashinfer_allreduce_fusion_backend": "trtllm",
            "attention_backend": options.attention,
            "sampling_backend": "pytorch",
            "disable_radix_cache": True,
            "context_length": max(1024, options.input + options.output + 16),
            "max_running_requests": most,
            "chunked_prefill_size": max(2048, most * options.input),
            "cuda_graph_bs_decode": latency.graph_sizes(batches),
            "cuda_graph_bs_prefill": sorted({batch * options.input for batch in batches}),
            "mem_fraction_static": options.memory,
            "custom_weight_loader": list(sglang_worker.LOADERS),
            "enable_metrics": True,  # provides token times
            "log_level": "info",
        }
        if options.layers:
            settings["json_model_override_args"] = json.dumps({"num_hidden_layers": options.layers})
        self._folder = pathlib.Path(folder)
        self._engine = sglang.Engine(**(settings | json.loads(options.engine)))

    def generate(self, prompts: list[list[int]], tokens: int) -> latency.Generation:
        """Generates greedily."""
        began = time.perf_counter()
        outputs = self._outputs(prompts, tokens)
        seconds = time.perf_counter() - began
        made = [list(output["output_ids"]) for output in outputs]
        return latency.Generation(seconds, made, decode_seconds(outputs))

    def logprobs(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Returns logprobs of prompt tokens and of generated tokens, one prompt at a time."""
        found: dict[str, Any] = {"prompt": [], "tokens": [], "generated": []}
        for prompt in prompts:
            (output,) = self._outputs([prompt], tokens, return_logprob=True, logprob_start_len=0)
            given = output["meta_info"]["input_token_logprobs"][1:]  # the first token has none
            found["prompt"].append([logprob for logprob, *_ in given])
            found["tokens"].append(list(output["output_ids"]))
            chosen = output["meta_info"]["output_token_logprobs"]
            found["generated"].append([logprob for logprob, *_ in chosen])
        return found

    def _outputs(self, prompts: list[list[int]], tokens: int, **more: Any) -> list[dict[str, Any]]:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        made: list[dict[str, Any]] = self._engine.generate(
            input_ids=prompts, sampling_params=sampling, **more
        )
        return made

    def on_ranks(self, function: str) -> None:
        """Calls a function of sglang_worker.py on every rank."""
        done, message = self._engine.update_weights_from_tensor([], f"sglang_worker.{function}")[:2]
        if not done:
            raise RuntimeError(f"{function}: {message}")

    def found(self, kind: str) -> list[Any]:
        """Reads the files of the ranks, in rank order."""
        paths = sorted(self._folder.glob(f"{kind}-*.json"), key=lambda p: int(p.stem[-1]))
        return [json.loads(path.read_text()) for path in paths]

    def kernels(self, prompt: list[int]) -> dict[str, Any]:
        """Counts rank 0's reductions and norms, by kernel, in a prefill and its decode steps."""
        self.on_ranks("start_trace")
        self.generate([prompt], _TRACED_TOKENS)
        self.on_ranks("stop_trace")
        # The overlap scheduler starts one more step before it sees the last token.
        ahead = 0 if self._engine.server_args.disable_overlap_schedule else 1
        return latency.kernel_counts(self.found("trace")[0], _TRACED_TOKENS + ahead)

    def shutdown(self) -> None:
        """Stops the engine's processes."""
        self._engine.shutdown()


def decode_seconds(outputs: list[dict[str, Any]]) -> float | None:
    """Returns the time from the end of the last prefill to the last token, as SGLang reports it."""
    times = [output["meta_info"] for output in outputs]
    if any(not {"prefill_finished_time", "request_finished_ts"} <= one.keys() for one in times):
        return None
    last: float = max(one["request_finished_ts"] for one in times)
    return last - max(one["prefill_finished_time"] for one in times)


def run_arm(options: argparse.Namespace, folder: str) -> None:
    """Builds the engine, measures its latency and appends rows."""
    batches = [int(b) for b in options.batch.split(",")]
    began = time.perf_counter()
    engine = Engine(options, batches, folder)
    row = latency.row_of(options, PACKAGES)
    engine.on_ranks("fill_weights")
    start_s = round(time.perf_counter() - began, 1)
    count = max([*batches, options.logprob_prompts])
    prompts = latency.make_prompts(options.model, count, options.input)
    for batch in batches:
        measured = latency.latency(
            engine.generate, prompts[:batch], options.output, options.repeats
        )
        latency.emit(options, {**row, "kind": "latency", "batch": batch, **measured})
    engine.on_ranks("facts")
    facts = engine.found("facts")
    latency.emit(options, {**row, "kind": "engine", "start_s": start_s, "facts": facts[0]})
    faults = [rank["fault"] for rank in facts if rank["fault"]]
    latency.emit(options, {**row, "kind": "kernels", **engine.kernels(prompts[0])})
    if options.logprob_prompts:
        measured = engine.logprobs(prompts[: options.logprob_prompts], options.output)
        latency.emit(options, {**row, "kind": "logprobs", **measured})
    engine.shutdown()
    if faults:
        raise SystemExit(f"ranks recorded faults: {faults}")


def run_all(options: argparse.Namespace) -> int:
    """Runs every arm in a separate process; returns the exit code."""
    rows, code = latency.run_arms(options, pathlib.Path(__file__), ARMS, environment)
    for row in rows:
        if row["kind"] == "engine":
            print(f"[{row['arm']}] {row['facts']['sites']} norms fused; {row['facts']['allnorm']}")
    sums = {(r["batch"], r["arm"]): r["tokens_sha"] for r in rows if r["kind"] == "latency"}
    for batch in sorted({batch for batch, _ in sums}):
        found = {arm: sums[batch, arm] for arm in ARMS if (batch, arm) in sums}
        print(f"tokens of batch {batch}: {'equal' if len({*found.values()}) == 1 else found}")
    return code


if __name__ == "__main__":
    parsed = arguments()
    if parsed.arm:
        with tempfile.TemporaryDirectory() as scratch:
            run_arm(parsed, scratch)
    else:
        sys.exit(run_all(parsed))
