"""Tests hostile callers: forks, signals, close() during a call, copies, resource limits.

No case may hang, give a wrong result or leave shared memory behind.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
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
from rank_helpers import Case, device, on, run_and_check, synchronize

import allnorm
from allnorm.core import _native, fast_call, watch
from allnorm.testing import assert_same_bits

NEVER = datetime.timedelta(hours=2)
LATE_SECONDS = 10.0  # limit for a busy machine; an idle machine takes 0.1 s
CASE = Case((5, 512), algorithm="one_shot")
KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = in_shared_memory()
    yield
    # Concurrent tests create and remove files too; only leaked files remain.
    left, end = in_shared_memory() - before, time.monotonic() + 5
    while left and time.monotonic() < end:
        time.sleep(0.01)
        left &= in_shared_memory()
    assert not left


def in_shared_memory() -> set[pathlib.Path]:
    return set(pathlib.Path("/dev/shm").glob("allnorm-*"))


def make(**arguments: Any) -> allnorm.Communicator:
    c = allnorm.Communicator(device=device(), **{"timeout": NEVER, **arguments})
    for call in range(4):  # C dispatches the call from the third time on
        CASE.but(call=call).check(c)
    return c


def fails_within(
    kind: type[allnorm.PeerTimeoutError], call: Callable[[], Any], times: int
) -> allnorm.PeerTimeoutError:
    """Makes up to `times` calls; returns the error of the first one that fails.

    Calls can still succeed with data that a peer sent before it left.
    """
    for _ in range(times):
        try:
            call()
        except kind as error:
            return error
    raise AssertionError(f"none of {times} calls failed")


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
    """Runs `body` in a forked child; raises in the parent if it fails."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            body()
            os.write(into, b"fine")
        except BaseException as error:  # noqa: BLE001 - the parent raises it
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
    if c.device.type == "cpu":  # a forked child must not use CUDA
        assert_refused({**kinds_of_calls(c), "plan": lambda: c.plan(5, 512)})
    else:
        assert_refused({"call": lambda: c.all_reduce(KEPT[-1]), "again": lambda: c.plan(5, 512)})
    with pytest.raises(allnorm.CommunicatorClosedError):
        allnorm.communicator.communicator(c.name)
    # The library refuses too, because other languages call it without Python's checks.
    fault = _native.Fault()
    assert (
        c._endpoint._library.comm_check(c._endpoint._handle, _native.ctypes.addressof(fault))
        == _native.CLOSED
    )
    assert "fork" in c._endpoint._library.last_error()
    assert c._endpoint._library.comm_close(c._endpoint._handle) == _native.CLOSED
    assert c._endpoint._library.comm_destroy(c._endpoint._handle) == _native.OK
    gc.collect()


def delete_in_fork(box: list[allnorm.Communicator]) -> None:
    box.clear()
    gc.collect()


# Gloo, which replaces NCCL on shared GPUs, ties tensors to streams. A child cannot free those.
@pytest.mark.own_gpus
@on(cpu=(2, 3), gpu=(2,))
def test_a_forked_child_changes_nothing(rank: int, world_size: int) -> None:
    box = [make()]
    KEPT.append(CASE.x(rank))
    if rank == 0:
        in_fork(lambda: use_in_fork(box[0]))
    if rank == 1:
        in_fork(lambda: delete_in_fork(box))
        child = multiprocessing.get_context("fork").Process(target=delete_in_fork, args=(box,))
        # Ranks are daemons, and multiprocessing does not allow daemons to have children.
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
    """Forks while a thread that waits in a call holds the lock."""
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


@on(cpu=(2,))
def test_a_forked_child_may_create_its_own_communicator(
    rank: int, world_size: int, tmp_path: pathlib.Path
) -> None:
    c = make()

    def alone() -> None:
        dist.distributed_c10d._world.pg_map.clear()  # gloo's threads do not exist in the child
        dist.distributed_c10d._update_default_pg(None)
        store = dist.FileStore(f"{tmp_path}/{rank}", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        with allnorm.Communicator(device="cpu") as mine:
            assert_same_bits(mine.all_reduce(torch.ones(2, 8)), torch.ones(2, 8))
        assert allnorm.add_rms_norm(torch.ones(2, 8), None, torch.ones(8), 1e-6)[0].shape == (2, 8)

    in_fork(alone)
    CASE.check(c)
    c.close()


# ---- Signals -----------------------------------------------------------------------------------

needs_library = pytest.mark.skipif(
    not fast_call.available(), reason="built without Python's headers: signals end no wait"
)


@contextlib.contextmanager
def handler(number: int, function: Any) -> Iterator[None]:
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


def send(number: int, after: float) -> Callable[[], float]:
    """Sends this process a signal after `after` seconds; the result returns the time sent."""
    sent: list[float] = []

    def fire() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Timer(after, fire).start()
    return lambda: sent[0]


@needs_library
@on(cpu=(2, 3))
@pytest.mark.parametrize(
    "kind", ["repeated", "all_reduce", "two_shot", "quant", "gather", "unfused"]
)
def test_ctrl_c_ends_a_wait(rank: int, world_size: int, kind: str) -> None:
    c = make()
    calls = kinds_of_calls(c)
    dist.barrier()
    if rank == 0:
        with handler(signal.SIGINT, signal.default_int_handler):
            sent = send(signal.SIGINT, 0.3)
            with pytest.raises(KeyboardInterrupt):
                calls[kind]()
        assert time.monotonic() - sent() < 1.0
        with pytest.raises(allnorm.PeerTimeoutError, match="was interrupted"):
            c.check()
        for again in calls.values():
            with pytest.raises(allnorm.PeerTimeoutError, match="was interrupted"):
                again()
        dist.barrier()
        dist.barrier()
        c.close()
        return
    dist.barrier()
    assert c.check() is None, "this rank has not waited for rank 0 yet"
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


class RaisedError(Exception):
    pass


@needs_library
@on(cpu=(2,))
def test_handlers_that_call(rank: int, world_size: int) -> None:
    """Checks that the wait continues after handlers that call, close, check or only append."""
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
    # A handler is allowed to use a different communicator.
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


# ---- close() -----------------------------------------------------------------------------------


@on(cpu=(2,))
@pytest.mark.parametrize("kind", ["repeated", "two_shot", "gather", "unfused"])
def test_close_while_another_thread_calls(rank: int, world_size: int, kind: str) -> None:
    c = make()
    calls = kinds_of_calls(c)
    dist.barrier()
    seen: list[str] = []
    if rank == 0:

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
        assert len(seen) == 1
        assert seen[0].startswith("CommunicatorClosedError"), seen
        for again in calls.values():
            with pytest.raises(allnorm.CommunicatorClosedError):
                again()
    dist.barrier()
    if rank != 0:
        assert fails_within(allnorm.PeerLeftError, calls[kind], 2).peer == 0
    dist.barrier()
    c.close()
    CASE.check(make())


@on(cpu=(2,))
def test_close_at_any_time(rank: int, world_size: int) -> None:
    """Calls before close() are right. Later calls raise that the communicator or peer left."""
    for number in range(10):
        c = make()
        seen: list[str] = []

        def call(c: allnorm.Communicator = c, seen: list[str] = seen) -> None:
            try:
                while True:
                    CASE.check(c)
            except allnorm.AllnormError as error:
                seen.append(type(error).__name__)

        worker = threading.Thread(target=call)
        worker.start()
        time.sleep(0.002 * number)
        c.close()
        worker.join()
        assert set(seen) <= {"CommunicatorClosedError", "PeerLeftError"}, seen
        dist.barrier()


@on(cpu=(2,), gpu=(2,), may_die=[1])
@pytest.mark.parametrize("how", ["closes", "exits"])
def test_a_rank_that_ends_is_an_error_only_once_it_is_needed(
    rank: int, world_size: int, how: str
) -> None:
    c = make()
    dist.barrier()
    if rank == 1:
        if how == "closes":
            c.close()
        os._exit(0)
    time.sleep(2 * watch.SETTLED_SECONDS + 0.5)
    synchronize()
    assert c.check() is None, "all calls were complete"
    error = fails_within(allnorm.PeerTimeoutError, lambda: run_and_check(c, lambda: CASE.run(c)), 1)
    assert error.peer == 1
    if c.device.type == "cpu":
        kind = allnorm.PeerLeftError if how == "closes" else allnorm.PeerDiedError
        assert type(error) is kind
    c.close()


# ---- Copies --------------------------------------------------------------------------------------


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


@on(cpu=(2,))
@pytest.mark.parametrize(
    ("what", "culprit", "words"),
    [
        ("address space", 1, "cannot map"),
        ("file size", 0, "RLIMIT_FSIZE"),
        ("/dev/shm", 0, "MiB free"),
    ],
)
def test_limits(rank: int, world_size: int, what: str, culprit: int, words: str) -> None:
    """If one rank runs out of a resource, all ranks raise, and the next communicator works."""
    size, place = 64 << 20, contextlib.nullcontext()
    if rank == culprit:
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
    assert (words if rank == culprit else f"failed on rank {culprit}") in str(caught.value)
    make().close()


@on(cpu=(2,))
def test_a_library_of_a_different_build(rank: int, world_size: int) -> None:
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
    if rank == 0:
        assert "failed on rank 1: NativeLibraryError" in str(caught.value)
    else:
        assert type(caught.value) is allnorm.NativeLibraryError
        assert "different builds" in str(caught.value)


# ---- On GPUs -----------------------------------------------------------------------------------


@on(gpu=(2, 4), may_die=[-1])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_killed_peer_ends_kernels(rank: int, world_size: int, graph: bool) -> None:
    """Kills the last rank while the others make calls or replay a graph of calls."""
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
    assert time.monotonic() - start - 0.3 < 2.0
    c.close()


@on(gpu=(2,))
def test_ctrl_c_while_a_kernel_waits(rank: int, world_size: int) -> None:
    """A waiting kernel does not block the host; close() waits until the kernel has ended."""
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
def test_close_while_another_thread_calls_on_gpus(rank: int, world_size: int) -> None:
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
