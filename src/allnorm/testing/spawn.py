"""Starts ranks: one process each, with torch.distributed initialized over loopback.

`run_ranks` starts ranks for one function call. `RankPool` keeps them for many calls. Functions are
sent by name, so they must be at the top level of a module that the ranks can import.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import pickle
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from allnorm.testing.rank import Surroundings, rank_main

_Connection = multiprocessing.connection.Connection

_START_SECONDS = 120.0
# Time for ranks to exit. A rank in a collective with a dead peer never exits by itself.
_STOP_SECONDS = 5.0
# Time for the other ranks to answer after one has failed; they may be waiting for it in a
# collective.
_GRACE_SECONDS = 10.0
_DUMP_SECONDS = 0.2

# CPU ranks are forked from a process that has imported these, because importing torch takes
# seconds. GPU ranks are spawned: forking after CUDA's libraries are loaded is not supported.
PRELOADED = ["torch"]

OnMessage = Callable[[int, Any], None]
"""A function that is called with `(rank, message)` for each `report(message)` of a rank."""


class RankError(RuntimeError):
    """One or more ranks raised an error, died or timed out.

    Attributes:
        failures: description or traceback per failed rank.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(sorted(failures.items()))
        parts = [f"rank {rank}: {text.rstrip()}" for rank, text in self.failures.items()]
        super().__init__(f"{len(parts)} rank(s) failed\n" + "\n".join(parts))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    device: str = "cpu",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
    on_message: OnMessage | None = None,
    share_gpus: bool = False,
) -> list[Any]:
    """Runs `fn(rank, world_size, *args, **kwargs)` in `world_size` new processes.

    A `RankPool` avoids the seconds that new processes take. A program that calls this at the top
    level needs `if __name__ == "__main__":`, because the ranks import it.

    Args:
        fn: a function at the top level of an importable module.
        world_size: number of ranks.
        device: "cpu" (gloo) or "cuda" (rank r on GPU r; gloo for CPU tensors, NCCL for CUDA).
        args: positional arguments, picklable.
        kwargs: keyword arguments, picklable.
        timeout: time limit in seconds.
        on_message: called in this process with `(rank, message)` for each `report(message)`.
        share_gpus: allow more ranks than GPUs, see `RankPool`.

    Returns:
        The results of `fn`, in rank order; they must be picklable.

    Raises:
        ValueError: see `RankPool`.
        RankError: a rank raised an error, died or timed out.
    """
    with RankPool(world_size, device, timeout=timeout, share_gpus=share_gpus) as pool:
        return pool.run(fn, *args, kwargs=kwargs, on_message=on_message)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Blocks SIGINT here and in processes started here, until rank_main() unblocks it.

    Ctrl-C reaches every process of a terminal. A rank that is importing torch would print a
    traceback.
    """
    multiprocessing.resource_tracker.ensure_running()  # unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RankPool:
    """Ranks that stay alive for many calls, because starting one takes seconds. A context manager.

    If a rank fails in a call, the next call starts new processes.

    Args:
        world_size: number of ranks.
        device: "cpu" (gloo) or "cuda" (rank r on GPU r; gloo for CPU tensors, NCCL for CUDA).
        timeout: default time limit of `run` in seconds.
        share_gpus: allow more ranks than GPUs. Rank r then runs on GPU r modulo the number of GPUs,
            with gloo for CUDA tensors too. Ranks of one GPU run one at a time, so a call takes
            milliseconds. Use it to check results, not to measure times.

    Raises:
        ValueError: the device is unknown, there is no GPU, or there are fewer GPUs than ranks
            without `share_gpus`.
    """

    def __init__(
        self,
        world_size: int,
        device: str = "cpu",
        *,
        timeout: float = 300.0,
        share_gpus: bool = False,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size {world_size}: expected at least 1")
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device {device!r}: expected 'cpu' or 'cuda'")
        needed = 1 if share_gpus else world_size
        if device == "cuda" and torch.cuda.device_count() < needed:
            raise ValueError(
                f"world_size {world_size} needs {needed} GPU{'s' if needed > 1 else ''}; torch "
                f"sees {torch.cuda.device_count()}. Use fewer ranks, or device='cpu'."
            )
        self.world_size = world_size
        self.device = device
        self.timeout = timeout
        self._share_gpus = share_gpus and torch.cuda.device_count() < world_size
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[_Connection] = []
        self._store: TCPStore | None = None

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        on_message: OnMessage | None = None,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """Runs `fn(rank, world_size, *args, **kwargs)` on every rank.

        Args:
            fn: a function at the top level of an importable module.
            args: positional arguments, picklable.
            kwargs: keyword arguments, picklable.
            timeout: time limit in seconds; None: the pool's.
            on_message: called in this process with `(rank, message)` for each `report(message)`.
            may_die: ranks whose process may die during the call; their result is then None.

        Returns:
            The results of `fn`, in rank order; they must be picklable.

        Raises:
            RankError: a rank raised an error, died or timed out.
        """
        seconds = self.timeout if timeout is None else timeout
        call = pickle.dumps((fn, args, dict(kwargs or {})))
        try:
            if not self._processes:
                self._start(max(seconds, _START_SECONDS))
            for connection in self._connections:
                # _collect detects and reports a rank that has exited.
                with contextlib.suppress(OSError):
                    connection.send_bytes(call)
            return self._collect(seconds, on_message, may_die)
        except BaseException:
            self.kill_all()
            raise

    @property
    def is_running(self) -> bool:
        """Returns whether the ranks have been started and all of them are alive."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def kill(self, rank: int) -> None:
        """Kills the process of one rank (SIGKILL) and waits until it has exited."""
        if self._processes:
            self._processes[rank].kill()
            self._processes[rank].join()

    def kill_all(self) -> None:
        """Kills every rank. The next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        self._release()

    def close(self) -> None:
        """Stops every rank, and kills those that do not exit. Idempotent; `run` starts new ones."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        self._release()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill_all()

    def _start(self, seconds: float) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        method = "spawn" if self.device == "cuda" else "forkserver"
        context: Any = multiprocessing.get_context(method)
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main,
                args=(theirs, rank, self.world_size, self.device, self._store.port, seconds),
                # A spawned process inherits these from its parent.
                kwargs={
                    "surroundings": None if self.device == "cuda" else Surroundings(),
                    "share_gpus": self._share_gpus,
                },
                name=f"allnorm-rank-{rank}",
                daemon=True,  # the interpreter terminates its ranks at exit instead of waiting
            )
            with _interrupts_blocked():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect(_START_SECONDS, None, ())

    def _collect(
        self, seconds: float, on_message: OnMessage | None, may_die: Collection[int]
    ) -> list[Any]:
        """Waits for one answer from each rank."""
        results: list[Any] = [None] * self.world_size
        failures: dict[int, str] = {}
        dead = False
        waiting = {self._connections[rank]: rank for rank in range(self.world_size)}
        deadline = time.monotonic() + seconds
        while waiting:
            ready = multiprocessing.connection.wait(
                list(waiting), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, _Connection)
                rank = waiting[connection]
                kind, value = self._receive(connection, rank)
                if kind == "message":
                    if on_message is not None:
                        on_message(rank, value)
                    continue
                del waiting[connection]
                if kind == "result":
                    results[rank] = value
                elif kind == "died" and rank in may_die:
                    dead = True
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        for rank in waiting.values():
            waited = "after another rank had failed" if failures else f"within {seconds:g} s"
            failures[rank] = f"no answer {waited}; killed. Its stack is on standard error"
            self._dump_stack(rank)
        if failures:
            raise RankError(failures)
        if dead:
            self.kill_all()
        return results

    def _dump_stack(self, rank: int) -> None:
        """Makes an unresponsive rank write its stack to standard error."""
        pid = self._processes[rank].pid
        if pid is not None and self._processes[rank].is_alive():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(_DUMP_SECONDS)

    def _receive(self, connection: _Connection, rank: int) -> tuple[str, Any]:
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(_STOP_SECONDS)
            return "died", f"its process ended with exit code {process.exitcode}"
        return kind, value

    def _release(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()
            process.close()
        self._processes, self._connections, self._store = [], [], None
