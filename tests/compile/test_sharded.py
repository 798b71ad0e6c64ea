"""Tests graphs that reduce sums of squares: norms of rows that are spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_helpers import comm, on
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from allnorm import reference
from allnorm.compile import fuse, inductor_pass
from allnorm.testing import assert_same_bits, rank_input, shared_input, ulp_distance

from .helpers import EPS, check_missed, nodes_calling, reduce

bf16 = torch.bfloat16
TOKENS, Q, K = 6, 96, 48


def square(x: Any) -> Any:
    return x.float().pow(2).mean(-1, keepdim=True)


def normed(x: Any, variance: Any, w: Any) -> Any:
    """Rounds once, after the weight: as vLLM and SGLang do."""
    return (x.float() * torch.rsqrt(variance + EPS) * w).to(x.dtype)


def rounded_first(x: Any, variance: Any, w: Any) -> Any:
    """Rounds before the weight too, as in transformers."""
    return w * (x.float() * torch.rsqrt(variance + EPS)).to(x.dtype)


def two_reductions(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    return tuple(normed(x, reduce(square(x)) / ranks, w) for x, w in ((q, qw), (k, kw)))


def one_tensor(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    return (normed(q, reduce(square(q)) / ranks, qw),)


def sum_of_squares(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    total = reduce(q.float().square().sum(-1, keepdim=True))
    return (normed(q, total / (Q * ranks), qw),)


def divided_before(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    return (rounded_first(q, reduce(square(q) / ranks), qw),)


def flattened(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """vLLM reduces a flat view of the mean squares."""
    variance = square(q)
    return (normed(q, reduce(variance.flatten()).view_as(variance) / ranks, qw),)


def halved(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """Multiplies by the reciprocal of a power of two, and by 1 + a slice of a longer weight."""
    variance = reduce(square(q)) * (1.0 / ranks)
    gain = 1.0 + torch.cat([qw, kw])[:Q].float()
    return ((q.float() * torch.rsqrt(variance + EPS) * gain).type_as(q),)


def unweighted(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    return ((q.float() * torch.rsqrt(reduce(square(q)) / ranks + EPS)).to(bf16),)


def chunks(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """MiniMax-M2: q and k share one reduction."""
    both = reduce(torch.cat([square(q), square(k)], dim=-1)) / ranks
    of_q, of_k = both.chunk(2, dim=-1)
    return normed(q, of_q, qw), normed(k, of_k, kw)


def slices(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    both = reduce(torch.cat([square(q), square(k)], -1)) / ranks
    return rounded_first(q, both[..., :1], qw), rounded_first(k, both[..., 1:], kw)


def stacked(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """Takes the root before the split."""
    squares = [x.float().pow(2).mean(-1) for x in (k, q)]
    of_k, of_q = torch.rsqrt(reduce(torch.stack(squares, -1)) / ranks + EPS).unbind(-1)
    return tuple(
        (x.float() * root.unsqueeze(-1) * w).to(bf16)
        for x, root, w in ((q, of_q, qw), (k, of_k, kw))
    )


def two_modes(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """No mode does both. The weight that follows a rounding stays in the graph."""
    of_q, of_k = (reduce(torch.cat([square(q), square(k)], -1)) / ranks).chunk(2, -1)
    return normed(q, of_q, qw), rounded_first(k, of_k, kw)


def split_matrix(q: Any, k: Any, qw: Any, kw: Any, ranks: int) -> Any:
    """q and k are columns of one matrix."""
    first, second, _ = torch.cat([q, k, k], -1).split([Q, K, K], dim=-1)
    return chunks(first, second, qw, kw, ranks)


# Each graph with its rounding mode and its number of calls.
FUSED: dict[Callable[..., Any], tuple[str, int]] = {
    one_tensor: ("rounded", 1),
    two_reductions: ("rounded", 2),
    sum_of_squares: ("rounded", 1),
    divided_before: ("transformers", 1),
    flattened: ("rounded", 1),
    halved: ("rounded", 1),
    unweighted: ("rounded", 1),
    chunks: ("rounded", 1),
    slices: ("transformers", 1),
    stacked: ("rounded", 1),
    two_modes: ("rounded", 1),
    split_matrix: ("rounded", 1),
}


def inputs(rank: int, shape: tuple[int, ...] = (TOKENS,)) -> list[Tensor]:
    """Returns q, k and this rank's slices of their weights."""
    widths = ((*shape, Q), (*shape, K), (Q,), (K,))
    return [rank_input(width, bf16, rank + 10 * i) for i, width in enumerate(widths)]


def graph(fn: Callable[..., Any], ranks: int) -> GraphModule:
    def program(q: Any, k: Any, qw: Any, kw: Any) -> Any:
        return fn(q, k, qw, kw, ranks)

    return symbolic_trace(program)


def assert_nearly(mine: Tensor, theirs: Tensor, what: str) -> None:
    assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    distance = ulp_distance(mine, theirs)
    assert int(distance.max()) <= (1 if mine.dtype != torch.float32 else 4), what
    if mine.dtype != torch.float32:
        assert float((distance > 0).float().mean()) < 0.01, what


@on(cpu=(2,))
@pytest.mark.parametrize("fn", FUSED, ids=lambda fn: fn.__name__)
def test_fused(rank: int, world_size: int, fn: Callable[..., Any]) -> None:
    numerics, calls = FUSED[fn]
    given = inputs(rank)
    module = graph(fn, world_size)
    expected = module(*given)
    report = fuse(module, given, comm())
    assert not report.missed, str(report)
    assert [site.numerics for site in report.sites] == [numerics] * calls
    assert "rows over ranks" in str(report)
    assert len(nodes_calling(module, "rms_norm_sharded")) == calls
    assert not nodes_calling(module, "_c10d_functional", "pow", "square", "rsqrt"), module.graph
    for i, (mine, theirs) in enumerate(zip(module(*given), expected, strict=True)):
        assert_nearly(mine, theirs, f"{fn.__name__}, result {i}")


@on(cpu=(2,))
def test_bits_are_those_of_the_reference(rank: int, world_size: int) -> None:
    """Also with other numbers of rows than the example's."""
    module = graph(chunks, world_size)
    fuse(module, inputs(rank), comm())
    for dims in ((TOKENS,), (1,), (19,)):
        ranks = [inputs(other, dims) for other in range(world_size)]
        wanted = reference.rms_norm_sharded(
            [given[:2] for given in ranks], [given[2:] for given in ranks], EPS
        )
        for mine, theirs in zip(module(*ranks[rank]), wanted[rank], strict=True):
            assert_same_bits(mine, theirs, str(dims))


def norms(of_q: Any, of_k: Any, given: Any) -> Any:
    q, k, qw, kw = given
    return normed(q, of_q, qw), normed(k, of_k, kw)


def both(given: Any, ranks: int, *more: Any) -> Any:
    """Returns the reduced mean squares of q and k, and `more` reduced columns."""
    q, k, *_ = given
    return reduce(torch.cat([square(q), square(k), *more], -1)) / ranks


def halves(given: Any, ranks: int) -> Any:
    return both(given, ranks).chunk(2, -1)


def different_eps(given: Any, ranks: int) -> Any:
    of_q, of_k = halves(given, ranks)
    q, k, qw, kw = given
    of_k = k.float() * torch.rsqrt(of_k + 1e-3)
    return normed(q, of_q, qw), (of_k * kw).to(bf16)


def five(given: Any, ranks: int) -> Any:
    q, *_ = given
    pieces = both(given, ranks, *[square(q + i) for i in range(3)]).chunk(5, -1)
    return norms(pieces[0], pieces[1], given)


def leading_dims(given: Any, ranks: int) -> Any:
    q, k, qw, kw = given
    of_q, of_k = halves(given, ranks)
    return normed(q, of_q, qw), normed(k.view(2, 3, K), of_k.view(2, 3, 1), kw)


def viewed_late(given: Any, ranks: int) -> Any:
    q, _, qw, _ = given
    variance = reduce(square(q)).view(2, 3, 1) / ranks
    return (q.float().view(2, 3, Q) * torch.rsqrt(variance + EPS) * qw).to(bf16)


def transposed(given: Any, ranks: int) -> Any:
    q, k, qw, kw = given
    return one_tensor(q.t().contiguous().t(), k, qw, kw, ranks)


def in_two_shapes(given: Any, ranks: int) -> Any:
    q, _, qw, _ = given
    variance = reduce(square(q)) / ranks
    return normed(q, variance, qw), normed(q.view(2, 3, Q), variance.view(2, 3, 1), qw)


def other_ranks(given: Any, ranks: int) -> Any:
    of_q, of_k = halves(given, ranks)
    return norms(of_q, of_k / 2, given)


def rounded(given: Any, ranks: int) -> Any:
    return normed(given[0], reduce(square(given[0]).to(bf16)) / ranks, given[2])


def rounded_beside(given: Any, ranks: int) -> Any:
    q, k, *_ = given
    of_q, of_k = (reduce(torch.cat([square(q), square(k).to(bf16)], -1)) / ranks).chunk(2, -1)
    return norms(of_q, of_k, given)


def too_long(given: Any, ranks: int) -> Any:
    """Norms rows of 2**20 columns."""
    q, _, qw, _ = given
    wide, w = (torch.cat([x[..., :64]] * 2**14, -1) for x in (q, qw))
    return normed(wide, reduce(square(wide)) / ranks, w)


def not_used(given: Any, ranks: int) -> Any:
    q, k, qw, kw = given
    of_q, of_k = halves(given, ranks)
    normed(k, of_k, kw)
    return normed(q, of_q, qw)


def no_square(given: Any, ranks: int) -> Any:
    q, k, *_ = given
    sums = torch.cat([square(q), k.float().mean(-1, keepdim=True)], -1)
    of_q, of_k = (reduce(sums) / ranks).chunk(2, -1)
    return norms(of_q, of_k, given)


def plus(given: Any, wanted: str) -> Any:
    """Returns a norm of q and what its caller asks for in addition."""
    q, _, qw, _ = given
    variance = reduce(square(q))
    asked = {"sum": variance, "rows": variance.shape[0], "max": variance.max()}
    return normed(q, variance, qw), asked[wanted]


def asserted(given: Any, ranks: int) -> Any:
    q, _, qw, _ = given
    variance = reduce(square(q)) / ranks
    torch.ops.aten._assert_tensor_metadata.default(variance, [6, 1])
    return normed(q, variance, qw)


def with_q(after: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Returns a graph that norms q by `after(q, reduced mean square)`."""
    return lambda given, ranks: (after(given[0], reduce(square(given[0]))) * given[2]).to(bf16)


# Graphs that are nearly fused, by the reason why they are not. Each takes its inputs and the number
# of ranks.
NEARLY: dict[str, Callable[..., Any]] = {
    "its squares or their sums are rounded to torch.bfloat16: expected float32": rounded,
    "or their sums are rounded to torch.bfloat16": lambda given, ranks: normed(
        given[0], reduce(square(given[0]).to(bf16).float()) / ranks, given[2]
    ),
    "their sums are rounded to torch.bfloat16": rounded_beside,
    "its squares or their sums are rounded to torch.bfloat16": lambda given, ranks: normed(
        given[0], reduce((given[0] * given[0]).float().mean(-1, True)) / ranks, given[2]
    ),
    "it reduces 5 sums of squares: expected at most 4": five,
    "columns in all: expected at most": too_long,
    "column 1 of the tensor that it reduces is no sum of squares": no_square,
    "column 1 of its result is not read by itself": lambda given, ranks: normed(
        given[0], both(given, ranks)[..., :1], given[2]
    ),
    "is divided by 192: expected 96, the length of a row on 1 ranks": (
        lambda given, ranks: normed(given[0], reduce(square(given[0])) / (2 * ranks), given[2])
    ),
    "is divided by 144: expected the length of a row, which is a multiple of 96": with_q(
        lambda q, total: q.float() * torch.rsqrt(total / 1.5 + EPS)
    ),
    "is multiplied by 0.333333: allnorm divides it instead": with_q(
        lambda q, total: q.float() * torch.rsqrt(total * (1 / 3) + EPS)
    ),
    "it divides by the root of the mean square": with_q(
        lambda q, total: q.float() / torch.sqrt(total + EPS)
    ),
    "1/rms is rounded to bfloat16": with_q(lambda q, total: q * torch.rsqrt(total + EPS).to(bf16)),
    "1/rms is multiplied by float_2 first": with_q(
        lambda q, total: (q * 2).float() * torch.rsqrt(total + EPS)
    ),
    "eps=-1.0 is not a finite number": with_q(
        lambda q, total: q.float() * torch.rsqrt(total + -1.0)
    ),
    "no RMSNorm of the rows follows it: the sum of squares is used by add": with_q(
        lambda q, total: q.float() + total
    ),
    "is normed with eps .*: one call has the same for all tensors": different_eps,
    "have different leading dimensions": leading_dims,
    "its sums of squares are divided by different numbers of ranks": other_ranks,
    "norms is not used": not_used,
    "holds what it norms": viewed_late,
    "has strides .* the results of the fused call are contiguous": transposed,
    "hold the same normed tensor in different shapes": in_two_shapes,
    "reduced sum of squares, is also used by the output of the graph": lambda given, _: plus(
        given, "sum"
    ),
    "reduced sum of squares, is also used by the output": lambda given, _: plus(given, "max"),
    "getitem, computed from the reduced sum": lambda given, _: plus(given, "rows"),
    "is also used by _assert_tensor_metadata": asserted,
    "its result is not used": lambda given, _: (reduce(square(given[0])), given[1])[1],
    "by something other than a weight": lambda given, _: normed(
        given[0], reduce(square(given[0])), given[0][:, :1]
    ),
}


def nearly(fn: Callable[..., Any], ranks: int) -> GraphModule:
    return symbolic_trace(lambda q, k, qw, kw: fn((q, k, qw, kw), ranks))


@pytest.mark.sampled(2)
@on(cpu=(1,))
@pytest.mark.parametrize("reason", NEARLY)
def test_missed(rank: int, world_size: int, reason: str) -> None:
    check_missed(nearly(NEARLY[reason], 1), inputs(rank), reason, communicator=comm())


@on(cpu=(1,))
def test_an_unknown_communicator(rank: int, world_size: int) -> None:
    def program(q: Any, w: Any) -> Any:
        variance = torch.ops.allnorm.all_reduce(square(q), "allnorm:other:0")
        return normed(q, variance, w)

    q, _, w, _ = inputs(rank)
    reason = "the number of ranks that it reduces over is unknown: pass communicator="
    check_missed(symbolic_trace(program), [q, w], reason)


def in_place(q: Any, k: Any, qw: Any, kw: Any) -> Any:
    """Reduces in place, as `dist.all_reduce` does, and norms k after q."""
    results = []
    for x, w in ((q, qw), (k, kw)):
        total = x.float().square().sum(-1, keepdim=True)
        torch.ops._c10d_functional.all_reduce_.default(total, "sum", "0")
        torch.ops._c10d_functional.wait_tensor.default(total)
        total.div_(x.shape[-1] * comm().world_size).add_(EPS).rsqrt_()
        results.append((x * total * w).to(bf16))
    return tuple(results)


@on(cpu=(2,))
def test_a_graph_that_works_in_place(rank: int, world_size: int) -> None:
    given, module = inputs(rank), symbolic_trace(in_place)
    expected = module(*given)
    report = fuse(module, given, comm())
    assert len(report.fused) == 2, str(report)
    for mine, theirs in zip(module(*given), expected, strict=True):
        assert_nearly(mine, theirs, "in place")


@pytest.mark.long  # 25 s, in the C++ compiler
@on(cpu=(2,))
def test_inductor(rank: int, world_size: int) -> None:
    """Compiled code norms q and k in one call, for every number of rows."""
    made = inductor_pass(comm())
    options = {"post_grad_custom_post_pass": made}

    def program(q: Any, k: Any, qw: Any, kw: Any) -> Any:
        return chunks(q * 2, k, qw, kw, world_size)

    with torch.no_grad():
        fast = torch.compile(program, fullgraph=True, options=options)
        for tokens in (TOKENS, 9):
            given = inputs(rank, (tokens,))
            for x in given[:2]:
                torch._dynamo.mark_dynamic(x, 0)
            for mine, theirs in zip(fast(*given), program(*given), strict=True):
                assert_nearly(mine, theirs, f"{tokens} tokens")
    (report,) = made.reports
    assert [site.boundary for site in report.fused] == ["rows over ranks of 2 tensors"]


class Attention(torch.nn.Module):
    """An attention layer like MiniMax-M2's, of which each rank has two heads.

    Every rank has its columns of q, k and v, and norms them over all ranks. transformers gathers
    these columns instead; vLLM and SGLang do not.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.ranks, self.heads, self.size = ranks, 2, 16
        width, hidden = 2 * 16, 64

        def matrix(rows: int, columns: int, call: int) -> torch.nn.Parameter:
            values = rank_input((rows, columns), bf16, rank, call=call) / 8
            return torch.nn.Parameter(values, requires_grad=False)

        self.qkv, self.out = matrix(hidden, 3 * width, 1), matrix(width, hidden, 2)
        self.q_weight, self.k_weight, self.weight = (
            torch.nn.Parameter(rank_input((n,), bf16, n == width and rank, call=i), False)
            for i, n in enumerate((width, width, hidden))
        )

    def forward(self, x: Any, residual: Any) -> Any:
        q, k, v = (x @ self.qkv).chunk(3, dim=-1)
        both = reduce(torch.cat([square(q), square(k)], dim=-1)) / self.ranks
        of_q, of_k = both.chunk(2, dim=-1)
        q, k = normed(q, of_q, self.q_weight), normed(k, of_k, self.k_weight)
        rows = [each.unflatten(-1, (self.heads, self.size)).transpose(0, 1) for each in (q, k, v)]
        mixed = torch.nn.functional.scaled_dot_product_attention(*rows)
        total = residual + reduce(mixed.transpose(0, 1).flatten(1) @ self.out)
        return torch.nn.functional.rms_norm(total, (64,), self.weight, EPS), total


@on(cpu=(2,))
def test_an_attention_layer(rank: int, world_size: int) -> None:
    """The layer's norms of q and k become one call, its sum, residual and norm another."""
    module = symbolic_trace(Attention(rank, world_size))
    given = [shared_input((TOKENS, 64), bf16, name) for name in ("x", "residual")]
    expected = module(*given)
    report = fuse(module, given, comm())
    assert [site.boundary for site in report.fused] == ["rows over ranks of 2 tensors", ""]
    assert not nodes_calling(module, "_c10d_functional"), module.graph
    for mine, theirs in zip(module(*given), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
        assert float((mine != theirs).float().mean()) < 0.05
