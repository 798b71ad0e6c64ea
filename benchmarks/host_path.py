"""docs/performance.md: the host time of a call before its launch; needs no GPU.

The library's function is replaced by one that does nothing. The rest is measured: checks, lookup of
the prepared call, allocation of results, filling in addresses, and the call from Python to C. Each
figure is the minimum over many runs of 50 calls, because slower runs were interrupted.

    python benchmarks/host_path.py [cpu|cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import shlex
import sys
import timeit

import torch

import allnorm
from allnorm.cli import output
from allnorm.core import _native
from allnorm.testing import run_ranks

_RUNS, _CALLS = 400, 50
_NUM_TOKENS, _HIDDEN_SIZE = 4, 4096


def time_calls(rank: int, world_size: int, device: str) -> dict[str, float]:
    """Returns the time per call in microseconds, for each kind of call."""
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    x = torch.ones(_NUM_TOKENS, _HIDDEN_SIZE, dtype=torch.bfloat16, device=where)
    out, residual_out = torch.empty_like(x), torch.empty_like(x)
    residual, weight = torch.empty_like(x), torch.ones(_HIDDEN_SIZE, dtype=x.dtype, device=where)
    quant = allnorm.Fp8PerGroup(128)
    # q and k are columns of one matrix, as in attention.
    q, k = torch.ones(_NUM_TOKENS, 1536, dtype=x.dtype, device=where).split((1024, 512), -1)
    q_weight, k_weight = torch.ones_like(q[0]), torch.ones_like(k[0])
    # A stand-in that does nothing: it compares two words, which always differ, and returns 0
    # (success).
    nothing = ctypes.CDLL(None).pthread_equal
    nothing.argtypes, nothing.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int32
    _native.library(device).run = nothing
    with allnorm.Communicator(device=where) as comm:
        calls = {
            "all_reduce": lambda: comm.all_reduce(x),
            "all_reduce_add_rms_norm": lambda: comm.all_reduce_add_rms_norm(
                x, residual, weight, 1e-6
            ),
            "all_reduce_add_rms_norm, out= and residual_out=": lambda: comm.all_reduce_add_rms_norm(
                x, residual, weight, 1e-6, out=out, residual_out=residual_out
            ),
            "all_reduce_add_rms_norm, in place": lambda: comm.all_reduce_add_rms_norm(
                x, residual, weight, 1e-6, out=x, residual_out=residual
            ),
            "all_reduce_add_rms_norm_quant": lambda: comm.all_reduce_add_rms_norm_quant(
                x, residual, weight, 1e-6, quant
            ),
            "rms_norm_sharded of two tensors": lambda: comm.rms_norm_sharded(
                (q, k), (q_weight, k_weight), 1e-6
            ),
            "rms_norm_sharded of two tensors, in place": lambda: comm.rms_norm_sharded(
                (q, k), (q_weight, k_weight), 1e-6, out=(q, k)
            ),
            "torch.ops.allnorm.all_reduce_add_rms_norm": (
                lambda: torch.ops.allnorm.all_reduce_add_rms_norm(
                    x, residual, weight, 1e-6, 0.0, "rounded", comm.name
                )
            ),
            "two results alone, torch.empty_like": lambda: (
                torch.empty_like(x),
                torch.empty_like(residual),
            ),
        }
        found = {}
        for name, call in calls.items():
            timeit.timeit(call, number=_CALLS)
            runs = [timeit.timeit(call, number=_CALLS) / _CALLS * 1e6 for _ in range(_RUNS)]
            found[name] = min(runs)
    return found


def main() -> None:
    """Prints a table, and appends one row per kind of call to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=pathlib.Path, help="append the results to this file")
    options = parser.parse_args()
    ranks = run_ranks(time_calls, 2, device=options.device, args=(options.device,))
    best = {name: min(rank[name] for rank in ranks) for name in ranks[0]}
    title = f"Host time of a call without its launch, {options.device}"
    rows = [(name, f"{us:.2f}") for name, us in best.items()]
    output.console().print(output.FittedTable(title, ("call", "us"), rows))
    shape = {"num_tokens": _NUM_TOKENS, "hidden_size": _HIDDEN_SIZE, "dtype": "bfloat16"}
    command = shlex.join(["python", *sys.argv])
    known = output.conditions(options.device, **shape, world_size=2) | {"command": command}
    output.append_json_lines(
        options.json, [{**known, "call": name, "host_us": us} for name, us in best.items()]
    )


if __name__ == "__main__":
    main()
