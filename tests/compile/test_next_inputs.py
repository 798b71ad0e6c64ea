"""Tests graphs in which the next layer's input is made from the new residual streams."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_helpers import comm, on
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import allnorm
from allnorm.compile import FusionReport, fuse
from allnorm.compile.vocabulary import qualified_name
from allnorm.testing import assert_same_bits, shared_input

from .helpers import reduce
from .test_inductor import inductor_caches
from .test_streams import BATCH, HIDDEN, WIDE, Inputs, compiled, published

EPS = 1e-5


def make(inputs: Inputs, rank: int) -> list[Tensor]:
    """Returns a graph's arguments: x, streams, post, mix, fn, scale, base, weight."""
    n = inputs.streams
    rows = n * (n + 2)
    shapes = {"fn": (rows, n * HIDDEN), "scale": (3,), "base": (rows,)}
    projection = [shared_input(shape, torch.float32, name) for name, shape in shapes.items()]
    return [*inputs.make(rank), *projection, shared_input((HIDDEN,), inputs.dtype, "weight")]


def next_input(streams: Any, fn: Any, scale: Any, base: Any, w: Any, **more: Any) -> Any:
    projection = allnorm.HyperConnectionProjection(fn, scale, base, iterations=3)
    normed, connection = allnorm.hyper_connection_input(streams, projection, w, EPS, **more)
    return normed, connection.post, connection.mix


def mixed(x: Any, r: Any, post: Any, mix: Any) -> Any:
    """Reduces in PyTorch; the pass fuses the hyper-connection too."""
    return published(x, r, post, mix.mT)


def called(x: Any, r: Any, post: Any, mix: Any) -> Any:
    """Calls the operator of the hyper-connection."""
    return comm().all_reduce_hyper_connection(x, r, allnorm.HyperConnection(post, mix))


def layer(streams_of: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a graph of one layer, which returns the streams too."""

    def graph(x: Any, r: Any, post: Any, mix: Any, *rest: Any) -> Any:
        r = streams_of(x, r, post, mix)
        return *next_input(r, *rest, weight_bias=1.0, numerics="vllm"), r

    return graph


def layers(x: Any, r: Any, post: Any, mix: Any, *rest: Any) -> Any:
    """Runs two layers, of which the second one has the coefficients that the first one made."""
    for _ in range(2):
        r = mixed(x, r, post, mix)
        x, post, mix = next_input(r, *rest)
        x = x * 0.5
    return x, r, post, mix


def assert_same(actual: Any, expected: Any, what: str) -> None:
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(one, other, f"result {number} of {what}")


def calls_in(module: GraphModule) -> list[str]:
    """Returns the names of the operators of allnorm that a graph calls, in order."""
    names = [qualified_name(node.target) for node in module.graph.nodes]
    return [name.partition("::")[2] for name in names if name.startswith("allnorm::")]


STREAMS, INPUT = "all_reduce_hyper_connection", "hyper_connection_input"
BOTH = "all_reduce_hyper_connection_input"


@on(cpu=(2,))
def test_operators_are_joined(rank: int, world_size: int) -> None:
    for inputs in (Inputs(), BATCH, WIDE, Inputs(streams=2, leading=(1,))):
        given = make(inputs, rank)
        expected = layer(called)(*given)
        for streams_of in (mixed, called):
            module = make_fx(layer(streams_of))(*given)
            names = [str(node) for node in module.graph.output_node().all_input_nodes]
            report = fuse(module, None, comm())
            module.graph.lint()
            assert [str(node) for node in module.graph.output_node().all_input_nodes] == names
            assert calls_in(module) == [BOTH]
            if streams_of is mixed:
                (site,) = report.fused
                assert site.boundary == f"{inputs.streams} residual streams, next layer's input"
            assert_same(module(*given), expected, f"{streams_of.__name__}, {inputs}")


@on(cpu=(2,))
def test_calls_keep_their_options(rank: int, world_size: int) -> None:
    """Joins a sum of experts, in a graph without metadata, whose weight is an attribute."""
    inputs = Inputs(leading=(5,))
    x, r, post, mix, *projection, w = make(inputs, rank)
    rows = torch.stack([x, x * 2, -x], 1)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(w, requires_grad=False)

        def forward(
            self, rows: Any, r: Any, post: Any, mix: Any, fn: Any, scale: Any, base: Any
        ) -> Any:
            call = torch.ops.allnorm.all_reduce_hyper_connection
            streams = call(rows, r, post, mix, comm().name, "two_shot", experts=True)
            constants = (EPS, 1.0, "vllm", 1e-6, 1e-6, 3, 2.0)
            made = torch.ops.allnorm.hyper_connection_input(
                streams, fn, scale, base, self.weight, *constants
            )
            return made[0], made[1], made[2], streams

    given = (rows, r, post, mix, *projection)
    module = symbolic_trace(Layer())
    assert not fuse(module, None, comm()).sites
    assert calls_in(module) == [BOTH]
    (both,) = module.graph.find_nodes(op="call_function", target=getattr(OPS, BOTH).default)
    assert both.kwargs == {"algorithm": "two_shot", "experts": True}
    with torch.no_grad():
        assert_same(module(*given), Layer()(*given), "experts")


OPS = torch.ops.allnorm


@on(cpu=(2,))
def test_layers_by_every_tracer(rank: int, world_size: int) -> None:
    given = make(Inputs(), rank)
    x, r, post, mix, *rest = given
    for _ in range(2):
        r = called(x, r, post, mix)
        x, post, mix = next_input(r, *rest)
        x = x * 0.5
    for is_late in (False, True):
        reports: list[FusionReport] = []
        actual = compiled(layers, is_late, reports)(*given)
        assert [site.boundary for site in reports[0].fused] == [
            "4 residual streams, next layer's input"
        ] * 2, str(reports[0])
        assert_same(actual, (x, r, post, mix), f"layers, late: {is_late}")
    fusion = allnorm.compile.inductor_pass(comm())
    with inductor_caches(), torch.no_grad():
        fast = torch.compile(layer(called), options={"post_grad_custom_post_pass": fusion})
        actual = fast(*given)
    assert_same(actual, layer(called)(*given), "inductor")


# ---- what is not joined --------------------------------------------------------------------------


def weight_from_the_streams(x: Any, r: Any, post: Any, mix: Any, *rest: Any) -> Any:
    r = mixed(x, r, post, mix)
    *projection, w = rest
    return *next_input(r, *projection, r.flatten(0, -2)[0] * w), r


def weight_after_another_reduction(x: Any, r: Any, post: Any, mix: Any, *rest: Any) -> Any:
    r = mixed(x, r, post, mix)
    *projection, w = rest
    return *next_input(r, *projection, reduce(w)), r


def written_between(x: Any, r: Any, post: Any, mix: Any, *rest: Any) -> Any:
    r = called(x, r, post, mix)
    r.mul_(2)
    return *next_input(r, *rest), r


def of_a_view(x: Any, r: Any, post: Any, mix: Any, *rest: Any) -> Any:
    r = called(x, r, post, mix)
    return *next_input(r[1:], *rest), r


NOT_JOINED: dict[Callable[..., Any], str] = {
    weight_from_the_streams: "an input of .*, is computed from the streams",
    weight_after_another_reduction: "an input of .*, comes after the reduction",
    written_between: "",
    of_a_view: "",
}


@on(cpu=(2,))
@pytest.mark.parametrize("name", [fn.__name__ for fn in NOT_JOINED])
def test_not_joined(rank: int, world_size: int, name: str) -> None:
    (fn,) = (fn for fn in NOT_JOINED if fn.__name__ == name)
    given = make(Inputs(), rank)
    module = make_fx(fn)(*[t.clone() for t in given])
    report = fuse(module, None, comm())
    assert [call for call in calls_in(module) if call != "all_reduce"] == [STREAMS, INPUT]
    if NOT_JOINED[fn]:
        site = report.fused[0]
        assert re.search(f"the next layer's input is not fused: .*{NOT_JOINED[fn]}", site.note)
        assert site.boundary == "4 residual streams"
    with mock.patch.dict(globals(), mixed=called):  # rounds as the fused call does
        expected = fn(*[t.clone() for t in given])
    assert_same(module(*[t.clone() for t in given]), expected, name)
