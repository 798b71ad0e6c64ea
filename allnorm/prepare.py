"""From the arguments of a call to its launch: check, choose, prepare, and keep for the next time.

What a call may look like and how it runs depends on the geometry of its tensors, not on where they
are: it is decided once, and found again by that geometry.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from allnorm import _native, arguments, policy, shortcuts
from allnorm.arguments import Like, NormArguments, row_shard
from allnorm.errors import UnsupportedError
from allnorm.keys import constants_of, geometry_of
from allnorm.launch import Launch, describe_call
from allnorm.policy import Plan
from allnorm.quant import Fp8PerTensor

# Prepared calls kept per communicator; a server sees a few thousand geometries at most.
_MAX_LAUNCHES = 4096

_Tensor = torch.Tensor


class _Recent(NamedTuple):
    """A prepared call that may well be made again next.

    Attributes:
        check: whether tensors are like those that it is prepared for.
        needs_no_grad: whether they are taken while gradients are disabled only.
        constants: what else it is prepared for.
        algorithm: what was asked for.
        num_tensors: how many `check` takes.
        launch: the prepared call.
    """

    check: shortcuts.Check
    needs_no_grad: bool
    constants: tuple[Any, ...] | None
    algorithm: str
    num_tensors: int
    launch: Launch


class Preparer:
    """The prepared calls of one communicator.

    Args:
        library: of the backend.
        traits: what all ranks agree on.
        workspace_bytes: of every rank's workspace.
        device: of the tensors.
        rank: this rank.
    """

    def __init__(
        self,
        library: _native.Library,
        traits: policy.Traits,
        workspace_bytes: int,
        device: torch.device,
        rank: int,
    ) -> None:
        self._library = library
        self._traits = traits
        self._workspace_bytes = workspace_bytes
        self._device = device
        self._rank = rank
        self._launches: dict[Any, Launch] = {}
        # By the kind of call, so that calls of several kinds may alternate.
        self._recent: dict[int, _Recent] = {}

    def __len__(self) -> int:
        return len(self._launches)

    def find(
        self,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor | None,
        norm: tuple[Any, ...] | None,
        algorithm: str,
        quant: Any = None,
    ) -> Launch:
        """The prepared call for tensors of this geometry; `norm` tells specs of `quant` apart."""
        # Written for speed: every call comes through here.
        given: tuple[Any, ...] = (x, residual, weight)
        if residual is None:
            given = (x,) if norm is None else (x, weight)
        if quant.__class__ is Fp8PerTensor:
            given = (*given, quant.scale)
        kind = 0 if norm is None else len(norm)
        key = None
        try:
            constants = None if norm is None else constants_of(norm)
            recent = self._recent.get(kind)
            if (
                recent is not None
                and recent.constants == constants
                and recent.algorithm == algorithm
                and recent.num_tensors == len(given)
                and recent.check(*given)
                and not (recent.needs_no_grad and torch.is_grad_enabled())
            ):
                return recent.launch
            key = (*map(geometry_of, given), constants, algorithm)
            launch = self._launches.get(key)
        except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
            launch = None  # not tensors, or no constants: the checks say which
        if launch is None or not launch.takes(given):
            launch = self._prepare(x, residual, weight, norm, algorithm, quant)
            self._remember(key, launch)
        else:
            if launch.recent is None:
                guard = launch.guard
                assert guard is not None
                launch.recent = _Recent(
                    guard.check, guard.needs_no_grad, constants, algorithm, len(given), launch
                )
            self._recent[kind] = launch.recent
        return launch

    def find_gather(self, shard: _Tensor, num_tokens: int, algorithm: str) -> Launch:
        """The prepared gathering of rows from shards of this geometry."""
        try:
            key = (type(num_tokens), num_tokens, geometry_of(shard), algorithm)
            launch = self._launches.get(key)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            key, launch = None, None
        if launch is None or not launch.takes((shard,)):
            launch = self._prepare_gather(shard, num_tokens, algorithm)
            self._remember(key, launch)
        return launch

    def launches(self) -> list[Launch]:
        """All prepared calls."""
        return list(self._launches.values())

    def clear(self) -> None:
        """Forgets all prepared calls."""
        self._launches.clear()
        self._recent.clear()

    def _remember(self, key: tuple[Any, ...] | None, launch: Launch) -> None:
        if key is None or launch.is_virtual:  # nothing in the key tells those
            return
        if len(self._launches) >= _MAX_LAUNCHES:
            self.clear()
        self._launches[key] = launch

    def _prepare(
        self,
        x: _Tensor,
        residual: _Tensor | None,
        weight: _Tensor | None,
        norm: tuple[Any, ...] | None,
        algorithm: str,
        quant: Any,
    ) -> Launch:
        """Checks everything that the tensors' geometry decides, and chooses the algorithm."""
        arguments.check_algorithm(algorithm)
        arguments.check_input("x", x, self._device)
        num_tokens, hidden_size = x.numel() // x.shape[-1], x.shape[-1]
        checked = shard = None
        if norm is not None:
            eps, weight_bias, numerics, sharded = norm[:4]
            wants_normed = norm[5] if quant is not None else False
            checked = NormArguments(eps, weight_bias, numerics, sharded, quant, wants_normed)
            arguments.check_norm_arguments(checked)
            arguments.check_weight(weight, x)
            if len(norm) > 4:
                arguments.check_quantization(quant, x)
            if checked.residual_sharded:
                shard = row_shard(num_tokens, self._traits.world_size, self._rank)
        op = _native.ALL_REDUCE if norm is None else _native.ADD_RMS_NORM
        plan = self._plan(
            describe_call(op, x.dtype, hidden_size, checked), num_tokens, x.dtype, algorithm
        )
        with seen_alone(plan.algorithm):
            arguments.check_last_dim("x", x)
            if weight is not None:
                arguments.check_last_dim("weight", weight)
            if residual is not None and norm is not None:
                arguments.check_like("residual", residual, Like.rows(x, shard))
        launch = Launch(x, residual, weight, checked, plan.algorithm, shard=shard)
        launch.call.num_blocks, launch.call.link_gbps = plan.num_blocks, plan.link_gbps
        return launch

    def _prepare_gather(self, shard: _Tensor, num_tokens: int, algorithm: str) -> Launch:
        arguments.check_algorithm(algorithm)
        arguments.check_count("num_tokens", num_tokens)
        arguments.check_input("residual_shard", shard, self._device)
        hidden_size = shard.shape[-1]
        lo, hi = row_shard(num_tokens, self._traits.world_size, self._rank)
        source = f"this rank's rows, {lo} up to {hi} of num_tokens, as row_shard() gives them"
        own = Like((hi - lo, hidden_size), shard.dtype, shard.device, source)
        call = describe_call(_native.ALL_GATHER_ROWS, shard.dtype, hidden_size)
        plan = self._plan(call, num_tokens, shard.dtype, algorithm)
        with seen_alone(plan.algorithm):
            arguments.check_like("residual_shard", shard, own)
        launch = Launch(shard, None, None, None, plan.algorithm, gathered_rows=num_tokens)
        launch.call.num_blocks, launch.call.link_gbps = plan.num_blocks, plan.link_gbps
        return launch

    def _plan(
        self, call: _native.Call, num_tokens: int, dtype: torch.dtype, algorithm: str
    ) -> Plan:
        """Chooses the algorithm of such a call; refuses one that was asked for and cannot run."""
        plan = self.choose(call, num_tokens, dtype, algorithm)
        # One rank has nothing to exchange: whatever is asked for, it computes the same.
        if algorithm not in ("auto", plan.algorithm) and self._traits.world_size > 1:
            raise UnsupportedError(
                f"algorithm={algorithm!r} cannot run here: {plan.reason}. Pass algorithm='auto' or "
                "'unfused'; the results are the same bits."
            )
        return plan

    def choose(
        self, call: _native.Call, num_tokens: int, dtype: torch.dtype, algorithm: str
    ) -> Plan:
        """Chooses the algorithm of such a call."""
        rows = {}
        call.num_tokens = num_tokens
        for name, call.algorithm in _native.ALGORITHM.items():
            rows[name] = self._library.rows_per_chunk(
                self._traits.world_size, self._workspace_bytes, ctypes.addressof(call)
            )
        owned_rows = bool(call.flags & _native.RESIDUAL_SHARDED)
        return policy.choose(
            self._traits,
            num_tokens,
            call.hidden_size,
            dtype.itemsize,
            rows,
            algorithm,
            owned_rows or call.op == _native.ALL_GATHER_ROWS,
            (str(dtype).removeprefix("torch."), _epilogue(call)),
        )

    def use_tables(self, tables: tuple[policy.Table, ...]) -> None:
        """Lets other tables decide, and forgets what was prepared by those before."""
        self._traits = dataclasses.replace(self._traits, tables=tables)
        self.clear()


@contextlib.contextmanager
def seen_alone(algorithm: str) -> Iterator[None]:
    """Marks an error that this rank alone may raise, in a call by this algorithm, as such."""
    try:
        yield
    except Exception as error:
        error.seen_alone = algorithm  # type: ignore[attr-defined]
        raise


def _epilogue(call: _native.Call) -> str:
    """What follows the sum, by the names of names.EPILOGUES."""
    if call.op != _native.ADD_RMS_NORM:
        return "all_reduce"
    return next((name for name, kind in _native.QUANT.items() if kind == call.quant), "norm")
