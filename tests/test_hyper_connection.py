"""Tests all_reduce_hyper_connection: the reduced sum enters several residual streams."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from rank_helpers import (
    DTYPES,
    Case,
    Experts,
    comm,
    device,
    message_of,
    on,
    run_and_check,
    used_communicator,
)

import allnorm
from allnorm import reference
from allnorm.testing import assert_same_bits

STREAMS = (2, 4, 8, 3)
WIDTHS = (64, 4096, 2880, 7168)
HURTFUL = (float("nan"), float("inf"), -0.0, 1e-40, 3e38)


class Inputs:
    """All ranks' `x`, and the other arguments of a call, the same on every rank."""

    def __init__(
        self,
        seed: int,
        world_size: int,
        shape: tuple[int, ...],
        streams: int,
        dtype: torch.dtype,
        wide: bool = False,
        hurtful: bool = False,
        experts: tuple[Experts | None, ...] = (),  # of each rank, in turn; None: a tensor
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        *leading, width = shape

        def random(*size: int) -> Any:
            found = torch.randn(*size, generator=generator)
            if hurtful:
                for row, value in zip(found.view(-1, size[-1]), HURTFUL, strict=False):
                    row[:: max(1, row.numel() // 3)] = value
            return found

        self.xs: list[Any] = [random(*shape).to(dtype).to(device()) for _ in range(world_size)]
        for rank, chosen in enumerate((experts * world_size)[:world_size]):
            if chosen is not None:
                self.xs[rank] = chosen(Case(shape, dtype, call=seed), rank)
        kind = torch.float32 if wide else dtype
        self.residual = random(*leading, streams, width).to(kind).to(device())
        self.connection = allnorm.HyperConnection(
            torch.randn(*leading, streams, generator=generator).to(device()),
            torch.randn(*leading, streams, streams, generator=generator).to(device()),
        )

    def wanted(self, **more: Any) -> Any:
        return reference.all_reduce_hyper_connection(
            self.xs, self.residual, self.connection, **more
        )

    def check(self, c: allnorm.Communicator, what: str = "", **more: Any) -> Any:
        """Makes the call, and compares its result with the reference."""
        islands = None if len(c.islands) == 1 else c.islands
        wanted = self.wanted(islands=islands)
        result = c.all_reduce_hyper_connection(
            self.xs[c.rank], self.residual, self.connection, **more
        )
        assert_same_bits(result, wanted, f"{what} {tuple(wanted.shape)} {wanted.dtype} {more}")
        return wanted


@on(cpu=(1, 2, 3), gpu=(1, 2, 4, 8))
def test_results(rank: int, world_size: int) -> None:
    c = comm()
    cases = itertools.product(STREAMS, ((0,), (1,), (2, 3), (), (17,)))
    for seed, (streams, leading) in enumerate(cases):
        dtype, width = DTYPES[seed % 3], WIDTHS[seed // 2 % 4]
        algorithm = ("auto", "unfused", "one_shot", "two_shot")[seed % 4 if world_size > 1 else 0]
        inputs = Inputs(
            seed, world_size, (*leading, width), streams, dtype, seed % 2 == 0, seed % 3 == 0
        )
        inputs.check(c, algorithm=algorithm)


@on(cpu=(2,), gpu=(2,))
def test_every_algorithm_gives_the_same_bits(rank: int, world_size: int) -> None:
    c = comm()
    for wide in (False, True):
        inputs = Inputs(5, world_size, (7, 2880), 4, torch.bfloat16, wide)
        for algorithm in ("auto", "one_shot", "two_shot", "unfused"):
            wanted = inputs.check(c, algorithm=algorithm)
        # A row does not depend on the rows beside it.
        for row in range(7):
            connection = allnorm.HyperConnection(
                inputs.connection.post[row], inputs.connection.mix[row]
            )
            alone = c.all_reduce_hyper_connection(
                inputs.xs[rank][row], inputs.residual[row], connection
            )
            assert_same_bits(alone, wanted[row], f"row {row}")


@on(cpu=(1, 3), gpu=(1, 2, 4, 8))
def test_experts(rank: int, world_size: int) -> None:
    """Ranks may have different numbers of choices, and some of them a dense sum."""
    c = comm()
    kinds = (Experts(2, False, True), Experts(16, indexed=False), None, Experts(5, True, True))
    cases = itertools.product((0, 1, 5), ("auto", "unfused", "one_shot", "two_shot"))
    for seed, (tokens, algorithm) in enumerate(cases):
        inputs = Inputs(
            *(seed, world_size, (tokens, WIDTHS[seed // 2 % 4]), STREAMS[seed % 4]),
            *(DTYPES[seed % 3], seed % 2 == 0),
            experts=kinds[seed % 4 :] + kinds[: seed % 4],
        )
        wanted = inputs.check(c, algorithm=algorithm)
        memory = inputs.residual.clone()
        for _ in range(4):  # the last ones are repeated without Python
            memory.copy_(inputs.residual)
            given = c.all_reduce_hyper_connection(
                *(inputs.xs[rank], memory, inputs.connection),
                algorithm=algorithm,
                residual_out=memory,
            )
        assert given is memory
        assert_same_bits(memory, wanted, f"{tokens} tokens, in place")
    # Columns of a wider matrix, of any alignment.
    inputs = Inputs(3, world_size, (6, 264), 4, torch.bfloat16, experts=(Experts(3, shared=True),))
    x = inputs.xs[rank]
    rows = torch.cat((x.rows, x.rows), -1)[:, : x.rows.shape[-1]]
    shared = torch.cat((x.shared[:, :1], x.shared), -1)[:, 1:]
    index, weights = (torch.stack((t, t), 1)[:, 0] for t in (x.index, x.weights))
    inputs.xs[rank] = allnorm.ExpertSum(rows, weights, index, shared)
    inputs.check(c, "strided experts")


@on(cpu=(4,), gpu=(4,))
def test_islands(rank: int, world_size: int) -> None:
    for islands in ([[0, 1], [2, 3]], [[0, 2], [1], [3]], [[0], [1], [2], [3]]):
        with allnorm.Communicator(device=device(), islands=islands) as c:
            equal = len({len(island) for island in islands}) == 1
            chosen = c.plan(5, 128, streams=4).algorithm
            assert chosen == ("hierarchical" if equal else "unfused")
            for algorithm in ("auto", "unfused"):
                for experts in ((), (Experts(3), None)):
                    inputs = Inputs(
                        *(1, world_size, (5, 128), 4, torch.bfloat16), wide=True, experts=experts
                    )
                    inputs.check(c, str(islands), algorithm=algorithm)


@on(cpu=(2,), gpu=(2,))
def test_many_rows_and_odd_widths(rank: int, world_size: int) -> None:
    c = comm()
    for seed, width in enumerate((1, 3, 7, 121, 4099, 40_000)):
        Inputs(seed, world_size, (3, width), 4, DTYPES[seed % 3], seed % 2 == 0).check(c)
    Inputs(9, world_size, (1000, 264), 4, torch.bfloat16).check(c)
    Inputs(10, world_size, (700, 136), 8, torch.float16, wide=True).check(c)


@on(cpu=(1, 2), gpu=(2,))
def test_strides_and_memory(rank: int, world_size: int) -> None:
    """Streams may be strided in every way, and the result may be the residual."""
    c = comm()
    for algorithm, dims in itertools.product(("auto", "unfused"), ((5,), (2, 3), ())):
        inputs = Inputs(3, world_size, (*dims, 128), 4, torch.bfloat16)
        wanted = inputs.check(c, algorithm=algorithm)
        # The streams are columns of a matrix, or the outermost dimension.
        apart = torch.cat((inputs.residual, inputs.residual), -1)
        whole, inputs.residual = inputs.residual, apart[..., :128]
        inputs.check(c, "columns", algorithm=algorithm)
        if dims:
            inputs.residual = whole.movedim(-2, 0).contiguous().movedim(0, -2)
            inputs.check(c, "stream by stream", algorithm=algorithm)
        post, mix = inputs.connection.post, inputs.connection.mix
        strided = torch.stack((post, post), -1)[..., 0]
        inputs.connection = allnorm.HyperConnection(strided, mix.mT.contiguous().mT)
        inputs.residual = whole.clone()
        inputs.check(c, "coefficients", algorithm=algorithm)
        out = torch.full_like(whole, 7.0)
        for memory in (out, inputs.residual):
            given = c.all_reduce_hyper_connection(
                *(inputs.xs[rank], inputs.residual, inputs.connection),
                algorithm=algorithm,
                residual_out=memory,
            )
            assert given is memory
            assert_same_bits(memory, wanted, "residual_out")


@on(cpu=(2,), gpu=(2,))
def test_repeated_and_mixed_calls(rank: int, world_size: int) -> None:
    c = comm()
    cases = [
        Inputs(seed, world_size, (1 + seed % 4, 64), STREAMS[seed % 4], DTYPES[seed % 3], seed > 3)
        for seed in range(6)
    ]
    x, weight = torch.ones(3, 64, device=device()), torch.ones(64, device=device())
    first, _ = c.all_reduce_add_rms_norm(x, None, weight, 1e-6)
    wanted = [inputs.wanted() for inputs in cases]
    memory = [torch.empty_like(inputs.residual) for inputs in cases]
    for turn in range(60):
        inputs = cases[turn % 6]
        given = {"residual_out": memory[turn % 6]} if turn % 12 < 6 else {}
        if rank == turn % world_size and turn % 20 == 0:
            time.sleep(0.02)
        result = c.all_reduce_hyper_connection(
            inputs.xs[rank], inputs.residual, inputs.connection, **given
        )
        assert_same_bits(result, wanted[turn % 6], f"turn {turn}")
        if turn % 5 == 0:
            normed, _ = c.all_reduce_add_rms_norm(x, None, weight, 1e-6)
            assert_same_bits(normed, first, "all_reduce_add_rms_norm")


@on(cpu=(2,), gpu=(2,))
def test_refusals(rank: int, world_size: int) -> None:
    c = comm()
    inputs = Inputs(2, world_size, (3, 64), 4, torch.bfloat16)
    x, residual, good = inputs.xs[rank], inputs.residual, inputs.connection
    post, mix = good.post, good.mix
    make = allnorm.HyperConnection
    wide = torch.ones(1, 1 << 20, dtype=torch.bfloat16, device=device())
    transposed = residual.mT.contiguous().mT
    rows = torch.ones(3, 2, 64, dtype=torch.bfloat16, device=device())
    index = torch.zeros(3, 2, dtype=torch.int32, device=device())
    of: Any = allnorm.ExpertSum
    for error, text, arguments in (
        (TypeError, "connection=None", (x, residual, None)),
        (TypeError, "connection=(", (x, residual, (post, mix))),
        (TypeError, "x is a int", (3, residual, good)),
        (TypeError, "rows is a int", (of(3), residual, good)),
        (TypeError, "index has dtype", (of(rows[0], index=index.long()), residual, good)),
        (ValueError, "rows has shape", (of(rows[0]), residual, good)),
        (ValueError, "top_k is 17", (of(rows[:, :1].repeat(1, 17, 1)), residual, good)),
        (ValueError, "shared has shape", (of(rows, shared=x[:2]), residual, good)),
        (ValueError, "residual has shape", (of(rows), residual[:2], good)),
        (TypeError, "residual is a NoneType", (x, None, good)),
        (TypeError, "post is a float", (x, residual, make(1.0, mix))),  # type: ignore[arg-type]
        (TypeError, "mix is a NoneType", (x, residual, make(post, None))),  # type: ignore[arg-type]
        (TypeError, "post has dtype", (x, residual, make(post.bfloat16(), mix))),
        (TypeError, "mix has dtype", (x, residual, make(post, mix.double()))),
        (TypeError, "residual has dtype", (x, residual.half(), good)),
        (TypeError, "residual has dtype", (x.float(), residual, good)),
        (allnorm.UnsupportedError, "float64", (x.double(), residual, good)),
        (allnorm.UnsupportedError, "hidden_size", (wide, wide.unsqueeze(1), good)),
        (ValueError, "residual has shape", (x, residual[:, :1], good)),
        (ValueError, "residual has shape", (x, residual[:2], good)),
        (ValueError, "residual has shape", (x, x, good)),
        (ValueError, "residual has shape", (x, residual.repeat(1, 3, 1), good)),
        (ValueError, "post has shape", (x, residual, make(post[:, :3], mix))),
        (ValueError, "mix has shape", (x, residual, make(post, mix[:, :3]))),
        (ValueError, "strides", (x, transposed, good)),
    ):
        found = message_of(error, lambda given=arguments: c.all_reduce_hyper_connection(*given))
        assert text in found, found
    whole = torch.cat((residual, residual))
    for error, text, memory in (
        (ValueError, "residual_out has shape", residual[:2]),
        (TypeError, "residual_out has dtype", residual.float()),
        (ValueError, "shares memory", whole[1:4]),
    ):
        found = message_of(
            error,
            lambda out=memory: c.all_reduce_hyper_connection(x, whole[:3], good, residual_out=out),
        )
        assert text in found, found
    assert "requires_grad" in message_of(
        ValueError,
        lambda: c.all_reduce_hyper_connection(x, residual.clone().requires_grad_(), good),
    )
    inputs.check(c)  # the ranks are still in step


@on(cpu=(2,), gpu=(2,))
def test_plan(rank: int, world_size: int) -> None:
    c = comm()
    plan = c.plan(3, 64, streams=4)
    assert (plan.algorithm, plan.num_chunks) == ("one_shot", 1)
    assert c.plan(3, 64, streams=4, algorithm="two_shot").algorithm == "two_shot"
    c.plan(3, 64, streams=8, residual_dtype=torch.float32)
    assert c.plan(3, 64, streams=4, experts=True) == plan
    for text, given in (
        ("streams=9", {"streams": 9}),
        ("streams=1", {"streams": 1}),
        ("has no norm", {"streams": 4, "scale": 0.5}),
        ("has no norm", {"streams": 4, "quant": allnorm.Fp8PerToken()}),
    ):
        assert text in message_of(ValueError, lambda more=given: c.plan(3, 64, **more))
    message_of(TypeError, lambda: c.plan(3, 64, streams="4"))  # type: ignore[arg-type]
    assert "several hidden sizes" in message_of(ValueError, lambda: c.plan(3, [64], streams=4))


DIFFERENT = {
    "streams": "streams is",
    "residual dtype": "dtype of the residual is",
    "num_tokens": "num_tokens is",
    "hidden_size": "hidden_size is",
    "dtype": "dtype is",
    "algorithm": "algorithm is",
    "op": "op is",
}


def different_call(c: allnorm.Communicator, field: str, algorithm: str) -> None:
    """Makes a call; the last rank's call differs in a field."""
    shape, streams, dtype, wide = (3, 64), 4, torch.bfloat16, False
    if c.rank == c.world_size - 1:
        shape = (2, 64) if field == "num_tokens" else (3, 32) if field == "hidden_size" else shape
        streams = 3 if field == "streams" else streams
        dtype = torch.float16 if field == "dtype" else dtype
        wide = field == "residual dtype"
        if field == "algorithm":
            algorithm = "two_shot" if algorithm == "auto" else "auto"
    inputs = Inputs(0, c.world_size, shape, streams, dtype, wide)
    if c.rank == c.world_size - 1 and field == "op":
        c.all_reduce(inputs.xs[c.rank], algorithm=algorithm)
    else:
        c.all_reduce_hyper_connection(
            *(inputs.xs[c.rank], inputs.residual, inputs.connection), algorithm=algorithm
        )


@pytest.mark.parametrize("algorithm", ["auto", "unfused"])
@on(cpu=(2,), gpu=(2,))
def test_different_calls_fail_on_every_rank(rank: int, world_size: int, algorithm: str) -> None:
    for field, text in DIFFERENT.items():
        if field == "algorithm" and algorithm == "unfused" and device().type == "cuda":
            continue  # noticed only at the deadline; see docs/faults.md
        with allnorm.Communicator(device=device(), timeout=60) as c:
            with pytest.raises(allnorm.PeerDivergedError) as caught:
                run_and_check(c, lambda c=c, field=field: different_call(c, field, algorithm))
            assert text in str(caught.value), (field, str(caught.value))


@on(cpu=(2,), gpu=(2,))
def test_one_rank_may_sum_experts(rank: int, world_size: int) -> None:
    """Ranks do not compare how each of them computes its partial sums."""
    for algorithm in ("one_shot", "two_shot", "unfused"):
        with allnorm.Communicator(device=device(), timeout=60) as c:
            inputs = Inputs(7, world_size, (3, 64), 4, torch.float16, experts=(None, Experts(4)))
            inputs.check(c, algorithm=algorithm)
            assert c.check() is None


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@on(cpu=(2,), gpu=(2,))
def test_timeout(rank: int, world_size: int, algorithm: str) -> None:
    inputs = Inputs(0, world_size, (3, 64), 4, torch.bfloat16)
    with used_communicator(0.3, lambda c: inputs.check(c, algorithm=algorithm)) as c:
        if rank == 1:
            time.sleep(1.0)
            return
        out = torch.empty_like(inputs.residual)

        def call() -> None:
            c.all_reduce_hyper_connection(
                *(inputs.xs[0], inputs.residual, inputs.connection),
                algorithm=algorithm,
                residual_out=out,
            )

        message_of(allnorm.PeerTimeoutError, lambda: run_and_check(c, call))
        assert bool(out.isnan().all())


@on(cpu=(2,), gpu=(2,))
def test_functions_and_operators(rank: int, world_size: int) -> None:
    c = comm()
    for wide in (False, True):
        inputs = Inputs(4, world_size, (2, 3, 64), 4, torch.bfloat16, wide)
        x, residual, connection = inputs.xs[rank], inputs.residual, inputs.connection
        wanted = inputs.check(c)
        as_function = allnorm.all_reduce_hyper_connection(x, residual, connection)
        assert_same_bits(as_function, wanted, "function")
        arguments = (x, residual, connection.post, connection.mix, c.name)
        operator = torch.ops.allnorm.all_reduce_hyper_connection
        assert_same_bits(operator(*arguments), wanted, "operator")
        torch.library.opcheck(operator.default, arguments)
    inputs = Inputs(4, world_size, (6, 64), 4, torch.bfloat16, experts=(Experts(2, shared=True),))
    x, wanted = inputs.xs[rank], inputs.check(c)
    parts = {"expert_index": x.index, "expert_weights": x.weights, "shared": x.shared}
    given = (x.rows, inputs.residual, *inputs.connection, c.name)
    assert_same_bits(operator(*given, experts=True, **parts), wanted, "operator with experts")
    torch.library.opcheck(operator.default, given, {"experts": True, **parts})


@on(cpu=(2,), gpu=(2,))
def test_torch_compile(rank: int, world_size: int) -> None:
    c = comm()

    def program(x: Any, residual: Any, post: Any, mix: Any) -> Any:
        connection = allnorm.HyperConnection(post * 2, mix)
        residual = c.all_reduce_hyper_connection(x * 2, residual, connection)
        out = torch.empty_like(residual)
        again = allnorm.all_reduce_hyper_connection(x, residual, connection, residual_out=out)
        return residual + 1, again

    def of_experts(rows: Any, weights: Any, residual: Any, post: Any, mix: Any) -> Any:
        experts = allnorm.ExpertSum(rows, weights)
        connection = allnorm.HyperConnection(post, mix)
        return c.all_reduce_hyper_connection(experts, residual, connection) * 2

    fast = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    fast_experts = torch.compile(of_experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 6):
        inputs = Inputs(tokens, world_size, (tokens, 128), 4, torch.bfloat16)
        given = inputs.xs[rank], inputs.residual, inputs.connection.post, inputs.connection.mix
        for one, other in zip(fast(*given), program(*given), strict=True):
            assert_same_bits(one, other, f"{tokens} tokens")
        experts = (Experts(2, indexed=False),)
        inputs = Inputs(tokens, world_size, (tokens, 128), 4, torch.bfloat16, experts=experts)
        x = inputs.xs[rank]
        given = x.rows, x.weights, inputs.residual, *inputs.connection
        assert_same_bits(fast_experts(*given), of_experts(*given), f"experts, {tokens} tokens")


def replay(c: allnorm.Communicator, algorithm: str) -> None:
    inputs = Inputs(6, c.world_size, (4, 4096), 4, torch.bfloat16)
    x, connection = inputs.xs[c.rank], inputs.connection
    wanted = inputs.check(c, algorithm=algorithm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = c.all_reduce_hyper_connection(x, inputs.residual, connection, algorithm=algorithm)
        second = c.all_reduce_hyper_connection(x, first, connection, algorithm=algorithm)
    for _ in range(20):
        graph.replay()
    assert_same_bits(first, wanted, algorithm)
    assert bool(second.isfinite().all())


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@on(gpu=(2,))
def test_cuda_graph(rank: int, world_size: int, algorithm: str) -> None:
    replay(comm(), algorithm)


@pytest.mark.own_gpus  # on shared GPUs, gloo replaces NCCL, and gloo cannot be captured
@on(gpu=(2,))
def test_cuda_graph_unfused(rank: int, world_size: int) -> None:
    replay(comm(), "unfused")
