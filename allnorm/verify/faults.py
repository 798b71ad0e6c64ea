"""Faults that one rank commits, and what the others see of them."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import allnorm
from allnorm.errors import AllnormError, PeerDivergedError, PeerTimeoutError
from allnorm.testing import report
from allnorm.verify.fault_calls import (
    Call,
    arguments_of,
    check,
    memory_for,
    method_of,
    wanted_of,
)

_WORKSPACE_BYTES = 4 << 20
# Inputs of calls that are repeated: what one leaves in memory is not what the next must give.
_IN_TURN = (0, 1)
_GOOD_CALLS = 3
_LATE_SECONDS = 5.0  # beyond the timeout: then a fault counts as unnoticed
_POLL_SECONDS = 1e-3
_KILL_AFTER_SECONDS = 0.2  # of calls, for a rank that dies among them
# Communicators of a rank that is absent: closing them would tell its peers that it does not come.
_kept: list[allnorm.Communicator] = []


ALGORITHMS = {
    "one_shot": Call(),
    "two_shot": Call("two_shot"),
    "sharded": Call("two_shot", sharded=True),
    "quantised": Call("two_shot", quant=allnorm.Fp8PerGroup(128)),
}
# How a rank makes a call that its peers do not make.
DIVERGENCES: dict[str, dict[str, Any]] = {
    "another num_tokens": {"shape": (23, 1024)},
    "another hidden_size": {"shape": (24, 2048)},
    "another dtype": {"dtype": torch.float16},
    "another op: all_reduce": {"op": "all_reduce", "sharded": False, "quant": None},
    "another op: all_gather_rows": {"op": "all_gather_rows", "quant": None},
    "another algorithm": {},
    "sharded, others not": {"algorithm": "two_shot", "sharded": True},
    "another rounding mode": {"numerics": "vllm"},
    "no residual": {"has_residual": False},
    "quantised per token": {"quant": allnorm.Fp8PerToken()},
    "groups of 64": {"quant": allnorm.Fp8PerGroup(64)},
    "another scale_format": {"quant": allnorm.Fp8PerGroup(128, scale_format="ue8m0")},
    "not quantised": {"quant": None},
    "another eps": {"eps": 1e-5},
    "another weight_bias": {"weight_bias": 1.0},
    "another weight dtype": {"float32_weight": True},
}
DEATHS = ("killed", "killed among its calls", "exits")
_ELSEWHERE = "calls on another communicator"
ABSENCES = ("never comes", "stopped (SIGSTOP)", _ELSEWHERE)
_QUANTISED_ONLY = ("groups of 64", "another scale_format", "not quantised")


def applies(fault: str, algorithm: str) -> bool:
    """Whether a rank can commit it while its peers make that call."""
    call = ALGORITHMS[algorithm]
    if fault not in DIVERGENCES:
        # A rank that dies costs the start of new ones: once for each way that rows travel.
        return call.quant is None
    if fault == "another algorithm":
        return not call.sharded
    if fault in _QUANTISED_ONLY:
        return call.quant is not None
    return replace(call, **DIVERGENCES[fault]) != call


def expected_errors(fault: str) -> tuple[str, ...]:
    """What the peers of a rank that commits it may raise."""
    if fault in DIVERGENCES:
        return ("PeerDivergedError",)
    if fault == "exits":  # closes its communicator first, which on CPU its peers see by itself
        return ("PeerLeftError", "PeerDiedError")
    return ("PeerDiedError",) if fault in DEATHS else ("PeerTimeoutError",)


def provoke(
    rank: int, world_size: int, device: str, fault: str, algorithm: str, timeout_s: float
) -> dict[str, Any] | None:
    """Lets the last rank commit a fault. Collective. Reports the id of this process first.

    Returns:
        What this rank saw, None on a rank that was to blame and has nothing to see: `error` (its
        type), `message`, `peer`, `seconds` from the call that failed until it was known, and
        `problems`: what the failure contract promises and did not hold.
    """
    report(os.getpid())
    culprit = rank == world_size - 1
    call, where = ALGORITHMS[algorithm], torch.device(device)
    timeout = datetime.timedelta(seconds=timeout_s)
    _kept.clear()
    comms = [_communicator(where, timeout) for _ in range(1 + (fault == _ELSEWHERE))]
    comm = comms[0]
    for number in range(_GOOD_CALLS):
        if not check(comm, call, number):
            raise AllnormError(f"a call that all ranks made alike gave wrong results: {call}")
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    if culprit and fault in DEATHS + ABSENCES:
        _commit(fault, comms, call)
        return None
    mine = _diverging(call, fault) if culprit and fault in DIVERGENCES else call
    # A death among calls: those before it succeed.
    seen = _failing_call(comm, mine, timeout_s, repeat=fault == "killed among its calls")
    seen["problems"] += _aftermath(comm, call)
    if fault == "stopped (SIGSTOP)" and rank == 0:
        os.kill(pids[-1], signal.SIGCONT)
    for one in comms:
        one.close()
    seen["problems"] += _fresh(where, fault, call)
    return seen


def _communicator(
    where: torch.device, timeout: datetime.timedelta, group: dist.ProcessGroup | None = None
) -> allnorm.Communicator:
    return allnorm.Communicator(group, where, _WORKSPACE_BYTES, timeout=timeout)


def _commit(fault: str, comms: list[allnorm.Communicator], call: Call) -> None:
    """What the rank to blame does instead of its call."""
    comm = comms[0]
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "killed among its calls":
        kill = threading.Timer(_KILL_AFTER_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
        kill.start()
        arguments = [arguments_of(comm, call, number) for number in _IN_TURN]
        for number in itertools.cycle(_IN_TURN):
            method_of(comm, call)(**arguments[number])
    elif fault == "exits":
        comm.close()
        os._exit(0)
    elif fault == "stopped (SIGSTOP)":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == _ELSEWHERE:
        # Its own wait there ends likewise; what it sees is not the point.
        _failing_call(comms[1], call, comm.timeout.total_seconds(), repeat=False)
    _kept.extend(comms)


def _diverging(call: Call, fault: str) -> Call:
    if fault == "another algorithm":
        return replace(call, algorithm="two_shot" if call.algorithm == "one_shot" else "one_shot")
    return replace(call, **DIVERGENCES[fault])


def _failing_call(
    comm: allnorm.Communicator, call: Call, timeout_s: float, repeat: bool
) -> dict[str, Any]:
    """Makes a call that must fail: on CPU it raises, on CUDA check() does once a kernel has.

    With `repeat`, makes calls with two kinds of inputs in turn until one fails.
    """
    numbers = _IN_TURN if repeat else _IN_TURN[:1]
    arguments = [arguments_of(comm, call, number) for number in numbers]
    results = memory_for(comm, call)
    _synchronize(comm)
    method, error = method_of(comm, call), None
    start = time.monotonic()
    for number in itertools.cycle(numbers):
        start = time.monotonic()
        try:
            method(**arguments[number], **results)
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
    # On CUDA another call is found beside the data, which may all have arrived by then.
    complete = comm.device.type == "cuda" and isinstance(error, PeerDivergedError)
    problems = (
        [] if complete else _not_nan(results, wanted_of(comm, call, number) if repeat else None)
    )
    return {
        "error": type(error).__name__,
        "message": str(error),
        "peer": error.peer,
        "expected": error.expected,
        "seen": error.seen,
        "seconds": seconds,
        "problems": problems,
    }


def _not_nan(results: dict[str, torch.Tensor], wanted: list[torch.Tensor] | None) -> list[str]:
    """What a failed call left that is neither NaN nor, if that is given, as wanted.

    A rank that dies amid a call on CUDA has sent some of its rows: those are right.
    """
    problems = []
    for index, (name, part) in enumerate(results.items()):
        fine = part.float().isnan()
        if wanted is not None:
            fine |= part == wanted[index]
        if not bool(fine.all()):
            problems.append(f"{name} is not NaN" + ("" if wanted is None else ", and not right"))
    return problems


def _aftermath(comm: allnorm.Communicator, call: Call) -> list[str]:
    """The next call and check() raise, at once."""
    problems = []
    tries: dict[str, Callable[[], object]] = {
        "check()": comm.check,
        "the next call": lambda: method_of(comm, call)(**arguments_of(comm, call, 1)),
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


def _fresh(where: torch.device, fault: str, call: Call) -> list[str]:
    """A new communicator over the healthy ranks gives right results."""
    group = None
    if fault in DEATHS + ABSENCES:
        healthy = list(range(dist.get_world_size() - 1))
        if dist.get_rank() not in healthy:
            return []
        group = dist.new_group(healthy, use_local_synchronization=True)
    assert not isinstance(group, int)
    with _communicator(where, datetime.timedelta(seconds=30), group) as comm:
        auto = replace(call, algorithm="auto")  # one rank alone has nothing to exchange
        return [] if check(comm, auto, 7) else ["a new communicator gave wrong results"]


def _done(comm: allnorm.Communicator) -> bool:
    return bool(torch.cuda.current_stream(comm.device).query())


def _synchronize(comm: allnorm.Communicator) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
