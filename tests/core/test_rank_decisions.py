"""Tests that all ranks make matching launches and exchanges, for every number of rows.

The simulation runs each rank's code in turn, with a fake library and exchange that only record
requests. It lowers the thresholds in `policy`, so that tests reach both sides of each threshold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from rank_helpers import DTYPES, Case, comm, device, on

import allnorm
from allnorm import policy, reference
from allnorm.core import _native, between, hierarchical, unfused
from allnorm.core.call import Call
from allnorm.core.notes import Notes
from allnorm.core.prepared_call import PreparedCall
from allnorm.policy import Plan
from allnorm.testing import assert_same_bits, shared_input

HIDDEN_SIZE = 32
ROW_BYTES = 4 * HIDDEN_SIZE  # of float32 sums
# Two hops are faster from about four rows per rank. Pieces have up to 24 rows, 8 if they overlap.
SMALL = {
    "HIERARCHICAL_HOP_BYTES": 4 * ROW_BYTES,
    "HIERARCHICAL_SUM_BYTES": 24 * ROW_BYTES,
    "_OVERLAPPED_SUM_BYTES": 8 * ROW_BYTES,
    "UNFUSED_GATHER_BYTES": 20 * ROW_BYTES,
    "_ONE_SHOT_MAX_BYTES_CPU": 9 * ROW_BYTES,
}
QUANTS = (
    None,
    allnorm.Fp8PerGroup(32, "column_major_tma"),
    allnorm.Fp8PerToken(),
    allnorm.MxFp8(),
    allnorm.NvFp4(torch.ones(1)),
    allnorm.NvFp4(torch.ones(1), "row_major"),
)
ISLANDS = {
    f"{number}x{size}": tuple(tuple(range(i * size, i * size + size)) for i in range(number))
    for number, size in ((3, 2), (2, 3), (4, 2), (3, 3), (3, 1), (2, 1))
}


def call_of(
    op: str, shape: tuple[int, int], dtype: torch.dtype, own: tuple[int, int], quant: Any = None
) -> Call:
    """Returns the call of the rank that owns the rows `own`."""
    whole = torch.zeros(shape, dtype=dtype)
    shard = whole[own[0] : own[1]]
    if op == "all_reduce":
        return Call(op=op, source=whole)
    if op == "all_gather_rows":
        return Call(op=op, source=shard, num_tokens=shape[0])
    return Call(
        op="all_reduce_add_rms_norm" + ("" if quant is None else "_quant"),
        source=whole,
        residual=whole if op == "whole" else shard,
        weight=torch.ones(shape[1], dtype=dtype),
        residual_sharded=op == "sharded",
        quant=quant,
    )


class Recorder:
    """A fake library and exchange that only record requests.

    Attributes:
        steps: kind and number of tokens of each launch, kind and shape of each exchange.
    """

    def __init__(self, size: int) -> None:
        self.num_islands = size
        self.can_exchange_parts = size > 2
        self.notes = Notes()
        self.steps: list[tuple[Any, ...]] = []

    def run(self, handle: int, address: int) -> int:
        call = _native.Call.from_address(address)
        self.steps.append(("run", call.op, call.flags, call.num_tokens, call.num_sources))
        return _native.OK

    def local(self, address: int) -> int:
        self.steps.append(("local",))
        return _native.OK

    def start_gather(self, rows: torch.Tensor) -> Any:
        self.steps.append(("gather", rows.dtype, tuple(rows.shape)))
        return lambda look: rows.new_zeros((self.num_islands, *rows.shape))

    def gather(self, rows: torch.Tensor, look: Any) -> torch.Tensor:
        return self.start_gather(rows)(look)

    def start_parts(self, rows: torch.Tensor) -> Any:
        self.steps.append(("parts", rows.dtype, tuple(rows.shape)))
        count = self.num_islands
        shape = (count, rows.shape[0] // count, *rows.shape[1:])
        return lambda look: rows.new_zeros(shape)


class Waits:
    """A fake of the part of a communicator that unfused calls use."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def look_at_peers(self, seconds: float) -> None:
        return None


def hierarchical_steps(
    islands: Any, rank: int, call: Call, shard: tuple[int, int] | None, is_cuda: bool
) -> list[tuple[Any, ...]]:
    prepared = PreparedCall(call, Plan("hierarchical", "a test", 1), shard)
    memory = prepared.allocate(call)
    inputs = prepared.bind(call, memory)
    recorder: Any = Recorder(len(islands))
    hierarchy: Any = mock.Mock()
    hierarchy.number, hierarchy.index = between.places(islands, rank)
    hierarchy.islands, hierarchy.ranks = islands, islands[hierarchy.number]
    hierarchy.between = recorder
    one = hierarchical._Run(prepared, recorder, 0, hierarchy, lambda _: None, is_cuda)
    x, residual = inputs[:2]
    assert x is not None
    if call.op == "all_gather_rows":
        assert one.gather_rows(x, memory["out"]) == _native.OK
    else:
        assert one.reduce(x, residual, memory) == _native.OK
    return recorder.steps


def unfused_steps(
    islands: Any, rank: int, call: Call, shard: tuple[int, int] | None
) -> list[tuple[Any, ...]]:
    world_size = sum(map(len, islands))
    prepared = PreparedCall(call, Plan("unfused", "a test", 1), shard)
    memory = prepared.allocate(call)
    inputs = prepared.bind(call, memory)
    recorder: Any = Recorder(world_size)
    waits: Any = Waits(rank, world_size)
    connection: Any = mock.Mock()
    connection.connect.return_value = recorder
    given: Any = (prepared, recorder, mock.Mock(), connection, waits, inputs[0], memory, islands)
    with mock.patch.object(unfused, "agree"):
        assert unfused.run(*given) == _native.OK
    return [step for step in recorder.steps if step[0] == "gather"]


def calls_of_all(islands: Any, num_tokens: int) -> Iterator[list[tuple[Call, Any]]]:
    """Yields calls of every kind: for each rank, its call and the rows that it owns."""
    world_size = sum(map(len, islands))
    shards = [reference.row_shard(num_tokens, world_size, rank) for rank in range(world_size)]
    quants = itertools.islice(itertools.cycle(QUANTS), num_tokens % len(QUANTS), None)
    for dtype in (torch.bfloat16, torch.float32):
        for op in ("all_reduce", "whole", "sharded", "all_gather_rows"):
            quant = next(quants)
            calls = [call_of(op, (num_tokens, HIDDEN_SIZE), dtype, own, quant) for own in shards]
            owned = [own if calls[0].owns_rows else None for own in shards]
            yield list(zip(calls, owned, strict=True))


def assert_alike(islands: Any, steps: list[list[tuple[Any, ...]]], what: object) -> None:
    """Checks that launches match within islands, and exchanges between ranks with equal places.

    The order of launches and exchanges must be the same on all ranks: a rank in an exchange would
    wait forever for a rank in its island that is in a launch.
    """
    orders = [[step[0] for step in own if step[0] != "local"] for own in steps]
    assert all(order == orders[0] for order in orders), what
    for island in islands:
        launches = [[step for step in steps[rank] if step[0] == "run"] for rank in island]
        assert all(own == launches[0] for own in launches), what
    for place in range(len(islands[0])):
        own_steps = (steps[island[place]] for island in islands)
        exchanges = [[s for s in own if s[0] in ("gather", "parts")] for own in own_steps]
        assert all(own == exchanges[0] for own in exchanges), what


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ISLANDS)
def test_ranks_of_islands_take_the_same_steps(name: str, backend: str) -> None:
    islands = ISLANDS[name]
    kinds = set()
    with mock.patch.multiple(policy, **SMALL):
        for num_tokens in range(64):
            for calls in calls_of_all(islands, num_tokens):
                steps = [
                    hierarchical_steps(islands, rank, call, shard, backend == "cuda")
                    for rank, (call, shard) in enumerate(calls)
                ]
                assert_alike(islands, steps, (num_tokens, calls[0][0].op))
                kinds.update(step[0] for own in steps for step in own)
    assert {"gather", "run" if len(islands[0]) > 1 else "local"} <= kinds
    assert ("parts" in kinds) == (len(islands) > 2), "no threshold was crossed"


@pytest.mark.parametrize("name", ["3x2", "2x3", "3x1"])
def test_ranks_gather_the_same_unfused(name: str) -> None:
    islands = ISLANDS[name]
    most = 0
    with mock.patch.multiple(policy, **SMALL):
        for num_tokens in range(32):
            for calls in calls_of_all(islands, num_tokens):
                first, *others = (
                    unfused_steps(islands, rank, call, shard)
                    for rank, (call, shard) in enumerate(calls)
                )
                assert all(own == first for own in others), (num_tokens, calls[0][0].op)
                most = max(most, len(first))
    assert most > 3, "no threshold was crossed"


@pytest.mark.sampled(2)
@on(cpu=(6,))
@pytest.mark.parametrize("name", ["3x2", "2x3", "one island"])
def test_results_around_every_threshold(rank: int, world_size: int, name: str) -> None:
    islands, tokens = ISLANDS.get(name, ((0, 1, 2, 3, 4, 5),)), range(64)
    start = between.Between.start_parts
    with (
        mock.patch.multiple(policy, **SMALL),
        mock.patch.object(
            between.Between, "start_parts", autospec=True, side_effect=start
        ) as starts,
    ):
        c = comm(islands=islands)
        for num_tokens, sharded in itertools.product(tokens, (False, True)):
            dtype = DTYPES[num_tokens % 3]
            quant = (None, *QUANTS)[num_tokens % 5]
            shape = num_tokens, HIDDEN_SIZE
            case = Case(shape, dtype, sharded=sharded, quant=quant, call=num_tokens)
            case.check(c)
        for num_tokens in tokens:
            rows = shared_input((num_tokens, HIDDEN_SIZE), DTYPES[0], "rows", device=device())
            lo, hi = c.row_shard(num_tokens)
            assert_same_bits(c.all_gather_rows(rows[lo:hi].clone(), num_tokens), rows)
        assert c.check() is None
    assert (starts.call_count > 0) == (name == "3x2"), "sums cross in two hops between 3 islands"


def test_a_rank_without_rows_crosses_in_two_hops() -> None:
    """With one wide row, ranks in the owner's island take part in both hops but send no rows."""
    islands = ISLANDS["3x2"]
    shape = 1, 400_000
    whole = torch.zeros(shape, dtype=torch.bfloat16)
    call = Call(op="all_reduce", source=whole)
    steps = [hierarchical_steps(islands, rank, call, None, is_cuda=False) for rank in range(6)]
    assert_alike(islands, steps, shape)
    assert {step[2] for own in steps for step in own if step[0] == "parts"} == {
        (3, 400_000),
        (0, 400_000),
    }


@on(cpu=(6,))
def test_one_wide_row_over_three_islands(rank: int, world_size: int) -> None:
    with mock.patch.multiple(policy, **SMALL):
        c = comm(islands=ISLANDS["3x2"])
        Case((1, 8192)).check(c)
        Case((1, 8192), quant=allnorm.Fp8PerTensor(torch.ones(1)), sharded=True).check(c)
