"""A node stands for what its tensor holds: shapes of results, parts of tensors, writes, structure.

Each case fused to something wrong once, or raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compile_helpers import EPS, HIDDEN, Inputs, captured, check_fused, check_missed, reduce
from rank_helpers import comm, on

from allnorm.testing import RankPool

bf16 = torch.bfloat16

# ---- shapes of results --------------------------------------------------------------------------


def embedding(x, r, w):
    """A vocabulary-parallel embedding times a number, in another shape, and the first norm."""
    total = reduce(x).view(2, -1, HIDDEN) * 2.0
    return F.rms_norm(total, (HIDDEN,), w, EPS), total


def embedding_used_inside(x, r, w):
    total = reduce(x).view(2, -1, HIDDEN) * 2.0
    return F.rms_norm(total, (HIDDEN,), w, EPS), total[:, -1] + 1, total.sum(1), total.mean(0)


def normed_in_a_third_shape(x, r, w):
    total = reduce(x).view(2, -1, HIDDEN) * 2.0
    return F.rms_norm(total.view(-1, HIDDEN), (HIDDEN,), w, EPS), total


def scaled_in_two_shapes(x, r, w):
    """One value, computed twice: both are results of the one call."""
    reduced = reduce(x)
    flat, total = reduced * 2.0, reduced.view(2, -1, HIDDEN) * 2.0
    return F.rms_norm(total, (HIDDEN,), w, EPS), total, flat


def normed_in_two_shapes(x, r, w):
    total = reduce(x) + r
    first = F.rms_norm(total.view(2, -1, HIDDEN), (HIDDEN,), w, EPS)
    return first, F.rms_norm(total, (HIDDEN,), w, EPS), total


def rounded_in_another_shape(x, r, w):
    total = (reduce(x).float() + r).view(2, -1, HIDDEN)
    stored = total.to(bf16)
    return F.rms_norm(stored, (HIDDEN,), w, EPS), stored


SHAPES = [
    (embedding, 1),
    (embedding_used_inside, 1),
    (normed_in_a_third_shape, 1),
    (scaled_in_two_shapes, 1),
    (normed_in_two_shapes, 2),
    (rounded_in_another_shape, 1),
]


def run_shapes(rank: int, world_size: int, index: int) -> None:
    fn, norms = SHAPES[index]
    inputs = Inputs().make(rank)
    for module in (torch.fx.symbolic_trace(fn), captured(fn, inputs)):
        given = inputs if len(module.graph.find_nodes(op="placeholder")) == 3 else inputs[::2]
        check_fused(module, given, "rounded", norms=norms, communicator=comm())


@on(cpu=(2,))
@pytest.mark.parametrize("index", range(len(SHAPES)), ids=[fn.__name__ for fn, _ in SHAPES])
def test_results_have_the_shapes_of_the_graph(pool: RankPool, index: int) -> None:
    pool.run(run_shapes, index)


# ---- parts of tensors ---------------------------------------------------------------------------


@torch.library.custom_op("allnorm_contents::sum_", mutates_args=("x",))
def sum_in_place(x: torch.Tensor, group: str) -> None:
    whole = x.contiguous()
    dist.all_reduce(whole)
    x.copy_(whole)


@torch.library.custom_op("allnorm_contents::sum_into", mutates_args=("out",))
def sum_into(x: torch.Tensor, out: torch.Tensor, group: str) -> None:
    out.copy_(x)
    dist.all_reduce(out)


OPS = ["allnorm_contents::sum_", "allnorm_contents::sum_into"]
PARTS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "rows": lambda x: x[:8],
    "columns": lambda x: x[:, :64],
    "every_second": lambda x: x[::2],
    "last_column": lambda x: x[:, -1],
}


def reduces(part: Callable[[Any], Any]) -> Any:
    """Returns a function that sums a part of a tensor in place, then adds and norms all of it."""

    def fn(x, r, w):
        mine = x * 1
        torch.ops.allnorm_contents.sum_(part(mine), "tp")
        total = mine + r
        return F.rms_norm(total, (HIDDEN,), w, EPS), total

    return fn


def sum_into_another(rank: int, world_size: int) -> None:
    """An operator that leaves its first tensor as it is, and stores the sum in the second."""

    def fn(x, r, w):
        out = torch.empty_like(x)
        torch.ops.allnorm_contents.sum_into(x, out, "tp")
        total = out + r
        return F.rms_norm(total, (HIDDEN,), w, EPS), total

    inputs = Inputs().make(rank)
    reason = "changes another argument than the first tensor"
    options = {"communicator": comm(), "all_reduce_ops": OPS}
    check_missed(captured(fn, inputs), inputs, reason, **options)


def run_parts(rank: int, world_size: int, name: str, v2: bool) -> None:
    from torch._dynamo.backends.common import aot_autograd

    inputs, graphs = Inputs().make(rank), []
    keep = aot_autograd(fw_compiler=lambda module, _: graphs.append(module) or module.forward)
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        torch._inductor.config.patch(enable_auto_functionalized_v2=v2),
    ):
        torch.compile(reduces(PARTS[name]), backend=keep)(*inputs)
    (module,) = graphs
    assert "auto_functionalized" in str(module.graph)
    options = {"communicator": comm(), "all_reduce_ops": OPS}
    if name == "whole":
        check_fused(module, inputs, "rounded", **options)
        return
    reason = "a part of the tensor" if v2 else "goes to|is needed too|no tensor of the shape"
    check_missed(module, inputs, reason, **options)


@on(cpu=(2,))
@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_not_the_whole(pool: RankPool, name: str, v2: bool) -> None:
    pool.run(run_parts, name, v2)


@on(cpu=(2,))
def test_a_sum_stored_in_another_tensor(pool: RankPool) -> None:
    pool.run(sum_into_another)
