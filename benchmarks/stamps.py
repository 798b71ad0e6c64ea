"""Breaks down the time of a call: records when each warp passes certain points of the kernel.

Needs a library that is built with time stamps, which is slightly slower:

    cmake -G Ninja -S . -B build/stamps -DALLNORM_STAMPS=ON -DALLNORM_CUDA_ARCHITECTURES=90-real
    cmake --build build/stamps && cmake --install build/stamps --component runtime --prefix .
    PYTHONPATH=src python benchmarks/stamps.py [TP [RESULTS]]

Calls run in a chain, after an empty kernel, or after a GEMM whose weights sweep the L2 cache. For
each stage it prints the time of the median warp and of the slowest warp of a call, in ns, as
medians over calls, on the first rank. A stage ends when the warp has issued all instructions before
the point. The latency of a load therefore belongs to the stage that first uses it.
"""

from __future__ import annotations

import ctypes
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import run
import torch

import allnorm
from allnorm.bench.arms import Arm
from allnorm.bench.case import NUM_SETS, Case, make_case
from allnorm.bench.clock import Gemm
from allnorm.bench.modes import Mode, Shape
from allnorm.cli import output
from allnorm.core import _native
from allnorm.testing import run_ranks, start_together
from allnorm.testing.rank import device
from allnorm.testing.timing import capture
from allnorm.tune.crossovers import Candidate
from allnorm.tune.run import candidate_arm

SHAPES = (*((tokens, 4096) for tokens in (1, 16, 32, 64, 128, 256, 1024)), (1, 8192), (16, 8192))
CLUSTER_SIZES = (1, 2, 4)
AFTER = ("chain", "empty", "product")
COLUMNS = 7168  # input features (K) of the GEMM
CALLS, FIRST, REPLAYS = 40, 8, 4  # calls per graph; first call that counts; the last replay counts

# StampRecord of csrc/gpu/params.h, and the stage that ends at each Stamp.
STAGES = (
    *("cluster", "preceding grid", "counter", "x, sent", "prefetches issued", "received"),
    *("squares", "stored"),
)
RECORD = numpy.dtype(
    [
        ("entered_ns", numpy.int64),
        ("stored_ns", numpy.int64),
        ("row", numpy.int32),
        ("multiprocessor", numpy.uint32),
        ("cycles", numpy.uint32, len(STAGES) + 1),
    ],
    align=True,
)
MOST_WARPS = 1 << 13  # maximum warps per launch


def stamped_library() -> ctypes.CDLL:
    """Returns the library, which must be built with time stamps."""
    _native.library("cuda")  # raises, with the remedy, if there is no library
    library = ctypes.CDLL(str(_native.library_path("cuda")))
    if not hasattr(library, "allnorm_stamps_to"):
        sys.exit(f"this library has no time stamps: build it as described in {sys.argv[0]}")
    return library


def records_of(calls: Sequence[Callable[[], object]]) -> list[numpy.ndarray[Any, Any]]:
    """Returns the records of each call's warps, from the last replay of a graph of the calls."""
    library = stamped_library()
    memory = torch.zeros(len(calls), MOST_WARPS * RECORD.itemsize, dtype=torch.uint8, device="cuda")
    with capture() as graph:
        for index, call in enumerate(calls):
            library.allnorm_stamps_to(ctypes.c_void_p(memory[index].data_ptr()))
            call()
        library.allnorm_stamps_to(None)
    for _ in range(REPLAYS):
        start_together()
        memory.zero_()
        graph.replay()
        torch.cuda.synchronize()
    found = memory.cpu().numpy()
    noted = [row.view(RECORD) for row in found]
    return [records[records["entered_ns"] != 0] for records in noted]


def stages_of(calls: list[numpy.ndarray[Any, Any]]) -> dict[str, Any]:
    """Returns the nanoseconds of each stage: of the median and the slowest warp of a call."""
    spans, cycles = [], []
    for records in calls:
        lap = records["cycles"]
        spans.append(records["stored_ns"] - records["entered_ns"])
        cycles.append(lap[:, -1] - lap[:, 0])  # modulo 2^32
    ns_per_cycle = float(numpy.concatenate(spans).sum() / numpy.concatenate(cycles).sum())
    medians, slowest, whole, entries = [], [], [], []
    for records in calls:
        laps = numpy.diff(records["cycles"], axis=1) * ns_per_cycle
        medians.append(numpy.median(laps, axis=0))
        slowest.append(laps.max(axis=0))
        whole.append(records["stored_ns"].max() - records["entered_ns"].min())
        entries.append(records["entered_ns"].max() - records["entered_ns"].min())
    starts = [records["entered_ns"].min() for records in calls]

    def middle(values: Any) -> list[int]:
        return [round(float(value)) for value in numpy.median(numpy.array(values), axis=0)]

    return {
        "median_warp_ns": dict(zip(STAGES, middle(medians), strict=True)),
        "slowest_warp_ns": dict(zip(STAGES, middle(slowest), strict=True)),
        "first_entry_to_last_store_ns": round(float(numpy.median(whole))),
        "first_to_last_entry_ns": round(float(numpy.median(entries))),
        "from_call_to_call_ns": round(float(numpy.median(numpy.diff(starts)))),
        "mhz": round(1e3 / ns_per_cycle),
        "warps": len(calls[0]),
    }


def placed(case: Case, after: str, arm: Arm) -> Callable[[int], object]:
    """Returns the arm's call, after a GEMM ("product"), an empty kernel, or in a chain."""
    if after == "product":
        return Gemm(case, COLUMNS).before(arm).call
    if after == "chain":
        return arm.call

    def after_empty(index: int) -> object:
        torch.cuda._sleep(0)
        return arm.call(index)

    return after_empty


def rank_main(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Measures every shape and geometry after each kind of work; returns this rank's rows."""
    stamped_library()
    comm = allnorm.Communicator(device=device(), timeout=20)
    # Only plans of many rows have a link rate; it is equal for all shapes.
    link_gbps = comm.plan(1024, 4096, torch.bfloat16).link_gbps
    rows = []
    for num_tokens, hidden_size in SHAPES:
        shape = Shape(num_tokens, hidden_size)
        for after in AFTER:
            case = make_case(shape, "bfloat16", "rounded", comm.device, rank, world_size, 1)
            for cluster_size in CLUSTER_SIZES:
                candidate = Candidate("one_shot", 0, cluster_size)
                if hidden_size // 8 > 512 * cluster_size:
                    continue  # a block has at most 512 threads
                arm = candidate_arm(comm, case, Mode(), candidate, link_gbps)
                if arm is None:
                    continue
                arm.reset()
                call = placed(case, after, arm)
                calls = [lambda index=i % NUM_SETS, call=call: call(index) for i in range(CALLS)]
                for warm_up in calls[:NUM_SETS]:
                    warm_up()
                noted = records_of(calls)[FIRST:]
                rows.append(
                    {
                        "benchmark": "stamps",
                        "shape": f"{num_tokens}x{hidden_size}",
                        "behind": after,
                        "cluster_size": cluster_size,
                        "rank": rank,
                        **stages_of(noted),
                    }
                )
    comm.close()
    return rows


def main() -> None:
    """Prints a table, and appends each rank's rows to benchmarks/results."""
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    path = run.RESULTS / (sys.argv[2] if len(sys.argv) > 2 else "stamps.jsonl")
    stamped_library()
    ranks = run_ranks(rank_main, world_size, device="cuda", timeout=500)
    command = shlex.join(["python", *sys.argv])
    known = output.conditions("cuda", world_size=world_size) | {"command": command}
    output.append_json_lines(path, itertools.chain(*ranks), known)
    for row in ranks[0]:
        laps = zip(row["median_warp_ns"].items(), row["slowest_warp_ns"].values(), strict=True)
        print(
            f"{row['shape']:>8} {row['behind']:8} {row['cluster_size']} per row:",
            *(f"{stage} {median}/{slowest}" for (stage, median), slowest in laps),
            f"whole {row['first_entry_to_last_store_ns']}",
            f"call to call {row['from_call_to_call_ns']} ns",
            sep=" | ",
        )


if __name__ == "__main__":
    main()
