"""The steps of a call: recognize it, check it, choose an algorithm, bind its tensors, launch.

Whether and how a call runs depends on the geometry of its tensors, not on their addresses. So the
decision is made once per geometry and kept as a PreparedCall. csrc/python keeps the latest calls
that were made twice, and repeats them without running this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import threading
import weakref
from math import copysign
from typing import Any, NoReturn

import torch

from allnorm import policy
from allnorm.core import _native, arguments, backends, checks, fast_call, traced
from allnorm.core.call import Call, CallWithInput, Runner
from allnorm.core.prepared_call import (
    Memory,
    PreparedCall,
    as_launch_a,
    as_launch_b,
    only_reduce,
)
from allnorm.core.shards import row_shard
from allnorm.core.shortcuts import is_intercepted, version_counter
from allnorm.core.tensors import is_plain
from allnorm.errors import AllnormError, CommunicatorClosedError, UnsupportedError
from allnorm.policy import Plan

# Maximum number of prepared calls in a dispatcher; a server has a few thousand geometries.
_MAX_PREPARED = 4096
_LOCAL_PLAN = Plan("local", "there is no other rank", 1)


class Target:
    """Runs a dispatcher's calls, on one rank alone. The subclass Endpoint runs them on many."""

    name, rank, world_size = "", 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._library = backends.library(device.type)

    def check_open(self) -> None:
        """Raises if calls cannot be made."""

    def choose(self, call: Call) -> Plan:
        """Returns how a checked call runs; raises on every rank if it cannot."""
        return _LOCAL_PLAN

    def run(self, prepared: PreparedCall, call: Call, memory: Memory) -> None:
        """Runs the call."""
        inputs = prepared.bind(call, memory)
        status = self._library.local(prepared.address)
        del inputs
        if status:
            self.fail(status, prepared)

    def can_repeat(self, prepared: PreparedCall) -> bool:
        """Returns whether csrc/python may repeat this prepared call without `run`."""
        return True

    def refuse(self, error: Exception, algorithm: str) -> None:
        """Tells the peers that this rank refuses a call that they may be making."""

    def interrupted(self, error: BaseException) -> None:
        """Tells the peers that a signal handler's exception ended this rank's call."""

    def fail(self, status: int, prepared: PreparedCall | None) -> NoReturn:
        """Raises the error for the status that a call returned."""
        _native.raise_status(self._library, status)
        raise AllnormError(f"status {status}")


class Dispatcher(Runner):
    """Runs calls on one target, and keeps the prepared calls.

    Args:
        target: runs the calls.
        function: C function for repeated calls; None: `target` runs every call.
        handle: first argument of `function`, if it has one.
        lock: held while `function` runs, if more than one thread may call.

    Attributes:
        fast: the functions of csrc/python for this dispatcher; its owner closes them.
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
        self._with_input: set[Any] = set()  # geometries for NextInput.joins()
        # csrc/python must not hold `self`, because the garbage collector cannot see its references.
        myself = weakref.ref(self)

        def missed(*arguments: Any, **fields: Any) -> Any:
            return Runner.call(_deref(myself), *arguments, **fields)

        def failed(status: int, **fields: Any) -> NoReturn:
            _deref(myself)._fail(status, Call(**fields))

        self.fast = fast_call.new(missed, failed, target.device, function, handle, lock)
        self.call = self.fast.call  # type: ignore[method-assign]

    def prepared_calls(self) -> list[PreparedCall]:
        """Returns all prepared calls."""
        return list(self._prepared.values())

    def forget(self) -> None:
        """Drops all prepared calls, so that each call is checked and planned again."""
        self._prepared.clear()
        self.fast.forget()

    def run(self, call: Call) -> Any:
        """Runs a call that csrc/python does not recognize."""
        if is_intercepted():
            traced.check_intercepted(call)
            return self._operators().run(call)
        try:
            return self._decide_and_launch(call)
        except Exception:
            raise
        except BaseException as error:
            self._target.interrupted(error)
            raise

    def call_with_input(self, *, next_input: Any, **fields: Any) -> tuple[Any, Any, Any]:
        """Runs the call, and makes the next layer's input in its launch or after it."""
        if is_intercepted():
            traced.check_intercepted(Call(**fields))
            return self._operators().call_with_input(next_input=next_input, **fields)
        if next_input.joins(self._with_input, fields["residual"]):
            streams = self.run(CallWithInput(**fields, next_input=next_input))
        else:
            streams = self.call(**fields)
        normed, connection = next_input.results(streams)
        return normed, streams, connection

    def _operators(self) -> traced.Operators:
        """Returns the runner that tracers see."""
        target = self._target
        return traced.Operators(target.name, target.rank, target.world_size)

    def _decide_and_launch(self, call: Call) -> Any:
        self._target.check_open()
        key, prepared = self._find(call)
        if prepared is None:
            checks.check_alike(call, self._target.device)
            plan = self._target.choose(call)
        else:
            plan = prepared.plan
        try:
            if prepared is None:
                prepared = _kind_of(call)(call, plan, self._shard(call))
                self._keep(key, prepared)
                memory = prepared.allocate(call)
            else:
                memory = prepared.allocate(call)
                if self._target.can_repeat(prepared) and type(call) is Call:
                    fast_call.keep(self.fast, prepared, call, memory)
            if isinstance(call, CallWithInput):
                call.next_input.prepare(memory["residual_out"])
            written = call.written
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
        """Returns the key of a call, and its prepared call if there is one."""
        try:
            key = _key_of(call)
            prepared = self._prepared.get(key)
        except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
            return None, None  # an invalid argument, which the checks will report
        # Tensors with equal geometry may be of different kinds; prepared calls are for plain ones.
        if prepared is not None and not all(map(is_plain, call.given)):
            return None, None
        return key, prepared

    def _shard(self, call: Call) -> tuple[int, int] | None:
        """Returns this rank's rows, if rows have owners."""
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
        with contextlib.suppress(Exception):  # only needed for the error message
            prepared = self._find(call)[1]
        self._target.fail(status, prepared)


def _deref(dispatcher: weakref.ref[Dispatcher]) -> Dispatcher:
    found = dispatcher()
    if found is None:
        raise CommunicatorClosedError("the communicator was freed: keep a reference to it.")
    return found


def _key_of(call: Call) -> tuple[Any, ...]:
    """Returns the key of a prepared call: the geometry of its tensors, and its constants.

    1.0 and True are equal, and so are 0.0 and -0.0, but they are different constants. Hence the key
    contains types and signs. Types are compared first, so that a tensor is never compared.

    Raises:
        AttributeError, TypeError, ValueError, RuntimeError, OverflowError: an argument has a wrong
            type.
    """
    constants, tensors = call.constants, call.tensors
    if call.slices is not None:
        # A separator: results may have the geometry of inputs.
        slices = call.slices
        tensors = (*tensors, *slices.tensors, None, *slices.weights, None, *(slices.outs or ()))
        constants = (*constants, tuple(map(_is, slices.tensors, slices.outs or ())))
    # is_inference, requires_grad: the guards of torch's compiler distinguish tensors by these too.
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


def _kind_of(call: Call) -> type[PreparedCall]:
    """Returns the class of a call's prepared calls."""
    # Imported here: most processes make no such calls.
    if call.slices is not None:
        from allnorm.core.prepared_slices import PreparedSlices

        return PreparedSlices
    if call.connection is not None:
        from allnorm.core.prepared_streams import PreparedStreams

        return PreparedStreams
    return PreparedCall


def _is(one: object, other: object) -> bool:
    return one is other


class Chooser:
    """Chooses the algorithms of a communicator's calls."""

    def __init__(
        self, library: _native.Library, traits: policy.Traits, workspace_bytes: int
    ) -> None:
        self._library = library
        self.traits = traits
        self._workspace_bytes = workspace_bytes

    def plan(self, call: Call) -> Plan:
        """Returns the plan of a call, which depends only on its geometry and constants."""
        if call.slices is not None:
            return self._plan_slices(call)
        native = _kind_of(call).describe(call)
        # Only whether these tensors exist matters.
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
            call.experts
            or call.post_weight is not None
            or call.scale != 1
            or call.has_float32_residual
            or call.connection is not None,
        )

    def _plan_slices(self, call: Call) -> Plan:
        native = _kind_of(call).describe(call)
        rows = self._library.rows_per_chunk(
            self.traits.island_size, self._workspace_bytes, ctypes.addressof(native)
        )
        assert call.slices is not None
        sizes = [tensor.shape[-1] for tensor in call.slices.tensors]
        return policy.choose_slices(
            self.traits, call.rows, sizes, call.x.element_size(), int(rows), call.algorithm
        )

    def _rows_per_chunk(self, native: _native.Call) -> dict[str, int]:
        """Returns the number of rows that fit into a launch in an island, keyed by algorithm."""

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
            gathers = native.op == _native.ALL_GATHER_ROWS  # one launch, as with one island
            rest = as_launch_b(native)
            if native.op == _native.HYPER_CONNECTION:
                only_reduce(rest)
            launches = () if gathers else (as_launch_a(native), rest)
            rows["hierarchical"] = min(map(fit, launches), default=rows["two_shot"])
        return rows

    def choose(self, call: Call) -> Plan:
        """Returns the plan; raises UnsupportedError if a requested algorithm cannot run."""
        arguments.check_algorithm(call.algorithm)
        if call.slices is not None:
            checks.check_whole_rows(call, self.traits.world_size)
        plan = self.plan(call)
        # With one rank there is nothing to exchange, and every algorithm gives the same results.
        if call.algorithm not in ("auto", plan.algorithm) and self.traits.world_size > 1:
            raise UnsupportedError(
                f"algorithm={call.algorithm!r} cannot run here: {plan.reason}. Pass "
                "algorithm='auto' or 'unfused'; results are bit-identical."
            )
        return plan

    def use_tables(self, tables: tuple[policy.Table, ...]) -> None:
        """Replaces the tuning tables for later calls."""
        self.traits = dataclasses.replace(self.traits, tables=tables)


def _epilogue(call: Call) -> str:
    """Returns the epilogue of a call, one of names.EPILOGUES."""
    if not call.has_norm:
        return "all_reduce"
    return "norm" if call.quant is None else str(call.quant.kind)
