"""The communicator: one group of ranks with a symmetric workspace."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import threading
import weakref
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from allnorm import _native, arguments, config, policy, workspace
from allnorm.arguments import DTYPES, NormArguments
from allnorm.calls import Calls
from allnorm.errors import CommunicatorClosedError, UnsupportedError
from allnorm.launch import describe_call, raise_status
from allnorm.policy import Plan
from allnorm.quant import (
    DEFAULT_QUANT,
    Quant,
    QuantizedNorm,
    check_hidden_size,
    check_quant,
    from_op_results,
    op_arguments,
)

_by_name: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
_created: dict[str, int] = {}


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


class Communicator(Calls):
    """All-reduce, residual add and RMSNorm over the ranks of a process group, in one launch.

    Collective: every rank of the group creates it, and makes the same calls in the same order.
    Calls on one communicator are ordered: if the CUDA stream changes between calls, the new stream
    waits for the old one. Replays of CUDA graphs must be ordered with other calls by the caller, as
    with any buffer.

    Args:
        group: process group; None is the default group.
        device: device of the tensors; None is the current CUDA device, or the CPU if there is none.
        workspace_bytes: bytes of workspace per rank, at least 64 KiB; None is 256 MiB on CUDA and 4
            MiB on CPU (`ALLNORM_WORKSPACE_BYTES` otherwise). Larger inputs are cut into row chunks.
        numerics: rounding mode of calls that name none: "rounded", "unrounded", "transformers" or
            "vllm".
        timeout: how long a call may wait for a peer (`ALLNORM_TIMEOUT_SECONDS`, else 600 s).

    Raises:
        ValueError, TypeError: an argument is wrong.
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
        self._prepared = {}

        def check() -> tuple[Any, ...]:
            return self._configure(device, workspace_bytes, timeout)

        checked = workspace.agree(resolved, check, "checking the arguments of Communicator")
        if len({agreed for agreed, _ in checked}) > 1:
            raise ValueError(
                "the ranks passed different arguments (device type, workspace_bytes, numerics): "
                f"{[agreed for agreed, _ in checked]}. Pass the same on every rank."
            )
        self._workspace = workspace.create(resolved, self.device, self._workspace_bytes)
        self._open(first_op)
        self.traits = policy.Traits(
            self.device.type,
            self.world_size,
            exchange=self._workspace.obstacle,
            max_row_bytes=min((limit for _, limit in checked if limit is not None), default=None),
        )
        prefix = f"allnorm:{resolved.group_name}"
        count = _created.get(prefix, 0)
        _created[prefix] = count + 1
        self.name: str = f"{prefix}:{count}"
        _by_name[self.name] = self
        self._closed = False

    def _configure(
        self,
        device: torch.device | str | None,
        workspace_bytes: int | None,
        timeout: datetime.timedelta | None,
    ) -> tuple[Any, ...]:
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
        return (self.device.type, self._workspace_bytes, self.numerics), _max_row_bytes(self.device)

    def _open(self, first_op: int) -> None:
        def start() -> None:
            if not self._workspace.addresses:
                return
            settings = _native.CommConfig(
                struct_bytes=ctypes.sizeof(_native.CommConfig),
                rank=self.rank,
                world_size=self.world_size,
                device=-1 if self.device.type == "cpu" else self.device.index,
                workspace_bytes=self._workspace.num_bytes,
                timeout_ns=int(self.timeout.total_seconds() * 1e9),
                first_op=first_op,
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

    # ---- calls ----------------------------------------------------------------------------------

    def all_reduce(
        self, x: torch.Tensor, *, algorithm: str = "auto", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of all ranks' `x` in rank order, accumulated in float32 and rounded once.

        PyTorch equivalent, up to the order and rounding of the sum::

            dist.all_reduce(x)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16; rows may be strided. Not modified.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; the bits are the same.
            out: result, like `x`; may be `x` itself.

        Returns:
            The reduced tensor, contiguous unless `out` is given; the same bits on every rank.

        Raises:
            ValueError, TypeError: wrong arguments; every rank refuses alike.
            UnsupportedError: the requested algorithm cannot run this shape, or the dtype cannot
                run.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronisation, no allocation
        but the result ("unfused" also gathers the inputs).
        """
        if torch.compiler.is_compiling() and out is None and algorithm == "auto":
            reduced: torch.Tensor = torch.ops.allnorm.all_reduce(x, self.name)
            return reduced
        result, _ = self._call(x, None, None, None, algorithm, out, None)
        return result

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float = 1e-6,
        *,
        weight_bias: float = 0.0,
        numerics: str | None = None,
        algorithm: str = "auto",
        residual_sharded: bool = False,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce, residual add and RMSNorm in one launch.

        PyTorch equivalent, up to the order of sums::

            dist.all_reduce(x)
            residual_out = x + residual
            normed = F.rms_norm(residual_out, weight.shape, weight_bias + weight, eps)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16, this rank's partial sum; rows may
                be strided. Not modified unless it is also `out`.
            residual: like `x`, the same values on every rank; None adds nothing.
            weight: [hidden_size], dtype of `x` or float32.
            eps: added to the mean square, as float32.
            weight_bias: added to the weight in float32; 1.0 for Gemma-style weights.
            numerics: "rounded", "unrounded", "transformers" or "vllm"; None is the communicator's.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; the bits are the same.
            residual_sharded: `residual` and `residual_out` are this rank's rows only,
                [hi - lo, hidden_size] of `row_shard()`. Not by "one_shot".
            out: preallocated `normed`; may be `x` itself.
            residual_out: preallocated `residual_out`; may be `residual` itself.

        Returns:
            (normed, residual_out), contiguous and of the shape of `x` unless preallocated or
            sharded; `normed` is complete. The same bits on every rank, for every algorithm and
            batch.

        Raises:
            ValueError, TypeError: wrong arguments; every rank refuses alike.
            UnsupportedError: the requested algorithm cannot run this shape, or the dtype cannot
                run.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronisation, no allocation
        but the results ("unfused" also gathers the inputs). For inference: results carry no
        gradient.
        """
        mode = self.numerics if numerics is None else numerics
        if torch.compiler.is_compiling() and out is residual_out is None and algorithm == "auto":
            traced: tuple[torch.Tensor, torch.Tensor] = torch.ops.allnorm.all_reduce_add_rms_norm(
                x, residual, weight, eps, weight_bias, mode, self.name, residual_sharded
            )
            return traced
        norm = (eps, weight_bias, mode, residual_sharded)
        normed, summed = self._call(x, residual, weight, norm, algorithm, out, residual_out)
        assert summed is not None
        return normed, summed

    def all_reduce_add_rms_norm_quant(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float = 1e-6,
        quant: Quant = DEFAULT_QUANT,
        return_normed: bool = False,
        *,
        weight_bias: float = 0.0,
        numerics: str | None = None,
        algorithm: str = "auto",
        residual_sharded: bool = False,
        out: torch.Tensor | None = None,
        scale_out: torch.Tensor | None = None,
        normed_out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
    ) -> QuantizedNorm:
        """All-reduce, residual add, RMSNorm and quantisation to FP8 in one launch.

        The bytes are those of quantising the result of `all_reduce_add_rms_norm` afterwards.
        PyTorch equivalent for one scale a row, up to the order of sums::

            normed, residual_out = comm.all_reduce_add_rms_norm(x, residual, weight, eps)
            scale = normed.float().abs().amax(-1, keepdim=True) / 448
            quantized = (normed.float() / scale).to(torch.float8_e4m3fn)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16, this rank's partial sum; rows may
                be strided. Not modified unless it is also `normed_out`.
            residual: like `x`, the same values on every rank; None adds nothing.
            weight: [hidden_size], dtype of `x` or float32.
            eps: added to the mean square, as float32.
            quant: `Fp8PerGroup`, `Fp8PerToken` or `Fp8PerTensor`; the same on every rank.
            return_normed: whether the rows before quantisation are wanted too.
            weight_bias: added to the weight in float32; 1.0 for Gemma-style weights.
            numerics: "rounded", "unrounded", "transformers" or "vllm"; None is the communicator's.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; the bits are the same.
            residual_sharded: `residual` and the returned one are this rank's rows only,
                [hi - lo, hidden_size] of `row_shard()`. Not by "one_shot".
            out: preallocated `quantized`.
            scale_out: preallocated `scale`, as `allnorm.quant.empty_scale` makes it.
            normed_out: preallocated `normed`, which is then returned; may be `x` itself.
            residual_out: preallocated `residual`; may be the given `residual` itself.

        Returns:
            QuantizedNorm(quantized, scale, residual, normed): float8_e4m3fn of the shape of `x`;
            its scales as `quant` says, of an Fp8PerTensor the given one; the new residual; and the
            normed rows in the dtype of `x`, or None. `quantized`, `scale` and `normed` are complete
            and the same bits on every rank, for every algorithm and batch.

        Raises:
            ValueError, TypeError: wrong arguments; every rank refuses alike.
            UnsupportedError: the requested algorithm cannot run this shape, the dtype cannot run,
                or hidden_size does not consist of whole groups.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronisation, no allocation
        but the results ("unfused" also gathers the inputs). For inference: results carry no
        gradient.
        """
        mode = self.numerics if numerics is None else numerics
        fresh = out is scale_out is normed_out is residual_out is None
        if torch.compiler.is_compiling() and fresh and algorithm == "auto":
            traced = torch.ops.allnorm.all_reduce_add_rms_norm_quant(
                *(x, residual, weight, eps, *op_arguments(quant), return_normed, residual_sharded),
                *(weight_bias, mode, self.name),
            )
            return from_op_results(traced, quant, return_normed)
        return self._call_quantized(
            x,
            residual,
            weight,
            (eps, weight_bias, mode, residual_sharded),
            quant,
            return_normed or normed_out is not None,
            algorithm,
            () if fresh else (out, scale_out, residual_out, normed_out),
        )

    def all_gather_rows(
        self,
        residual_shard: torch.Tensor,
        num_tokens: int,
        *,
        algorithm: str = "auto",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All ranks' rows of a sharded residual.

        PyTorch equivalent, if every rank has equally many rows::

            dist.all_gather_into_tensor(out, residual_shard)

        Args:
            residual_shard: this rank's rows, [hi - lo, hidden_size] of `row_shard(num_tokens)`,
                float32, float16 or bfloat16; rows may be strided. Not modified.
            num_tokens: rows in all.
            algorithm: "auto", "two_shot" or "unfused"; the bits are the same.
            out: result, [num_tokens, hidden_size].

        Returns:
            [num_tokens, hidden_size], contiguous unless `out` is given; the same bits on every
            rank.

        Raises:
            ValueError, TypeError: wrong arguments, such as a shard of another height.
            UnsupportedError: the requested algorithm cannot run this shape, or the dtype cannot
                run.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronisation, no allocation
        but the result.
        """
        if torch.compiler.is_compiling() and out is None and algorithm == "auto":
            rows: torch.Tensor = torch.ops.allnorm.all_gather_rows(
                residual_shard, num_tokens, self.name
            )
            return rows
        return self._gather_rows(residual_shard, num_tokens, algorithm, out)

    # ---- inspection -----------------------------------------------------------------------------

    def row_shard(self, num_tokens: int) -> tuple[int, int]:
        """This rank's rows of a sharded residual. Pure, not collective.

        Contiguous blocks in rank order; the first `num_tokens % world_size` ranks have one row
        more.

        Args:
            num_tokens: rows in all: the product of the leading dimensions of `x`.

        Returns:
            (lo, hi): rows lo to hi - 1. The shard is [hi - lo, hidden_size].

        Raises:
            ValueError, TypeError: num_tokens is not an integer >= 0.
        """
        arguments.check_count("num_tokens", num_tokens)
        return arguments.row_shard(num_tokens, self.world_size, self.rank)

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
            The algorithm, the reason in one sentence, and the number of launches.

        Raises:
            ValueError, TypeError: wrong arguments.
            UnsupportedError: no call of this dtype, or with these groups, can run.
        """
        if num_tokens < 0 or hidden_size < 1:
            raise ValueError(
                f"num_tokens={num_tokens}, hidden_size={hidden_size}: expected >= 0 and >= 1."
            )
        if dtype not in DTYPES:
            raise UnsupportedError(f"dtype={dtype}: expected float32, float16 or bfloat16.")
        arguments.check_algorithm(algorithm)
        if quant is not None:
            check_quant(quant)
            check_hidden_size(quant, hidden_size)
        norm = NormArguments(0.0, 0.0, "rounded", residual_sharded, quant, return_normed)
        arguments.check_norm_arguments(norm)
        call = describe_call(_native.ADD_RMS_NORM, dtype, hidden_size, norm)
        return self._choose(call, num_tokens, dtype, algorithm)

    # ---- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Releases the workspace. Idempotent, not collective; waits for the device's work."""
        if self._closed:
            return
        self._closed = True
        _by_name.pop(self.name, None)
        self._prepared.clear()
        handle, self._handle = self._handle, 0
        if handle:
            self._library.comm_destroy(handle)
        self._workspace.release()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # At interpreter exit modules may be gone; the system then releases the memory.
        with contextlib.suppress(Exception):
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.name
        return f"<Communicator {state}: rank {self.rank} of {self.world_size} on {self.device}>"


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise UnsupportedError(f"device={device}: expected a CUDA device or the CPU.")
    if not torch.cuda.is_available():
        raise UnsupportedError(f"device={device}: torch finds no CUDA device. Use device='cpu'.")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    return torch.device("cuda", index)


def _max_row_bytes(device: torch.device) -> int | None:
    """The widest row that the fused kernels hold on this device; None if any."""
    if device.type == "cpu":
        return None
    # 512 threads of 16 bytes a block; clusters of up to 8 blocks from compute capability 9.0 on.
    clusters = torch.cuda.get_device_capability(device) >= (9, 0)
    return (64 << 10) if clusters else (8 << 10)
