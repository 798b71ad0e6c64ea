"""The communicator: one group of ranks with a symmetric workspace."""

from __future__ import annotations

import ctypes
import datetime
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from allnorm import (
    _native,
    arguments,
    channel,
    config,
    fast_call,
    policy,
    shortcuts,
    tuning,
    watch,
    workspace,
)
from allnorm._version import __version__
from allnorm.arguments import DTYPES, NormArguments
from allnorm.collectives import Collectives
from allnorm.errors import CommunicatorClosedError, ConfigurationError, UnsupportedError
from allnorm.launch import describe_call, raise_status
from allnorm.policy import Plan
from allnorm.prepare import Preparer
from allnorm.quant import Quant, check_hidden_size, check_quant
from allnorm.rendezvous import Rendezvous

_by_name: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
_created: dict[str, int] = {}
_OPERATIONS = 1 << 32  # numbers that they have
_living: weakref.WeakSet[Communicator] = weakref.WeakSet()
_MAX_TIMEOUT_NS = (1 << 63) - 1  # what the library counts in


def communicator(name: str) -> Communicator:
    """The open communicator called `name`.

    Raises:
        CommunicatorClosedError: there is none in this process.
    """
    comm = _by_name.get(name)
    if comm is None:
        raise CommunicatorClosedError(
            f"no open communicator is called {name!r}: it was closed, or belongs to another "
            f"process. Open ones: {sorted(_by_name.keys()) or 'none'}."
        )
    return comm


class Communicator(Collectives):
    """All-reduce, residual add and RMSNorm over the ranks of a process group, in one launch.

    Collective: every rank of the group creates it, and makes the same calls in the same order.
    Calls on one communicator are ordered, whatever CUDA streams they are on: eager ones one after
    the other, captured ones within their capture. Launches of CUDA graphs must be ordered by the
    caller, among each other and with eager calls, as with any buffer. An eager call while the
    stream of the one before is being captured cannot be ordered: it raises.

    Threads that call one communicator are ordered, one call after the other, in an order that
    nobody knows; the caller sees to it that it is the same on every rank. Any thread may call
    `close()`, which ends their calls. A child of `fork()` may neither use nor close a communicator
    of its parent.

    Args:
        group: process group; None is the default group.
        device: device of the tensors; None is the current CUDA device, or the CPU if there is none.
        workspace_bytes: bytes of workspace per rank, at least 64 KiB; None is 256 MiB on CUDA and 4
            MiB on CPU (`ALLNORM_WORKSPACE_BYTES` otherwise). Larger inputs are cut into row chunks.
        numerics: rounding mode of calls that name none: "rounded", "unrounded", "transformers" or
            "vllm".
        timeout: how long a call, or the making of the communicator, may wait for a peer; seconds or
            a timedelta (`ALLNORM_TIMEOUT_SECONDS`, else 600 s). A peer whose process has ended is
            not waited for.
        tuning_dir: folder of the tables that `allnorm tune` has written (`ALLNORM_TUNING_DIR`, else
            the user's cache). They decide about time, never about bits; one that does not fit, or
            that not all ranks have, is left out with a warning of rank 0.
        max_blocks: CUDA: the most thread blocks of up to 512 threads that a call may take, so that
            other work runs beside it (None: as many as the GPU holds, two or one a multiprocessor).
            The same on every rank; bits never depend on it. Two blocks run in any case, or twice as
            many as a row needs that is wider than one.
        early_trigger: CUDA: the next kernel of the stream, if it is launched with programmatic
            dependent launch, may start before a call's last stores; it must read nothing before
            `griddepcontrol.wait`, as CUDA demands of it. False lets it start when the call ends,
            and costs 0.3 to 0.9 us a call.
        dependent_launch: CUDA: whether calls are launched with programmatic dependent launch.
        first_op: the number of the first operation, the same on every rank; it wraps at 2**32.

    Raises:
        ValueError, TypeError: an argument is wrong, or ranks pass different ones or have loaded
            different builds: on every rank, with the values of each.
        ConfigurationError: an `ALLNORM_*` variable is unknown or wrong.
        NativeLibraryError: the backend's library is missing or cannot be loaded.
        AllnormError: another rank failed to create its part. Every rank raises if one does.
        PeerTimeoutError: another rank did not come within `timeout`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        workspace_bytes: int | None = None,
        numerics: str = "rounded",
        timeout: datetime.timedelta | float | None = None,
        *,
        tuning_dir: str | os.PathLike[str] | None = None,
        max_blocks: int | None = None,
        early_trigger: bool = True,
        dependent_launch: bool = True,
        first_op: int = 0,
    ) -> None:
        self._closed = True
        self._handle = 0
        self._holder = 0
        self._process = os.getpid()
        self._watch: watch.Watch | None = None
        self._channel: channel.Channel | None = None
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group() "
                "before making a Communicator."
            )
        resolved = dist.group.WORLD if group is None else group
        if not isinstance(resolved, dist.ProcessGroup):
            raise ValueError(f"group={group!r}: this process is not in the group.")
        self.group: dist.ProcessGroup = resolved
        self.rank: int = dist.get_rank(resolved)
        self.world_size: int = dist.get_world_size(resolved)
        self.numerics = numerics
        self._lock = threading.Lock()

        def check() -> tuple[Any, ...]:
            agreed, max_row_bytes = self._configure(device, workspace_bytes, timeout, max_blocks)
            agreed |= _launch_arguments(first_op, early_trigger, dependent_launch)
            agreed["library"] = _build_of(self._library)
            self._tables = tuning.load(
                tuning_dir, self.device.type, self.device.index, self.world_size
            )
            return agreed, max_row_bytes, self._tables.found

        meeting = Rendezvous(resolved, _wait_seconds(timeout))
        checked = meeting.agree(check, "checking the arguments of Communicator")
        _check_alike([agreed for agreed, *_ in checked])
        tables, warning = tuning.tables(self._tables, [found for *_, found in checked])
        if warning and self.rank == 0:
            warnings.warn(warning, stacklevel=2)
        self._workspace = workspace.create(meeting, self.device, self._workspace_bytes)
        flags = 0 if early_trigger else _native.LATE_TRIGGER
        flags |= 0 if dependent_launch else _native.NO_DEPENDENT_LAUNCH
        try:
            self._open(meeting, first_op, flags)
            self._prepare_calls(tables, [limit for _, limit, _ in checked])
        except BaseException:
            if self._channel is not None:
                self._channel.end_waits()
                self._channel.close()
            self._release()
            raise
        prefix = f"allnorm:{resolved.group_name}"
        count = _created.get(prefix, 0)
        _created[prefix] = count + 1
        self.name: str = f"{prefix}:{count}"
        _by_name[self.name] = self
        _living.add(self)
        self._closed = False
        if self.world_size > 1:
            self._watch = watch.Watch(meeting.processes, _reporter(weakref.ref(self)))
        meeting.end()

    def _prepare_calls(
        self, tables: tuple[policy.Table, ...], max_row_bytes: list[int | None]
    ) -> None:
        self.traits = policy.Traits(
            self.device.type,
            self.world_size,
            exchange=self._workspace.obstacle,
            max_row_bytes=min((most for most in max_row_bytes if most is not None), default=None),
            tables=tables,
            max_blocks=self._max_blocks if self.device.type == "cuda" else 0,
        )
        self._preparer = Preparer(
            self._library, self.traits, self._workspace.num_bytes, self.device, self.rank
        )
        self._new = shortcuts.new_tensors(self.device)
        self._streams: set[int | None] = {None}
        self._fast = fast_call.of_communicator(
            self._library, self._handle, self.world_size, self.device, self._lock
        )

    def _configure(
        self,
        device: torch.device | str | None,
        workspace_bytes: int | None,
        timeout: datetime.timedelta | float | None,
        max_blocks: int | None,
    ) -> tuple[dict[str, Any], int | None]:
        settings = config.read_settings()
        arguments.check_numerics(self.numerics)
        self.device = _resolve_device(device)
        self._library = _native.library(self.device.type)
        self.timeout = _checked_timeout(timeout) or settings.timeout or config.DEFAULT_TIMEOUT
        default = (
            workspace.DEFAULT_BYTES_CUDA
            if self.device.type == "cuda"
            else workspace.DEFAULT_BYTES_CPU
        )
        if workspace_bytes is None:
            workspace_bytes = settings.workspace_bytes or default
        if isinstance(workspace_bytes, bool) or not isinstance(workspace_bytes, int):
            raise TypeError(f"workspace_bytes={workspace_bytes!r}: expected an int.")
        if workspace_bytes < workspace.MIN_BYTES:
            raise ValueError(
                f"workspace_bytes={workspace_bytes}: expected at least {workspace.MIN_BYTES} bytes."
            )
        self._workspace_bytes = workspace_bytes // 4096 * 4096
        if max_blocks is None:
            max_blocks = 0
        else:
            arguments.check_count("max_blocks", max_blocks)
            if max_blocks < 1:
                raise ValueError("max_blocks=0: expected at least 1, or None for no limit.")
        self._max_blocks = min(max_blocks, policy.MOST_BLOCKS)
        agreed = {
            "device type": self.device.type,
            "workspace_bytes": self._workspace_bytes,
            "numerics": self.numerics,
            "max_blocks": max_blocks or None,
        }
        return agreed, _max_row_bytes(self.device)

    def _open(self, meeting: Rendezvous, first_op: int, flags: int) -> None:
        def start() -> None:
            if not self._workspace.addresses:
                return
            settings = _native.CommConfig(
                struct_bytes=ctypes.sizeof(_native.CommConfig),
                rank=self.rank,
                world_size=self.world_size,
                device=-1 if self.device.type == "cpu" else self.device.index,
                workspace_bytes=self._workspace.num_bytes,
                timeout_ns=_nanoseconds(self.timeout),
                first_op=first_op % _OPERATIONS,
                flags=flags,
            )
            settings.workspaces[: self.world_size] = self._workspace.addresses
            handle = ctypes.c_void_p()
            raise_status(
                self._library,
                self._library.comm_create(ctypes.addressof(settings), ctypes.addressof(handle)),
            )
            self._handle = int(handle.value or 0)

        # The gathering of the results is also the barrier that comm_create asks for.
        meeting.agree(start, "starting the communicator")
        if self.world_size > 1:
            own = self._handle if self.device.type == "cpu" else 0
            self._channel = channel.create(meeting, own, _nanoseconds(self.timeout))

    # ---- inspection -----------------------------------------------------------------------------

    def plan(
        self,
        num_tokens: int,
        hidden_size: int,
        dtype: torch.dtype = torch.bfloat16,
        quant: Quant | None = None,
        residual_sharded: bool = False,
        *,
        return_normed: bool = False,
        algorithm: str = "auto",
    ) -> Plan:
        """What a call with this shape will do. Pure, not collective, the same on every rank.

        Args:
            num_tokens: rows, >= 0.
            hidden_size: columns, >= 1.
            dtype: dtype of `x`.
            quant: how the call quantises; None: not at all.
            residual_sharded: whether each rank holds its own rows of the residual only.
            return_normed: whether a quantised call returns `normed` too.
            algorithm: what the call would ask for.

        Returns:
            The algorithm, the reason in one sentence, the number of launches, and whether a tuned
            table, the one that is shipped, or the built-in rule decided.

        Raises:
            ValueError, TypeError: wrong arguments.
            UnsupportedError: no call of this dtype or width, or with these groups, can run.
            CommunicatorClosedError: after `close()`.
        """
        if self._closed:
            self._refuse()
        if num_tokens < 0 or hidden_size < 1:
            raise ValueError(
                f"num_tokens={num_tokens}, hidden_size={hidden_size}: expected >= 0 and >= 1."
            )
        if dtype not in DTYPES:
            raise UnsupportedError(f"dtype={dtype}: expected float32, float16 or bfloat16.")
        arguments.check_algorithm(algorithm)
        arguments.check_width("x", hidden_size)
        if quant is not None:
            check_quant(quant)
            check_hidden_size(quant, hidden_size)
        norm = NormArguments(0.0, 0.0, "rounded", residual_sharded, quant, return_normed)
        arguments.check_norm_arguments(norm)
        call = describe_call(_native.ADD_RMS_NORM, dtype, hidden_size, norm)
        return self._preparer.choose(call, num_tokens, dtype, algorithm)

    def _use_tables(self, tables: tuple[policy.Table, ...]) -> None:
        """Lets other tables decide, from the next call on; every rank must do so there."""
        self._preparer.use_tables(tables)
        self._fast.forget()

    # ---- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Releases the workspace and `group`. Idempotent, not collective; waits for the device.

        Calls of other threads end or raise CommunicatorClosedError. CUDA graphs in which calls were
        captured may be launched afterwards, as before: by all ranks or by none. So the workspaces
        of a communicator whose calls were captured stay until the process ends.

        Raises:
            AllnormError: within a call of this communicator, from a signal handler.
            CommunicatorClosedError: this process is a fork of the communicator's.
        """
        if self._process != os.getpid():
            self._refuse()
        if self._closed:
            return
        self._refuse_within_call("close()")
        self._closed = True
        _by_name.pop(self.name, None)
        if self._watch is not None:
            self._watch.stop()
        self._fast.close()
        if self._channel is not None:
            self._channel.end_waits()
        # Ends calls that wait, and returns when no thread is in one any more. The handle stays, for
        # who is on his way there.
        if self._handle:
            self._library.comm_close(self._handle)
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            self._preparer.clear()
            self._release()
            # A variable that outlives the program's last line would keep the group past
            # destroy_process_group(), and gloo then aborts the interpreter at its exit.
            self.group = None  # type: ignore[assignment]

    def _peer_ended(self, rank: int, settled: bool) -> None:
        """The process of a peer has ended; `settled`: what it had sent has arrived."""
        if self._handle:
            self._library.comm_peers_died(self._handle, 1 << rank, int(settled))
        if self._channel is not None:
            self._channel.peer_ended(rank)

    def _become_fork(self) -> None:
        """In a child of fork(): nothing here may touch what the parent uses."""
        self._closed = True
        self._lock = threading.Lock()  # another thread may have held it
        self._fast.close()

    def __copy__(self) -> NoReturn:
        raise TypeError(_NO_COPIES)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(_NO_COPIES)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(_NO_COPIES)

    def _release(self) -> None:
        """Unmaps the workspaces, unless a CUDA graph may use them: then they stay for good."""
        if not self._handle or self._library.comm_close(self._handle) != _native.BUSY:
            self._workspace.release()

    def __enter__(self) -> Communicator:
        if self._closed:
            self._refuse()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # At interpreter exit modules may be gone, contextlib among them; the system then releases
        # the memory.
        try:
            self.close()
            if self._handle:
                self._library.comm_destroy(self._handle)
            if self._channel is not None:
                self._channel.destroy()
        except Exception:  # noqa: BLE001
            pass

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.name
        return f"<Communicator {state}: rank {self.rank} of {self.world_size} on {self.device}>"


_NO_COPIES = (
    "a Communicator cannot be copied or pickled: it is one rank's end of an exchange with other "
    "processes, and a copy would release what the original uses. Pass the object itself, or its "
    "`name` to allnorm.communicator.communicator() in the same process; other processes make their "
    "own."
)


def _reporter(comm: weakref.ref[Communicator]) -> Callable[[int, bool], None]:
    """What a Watch calls; it does not keep the communicator."""

    def ended(rank: int, settled: bool) -> None:
        living = comm()
        if living is not None:
            living._peer_ended(rank, settled)

    return ended


def _become_forks() -> None:
    _by_name.clear()
    for comm in list(_living):
        comm._become_fork()


os.register_at_fork(after_in_child=_become_forks)


def _checked_timeout(timeout: Any) -> datetime.timedelta | None:
    if timeout is None:
        return None
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if number and 0 < timeout < math.inf:
        return config.duration(timeout)
    if not isinstance(timeout, datetime.timedelta) or timeout <= datetime.timedelta(0):
        raise ValueError(
            f"timeout={timeout!r}: expected a positive number of seconds or datetime.timedelta."
        )
    return timeout


def _wait_seconds(timeout: Any) -> float:
    """How long to wait for ranks that check their arguments; these may be wrong."""
    try:
        given = _checked_timeout(timeout) or config.read_settings().timeout
    except (ValueError, ConfigurationError):
        given = None
    return (given or config.DEFAULT_TIMEOUT).total_seconds()


def _nanoseconds(timeout: datetime.timedelta) -> int:
    return min(int(timeout.total_seconds() * 1e9), _MAX_TIMEOUT_NS)


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: {error}") from None
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise UnsupportedError(f"device={device}: expected a CUDA device or the CPU.")
    if not torch.cuda.is_available():
        raise UnsupportedError(f"device={device}: torch finds no CUDA device. Use device='cpu'.")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    return torch.device("cuda", index)


def _launch_arguments(
    first_op: Any, early_trigger: Any, dependent_launch: Any
) -> dict[str, int | bool]:
    """Those that the library is opened with, checked."""
    arguments.check_count("first_op", first_op)
    for name, value in (("early_trigger", early_trigger), ("dependent_launch", dependent_launch)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected True or False.")
    return {
        "first_op": first_op % _OPERATIONS,
        "early_trigger": early_trigger,
        "dependent_launch": dependent_launch,
    }


def _build_of(library: _native.Library) -> str:
    """What must be the same code on every rank, in words; which of its code runs is not part of it.

    Kernels for other instruction sets give the same bits and know the same protocol.
    """
    parts = {"package": __version__, **library.build_info()}
    return ", ".join(f"{name} {value}" for name, value in parts.items() if name != "isa")


def _check_alike(agreed: list[dict[str, Any]]) -> None:
    """Raises ValueError, on every rank, unless all ranks pass the same."""
    texts = []
    for name, first in agreed[0].items():
        if any(other[name] != first for other in agreed):
            values = (f"{other[name]!r} on rank {rank}" for rank, other in enumerate(agreed))
            texts.append(f"{name} is {', '.join(values)}")
    if not texts:
        return
    remedy = "Pass the same on every rank"
    if any(other["library"] != agreed[0]["library"] for other in agreed):
        remedy += ", and install the same build of allnorm for all of them"
    raise ValueError(f"the ranks are different: {'; '.join(texts)}. {remedy}.")


def _max_row_bytes(device: torch.device) -> int | None:
    """The widest row that the fused kernels hold on this device; None if any."""
    if device.type == "cpu":
        return None
    # 512 threads of 16 bytes a block; clusters of up to 8 blocks, if the code that the driver has
    # loaded knows them, which the device alone does not decide.
    return int(_native.library("cuda").device_code(device.index).max_row_bytes)
