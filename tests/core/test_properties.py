"""Properties over random shapes, layouts and arguments. Reproducible: hypothesis draws no seed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from conftest import Pools
from rank_helpers import ALGORITHMS, DTYPES, MODES, Case, agreed, assert_ranks_agree, comm

import allnorm
from allnorm import quant
from allnorm.testing import SPECIAL_KINDS

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a tensor of rows lies: columns between rows, elements before, leading dims reversed."""

    pad: int = 0
    offset: int = 0
    reverse: bool = False

    def place(self, values: torch.Tensor) -> torch.Tensor:
        order = list(range(values.dim() - 1))
        if self.reverse:
            order.reverse()
        order.append(values.dim() - 1)
        moved = values.permute(order)
        width = moved.shape[-1] + self.pad
        memory = torch.full(
            (moved[..., :1].numel() * width + self.offset,), 9.0, dtype=values.dtype
        )
        rows = memory[self.offset :].view(*moved.shape[:-1], width)[..., : moved.shape[-1]]
        rows.copy_(moved)
        return rows.permute(order)  # a reversal is its own inverse


layouts = st.builds(
    Layout,
    pad=st.sampled_from((0, 0, 1, 7, 8, 64)),
    offset=st.sampled_from((0, 0, 1, 3, 8)),
    reverse=st.booleans(),
)


def quants() -> st.SearchStrategy[quant.Quant | None]:
    layouts = (*(name for name in quant.SCALE_LAYOUTS if name != quant.SWIZZLED), "packed")
    groups = st.tuples(st.sampled_from(quant.GROUP_SIZES), st.sampled_from(layouts), st.booleans())
    return st.one_of(
        st.none(),
        groups.map(
            lambda g: allnorm.Fp8PerGroup(
                g[0],
                "column_major_tma" if g[1] == "packed" else g[1],
                "ue8m0_packed" if g[1] == "packed" else ("float32", "ue8m0")[g[2]],
            )
        ),
        st.just(allnorm.Fp8PerToken()),
        st.just(allnorm.MxFp8()),
        st.tuples(
            st.sampled_from((1.0, 448 * 6 / 5.0, 1e-30)),
            st.sampled_from(("swizzled_128x4", "row_major")),
        ).map(lambda g: allnorm.NvFp4(torch.tensor([g[0]]), g[1])),
        st.sampled_from((0.01, -3.0, 1e-30)).map(
            lambda value: allnorm.Fp8PerTensor(torch.tensor([value]))
        ),
    )


def possible(case: Case) -> Case:
    """The case with whole groups, and without what excludes each other."""
    if isinstance(case.quant, allnorm.Fp8PerGroup | allnorm.NvFp4):
        size = 16 if isinstance(case.quant, allnorm.NvFp4) else case.quant.group_size
        case = case.but(shape=(*case.shape[:-1], -(-case.shape[-1] // size) * size))
    if case.sharded and case.algorithm == "one_shot":
        case = case.but(algorithm="two_shot")
    return case.but(return_normed=case.return_normed and case.quant is not None)


cases = st.builds(
    Case,
    shape=st.tuples(st.lists(st.integers(0, 7), max_size=3).map(tuple), st.integers(1, 700)).map(
        lambda parts: (*parts[0], parts[1])
    ),
    dtype=st.sampled_from(DTYPES),
    residual=st.booleans(),
    float32_weight=st.booleans(),
    weight_bias=st.sampled_from((0.0, -0.0, 1.0, 0.1, -3.5)),
    eps=st.sampled_from((0.0, 1e-6, 1e-5, 0.3)),
    numerics=st.sampled_from(MODES),
    algorithm=st.sampled_from(ALGORITHMS),
    kind=st.sampled_from(("normal", "normal", "normal", "sentinels", *SPECIAL_KINDS)),
    call=st.integers(0, 1000),
    quant=quants(),
    return_normed=st.booleans(),
    sharded=st.booleans(),
).map(possible)


def memory_for(case: Case, c: allnorm.Communicator, like_x: torch.Tensor) -> dict[str, Any]:
    """Preallocated results, full of what nobody wrote."""
    shard = case.own_rows(c, like_x) if case.sharded else like_x
    memory = {"residual_out": torch.full_like(shard, 7.0)}
    if case.quant is None:
        return {**memory, "out": like_x}
    if isinstance(case.quant, allnorm.NvFp4):
        shape = (*case.shape[:-1], case.shape[-1] // 2)
        memory["quantized_out"] = torch.full(shape, 7, dtype=torch.uint8)
    else:
        memory["quantized_out"] = torch.full(case.shape, 7.0).to(quant.DTYPE)
    if not isinstance(case.quant, allnorm.Fp8PerTensor):
        tokens = torch.Size(case.shape[:-1]).numel()
        memory["scale_out"] = quant.empty_scale(case.quant, tokens, case.shape[-1], "cpu")
        dirty = torch.empty(0, dtype=torch.uint8)
        dirty.set_(memory["scale_out"].untyped_storage()).fill_(0xEE)
    if case.return_normed:
        memory["normed_out"] = like_x
    return memory


def check_drawn(
    rank: int,
    world_size: int,
    case: Case,
    x_layout: Layout,
    residual_layout: Layout,
    weight_offset: int,
    results: str,
) -> str:
    """Returns what is wrong, so that hypothesis can go on with the same processes."""
    c = comm(workspace_bytes=128 << 10)
    x, arguments = x_layout.place(case.x(rank)), case.call_arguments(c)
    weight = arguments["weight"]
    arguments["weight"] = Layout(offset=weight_offset).place(weight)
    if case.residual:
        arguments["residual"] = residual_layout.place(arguments["residual"])
    more: dict[str, Any] = {}
    if results == "in_place":
        x = case.x(rank)
    if results != "new":
        more = memory_for(case, c, x if results == "in_place" else torch.empty_like(case.x(rank)))
    if results == "in_place" and case.residual:
        arguments["residual"] = arguments["residual"].contiguous()
        more["residual_out"] = arguments["residual"]
    try:
        found = case.method(c)(x, **arguments, **more)
        assert_ranks_agree(c, *agreed(case, found))
        case.compare(c, *found)
    except Exception as error:  # noqa: BLE001 - the parent fails with it
        return f"{type(error).__name__}: {error}"
    return ""


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    case=cases,
    x_layout=layouts,
    residual_layout=layouts,
    weight_offset=st.sampled_from((0, 1, 8)),
    results=st.sampled_from(("new", "new", "preallocated", "in_place")),
)
def test_any_call_has_the_bits_of_the_reference(pools: Pools, **drawn: Any) -> None:
    assert pools.get("cpu", 2).run(check_drawn, kwargs=drawn) == ["", ""]
