"""Tests verify's soaks: correct results pass, and each kind of wrong result is found."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from limits import HANG_SECONDS
from rank_helpers import device, on

import allnorm
from allnorm.core.between import GroupExchange
from allnorm.core.connection import Connection
from allnorm.islands import of_size
from allnorm.names import ALGORITHMS, NUMERICS
from allnorm.testing import RankError, RankPool, run_ranks, same_bits
from allnorm.verify import soak, threads
from allnorm.verify.calls import Cases, algorithms
from allnorm.verify.case import Case
from allnorm.verify.context import Context, Job, Recorder
from allnorm.verify.soak import Graph, make_tape
from allnorm.verify.unlike_norms import connection_of, next_input, streams_of

Result = dict[str, Any]


def run(check: Callable[[Context, Recorder], None], **options: Any) -> Result:
    """Runs a check on all ranks; returns its record. Collective."""
    where = device()
    job = Job(where.type, seed=options.pop("seed", 5), full=False, seconds=1.0, **options)
    islands = of_size(job.island_size, dist.get_world_size())
    with allnorm.Communicator(device=where, islands=islands) as comm:
        recorder = Recorder(check.__name__)
        check(Context(comm, job, random.Random(job.seed)), recorder)
        return recorder.finish()


@pytest.mark.sampled(2)
@on(cpu=(2, 3), gpu=(2, 4))
def test_the_soak_passes(rank: int, world_size: int) -> None:
    found = run(soak.soak, stress=4 * soak.BURST)
    assert found["failures"] == 0, found["details"]
    assert found["cases"] >= 4 * soak.BURST
    assert found["bursts"] >= 4, "each section makes at least one"
    assert found["elements"] > 1e6


@pytest.mark.long
@on(cpu=(4,), gpu=(4,))
@pytest.mark.parametrize("island_size", [1, 2])
def test_the_soaks_pass_over_islands(rank: int, world_size: int, island_size: int) -> None:
    shapes = ((1, 4096), (64, 120))
    found = run(soak.soak, stress=2 * soak.BURST, island_size=island_size)
    repeated = run(soak.repeat_shapes, stress=0, shapes=shapes, repeat=20, island_size=island_size)
    assert found["failures"] == repeated["failures"] == 0, found["details"] + repeated["details"]
    assert found["cases"] >= 2 * soak.BURST
    assert repeated["cases"] == 2 * 20


# Functions that corrupt the results of a call as a defect of the exchange would.


def one_bit(results: dict[str, torch.Tensor], _: list[Any]) -> dict[str, torch.Tensor]:
    name, part = next(iter(results.items()))
    last = part.reshape(-1)[-1:].clone().view(torch.uint8)
    last[0] ^= 1
    part = part.clone(memory_format=torch.contiguous_format)
    part.view(-1)[-1:] = last.view(part.dtype)
    return {**results, name: part}


def one_call_earlier(results: dict[str, torch.Tensor], before: list[Any]) -> Any:
    """Returns an earlier call's results, as if a slot were read before it was written."""
    return next(old for old in reversed(before) if shapes(old) == shapes(results))


def shapes(results: dict[str, torch.Tensor]) -> list[Any]:
    return [(name, part.shape, part.dtype) for name, part in results.items()]


def never_written(results: dict[str, torch.Tensor], _: list[Any]) -> Any:
    return {name: torch.zeros_like(part) for name, part in results.items()}


CORRUPTIONS = (one_bit, one_call_earlier, never_written)


@pytest.mark.sampled(6)
@on(cpu=(2,))
@pytest.mark.parametrize("where", ["soak", "repeat"])
@pytest.mark.parametrize("index", range(len(CORRUPTIONS)))
def test_one_corrupted_call_is_found(rank: int, world_size: int, index: int, where: str) -> None:
    """Corrupts one call of the last rank, from the 38th on."""
    issue, before, spoilt = Case.issue, [], []

    def spoiling(*arguments: Any) -> dict[str, torch.Tensor]:
        results = issue(*arguments)
        if rank == world_size - 1 and not spoilt and len(before) >= 37:
            same = [old for old in before if shapes(old) == shapes(results)]
            if same:
                spoilt.append(len(before))
                results = CORRUPTIONS[index](results, before)
        before.append(results)
        return results

    Case.issue = spoiling
    try:
        if where == "soak":
            found = run(soak.soak, stress=2 * soak.BURST)
        else:
            found = run(soak.repeat_shapes, stress=0, shapes=((3, 512),), repeat=100)
    finally:
        Case.issue = issue
    assert found["failures"] == 1, found["details"]
    if rank == 1:
        assert f"rank 1: call {spoilt[0]}," in found["details"][0]
        if CORRUPTIONS[index] is one_bit:
            assert ": 1 of " in found["details"][0]


def calls_made(rank: int, world_size: int, seed: int) -> list[str]:
    """Runs a soak; returns a line that describes each call."""
    issue, made = Case.issue, []

    def noting(case: Case, comm: Any, x: torch.Tensor, *rest: Any) -> dict[str, torch.Tensor]:
        made.append(f"{case} {x.storage_offset()} {x.flatten()[0].item()}")
        return issue(case, comm, x, *rest)

    Case.issue = noting
    try:
        assert run(soak.soak, stress=soak.BURST, seed=seed)["failures"] == 0
    finally:
        Case.issue = issue
    return made


@pytest.mark.long
@on(cpu=(2,))
def test_a_seed_repeats_a_soak(pool: RankPool) -> None:
    first, again, other = (pool.run(calls_made, seed) for seed in (11, 11, 12))
    assert first == again
    assert first[0] != other[0]
    assert first[0] != first[1], "the ranks' payloads differ"
    strip = [[line.rsplit(" ", 1)[0] for line in made] for made in first]
    assert strip[0] == strip[1], "the ranks' calls are equal"


@on(cpu=(3,))
def test_rows_of_a_different_peer_are_found(rank: int, world_size: int) -> None:
    reduce = allnorm.Communicator.all_reduce

    def from_another(comm: allnorm.Communicator, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return reduce(comm, x if rank != 1 else torch.roll(x, 1, -1), **options)

    allnorm.Communicator.all_reduce = from_another
    try:
        found = run(soak.soak, stress=soak.BURST)
    finally:
        allnorm.Communicator.all_reduce = reduce
    assert found["failures"] > 0
    assert "all_reduce" in found["details"][0]


class Rerun:
    """Replaces a captured graph without a GPU: repeats its calls into the same memory."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def replay(self) -> None:
        memory = [call.results for call in self.graph.calls]
        self.graph._issue()
        for call, captured in zip(self.graph.calls, memory, strict=True):
            for name, part in captured.items():
                part.copy_(call.results[name])
            call.results = captured


@on(cpu=(2,), gpu=(2,))
def test_graphs_use_different_rows_in_each_replay(rank: int, world_size: int) -> None:
    """Replays calls on different rows, in place and in new memory."""
    kinds = [
        Case((3, 512), torch.float16, op="all_reduce"),
        Case((5, 512), residual=False),
        Case((5, 512), sharded=True, float32_weight=True),
        Case((2, 512), torch.float32, quant=allnorm.Fp8PerGroup(64), return_normed=True),
        Case((5, 512), torch.float16, sharded=True, gather=False, float32_residual=True),
        Case((3, 512), op="rms_norm_sharded", numerics="vllm"),
        Case((3, 512), torch.float16, op="all_reduce_hyper_connection", float32_residual=True),
    ]
    wrong = []
    with allnorm.Communicator(device=device()) as first, allnorm.Communicator(device=device()) as c:
        tapes = {
            kind.dtype: make_tape(
                40, 512, kind.dtype, first.device, rank, world_size, 3, [range(world_size)]
            )
            for kind in kinds
        }
        calls = [
            (comm, kind, tapes[kind.dtype], in_place)
            for comm in (first, c)
            for kind in kinds
            for in_place in (False, True)
        ]
        if device().type == "cpu":
            with mock.patch.object(soak, "capture", contextlib.nullcontext):
                graph = Graph(calls)
            graph._graph = Rerun(graph)
        else:
            graph = Graph(calls)
        for start in (0, 7, 31):
            called = graph.replay(100, [start + i % 3 for i in range(len(calls))], "replay")
            wrong += [int(one.wrong()) for one in called]
        called[3].row += 1
        assert int(called[3].wrong()) > 0, "results of a different row must differ"
    assert wrong == [0] * 84


@on(cpu=(2,), gpu=(2,))
def test_repeated_shapes_pass(rank: int, world_size: int) -> None:
    found = run(soak.repeat_shapes, stress=0, shapes=((1, 4096), (64, 120)), repeat=70)
    assert found["failures"] == 0, found["details"]
    assert found["cases"] == 2 * 2 * 70


def test_soaks_draw_slices_streams_own_rows_and_float32_residuals() -> None:
    cases = Cases(random.Random(1), torch.device("cpu"), 1 << 17)
    kinds = [cases.draw() for _ in range(100)]
    assert sum(kind.sharded and not kind.gather for kind in kinds) > 5
    assert sum(kind.float32_residual for kind in kinds) > 5
    slices = [cases.draw_slices() for _ in range(100)]
    assert {kind.op for kind in slices} == {"rms_norm_sharded"}
    assert {kind.algorithm for kind in slices} == {"auto", "one_shot", "unfused"}
    streams = [cases.draw_streams() for _ in range(100)]
    assert {kind.op for kind in streams} == {"all_reduce_hyper_connection"}
    assert {kind.streams for kind in streams} == {2, 3, 4, 8}
    assert {kind.algorithm for kind in streams} == {"auto", *ALGORITHMS}
    assert len({(kind.dtype, kind.float32_residual) for kind in streams}) == 6
    inputs = [kind for kind in streams if kind.next_input]
    assert 20 < len(inputs) < 60
    assert {kind.streams for kind in inputs} == {2, 3, 4, 8}
    assert {kind.numerics for kind in inputs} == set(NUMERICS)


@on(cpu=(2,))
def test_kinds_reach_every_algorithm(rank: int, world_size: int) -> None:
    rng = random.Random(1)
    with allnorm.Communicator(device=device(), workspace_bytes=1 << 20) as comm:
        cases = Cases(rng, device(), 1 << 17)
        kinds = [cases.draw() for _ in range(300)]
        fitting = [k for k in kinds if algorithms(k, [comm]) == {k.algorithm}]
    assert len(fitting) > 100
    assert {k.algorithm for k in fitting} == {"one_shot", "two_shot", "unfused"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_tape_is_the_reference_of_its_rows(dtype: torch.dtype) -> None:
    where = 40, 512, dtype, torch.device("cpu")
    tapes = [make_tape(*where, rank, 3, seed=9, islands=[range(3)]) for rank in range(3)]
    for tape in tapes:
        assert same_bits(tape.reduced, allnorm.reference.all_reduce([t.x for t in tapes]))
        assert same_bits(tape.residual, tapes[0].residual)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not (tapes[a].x == tapes[b].x).all(1).any(), "two ranks have an equal row"
    slices, gains = (
        [tape.x.split([384, 128], -1) for tape in tapes],
        tapes[0].weight.split([384, 128]),
    )
    normed = allnorm.reference.rms_norm_sharded(slices, [gains] * 3, 1e-6, 0.5)
    kind = Case((7, 512), dtype, weight_bias=0.5, op="rms_norm_sharded")
    assert same_bits(tapes[1].expected(kind)["normed"], torch.cat(normed[1], -1))
    kind = Case((7, 512), dtype, op="all_reduce_hyper_connection", streams=3)
    mixed = allnorm.reference.all_reduce_hyper_connection(
        [tape.x for tape in tapes],
        streams_of(tapes[0].residual, 3),
        connection_of(tapes[0].residual, 3),
    )
    assert same_bits(tapes[1].expected(kind)["residual_out"], mixed)
    assert not (mixed[:, 0] == mixed[:, 1]).all(1).any(), "two streams have an equal row"
    kind = kind.but(next_input=True, float32_weight=True, weight_bias=0.5)
    known = tapes[1].expected(kind)
    assert same_bits(known["residual_out"], mixed)
    made = next_input(
        *(allnorm.hyper_connection_input, mixed, tapes[0].weight.float(), kind.eps),
        weight_bias=0.5,
    )
    for name in ("normed", "post", "mix"):
        assert same_bits(known[name], made[name]), name
    kind = Case((7, 512), dtype, quant=allnorm.Fp8PerGroup(128), numerics="vllm")
    known, rows = tapes[1].expected(kind), slice(11, 18)
    wanted = allnorm.reference.all_reduce_add_rms_norm_quant(
        [t.x[rows] for t in tapes],
        *(tapes[0].residual[rows], tapes[0].weight, kind.eps, kind.quant, True),
        numerics="vllm",
    )
    for name in ("quantized", "scale", "normed"):
        assert same_bits(known[name][rows], getattr(wanted, name)), name
    assert same_bits(known["residual_out"][rows], wanted.residual)


# ---- multiple threads ----------------------------------------------------------------------------


@pytest.mark.sampled(3)
@on(cpu=(2, 3, 4))
def test_the_soak_of_threads_passes(rank: int, world_size: int) -> None:
    found = run(threads.threads, stress=0, threads=1.0)
    assert found["failures"] == 0, found["details"]
    assert found["rounds"] >= 1
    assert found["communicators"] >= 3
    assert found["cases"] >= 3 * 60
    assert found["unfused"] > 0


@pytest.mark.long
@on(cpu=(4, 6))
def test_the_soak_of_threads_passes_for_minutes(rank: int, world_size: int) -> None:
    found = run(threads.threads, stress=0, threads=120.0)
    assert found["failures"] == 0, found["details"]
    assert found["hierarchical"] > 0


def one_exchange_for_all(rank: int, world_size: int) -> Result:
    """Makes communicators of the same size share the exchange of their unfused calls."""
    made: dict[int, GroupExchange] = {}
    make = Connection._make

    def share(connection: Connection) -> GroupExchange:
        exchange = make(connection)
        return made.setdefault(connection._world_size, exchange)

    with mock.patch.object(Connection, "_make", share):
        return run(threads.threads, stress=0, threads=2.0)


def test_the_soak_of_threads_finds_a_shared_exchange() -> None:
    try:
        found = run_ranks(one_exchange_for_all, 2, timeout=HANG_SECONDS)[0]
    except RankError:
        return  # gloo aborts processes that send different numbers of bytes
    assert found["failures"] > 0
