"""Fault tests: one rank fails, and its peers must raise the right error in time.

`run` starts the ranks and provokes each fault; `provoke` is the function that runs on each rank.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import allnorm
from allnorm import reference
from allnorm.errors import PeerDivergedError, PeerTimeoutError
from allnorm.islands import Islands, of_size
from allnorm.names import BETWEEN_ISLANDS
from allnorm.testing import (
    OnMessage,
    RankError,
    RankPool,
    all_inputs,
    report,
    same_bits,
    shared_input,
)
from allnorm.testing.in_time import used_communicators
from allnorm.verify.case import Case, Results
from allnorm.verify.unlike_norms import squares_of

SLACK_SECONDS = 1.0  # time to notice a fault, after the timeout or after an exit
_RUN_SECONDS = 120.0
_SHARED_MEMORY = Path("/dev/shm")
_WORKSPACE_BYTES = 4 << 20
# Repeated calls alternate between these inputs, so that stale memory does not look like a result.
_IN_TURN = (0, 1)
_GOOD_CALLS = 3
_LATE_SECONDS = 5.0  # how long after the timeout a fault counts as unnoticed
_POLL_SECONDS = 1e-3
_KILL_AFTER_SECONDS = 0.2  # how long a rank makes calls before it is killed
# Communicators of a rank that skips a call. They stay open, because closing them would tell the
# peers that the rank left.
_kept: list[allnorm.Communicator] = []


_ONE_SHOT = Case((24, 1024), algorithm="one_shot")
_TWO_SHOT = replace(_ONE_SHOT, algorithm="two_shot")
ALGORITHMS = {
    "one_shot": _ONE_SHOT,
    "two_shot": _TWO_SHOT,
    "sharded": replace(_TWO_SHOT, sharded=True),
    "quantized": replace(_TWO_SHOT, quant=allnorm.Fp8PerGroup(128)),
    "own rows": replace(_TWO_SHOT, sharded=True, gather=False),
    "float32 residual": replace(_ONE_SHOT, float32_residual=True),
    "slices": replace(_ONE_SHOT, op="rms_norm_sharded"),
    "streams": replace(_ONE_SHOT, op="all_reduce_hyper_connection"),
    "streams, two_shot": replace(_TWO_SHOT, op="all_reduce_hyper_connection"),
}
CALLS_BETWEEN_ISLANDS = {
    "hierarchical": replace(_ONE_SHOT, algorithm="hierarchical"),
    "sharded": replace(_ONE_SHOT, algorithm="hierarchical", sharded=True),
    "quantized": replace(ALGORITHMS["quantized"], algorithm="hierarchical"),
    "own rows": replace(ALGORITHMS["own rows"], algorithm="hierarchical"),
    "slices": replace(ALGORITHMS["slices"], algorithm="unfused"),
    "streams": replace(ALGORITHMS["streams"], algorithm="hierarchical"),
}
_PLAIN = {"sharded": False, "gather": True, "quant": None, "float32_residual": False}
# The fields that a rank changes in its call to diverge from its peers.
DIVERGENCES: dict[str, dict[str, Any]] = {
    "different num_tokens": {"shape": (23, 1024)},
    "different hidden_size": {"shape": (24, 2048)},
    "different dtype": {"dtype": torch.float16},
    "different op: all_reduce": {**_PLAIN, "op": "all_reduce"},
    "different op: all_gather_rows": {**_PLAIN, "op": "all_gather_rows", "algorithm": "auto"},
    "different op: rms_norm_sharded": {**_PLAIN, "op": "rms_norm_sharded", "algorithm": "auto"},
    "different op: all_reduce_hyper_connection": {**_PLAIN, "op": "all_reduce_hyper_connection"},
    "different algorithm": {},
    "sharded, others not": {"sharded": True},
    "own rows, others all": {"gather": False},
    "different rounding mode": {"numerics": "vllm"},
    "no residual": {"residual": False},
    "quantized per token": {"quant": allnorm.Fp8PerToken()},
    "groups of 64": {"quant": allnorm.Fp8PerGroup(64)},
    "different scale_format": {"quant": allnorm.Fp8PerGroup(128, scale_format="ue8m0")},
    "not quantized": {"quant": None},
    "different eps": {"eps": 1e-5},
    "different weight_bias": {"weight_bias": 1.0},
    "different weight dtype": {"float32_weight": True},
    "different residual dtype": {"float32_residual": True},
    "different number of streams": {"streams": 3},
}
DEATHS = ("killed", "killed between its calls", "exits")
_ELSEWHERE = "calls on another communicator"
ABSENCES = ("never comes", "stopped (SIGSTOP)", _ELSEWHERE)
_OTHER_ALGORITHM = {
    "one_shot": "two_shot",
    "two_shot": "one_shot",
    "hierarchical": "unfused",
}
_OF_SLICES = (
    *(
        "different num_tokens",
        "different hidden_size",
        "different dtype",
        "different rounding mode",
    ),
    *("different op: all_reduce", "different op: all_gather_rows", "different eps"),
    *("different weight_bias", "different weight dtype"),
)
_OF_STREAMS = (
    *("different num_tokens", "different hidden_size", "different dtype", "different algorithm"),
    *("different op: all_reduce", "different op: all_gather_rows"),
    *("different op: rms_norm_sharded", "different residual dtype", "different number of streams"),
)
_QUANTIZED_ONLY = ("groups of 64", "different scale_format", "not quantized")


Row = dict[str, Any]
_WORDS = {
    "PeerDivergedError": "diverged",
    "PeerDiedError": "process ended",
    "PeerLeftError": "left",
    "PeerTimeoutError": "timeout",
}


def run(
    world_size: int,
    device: str,
    timeout_s: float,
    words: tuple[str, ...] = (),
    share_gpus: bool = False,
    on_message: OnMessage = lambda rank, message: None,
    island_size: int = 0,
) -> list[Row]:
    """Provokes every fault with every algorithm it applies to; the last rank fails.

    If `words` is not empty, only faults whose names contain one of these words run. `on_message`
    takes a rank and its progress: `text`, `done` and `total`. If `island_size` is not 0, ranks form
    islands of that size.

    Returns:
        A row per fault and algorithm: `fault`, `algorithm`, `seconds` (of the slowest rank), `saw`
        (as text), `problems` (violations of the contract), and `ranks` (what each of them saw).
    """
    names = [*DIVERGENCES, *ABSENCES, *DEATHS]
    calls = CALLS_BETWEEN_ISLANDS if island_size else ALGORITHMS
    cases = [
        (fault, algorithm)
        for fault in names
        for algorithm, call in calls.items()
        if applies(fault, call) and (not words or any(word in fault for word in words))
    ]
    rows = []
    with RankPool(world_size, device, timeout=_RUN_SECONDS, share_gpus=share_gpus) as pool:
        for done, (fault, algorithm) in enumerate(cases):
            on_message(0, {"text": f"{fault}, {algorithm}", "done": done, "total": len(cases)})
            rows.append(_provoke(pool, fault, algorithm, timeout_s, island_size))
    return rows


def _provoke(pool: RankPool, fault: str, algorithm: str, timeout_s: float, island_size: int) -> Row:
    culprit = pool.world_size - 1
    may_die = [culprit] if fault in DEATHS else []
    pids: set[int] = set()
    row: Row = {"fault": fault, "algorithm": algorithm, "timeout_s": timeout_s}
    try:
        arguments = (pool.device, fault, algorithm, timeout_s, island_size)
        seen = pool.run(
            provoke, *arguments, may_die=may_die, on_message=lambda _, pid: pids.add(pid)
        )
    except RankError as error:
        return {**row, "seconds": None, "saw": "", "ranks": [], "problems": [str(error)]}
    limit_s = SLACK_SECONDS + (0.0 if fault in DEATHS else timeout_s)
    problems = _problems(seen, fault, culprit, limit_s)
    problems += [f"left behind: {name}" for name in _left_by(pids)]
    ranks = [{"rank": rank, **one} for rank, one in enumerate(seen) if one is not None]
    return {
        **row,
        "seconds": max((one["seconds"] for one in ranks), default=None),
        "saw": _saw(ranks[0]) if ranks else "",
        "ranks": ranks,
        "problems": problems,
    }


def _left_by(pids: Iterable[int]) -> list[str]:
    """Returns the names of shared-memory files that these processes left behind."""
    return sorted(path.name for pid in pids for path in _SHARED_MEMORY.glob(f"allnorm-{pid}-*"))


def _problems(seen: list[Row | None], fault: str, culprit: int, limit_s: float) -> list[str]:
    """Describes how the ranks' observations differ from the expected ones."""
    expected = expected_errors(fault)
    problems = []
    for rank, one in enumerate(seen):
        if one is None:
            if rank != culprit:
                problems.append(f"rank {rank} saw nothing")
            continue
        found = list(one["problems"])
        if one["error"] not in expected:
            found.append(f"{one['error'] or 'nothing'} instead of {' or '.join(expected)}")
        if rank != culprit and one["peer"] != culprit:
            found.append(f"names rank {one['peer']} instead of {culprit}")
        if one["seconds"] > limit_s:
            found.append(f"took {one['seconds']:.2f} s, more than {limit_s:g}")
        problems += [f"rank {rank}: {text}" for text in found]
    return problems


def _saw(one: Row) -> str:
    return f"{_WORDS.get(one['error'], 'nothing')}, names rank {one['peer']}; seen: {one['seen']}"


# ---- what ranks do -------------------------------------------------------------------------------


def applies(fault: str, call: Case) -> bool:
    """Returns whether this fault can be provoked with this call."""
    if fault not in DIVERGENCES:
        # These take seconds, and ranks must be restarted after a death. A quantization or a float32
        # residual changes no wait.
        common = call.quant is None and not call.float32_residual
        if call.op == "all_reduce_hyper_connection" and call.algorithm == "two_shot":
            return fault == "never comes"
        plain = call.gather and call.op == "norm"
        return common and (plain or fault in (*ABSENCES, "killed between its calls"))
    if call.op == "rms_norm_sharded" and fault not in _OF_SLICES:
        return False
    if call.op == "all_reduce_hyper_connection" and fault not in _OF_STREAMS:
        return False
    if fault == "different number of streams":
        return call.op == "all_reduce_hyper_connection"
    if fault == "own rows, others all":
        return call.sharded and call.gather
    if fault == "different algorithm":
        return not call.sharded
    if fault in _QUANTIZED_ONLY:
        return call.quant is not None
    return replace(call, **DIVERGENCES[fault]) != call


def goes_on(fault: str, call: Case) -> bool:
    """Returns whether the communicator stays usable: ranks compare such calls before they run."""
    return fault in DIVERGENCES and call.algorithm in BETWEEN_ISLANDS


def expected_errors(fault: str) -> tuple[str, ...]:
    """Returns the errors that the peers of a faulty rank may raise."""
    if fault in DIVERGENCES:
        return ("PeerDivergedError",)
    if fault == "exits":  # it closes its communicator first, which peers on CPU notice
        return ("PeerLeftError", "PeerDiedError")
    return ("PeerDiedError",) if fault in DEATHS else ("PeerTimeoutError",)


def provoke(
    rank: int,
    world_size: int,
    device: str,
    fault: str,
    algorithm: str,
    timeout_s: float,
    island_size: int,
) -> dict[str, Any] | None:
    """Provokes a fault on the last rank. Collective. First reports this process's id.

    Returns:
        The error that this rank saw, or None on the faulty rank if it saw none: `error` (its type),
        `message`, `peer`, `seconds` from the failed call until the error, and `problems`
        (violations of the failure contract).
    """
    report(os.getpid())
    culprit = rank == world_size - 1
    call = (CALLS_BETWEEN_ISLANDS if island_size else ALGORITHMS)[algorithm]
    where = torch.device(device)
    timeout = datetime.timedelta(seconds=timeout_s)
    _kept.clear()
    islands = of_size(island_size, world_size)

    def prepare(made: list[allnorm.Communicator]) -> None:
        number = 1 + (fault == _ELSEWHERE)
        made.extend(_communicator(where, timeout, islands=islands) for _ in range(number))
        if not all(_is_right(made[0], call, good) for good in range(_GOOD_CALLS)):
            raise RuntimeError(f"a call gave wrong results before the fault: {call}")

    comms = used_communicators(prepare)
    comm = comms[0]
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    if culprit and fault in DEATHS + ABSENCES:
        _commit(fault, comms, call)
        return None
    mine = _diverging(call, fault) if culprit and fault in DIVERGENCES else call
    # If a rank is killed during repeated calls, the calls before its death succeed.
    seen = _failing_call(comm, mine, timeout_s, repeat=fault == "killed between its calls")
    if goes_on(fault, call):
        seen["problems"] += [] if _is_right(comm, call, 2) else ["the next call gave wrong results"]
    else:
        seen["problems"] += _aftermath(comm, call)
    if fault == "stopped (SIGSTOP)" and rank == 0:
        os.kill(pids[-1], signal.SIGCONT)
    for one in comms:
        one.close()
    seen["problems"] += _fresh(where, fault, call)
    return seen


def _communicator(
    where: torch.device,
    timeout: datetime.timedelta,
    group: dist.ProcessGroup | None = None,
    islands: str | Islands = "auto",
) -> allnorm.Communicator:
    return allnorm.Communicator(group, where, _WORKSPACE_BYTES, timeout=timeout, islands=islands)


def _commit(fault: str, comms: list[allnorm.Communicator], call: Case) -> None:
    """Commits the fault instead of the call."""
    comm = comms[0]
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "killed between its calls":
        kill = threading.Timer(_KILL_AFTER_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
        kill.start()
        inputs = [_inputs(comm, call, number) for number in _IN_TURN]
        for number in itertools.cycle(_IN_TURN):
            _call(comm, call, inputs[number])
    elif fault == "exits":
        comm.close()
        os._exit(0)
    elif fault == "stopped (SIGSTOP)":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == _ELSEWHERE:
        # This rank's own wait fails too; its error does not matter.
        _failing_call(comms[1], call, comm.timeout.total_seconds(), repeat=False)
    _kept.extend(comms)


def _diverging(call: Case, fault: str) -> Case:
    if fault == "different algorithm":
        return replace(call, algorithm=_OTHER_ALGORITHM[call.algorithm])
    if fault == "sharded, others not" and call.algorithm == "one_shot":
        call = replace(call, algorithm="two_shot")
    return replace(call, **DIVERGENCES[fault])


def _failing_call(
    comm: allnorm.Communicator, call: Case, timeout_s: float, repeat: bool
) -> dict[str, Any]:
    """Runs a call that must fail. On CPU it raises; on CUDA, check() raises afterwards.

    With `repeat`, it alternates between two sets of inputs until a call fails.
    """
    numbers = _IN_TURN if repeat else _IN_TURN[:1]
    inputs = [_inputs(comm, call, number) for number in numbers]
    results = _memory_for(comm, call)
    _synchronize(comm)
    error = None
    start = time.monotonic()
    for number in itertools.cycle(numbers):
        start = time.monotonic()
        try:
            _call(comm, call, inputs[number], **results)
            while comm.device.type == "cuda" and not _done(comm):
                comm.check()
                if time.monotonic() - start > timeout_s + _LATE_SECONDS:
                    break
                time.sleep(_POLL_SECONDS)
            comm.check()
        except PeerTimeoutError as caught:
            error = caught
        if error is not None or not repeat:
            break
    seconds = time.monotonic() - start
    if error is None:
        problem = f"nothing was raised within {seconds:.1f} s"
        nothing = {"error": "", "message": "", "peer": -1, "expected": "", "seen": ""}
        return {**nothing, "seconds": seconds, "problems": [problem]}
    _synchronize(comm)
    # On CUDA, divergence is detected separately from the data, all of which may have arrived.
    diverged = isinstance(error, PeerDivergedError)
    expected = _expected(comm, call, inputs[number]) if repeat else None
    if diverged and len(comm.islands) > 1:
        written = [name for name, part in results.items() if bool((part != 0).any())]
        problems = [f"{name} was written" for name in written]
    elif diverged and comm.device.type == "cuda":
        problems = []
    else:
        problems = _not_nan(results, expected)
    return {
        "error": type(error).__name__,
        "message": str(error),
        "peer": error.peer,
        "expected": error.expected,
        "seen": error.seen,
        "seconds": seconds,
        "problems": problems,
    }


def _not_nan(results: Results, expected: Results | None) -> list[str]:
    """Describes results of a failed call that are neither NaN nor equal to `expected`, if given.

    On CUDA, a rank that dies during a call may have sent some of its rows, which are right.
    """
    problems = []
    for name, part in results.items():
        fine = part.float().isnan()
        if expected is not None:
            fine |= part == expected[_RESULT_IN[name]]
        if not bool(fine.all()):
            problems.append(f"{name} is not NaN" + ("" if expected is None else ", and not right"))
    return problems


def _aftermath(comm: allnorm.Communicator, call: Case) -> list[str]:
    """Checks that the next call and check() raise at once; returns the problems."""
    problems = []
    tries: dict[str, Callable[[], object]] = {
        "check()": comm.check,
        "the next call": lambda: _call(comm, call, _inputs(comm, call, 1)),
    }
    for name, attempt in tries.items():
        start = time.monotonic()
        try:
            attempt()
            problems.append(f"{name} did not raise")
        except PeerTimeoutError:
            if time.monotonic() - start > 0.5:
                problems.append(f"{name} took {time.monotonic() - start:.1f} s to raise")
    return problems


def _fresh(where: torch.device, fault: str, call: Case) -> list[str]:
    """Checks that a new communicator of the healthy ranks works; returns the problems."""
    group = None
    if fault in DEATHS + ABSENCES:
        healthy = list(range(dist.get_world_size() - 1))
        if dist.get_rank() not in healthy:
            return []
        group = dist.new_group(healthy, use_local_synchronization=True)
    assert not isinstance(group, int)
    with _communicator(where, datetime.timedelta(seconds=30), group) as comm:
        auto = replace(call, algorithm="auto")  # one rank alone has nothing to exchange
        return [] if _is_right(comm, auto, 7) else ["a new communicator gave wrong results"]


def _done(comm: allnorm.Communicator) -> bool:
    return bool(torch.cuda.current_stream(comm.device).query())


def _synchronize(comm: allnorm.Communicator) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize()


# ---- the calls around a fault --------------------------------------------------------------------

_Inputs = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]
_RESULT_IN = {"out": "normed", "residual_out": "residual_out", "scale_out": "scale"}


def _inputs(comm: allnorm.Communicator, call: Case, number: int) -> _Inputs:
    """Returns all ranks' partial sums, the residual and the weight of call `number`."""
    shape, device = (call.num_tokens, call.hidden_size), comm.device
    weight = shared_input(shape[1:], call.dtype, "weight", device=device)
    return (
        all_inputs(comm.world_size, shape, call.dtype, call=number, device=device),
        shared_input(shape, call.dtype, "residual", call=number, device=device),
        weight.float() if call.float32_weight else weight,
    )


def _call(comm: allnorm.Communicator, call: Case, inputs: _Inputs, **out: Any) -> Results:
    xs, *shared = inputs
    return call.run_on(comm, xs[comm.rank], *shared, **out)


def _expected(comm: allnorm.Communicator, call: Case, inputs: _Inputs) -> Results:
    """Returns the results that the reference expects on this rank."""
    xs, *shared = inputs
    if call.op == "rms_norm_sharded":
        squares = functools.reduce(torch.add, map(squares_of, xs))
        return call.expected_slices(xs[comm.rank], squares, shared[1], comm.world_size)
    expected = call.expected_of(reference.all_reduce(xs, islands=comm.islands), *shared)
    lo, hi = comm.row_shard(call.num_tokens) if call.sharded else (0, call.num_tokens)
    return {
        name: part[lo:hi] if name == "residual_out" or not call.gather else part
        for name, part in expected.items()
    }


def _is_right(comm: allnorm.Communicator, call: Case, number: int) -> bool:
    """Runs the call; returns whether all its results match the reference."""
    inputs = _inputs(comm, call, number)
    expected = _expected(comm, call, inputs)
    got = _call(comm, call, inputs)
    return all(same_bits(part, expected[name]) for name, part in got.items())


def _memory_for(comm: allnorm.Communicator, call: Case) -> Results:
    """Allocates zeros for the call's results that can hold NaN."""
    if call.op == "all_reduce_hyper_connection":
        streams = (call.num_tokens, call.streams, call.hidden_size)
        dtype = torch.float32 if call.float32_residual else call.dtype
        return {"residual_out": torch.zeros(streams, dtype=dtype, device=comm.device)}
    if call.op != "norm":
        shape = (call.num_tokens, call.hidden_size)
        return {"out": torch.zeros(shape, dtype=call.dtype, device=comm.device)}
    expected = _expected(comm, call, _inputs(comm, call, 0))
    names = ("out" if call.quant is None else "scale_out", "residual_out")
    return {name: torch.zeros_like(expected[_RESULT_IN[name]]) for name in names}
