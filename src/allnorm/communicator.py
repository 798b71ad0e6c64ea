"""The communicator: one group of ranks, and every call among them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from allnorm import policy
from allnorm.core import arguments, registry, traced
from allnorm.core.call import Call, Runner
from allnorm.core.registry import open_communicators
from allnorm.core.resolve import group_called, resolve_device, resolve_group
from allnorm.core.shards import row_shard
from allnorm.core.shortcuts import is_traced
from allnorm.errors import CommunicatorClosedError
from allnorm.expert_sum import ExpertSum
from allnorm.islands import Islands
from allnorm.policy import Plan
from allnorm.post_norm import PostNorm
from allnorm.quant import (
    DEFAULT_QUANT,
    Quant,
    QuantizedNorm,
    check_hidden_size,
    check_quant,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from allnorm.core.endpoint import Stats
    from allnorm.core.opening import Settings


class Communicator:
    """All-reduce, residual add and RMSNorm over the ranks of a process group, in one launch.

    Collective: every rank of the group creates it, and makes the same calls in the same order.
    Calls on one communicator are ordered, whatever CUDA streams they are on: eager ones one after
    the other, captured ones within their capture. Launches of CUDA graphs must be ordered by the
    caller, among each other and with eager calls, as with any buffer. An eager call while the
    stream of the one before is being captured cannot be ordered: it raises.

    Threads may call one communicator in turns, in an order that is the same on every rank. Calls
    of two threads at the same time have none: where they meet, the communicator ends on every rank.
    Threads that are independent of each other take a communicator each, made in the same order on
    every rank. Any thread may call `close()`, which ends the calls of others. A child of `fork()`
    may neither use nor close a communicator of its parent.

    Args:
        group: process group, or DeviceMesh of one dimension; None is the default group.
        device: device of the tensors; None is the current CUDA device, or the CPU if there is none.
        workspace_bytes: bytes of workspace per rank, at least 64 KiB; None is 256 MiB on CUDA and 4
            MiB on CPU (`ALLNORM_WORKSPACE_BYTES` otherwise). Larger inputs are cut into row chunks.
        numerics: rounding mode of calls that name none: "rounded", "unrounded", "transformers" or
            "vllm".
        timeout: how long a call, or the making of the communicator, may wait for a peer; seconds or
            a timedelta (`ALLNORM_TIMEOUT_SECONDS`, else 600 s). A peer whose process has ended is
            not waited for.
        islands: which ranks write to each other's memory. "auto" finds them: those of one host,
            and on GPUs those of them that reach each other. Or a sequence of sequences of group
            ranks, the same on every rank. Several of equal size run "hierarchical", others
            "unfused"; of both the sum is made island by island (docs/numerics.md, step 1b).
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
        dependent_launch: CUDA: whether calls begin before the kernel before them has ended, and
            then wait for that: if it lets its dependents in (programmatic dependent launch), and
            captured ones otherwise when all its blocks have begun. False: they begin at its end.
        first_op: the number of the first operation, the same on every rank; it wraps at 2**32.

    Raises:
        ValueError, TypeError: an argument is wrong, or ranks pass different ones or have loaded
            different builds: on every rank, with the values of each.
        ConfigurationError: an `ALLNORM_*` variable is misspelled or wrong.
        NativeLibraryError: the backend's library is missing or cannot be loaded.
        AllnormError: another rank failed to create its part. Every rank raises if one does.
        PeerTimeoutError: another rank did not come within `timeout`.
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
        # Half of what allnorm loads, which a process that opens no communicator goes without.
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
        """The one communicator of a group and device, made with default arguments when needed.

        Threads that ask for it get the same one, and must take turns: those that are independent
        take a process group each. It is closed with its process group, by
        `dist.destroy_process_group()`, or when the interpreter exits. After an explicit `close()`
        the next call makes another.

        Args:
            group: process group, or DeviceMesh of one dimension; None is the default group.
            device: device of the tensors; None is the current CUDA device, or the CPU if there is
                none.

        Returns:
            The same object for the same group and device.

        Raises what the constructor does. Collective when it makes one, not otherwise.
        """
        comm = cls._for_group(group, device)
        assert comm is not None
        return comm

    @classmethod
    def _for_group(
        cls, group: Any, device: Any, unless: Callable[[], bool] | None = None
    ) -> Communicator | None:
        """As `for_group`; None where it would have to make one and `unless` returns True."""
        resolved = resolve_group(group)
        place = resolve_device(device)
        comm = registry.find_of_group(resolved, place)
        if comm is not None or (unless is not None and unless()):
            return comm
        from allnorm.core.opening import Settings

        def make() -> Communicator:
            made = cls.__new__(cls)
            made._open_with(resolved, Settings(device=place), named_as_group=True)
            return made

        return registry.make_of_group(resolved, place, make)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; None after `close()` and when it was destroyed."""
        return self._endpoint.group  # type: ignore[return-value]

    @property
    def islands(self) -> Islands:
        """The ranks of each island in rising order, islands in the order of their lowest ranks."""
        return self._endpoint.chooser.traits.islands

    @property
    def traits(self) -> policy.Traits:
        """What decides about algorithms, the same on every rank."""
        return self._endpoint.chooser.traits

    def _runner(self, x: object) -> Runner:
        """Returns what runs a call of `x`: the dispatcher, or operators for a tracer to see."""
        return traced.Operators(self) if is_traced(x) else self._dispatcher

    # ---- calls ----------------------------------------------------------------------------------

    def all_reduce(
        self, x: torch.Tensor, *, algorithm: str = "auto", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of all ranks' `x` in rank order, accumulated in float32 and rounded once.

        PyTorch equivalent, up to the order and rounding of the sum::

            dist.all_reduce(x)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16; rows may be strided. Not modified.
            algorithm: "auto", "one_shot", "two_shot" or "unfused", over several islands
                "hierarchical" or "unfused"; the bits are the same.
            out: result, like `x`; may be `x` itself.

        Returns:
            The reduced tensor, contiguous unless `out` is given; the same bits on every rank.

        Raises:
            ValueError, TypeError: wrong arguments; every rank refuses alike.
            UnsupportedError: the requested algorithm cannot run this shape, or the dtype cannot
                run.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronization, no allocation
        but the result ("unfused" also gathers the inputs). Traced (torch.compile, torch.export,
        make_fx), the result is copied to `out`.
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
        """All-reduce, residual add and RMSNorm in one launch.

        PyTorch equivalent, up to the order of sums::

            dist.all_reduce(x)
            residual_out = x + residual  # scale * post_norm(x) + residual, where they are given
            normed = F.rms_norm(residual_out, weight.shape, weight_bias + weight, eps)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16, this rank's partial sum; rows may
                be strided. Not modified unless it is also `out`. Or an `ExpertSum`, which is summed
                first; below, "like `x`" is then [num_tokens, hidden_size] in the dtype of its rows.
            residual: like `x`, the same values on every rank; None adds nothing.
            weight: [hidden_size], dtype of `x` or float32. None, with `post_norm`: there is no
                second norm.
            eps: added to the mean square, as float32.
            weight_bias: added to the weight in float32; 1.0 for Gemma-style weights.
            numerics: "rounded", "unrounded", "transformers" or "vllm"; None is the communicator's.
            algorithm: "auto", "one_shot", "two_shot" or "unfused", over several islands
                "hierarchical" or "unfused"; the bits are the same.
            residual_sharded: `residual` and `residual_out` are this rank's rows only,
                [hi - lo, hidden_size] of `row_shard()`. Not by "one_shot".
            post_norm: the norm that the reduced sum goes through before the residual is added
                (Gemma 2 to 4, GLM-4, EXAONE 4, OLMo 2); the same on every rank.
            scale: what the reduced sum, or its post norm, is multiplied by before the residual is
                added, as float32 (Granite, MiniCPM).
            out: preallocated `normed`; may be `x` itself.
            residual_out: preallocated `residual_out`; may be `residual` itself.

        Returns:
            (normed, residual_out), contiguous and of the shape of `x` unless preallocated or
            sharded; `normed` is complete, and None without a weight. The same bits on every rank,
            for every algorithm and batch.

        Raises:
            ValueError, TypeError: wrong arguments; every rank refuses alike.
            UnsupportedError: the requested algorithm cannot run this shape, or the dtype cannot
                run.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronization, no allocation
        but the results ("unfused" also gathers the inputs). For inference: results carry no
        gradient. Traced (torch.compile, torch.export, make_fx), results are copied to `out` and
        `residual_out`.
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
        """All-reduce, residual add, RMSNorm and quantization to FP8 in one launch.

        The bytes are those of quantizing the result of `all_reduce_add_rms_norm` afterwards.
        PyTorch equivalent for one scale a row, up to the order of sums::

            normed, residual_out = comm.all_reduce_add_rms_norm(x, residual, weight, eps)
            scale = normed.float().abs().amax(-1, keepdim=True) / 448
            quantized = (normed.float() / scale).to(torch.float8_e4m3fn)

        Args:
            x: [..., hidden_size], float32, float16 or bfloat16, this rank's partial sum; rows may
                be strided. Not modified unless it is also `normed_out`. Or an `ExpertSum`, which is
                summed first.
            residual: like `x`, the same values on every rank; None adds nothing.
            weight: [hidden_size], dtype of `x` or float32.
            eps: added to the mean square, as float32.
            quant: `Fp8PerGroup`, `MxFp8()`, `Fp8PerToken`, `Fp8PerTensor` or `NvFp4`; the same on
                every rank.
            return_normed: whether the rows before quantization are wanted too.
            weight_bias: added to the weight in float32; 1.0 for Gemma-style weights.
            numerics: "rounded", "unrounded", "transformers" or "vllm"; None is the communicator's.
            algorithm: "auto", "one_shot", "two_shot" or "unfused", over several islands
                "hierarchical" or "unfused"; the bits are the same.
            residual_sharded: `residual` and the returned one are this rank's rows only,
                [hi - lo, hidden_size] of `row_shard()`. Not by "one_shot".
            post_norm: the norm that the reduced sum goes through before the residual is added.
            scale: what the reduced sum, or its post norm, is multiplied by first, as float32.
            quantized_out: preallocated `quantized`.
            scale_out: preallocated `scale`, as `allnorm.quant.empty_scale` makes it.
            residual_out: preallocated `residual`; may be the given `residual` itself.
            normed_out: preallocated `normed`, which is then returned; may be `x` itself.

        Returns:
            QuantizedNorm(quantized, scale, residual, normed): float8_e4m3fn of the shape of `x`, of
            an NvFp4 uint8 half as wide;
            its scales as `quant` says, of an Fp8PerTensor the given one; the new residual; and the
            normed rows in the dtype of `x`, or None. `quantized`, `scale` and `normed` are complete
            and the same bits on every rank, for every algorithm and batch.

        Raises:
            ValueError, TypeError: wrong arguments; every rank refuses alike.
            UnsupportedError: the requested algorithm cannot run this shape, the dtype cannot run,
                or hidden_size does not consist of whole groups.
            PeerTimeoutError: an earlier call (on CPU: this one) waited in vain for a peer.
            CommunicatorClosedError: after `close()`.

        Collective. Safe in CUDA graphs and under torch.compile; no synchronization, no allocation
        but the results ("unfused" also gathers the inputs). For inference: results carry no
        gradient. Traced (torch.compile, torch.export, make_fx), results are copied to preallocated
        ones, and `scale_out` is refused.
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
        """All ranks' rows of a sharded residual.

        PyTorch equivalent, if every rank has equally many rows::

            dist.all_gather_into_tensor(out, residual_shard)

        Args:
            residual_shard: this rank's rows, [hi - lo, hidden_size] of `row_shard(num_tokens)`,
                float32, float16 or bfloat16; rows may be strided. Not modified.
            num_tokens: rows in all.
            algorithm: "auto", "two_shot" or "unfused", over several islands "hierarchical" or
                "unfused"; the bits are the same.
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

        Collective. Safe in CUDA graphs and under torch.compile; no synchronization, no allocation
        but the result. Traced (torch.compile, torch.export, make_fx), the result is copied to
        `out`.
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
        """This rank's rows of a sharded residual. Pure, not collective.

        Contiguous blocks in rank order; the first `num_tokens % world_size` ranks have one row
        more.

        Args:
            num_tokens: rows in all: the product of the leading dimensions of `x`.

        Returns:
            (lo, hi): rows lo to hi - 1. The shard is [hi - lo, hidden_size].

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
        """Returns what a call that ends with a norm will do, or raises what that call raises.

        Pure, not collective, the same on every rank.

        Args:
            num_tokens: rows, >= 0.
            hidden_size: columns, >= 1.
            dtype: dtype of `x`.
            quant: how the call quantizes; None: not at all.
            residual_sharded: whether each rank holds its own rows of the residual only.
            return_normed: whether a quantized call returns `normed` too.
            algorithm: what the call would ask for.
            post_norm: the norm in front of the residual add.
            scale: of the reduced sum. Neither changes the algorithm.
            experts: whether `x` is an `ExpertSum`, which does not change the algorithm either.

        Returns:
            The algorithm, the reason in one sentence, the number of launches, and whether a tuned
            table, the one that is shipped, or the built-in rule decided.

        Raises:
            ValueError, TypeError: wrong arguments.
            UnsupportedError: no call of this dtype or width, or with these groups, can run; or
                `algorithm` names one that cannot run it.
            CommunicatorClosedError: after `close()`.
        """
        self._endpoint.check_open()
        arguments.check_count("num_tokens", num_tokens)
        arguments.check_count("hidden_size", hidden_size, least=1)
        arguments.check_dtype("dtype", dtype)
        arguments.check_algorithm(algorithm)
        arguments.check_width("x", hidden_size)
        if not isinstance(experts, bool):
            raise TypeError(f"experts={experts!r}: expected True or False.")
        shape = (num_tokens, 1, hidden_size) if experts else (num_tokens, hidden_size)
        x = torch.empty(shape, dtype=dtype, device="meta")
        weight = x.new_empty(hidden_size)
        call = Call(
            op="all_reduce_add_rms_norm" + ("" if quant is None else "_quant"),
            source=ExpertSum(x) if experts else x,
            weight=weight,
            algorithm=algorithm,
            residual_sharded=residual_sharded,
            post_norm=post_norm,
            scale=scale,
            quant=quant,
            return_normed=return_normed,
        )
        if post_norm is not None:
            arguments.check_weight("post_norm.weight", post_norm.weight, weight)
        arguments.check_norm_constants(call)
        if quant is not None:
            check_quant(quant)
            check_hidden_size(quant, hidden_size)
        return self._endpoint.choose(call)

    def check(self) -> None:
        """Raises what a wait recorded, else returns None. Reads host memory; never synchronizes.

        Raises:
            PeerTimeoutError: a peer did not come in time, came with another call
                (PeerDivergedError), has closed its communicator (PeerLeftError), or its process has
                ended (PeerDiedError) while this rank needed it; or a wait was interrupted.
            AllnormError: CUDA refused a call of this rank (its launch, or its place among calls on
                other streams), which its peers may have made.
            CommunicatorClosedError: after `close()`.
        """
        self._endpoint.check()

    def stats(self) -> Stats:
        """What this communicator has done on this rank: calls by algorithm, and what went wrong.

        Not collective. On CUDA it copies from the device, without waiting for what is enqueued
        there: some 50 us. Safe while a CUDA graph is captured, of which it is no part.

        Raises:
            CommunicatorClosedError: after `close()`.
        """
        return self._endpoint.stats()

    def _parts(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_bias: float,
        numerics: str,
    ) -> dict[str, Callable[[], object]]:
        """The parts of a hierarchical call, "sums", "exchange" and "rest", for benchmarks.

        Each may be made again and again, by all ranks; their results are nobody's.
        """
        call = Call(
            op="all_reduce_add_rms_norm",
            source=x,
            residual=residual,
            weight=weight,
            eps=eps,
            weight_bias=weight_bias,
            numerics=numerics,
            algorithm="hierarchical",
        )
        return self._endpoint.parts(call)

    def _use_tables(self, tables: tuple[policy.Table, ...]) -> None:
        """Lets other tables decide, from the next call on; every rank must do so there."""
        self._endpoint.chooser.use_tables(tables)
        self._endpoint.dispatcher.forget()

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
        self._endpoint.close()
        registry.remove(self)

    @property
    def is_closed(self) -> bool:
        """Whether calls are refused: after `close()`, and in a child of fork()."""
        return self._endpoint.closed

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # what copy, deepcopy and pickle ask
        raise TypeError(
            "a Communicator cannot be copied or pickled: it is one rank's end of an exchange with "
            "other processes, and a copy would release what the original uses. Pass the object "
            "itself, or its `name` to allnorm.communicator.communicator() in the same process; "
            "other processes make their own."
        )

    def __enter__(self) -> Communicator:
        self._endpoint.check_open()
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
        # the memory. And the constructor may have raised.
        try:
            self.close()
            self._endpoint.destroy()
        except Exception:  # noqa: BLE001
            pass

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else self.name
        return f"<Communicator {state}: rank {self.rank} of {self.world_size} on {self.device}>"


def communicator(name: str, device_type: str | None = None) -> Communicator:
    """Returns the open communicator called `name`, or else that of a process group of this name.

    So compiled code may come from a cache, and be run before anything has made a communicator:
    then this is collective, as `Communicator.for_group`.

    Args:
        name: `Communicator.name`.
        device_type: of its tensors; None if it does not matter.

    Raises:
        CommunicatorClosedError: it was closed, or there is nothing of this name.
    """
    comm = registry.find(name, device_type)
    if comm is not None:
        return comm
    group = group_called(name)
    if group is not None and device_type is not None:
        return Communicator.for_group(group, resolve_device(device_type))
    names = sorted({other.name for other in open_communicators()})
    raise CommunicatorClosedError(
        f"no open communicator is called {name!r}: it was closed, or belongs to another process. "
        f"Open ones: {names or 'none'}."
    )
