"""A row's bits depend on that row alone: not on its batch, algorithm, earlier calls or chunks."""

from __future__ import annotations

import random
import time

import torch
from rank_helpers import ALGORITHMS, MODES, Case, assert_ranks_agree, can_run, comm, on

from allnorm.testing import RankPool, assert_same_bits


def rows_alone(rank: int, world_size: int, hidden_size: int) -> None:
    c = comm()
    draw = random.Random(hidden_size)
    for mode in MODES:
        case = Case((37, hidden_size), numerics=mode)
        x, arguments = case.x(rank), case.norm_arguments()
        residual = arguments.pop("residual")
        results = {}
        for algorithm in ALGORITHMS:
            if can_run(c, algorithm, hidden_size, case.dtype):
                results[algorithm] = c.all_reduce_add_rms_norm(
                    x, residual, algorithm=algorithm, **arguments
                )
        normed, total = results["auto"]
        assert len(results) >= 2
        for algorithm, (other_normed, other_total) in results.items():
            assert_same_bits(other_normed, normed, f"normed by {algorithm}")
            assert_same_bits(other_total, total, f"residual_out by {algorithm}")
        for _ in range(6):
            rows = sorted(draw.sample(range(37), draw.choice((1, 1, 2, 16, 30))))
            draw.shuffle(rows)
            algorithm = draw.choice(list(results))
            few_normed, few_total = c.all_reduce_add_rms_norm(
                x[rows], residual[rows], algorithm=algorithm, **arguments
            )
            assert_same_bits(few_normed, normed[rows], f"rows {rows} by {algorithm}")
            assert_same_bits(few_total, total[rows], f"rows {rows} by {algorithm}")


@on(cpu=(2, 3), gpu=range(2, 9))
def test_a_row_alone_equals_the_row_in_a_batch(pool: RankPool) -> None:
    for hidden_size in (4096, 2880, 136, 7):
        pool.run(rows_alone, hidden_size)


def chunked(rank: int, world_size: int) -> None:
    """A workspace that holds few rows: several launches, and the bits of one."""
    small = comm(workspace_bytes=64 << 10)
    for algorithm in ("one_shot", "two_shot"):
        for num_tokens, hidden_size in ((1, 512), (50, 512), (200, 120), (333, 64)):
            case = Case((num_tokens, hidden_size), algorithm=algorithm, call=num_tokens)
            plan = small.plan(num_tokens, hidden_size, case.dtype, algorithm=algorithm)
            assert plan.algorithm == algorithm, plan
            if num_tokens * hidden_size * 2 > 64 << 10:
                assert plan.num_chunks > 1, plan
            normed, total = case.check(small)
            assert_ranks_agree(small, normed, total)
            in_place = case.x(rank)
            case.compare(
                small,
                *small.all_reduce_add_rms_norm(
                    in_place, algorithm=algorithm, out=in_place, **case.norm_arguments()
                ),
            )


@on(cpu=(2, 3, 8), gpu=(2, 3, 8))
def test_row_chunks_beyond_the_workspace(pool: RankPool) -> None:
    pool.run(chunked)


def too_wide(rank: int, world_size: int) -> None:
    """A row that does not fit at all takes the unfused path, and the plan says so."""
    small = comm(workspace_bytes=64 << 10)
    case = Case((3, 65536))
    plan = small.plan(3, 65536, case.dtype)
    assert plan.algorithm == "unfused"
    assert "wide" in plan.reason, plan.reason  # for the workspace, or for a fused kernel
    case.check(small)


@on(cpu=(2,), gpu=(2, 8))
def test_row_wider_than_the_workspace(pool: RankPool) -> None:
    pool.run(too_wide)


def soak(rank: int, world_size: int, calls: int, delays: bool) -> None:
    """Distinct inputs in every call, mixed shapes and algorithms on one workspace, no barriers."""
    c = comm()
    agreed, own = random.Random(7), random.Random(rank)
    pending = []
    for call in range(calls):
        hidden_size = agreed.choice((64, 256, 1024, 2880))
        case = Case(
            (agreed.choice((1, 1, 2, 4, 9, 33)), hidden_size),
            agreed.choice((torch.bfloat16, torch.float32)),
            numerics=agreed.choice(MODES),
            algorithm=agreed.choice(("one_shot", "two_shot", "auto")),
            residual=agreed.random() < 0.7,
            call=call,
        )
        pending.append((case, case.x(rank), case.norm_arguments()))
    results = []
    for case, x, arguments in pending:
        if delays and own.random() < 0.1:
            time.sleep(own.random() * 2e-3)
        results.append(c.all_reduce_add_rms_norm(x, algorithm=case.algorithm, **arguments))
    for (case, _, _), (normed, total) in zip(pending, results, strict=True):
        case.compare(c, normed, total)


@on(cpu=(2, 3, 8), gpu=(2, 5, 8))
def test_many_calls_without_a_barrier(pool: RankPool) -> None:
    pool.run(soak, 120 if pool.device == "cpu" else 600, False)


@on(cpu=(2, 4), gpu=(4,))
def test_many_calls_with_random_delays(pool: RankPool) -> None:
    pool.run(soak, 120, True)


def wrapping(rank: int, world_size: int, first_op: int) -> None:
    c = comm(first_op=first_op)
    for call in range(12):
        for algorithm in ("one_shot", "two_shot"):
            Case((3, 256), algorithm=algorithm, call=call).check(c)


@on(cpu=(2, 3), gpu=(2, 8))
def test_operation_counter_wraps(pool: RankPool) -> None:
    """Incident 14. Signed comparison changes sign at 2**31, the number itself at 2**32."""
    for first_op in (2**31 - 9, 2**32 - 9):
        pool.run(wrapping, first_op)
