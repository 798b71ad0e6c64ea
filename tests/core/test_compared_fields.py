"""Tests calls with a field changed on one rank: all ranks raise, or the results are correct.

`TOGGLES` has changes of every field of a Call. Ranks compare the fields of the C call.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import struct
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from limits import HANG_SECONDS
from rank_helpers import Case, Experts, device, on

import allnorm
from allnorm.core import _native, announcement, channel
from allnorm.core.announcement import Announcement
from allnorm.core.call import INPUTS, KEYWORDS, Call
from allnorm.core.prepared_call import PreparedCall
from allnorm.policy import Plan
from allnorm.testing import RankPool

TIMEOUT = datetime.timedelta(seconds=60)
SHAPE = 5, 64
ALONE, PAIRS = ((0,), (1,)), ((0, 1), (2, 3))


class Toggle(NamedTuple):
    """A change that the last rank makes to a call.

    Attributes:
        text: text that every rank's error must contain; empty if the results must be correct.
        base: fields of the Case to change on all ranks.
        change: further fields to change on the last rank.
        more: function that returns further method arguments on the last rank.
    """

    text: str
    base: Mapping[str, Any] = types.MappingProxyType({})
    change: Mapping[str, Any] = types.MappingProxyType({})
    more: Callable[[Case, allnorm.Communicator], dict[str, Any]] = lambda case, c: {}


def memory_for(number: int, name: str) -> Callable[[Case, allnorm.Communicator], dict[str, Any]]:
    """Returns a function that allocates memory for result `number`, as the argument `name`."""

    def made(case: Case, c: allnorm.Communicator) -> dict[str, Any]:
        want = case.expected(c.world_size, c.islands)[number]
        if name == "residual_out" and case.sharded:
            want = case.own_rows(c, want)
        return {name: torch.empty_like(want)}

    return made


def other_post_norm(**changes: float) -> Callable[[Case, allnorm.Communicator], dict[str, Any]]:
    def made(case: Case, c: allnorm.Communicator) -> dict[str, Any]:
        norm = case.norm_before()
        assert norm is not None
        given = {"eps": norm.eps, "weight_bias": norm.weight_bias, **changes}
        return {"post_norm": allnorm.PostNorm(norm.weight, **given)}

    return made


GROUPS = {"quant": allnorm.Fp8PerGroup(32)}
MX, ROWS = allnorm.MxFp8(), allnorm.Fp8PerGroup(32, "row_major", "ue8m0")
NV, NV_ROWS = (allnorm.NvFp4(torch.tensor(7.0), *layout) for layout in ((), ("row_major",)))
POST = {"post_norm": True}
EXPERTS = {"experts": Experts()}
TOGGLES: dict[str, list[Toggle]] = {
    "x": [
        Toggle("num_tokens is", change={"shape": (4, 64)}),
        Toggle("num_tokens is", change={"shape": (10, 32)}),  # the same size in bytes
        Toggle("hidden_size is", change={"shape": (5, 32)}),
        Toggle("dtype is", change={"dtype": torch.float16}),
    ],
    "residual": [
        Toggle("residual is", change={"residual": False}),
        Toggle("residual is", base={"residual": False}, change={"residual": True}),
        Toggle("dtype of the residual is", change={"float32_residual": True}),
        Toggle(
            "dtype of the residual is",
            base={**POST, "float32_residual": True},
            change={"float32_residual": False},
        ),
    ],
    "weight": [
        Toggle("dtype of the weight is", change={"float32_weight": True}),
        Toggle("op is", base=POST, change={"second_norm": False}),
    ],
    "static_scale": [
        Toggle(
            "quantization is",
            base={"quant": allnorm.Fp8PerToken()},
            change={"quant": allnorm.Fp8PerTensor(torch.tensor(0.5))},
        ),
    ],
    "post_weight": [
        Toggle("post norm is", change=POST),
        Toggle("post norm is", base={**POST, **GROUPS}, change={"post_norm": False}),
        Toggle("dtype of", base=POST, change={"float32_weight": True}),
    ],
    "expert_index": [Toggle("", EXPERTS, {"experts": Experts(indexed=False)})],
    "expert_weights": [Toggle("", EXPERTS, {"experts": Experts(weighted=False)})],
    "shared": [Toggle("", EXPERTS, {"experts": Experts(shared=True)})],
    "experts": [
        Toggle("", EXPERTS, {"experts": None}),
        Toggle("", EXPERTS, {"experts": Experts(top_k=3)}),
        Toggle("", change=EXPERTS),
    ],
    "out": [
        Toggle("", more=memory_for(0, "out")),
        Toggle("", {**GROUPS, "return_normed": True}, more=memory_for(3, "normed_out")),
    ],
    "residual_out": [Toggle("", more=memory_for(1, "residual_out"))],
    "quantized_out": [Toggle("", GROUPS, more=memory_for(0, "quantized_out"))],
    "scale_out": [Toggle("", GROUPS, more=memory_for(1, "scale_out"))],
    "op": [
        Toggle("op is", change=GROUPS),
        Toggle("op is", base={"quant": NV}, change={"quant": None}),
    ],
    "algorithm": [Toggle("algorithm is"), Toggle("algorithm is ", {})],
    "eps": [
        Toggle("eps is", change={"eps": 1e-5}),
        Toggle("eps is", base=GROUPS, change={"eps": 1.0000001e-6}),
    ],
    "weight_bias": [Toggle("weight_bias is", change={"weight_bias": 1.0})],
    "numerics": [Toggle("numerics is", change={"numerics": "vllm"})],
    "residual_sharded": [Toggle("algorithm is")],
    "gather": [
        Toggle("gather is", {"sharded": True}, {"gather": False}),
        Toggle("gather is", {"sharded": True, "gather": False, **GROUPS}, {"gather": True}),
    ],
    "quant": [
        Toggle("quantization is", GROUPS, {"quant": allnorm.Fp8PerGroup(64)}),
        Toggle("quantization is", GROUPS, {"quant": allnorm.Fp8PerToken()}),
        Toggle("quantization is", {"quant": MX}, {"quant": NV}),
        Toggle("format of the scales is", {"quant": ROWS}, GROUPS),
        Toggle(
            "format of the scales is",
            {"quant": ROWS},
            {"quant": allnorm.Fp8PerGroup(32, "column_major_tma", "ue8m0_packed")},
        ),
        Toggle("layout of the scales is", {"quant": MX}, {"quant": ROWS}),
        Toggle("layout of the scales is", {"quant": ROWS}, {"quant": MX}),
        Toggle("layout of the scales is", {"quant": NV}, {"quant": NV_ROWS}),
        Toggle("layout of the scales is", {"quant": NV_ROWS}, {"quant": NV}),
        # Only the memory layout of the scales differs, not their shape or values.
        Toggle("", GROUPS, {"quant": allnorm.Fp8PerGroup(32, "column_major")}),
        Toggle("", GROUPS, {"quant": allnorm.Fp8PerGroup(32, "column_major_tma")}),
    ],
    "return_normed": [
        Toggle("normed is", GROUPS, {"return_normed": True}),
        Toggle("normed is", {**GROUPS, "return_normed": True}, {"return_normed": False}),
    ],
    "num_tokens": [Toggle("num_tokens is")],
    "prefetch": [
        Toggle("", more=lambda case, c: {"prefetch": torch.ones(3, 5)}),
        Toggle("", GROUPS, more=lambda case, c: {"prefetch": torch.ones(64, dtype=torch.uint8)}),
    ],
    "post_eps": [Toggle("eps of the post norm is", POST, more=other_post_norm(eps=0.5))],
    "post_weight_bias": [
        Toggle("weight_bias of the post norm is", POST, more=other_post_norm(weight_bias=0.5))
    ],
    "scale": [
        Toggle("scale is", change={"scale": 0.5}),
        Toggle("scale is", base={**POST, "scale": 0.5}, change={"scale": 1.0}),
        Toggle("scale is", base={"scale": 0.5}, change={"scale": 0.25}),
    ],
}
OTHERS = {
    "one_shot": ("two_shot", "unfused"),
    "two_shot": ("one_shot", "unfused"),
    "unfused": ("one_shot", "two_shot"),
}
OTHERS_OVER_ISLANDS = {"unfused": ("hierarchical", "unfused"), "hierarchical": ("unfused",) * 2}


def test_every_field_of_a_call_is_toggled() -> None:
    """If an argument has parts, each part needs a toggle too.

    `slices` and `connection` belong to other calls, whose parts tests/test_sharded_norm.py and
    tests/test_hyper_connection.py change.
    """
    parts = {*INPUTS, "experts", "post_eps", "post_weight_bias"}
    others = {"source", "post_norm", "slices", "connection", "post", "mix"}
    assert set(TOGGLES) == {*KEYWORDS, *parts} - others


def calls_of(field: str, toggle: Toggle, base: Case, last: bool, c: allnorm.Communicator) -> Any:
    """Returns this rank's case and further arguments, or None if the toggle does not apply."""
    case = base.but(**toggle.base)
    if field == "algorithm":
        others = OTHERS if len(c.islands) == 1 else OTHERS_OVER_ISLANDS
        other = others[base.algorithm][toggle is TOGGLES[field][1]]
        if other == base.algorithm or (base.sharded and other == "one_shot"):
            return None
        toggle = toggle._replace(change={"algorithm": other})
    if case.sharded and base.algorithm == "one_shot":
        return None
    if field == "residual_sharded":
        if base.algorithm == "one_shot":
            return None
        toggle = toggle._replace(change={"sharded": not base.sharded})
    return case.but(**toggle.change) if last else case, toggle.more(case, c) if last else {}


def diverge(
    rank: int, world_size: int, field: str, algorithm: str, sharded: bool, islands: Any
) -> list[str | None]:
    """Runs each of a field's toggles.

    Returns:
        For each toggle, an error message, "results", or None if the toggle does not apply.
    """
    last = world_size - 1
    base = Case(SHAPE, algorithm=algorithm, sharded=sharded)
    outcomes: list[str | None] = []
    for number, toggle in enumerate(TOGGLES[field]):
        with allnorm.Communicator(device=device(), timeout=TIMEOUT, islands=islands) as c:
            mine = calls_of(field, toggle, base.but(call=number), rank == last, c)
            if mine is None:
                outcomes.append(None)
                continue
            case, more = mine
            if field == "num_tokens":
                if algorithm == "one_shot":  # one_shot cannot gather rows
                    outcomes.append(None)
                    continue
                num_tokens = SHAPE[0] + (rank == last)
                lo, hi = c.row_shard(num_tokens)
                rows = torch.ones(hi - lo, SHAPE[1])
                call = functools.partial(c.all_gather_rows, rows, num_tokens, algorithm=algorithm)
            else:
                call = functools.partial(case.run, c, **more)
            try:
                results = call()
            except allnorm.PeerDivergedError as error:
                outcomes.append(str(error))
                continue
            outcomes.append("results")
            case_of_last = base.but(call=number, **toggle.base).but(**toggle.change)
            others = base.but(call=number, **toggle.base)
            xs = [*others.xs(world_size)[:-1], case_of_last.x(last)]
            if not toggle.text:
                with mock.patch.object(Case, "xs", return_value=xs):
                    case.compare(c, *results)
            assert c.check() is None
    return outcomes


def assert_compared(field: str, found: list[list[str | None]]) -> None:
    for toggle, outcomes in zip(TOGGLES[field], zip(*found, strict=True), strict=True):
        if outcomes[0] is None:
            continue
        for text in outcomes:
            assert text is not None
            assert (toggle.text or "results") in text, (toggle, outcomes)
            assert f" of {len(found)}x{2 * channel.WORDS} " not in text, "names the channel's call"


@pytest.mark.sampled(2)
@on(cpu=(2,))
@pytest.mark.parametrize("field", TOGGLES)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "unfused"])
def test_a_field_changed_by_one_rank(
    pool: RankPool, algorithm: str, sharded: bool, field: str
) -> None:
    if sharded and algorithm == "one_shot":
        pytest.skip("a sharded residual goes by two_shot")
    assert_compared(field, pool.run(diverge, field, algorithm, sharded, "auto"))


@pytest.mark.sampled(6)
@on(cpu=(2, 4))
@pytest.mark.parametrize("field", TOGGLES)
@pytest.mark.parametrize(
    "sharded",
    [pytest.param(False, id="whole"), pytest.param(True, id="sharded", marks=pytest.mark.long)],
)
def test_a_field_changed_by_one_rank_over_islands(
    pool: RankPool, sharded: bool, field: str
) -> None:
    islands = ALONE if pool.world_size == 2 else PAIRS
    for algorithm in ("hierarchical",) if pool.world_size == 4 else ("hierarchical", "unfused"):
        assert_compared(field, pool.run(diverge, field, algorithm, sharded, islands))


@on(cpu=(2, 3))
def test_an_announcement_is_not_mistaken_for_rows(rank: int, world_size: int) -> None:
    """The last rank gathers rows of the same shape as an announcement."""
    with allnorm.Communicator(device=device(), timeout=TIMEOUT) as c:
        rows, x = torch.ones(1, 2 * channel.WORDS), torch.ones(8, 64)
        gather = rank == world_size - 1
        with pytest.raises(allnorm.PeerDivergedError) as caught:
            c.all_gather_rows(rows, world_size) if gather else c.all_reduce(x, algorithm="unfused")
    text = str(caught.value)
    assert "op is " in text
    assert "all_reduce of 8x64 float32 by unfused" in text
    assert f"all_gather_rows of {world_size}x{2 * channel.WORDS} float32" in text


@on(cpu=(2,))
def test_a_timeout_names_the_call_and_not_that_of_the_channel(rank: int, world_size: int) -> None:
    with allnorm.Communicator(device=device(), timeout=1) as c:
        if rank == 0:
            with pytest.raises(allnorm.PeerTimeoutError) as caught:
                c.all_reduce(torch.ones(8, 64), algorithm="unfused")
            expected = "Expected operation 0: all_reduce of 8x64 float32 by unfused"
            assert expected in str(caught.value)
        dist.barrier()


# ---- Announcements -------------------------------------------------------------------------------


def announced(**changes: Any) -> Announcement:
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    call = Call(op="all_reduce_add_rms_norm", source=x, residual=x, weight=x[0], **changes)
    prepared = PreparedCall(call, Plan("unfused", "a test", 1))
    prepared.bind(call, {"out": x, "residual_out": x})
    return Announcement.of(prepared)


def test_every_field_of_the_c_call_is_compared_or_local() -> None:
    fields = [name for name, *_ in _native.Call._fields_]
    assert set(announcement.LOCAL) <= set(fields), "a field that no longer exists is listed"
    assert tuple(n for n in fields if n not in announcement.LOCAL) == announcement.FIELDS
    assert channel.WORDS == len(announcement.FIELDS) == len(announced().words)
    assert set(announcement.FIELDS) >= {"op", "flags", "eps", "residual", "out", "post_weight"}


def test_a_new_field_is_compared() -> None:
    """Adds a field to the C call; the module `announcement` must pick it up unchanged."""
    script = (
        "import ctypes\n"
        "from allnorm.core import _native\n"
        "class Call(ctypes.Structure):\n"
        "    _fields_ = [*_native.Call._fields_, ('temperature', ctypes.c_float)]\n"
        "_native.Call = Call\n"
        "from allnorm.core import announcement, channel\n"
        "assert announcement.FIELDS[-1] == 'temperature'\n"
        "assert channel.WORDS == len(announcement.FIELDS)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=HANG_SECONDS)


@pytest.mark.parametrize("field", announcement.FIELDS)
def test_a_differing_word_is_named(field: str) -> None:
    """Errors name the differing field, by its C name if it has no Python name."""
    mine = announced()
    changed = list(mine.words)
    place = announcement.FIELDS.index(field)
    is_float = dict(_native.Call._fields_)[field] is ctypes.c_float
    changed[place] = struct.unpack("=I", struct.pack("=f", 0.75))[0] if is_float else 1
    if changed[place] == mine.words[place]:
        changed[place] = 0
    other = Announcement(tuple(changed))
    assert other != mine
    text = mine.differences(0, other, 1)
    assert text.startswith("What differs: "), field
    assert " on rank 0 and " in text
    assert mine.differences(0, mine, 1) == ""
    assert mine.differences(0, Announcement.of_refusal(), 1) == ""
