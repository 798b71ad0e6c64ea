"""Tests rms_norm_sharded: RMSNorm of rows that are spread over the ranks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from rank_helpers import DTYPES, comm, device, message_of, on, run_and_check, used_communicator

import allnorm
from allnorm import reference
from allnorm.testing import assert_same_bits

EPS = 1e-6
SIZES = ((120,), (2880, 120), (2944, 5760), (8, 16, 24, 32), (2048, 256))


def slices_of(
    seed: int,
    world_size: int,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    hurtful: bool = False,
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Returns all ranks' tensors and weights, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tensors: list[list[Any]] = []
    weights: list[list[Any]] = []
    for _ in range(world_size):
        tensors.append([])
        weights.append([])
        for number, size in enumerate(sizes):
            x = torch.randn(*shape, size, generator=generator) * 10 ** (number - 1)
            if hurtful:
                rows = x.view(-1, size)
                for row, value in zip(
                    rows, (float("nan"), float("inf"), 0.0, 1e-40, 3e38), strict=False
                ):
                    row[:: max(1, size // 3)] = value
                rows[5:6] = 0.0
            tensors[-1].append(x.to(dtype).to(device()))
            kind = torch.float32 if (seed + number) % 3 == 0 else dtype
            weights[-1].append(torch.randn(size, generator=generator).to(kind).to(device()))
    return tensors, weights


def check(
    c: allnorm.Communicator, tensors: list[list[Any]], weights: list[list[Any]], **more: Any
) -> list[torch.Tensor]:
    """Makes a call, and compares its results with the reference."""
    numerics = more.get("numerics")
    bias = more.get("weight_bias", 0.0)
    wanted = reference.rms_norm_sharded(tensors, weights, EPS, bias, numerics=numerics)
    results = c.rms_norm_sharded(tensors[c.rank], weights[c.rank], EPS, **more)
    for number, (one, other) in enumerate(zip(results, wanted[c.rank], strict=True)):
        assert_same_bits(one, other, f"tensor {number} {more}")
    return results


@on(cpu=(1, 2, 3), gpu=(1, 2, 4, 8))
def test_results(rank: int, world_size: int) -> None:
    c = comm()
    for seed, (sizes, shape) in enumerate(itertools.product(SIZES, ((0,), (1,), (2, 3), (17,)))):
        dtype, numerics = DTYPES[seed % 3], reference.NUMERICS[seed // 3 % 4]
        given = slices_of(seed, world_size, shape, sizes, dtype, hurtful=seed % 2 == 0)
        algorithm = "unfused" if seed % 5 == 4 else "auto"
        check(c, *given, algorithm=algorithm, numerics=numerics, weight_bias=seed % 2)


@on(cpu=(2,), gpu=(2,))
def test_every_algorithm_gives_the_same_bits(rank: int, world_size: int) -> None:
    c = comm()
    tensors, weights = slices_of(5, world_size, (7,), (2880, 264), torch.bfloat16)
    for numerics in reference.NUMERICS:
        for algorithm in ("auto", "one_shot", "unfused"):
            check(c, tensors, weights, algorithm=algorithm, numerics=numerics)
    for algorithm in ("two_shot", "hierarchical"):
        assert "one hop" in message_of(
            allnorm.UnsupportedError,
            lambda name=algorithm: c.rms_norm_sharded(
                tensors[rank], weights[rank], EPS, algorithm=name
            ),
        )
    # A row does not depend on the rows beside it.
    whole = c.rms_norm_sharded(tensors[rank], weights[rank], EPS)
    for row in range(7):
        alone = c.rms_norm_sharded([x[row] for x in tensors[rank]], weights[rank], EPS)
        for one, other in zip(alone, whole, strict=True):
            assert_same_bits(one, other[row], f"row {row}")


@on(cpu=(3,), gpu=(4,))
def test_islands_add_in_rank_order(rank: int, world_size: int) -> None:
    islands = [[0, 2], [1], [3]][: world_size - 1]
    with allnorm.Communicator(device=device(), islands=islands) as c:
        check(c, *slices_of(1, world_size, (5,), (128, 64), torch.float32))
        plan = c.plan(5, [128, 64], torch.float32)
        assert plan.algorithm == "unfused"
        assert "islands" in plan.reason


@on(cpu=(2,), gpu=(2,))
def test_odd_sizes_and_widths(rank: int, world_size: int) -> None:
    c = comm()
    for seed, size in enumerate((1, 3, 7, 121, 4099, 40_000)):
        check(c, *slices_of(seed, world_size, (3,), (size, 8), torch.bfloat16))
    check(c, *slices_of(9, world_size, (5000,), (8, 24), torch.float16))


@on(cpu=(1, 2), gpu=(2,))
def test_columns_of_one_matrix(rank: int, world_size: int) -> None:
    """q and k are columns of one matrix. They are normed apart, and in place."""
    c = comm()
    for dims in ((5,), (2, 3)):
        for algorithm in ("auto", "unfused"):
            tensors, weights = slices_of(3, world_size, dims, (128, 64), torch.bfloat16)
            whole = [torch.cat((*each, torch.ones_like(each[1])), -1) for each in tensors]
            views = [[each[..., :128], each[..., 128:192]] for each in whole]
            wanted = check(c, views, weights, algorithm=algorithm)
            results = c.rms_norm_sharded(
                *(views[rank], weights[rank], EPS), out=views[rank], algorithm=algorithm
            )
            for number, (one, other) in enumerate(zip(results, wanted, strict=True)):
                assert one is views[rank][number]
                assert_same_bits(one, other, f"in place, tensor {number}")
            assert bool((whole[rank][..., 192:] == 1).all())
            out = [torch.full_like(x, 7.0) for x in tensors[rank]]
            given = c.rms_norm_sharded(tensors[rank], weights[rank], EPS, 0.0, out)
            assert all(one is other for one, other in zip(given, out, strict=True))
            for one, other in zip(out, wanted, strict=True):
                assert_same_bits(one, other, "out")


@on(cpu=(2,), gpu=(2,))
def test_repeated_and_mixed_calls(rank: int, world_size: int) -> None:
    c = comm()
    cases = [
        slices_of(seed, world_size, (1 + seed % 4,), SIZES[seed % 5], DTYPES[seed % 3])
        for seed in range(6)
    ]
    x, weight = torch.ones(3, 64, device=device()), torch.ones(64, device=device())
    first, _ = c.all_reduce_add_rms_norm(x, None, weight, EPS)
    for turn in range(60):
        if rank == turn % world_size and turn % 20 == 0:
            time.sleep(0.02)
        check(c, *cases[turn % 6])
        if turn % 5 == 0:
            normed, _ = c.all_reduce_add_rms_norm(x, None, weight, EPS)
            assert_same_bits(normed, first, "all_reduce_add_rms_norm")


@on(cpu=(2,), gpu=(2,))
def test_refusals(rank: int, world_size: int) -> None:
    c = comm()
    tensors, weights = slices_of(2, world_size, (3,), (64, 32), torch.bfloat16)
    x, w = tensors[rank], weights[rank]
    wide = torch.ones(3, 1 << 19, dtype=torch.bfloat16, device=device())
    for error, text, arguments in (
        (TypeError, "tensors is a Tensor", (x[0], w, EPS)),
        (TypeError, "weights is a NoneType", (x, None, EPS)),
        (TypeError, "out is a Tensor", (x, w, EPS, 0.0, x[0])),
        (ValueError, "0 tensors", ([], [], EPS)),
        (ValueError, "5 tensors", ([x[0]] * 5, [w[0]] * 5, EPS)),
        (ValueError, "1 weights", (x, w[:1], EPS)),
        (ValueError, "1 out", (x, w, EPS, 0.0, x[:1])),
        (TypeError, "tensors[1] is a int", ([x[0], 3], w, EPS)),
        (TypeError, "weights[0] is a NoneType", (x, [None, w[1]], EPS)),
        (TypeError, "tensors[1] has dtype", ([x[0], x[1].half()], w, EPS)),
        (allnorm.UnsupportedError, "float64", ([x[0].double(), x[1]], w, EPS)),
        (ValueError, "expected as many rows", ([x[0], x[1][:2]], w, EPS)),
        (ValueError, "weights[1] has shape", (x, [w[0], w[0]], EPS)),
        (TypeError, "weights[1] has dtype", (x, [w[0], w[1].double()], EPS)),
        (ValueError, "eps=-1", (x, w, -1)),
        (ValueError, "strides", ([x[0], x[1].repeat_interleave(2, 1)[:, ::2]], w, EPS)),
        (ValueError, "out[0] has shape", (x, w, EPS, 0.0, [x[1], x[0]])),
        (TypeError, "out[0] has dtype", (x, w, EPS, 0.0, [x[0].float(), x[1]])),
        (ValueError, "shares memory", (x, w, EPS, 0.0, [x[0], x[0][:, :32]])),
        (allnorm.UnsupportedError, "in all", ([wide], [wide[0]], EPS)),
        (allnorm.UnsupportedError, "columns in all", ([wide] * 2, [wide[0]] * 2, EPS)),
    ):
        found = message_of(error, lambda given=arguments: c.rms_norm_sharded(*given))
        assert text in found, found
    assert "requires_grad" in message_of(
        ValueError, lambda: c.rms_norm_sharded([x[0].clone().requires_grad_(), x[1]], w, EPS)
    )
    check(c, tensors, weights)  # the ranks are still in step
    plan = c.plan(3, (64, 32))
    assert (plan.algorithm, plan.num_chunks) == ("one_shot", 1)
    assert "several hidden sizes" in message_of(
        ValueError, lambda: c.plan(3, [64], quant=allnorm.Fp8PerToken())
    )


DIFFERENT = {
    "eps": "eps is",
    "weight_bias": "weight_bias is",
    "numerics": "numerics is",
    "num_tokens": "num_tokens is",
    "sizes": "",
    "count": "hidden_size is",
    "weight dtype": "",
    "op": "op is",
}


def different_call(c: allnorm.Communicator, field: str, algorithm: str) -> None:
    """Makes a call; the last rank's call differs in a field."""
    tensors, weights = slices_of(0, c.world_size, (3,), (64, 32), torch.bfloat16)
    x, w, eps = tensors[c.rank], weights[c.rank], EPS
    more: dict[str, Any] = {"algorithm": algorithm}
    if c.rank == c.world_size - 1:
        eps = 0.5 if field == "eps" else eps
        more |= {"weight_bias": 1.0} if field == "weight_bias" else {}
        more |= {"numerics": "transformers"} if field == "numerics" else {}
        x = [each[:2] for each in x] if field == "num_tokens" else x
        x, w = (x[::-1], w[::-1]) if field == "sizes" else (x, w)
        x, w = (x[:1], w[:1]) if field == "count" else (x, w)
        w = [each.to(torch.bfloat16) for each in w] if field == "weight dtype" else w
        if field == "op":
            c.all_reduce(x[0], algorithm=algorithm)
            return
    c.rms_norm_sharded(x, w, eps, **more)


@pytest.mark.parametrize("algorithm", ["auto", "unfused"])
@on(cpu=(2,), gpu=(2,))
def test_different_calls_fail_on_every_rank(rank: int, world_size: int, algorithm: str) -> None:
    for field, text in DIFFERENT.items():
        with allnorm.Communicator(device=device(), timeout=60) as c:
            with pytest.raises(allnorm.PeerDivergedError) as caught:
                run_and_check(c, lambda c=c, field=field: different_call(c, field, algorithm))
            assert text in str(caught.value), (field, str(caught.value))


@on(cpu=(2,), gpu=(2,))
def test_timeout(rank: int, world_size: int) -> None:
    tensors, weights = slices_of(0, world_size, (3,), (64, 32), torch.bfloat16)
    with used_communicator(0.3, lambda c: check(c, tensors, weights)) as c:
        if rank == 1:
            time.sleep(1.0)
            return
        out = [torch.empty_like(x) for x in tensors[0]]

        def call() -> None:
            c.rms_norm_sharded(tensors[0], weights[0], EPS, 0.0, out)

        message_of(allnorm.PeerTimeoutError, lambda: run_and_check(c, call))
        assert all(bool(x.isnan().all()) for x in out)


@on(cpu=(2,), gpu=(2,))
def test_functions_and_operators(rank: int, world_size: int) -> None:
    c = comm()
    tensors, weights = slices_of(4, world_size, (2, 3), (64, 32), torch.bfloat16)
    wanted = c.rms_norm_sharded(tensors[rank], weights[rank], EPS)
    as_function = allnorm.rms_norm_sharded(tensors[rank], weights[rank], EPS)
    op = torch.ops.allnorm.rms_norm_sharded
    arguments = (tensors[rank], weights[rank], EPS, 0.0, "rounded", c.name)
    for one, other, third in zip(wanted, as_function, op(*arguments), strict=True):
        assert_same_bits(other, one, "function")
        assert_same_bits(third, one, "operator")
    torch.library.opcheck(op.default, arguments)


@on(cpu=(2,), gpu=(2,))
def test_torch_compile(rank: int, world_size: int) -> None:
    c = comm()

    def program(q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
        q, k = c.rms_norm_sharded([q * 2, k], [q_weight, k_weight], EPS, numerics="transformers")
        out = torch.empty_like(q)
        (again,) = allnorm.rms_norm_sharded((q,), (q_weight,), EPS, out=[out])
        return q + 1, k, again

    fast = torch.compile(program, fullgraph=True, dynamic=True)
    for tokens in (4, 6):
        tensors, weights = slices_of(tokens, world_size, (tokens,), (128, 64), torch.bfloat16)
        given = (*tensors[rank], *(each.bfloat16() for each in weights[rank]))
        for one, other in zip(fast(*given), program(*given), strict=True):
            assert_same_bits(one, other, f"{tokens} tokens")


def replay(c: allnorm.Communicator, algorithm: str) -> None:
    tensors, weights = slices_of(6, c.world_size, (4,), (2048, 256), torch.bfloat16)
    x, w = tensors[c.rank], weights[c.rank]
    wanted = check(c, tensors, weights, algorithm=algorithm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = c.rms_norm_sharded(x, w, EPS, algorithm=algorithm)
        second = c.rms_norm_sharded(first, w, EPS, algorithm=algorithm)
    for _ in range(20):
        graph.replay()
    for one, other in zip(first, wanted, strict=True):
        assert_same_bits(one, other, algorithm)
    assert not any(bool(x.isnan().any()) for x in second)


@on(gpu=(2,))
def test_cuda_graph(rank: int, world_size: int) -> None:
    replay(comm(), "auto")


@pytest.mark.own_gpus  # on shared GPUs, gloo replaces NCCL, and gloo cannot be captured
@on(gpu=(2,))
def test_cuda_graph_unfused(rank: int, world_size: int) -> None:
    replay(comm(), "unfused")
