"""Peers that never come, die, or come with another call: bounded waits and named errors."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_helpers import Case, device, on

import allnorm
from allnorm.testing import RankPool

TIMEOUT = datetime.timedelta(seconds=1.5)
# Beyond the timeout itself: polling granularity, a busy machine.
SLACK_SECONDS = 10.0


def synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def run_and_check(c: allnorm.Communicator, call: Callable[[], object]) -> None:
    """On CPU the call raises, on CUDA check() does once the kernel has ended."""
    call()
    synchronize()
    c.check()


def faulty_call(
    c: allnorm.Communicator, case: Case
) -> tuple[allnorm.PeerTimeoutError, float, torch.Tensor, torch.Tensor]:
    """A call that must fail: the error, the seconds it took, and what its outputs hold."""
    out, residual_out = (torch.zeros(case.shape, dtype=case.dtype, device=c.device) for _ in "ab")
    synchronize()
    start = time.monotonic()
    with pytest.raises(allnorm.PeerTimeoutError) as caught:
        run_and_check(c, lambda: case.run(c, out=out, residual_out=residual_out))
    seconds = time.monotonic() - start
    synchronize()
    return caught.value, seconds, out, residual_out


def assert_poisoned(c: allnorm.Communicator, case: Case) -> None:
    """After a fault: check() and the next calls raise at once, each time."""
    for _ in range(2):
        with pytest.raises(allnorm.PeerTimeoutError):
            c.check()
        start = time.monotonic()
        with pytest.raises(allnorm.PeerTimeoutError):
            case.run(c)
        assert time.monotonic() - start < TIMEOUT.total_seconds() / 2
    c.close()


def absent_peer(rank: int, world_size: int, algorithm: str, die: bool) -> dict[str, object] | None:
    absent = world_size - 1
    case = Case((5, 512), algorithm=algorithm)
    c = allnorm.Communicator(device=device(), timeout=TIMEOUT)
    for call in range(3):
        case.but(call=call).check(c)
    dist.barrier()
    if rank == absent:
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    error, seconds, out, residual_out = faulty_call(c, case)
    assert torch.isnan(out).all(), "the outputs of a failed call are NaN"
    assert torch.isnan(residual_out).all(), "the outputs of a failed call are NaN"
    assert_poisoned(c, case)
    # The process stays usable: a new communicator over the healthy ranks works.
    survivors = list(range(absent))
    group = dist.new_group(survivors, use_local_synchronization=True)
    with allnorm.Communicator(group=group, device=device(), timeout=TIMEOUT) as healthy:
        case.but(algorithm="auto").check(healthy)
        assert healthy.check() is None
    return {"error": error, "seconds": seconds}


def assert_names_the_absent(pool: RankPool, results: list[dict[str, object] | None]) -> None:
    absent = pool.world_size - 1
    assert results[absent] is None
    for rank, result in enumerate(results[:absent]):
        assert result is not None
        error, seconds = result["error"], result["seconds"]
        assert isinstance(error, allnorm.PeerTimeoutError)
        assert isinstance(seconds, float)
        # Survivors may wait for each other first, but nobody blames himself.
        assert error.rank == rank
        assert error.peer != rank
        assert error.expected != error.seen
        assert f"rank {rank}" in str(error)
        assert f"rank {error.peer}" in str(error)
        assert "5x512" in str(error)
        assert seconds >= TIMEOUT.total_seconds() * 0.9
        assert seconds < TIMEOUT.total_seconds() + SLACK_SECONDS
    blamed = {result["error"].peer for result in results[:absent] if result}  # type: ignore[attr-defined]
    assert absent in blamed


@on(cpu=(2, 3), gpu=(2, 4))
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_a_peer_that_never_comes(pool: RankPool, algorithm: str) -> None:
    assert_names_the_absent(pool, pool.run(absent_peer, algorithm, False, timeout=60))


@on(cpu=(3,), gpu=(3,))
def test_a_peer_that_is_killed(pool: RankPool) -> None:
    results = pool.run(absent_peer, "two_shot", True, timeout=60, may_die=[2])
    assert_names_the_absent(pool, results)
    left = [name for name in os.listdir("/dev/shm") if name.startswith("allnorm-")]
    mine = [name for name in left if name.split("-")[1] == str(os.getpid())]
    assert not mine


DIVERGENCES = {
    "num_tokens": {"shape": (4, 512)},
    "hidden_size": {"shape": (3, 1024)},
    "dtype": {"dtype": torch.float16},
    "numerics": {"numerics": "vllm"},
    "residual": {"residual": False},
    "algorithm": {"algorithm": "two_shot"},
}


def diverging(rank: int, world_size: int, change: dict[str, object]) -> tuple[str, str, str]:
    case = Case((3, 512), algorithm="one_shot")
    mine = case.but(**change) if rank == 0 else case
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        case.check(c)
        error, _, _, _ = faulty_call(c, mine)
        assert_poisoned(c, case)
    with allnorm.Communicator(device=device()) as fresh:
        case.check(fresh)
    return type(error).__name__, error.expected, error.seen


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("what", DIVERGENCES)
def test_diverging_calls_are_named(pool: RankPool, what: str) -> None:
    results = pool.run(diverging, DIVERGENCES[what], timeout=60)
    for kind, expected, seen in results:
        assert kind == "PeerDivergedError"
        assert expected != seen
    if what == "num_tokens":
        assert "4x512" in results[0][1]
        assert "3x512" in results[0][2]
        assert "4x512" in results[1][2]


def diverging_op(rank: int, world_size: int) -> str:
    case = Case((3, 512))
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        case.check(c)
        plain, fused = c.all_reduce, case.but(algorithm="one_shot").run
        with pytest.raises(allnorm.PeerTimeoutError) as caught:
            run_and_check(
                c,
                lambda: plain(case.x(rank), algorithm="one_shot") if rank == 0 else fused(c),
            )
    with allnorm.Communicator(device=device()) as fresh:
        case.check(fresh)
    return f"{caught.value.expected} / {caught.value.seen}"


@on(cpu=(2, 3), gpu=(2, 4))
def test_another_operation(pool: RankPool) -> None:
    texts = pool.run(diverging_op, timeout=60)
    assert all("all_reduce" in text for text in texts)


def one_more_call(rank: int, world_size: int) -> None:
    """A rank that makes a call too few is waited for, and no later call is taken for it."""
    case = Case((3, 512), algorithm="one_shot")
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        case.check(c)
        if rank == 0:
            error, _, _, _ = faulty_call(c, case)
            assert error.peer == 1
    dist.barrier()
    with allnorm.Communicator(device=device()) as fresh:
        case.check(fresh)


@on(cpu=(2,), gpu=(2,))
def test_one_call_too_few(pool: RankPool) -> None:
    pool.run(one_more_call, timeout=60)


def late_but_in_time(rank: int, world_size: int) -> None:
    case = Case((3, 512))
    with allnorm.Communicator(device=device(), timeout=datetime.timedelta(seconds=30)) as c:
        for call in range(3):
            if rank == call % world_size:
                time.sleep(0.7)  # long after every spin has given way to sleep
            case.but(call=call).check(c)


@on(cpu=(2, 3), gpu=(2,))
def test_a_late_peer_is_waited_for(pool: RankPool) -> None:
    pool.run(late_but_in_time)


def test_errors_survive_pickling() -> None:
    import pickle

    error = allnorm.PeerTimeoutError("text", rank=1, peer=2, op=3, expected="a", seen="b")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is allnorm.PeerTimeoutError
    assert str(copy) == "text"
    assert (copy.rank, copy.peer, copy.op, copy.expected, copy.seen) == (1, 2, 3, "a", "b")
