"""Compares the results of all kinds of calls bit by bit: corner cases and random calls."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import Pools
from rank_helpers import Case, comm, device, on, run_cases

from allnorm import policy
from allnorm.testing import RankPool, assert_same_bits
from allnorm.verify.calls import Cases, can_run
from allnorm.verify.corners import AUTO, CHANGES, CORNERS, MODES, PAIRS, QUANTS, WIDTHS

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def assert_right(ran: int, wrong: list[str]) -> None:
    assert not wrong, "\n".join([f"{len(wrong)} of {ran} are wrong:", *wrong[:8]])


# ---- the table -----------------------------------------------------------------------------------


def check_corner(rank: int, world_size: int, name: str) -> int:
    corner = CORNERS[name]
    with contextlib.ExitStack() as limits:
        for limit, value in corner.policy:
            limits.enter_context(mock.patch.object(policy, limit, value))
        c = comm(workspace_bytes=corner.workspace_bytes, islands=corner.islands or "auto")
        ran, wrong = run_cases(c, corner.cases)
        pieces = [_pieces(c, case) for case in corner.cases if case.op == "norm"]
    assert_right(ran, wrong)
    assert c.check() is None
    assert not corner.pieces or max(pieces) > 1
    return ran


def _pieces(c: Any, case: Case) -> int:
    where = case.num_tokens, case.hidden_size, case.dtype, case.spec(), case.sharded
    if not can_run(c, case.algorithm, case.hidden_size, case.dtype, case.sharded):
        return 0
    return c.plan(*where, algorithm=case.algorithm).num_chunks


def corners() -> list[Any]:
    """Returns test parameters for each corner case and world size."""
    return [
        pytest.param(
            (kind, size),
            name,
            id=f"{name}-{kind}{size}",
            marks=[pytest.mark.world_size(size), *([pytest.mark.gpu] if kind == "cuda" else [])],
        )
        for name, corner in CORNERS.items()
        for kind, sizes in (("cpu", corner.cpu), ("cuda", corner.gpu))
        for size in sizes
    ]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("pool", "name"), corners(), indirect=["pool"])
def test_corner(pool: RankPool, name: str) -> None:
    ran = pool.run(check_corner, name)
    assert len(set(ran)) == 1
    assert ran[0] > len(CORNERS[name].cases) // 2


# ---- random calls --------------------------------------------------------------------------------

TOKENS = (0, 1, 2, 3, 5, 8, 17, 33, 64, 130)


def random_cases(rng: random.Random, islands: Any = None, widths: Any = (*WIDTHS, 16, 96)) -> Cases:
    algorithms = AUTO
    if islands is not None:
        algorithms = ["auto", "unfused", *(["hierarchical"] if islands == PAIRS else [])]
    return Cases(rng, torch.device("cpu"), 1 << 15, TOKENS, widths, algorithms)


def check_random(rank: int, world_size: int, count: int, seed: int, islands: Any) -> None:
    """Runs random calls without barriers, with pauses at different times on each rank."""
    c = comm(islands="auto" if islands is None else islands)
    cases, own = random_cases(random.Random(seed), islands), random.Random(rank)

    def pause() -> None:
        if own.random() < 0.05:
            time.sleep(own.random() * 2e-3)

    assert_right(*run_cases(c, [cases.draw_any() for _ in range(count)], pause))
    assert c.check() is None


@pytest.mark.sampled(4)
@on(cpu=range(1, 9), gpu=range(1, 9))
def test_random_calls(pool: RankPool) -> None:
    count = 1500 if pool.device == "cuda" else 600 if pool.world_size in (2, 3) else 150
    pool.run(check_random, count, pool.world_size, None)


@pytest.mark.sampled(2)
@on(cpu=(4,), gpu=(4,))
@pytest.mark.parametrize("islands", [PAIRS, ((0, 3), (1, 2))], ids=str)
def test_random_calls_over_islands(pool: RankPool, islands: Any) -> None:
    pool.run(check_random, 200, 3, islands)


def check_drawn(rank: int, world_size: int, case: Case) -> list[str]:
    """Returns errors instead of raising, so that hypothesis can reuse the same processes."""
    try:
        return run_cases(comm(workspace_bytes=128 << 10), [case])[1]
    except Exception as error:  # noqa: BLE001 - the parent raises it
        return [f"{type(error).__name__}: {error}"]


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(rng=st.randoms(), width=st.integers(1, 700))
def test_failing_calls_are_shrunk(pools: Pools, rng: random.Random, width: int) -> None:
    """Hypothesis draws calls from the generator and shrinks failing ones."""
    case = random_cases(rng, widths=(width,)).draw_any()
    assert pools.get("cpu", 2).run(check_drawn, case) == [[], []]


# ---- properties of multiple calls ----------------------------------------------------------------


ALONE = [Case((37, w), numerics=mode) for w in (4096, 2880, 136, 7) for mode in MODES]
ALONE += [Case((37, 576), quant=quant) for quant in (None, *QUANTS)]
ALONE += [Case((37, 2304), **change) for change in CHANGES]


@pytest.mark.sampled(3)
@on(cpu=(2, 3), gpu=range(2, 9))
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_a_row_alone_equals_the_row_in_a_batch(rank: int, world_size: int, case: Case) -> None:
    c, draw = comm(), random.Random(case.hidden_size)
    x, arguments = case.x(rank), case.call_arguments(c)
    residual = arguments.pop("residual")
    usable = [name for name in AUTO if can_run(c, name, case.hidden_size, case.dtype)]
    assert len(usable) >= 2

    def run(rows: Any, algorithm: str) -> list[torch.Tensor]:
        more = {**arguments, "algorithm": algorithm, "residual": residual[rows]}
        results = case.method(c)(x[rows], **more)
        return [result for result in case.named(results).values() if result.dim() == 2]

    whole = run(slice(None), "auto")
    for name in usable:
        for got, want in zip(run(slice(None), name), whole, strict=True):
            assert_same_bits(got, want, f"{case} by {name}")
    for _ in range(6):
        rows = draw.sample(range(case.num_tokens), draw.choice((1, 1, 2, 16, 30)))
        for got, want in zip(run(rows, draw.choice(usable)), whole, strict=True):
            assert_same_bits(got, want[rows], f"rows {rows} of {case}")


@on(cpu=(2, 3), gpu=(2, 8))
@pytest.mark.parametrize("first_op", [2**31 - 9, 2**32 - 9])
def test_operation_counter_wraps(rank: int, world_size: int, first_op: int) -> None:
    """Tests operation numbers around 2**31 (signed comparisons overflow) and 2**32 (they wrap)."""
    c = comm(first_op=first_op)
    cases = [Case((3, 256), algorithm=name, call=n) for n in range(12) for name in AUTO[1:3]]
    assert_right(*run_cases(c, cases))


@on(cpu=(2,), gpu=(2,))
def test_every_mean_square(rank: int, world_size: int) -> None:
    """Checks that exchange kernels, which multiply, round like the local kernel, which divides.

    x is (a, b, 0, 0). A small b adds zero, one or two units in the last place to a squared.
    """
    c = comm()
    chunk, step = (1 << 20, 1) if device().type == "cuda" else (1 << 14, 509)
    weight = torch.ones(4, device=device())
    for begin in range(0x3F800000, 0x40000000, chunk * step):
        bits = torch.arange(begin, min(begin + chunk * step, 0x40000000), step, dtype=torch.int32)
        for b in (0.0, 2.0**-11.5, 2.0**-11):
            x = torch.zeros(len(bits), 4, device=device())
            x[:, rank] = bits.to(device()).view(torch.float32) if rank == 0 else b
            got, divided = (
                c.all_reduce_add_rms_norm(x, None, weight, 0.0, algorithm=algorithm)
                for algorithm in ("one_shot", "unfused")
            )
            for mine, wanted in zip(got, divided, strict=True):
                assert_same_bits(mine, wanted, f"from {begin:#x} on, b = {b}")
