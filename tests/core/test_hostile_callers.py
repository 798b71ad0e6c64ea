"""Callers that do what they should not: forks, signals, close() in the middle, threads, limits.

No case hangs beyond its bound, none gives a wrong result, nothing is left in shared memory.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import gc
import multiprocessing
import os
import pathlib
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_helpers import Case, device, on

import allnorm
from allnorm.core import _native, fast_call, watch
from allnorm.testing import RankPool, assert_same_bits

NEVER = datetime.timedelta(hours=2)
# What takes 0.1 s at most on a machine that does nothing else.
LATE_SECONDS = 10.0
CASE = Case((5, 512), algorithm="one_shot")
KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = in_shared_memory()
    yield
    # Other tests run beside these: their names come and go, one that was left stays.
    left, end = in_shared_memory() - before, time.monotonic() + 5
    while left and time.monotonic() < end:
        time.sleep(0.01)
        left &= in_shared_memory()
    assert not left


def in_shared_memory() -> set[pathlib.Path]:
    return set(pathlib.Path("/dev/shm").glob("allnorm-*"))


def make(**arguments: Any) -> allnorm.Communicator:
    c = allnorm.Communicator(device=device(), **{"timeout": NEVER, **arguments})
    for call in range(4):  # from the third time on by the path without Python
        CASE.but(call=call).check(c)
    return c


def run_to_its_end(c: allnorm.Communicator, case: Case) -> None:
    case.run(c)
    synchronize()
    c.check()


def synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def fails_within(
    kind: type[allnorm.PeerTimeoutError], call: Callable[[], Any], times: int
) -> allnorm.PeerTimeoutError:
    """The error of one of so many calls: what a rank published before it left is there."""
    for _ in range(times):
        try:
            call()
        except kind as error:
            return error
    raise AssertionError(f"{times} calls went through")


def kinds_of_calls(c: allnorm.Communicator) -> dict[str, Callable[[], Any]]:
    shard = CASE.own_rows(c, CASE.x(c.rank)).clone()
    quant = CASE.but(quant=allnorm.Fp8PerGroup(128))
    return {
        "repeated": lambda: CASE.run(c),
        "all_reduce": lambda: c.all_reduce(CASE.x(c.rank)),
        "two_shot": lambda: CASE.but(algorithm="two_shot").run(c),
        "quant": lambda: quant.run(c),
        "gather": lambda: c.all_gather_rows(shard, CASE.shape[0]),
        "unfused": lambda: CASE.but(algorithm="unfused").run(c),
    }


# ---- Forks -------------------------------------------------------------------------------------


def in_fork(body: Callable[[], None]) -> None:
    """Runs `body` in a child of fork(); its failure is one here."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            body()
            os.write(into, b"fine")
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(into, f"{type(error).__name__}: {error}"[:4000].encode())
        finally:
            os._exit(0)
    os.close(into)
    text = os.read(out, 4096).decode()
    os.waitpid(pid, 0)
    os.close(out)
    assert text == "fine", text or "the child died"


def assert_refused(calls: dict[str, Callable[[], Any]]) -> None:
    for name, call in calls.items():
        with pytest.raises(allnorm.CommunicatorClosedError, match="fork") as caught:
            call()
        assert str(os.getppid()) in str(caught.value), name


def use_in_fork(c: allnorm.Communicator) -> None:
    assert_refused({"check": c.check, "close": c.close, "enter": c.__enter__})
    if c.device.type == "cpu":  # CUDA itself is not to be touched in a fork
        assert_refused({**kinds_of_calls(c), "plan": lambda: c.plan(5, 512)})
    else:
        assert_refused({"call": lambda: c.all_reduce(KEPT[-1]), "again": lambda: c.plan(5, 512)})
    with pytest.raises(allnorm.CommunicatorClosedError):
        allnorm.communicator.communicator(c.name)
    # Past every check of Python's, as another language would.
    fault = _native.Fault()
    assert (
        c._endpoint._library.comm_check(c._endpoint._handle, _native.ctypes.addressof(fault))
        == _native.CLOSED
    )
    assert "fork" in c._endpoint._library.last_error()
    assert c._endpoint._library.comm_close(c._endpoint._handle) == _native.CLOSED
    assert c._endpoint._library.comm_destroy(c._endpoint._handle) == _native.OK
    gc.collect()


def let_go_in_fork(box: list[allnorm.Communicator]) -> None:
    box.clear()
    gc.collect()


@on(cpu=(2, 3), gpu=(2,))
def test_a_child_of_fork_touches_nothing(rank: int, world_size: int) -> None:
    box = [make()]
    KEPT.append(CASE.x(rank))
    if rank == 0:
        in_fork(lambda: use_in_fork(box[0]))
    if rank == 1:
        in_fork(lambda: let_go_in_fork(box))
        child = multiprocessing.get_context("fork").Process(target=let_go_in_fork, args=(box,))
        # A rank is a daemon, which may have no children.
        with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
            child.start()
        child.join()
        assert child.exitcode == 0
    for call in range(10):
        CASE.but(call=call).check(box[0])
        CASE.but(call=call, algorithm="two_shot").check(box[0])
    assert box[0].check() is None
    box[0].close()
    KEPT.clear()


@on(cpu=(2,))
def test_a_fork_while_a_call_waits(rank: int, world_size: int) -> None:
    """While a thread waits in a call, and so holds the lock."""
    c = make()
    results: list[Any] = []
    if rank == 0:
        thread = threading.Thread(target=lambda: results.append(CASE.run(c)))
        thread.start()
        time.sleep(0.3)
        in_fork(lambda: use_in_fork(c))
        dist.barrier()
        thread.join()
        CASE.compare(c, *results[0])
    else:
        dist.barrier()
        CASE.check(c)
    CASE.check(c)
    c.close()


def own_group_in_fork(rank: int, world_size: int, folder: str) -> None:
    c = make()

    def alone() -> None:
        dist.distributed_c10d._world.pg_map.clear()  # gloo's threads are not here
        dist.distributed_c10d._update_default_pg(None)
        store = dist.FileStore(f"{folder}/{rank}", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        with allnorm.Communicator(device="cpu") as mine:
            assert_same_bits(mine.all_reduce(torch.ones(2, 8)), torch.ones(2, 8))
        assert allnorm.add_rms_norm(torch.ones(2, 8), None, torch.ones(8), 1e-6)[0].shape == (2, 8)

    in_fork(alone)
    CASE.check(c)
    c.close()


@on(cpu=(2,))
def test_a_fork_may_make_its_own(pool: RankPool, tmp_path: pathlib.Path) -> None:
    pool.run(own_group_in_fork, str(tmp_path))


# ---- Signals -----------------------------------------------------------------------------------

needs_library = pytest.mark.skipif(
    not fast_call.available(), reason="built without Python's headers: waits see no signals"
)


@contextlib.contextmanager
def handler(number: int, function: Any) -> Iterator[None]:
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


def send(number: int, after: float) -> Callable[[], float]:
    """Sends this process a signal in a while; the function returned says when it did."""
    sent: list[float] = []

    def fire() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Timer(after, fire).start()
    return lambda: sent[0]


def interrupted(rank: int, world_size: int, kind: str) -> float | str:
    c = make()
    assert c.group is not None
    calls = kinds_of_calls(c)
    dist.barrier()
    if rank == 0:
        with handler(signal.SIGINT, signal.default_int_handler):
            sent = send(signal.SIGINT, 0.3)
            with pytest.raises(KeyboardInterrupt):
                calls[kind]()
        seconds = time.monotonic() - sent()
        with pytest.raises(allnorm.PeerTimeoutError, match="was interrupted"):
            c.check()
        for again in calls.values():
            with pytest.raises(allnorm.PeerTimeoutError, match="was interrupted"):
                again()
        dist.barrier()
        dist.barrier()
        c.close()
        return seconds
    dist.barrier()
    assert c.check() is None, "nobody has needed rank 0"
    start = time.monotonic()
    error = fails_within(allnorm.PeerLeftError, calls[kind], 2)
    assert "was interrupted" in str(error)
    assert error.peer == 0
    assert time.monotonic() - start < LATE_SECONDS
    out = torch.zeros(CASE.shape, dtype=CASE.dtype)
    with pytest.raises(allnorm.PeerLeftError):
        CASE.run(c, out=out)
    assert out.isnan().all()
    dist.barrier()
    c.close()
    return str(error)


@needs_library
@on(cpu=(2, 3))
@pytest.mark.parametrize(
    "kind", ["repeated", "all_reduce", "two_shot", "quant", "gather", "unfused"]
)
def test_ctrl_c_ends_a_wait(pool: RankPool, kind: str) -> None:
    seconds = pool.run(interrupted, kind)[0]
    print(f"{kind}: KeyboardInterrupt {1e3 * seconds:.0f} ms after the signal")
    assert seconds < 1.0


class RaisedError(Exception):
    pass


@needs_library
@on(cpu=(2,))
def test_handlers_that_call(rank: int, world_size: int) -> None:
    """Handlers that only take a note, that call, that close, that check: the wait goes on."""
    c, other = make(), make()
    notes: list[str] = []

    def tries(*_: Any) -> None:
        for name, call in {**kinds_of_calls(c), "close": c.close}.items():
            with pytest.raises(allnorm.AllnormError, match="within a call"):
                call()
            notes.append(f"{name} refused")
        assert c.check() is None
        notes.append("checked")

    for case in (CASE, CASE.but(algorithm="unfused"), CASE):
        notes.clear()
        dist.barrier()
        if rank == 0:
            with handler(signal.SIGALRM, tries):
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                case.check(c)
            assert len(notes) == 8, notes
            assert notes[-1] == "checked"
        else:
            time.sleep(0.6)
            case.check(c)
    # Another communicator is free.
    dist.barrier()
    if rank == 0:
        with handler(signal.SIGALRM, lambda *_: CASE.check(other)):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            CASE.check(c)
    else:
        CASE.check(other)
        CASE.check(c)
    # Signals in quick succession.
    dist.barrier()
    if rank == 0:
        with handler(signal.SIGALRM, lambda *_: notes.append("again")):
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.001)
            CASE.check(c)
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert notes
    else:
        time.sleep(0.5)
        CASE.check(c)
    for each in (c, other):
        assert each.check() is None
        each.close()


@needs_library
@on(cpu=(2,))
def test_a_handler_that_raises_ends_the_wait(rank: int, world_size: int) -> None:
    def fails(*_: Any) -> None:
        raise RaisedError("from the handler")

    c = make()
    dist.barrier()
    if rank == 0:
        with handler(signal.SIGALRM, fails):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(RaisedError, match="from the handler"):
                CASE.run(c)
        assert not c._endpoint._turn.lock.locked()
        with pytest.raises(allnorm.PeerTimeoutError):
            CASE.run(c)
    dist.barrier()
    c.close()
    CASE.check(make())


def stopped(rank: int, world_size: int, pause: float, timeout: float) -> str:
    c = make(timeout=timeout)
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        wake = threading.Timer(pause, os.kill, (pids[1], signal.SIGCONT))
        wake.start()
    try:
        for call in range(3):
            case = CASE.but(call=call)
            results = case.run(c)
            if c.device.type == "cuda":
                torch.cuda.synchronize()
            c.check()
            case.compare(c, *results)
        text = "right"
    except allnorm.PeerTimeoutError as error:
        text = type(error).__name__
    if rank == 0:
        wake.join()
    dist.barrier()
    c.close()
    return text


@on(cpu=(2,), gpu=(2,))
def test_a_peer_that_is_stopped(pool: RankPool) -> None:
    """It lives: the deadline decides, and a pause within it is none."""
    assert pool.run(stopped, 1.0, 60) == ["right", "right"]
    assert pool.run(stopped, 2.5, 0.5)[0] == "PeerTimeoutError"


# ---- close() -----------------------------------------------------------------------------------


def closed_amid_a_call(rank: int, world_size: int, kind: str) -> list[str]:
    c = make()
    calls = kinds_of_calls(c)
    dist.barrier()
    seen: list[str] = []
    if rank == 0:
        if device().type == "cpu":
            synchronize()

        def call() -> None:
            try:
                calls[kind]()
                seen.append("returned")
            except allnorm.AllnormError as error:
                seen.append(f"{type(error).__name__}: {error}")

        worker = threading.Thread(target=call)
        worker.start()
        time.sleep(0.3)
        start = time.monotonic()
        closers = [threading.Thread(target=c.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        for thread in (worker, *closers):
            thread.join()
        assert time.monotonic() - start < LATE_SECONDS
        for again in calls.values():
            with pytest.raises(allnorm.CommunicatorClosedError):
                again()
    dist.barrier()
    if rank != 0:
        assert fails_within(allnorm.PeerLeftError, calls[kind], 2).peer == 0
    dist.barrier()
    c.close()
    CASE.check(make())
    return seen


@on(cpu=(2,))
@pytest.mark.parametrize("kind", ["repeated", "two_shot", "gather", "unfused"])
def test_close_while_another_thread_calls(pool: RankPool, kind: str) -> None:
    seen = pool.run(closed_amid_a_call, kind)[0]
    assert len(seen) == 1
    assert all(text.startswith("CommunicatorClosedError") for text in seen), seen


@on(cpu=(2,))
def test_close_at_any_time(rank: int, world_size: int) -> None:
    """Calls that all ranks make, and close() somewhere among them: right, closed, or left."""
    for number in range(10):
        c = make()
        seen: list[str] = []

        def call(c: allnorm.Communicator = c, seen: list[str] = seen) -> None:
            try:
                while True:
                    CASE.check(c)
            except allnorm.AllnormError as error:
                seen.append(type(error).__name__)

        workers = [threading.Thread(target=call) for _ in range(1)]
        for worker in workers:
            worker.start()
        time.sleep(0.002 * number)
        c.close()
        for worker in workers:
            worker.join()
        assert set(seen) <= {"CommunicatorClosedError", "PeerLeftError"}, seen
        dist.barrier()


def leaves_properly(rank: int, world_size: int, how: str) -> None:
    c = make()
    dist.barrier()
    if rank == 1:
        if how == "closes":
            c.close()
        os._exit(0)
    time.sleep(2 * watch.SETTLED_SECONDS + 0.5)
    synchronize()
    assert c.check() is None, "all calls were complete"
    error = fails_within(allnorm.PeerTimeoutError, lambda: run_to_its_end(c, CASE), 1)
    assert error.peer == 1
    if c.device.type == "cpu":
        kind = allnorm.PeerLeftError if how == "closes" else allnorm.PeerDiedError
        assert type(error) is kind
    c.close()


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("how", ["closes", "exits"])
def test_an_end_is_no_fault_until_somebody_needs_it(pool: RankPool, how: str) -> None:
    pool.run(leaves_properly, how, may_die=[1])


# ---- Threads, copies -----------------------------------------------------------------------------


@on(cpu=(2,))
def test_threads_that_take_turns(rank: int, world_size: int) -> None:
    """In turns, and the same calls in each thread, so that any order is the same on every rank."""
    c = make()
    expected = CASE.expected(world_size)
    x, residual, weight = CASE.x(rank), CASE.residual_tensor(), CASE.weight()
    failures: list[BaseException] = []
    turn = threading.Lock()

    def call() -> None:
        try:
            for _ in range(50):
                with turn:
                    got = c.all_reduce_add_rms_norm(x, residual, weight, 1e-6, algorithm="one_shot")
                for a, b in zip(got, expected, strict=True):
                    assert_same_bits(a, b)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    c.close()


@on(cpu=(2,), gpu=(2,))
def test_copies_are_refused(rank: int, world_size: int) -> None:
    c = make()
    tries: tuple[Callable[[Any], Any], ...] = (copy.copy, copy.deepcopy, pickle.dumps)
    for attempt in tries:
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(c)
    gc.collect()
    CASE.check(c)
    c.close()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.copy(c)


# ---- Limits, libraries -----------------------------------------------------------------------


@contextlib.contextmanager
def limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def limited(rank: int, world_size: int, what: str) -> str:
    """One rank has too little of something; all raise, and the next communicator works."""
    size, place = 64 << 20, contextlib.nullcontext()
    if rank == (1 if what == "address space" else 0):
        if what == "address space":
            used = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
            place = limit(resource.RLIMIT_AS, used * resource.getpagesize() + (8 << 20))
        elif what == "file size":
            place = limit(resource.RLIMIT_FSIZE, 1 << 20)
    if what == "/dev/shm":
        space = os.statvfs("/dev/shm")
        size = space.f_blocks * space.f_frsize
    with place, pytest.raises((allnorm.AllnormError, OSError)) as caught:
        allnorm.Communicator(device="cpu", workspace_bytes=size, timeout=60)
    text = str(caught.value)
    make().close()
    return text


@on(cpu=(2,))
@pytest.mark.parametrize("what", ["address space", "file size", "/dev/shm"])
def test_limits(pool: RankPool, what: str) -> None:
    texts = pool.run(limited, what)
    culprit = 1 if what == "address space" else 0
    assert f"failed on rank {culprit}" in texts[1 - culprit], texts
    words = {"address space": "cannot map", "file size": "RLIMIT_FSIZE", "/dev/shm": "MiB free"}
    assert words[what] in texts[culprit], texts


def another_library(rank: int, world_size: int) -> str:
    _native.library.cache_clear()
    wrong = _native.ABI_VERSION + (rank == 1)
    try:
        with (
            mock.patch.object(_native, "ABI_VERSION", wrong),
            pytest.raises(allnorm.AllnormError) as caught,
        ):
            allnorm.Communicator(device="cpu", timeout=60)
    finally:
        _native.library.cache_clear()
    make().close()
    return f"{type(caught.value).__name__}: {caught.value}"


@on(cpu=(2,))
def test_a_library_of_another_build(pool: RankPool) -> None:
    texts = pool.run(another_library)
    assert texts[1].startswith("NativeLibraryError")
    assert "different builds" in texts[1]
    assert "failed on rank 1: NativeLibraryError" in texts[0]


# ---- timeout, unfused --------------------------------------------------------------------------


def timeouts(rank: int, world_size: int) -> list[str]:
    for given, seconds in ((7, 7.0), (0.25, 0.25), (datetime.timedelta(minutes=1), 60.0)):
        with allnorm.Communicator(device=device(), timeout=given) as c:
            assert c.timeout == datetime.timedelta(seconds=seconds)
    texts = []
    for wrong in (0, -1, -0.5, float("nan"), float("inf"), True, "5", datetime.timedelta(0)):
        with pytest.raises(ValueError, match="timeout=") as caught:
            allnorm.Communicator(device=device(), timeout=wrong)
        texts.append(str(caught.value))
    return texts


@on(cpu=(2,), gpu=(2,))
def test_timeout_takes_seconds(pool: RankPool) -> None:
    for texts in pool.run(timeouts):
        assert all("expected a positive number of seconds" in text for text in texts)


def unfused_alone(rank: int, world_size: int, other: str) -> tuple[str, int, float]:
    """Rank 0 runs unfused; rank 1 does not come, or comes with a call that is not."""
    c = make(timeout=0.7)
    case = CASE.but(algorithm="unfused")
    case.check(c)
    dist.barrier()
    if rank == 1 and other == "never":
        KEPT.append(c)
        dist.barrier()
        KEPT.clear()
        return "", -1, 0.0
    start = time.monotonic()
    mine = case if rank == 0 else CASE
    error = fails_within(allnorm.PeerTimeoutError, lambda: run_to_its_end(c, mine), 1)
    seconds = time.monotonic() - start
    for again in (c.check, functools.partial(case.run, c)):
        with pytest.raises(allnorm.PeerTimeoutError):
            again()
    dist.barrier()
    c.close()
    return type(error).__name__, error.peer, seconds


@on(cpu=(2,), gpu=(2,))
def test_unfused_waits_like_the_others(pool: RankPool) -> None:
    kind, peer, seconds = pool.run(unfused_alone, "never")[0]
    assert (kind, peer) == ("PeerTimeoutError", 1)
    assert 0.6 < seconds < LATE_SECONDS
    results = pool.run(unfused_alone, "fused")
    expected = "PeerDivergedError" if pool.device == "cpu" else "PeerTimeoutError"
    assert [(kind, peer) for kind, peer, _ in results] == [(expected, 1), (expected, 0)]


def unfused_over_messages(rank: int, world_size: int) -> tuple[str, int]:
    """As between machines: announcements go through the store."""
    with mock.patch("allnorm.core.workspace._host_identity", return_value=f"host {rank}"):
        c = allnorm.Communicator(device=device(), timeout=1.0)
    for call in range(3):
        CASE.but(call=call, algorithm="unfused").check(c)
    other = CASE.but(algorithm="unfused", eps=1e-5 if rank == 0 else 1e-6)
    with pytest.raises(allnorm.PeerDivergedError):
        other.run(c)
    CASE.but(algorithm="unfused").check(c)
    dist.barrier()
    if rank == 1:
        dist.barrier()
        c.close()
        return "", -1
    with pytest.raises(allnorm.PeerTimeoutError) as caught:
        CASE.but(algorithm="unfused").run(c)
    with pytest.raises(allnorm.PeerTimeoutError):
        c.check()
    dist.barrier()
    c.close()
    return type(caught.value).__name__, caught.value.peer


@on(cpu=(2, 3), gpu=(2,))
def test_unfused_between_machines(pool: RankPool) -> None:
    results = pool.run(unfused_over_messages)
    assert results[0] == ("PeerTimeoutError", 1)


# ---- On GPUs -----------------------------------------------------------------------------------


def killed_beside_gpu_work(rank: int, world_size: int, graph: bool) -> float | None:
    """The last rank is killed while the others call, or replay a graph of calls."""
    c = make()
    x = CASE.x(rank)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(4):
            c.all_reduce(x)
    dist.barrier()
    if rank == world_size - 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()

    def once() -> None:
        captured.replay() if graph else c.all_reduce(x)
        synchronize()
        c.check()

    assert fails_within(allnorm.PeerDiedError, once, 1 << 30).peer == world_size - 1
    seconds = time.monotonic() - start - 0.3
    c.close()
    return seconds


@on(gpu=(2, 4))
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_killed_peer_ends_kernels(pool: RankPool, graph: bool) -> None:
    last = pool.world_size - 1
    results = pool.run(killed_beside_gpu_work, graph, may_die=[last])
    for seconds in results[:last]:
        print(f"named {seconds:.3f} s after the kill")
        assert seconds < 2.0


@on(gpu=(2,))
def test_ctrl_c_beside_a_kernel(rank: int, world_size: int) -> None:
    """A call that waits on the GPU keeps nobody on the host; close() waits until it has ended."""
    c = make(timeout=5)
    dist.barrier()
    if rank == 0:
        with handler(signal.SIGINT, signal.default_int_handler):
            sent = send(signal.SIGINT, 0.3)
            CASE.run(c)
            with pytest.raises(KeyboardInterrupt):
                time.sleep(60)
        assert time.monotonic() - sent() < 1.0
    dist.barrier()
    c.close()
    CASE.check(make())


@on(gpu=(2,))
def test_close_while_others_call_on_gpus(rank: int, world_size: int) -> None:
    c = make(timeout=5)
    x, seen = CASE.x(rank), []

    def call() -> None:
        try:
            torch.cuda.set_device(c.device)
            while True:
                c.all_reduce(x)
        except allnorm.AllnormError as error:
            seen.append(type(error).__name__)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.05)
    c.close()
    thread.join()
    assert set(seen) <= {"CommunicatorClosedError", "PeerTimeoutError", "PeerDiedError"}
    dist.barrier()
    CASE.check(make())
