"""Tests that tracers and compilers do not drop, merge or reorder collective calls.

Each rank's program can use results differently, as with pipeline or sampling ranks. If one rank
drops, merges or moves a call, it meets a different call from its peers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_helpers import Case, comm, on
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import allnorm
from allnorm import quant as quants
from allnorm.testing import assert_same_bits

HIDDEN = 64
BACKENDS = ["aot_eager", "inductor"]


def compile_alone(fn: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    """Compiles without earlier runs' caches and without compiler processes.

    The programs here use matmul instead of additions, because Inductor calls a precompiled matmul,
    while compiling a new kernel takes the C++ compiler seconds.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.gettempdir() + f"/order-{os.getpid()}"
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend, **options)


def inputs(rank: int, tokens: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    case = Case((tokens, HIDDEN), torch.float32)
    return case.x(rank), case.weight()


def check_in_step(c: allnorm.Communicator, rank: int) -> None:
    """Makes one more call: it fails if the ranks' previous calls differed."""
    Case((3, 8 * HIDDEN), call=77).check(c)
    assert c.check() is None


def every_call(c: allnorm.Communicator, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """Calls all collective operators, by method and raw; no call uses another call's result."""
    lo, hi = c.row_shard(x.shape[0])
    out = [c.all_reduce(x), torch.ops.allnorm.all_reduce(x, c.name)]
    out += c.all_reduce_add_rms_norm(x, None, w, 1e-6)
    out += c.all_reduce_add_rms_norm(x, x[lo:hi], w, 1e-6, residual_sharded=True)
    out += c.all_reduce_add_rms_norm_quant(x, x, w, 1e-6, quant=allnorm.Fp8PerGroup(32))[:3]
    out.append(c.all_gather_rows(x[lo:hi], x.shape[0]))
    normed, streams, connection = c.all_reduce_hyper_connection_input(x, *streams_of(x, w), w, 1e-6)
    return [*out, normed, streams, *connection]


def streams_of(x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
    """Returns two residual streams, their coefficients and a projection, without additions."""
    matrix, row = x.new_ones(8, x.shape[0]) @ x.repeat(1, 2), x.new_ones(8)
    connection = allnorm.HyperConnection(x[:, :2], x[:, :4].unflatten(-1, (2, 2)))
    projection = allnorm.HyperConnectionProjection(matrix, row[:3], row)
    return x.unflatten(-1, (1, HIDDEN)).expand(-1, 2, -1), connection, projection


@on(cpu=(2,))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_without_use_is_kept(rank: int, world_size: int, backend: str) -> None:
    """Rank 1 uses no results; its compiler must keep the calls."""
    c, (x, w) = comm(), inputs(rank)

    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        results = every_call(c, x, w)
        return results if rank == 0 else x @ x.t()

    want = program(x, w)
    with torch.no_grad():
        got = compile_alone(program, backend)(x, w)
    if rank == 0:
        for i, (mine, eager) in enumerate(zip(got, want, strict=True)):
            assert_same_bits(mine, eager, f"result {i} by {backend}")
    else:
        assert_same_bits(got, want, "what this rank returns")
    check_in_step(c, rank)


@on(cpu=(2,))
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_are_alike_stay_two(rank: int, world_size: int, backend: str) -> None:
    """Calls twice with the same tensors; passes must not merge the calls on any rank.

    Only rank 0 returns both results. In training graphs, AOTAutograd merges equal nodes and
    recomputes cheap ones in the backward graph.
    """
    c, (x, w) = comm(), inputs(rank)
    trained = torch.ones(HIDDEN, HIDDEN, requires_grad=True)

    def program(x: torch.Tensor, w: torch.Tensor, trained: torch.Tensor) -> Any:
        first, second = c.all_reduce(x), c.all_reduce(x)
        norm, again = (c.all_reduce_add_rms_norm(x, None, w, 1e-6)[0] for _ in range(2))
        results = (first, second, norm, again)
        if rank == 1:
            results = (first @ second.t(), norm @ again.t())
        return *results, first @ trained

    want = program(x, w, trained)
    got = compile_alone(program, backend)(x, w, trained)
    for mine, eager in zip(got[:-1], want[:-1], strict=True):
        assert_same_bits(mine, eager, backend)
    got[-1].backward(torch.ones(4, HIDDEN))
    check_in_step(c, rank)


def calls_made_by(c: allnorm.Communicator, make: Any) -> Any:
    """Makes the operators call `make` for each of a communicator's calls."""
    dispatcher = mock.Mock(call=make)
    return mock.patch.dict(allnorm.core.registry.dispatchers(), {(c.name, False): dispatcher})


@on(cpu=(2,))
@pytest.mark.parametrize("fusion", [False, True], ids=["plain", "with the pass"])
def test_calls_are_not_moved(rank: int, world_size: int, fusion: bool) -> None:
    """Gives Inductor a reason to run small calls first, to save memory, on rank 0 only."""
    c, (x, _) = comm(), inputs(rank)
    big = Case((512, HIDDEN), torch.float32).x(rank)

    def program(x: torch.Tensor, big: torch.Tensor) -> Any:
        product = (big @ big.t())[:, :HIDDEN]
        calls = [c.all_reduce(part) for part in (x, x[:2], product, x[:3])]
        norm = c.all_reduce_add_rms_norm(x[:1], None, x[0], 1e-6)[0]
        if rank == 1:
            return calls, norm
        return [call.t() @ call for call in reversed(calls)], norm

    options = {"post_grad_custom_post_pass": allnorm.compile.inductor_pass(c)} if fusion else {}
    made: list[tuple[int, ...]] = []
    call = c._dispatcher.call

    def noted(source: torch.Tensor, **fields: Any) -> Any:
        made.append(tuple(source.shape))
        return call(source=source, **fields)

    with torch.no_grad():
        fast = compile_alone(program, "inductor", options=options)
        with calls_made_by(c, noted):
            fast(x, big)
    assert made == [(rows, HIDDEN) for rows in (4, 2, 512, 3, 1)]
    check_in_step(c, rank)


@on(cpu=(2,))
def test_export_and_make_fx_keep_calls(rank: int, world_size: int) -> None:
    """Checks torch.export with passes over its graphs, and make_fx."""
    c, (x, w) = comm(), inputs(rank)

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            every_call(c, x, w)
            return x + 1

    with torch.no_grad():
        for strict in (False, True):
            program = torch.export.export(Model(), (x, w), strict=strict)
            for module in (program.module(), program.run_decompositions().module()):
                assert_same_bits(module(x, w), x + 1, "exported")
                check_in_step(c, rank)
        traced = make_fx(Model())(x, w)
        traced.graph.eliminate_dead_code()
        traced.recompile()
    calls = [node for node in traced.graph.nodes if "allnorm" in str(node.target)]
    assert len(calls) == 7
    traced(x, w)
    check_in_step(c, rank)


# ---- fakes and caches ----------------------------------------------------------------------------


@on(cpu=(2,))
def test_caches_know_the_shard(rank: int, world_size: int, tmp_path: Any) -> None:
    """Rank 1 compiles after rank 0 has filled the shared cache. 5 rows are split into 3 and 2."""
    c, w = comm(), torch.ones(HIDDEN)
    store = dist.distributed_c10d._get_default_store()

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed, shard = c.all_reduce_add_rms_norm(x, None, w, 1e-6, residual_sharded=True)
        quantized = c.all_reduce_add_rms_norm_quant(x, None, w, 1e-6, residual_sharded=True,
                                                    quant=allnorm.Fp8PerToken())  # fmt: skip
        return normed, shard, quantized.residual

    call = c._dispatcher.call

    def compiled(**fields: Any) -> Any:
        store.set("allnorm test: rank 0 has compiled", "yes")
        return call(**fields)

    x = inputs(rank, 5)[0]
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    torch._dynamo.reset()
    if rank == 1:
        store.wait(["allnorm test: rank 0 has compiled"])
    with torch.no_grad(), calls_made_by(c, compiled):
        got = torch.compile(program, fullgraph=True)(x)
    for mine, eager in zip(got, program(x), strict=True):
        assert_same_bits(mine, eager, "sharded")
    assert got[1].shape == (3 - rank, HIDDEN)
    torch._dynamo.reset()


def test_fakes_depend_on_their_arguments_only() -> None:
    """Traces with the name of a communicator that does not exist."""
    with FakeTensorMode():
        x, w = torch.empty(5, HIDDEN), torch.empty(HIDDEN)
        norm = (x, None, w, 1e-6, 0.0, "rounded", "nobody", True)
        operator = torch.ops.allnorm.all_reduce_add_rms_norm
        assert operator(*norm, 3)[1].shape == (3, HIDDEN)
        assert operator(*norm, 2)[1].shape == (2, HIDDEN)
        with pytest.raises(ValueError, match="residual_rows"):
            operator(*norm)
        spec = quants.op_arguments(allnorm.Fp8PerToken())
        operator = torch.ops.allnorm.all_reduce_add_rms_norm_quant
        four = operator(x, None, w, 1e-6, *spec, False, 0.0, "rounded", "nobody", True, 2)
        assert four[2].shape == (2, HIDDEN)


@on(cpu=(2,))
def test_rows_of_another_rank(rank: int, world_size: int) -> None:
    """A graph that a different rank traced raises an error, and its peers do not wait for it."""
    c, (x, w) = comm(), inputs(rank, 5)
    operator, norm = torch.ops.allnorm.all_reduce_add_rms_norm, (1e-6, 0.0, "rounded", c.name)
    call = lambda *more: operator(x, None, w, *norm, *more)  # noqa: E731
    if rank == 0:
        assert call(True, 3)[1].shape == (3, HIDDEN)
    else:
        with pytest.raises(ValueError, match="residual_rows=3: expected 2"):
            call(True, 3)
    with pytest.raises(ValueError, match="residual_rows=4: expected 5"):
        call(False, 4)
    check_in_step(c, rank)


# ---- tracers see the operators -------------------------------------------------------------------


@on(cpu=(2,))
def test_tracers_see_operators(rank: int, world_size: int) -> None:
    c, (x, w) = comm(), inputs(rank)
    names = ["all_reduce"] * 2 + ["all_reduce_add_rms_norm"] * 2
    names += ["all_reduce_add_rms_norm_quant", "all_gather_rows"]
    names += ["all_reduce_hyper_connection_input", "add_rms_norm"]

    def program(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [*every_call(c, x, w), *allnorm.add_rms_norm(x, None, w, 1e-6)]

    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(program, tracing_mode=mode)(x, w)
        seen = [str(n.target) for n in graph.graph.nodes if "allnorm" in str(n.target)]
        assert seen == [f"allnorm.{name}.default" for name in names], mode
        assert not any(n.op == "get_attr" for n in graph.graph.nodes), "a result is baked in"
    y = Case((4, HIDDEN), torch.float32, call=1).x(rank)
    for mine, eager in zip(graph(y, w), program(y, w), strict=True):
        assert_same_bits(mine, eager, "the graph with other values")

    with FakeTensorMode() as mode:
        fake_x, fake_w = mode.from_tensor(x), mode.from_tensor(w)
        inside = program(fake_x, fake_w)
    outside = program(fake_x, fake_w)
    for fake in (*inside, *outside):
        assert isinstance(fake, FakeTensor)
    check_in_step(c, rank)


@on(cpu=(2,))
def test_memory_and_algorithm_are_traced(rank: int, world_size: int) -> None:
    """Checks `algorithm` and preallocated results, which may be inputs."""
    c, (x, w) = comm(), inputs(rank, 5)
    lo, hi = c.row_shard(5)

    def program(x: torch.Tensor, w: torch.Tensor, memory: list[torch.Tensor]) -> list[torch.Tensor]:
        out, summed, shard, quantized, rows, own, residual = memory
        results = [c.all_reduce(x, algorithm="two_shot", out=out)]
        results += c.all_reduce_add_rms_norm(
            x, residual, w, 1e-6, algorithm="one_shot", out=summed, residual_out=residual
        )
        results += c.all_reduce_add_rms_norm(
            own * 2, None, w, 1e-6, residual_sharded=True, residual_out=shard, out=None
        )
        four = c.all_reduce_add_rms_norm_quant(
            x, None, w, 1e-6, quant=allnorm.Fp8PerToken(), algorithm="unfused",
            quantized_out=quantized, normed_out=own,
        )  # fmt: skip
        gathered = c.all_gather_rows(shard, 5, algorithm="two_shot", out=rows)
        return [*results, *four, gathered, c.all_reduce(own, out=own)]

    def memory() -> list[torch.Tensor]:
        like = [torch.zeros(5, HIDDEN) for _ in range(2)]
        quantized = torch.zeros(5, HIDDEN, dtype=torch.float8_e4m3fn)
        more = [torch.zeros(hi - lo, HIDDEN), quantized, torch.zeros(5, 2 * HIDDEN)[:, :HIDDEN]]
        return [*like, *more, x.clone(), torch.ones(5, HIDDEN)]

    mine, theirs = memory(), memory()
    want = program(x, w, theirs)
    call = mock.Mock(wraps=c._dispatcher.call)
    with torch.no_grad(), calls_made_by(c, call):
        got = compile_alone(program, "aot_eager")(x, w, mine)
    first, second, *_ = call.call_args_list
    assert (first.kwargs["algorithm"], second.kwargs["algorithm"]) == ("two_shot", "one_shot")
    for i, (result, eager) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(result, eager, f"result {i}")
    for i, (result, eager) in enumerate(zip(mine, theirs, strict=True)):
        assert_same_bits(result, eager, f"memory {i}")
    results = (got[0], got[1], got[4], got[5], got[9], got[10], got[2])
    for memory_, result in zip(mine, results, strict=True):
        assert memory_.data_ptr() == result.data_ptr(), "the result is the memory that was given"
    check_in_step(c, rank)


@pytest.mark.slow
@on(cpu=(2,))
def test_results_in_place_by_inductor(rank: int, world_size: int) -> None:
    """Compiles in-place calls like those of engines: residual and input are overwritten."""
    c, (x, w) = comm(), inputs(rank)

    def program(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Any:
        return c.all_reduce_add_rms_norm(
            x, residual, w, 1e-6, algorithm="one_shot", out=x, residual_out=residual
        )

    mine, theirs = ([x.clone(), torch.ones_like(x)] for _ in range(2))
    want = program(*theirs, w)
    with torch.no_grad():
        got = compile_alone(program, "inductor")(*mine, w)
    for result, eager, memory in zip(got, want, mine, strict=True):
        assert_same_bits(result, eager, "in place")
        assert result.data_ptr() == memory.data_ptr()
    check_in_step(c, rank)


@on(cpu=(2,))
def test_wrong_memory_is_refused_by_tracers(rank: int, world_size: int) -> None:
    """Invalid arguments are refused on every rank while tracing, before any call is made."""
    c, (x, w) = comm(), inputs(rank, 5)
    wrong: dict[str, Callable[[], Any]] = {
        "out has shape": lambda: c.all_reduce(x, out=torch.empty(1, HIDDEN)),
        "out has dtype": lambda: c.all_reduce(x, out=torch.empty(5, HIDDEN, dtype=torch.half)),
        "algorithm='fast'": lambda: c.all_reduce(x, algorithm="fast"),
        "residual_out has shape": lambda: c.all_reduce_add_rms_norm(
            x, None, w, 1e-6, residual_sharded=True, residual_out=torch.empty(5, HIDDEN)
        ),
        "scale_out": lambda: c.all_reduce_add_rms_norm_quant(
            x, None, w, 1e-6, quant=allnorm.Fp8PerToken(), scale_out=torch.empty(5, 1)
        ),
    }
    for words, call in wrong.items():
        with pytest.raises(ValueError if "dtype" not in words else TypeError, match=words):
            make_fx(call)()
    check_in_step(c, rank)


# ---- gradients -----------------------------------------------------------------------------------


def operator_calls(
    c: allnorm.Communicator,
) -> dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]]:
    ops, norm, own = torch.ops.allnorm, (1e-6, 0.0, "rounded"), lambda x: x[slice(*c.row_shard(4))]
    spec = quants.op_arguments(allnorm.Fp8PerToken())
    return {
        "all_reduce": lambda x, r, w: ops.all_reduce(x, c.name),
        "all_gather_rows": lambda x, r, w: ops.all_gather_rows(own(x), 4, c.name),
        "all_reduce_add_rms_norm": lambda x, r, w: ops.all_reduce_add_rms_norm(
            x, r, w, *norm, c.name
        ),
        "all_reduce_add_rms_norm_quant": lambda x, r, w: ops.all_reduce_add_rms_norm_quant(
            x, r, w, 1e-6, *spec, False, 0.0, "rounded", c.name
        ),
        "add_rms_norm": lambda x, r, w: ops.add_rms_norm(x, r, w, *norm),
        "add_rms_norm_quant": lambda x, r, w: ops.add_rms_norm_quant(
            x, r, w, 1e-6, *spec, True, 0.0, "rounded"
        ),
    }  # fmt: skip


@on(cpu=(2,), gpu=(2,))
def test_gradients_are_refused(rank: int, world_size: int) -> None:
    c, (x, w) = comm(), inputs(rank)
    tensors = (x, torch.ones_like(x), w)
    for name, call in operator_calls(c).items():
        taken = 1 if name.startswith("all_reduce") and name == "all_reduce" else 3
        for place in range(1 if name == "all_gather_rows" else taken):
            differentiable = [t.clone().requires_grad_(i == place) for i, t in enumerate(tensors)]
            for _ in range(2):  # again after the call is prepared
                with pytest.raises(ValueError, match=r"with requires_grad=True.*no_grad"):
                    call(*differentiable)
                for mode in (torch.no_grad, torch.inference_mode):
                    for _ in range(3):
                        with mode():
                            call(*differentiable)
                call(*tensors)
    x = x.requires_grad_()
    with pytest.raises(Exception, match=r"all_reduce with requires_grad=True"):
        compile_alone(c.all_reduce, "eager")(x)
    with torch.no_grad():
        assert not compile_alone(c.all_reduce, "aot_eager")(x).requires_grad
    check_in_step(c, rank)
