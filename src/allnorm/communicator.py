"""The communicator: one group of ranks and the calls among them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from allnorm import policy
from allnorm.calls import Calls
from allnorm.core import checks, registry, traced
from allnorm.core.call import Runner
from allnorm.core.registry import open_communicators
from allnorm.core.resolve import group_called, resolve_device, resolve_group
from allnorm.core.shortcuts import is_traced
from allnorm.errors import CommunicatorClosedError
from allnorm.islands import Islands
from allnorm.policy import Plan
from allnorm.post_norm import PostNorm
from allnorm.quant import Quant

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from allnorm.core.endpoint import Stats
    from allnorm.core.opening import Settings


class Communicator(Calls):
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

    def _check_open(self) -> None:
        self._endpoint.check_open()

    # ---- inspection -----------------------------------------------------------------------------

    def plan(
        self,
        num_tokens: int,
        hidden_size: int | Sequence[int],
        dtype: torch.dtype = torch.bfloat16,
        quant: Quant | None = None,
        residual_sharded: bool = False,
        *,
        return_normed: bool = False,
        algorithm: str = "auto",
        post_norm: PostNorm | None = None,
        scale: float = 1.0,
        experts: bool = False,
        residual_dtype: torch.dtype | None = None,
        gather: bool = True,
        streams: int | None = None,
    ) -> Plan:
        """Returns how a call with a norm would run, or raises what that call would raise.

        Pure, not collective, the same on every rank. `post_norm`, `scale`, `experts`,
        `residual_dtype` and `gather` do not affect the algorithm.

        Args:
            num_tokens: number of rows, >= 0.
            hidden_size: number of columns, >= 1. A list or tuple: the columns of each of this
                rank's slices, for the plan of `rms_norm_sharded`; of the other arguments, it takes
                only `dtype` and `algorithm`.
            dtype: dtype of `x`.
            quant: spec of the quantization; None: not quantized.
            residual_sharded: whether each rank holds only its own rows of the residual.
            return_normed: whether a quantized call returns `normed` too.
            algorithm: the requested algorithm.
            post_norm: norm before the residual add.
            scale: factor of the reduced sum.
            experts: whether `x` is an `ExpertSum`.
            residual_dtype: dtype of the residual: `dtype` or float32; None: `dtype`.
            gather: whether results have all rows, with a sharded residual.
            streams: number of residual streams, for the plan of `all_reduce_hyper_connection`; of
                the other arguments, it takes only `dtype`, `algorithm`, `residual_dtype` and
                `experts`.

        Returns:
            The algorithm, the reason in one sentence, the number of launches, the source of the
            decision (a tuned table, a shipped table, or the built-in rule), and how many bytes of
            the next weight are prefetched.

        Raises:
            ValueError, TypeError: wrong arguments.
            UnsupportedError: no call with this dtype, width or group size can run, or the requested
                algorithm cannot.
            CommunicatorClosedError: after `close()`.
        """
        self._endpoint.check_open()
        call = checks.check_planned(
            num_tokens,
            hidden_size,
            dtype,
            residual_dtype,
            experts,
            streams,
            quant=quant,
            residual_sharded=residual_sharded,
            return_normed=return_normed,
            algorithm=algorithm,
            post_norm=post_norm,
            scale=scale,
            gather=gather,
        )
        return self._endpoint.choose(call)

    def prefetch_bytes(
        self, num_tokens: int, hidden_size: int, *arguments: Any, **more: Any
    ) -> int:
        """Returns the number of bytes of `prefetch` that a call with a norm loads into L2.

        An upper bound: a call never loads more bytes than the tensor has. Pure, not collective, the
        same on every rank. Takes the arguments of `plan()`, and raises its errors.
        """
        return self.plan(num_tokens, hidden_size, *arguments, **more).prefetch_bytes

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
