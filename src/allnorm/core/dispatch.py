"""The way of a call: recognize it, check it, choose an algorithm, bind its tensors, launch.

Whether a call is allowed, and how it runs, depends on the geometry of its tensors and not on their
addresses. So that is decided once, and kept as a PreparedCall under that geometry. csrc/python also
keeps the most recent calls that came twice, and repeats them without this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import threading
import weakref
from math import copysign
from typing import Any, NoReturn, Protocol

import torch

from allnorm import policy
from allnorm.core import _native, arguments, fast_call, traced
from allnorm.core.call import Call, Runner
from allnorm.core.prepared_call import Memory, PreparedCall, as_launch_a, as_launch_b, describe
from allnorm.core.shards import row_shard
from allnorm.core.shortcuts import is_intercepted, version_counter
from allnorm.core.tensors import is_plain
from allnorm.errors import CommunicatorClosedError, UnsupportedError
from allnorm.policy import Plan

# Launches kept by a dispatcher; a server sees a few thousand geometries at most.
_MAX_PREPARED = 4096


class Target(Protocol):
    """Who makes the calls of a dispatcher: the endpoint of a communicator, or one rank alone."""

    device: torch.device
    rank: int
    world_size: int

    def check_open(self) -> None:
        """Raises unless calls can be made."""

    def choose(self, call: Call) -> Plan:
        """How a checked call runs; raises if it cannot, on every rank alike."""

    def run(self, prepared: PreparedCall, call: Call, memory: Memory) -> None:
        """Makes the call."""

    def can_repeat(self, prepared: PreparedCall) -> bool:
        """Whether csrc/python may repeat such a call, without `run`."""

    def refuse(self, error: Exception, algorithm: str) -> None:
        """Tells the peers that this rank refuses a call that they may be making."""

    def interrupted(self, error: BaseException) -> None:
        """Tells the peers that this rank has left a call by an exception of a signal handler."""

    def fail(self, status: int, prepared: PreparedCall | None) -> NoReturn:
        """Raises the error behind the status that a call returned."""


class Dispatcher(Runner):
    """Runs the calls of one target, and keeps what was decided about them.

    Args:
        target: who makes them.
        function: of the library, by which repeated ones are made; None if each is made by `target`.
        handle: that it takes, if it takes one.
        lock: held while it runs, if another thread may make calls.

    Attributes:
        call: as the method of every Runner; csrc/python runs the calls that it recognizes.
        fast: what `call` recognizes; its owner closes it.
    """

    def __init__(
        self,
        target: Target,
        function: Any,
        handle: int | None = None,
        lock: threading.Lock | None = None,
    ) -> None:
        self._target = target
        self._prepared: dict[Any, PreparedCall] = {}
        # What csrc/python holds is not seen by the garbage collector: it must not hold this.
        myself = weakref.ref(self)

        def missed(*arguments: Any, **fields: Any) -> Any:
            return Runner.call(_living(myself), *arguments, **fields)

        def failed(status: int, **fields: Any) -> NoReturn:
            _living(myself)._fail(status, Call(**fields))

        self.fast = fast_call.new(missed, failed, target.device, function, handle, lock)
        self.call = self.fast.call  # type: ignore[method-assign]

    def prepared_calls(self) -> list[PreparedCall]:
        """All that is kept."""
        return list(self._prepared.values())

    def forget(self) -> None:
        """Drops every decision: each call is checked and chosen anew."""
        self._prepared.clear()
        self.fast.forget()

    def run(self, call: Call) -> Any:
        """Runs a call that csrc/python does not recognize."""
        if is_intercepted():
            traced.check_intercepted(call)
            return traced.Operators(self._target).run(call)
        try:
            return self._decide_and_launch(call)
        except Exception:
            raise
        except BaseException as error:
            self._target.interrupted(error)
            raise

    def _decide_and_launch(self, call: Call) -> Any:
        self._target.check_open()
        key, prepared = self._find(call)
        if prepared is None:
            arguments.check_alike(call, self._target.device)
            plan = self._target.choose(call)
        else:
            plan = prepared.plan
        try:
            if prepared is None:
                prepared = PreparedCall(call, plan, self._shard(call))
                self._keep(key, prepared)
                memory = prepared.allocate(call)
            else:
                memory = prepared.allocate(call)
                if self._target.can_repeat(prepared):
                    fast_call.keep(self.fast, prepared, call, memory)
            written = [tensor for tensor in call.memory if tensor is not None]
            if written:
                version_counter()(written)
        except Exception as error:
            self._target.refuse(error, plan.algorithm)
            raise
        self._launch(prepared, call, memory)
        return prepared.returned(call, memory)

    def _launch(self, prepared: PreparedCall, call: Call, memory: Memory) -> None:
        self._target.run(prepared, call, memory)

    def _find(self, call: Call) -> tuple[Any, PreparedCall | None]:
        """What the call is kept by, and what was decided about it."""
        try:
            key = _key_of(call)
            prepared = self._prepared.get(key)
        except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
            return None, None  # a wrong argument: the checks say which
        # Tensors of one geometry may still differ in kind; only calls of plain ones are kept.
        if prepared is not None and not all(map(is_plain, call.given)):
            return None, None
        return key, prepared

    def _shard(self, call: Call) -> tuple[int, int] | None:
        """This rank's rows, where rows belong to ranks."""
        if not call.owns_rows:
            return None
        return row_shard(call.rows, self._target.world_size, self._target.rank)

    def _keep(self, key: Any, prepared: PreparedCall) -> None:
        if key is None or prepared.is_virtual:
            return
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        self._prepared[key] = prepared

    def _fail(self, status: int, call: Call) -> NoReturn:
        prepared = None
        with contextlib.suppress(Exception):  # it is for the words of the error only
            prepared = self._find(call)[1]
        self._target.fail(status, prepared)


def _living(dispatcher: weakref.ref[Dispatcher]) -> Dispatcher:
    found = dispatcher()
    if found is None:
        raise CommunicatorClosedError("the communicator is gone: keep it while it is called.")
    return found


def _key_of(call: Call) -> tuple[Any, ...]:
    """What equal calls have in common: the geometry of their tensors, and their constants.

    1.0 and True are equal, and so are 0.0 and -0.0, but they are different constants. Types are
    compared first, so that a tensor passed as a constant is never asked whether it is equal.

    Raises:
        AttributeError, TypeError, ValueError, RuntimeError, OverflowError: a tensor is none, or
            what should be a number is none.
    """
    constants, tensors = call.constants, call.tensors
    # is_inference, requires_grad: the guards of torch's compiler tell tensors apart by these, too.
    geometries = tuple(
        t
        if t is None
        else (t.shape, t.stride(), t.dtype, t.device, t.is_inference(), t.requires_grad)
        for t in tensors
    )
    numbers = (call.eps, call.weight_bias, call.post_eps, call.post_weight_bias, call.scale)
    signs = tuple(copysign(1.0, number) for number in numbers)
    in_place = call.out is call.x, call.residual_out is call.residual
    mode = torch.is_inference_mode_enabled()
    return geometries, mode, in_place, tuple(map(type, constants)), signs, constants


class Chooser:
    """Chooses the algorithms of a communicator's calls.

    Args:
        library: of the backend.
        traits: what all ranks agree on.
        workspace_bytes: of every rank's workspace.
    """

    def __init__(
        self, library: _native.Library, traits: policy.Traits, workspace_bytes: int
    ) -> None:
        self._library = library
        self.traits = traits
        self._workspace_bytes = workspace_bytes

    def plan(self, call: Call) -> Plan:
        """How such a call would run; looks at its geometry and constants only."""
        native = describe(call)
        # It matters only whether there is any.
        native.out = 1 if call.return_normed else None
        native.post_weight = None if call.post_weight is None else 1
        native.num_sources = 1
        rows = self._rows_per_chunk(native)
        dtype = call.x.dtype
        return policy.choose(
            self.traits,
            call.rows,
            native.hidden_size,
            dtype.itemsize,
            rows,
            call.algorithm,
            call.owns_rows,
            (str(dtype).removeprefix("torch."), _epilogue(call)),
            call.experts or call.post_weight is not None or call.scale != 1,
        )

    def _rows_per_chunk(self, native: _native.Call) -> dict[str, int]:
        """Returns how many rows fit a launch among the ranks of an island, by algorithm."""

        def fit(one: _native.Call) -> int:
            return int(
                self._library.rows_per_chunk(
                    self.traits.island_size, self._workspace_bytes, ctypes.addressof(one)
                )
            )

        rows = {}
        for name, native.algorithm in _native.ALGORITHM.items():
            rows[name] = fit(native)
        if len(self.traits.islands) > 1:
            gathers = native.op == _native.ALL_GATHER_ROWS  # a launch like that of one island
            launches = () if gathers else (as_launch_a(native), as_launch_b(native))
            rows["hierarchical"] = min(map(fit, launches), default=rows["two_shot"])
        return rows

    def choose(self, call: Call) -> Plan:
        """As `plan`; refuses an algorithm that was asked for and cannot run."""
        arguments.check_algorithm(call.algorithm)
        plan = self.plan(call)
        # One rank has nothing to exchange: whatever is asked for, it computes the same.
        if call.algorithm not in ("auto", plan.algorithm) and self.traits.world_size > 1:
            raise UnsupportedError(
                f"algorithm={call.algorithm!r} cannot run here: {plan.reason}. Pass "
                "algorithm='auto' or 'unfused'; the results are the same bits."
            )
        return plan

    def use_tables(self, tables: tuple[policy.Table, ...]) -> None:
        """Chooses by other tables from now on."""
        self.traits = dataclasses.replace(self.traits, tables=tables)


def _epilogue(call: Call) -> str:
    """What follows the sum, by the names of names.EPILOGUES."""
    if not call.has_norm:
        return "all_reduce"
    return "norm" if call.quant is None else str(call.quant.kind)
