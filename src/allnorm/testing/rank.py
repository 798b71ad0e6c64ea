"""The main function of a rank, a process of a RankPool: it joins the group and runs calls."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.reduction
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from allnorm.core import workspace

_Connection = multiprocessing.connection.Connection

# NVLink multicast stays off: many hosts lack it, and it can crash shared hosts.
_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

_device = torch.device("cpu")
_parent: _Connection | None = None
_parent_lock = threading.Lock()


def device() -> torch.device:
    """Returns the device that RankPool assigned to this rank; the CPU in any other process."""
    return _device


def report(message: Any) -> None:
    """Sends a message to the `on_message` of the process that started this rank. Not collective.

    Args:
        message: any picklable value.

    Raises:
        RuntimeError: this process is not a rank started by this module.
    """
    if _parent is None:
        raise RuntimeError("report() works only in a rank started by run_ranks or RankPool")
    _send("message", message)


class Surroundings:
    """Environment and standard streams of the process that starts a rank.

    They are passed to the rank because a forked process starts with those of the fork server.
    """

    def __getstate__(self) -> dict[str, Any]:
        streams = [multiprocessing.reduction.DupFd(fd) for fd in (1, 2)]
        return {"environment": dict(os.environ), "streams": streams}

    def enter(self) -> None:
        """Applies them to this process."""
        state = vars(self)
        os.environ.clear()
        os.environ.update(state["environment"])
        for fd, stream in enumerate(state["streams"], start=1):
            copy = stream.detach()
            os.dup2(copy, fd)
            os.close(copy)


def rank_main(
    connection: _Connection,
    rank: int,
    world_size: int,
    device: str,
    port: int,
    seconds: float,
    surroundings: Surroundings | None,
    share_gpus: bool = False,
) -> None:
    """Joins the group and runs calls until the parent closes the connection; main of a rank."""
    global _parent
    _parent = connection
    if surroundings is not None:
        surroundings.enter()
    os.environ.update(_ENVIRONMENT)
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # raises if Ctrl-C came
        _join_group(rank, world_size, device, port, seconds, share_gpus)
        _send("result", None)
        while call := connection.recv_bytes():
            _answer(call, rank, world_size)
    except EOFError:
        pass  # the parent closed the pipe
    except BaseException:  # noqa: BLE001 - the parent shows every error
        with contextlib.suppress(OSError):
            _send("error", traceback.format_exc())
    _leave(device)


def _answer(call: bytes, rank: int, world_size: int) -> None:
    try:
        fn, args, kwargs = pickle.loads(call)
        _send("result", fn(rank, world_size, *args, **kwargs))
    except Exception:  # noqa: BLE001 - the parent raises it as RankError
        _send("error", traceback.format_exc())


def _join_group(
    rank: int, world_size: int, device: str, port: int, seconds: float, share_gpus: bool
) -> None:
    global _device
    if device == "cuda":
        _device = torch.device("cuda", rank % torch.cuda.device_count() if share_gpus else rank)
        torch.cuda.set_device(_device)
        # By default each rank would use all cores, which slows all of them down.
        torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // world_size)))
        # NCCL does not support multiple ranks on one GPU.
        backend = "cpu:gloo,cuda:gloo" if share_gpus else "cpu:gloo,cuda:nccl"
        workspace.allow_shared_gpus(share_gpus)
    else:
        torch.set_num_threads(1)
        backend = "gloo"
    timeout = datetime.timedelta(seconds=seconds)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _leave(device: str) -> None:
    """Exits without running torch's destructors.

    The destructor of a process group waits for peers, which may have died.
    """
    with contextlib.suppress(Exception):
        if device == "cuda":
            torch.cuda.synchronize()
        # os._exit() skips this; semaphores (of tqdm, for example) would be reported as leaked.
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _send(kind: str, value: Any) -> None:
    assert _parent is not None
    # Pickle first: an error while pickling must not leave half a message in the pipe.
    data = pickle.dumps((kind, value))
    with _parent_lock:
        _parent.send_bytes(data)
