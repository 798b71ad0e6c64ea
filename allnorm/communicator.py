"""The communicator: one group of ranks with a symmetric workspace."""

from __future__ import annotations

import ctypes
import datetime
import os
import threading
import warnings
import weakref
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from allnorm import _native, arguments, config, fast_call, policy, shortcuts, tuning, workspace
from allnorm._version import __version__
from allnorm.arguments import DTYPES, NormArguments
from allnorm.collectives import Collectives
from allnorm.errors import CommunicatorClosedError, UnsupportedError
from allnorm.launch import describe_call, raise_status
from allnorm.policy import Plan
from allnorm.prepare import Preparer
from allnorm.quant import Quant, check_hidden_size, check_quant

_by_name: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
_created: dict[str, int] = {}
_OPERATIONS = 1 << 32  # numbers that they have
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

    Args:
        group: process group; None is the default group.
        device: device of the tensors; None is the current CUDA device, or the CPU if there is none.
        workspace_bytes: bytes of workspace per rank, at least 64 KiB; None is 256 MiB on CUDA and 4
            MiB on CPU (`ALLNORM_WORKSPACE_BYTES` otherwise). Larger inputs are cut into row chunks.
        numerics: rounding mode of calls that name none: "rounded", "unrounded", "transformers" or
            "vllm".
        timeout: how long a call may wait for a peer (`ALLNORM_TIMEOUT_SECONDS`, else 600 s).
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
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        workspace_bytes: int | None = None,
        numerics: str = "rounded",
        timeout: datetime.timedelta | None = None,
        *,
        tuning_dir: str | os.PathLike[str] | None = None,
        max_blocks: int | None = None,
        early_trigger: bool = True,
        dependent_launch: bool = True,
        first_op: int = 0,
    ) -> None:
        self._closed = True
        self._handle = 0
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

        checked = workspace.agree(resolved, check, "checking the arguments of Communicator")
        _check_alike([agreed for agreed, *_ in checked])
        tables, warning = tuning.tables(self._tables, [found for *_, found in checked])
        if warning and self.rank == 0:
            warnings.warn(warning, stacklevel=2)
        self._workspace = workspace.create(resolved, self.device, self._workspace_bytes)
        flags = 0 if early_trigger else _native.LATE_TRIGGER
        flags |= 0 if dependent_launch else _native.NO_DEPENDENT_LAUNCH
        try:
            self._open(first_op, flags)
            self._prepare_calls(tables, [limit for _, limit, _ in checked])
        except BaseException:
            self._release()
            raise
        prefix = f"allnorm:{resolved.group_name}"
        count = _created.get(prefix, 0)
        _created[prefix] = count + 1
        self.name: str = f"{prefix}:{count}"
        _by_name[self.name] = self
        self._closed = False

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
        timeout: datetime.timedelta | None,
        max_blocks: int | None,
    ) -> tuple[dict[str, Any], int | None]:
        settings = config.read_settings()
        arguments.check_numerics(self.numerics)
        self.device = _resolve_device(device)
        self._library = _native.library(self.device.type)
        if timeout is None:
            timeout = settings.timeout or config.DEFAULT_TIMEOUT
        if not isinstance(timeout, datetime.timedelta) or timeout <= datetime.timedelta(0):
            raise ValueError(f"timeout={timeout!r}: expected a positive datetime.timedelta.")
        self.timeout = timeout
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

    def _open(self, first_op: int, flags: int) -> None:
        def start() -> None:
            if not self._workspace.addresses:
                return
            settings = _native.CommConfig(
                struct_bytes=ctypes.sizeof(_native.CommConfig),
                rank=self.rank,
                world_size=self.world_size,
                device=-1 if self.device.type == "cpu" else self.device.index,
                workspace_bytes=self._workspace.num_bytes,
                timeout_ns=min(int(self.timeout.total_seconds() * 1e9), _MAX_TIMEOUT_NS),
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
        workspace.agree(self.group, start, "starting the communicator")

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

        CUDA graphs in which calls were captured may be launched afterwards, as before: by all ranks
        or by none. The workspace, on every rank, stays as long as such a graph does, and is freed
        when the next communicator is made or closed after that.
        """
        if self._closed:
            return
        self._closed = True
        _by_name.pop(self.name, None)
        self._fast.close()
        self._preparer.clear()
        self._release()
        # A variable that outlives the program's last line would keep the group past
        # destroy_process_group(), and gloo then aborts the interpreter at its exit.
        self.group = None  # type: ignore[assignment]

    def _release(self) -> None:
        handle, self._handle = self._handle, 0
        library = self._library
        self._workspace.release(lambda: not handle or library.comm_destroy(handle) != _native.BUSY)

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
        try:  # noqa: SIM105
            self.close()
        except Exception:  # noqa: BLE001
            pass

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.name
        return f"<Communicator {state}: rank {self.rank} of {self.world_size} on {self.device}>"


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
