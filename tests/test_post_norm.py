"""Before the residual is added: the norm of the reduced sum, its scale. No second norm behind."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from rank_helpers import (
    ALGORITHMS,
    DTYPES,
    MODES,
    Case,
    assert_ranks_agree,
    check_cases,
    comm,
    dtype_ids,
    message_of,
    on,
)

import allnorm
from allnorm import reference
from allnorm.testing import SPECIAL_KINDS, RankPool, assert_same_bits, rank_input, shared_input
from allnorm.testing.rank import device

# post_norm, scale, second_norm
CHANGES = ((True, 1.0, True), (True, 1.0, False), (False, 0.22, True), (True, -1.5, False))
SPECS = (
    None,
    allnorm.Fp8PerGroup(64, "column_major_tma", "ue8m0_packed"),
    allnorm.Fp8PerGroup(16),
    allnorm.Fp8PerToken(),
    allnorm.Fp8PerTensor(torch.tensor([0.05])),
)


def changed(case: Case, change: tuple[bool, float, bool]) -> Case:
    post_norm, scale, second_norm = change
    return case.but(post_norm=post_norm, scale=scale, second_norm=second_norm)


@on(cpu=(1, 2, 3, 8), gpu=range(1, 9))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_modes_and_algorithms(pool: RankPool, dtype: torch.dtype) -> None:
    cases = [
        changed(Case((5, 1024), dtype, numerics=mode, algorithm=algorithm, residual=added), change)
        for mode, algorithm, added, change in itertools.product(
            MODES, ALGORITHMS, (True, False), CHANGES
        )
    ]
    assert pool.run(check_cases, cases) == [len(cases)] * pool.world_size


@on(cpu=(2, 3), gpu=range(2, 9))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_shapes(pool: RankPool, dtype: torch.dtype) -> None:
    draw = random.Random(str(dtype))
    cases = [
        changed(
            Case(
                (num_tokens, hidden_size),
                dtype,
                residual=draw.random() < 0.7,
                float32_weight=draw.random() < 0.5,
                weight_bias=draw.choice((0.0, 1.0, 0.25)),
                eps=draw.choice((1e-6, 1e-5, 0.0, 1.0)),
                numerics=draw.choice(MODES),
                algorithm=algorithm,
                call=draw.randrange(100),
            ),
            draw.choice(CHANGES),
        )
        for hidden_size, num_tokens, algorithm in itertools.product(
            (2304, 3584, 5376, 2880, 120, 4095, 8192, 16384, 7, 1),
            (0, 1, 2, 5),
            ("one_shot", "two_shot", "auto"),
        )
    ]
    pool.run(check_cases, cases)


@on(cpu=(2,), gpu=range(2, 9))
def test_more_rows(pool: RankPool) -> None:
    cases = [
        changed(Case((num_tokens, hidden_size), algorithm=algorithm, call=num_tokens), change)
        for num_tokens, hidden_size in ((17, 4096), (64, 2304), (257, 120), (1025, 2944))
        for algorithm in ALGORITHMS
        for change in CHANGES
    ]
    pool.run(check_cases, cases)


@on(cpu=(1, 2, 3), gpu=(1, 2, 3, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_quantised_and_sharded(pool: RankPool, dtype: torch.dtype, sharded: bool) -> None:
    draw = random.Random(f"{dtype} {sharded}")
    cases = [
        Case(
            (tokens, draw.choice((256, 1152))),
            dtype,
            sharded=sharded,
            quant=spec,
            algorithm=algorithm,
            residual=draw.random() < 0.7,
            numerics=draw.choice(MODES),
            float32_weight=draw.random() < 0.5,
            return_normed=spec is not None and draw.random() < 0.5,
            post_norm=draw.random() < 0.8,
            scale=draw.choice((1.0, 0.22)),
            call=tokens,
        )
        for tokens, spec, algorithm in itertools.product(
            (0, 1, 2, 5, 33), SPECS, ("two_shot", "unfused", "auto")
        )
    ]
    cases += [
        Case((tokens, 264), dtype, sharded=sharded, post_norm=True, second_norm=False)
        for tokens in (0, 1, 2, 7, 40)
    ]
    pool.run(check_cases, cases)


@on(cpu=(2, 3), gpu=(2, 3, 8))
@pytest.mark.parametrize("dtype", **dtype_ids)
def test_values_that_hurt(pool: RankPool, dtype: torch.dtype) -> None:
    cases = [
        changed(Case((7, 264), dtype, kind=kind, algorithm=algorithm, numerics=mode), change)
        for kind, algorithm, change in itertools.product(
            (*SPECIAL_KINDS, "sentinels", "finite_sentinels"), ("one_shot", "two_shot"), CHANGES
        )
        for mode in ("rounded", "vllm")
    ]
    pool.run(check_cases, cases)


@on(cpu=(2, 4), gpu=(2, 4))
def test_leading_dimensions(pool: RankPool) -> None:
    cases = [
        changed(Case(shape, algorithm=algorithm), change)
        for shape in ((64,), (2, 3, 64), (0, 3, 64))
        for algorithm in ALGORITHMS
        for change in CHANGES
    ]
    pool.run(check_cases, cases)


def row_by_row(rank: int, world_size: int) -> None:
    c = comm()
    for change in CHANGES:
        case = changed(Case((19, 2304)), change)
        together = case.check(c)
        x, arguments = case.x(rank), case.call_arguments(c)
        residual = arguments.pop("residual")
        for row in (0, 7, 18):
            alone = c.all_reduce_add_rms_norm(
                x[row : row + 1], residual[row : row + 1], **arguments
            )
            for got, whole in zip(alone, together, strict=True):
                assert (got is None) == (whole is None)
                if got is not None:
                    assert_same_bits(got, whole[row : row + 1], f"row {row} of {case}")


@on(cpu=(2,), gpu=(2,))
def test_a_row_does_not_depend_on_others(pool: RankPool) -> None:
    pool.run(row_by_row)


def repeat(rank: int, world_size: int) -> None:
    """Weights change their addresses, results are given or new, calls of other kinds between."""
    c = comm()
    x, residual = rank_input((4, 264), torch.bfloat16, rank), Case((4, 264)).residual_tensor()
    x, residual = x.to(device()), residual.to(device())
    for number in range(12):
        weights = [
            shared_input((264,), dtype, f"{number % 3} {name}", device=device())
            for name, dtype in (("w", torch.bfloat16), ("post", torch.float32))
        ]
        arguments: dict[str, Any] = {"post_norm": allnorm.PostNorm(weights[1], 1e-5, 1.0)}
        if number % 4 == 3:
            arguments = {"scale": 0.5}
        weight = None if number % 4 == 1 else weights[0]
        want = reference.all_reduce_add_rms_norm(
            [rank_input((4, 264), torch.bfloat16, q).to(device()) for q in range(world_size)],
            *(residual, weight, 1e-6),
            **arguments,
        )
        into = {} if number % 2 else {"residual_out": residual.clone()}
        got = c.all_reduce_add_rms_norm(x, residual, weight, 1e-6, **arguments, **into)
        assert not into or got[1] is into["residual_out"]
        for one, other in zip(got, want, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_same_bits(one, other, f"call {number}")
    strided = shared_input((528,), torch.bfloat16, "odd", device=device())[1:265]
    post = allnorm.PostNorm(strided, 1e-6)
    want = c.all_reduce_add_rms_norm(
        x, residual, None, 1e-6, post_norm=allnorm.PostNorm(strided.clone(), 1e-6)
    )
    got = c.all_reduce_add_rms_norm(x, residual, None, 1e-6, post_norm=post)
    assert_same_bits(got[1], want[1], "a weight that is not aligned")
    inplace = residual.clone()
    got = c.all_reduce_add_rms_norm(
        x, inplace, weights[0], 1e-6, post_norm=post, residual_out=inplace
    )
    want = c.all_reduce_add_rms_norm(x, residual, weights[0], 1e-6, post_norm=post)
    assert got[1] is inplace
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other, "in place")
    c.check()


@on(cpu=(1, 2), gpu=(1, 2))
def test_repeated_calls(pool: RankPool) -> None:
    pool.run(repeat)


def as_functions(rank: int, world_size: int) -> None:
    case = Case((3, 264), post_norm=True, scale=2.0)
    arguments = case.norm_arguments()
    want = case.expected(world_size)
    got = allnorm.all_reduce_add_rms_norm(case.x(rank), **arguments)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other, "the function")
    out = allnorm.all_reduce_add_rms_norm_quant(
        case.x(rank), quant=allnorm.Fp8PerToken(), **arguments
    )
    want = case.but(quant=allnorm.Fp8PerToken()).expected(world_size)
    assert_same_bits(out.quantized, want.quantized, "the function")
    reduced = reference.all_reduce(case.xs(world_size))
    for weight in (case.weight(), None):
        arguments["weight"] = weight
        got = allnorm.add_rms_norm(reduced, **arguments)
        want = reference.add_rms_norm(reduced, **arguments)
        assert_same_bits(got[1], want[1], "without an exchange")
        assert (got[0] is None) == (weight is None)
        if weight is not None:
            assert_same_bits(got[0], want[0], "without an exchange")
    arguments["weight"] = case.weight()
    out = allnorm.add_rms_norm_quant(reduced, quant=allnorm.Fp8PerToken(), **arguments)
    want = reference.add_rms_norm_quant(reduced, quant=allnorm.Fp8PerToken(), **arguments)
    assert_same_bits(out.quantized, want.quantized, "without an exchange")


@on(cpu=(2,), gpu=(2,))
def test_functions(pool: RankPool) -> None:
    pool.run(as_functions)


def compiled(rank: int, world_size: int, dynamic: bool) -> None:
    c = comm()

    def program(x: Any, residual: Any, weight: Any, post: Any) -> Any:
        norm = allnorm.PostNorm(post, 1e-5, 1.0)
        normed, residual = c.all_reduce_add_rms_norm(
            x, residual, weight, 1e-6, post_norm=norm, scale=0.5
        )
        nothing, residual = c.all_reduce_add_rms_norm(normed, residual, None, 1e-6, post_norm=norm)
        assert nothing is None
        out = c.all_reduce_add_rms_norm_quant(
            residual, residual, weight, 1e-6, allnorm.Fp8PerToken(), True, post_norm=norm
        )
        return normed, residual, out.quantized, out.scale, out.normed

    torch.compiler.reset()
    fast = torch.compile(program, fullgraph=True, dynamic=dynamic)
    for tokens in (3, 5):
        case = Case((tokens, 264))
        given = (case.x(rank), case.residual_tensor(), case.weight(), case.weight().float())
        for one, other in zip(fast(*given), program(*given), strict=True):
            assert_same_bits(one, other, f"{tokens} tokens")


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_torch_compile(pool: RankPool, dynamic: bool) -> None:
    pool.run(compiled, dynamic)


def refuse(rank: int, world_size: int) -> None:
    c = comm()
    case = Case((2, 64))
    x, residual, weight = case.x(rank), case.residual_tensor(), case.weight()
    post = allnorm.PostNorm(weight, 1e-6)

    def call(norm: Any = None, weight: Any = weight, **more: Any) -> Any:
        return c.all_reduce_add_rms_norm(x, residual, weight, 1e-6, post_norm=norm, **more)

    for error, words, make in (
        (TypeError, "post_norm=0.5: expected an allnorm.PostNorm", lambda: call(0.5)),
        (TypeError, "weight is None", lambda: call(None, None)),
        (TypeError, "weight is None", lambda: call(None, None, scale=2.0)),
        (ValueError, "out without a weight", lambda: call(post, None, out=torch.empty_like(x))),
        (
            ValueError,
            "post_norm.weight has shape (63,)",
            lambda: call(allnorm.PostNorm(weight[1:], 1e-6)),
        ),
        (
            TypeError,
            "post_norm.weight has dtype torch.float16",
            lambda: call(allnorm.PostNorm(weight.half(), 1e-6)),
        ),
        (ValueError, "post_norm.eps=-1.0", lambda: call(allnorm.PostNorm(weight, -1.0))),
        (TypeError, "post_norm.eps='1'", lambda: call(allnorm.PostNorm(weight, "1"))),
        (ValueError, "scale=inf", lambda: call(scale=float("inf"))),
        (ValueError, "scale=nan", lambda: call(scale=float("nan"))),
        (TypeError, "scale=True", lambda: call(scale=True)),
        (TypeError, "scale=tensor", lambda: call(scale=torch.tensor(2.0))),
        (
            TypeError,
            "weight is None",
            lambda: c.all_reduce_add_rms_norm_quant(x, residual, None, 1e-6, post_norm=post),
        ),
        (TypeError, "post_norm=1", lambda: c.plan(2, 64, post_norm=1)),
        (ValueError, "scale=nan", lambda: c.plan(2, 64, scale=float("nan"))),
    ):
        assert words in message_of(error, make), words
    plan = c.plan(2, 64, post_norm=post, scale=0.22)
    assert plan == c.plan(2, 64)
    changed(case, CHANGES[0]).check(c)
    # An integer is a number too, and 1 changes nothing.
    got, want = call(scale=1), call()
    assert_same_bits(got[0], want[0], "scale=1")
    c.check()


@on(cpu=(1, 2), gpu=(2,))
def test_refusals(pool: RankPool) -> None:
    pool.run(refuse)


def differ(rank: int, world_size: int, what: str, algorithm: str) -> str:
    c = allnorm.Communicator(device=device(), timeout=20)
    case = Case((2, 64), post_norm=True, scale=2.0)
    arguments = case.call_arguments(c) | {"algorithm": algorithm}
    norm, odd = arguments["post_norm"], rank == 1
    if what == "eps":
        arguments["post_norm"] = allnorm.PostNorm(norm.weight, 1e-5 if odd else 1e-6, 1.0)
    elif what == "post norm" and odd:
        del arguments["post_norm"]
    elif what == "scale" and odd:
        arguments["scale"] = 2.5
    elif what == "second norm" and odd:
        arguments["weight"] = None
    try:
        c.all_reduce_add_rms_norm(case.x(rank), **arguments)
        if device().type == "cuda":
            torch.cuda.synchronize()
        c.check()
    except allnorm.PeerDivergedError as error:
        return str(error)
    finally:
        c.close()
    return ""


@on(cpu=(2,), gpu=(2,))
@pytest.mark.parametrize("what", ["eps", "post norm", "scale", "second norm"])
@pytest.mark.parametrize("algorithm", ["one_shot", "unfused"])
def test_ranks_that_differ(pool: RankPool, what: str, algorithm: str) -> None:
    said = pool.run(differ, what, algorithm)
    assert all("another call" in one or "differ" in one for one in said), said
    if algorithm == "unfused":
        words = {"eps": "eps of the post norm", "second norm": "without a second norm"}
        assert words.get(what, what) in said[0], said[0]


def agree(rank: int, world_size: int) -> None:
    c = comm()
    for dtype, change in itertools.product(DTYPES, CHANGES):
        case = changed(Case((3, 2880), dtype, kind="nan"), change)
        results = [result for result in case.run(c) if result is not None]
        assert_ranks_agree(c, *results)


@on(cpu=(3,), gpu=(3,))
def test_ranks_agree(pool: RankPool) -> None:
    pool.run(agree)
