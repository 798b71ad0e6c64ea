"""Runs many random programs and counts programs, sites, fused sites and wrong results.

    python tests/compile_programs.py {graphs,modules,contents} FIRST COUNT [--device cuda]
        [--world-size 2] [--minutes 30]

`graphs` are the programs of test_random.py, `modules` those of test_modules.py, `contents` those of
test_random_contents.py. Each seed is one program. Each invocation starts its own ranks, so several
can run at once. It prints running totals and every program that is wrong or raises, and exits with
1 if there was one.

With `--minutes` it continues with random seeds until the time is over. FIRST is then the seed of
their choice, and COUNT programs follow each.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from limits import HANG_SECONDS
from torch import Tensor

from allnorm.compile import FusionReport
from allnorm.testing import RankPool, spawn

KINDS = {
    "graphs": "compile.test_random",
    "modules": "compile.test_modules",
    "contents": "compile.test_random_contents",
}
AT_ONCE = 50


class WrongError(AssertionError):
    """A fused program computes a different result."""


def compare(
    actual: Sequence[Tensor], expected: Sequence[Tensor], within: float, share: float, what: Any
) -> None:
    """Raises WrongError unless tensors match in dtype, shape and nearly all elements.

    Args:
        actual: the fused program's results, then its inputs, which it may overwrite.
        expected: the original program's results and inputs.
        within: tolerance of an element, relative to the element and to the tensor's median.
        share: fraction of each tensor that must be within the tolerance.
        what: describes the program and its report in the message.
    """
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        for trait in ("dtype", "shape"):
            if getattr(mine, trait) != getattr(theirs, trait):
                raise WrongError(f"{trait} of result {i} of {what}")
        mine, theirs = mine.float(), theirs.float()
        size = max(1.0, float(theirs.nan_to_num(0, 0, 0).abs().median()))
        close = torch.isclose(mine, theirs, rtol=within, atol=within * size, equal_nan=True)
        if float(close.float().mean()) <= share:
            raise WrongError(f"result {i} of {what}")


def count(rank: int, world_size: int, kind: str, seeds: range) -> tuple[Any, list[str]]:
    """Runs programs; returns totals, and the errors of failed programs."""
    one = importlib.import_module(KINDS[kind]).one
    totals: collections.Counter[str] = collections.Counter()
    failures = []
    for seed in seeds:
        try:
            reports: list[FusionReport] | None = one(rank, seed)
        except Exception as error:  # noqa: BLE001 - counted; the other programs still run
            # Compares names, because a program that runs as __main__ has a different class object.
            wrong = type(error).__name__ == WrongError.__name__
            totals["wrong" if wrong else "raised"] += 1
            failures.append(f"seed {seed}, rank {rank}: {traceback.format_exc()}")
            continue
        totals["graphs"] += reports is not None
        totals["sites"] += sum(len(report.sites) for report in reports or ())
        totals["fused"] += sum(len(report.fused) for report in reports or ())
    return totals, failures


def firsts(options: argparse.Namespace, start: float) -> Iterator[int]:
    """Yields the first seed of each round of programs."""
    if not options.minutes:
        yield from range(options.first, options.first + options.count, AT_ONCE)
        return
    choose = random.Random(options.first)
    while time.monotonic() - start < 60 * options.minutes:
        yield choose.randrange(10_000, 1 << 40)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, help="how many")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with random seeds")
    options = parser.parse_args()
    spawn.PRELOADED += ["pytest", "torch._dynamo", "torch._inductor.compile_fx"]
    totals: collections.Counter[str] = collections.Counter()
    end, start = options.first + options.count, time.monotonic()
    share = options.device == "cuda"
    with RankPool(
        options.world_size, options.device, timeout=HANG_SECONDS, share_gpus=share
    ) as pool:
        for first in firsts(options, start):
            seeds = range(first, min(end, first + AT_ONCE))
            if options.minutes:
                seeds = range(first, first + min(AT_ONCE, options.count))
            answers = pool.run(count, options.kind, seeds)
            if any(totals_of != answers[0][0] for totals_of, _ in answers):
                print(f"seeds {seeds}: ranks differ: {[dict(t) for t, _ in answers]}")
                totals["ranks differ"] += 1
            totals += answers[0][0]
            for failure in dict.fromkeys(f for _, failures in answers for f in failures):
                print(failure)
            seconds = time.monotonic() - start
            print(f"{options.kind} to {seeds.stop}: {dict(totals)}, {seconds:.0f} s", flush=True)
    return 1 if totals["wrong"] or totals["raised"] or totals["ranks differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
