"""The communicator: one group of ranks and the calls among them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from allnorm import policy
from allnorm.core import arguments, registry, traced
from allnorm.core.call import Runner
from allnorm.core.registry import open_communicators
from allnorm.core.resolve import group_called, resolve_device, resolve_group
from allnorm.core.shards import row_shard
from allnorm.core.shortcuts import is_traced
from allnorm.errors import CommunicatorClosedError
from allnorm.expert_sum import ExpertSum
from allnorm.islands import Islands
from allnorm.policy import Plan
from allnorm.post_norm import PostNorm
from allnorm.quant import DEFAULT_QUANT, Quant, QuantizedNorm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from allnorm.core.endpoint import Stats
    from allnorm.core.opening import Settings


class Communicator:
    """All-reduce, residual add and RMSNorm over the ranks of a process group, in one launch.

    Collective: every rank of the group creates it, and makes the same calls in the same order.
    Calls on one communicator run one at a time, whatever their CUDA streams: eager calls in program
    order, captured calls in the order of their capture. The caller must order launches of CUDA
    graphs, among each other and with eager calls, as with any buffer. An eager call raises while
    the stream of the previous call is being captured.

    Threads may share a communicator, one at a time, if the order of calls is the same on every
    rank. If two threads call it at the same time, the communicator fails on every rank. Independent
    threads need a communicator each, created in the same order on every rank. Any thread may call
    `close()`, which ends other threads' calls. A child of `fork()` may not use or close it.

    Args:
        group: process group, or DeviceMesh of one dimension; None: the default group.
        device: device of the tensors; None: the current CUDA device, or the CPU without CUDA.
        workspace_bytes: bytes of workspace per rank, at least 64 KiB; None:
            `ALLNORM_WORKSPACE_BYTES`, else 256 MiB on CUDA and 4 MiB on CPU. Larger inputs run in
            chunks of rows.
        numerics: default rounding mode of the calls: "rounded", "unrounded", "transformers" or
            "vllm".
        timeout: how long a call, or the constructor, waits for a peer, in seconds or as a
            timedelta; None: `ALLNORM_TIMEOUT_SECONDS`, else 600 s. Waits end early if the process
            of the peer exits.
        islands: sets of ranks that write to each other's memory. "auto" detects them: the ranks of
            one host and, among its GPUs, those with peer access. Or a sequence of sequences of
            group ranks, the same on every rank. Multiple islands of equal size run "hierarchical",
            other islands "unfused"; both sum island by island (docs/numerics.md, step 1b).
        tuning_dir: folder of the tables that `allnorm tune` writes; None: `ALLNORM_TUNING_DIR`,
            else the user's cache. Tables affect speed, never results. Invalid tables, and tables
            that some ranks do not have, are ignored, and rank 0 warns.
        max_blocks: CUDA: maximum thread blocks (of up to 512 threads) per call, which leaves room
            for other kernels; None: as many as the GPU can run, one or two per SM. Must be the same
            on every rank; results do not depend on it. At least two blocks run, or twice as many as
            one wide row needs.
        early_trigger: CUDA: lets the next kernel of the stream, if it uses programmatic dependent
            launch, start before a call's last stores. That kernel must not read before
            `griddepcontrol.wait`, as CUDA requires. False: it starts when the call ends, which
            costs 0.3 to 0.9 us per call.
        dependent_launch: CUDA: lets a call start before the preceding kernel ends, and then wait
            for it. The call starts once that kernel triggers its dependents or, in a capture, once
            all its blocks have started. False: the call starts after that kernel.
        first_op: number of the first operation, the same on every rank; wraps at 2**32.

    Raises:
        ValueError, TypeError: an argument is wrong, or ranks pass different arguments or have
            different builds; raised on every rank, with the values of each.
        ConfigurationError: an `ALLNORM_*` variable is misspelled or invalid.
        NativeLibraryError: the backend's library is missing or cannot be loaded.
        AllnormError: another rank failed; every rank raises if one does.
        PeerTimeoutError: another rank did not arrive within `timeout`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
        workspace_bytes: int | None = None,
        numerics: str = "rounded",
        timeout: datetime.timedelta | float | None = None,
        islands: str | Sequence[Sequence[int]] = "auto",
        *,
        tuning_dir: str | os.PathLike[str] | None = None,
        max_blocks: int | None = None,
        early_trigger: bool = True,
        dependent_launch: bool = True,
        first_op: int = 0,
    ) -> None:
        # Imported here: half of allnorm, which a process without communicators does not load.
        from allnorm.core.opening import Settings

        settings = Settings(
            device=device,
            workspace_bytes=workspace_bytes,
            numerics=numerics,
            timeout=timeout,
            islands=islands,
            tuning_dir=tuning_dir,
            max_blocks=max_blocks,
            early_trigger=early_trigger,
            dependent_launch=dependent_launch,
            first_op=first_op,
        )
        self._open_with(resolve_group(group), settings, named_as_group=False)

    def _open_with(
        self, group: dist.ProcessGroup, settings: Settings, *, named_as_group: bool
    ) -> None:
        from allnorm.core.opening import open_endpoint

        with registry.opening(group, named_as_group=named_as_group) as last_number:
            self._endpoint = open_endpoint(group, settings, last_number)
        self._dispatcher = self._endpoint.dispatcher
        self.name: str = self._endpoint.name
        self.rank: int = self._endpoint.rank
        self.world_size: int = self._endpoint.world_size
        self.device: torch.device = self._endpoint.device
        self.timeout: datetime.timedelta = self._endpoint.timeout
        self.numerics = settings.numerics
        registry.add(self, group)

    @classmethod
    def for_group(
        cls,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> Communicator:
        """Returns the communicator of a group and device; creates it, with defaults, if needed.

        Collective if it creates one. All threads get the same object, and may use it one at a time;
        threads that run independently need a process group each. The communicator is closed by
        `dist.destroy_process_group()`, or when the interpreter exits. The first call after an
        explicit `close()` creates a new one.

        Args:
            group: process group, or DeviceMesh of one dimension; None: the default group.
            device: device of the tensors; None: the current CUDA device, or the CPU without CUDA.

        Raises the errors that the constructor raises.
        """
        comm = cls._for_group(group, device)
        assert comm is not None
        return comm

    @classmethod
    def _for_group(
        cls, group: Any, device: Any, unless: Callable[[], bool] | None = None
    ) -> Communicator | None:
        """Acts like `for_group`, but returns None instead of creating one if `unless()` is true."""
        resolved = resolve_group(group)
        resolved_device = resolve_device(device)
        comm = registry.find_of_group(resolved, resolved_device)
        if comm is not None or (unless is not None and unless()):
            return comm
        from allnorm.core.opening import Settings

        def make() -> Communicator:
            made = cls.__new__(cls)
            made._open_with(resolved, Settings(device=resolved_device), named_as_group=True)
            return made

        return registry.make_of_group(resolved, resolved_device, make)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; None after `close()` and after the group was destroyed."""
        return self._endpoint.group  # type: ignore[return-value]

    @property
    def islands(self) -> Islands:
        """The islands, sorted by their lowest ranks; the ranks of each are ascending."""
        return self._endpoint.chooser.traits.islands

    @property
    def traits(self) -> policy.Traits:
        """The properties that determine the choice of algorithm, equal on every rank."""
        return self._endpoint.chooser.traits

    def _runner(self, x: object) -> Runner:
        """Returns the runner of calls of `x`: the dispatcher, or torch operators while tracing."""
        if is_traced(x):
            return traced.Operators(self.name, self.rank, self.world_size)
        return self._dispatcher

    # ---- calls ----------------------------------------------------------------------------------

    def all_reduce(
        self, x: torch.Tensor, *, algorithm: str = "auto", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sums `x` over the ranks, in rank order in float32, and rounds once.

        PyTorch equivalent, up to the order and rounding of the sum:

            dist.all_reduce(x)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16; rows may be strided. Not modified.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; over several islands
                "hierarchical" or "unfused". Results are bit-identical.
            out: preallocated result, like `x`; may be `x` itself.

        Returns:
            The sum, bit-identical on every rank; contiguous unless `out` is given.

        Raises:
            ValueError, TypeError: wrong arguments; raised on every rank.
            UnsupportedError: the dtype is unsupported, or the algorithm cannot run this shape.
            PeerTimeoutError: an earlier call (on CPU also this one) timed out waiting for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile. It does not synchronize, and
        allocates only the result ("unfused" also gathers the inputs). While it is traced
        (torch.compile, torch.export, make_fx), the result is copied to `out`.
        """
        result: torch.Tensor = self._runner(x).call(
            op="all_reduce", source=x, algorithm=algorithm, out=out
        )
        return result

    def all_reduce_add_rms_norm(
        self,
        x: torch.Tensor | ExpertSum,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        *,
        weight_bias: float = 0.0,
        numerics: str | None = None,
        algorithm: str = "auto",
        residual_sharded: bool = False,
        post_norm: PostNorm | None = None,
        scale: float = 1.0,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
    ) -> tuple[Any, torch.Tensor]:
        """Reduces `x` over the ranks, adds the residual and applies RMSNorm in one launch.

        PyTorch equivalent, up to the order of sums:

            dist.all_reduce(x)
            residual_out = x + residual  # with post_norm, scale: scale * post_norm(x) + residual
            normed = F.rms_norm(residual_out, weight.shape, weight_bias + weight, eps)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16: this rank's partial sum; rows may
                be strided. Not modified unless it is also `out`. Or an `ExpertSum`, which is summed
                first; then "like `x`" below means [num_tokens, hidden_size] in the dtype of its
                rows.
            residual: like `x`, equal on every rank; None: nothing is added.
            weight: [hidden_size], dtype of `x` or float32. With `post_norm` it may be None: no
                second norm.
            eps: added to the mean square, as float32.
            weight_bias: added to the weight in float32; 1.0 for Gemma-style weights.
            numerics: "rounded", "unrounded", "transformers" or "vllm"; None: the communicator's.
            algorithm: "auto", "one_shot", "two_shot" or "unfused"; over several islands
                "hierarchical" or "unfused". Results are bit-identical.
            residual_sharded: whether `residual` and `residual_out` are only this rank's rows,
                [hi - lo, hidden_size] of `row_shard()`. Not with "one_shot".
            post_norm: norm of the reduced sum before the residual add (Gemma 2 to 4, GLM-4,
                EXAONE 4, OLMo 2); the same on every rank.
            scale: factor of the reduced sum, or of its post norm, before the residual add, as
                float32 (Granite, MiniCPM).
            out: preallocated `normed`; may be `x` itself.
            residual_out: preallocated `residual_out`; may be `residual` itself.

        Returns:
            (normed, residual_out), in the shape of `x` unless sharded, contiguous unless
            preallocated. `normed` has all rows, and is None without a weight. Results are
            bit-identical on every rank, for every algorithm and batch.

        Raises the errors of `all_reduce`.

        Collective. Safe in CUDA graphs and under torch.compile. It does not synchronize, and
        allocates only the results ("unfused" also gathers the inputs). For inference: results have
        no gradient. While it is traced (torch.compile, torch.export, make_fx), results are copied
        to `out` and `residual_out`.
        """
        results: tuple[Any, torch.Tensor] = self._runner(x).call(
            op="all_reduce_add_rms_norm",
            source=x,
            residual=residual,
            weight=weight,
            eps=eps,
            weight_bias=weight_bias,
            numerics=self.numerics if numerics is None else numerics,
            algorithm=algorithm,
            residual_sharded=residual_sharded,
            post_norm=post_norm,
            scale=scale,
            out=out,
            residual_out=residual_out,
        )
        return results

    def all_reduce_add_rms_norm_quant(
        self,
        x: torch.Tensor | ExpertSum,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        quant: Quant = DEFAULT_QUANT,
        return_normed: bool = False,
        *,
        weight_bias: float = 0.0,
        numerics: str | None = None,
        algorithm: str = "auto",
        residual_sharded: bool = False,
        post_norm: PostNorm | None = None,
        scale: float = 1.0,
        quantized_out: torch.Tensor | None = None,
        scale_out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        normed_out: torch.Tensor | None = None,
    ) -> QuantizedNorm:
        """Runs `all_reduce_add_rms_norm` and quantizes its result, in one launch.

        Bit-identical to quantizing afterwards. PyTorch equivalent with one scale per row, up to the
        order of sums:

            normed, residual_out = comm.all_reduce_add_rms_norm(x, residual, weight, eps)
            scale = normed.float().abs().amax(-1, keepdim=True) / 448
            quantized = (normed.float() / scale).to(torch.float8_e4m3fn)

        Args:
            x: as for `all_reduce_add_rms_norm`; not modified unless it is also `normed_out`.
            residual: like `x`, equal on every rank; None: nothing is added.
            weight: [hidden_size], dtype of `x` or float32.
            eps: added to the mean square, as float32.
            quant: `Fp8PerGroup`, `MxFp8()`, `Fp8PerToken`, `Fp8PerTensor` or `NvFp4`; the same on
                every rank.
            return_normed: whether to return the rows before quantization too.
            weight_bias: added to the weight in float32; 1.0 for Gemma-style weights.
            numerics: "rounded", "unrounded", "transformers" or "vllm"; None: the communicator's.
            algorithm: as for `all_reduce_add_rms_norm`.
            residual_sharded: whether the given and the returned residual are only this rank's rows.
            post_norm: norm of the reduced sum before the residual add.
            scale: factor of the reduced sum, or of its post norm, as float32.
            quantized_out: preallocated `quantized`.
            scale_out: preallocated `scale`, from `allnorm.quant.empty_scale`.
            residual_out: preallocated `residual`; may be the given `residual` itself.
            normed_out: preallocated `normed`, which is then returned; may be `x` itself.

        Returns:
            QuantizedNorm(quantized, scale, residual, normed): `quantized` is float8_e4m3fn in the
            shape of `x`, for NvFp4 uint8 of half the width. `scale` is as `quant` describes, for
            Fp8PerTensor the given tensor. `normed` is in the dtype of `x`, or None. All but a
            sharded residual have all rows, bit-identical on every rank, for every algorithm and
            batch.

        Raises the errors of `all_reduce`, and UnsupportedError if hidden_size is not a multiple of
        the group size.

        Collective. Graphs, tracing, allocation and gradients as for `all_reduce_add_rms_norm`; a
        traced call does not support `scale_out`.
        """
        results = self._runner(x).call(
            op="all_reduce_add_rms_norm_quant",
            source=x,
            residual=residual,
            weight=weight,
            eps=eps,
            weight_bias=weight_bias,
            numerics=self.numerics if numerics is None else numerics,
            algorithm=algorithm,
            residual_sharded=residual_sharded,
            post_norm=post_norm,
            scale=scale,
            quant=quant,
            return_normed=return_normed if normed_out is None else True,
            out=normed_out,
            residual_out=residual_out,
            quantized_out=quantized_out,
            scale_out=scale_out,
        )
        return QuantizedNorm(*results)

    def all_gather_rows(
        self,
        residual_shard: torch.Tensor,
        num_tokens: int,
        *,
        algorithm: str = "auto",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gathers all ranks' rows of a sharded residual.

        PyTorch equivalent, if every rank has the same number of rows:

            dist.all_gather_into_tensor(out, residual_shard)

        Args:
            residual_shard: this rank's rows, [hi - lo, hidden_size] of `row_shard(num_tokens)`,
                float32, float16 or bfloat16; rows may be strided. Not modified.
            num_tokens: total number of rows.
            algorithm: "auto", "two_shot" or "unfused"; over several islands "hierarchical" or
                "unfused". Results are bit-identical.
            out: preallocated result, [num_tokens, hidden_size].

        Returns:
            [num_tokens, hidden_size], contiguous unless `out` is given.

        Raises the errors of `all_reduce`, also ValueError for a wrong number of rows.

        Collective. Graphs, tracing and allocation as for `all_reduce`.
        """
        result: torch.Tensor = self._runner(residual_shard).call(
            op="all_gather_rows",
            source=residual_shard,
            algorithm=algorithm,
            num_tokens=num_tokens,
            out=out,
        )
        return result

    def row_shard(self, num_tokens: int) -> tuple[int, int]:
        """Returns this rank's rows of a sharded residual: `(lo, hi)` means rows lo to hi - 1.

        Ranks hold contiguous blocks in rank order; the first `num_tokens % world_size` ranks have
        one row more. Pure, not collective.

        Args:
            num_tokens: total number of rows: the product of the leading dimensions of `x`.

        Raises:
            ValueError, TypeError: num_tokens is not an integer >= 0.
            CommunicatorClosedError: after `close()`.
        """
        self._endpoint.check_open()
        arguments.check_count("num_tokens", num_tokens)
        return row_shard(num_tokens, self.world_size, self.rank)

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
        post_norm: PostNorm | None = None,
        scale: float = 1.0,
        experts: bool = False,
    ) -> Plan:
        """Returns how a call with a norm would run, or raises what that call would raise.

        Pure, not collective, the same on every rank. `post_norm`, `scale` and `experts` do not
        affect the algorithm.

        Args:
            num_tokens: number of rows, >= 0.
            hidden_size: number of columns, >= 1.
            dtype: dtype of `x`.
            quant: spec of the quantization; None: not quantized.
            residual_sharded: whether each rank holds only its own rows of the residual.
            return_normed: whether a quantized call returns `normed` too.
            algorithm: the requested algorithm.
            post_norm: norm before the residual add.
            scale: factor of the reduced sum.
            experts: whether `x` is an `ExpertSum`.

        Returns:
            The algorithm, the reason in one sentence, the number of launches, and the source of the
            decision: a tuned table, a shipped table, or the built-in rule.

        Raises:
            ValueError, TypeError: wrong arguments.
            UnsupportedError: no call with this dtype, width or group size can run, or the requested
                algorithm cannot.
            CommunicatorClosedError: after `close()`.
        """
        self._endpoint.check_open()
        call = arguments.check_planned(
            num_tokens,
            hidden_size,
            dtype,
            experts,
            quant=quant,
            residual_sharded=residual_sharded,
            return_normed=return_normed,
            algorithm=algorithm,
            post_norm=post_norm,
            scale=scale,
        )
        return self._endpoint.choose(call)

    def check(self) -> None:
        """Raises the error of a failed wait, if one has failed. Not collective; never synchronizes.

        Raises:
            PeerTimeoutError: this rank needed a peer that did not arrive in time, made a different
                call (PeerDivergedError), closed its communicator (PeerLeftError) or exited
                (PeerDiedError); or a wait was interrupted.
            AllnormError: CUDA refused a launch of this rank, or its ordering with other streams;
                peers may have made the call.
            CommunicatorClosedError: after `close()`.
        """
        self._endpoint.check()

    def stats(self) -> Stats:
        """Returns this rank's counts of calls by algorithm, and the failure, if any.

        Not collective. On CUDA it copies the counts from the device without waiting for enqueued
        work; this takes about 50 us. During a capture it is safe, and is not captured.

        Raises:
            CommunicatorClosedError: after `close()`.
        """
        return self._endpoint.stats()

    def _use_tables(self, tables: tuple[policy.Table, ...]) -> None:
        """Replaces the tuning tables for later calls; all ranks must do so before the same call."""
        self._endpoint.chooser.use_tables(tables)
        self._endpoint.dispatcher.forget()

    # ---- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Releases the workspace and `group`. Idempotent, not collective; waits for the device.

        Calls of other threads end, or raise CommunicatorClosedError. CUDA graphs that captured
        calls can still be launched afterwards, by all ranks or by none; the workspaces of such a
        communicator are kept until the process exits.

        Raises:
            AllnormError: called from a signal handler during a call of this communicator.
            CommunicatorClosedError: this process is a fork of the communicator's process.
        """
        self._endpoint.close()
        registry.remove(self)

    @property
    def is_closed(self) -> bool:
        """Returns whether calls are refused: after `close()`, and in a child of `fork()`."""
        return self._endpoint.closed

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # called by copy, deepcopy and pickle
        raise TypeError(
            "a Communicator cannot be copied or pickled: it is one rank's end of an exchange with "
            "other processes, and a copy would release what the original uses. Pass the object "
            "itself, or its `name` to allnorm.communicator.communicator() in the same process; "
            "create a new one in other processes."
        )

    def __enter__(self) -> Communicator:
        self._endpoint.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:  # the constructor may have raised, or modules may be gone at interpreter exit
            self.close()
            self._endpoint.destroy()
        except Exception:  # noqa: BLE001
            pass

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else self.name
        return f"<Communicator {state}: rank {self.rank} of {self.world_size} on {self.device}>"


def communicator(name: str, device_type: str | None = None) -> Communicator:
    """Returns the open communicator called `name`, or that of the process group with this name.

    Cached compiled code may run before its communicator exists. This function then creates it,
    collectively, like `Communicator.for_group`. `device_type` None matches any device.

    Raises:
        CommunicatorClosedError: there is no open communicator and no process group of this name.
    """
    comm = registry.find(name, device_type)
    if comm is not None:
        return comm
    group = group_called(name)
    if group is not None and device_type is not None:
        return Communicator.for_group(group, resolve_device(device_type))
    names = sorted({other.name for other in open_communicators()})
    raise CommunicatorClosedError(
        f"no open communicator is called {name!r}: it was closed, or is in a different process. "
        f"Open ones: {names or 'none'}."
    )
