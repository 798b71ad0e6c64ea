"""Tests all_reduce_hyper_connection_input: new streams, and the next input from them."""

from __future__ import annotations

import functools
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from rank_helpers import DTYPES, Experts, comm, device, message_of, on
from test_hyper_connection import Inputs as Streams
from test_hyper_connection_input import Inputs as Parameters
from test_hyper_connection_input import assert_equal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import allnorm
from allnorm import reference
from allnorm.core.stream_input import NextInput
from allnorm.testing import assert_same_bits, capture

WIDTHS = (64, 4096, 2880, 120, 7168)


class Inputs:
    """All ranks' arguments, of which only `x` differs between them."""

    def __init__(
        self,
        seed: int,
        world_size: int,
        tokens: tuple[int, ...],
        width: int,
        streams: int,
        **more: Any,
    ) -> None:
        dtype = more.pop("dtype", torch.bfloat16)
        self.given = Streams(seed, world_size, (*tokens, width), streams, dtype, **more)
        wide = more.get("wide", False)
        parameters = Parameters(seed, (1, streams, width), dtype, wide=wide)
        self.projection, self.weight = parameters.projection, parameters.weight

    def arguments(self, rank: int) -> tuple[Any, ...]:
        return (
            *(self.given.xs[rank], self.given.residual, self.given.connection),
            *(self.projection, self.weight, 1e-6),
        )

    def wanted(self, c: allnorm.Communicator, **rounding: Any) -> tuple[torch.Tensor, Any]:
        islands = None if len(c.islands) == 1 else c.islands
        streams = self.given.wanted(islands=islands)
        return streams, reference.hyper_connection_input(
            *(streams, self.projection, self.weight, 1e-6), **rounding
        )

    def check(self, c: allnorm.Communicator, what: str = "", **more: Any) -> None:
        """Makes the call, and compares its results with the reference."""
        rounding = {name: more[name] for name in ("numerics", "weight_bias") if name in more}
        streams, wanted = self.wanted(c, **rounding)
        normed, got, connection = c.all_reduce_hyper_connection_input(
            *self.arguments(c.rank), **more
        )
        assert_same_bits(got, streams, f"streams of {what}")
        assert_equal((normed, connection), wanted, what)


@pytest.mark.sampled(2)
@on(cpu=(1, 2, 3), gpu=(1, 2, 4, 8))
def test_results(rank: int, world_size: int) -> None:
    c = comm()
    cases = itertools.product((2, 3, 4, 5, 8), ((0,), (1,), (2, 3), (), (9,)))
    for seed, (streams, tokens) in enumerate(cases):
        algorithm = ("auto", "unfused", "one_shot", "two_shot")[seed % 4 if world_size > 1 else 0]
        inputs = Inputs(
            *(seed, world_size, tokens, WIDTHS[seed % 5], streams),
            dtype=DTYPES[seed % 3],
            wide=seed % 3 == 1 and seed % 2 == 0,
            hurtful=seed % 4 == 3,
        )
        inputs.check(
            *(c, f"{streams} streams, {tokens}, {algorithm}"),
            algorithm=algorithm,
            numerics=("rounded", "transformers", "vllm", "unrounded")[seed % 4],
            weight_bias=float(seed % 2),
        )


@on(cpu=(2,), gpu=(2, 4, 8))
def test_many_shapes_in_one_launch(rank: int, world_size: int) -> None:
    """On GPUs, these are the shapes of the kernel that does all of it, and those around them."""
    c = comm()
    widths = (8, 264, 520, 2048, 2944, 5760, 8192, 16_384, 16_392)
    for seed, (width, streams) in enumerate(itertools.product(widths, (2, 3, 4))):
        tokens = (1, 2, 3, 8, 13, 14, 15, 30, 64, 70)[seed % 10] if device().type != "cpu" else 3
        inputs = Inputs(seed, world_size, (tokens,), width, streams, dtype=DTYPES[1 + seed % 2])
        algorithm = "one_shot" if width <= 16_384 else "auto"  # no cluster holds such rows
        inputs.check(c, f"{tokens} tokens of {streams} x {width}", algorithm=algorithm)


@on(cpu=(2,), gpu=(2,))
def test_experts_and_strides(rank: int, world_size: int) -> None:
    c = comm()
    inputs = Inputs(1, world_size, (5,), 264, 4, experts=(Experts(3, shared=True),))
    inputs.check(c, "experts")
    inputs = Inputs(2, world_size, (6,), 256, 4)
    streams, wanted = inputs.wanted(c)
    # The streams may be mixed in place, and be those of a wider tensor, or one after the other.
    memory = (
        inputs.given.residual.clone(),
        torch.zeros(6, 4, 512, dtype=torch.bfloat16, device=device())[..., :256],
        torch.zeros(4, 6, 256, dtype=torch.bfloat16, device=device()).movedim(0, 1),
    )
    for number, residual_out in enumerate(memory):
        x, residual, *rest = inputs.arguments(rank)
        residual = residual_out if number == 0 else residual
        normed, got, connection = c.all_reduce_hyper_connection_input(
            *(x, residual, *rest), residual_out=residual_out
        )
        assert got is residual_out
        assert_same_bits(got, streams, f"streams {number}")
        assert_equal((normed, connection), wanted, f"memory {number}")


@on(cpu=(2,), gpu=(2, 4))
def test_a_peer_may_make_no_input(rank: int, world_size: int) -> None:
    c = comm()
    for seed in range(6):
        inputs = Inputs(seed, world_size, (1 + seed,), 2880, 4)
        if (seed + rank) % 2 == 0:
            inputs.check(c, f"seed {seed}", algorithm="one_shot")
        else:
            inputs.given.check(c, f"seed {seed}", algorithm="one_shot")


@on(cpu=(2,), gpu=(2,))
def test_repeated_calls(rank: int, world_size: int) -> None:
    """Layers follow each other, and each has the coefficients that the one before has made."""
    c = comm()
    inputs = Inputs(3, world_size, (2,), 520, 4)
    x, residual, connection, *rest = inputs.arguments(rank)
    streams, wanted = residual, connection
    for _ in range(40):
        normed, residual, connection = c.all_reduce_hyper_connection_input(
            *(x, residual, connection, *rest), algorithm="one_shot"
        )
        streams = reference.all_reduce_hyper_connection(inputs.given.xs, streams, wanted)
        expected, wanted = reference.hyper_connection_input(
            *(streams, inputs.projection, inputs.weight, 1e-6)
        )
        assert_same_bits(residual, streams, "streams")
        assert_equal((normed, connection), (expected, wanted), "input")


def replay(c: allnorm.Communicator, tokens: int, *, compiled: bool = False) -> None:
    def layer(*arguments: Any) -> Any:
        return c.all_reduce_hyper_connection_input(*arguments)

    call = torch.compile(layer, fullgraph=True) if compiled else layer
    inputs = Inputs(tokens, c.world_size, (tokens,), 4096, 4)
    streams, wanted = inputs.wanted(c)
    for _ in range(2):
        assert_same_bits(call(*inputs.arguments(c.rank))[1], streams, "before the capture")
    with capture() as graph:
        results = call(*inputs.arguments(c.rank))
        again = call(*inputs.arguments(c.rank))
    for number in range(20):
        for result in (*results[:2], *again[:2]):
            result.zero_()
        graph.replay()
        for normed, got, connection in (results, again):
            assert_same_bits(got, streams, f"streams of replay {number}")
            assert_equal((normed, connection), wanted, f"replay {number}")


@on(gpu=(2, 4, 8))
def test_graphs(rank: int, world_size: int) -> None:
    for tokens in (1, 4, 40):
        replay(comm(), tokens)  # a graph must be destroyed before the next capture


@on(gpu=(2,))
def test_graphs_of_compiled_code(rank: int, world_size: int) -> None:
    for tokens in (1, 40):
        replay(comm(), tokens, compiled=True)


@on(cpu=(1, 2), gpu=(2,))
def test_torch_compile(rank: int, world_size: int) -> None:
    c = comm()
    inputs = Inputs(5, world_size, (3,), 264, 4)
    streams, wanted = inputs.wanted(c)

    @torch.compile(fullgraph=True)
    def layer(*arguments: Any) -> Any:
        return c.all_reduce_hyper_connection_input(*arguments)

    for _ in range(2):
        normed, got, connection = layer(*inputs.arguments(rank))
        assert_same_bits(got, streams, "streams")
        assert_equal((normed, connection), wanted, "compiled")


@on(cpu=(2,), gpu=(2,))
def test_one_graph_for_every_number_of_tokens(rank: int, world_size: int) -> None:
    c = comm()
    graphs: list[list[str]] = []

    def note(module: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(operators_in(module.graph))
        return module.forward

    def layers(x: Any, residual: Any, connection: Any, *rest: Any) -> Any:
        _, residual, connection = c.all_reduce_hyper_connection_input(
            *(x, residual, connection, *rest), numerics="vllm", weight_bias=1.0
        )
        memory = torch.empty_like(residual)
        normed, same, _ = allnorm.all_reduce_hyper_connection_input(
            *(x, residual, connection, *rest), residual_out=memory
        )
        return normed + 1, same is memory, memory

    def of_experts(rows: Any, weights: Any, residual: Any, connection: Any, *rest: Any) -> Any:
        x = allnorm.ExpertSum(rows, weights)
        return c.all_reduce_hyper_connection_input(x, residual, connection, *rest)[:2]

    torch._dynamo.reset()
    fast = torch.compile(layers, fullgraph=True, dynamic=True, backend=note)
    fast_experts = torch.compile(of_experts, fullgraph=True, dynamic=True, backend=note)
    for tokens in (5, 7, 9):  # not 3, the size of the projection's scale
        given = Inputs(tokens, world_size, (tokens,), 264, 4).arguments(rank)
        normed, is_same, memory = fast(*given)
        assert is_same
        expected = layers(*given)
        assert_same_bits(normed, expected[0], f"{tokens} tokens")
        assert_same_bits(memory, expected[2], f"streams of {tokens} tokens")
        experts = (Experts(2, indexed=False),)
        x, *rest = Inputs(tokens, world_size, (tokens,), 264, 4, experts=experts).arguments(rank)
        given = (x.rows, x.weights, *rest)
        for one, other in zip(fast_experts(*given), of_experts(*given), strict=True):
            assert_same_bits(one, other, f"experts, {tokens} tokens")
    torch._dynamo.reset()
    assert graphs == [[OPERATOR] * 2, [OPERATOR]]


OPERATOR = "all_reduce_hyper_connection_input"


def operators_in(graph: torch.fx.Graph) -> list[str]:
    """Returns the names of a graph's operators of allnorm."""
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [target.split(".")[1] for target in targets if target.startswith("allnorm.")]


@on(cpu=(2,))
def test_tracers_see_one_operator(rank: int, world_size: int) -> None:
    c = comm()
    given = Inputs(8, world_size, (3,), 264, 4).arguments(rank)
    tensors = (*given[:2], *given[2], *given[3][:3], given[4])

    class Layer(torch.nn.Module):
        def forward(self, x: Any, residual: Any, post: Any, mix: Any, *rest: Any) -> Any:
            projection = allnorm.HyperConnectionProjection(*rest[:3])
            connection = allnorm.HyperConnection(post, mix)
            normed, streams, made = c.all_reduce_hyper_connection_input(
                x, residual, connection, projection, rest[3], 1e-6
            )
            return normed, streams, *made

    layer = Layer()
    wanted = layer(*tensors)
    for trace in (
        make_fx(layer),
        make_fx(layer, tracing_mode="symbolic"),
        make_fx(layer, pre_dispatch=True),
        lambda *given: torch.export.export(layer, given, strict=False).module(),
    ):
        module = trace(*tensors)
        assert operators_in(module.graph) == [OPERATOR]
        for one, other in zip(module(*tensors), wanted, strict=True):
            assert_same_bits(one, other, "traced")
    scripted = torch.jit.trace(layer, tensors, check_trace=False)
    assert str(scripted.inlined_graph).count(f"allnorm::{OPERATOR}(") == 1
    for one, other in zip(scripted(*tensors), wanted, strict=True):
        assert_same_bits(one, other, "jit.trace")


def flat(given: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Returns the operator's arguments."""
    x, residual, connection, (fn, scale, base, *constants), weight, eps = given
    rounding = (eps, 0.0, "rounded")
    return (x, residual, *connection, fn, scale, base, weight, *rounding, *constants, name)


class Weight(torch.nn.Parameter):
    """A parameter of a subclass, as engines have them."""


@on(cpu=(2,), gpu=(2,))
def test_operator(rank: int, world_size: int) -> None:
    c = comm()
    operator = torch.ops.allnorm.all_reduce_hyper_connection_input
    for wide, strides in ((False, False), (True, True)):
        inputs = Inputs(9, world_size, (2, 3), 64, 4, wide=wide)
        given = flat(inputs.arguments(rank), c.name)
        if strides:
            x, residual, *rest = given
            given = x.repeat(1, 1, 2)[..., :64], residual.movedim(-2, 0).clone().movedim(0, -2)
            given = (*given, *rest)
        streams, wanted = inputs.wanted(c)
        for number in range(2):
            normed, got, *connection = operator(*given)
            assert_same_bits(got, streams, f"streams {number}")
            made = allnorm.HyperConnection(*connection)
            assert_equal((normed, made), wanted, f"operator {number}")
        torch.library.opcheck(operator.default, given)
    subclasses = [
        Weight(value, requires_grad=False)
        if isinstance(value, torch.Tensor) and index > 3
        else value
        for index, value in enumerate(given)
    ]
    assert_same_bits(operator(*subclasses)[0], normed, "subclasses")
    inputs = Inputs(10, world_size, (5,), 264, 4, experts=(Experts(3, shared=True),))
    x, *rest = inputs.arguments(rank)
    parts = {"expert_index": x.index, "expert_weights": x.weights, "shared": x.shared}
    given = flat((x.rows, *rest), c.name)
    streams, wanted = inputs.wanted(c)
    normed, got, *connection = operator(*given, experts=True, **parts)
    assert_same_bits(got, streams, "streams of experts")
    assert_equal((normed, allnorm.HyperConnection(*connection)), wanted, "experts")
    torch.library.opcheck(operator.default, given, {"experts": True, **parts})


@on(cpu=(2,), gpu=(2,))
def test_operator_and_method_make_the_same_calls(rank: int, world_size: int) -> None:
    """The first call of a geometry makes both at once, whichever of the two makes it."""
    c = comm()
    operator = torch.ops.allnorm.all_reduce_hyper_connection_input
    with mock.patch.object(NextInput, "run_with", autospec=True, side_effect=run_with) as joined:
        for number, width in enumerate((72, 80)):
            given = Inputs(11, world_size, (7,), width, 4).arguments(rank)
            calls = [
                functools.partial(operator, *flat(given, c.name)),
                functools.partial(c.all_reduce_hyper_connection_input, *given),
            ]
            first, second = calls if number else reversed(calls)
            assert_same_bits(first()[0], second()[0], f"width {width}")
            assert joined.call_count == number + 1


run_with = NextInput.run_with


@on(cpu=(2,), gpu=(2,))
def test_wrong_arguments_of_the_operator(rank: int, world_size: int) -> None:
    """Compiled calls and the operator refuse wrong arguments alike, and the next call works."""
    c = comm()
    operator = torch.ops.allnorm.all_reduce_hyper_connection_input
    inputs = Inputs(12, world_size, (3,), 264, 4)
    good = inputs.arguments(rank)
    projection = inputs.projection
    cases: tuple[tuple[int, Any, str], ...] = (
        (0, good[0][..., :-1], "residual has shape"),
        (4, good[4][:-1], "weight has shape"),
        (3, projection._replace(base=projection.base.double()), "projection.base has dtype"),
        (3, projection._replace(iterations=0), "projection.iterations=0"),
        (5, -1.0, "eps=-1.0"),
    )
    for place, wrong, text in cases:
        arguments = (*good[:place], wrong, *good[place + 1 :])
        fast = torch.compile(
            c.all_reduce_hyper_connection_input, fullgraph=True, backend="aot_eager"
        )
        for call in (
            functools.partial(operator, *flat(arguments, c.name)),
            functools.partial(fast, *arguments),
        ):
            assert text in message_of((ValueError, TypeError), call)
            inputs.check(c, f"after {text}")
    torch._dynamo.reset()
    for place in (0, 1, 2, 4, 7):
        given = [*flat(good, c.name)]
        given[place] = given[place].clone().requires_grad_()
        assert "requires_grad" in message_of(ValueError, functools.partial(operator, *given))
    with FakeTensorMode(), pytest.raises(TypeError, match="expected a FakeTensor too"):
        c.all_reduce_hyper_connection_input(torch.empty(3, 264), *good[1:])
    with pytest.raises(allnorm.CommunicatorClosedError, match="nobody"):
        operator(*flat(good, "nobody"))
    inputs.check(c, "afterwards")


@on(cpu=(2,), gpu=(2,))
def test_functions(rank: int, world_size: int) -> None:
    inputs = Inputs(6, world_size, (3,), 264, 4)
    streams, wanted = inputs.wanted(comm())
    normed, got, connection = allnorm.all_reduce_hyper_connection_input(*inputs.arguments(rank))
    assert_same_bits(got, streams, "streams")
    assert_equal((normed, connection), wanted, "function")


@on(cpu=(2,), gpu=(2,))
def test_wrong_arguments(rank: int, world_size: int) -> None:
    """Wrong arguments are refused alike, and the next call works."""
    c = comm()
    inputs = Inputs(7, world_size, (3,), 264, 4)
    good = inputs.arguments(rank)
    projection = inputs.projection
    cases: tuple[tuple[int, Any, str], ...] = (
        (4, good[4][:-1], "weight has shape"),
        (4, good[4].double(), "weight"),
        (3, projection._replace(fn=projection.fn[:-1]), "projection.fn has shape"),
        (3, projection._replace(iterations=0), "projection.iterations=0"),
        (5, -1.0, "eps=-1.0"),
    )
    for place, wrong, text in cases:
        arguments = (*good[:place], wrong, *good[place + 1 :])
        call = functools.partial(c.all_reduce_hyper_connection_input, *arguments)
        assert text in message_of((ValueError, TypeError), call)
        inputs.check(c, f"after {text}")
    with pytest.raises(TypeError, match="HyperConnectionProjection"):
        c.all_reduce_hyper_connection_input(*good[:3], tuple(projection), *good[4:])
