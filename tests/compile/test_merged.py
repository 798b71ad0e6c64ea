"""Tests graphs that norm several tensors over the ranks separately: one call norms them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_helpers import comm, on
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import allnorm
from allnorm import reference
from allnorm.compile import FusionReport, fuse, groups, inductor_pass
from allnorm.testing import assert_same_bits, rank_input

from .helpers import EPS, llama, nodes_calling, reduce
from .test_sharded import assert_nearly, normed, rounded_first, square

bf16 = torch.bfloat16
TOKENS, HIDDEN, Q, K = 6, 32, 96, 48
MERGED = ["rows over ranks of 2 tensors"] * 2
APART = ["rows over ranks"] * 2


def inputs(rank: int, tokens: int = TOKENS) -> list[Tensor]:
    """Returns x, this rank's columns of the matrices of q and k, and slices of the weights."""
    shapes = ((tokens, HIDDEN), (HIDDEN, Q), (HIDDEN, K), (Q,), (K,))
    return [rank_input(shape, bf16, rank + 10 * i) for i, shape in enumerate(shapes)]


def over(x: Any, w: Any, ranks: int, eps: float = EPS, group: str = "0") -> Any:
    """Norms one tensor over the ranks, with a reduction of its own."""
    variance = reduce(square(x), group=group) / ranks
    return (x.float() * torch.rsqrt(variance + eps) * w).to(x.dtype)


def squares_first(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    q, k = x @ wq, x @ wk
    of_q, of_k = reduce(square(q)) / ranks, reduce(square(k)) / ranks
    return normed(q, of_q, qw), normed(k, of_k, kw)


def one_by_one(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """Computes k after the norm of q."""
    q = over(x @ wq, qw, ranks)
    return q, over(x @ wk, kw, ranks)


def q_is_used(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """Uses the normed q before k exists."""
    q = over(x @ wq, qw, ranks).view(-1, 2, Q // 2).transpose(0, 1) * 1.0
    heads = q.transpose(0, 1).reshape(-1, Q)
    return heads, over(x @ wk, kw, ranks)


def in_place(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    results = []
    for given, w in ((x @ wq, qw), (x @ wk, kw)):
        total = given.float().square().sum(-1, keepdim=True)
        torch.ops._c10d_functional.all_reduce_.default(total, "sum", "0")
        torch.ops._c10d_functional.wait_tensor.default(total)
        total.div_(given.shape[-1] * ranks).add_(EPS).rsqrt_()
        results.append((given * total * w).to(bf16))
    return tuple(results)


def graph(fn: Callable[..., Any], ranks: int) -> GraphModule:
    return symbolic_trace(lambda x, wq, wk, qw, kw: fn(x, wq, wk, qw, kw, ranks))


def tensors_of(module: GraphModule) -> list[int]:
    """Returns the number of tensors of each call that norms over the ranks, in graph order."""
    operator: Any = torch.ops.allnorm.rms_norm_sharded.default
    calls: list[Any] = module.graph.find_nodes(op="call_function", target=operator)
    return [len(call.args[0]) for call in calls]


def wanted(given: list[list[Tensor]], rank: int) -> list[Tensor]:
    """Returns the results of two calls, one for q and one for k."""
    results = []
    for matrix, weight in ((1, 3), (2, 4)):
        tensors = [[each[0] @ each[matrix]] for each in given]
        weights = [[each[weight]] for each in given]
        results += reference.rms_norm_sharded(tensors, weights, EPS)[rank]
    return results


@on(cpu=(2,))
@pytest.mark.parametrize("traced", [False, True], ids=["symbolic", "make_fx"])
@pytest.mark.parametrize("fn", [squares_first, one_by_one, q_is_used, in_place])
def test_merged(rank: int, world_size: int, fn: Callable[..., Any], traced: bool) -> None:
    """Tests that one call norms q and k, with the bits of two calls, also of other rows."""
    given, module = inputs(rank), graph(fn, world_size)
    if traced:
        module = make_fx(module)(*given)
    expected = module(*given)
    report = fuse(module, given, comm())
    module.graph.lint()
    assert not report.missed, str(report)
    assert [site.boundary for site in report.sites] == MERGED
    first, second = report.sites
    assert (first.merged_with, second.merged_with) == ("", first.nodes[0])
    assert set(first.nodes).isdisjoint(second.nodes)
    assert f"in the call of {first.nodes[0]}" in str(second)
    assert "in the call of" not in str(first)
    assert tensors_of(module) == [2]
    assert not nodes_calling(module, "_c10d_functional", "pow", "square", "rsqrt"), module.graph
    for mine, theirs in zip(module(*given), expected, strict=True):
        assert_nearly(mine, theirs, fn.__name__)
    more = () if traced else (19,) if fn is in_place else (1, 19)
    for tokens in (TOKENS, *more):
        ranks = [inputs(other, tokens) for other in range(world_size)]
        for mine, theirs in zip(module(*ranks[rank]), wanted(ranks, rank), strict=True):
            assert_same_bits(mine, theirs, f"{fn.__name__}, {tokens} tokens")


def five(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    return tuple(over((x @ wq) * (i + 1), qw, ranks) for i in range(5))


def pair_and_one(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """Norms two tensors by one reduction, and a third one by a reduction of its own."""
    q, k = x @ wq, x @ wk
    of_q, of_k = (reduce(torch.cat([square(q), square(k)], -1)) / ranks).chunk(2, -1)
    return normed(q, of_q, qw), normed(k, of_k, kw), over(q * 2, qw, ranks)


def layers(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    for _ in range(3):
        q, k = over(x @ wq, qw, ranks), over(x @ wk, kw, ranks)
        x = (q[:, :HIDDEN] + k[:, :HIDDEN]) * 0.5
    return (x,)


def same_tensor(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """Norms one tensor twice, with different weights."""
    q = x @ wq
    return over(q, qw, ranks), over(q, qw * 2, ranks)


@on(cpu=(2,))
@pytest.mark.parametrize(
    ("fn", "calls"),
    [(five, [4, 1]), (pair_and_one, [3]), (layers, [2, 2, 2]), (same_tensor, [2])],
)
def test_calls(rank: int, world_size: int, fn: Callable[..., Any], calls: list[int]) -> None:
    """Tests how many tensors each call has: at most four, of one layer."""
    given, module = inputs(rank), graph(fn, world_size)
    expected = module(*given)
    report = fuse(module, given, comm())
    assert not report.missed, str(report)
    assert tensors_of(module) == calls
    for mine, theirs in zip(module(*given), expected, strict=True):
        if fn is layers:  # the last bits of one layer change those of the next
            torch.testing.assert_close(mine, theirs, rtol=2.0**-6, atol=2.0**-6)
        else:
            assert_nearly(mine, theirs, fn.__name__)


# ---- what is not merged --------------------------------------------------------------------------


def dependent(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    q = over(x @ wq, qw, ranks)
    return q, over(q[:, :HIDDEN] @ wk, kw, ranks)


def normed_twice(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    q = over(x @ wq, qw, ranks)
    return q, over(q, qw, ranks)


def weight_from_q(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    q, k = x @ wq, x @ wk
    of_q, of_k = reduce(square(q)) / ranks, reduce(square(k)) / ranks
    q = normed(q, of_q, qw)
    return q, normed(k, of_k, q[0, :K].contiguous())


def size_of_q(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """Divides k's sum of squares by a number that is computed from the normed q's shape."""
    q, k = x @ wq, x @ wk
    of_q, of_k = reduce(square(q)) / ranks, reduce(k.float().square().sum(-1, keepdim=True))
    q = normed(q, of_q, qw)
    return q, normed(k, of_k / (q.shape[-1] // 2 * ranks), kw)


def other_eps(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    return over(x @ wq, qw, ranks), over(x @ wk, kw, ranks, eps=1e-3)


def other_rows(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    return over(x @ wq, qw, ranks), over(x[1:] @ wk, kw, ranks)


def other_dtype(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    k = (x @ wk).to(torch.float16)
    return over(x @ wq, qw, ranks), over(k, kw.float(), ranks)


def other_mode(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    q, k = x @ wq, x @ wk
    of_q, of_k = reduce(square(q)) / ranks, reduce(square(k)) / ranks
    return normed(q, of_q, qw), rounded_first(k, of_k, kw)


def other_bias(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    return over(x @ wq, qw, ranks), over(x @ wk, 1.0 + kw.float(), ranks)


def zero_bias(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """Adds 0.0 to one weight, which would change weights of -0.0."""
    return over(x @ wq, qw, ranks), over(x @ wk, 0.0 + kw.float(), ranks)


def too_wide(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """Norms two tensors of 2**18 columns per rank; four of them are too many for one call."""
    q, w = (torch.cat([t[..., :64]] * 2**12, -1) for t in ((x @ wq)[:1], qw))
    return tuple(over(q * (i + 1), w, ranks) for i in range(4))


def reduction_between(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    q = over(x @ wq, qw, ranks)
    total = llama(reduce(x * 0.5) + x, qw[:HIDDEN].contiguous())
    return q, over(x @ wk, kw, ranks), total


def through_a_call(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """Needs the normed q for a call's weight, and that call's sum for k."""
    total = reduce(x * 0.5) + x
    q = over(x @ wq, qw, ranks)
    weight = q[0, :HIDDEN].contiguous()
    k = over(total @ wk, kw, ranks)
    return q, k, llama(total, weight), total


@on(cpu=(2,))
@pytest.mark.parametrize(
    "fn",
    [
        *(dependent, normed_twice, weight_from_q, size_of_q, other_eps, other_rows, other_dtype),
        *(other_mode, other_bias, zero_bias, reduction_between, through_a_call),
    ],
)
def test_not_merged(rank: int, world_size: int, fn: Callable[..., Any]) -> None:
    given, module = inputs(rank), graph(fn, world_size)
    expected = module(*given)
    report = fuse(module, given, comm())
    module.graph.lint()
    assert not report.missed, str(report)
    assert [site.boundary for site in report.fused if site.boundary] == APART
    assert not any(site.merged_with for site in report.fused)
    assert tensors_of(module) == [1, 1]
    for mine, theirs in zip(module(*given), expected, strict=True):
        if fn in (dependent, normed_twice, weight_from_q, through_a_call):
            torch.testing.assert_close(mine, theirs, rtol=2.0**-6, atol=2.0**-6)
        else:
            assert_nearly(mine, theirs, fn.__name__)


@on(cpu=(2,))
def test_too_many_columns(rank: int, world_size: int) -> None:
    given, module = inputs(rank), graph(too_wide, world_size)
    report = fuse(module, given, comm())
    assert not report.missed, str(report)
    assert tensors_of(module) == [3, 1]


@on(cpu=(2,))
def test_different_rows_of_the_examples(rank: int, world_size: int) -> None:
    """Tests inputs with equal numbers of rows, which may differ when the graph runs."""

    def program(q: Any, k: Any, qw: Any, kw: Any) -> Any:
        return over(q, qw, world_size), over(k, kw, world_size)

    module, shapes = symbolic_trace(program), ((TOKENS, Q), (TOKENS, K), (Q,), (K,))
    given = [rank_input(shape, bf16, rank) for shape in shapes]
    report = fuse(module, given, comm())
    assert [site.boundary for site in report.fused] == APART
    given[1] = given[1][1:]
    for mine, theirs in zip(module(*given), program(*given), strict=True):
        assert_nearly(mine, theirs, "different rows")


@on(cpu=(2,))
def test_different_groups(rank: int, world_size: int) -> None:
    other = dist.new_group(list(range(world_size)))

    def program(x: Any, wq: Any, wk: Any, qw: Any, kw: Any, ranks: int) -> Any:
        return over(x @ wq, qw, ranks), over(x @ wk, kw, ranks, group=other.group_name)

    given, module = inputs(rank), graph(program, world_size)
    expected = module(*given)
    report = fuse(module, given)
    assert [site.boundary for site in report.fused] == APART, str(report)
    for mine, theirs in zip(module(*given), expected, strict=True):
        assert_nearly(mine, theirs, "groups")
    for made in [made for made in groups._named if made.group == other]:
        made.close()
    dist.destroy_process_group(other)


@on(cpu=(2,))
def test_ranks_that_would_merge_differently(rank: int, world_size: int) -> None:
    """Tests a graph whose norms only one rank can merge: no rank fuses it."""
    group = dist.new_group(list(range(world_size)))
    given, module = inputs(rank), graph(dependent if rank else one_by_one, world_size)
    for node in module.graph.nodes:
        if node.target is torch.ops._c10d_functional.all_reduce.default:
            node.update_arg(2, group.group_name)
    module.recompile()
    expected = module(*given)
    with allnorm.Communicator(group, device="cpu", timeout=60) as own:
        report = fuse(module, given, own)
    assert not report.fused, str(report)
    for site in report.missed:
        assert "would fuse it differently" in str(site.reason)
        assert not site.merged_with
    for mine, theirs in zip(module(*given), expected, strict=True):
        assert_same_bits(mine, theirs, "unfused")
    dist.destroy_process_group(group)


@pytest.mark.long  # in the C++ compiler
@on(cpu=(2,))
def test_inductor(rank: int, world_size: int) -> None:
    """Compiled code norms q and k in one call, for every number of rows."""
    made = inductor_pass(comm())
    options = {"post_grad_custom_post_pass": made}

    def program(*given: Any) -> Any:
        return q_is_used(*given, world_size)

    with torch.no_grad():
        fast = torch.compile(program, fullgraph=True, options=options)
        for tokens in (TOKENS, 9):
            given = inputs(rank, tokens)
            torch._dynamo.mark_dynamic(given[0], 0)
            for mine, theirs in zip(fast(*given), program(*given), strict=True):
                assert_nearly(mine, theirs, f"{tokens} tokens")
    (report,) = made.reports
    assert isinstance(report, FusionReport)
    assert [site.boundary for site in report.fused] == MERGED, str(report)
