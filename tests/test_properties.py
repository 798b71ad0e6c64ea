"""Properties over random shapes, layouts and arguments. Reproducible: hypothesis draws no seed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from conftest import Pools
from rank_helpers import ALGORITHMS, DTYPES, MODES, Case, assert_ranks_agree, comm

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
)


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
    x, arguments = x_layout.place(case.x(rank)), case.norm_arguments()
    weight = arguments["weight"]
    arguments["weight"] = Layout(offset=weight_offset).place(weight)
    if case.residual:
        arguments["residual"] = residual_layout.place(arguments["residual"])
    more: dict[str, Any] = {}
    if results == "preallocated":
        more = {name: torch.empty(case.shape, dtype=case.dtype) for name in ("out", "residual_out")}
    elif results == "in_place":
        x = case.x(rank)
        more["out"] = x
        if case.residual:
            arguments["residual"] = arguments["residual"].contiguous()
            more["residual_out"] = arguments["residual"]
    try:
        normed, total = c.all_reduce_add_rms_norm(x, algorithm=case.algorithm, **arguments, **more)
        assert_ranks_agree(c, normed, total)
        case.compare(c, normed, total)
    except Exception as error:  # noqa: BLE001 - the parent fails with it
        return f"{type(error).__name__}: {error}"
    return ""


@settings(
    max_examples=150,
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
