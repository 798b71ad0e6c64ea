"""Shared code of the latency benchmarks of engines: arms in separate processes, rows, summaries.

TTFT (time to first token) is the time to generate one token. TPOT (time per output token) is the
time from the last sequence's first token to the last token of all, as the engine reports it,
divided by N - 1. If the engine does not report it, TPOT is (time of N tokens - TTFT) / (N - 1),
which is less accurate because the prefill time varies. All times are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import random
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from allnorm.core import _native

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
HERE = pathlib.Path(__file__).resolve().parent


@dataclass(frozen=True)
class Generation:
    """The result of a batch of prompts.

    Attributes:
        seconds: wall time of the whole call.
        tokens: generated tokens per prompt.
        decode_seconds: time from the last prompt's first token to the last token of all, by the
            engine's clock; None if the engine does not report it.
    """

    seconds: float
    tokens: list[list[int]]
    decode_seconds: float | None = None


Generate = Callable[[list[list[int]], int], Generation]
"""Takes prompts and the number of tokens to generate for each."""


def parser(description: str, arms: Sequence[str], default_arms: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of all engines."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--model", required=True, help="folder with a config.json")
    made.add_argument("--tp", type=int, default=2)
    made.add_argument("--arms", default=default_arms, help=", ".join(arms))
    made.add_argument("--arm", help="run only this arm, in this process; used by the script itself")
    made.add_argument("--batch", default="1,8,32,64")
    made.add_argument("--input", type=int, default=128, help="tokens per prompt")
    made.add_argument("--output", type=int, default=64, help="tokens to generate")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument(
        "--logprob-prompts", type=int, default=4, help="prompts to compare logprobs of; 0: none"
    )
    made.add_argument("--layers", type=int, help="number of layers; default: the configuration's")
    made.add_argument(
        "--memory", type=float, default=0.6, help="fraction of each GPU's memory for the engine"
    )
    made.add_argument("--engine", default="{}", help="more arguments of the engine, as JSON")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds per arm")
    made.add_argument("--json", required=True, help="file to append the results to")
    return made


def environment(plugins: str, more: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of an arm's process; `plugins` is the engine's plugin variable.

    Users of the plugin do not set this variable; `more` may set it.
    """
    inherited = {name: value for name, value in os.environ.items() if name != plugins}
    python_path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(python_path)}
    return {**inherited, **NO_MULTICAST, **offline, **more}


def graph_sizes(batches: Sequence[int]) -> list[int]:
    """Returns the batch sizes to capture in CUDA graphs: these and smaller powers of two."""
    most = max(batches)
    return sorted({*batches, *(1 << i for i in range(most.bit_length()))})


def row_of(options: argparse.Namespace, packages: Sequence[str]) -> dict[str, Any]:
    """Returns the conditions that every row of an arm contains."""
    return {
        "arm": options.arm,
        "model": pathlib.Path(options.model).name,
        "layers": options.layers,
        "tp": options.tp,
        "input": options.input,
        "output": options.output,
        "versions": versions(packages),
        "commit": _native.built_commit(),
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command_line() -> str:
    """Returns the command of this process's arm, with file names instead of absolute paths."""
    script, *arguments = sys.argv
    shown = [
        pathlib.Path(each).name if pathlib.Path(each).is_absolute() else each for each in arguments
    ]
    return shlex.join(["python", f"benchmarks/engines/{pathlib.Path(script).name}", *shown])


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Returns the version of each package; None for those that are not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def make_prompts(model: str, count: int, length: int) -> list[list[int]]:
    """Returns random tokens of the model's vocabulary, equal in every run."""
    vocabulary = json.loads((pathlib.Path(model) / "config.json").read_text())["vocab_size"]
    generator = random.Random(1234)
    return [
        [generator.randrange(1000, vocabulary - 1000) for _ in range(length)] for _ in range(count)
    ]


def latency(
    generate: Generate, prompts: list[list[int]], tokens: int, repeats: int
) -> dict[str, Any]:
    """Times the generation of one batch."""
    generate(prompts, min(8, tokens))
    generate(prompts, 1)
    whole, first = [], []
    for _ in range(repeats):
        whole.append(generate(prompts, tokens))
        first.append(generate(prompts, 1).seconds)
    total, ttft = statistics.median(made.seconds for made in whole), statistics.median(first)
    decode = [made.decode_seconds for made in whole if made.decode_seconds is not None]
    reported = len(decode) == len(whole)
    further = statistics.median(decode) if reported else total - ttft
    return {
        "tpot_ms": round(further / (tokens - 1) * 1e3, 4),
        "decode_ms": [round(seconds * 1e3, 2) for seconds in decode] if reported else None,
        "ttft_ms": round(ttft * 1e3, 3),
        "tokens_per_s": round(len(prompts) * tokens / total, 1),
        "total_ms": [round(made.seconds * 1e3, 2) for made in whole],
        "first_ms": [round(seconds * 1e3, 2) for seconds in first],
        "repeats_equal": all(made.tokens == whole[0].tokens for made in whole),
        "tokens_sha": hashlib.sha256(json.dumps(whole[0].tokens).encode()).hexdigest()[:16],
        "tokens": whole[0].tokens,
    }


def kernel_counts(entries: Sequence[Sequence[Any]], passes: int) -> dict[str, Any]:
    """Converts entries of `allnorm.trace` to calls per forward pass and us per call, by kernel."""
    counted = {
        f"{kind}: {what}": [calls / passes, round(time_us / calls, 2)]
        for kind, what, calls, time_us in entries
    }
    return {"passes": passes, "per_pass_and_us": counted}


def emit(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Appends a row to the results file, and prints it without its tokens."""
    with open(options.json, "a") as file:
        file.write(json.dumps(row) + "\n")
    shown = {key: value for key, value in row.items() if key not in ("tokens", "prompt")}
    print(f"[{row['arm']}]", json.dumps(shown)[:1500], flush=True)


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def run_arms(
    options: argparse.Namespace,
    script: pathlib.Path,
    arms: Sequence[str],
    environment: Callable[[str], Mapping[str, str]],
    missing: Callable[[str], str] = lambda _: "",
    prefix: Sequence[str] = (),
) -> tuple[list[dict[str, Any]], int]:
    """Runs every arm in a separate process, and prints a comparison of the arms.

    Args:
        options: options of the command line.
        script: script that runs one arm when called with `--arm`.
        arms: names of all arms.
        environment: returns the environment of an arm's process.
        missing: returns why an arm cannot run here, or "".
        prefix: command to put before an arm's command.

    Returns:
        The rows that were written, and the exit code: 1 if an arm failed.
    """
    start = len(read(options.json)) if os.path.exists(options.json) else 0
    failed = []
    for arm in options.arms.split(","):
        if arm not in arms:
            raise SystemExit(f"--arms {arm}: expected one or more of {', '.join(arms)}")
        if reason := missing(arm):
            print(f"[{arm}] missing: {reason}")
            continue
        command = [*prefix, sys.executable, str(script), *sys.argv[1:], "--arm", arm]
        print("$", " ".join(command), flush=True)
        process = subprocess.Popen(command, env=environment(arm), start_new_session=True)
        try:
            code = process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            code = -1
            print(f"[{arm}] timed out after {options.timeout:.0f} s", flush=True)
        if code:
            failed.append(arm)
        # Surviving workers of a dead engine would keep their GPUs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    rows = read(options.json)[start:] if os.path.exists(options.json) else []
    summarize(rows, arms)
    compare_logprobs(rows, arms)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return rows, 1 if failed else 0


def summarize(rows: list[dict[str, Any]], arms: Sequence[str]) -> None:
    """Prints latencies, relative to the default arm's, and kernels."""
    measured = {(r["arm"], r["batch"]): r for r in rows if r["kind"] == "latency"}
    print(f"\n{'batch':>5} {'arm':8} {'TPOT ms':>9} {'':>8} {'TTFT ms':>9} {'':>8} {'tokens/s':>9}")
    for arm, batch in sorted(measured, key=lambda key: (key[1], arms.index(key[0]))):
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
            batch = f", batch {row['batch']}" if "batch" in row else ""
            print(f"\n[{row['arm']}] calls per forward pass{batch}, us per call")
            for name, (calls, time_us) in row["per_pass_and_us"].items():
                print(f"  {calls:7.1f} {time_us:8.2f}  {name}")


def compare_logprobs(rows: list[dict[str, Any]], arms: Sequence[str]) -> None:
    """Prints the difference between the logprobs of each pair of arms."""
    found = {row["arm"]: row for row in rows if row["kind"] == "logprobs"}
    present = [arm for arm in arms if arm in found]
    for i, arm in enumerate(present):
        for other in present[:i]:
            print(f"\n{other} and {arm}: {distance(found[other], found[arm])}")


def distance(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Describes the difference between the logprobs of two arms, on the same tokens."""
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
        f"at most {max(prompt):.5f}; {same} of {total} generated tokens are equal up to the first "
        f"difference; their logprobs differ by {statistics.mean(decode or [0.0]):.5f} on average"
    )
