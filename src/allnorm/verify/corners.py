"""A table of named corner cases: special calls that random cases would miss.

Tests run each corner with the numbers of ranks in its row; `allnorm verify` runs it with its own
ranks. A bug that shows only in one particular call gets a row here.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import allnorm
from allnorm.names import ALGORITHMS, BETWEEN_ISLANDS, FUSED, NUMERICS
from allnorm.testing import DTYPES, SENTINEL_WORDS
from allnorm.testing.rank import device
from allnorm.verify.calls import EXPERTS, SCALE_NAMES, specs
from allnorm.verify.case import VALUES, Case, Experts
from allnorm.verify.memory import Layout, Memory

Cases = tuple[Case, ...]


@dataclass(frozen=True)
class Corner:
    """A group of special calls that test the same thing."""

    check: str  # check of `allnorm verify` that runs the calls
    cases: Cases
    cpu: Sequence[int] = (2, 3)  # numbers of CPU ranks in tests
    gpu: Sequence[int] = (2, 8)  # numbers of GPUs in tests
    islands: tuple[tuple[int, ...], ...] | None = None  # None: one island
    workspace_bytes: int | None = None  # None: the default
    pieces: bool = False  # whether calls must take more than one launch
    policy: tuple[tuple[str, int], ...] = ()  # constants of `allnorm.policy` to set for the calls


def every(**axes: Any) -> Cases:
    """Returns a case for each combination of field values; only lists are alternatives."""
    lists = [values if isinstance(values, list) else [values] for values in axes.values()]
    return tuple(
        Case(**dict(zip(axes, chosen, strict=True))) for chosen in itertools.product(*lists)
    )


def varied(cases: Sequence[Case], **decks: Sequence[Any]) -> Cases:
    """Returns the cases with additional fields set at random, equally on every rank."""
    draw = random.Random(len(cases))
    return tuple(
        case.but(**{name: draw.choice(values) for name, values in decks.items()}, call=index)
        for index, case in enumerate(cases)
    )


def with_rows(tokens: Sequence[int], cases: Sequence[Case]) -> Cases:
    """Returns the cases with their numbers of rows taken from `tokens` in rotation."""
    turns = itertools.cycle(tokens)
    return tuple(case.but(shape=(next(turns), case.hidden_size)) for case in cases)


def possible(cases: Sequence[Case]) -> Cases:
    """Returns the cases, with conflicting options resolved."""
    return tuple(case.possible() for case in cases)


def each(cases: Sequence[Case], variants: Sequence[dict[str, Any]]) -> Cases:
    """Returns each case with each of the variants, which set further fields."""
    return tuple(case.but(**variant) for case in cases for variant in variants)


def _then_new(cases: Sequence[Case]) -> Cases:
    """Returns each case followed by the same call in new memory."""
    return tuple(one for case in cases for one in (case, case.but(memory=Memory())))


def _blocks(size: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(low, low + size)) for low in range(0, world_size, size))


def _shapes(tokens: Sequence[int], hidden_sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(tokens, hidden_sizes))


AUTO = ["auto", *ALGORITHMS]
OWNED = ["auto", "two_shot", "unfused"]
DTYPE_LIST = list(DTYPES.values())
NARROW = [torch.float16, torch.bfloat16]
BOTH = [False, True]
MODES = list(NUMERICS)
WEIGHTS: dict[str, Sequence[Any]] = {
    "float32_weight": BOTH,
    "weight_bias": (0.0, 1.0, 0.25),
    "eps": (1e-6, 1e-5, 0.0, 1.0),
    "numerics": NUMERICS,
    "residual": (True, True, False),
    "float32_residual": (True, False, False),
}
WIDTHS = (1, 7, 120, 2304, 2880, 2944, 4095, 4096, 5760, 7168, 8192, 16384)

TMA = allnorm.Fp8PerGroup(64, "column_major_tma")
PACKED = allnorm.Fp8PerGroup(64, "column_major_tma", "ue8m0_packed")
SMALL = allnorm.Fp8PerGroup(16)
GIVEN = allnorm.Fp8PerTensor(torch.tensor([0.05]))
NV, NV_ROWS = (allnorm.NvFp4(torch.tensor([700.0]), *name) for name in ((), ("row_major",)))
TILES: list[Any] = [allnorm.MxFp8(), NV, NV_ROWS]
QUANTS: list[Any] = [PACKED, TMA, SMALL, allnorm.Fp8PerToken(), GIVEN, *TILES]
CHANGES: list[dict[str, Any]] = [
    {"post_norm": True},
    {"post_norm": True, "second_norm": False},
    {"scale": 0.22},
    {"post_norm": True, "scale": -1.5, "second_norm": False},
    {"float32_residual": True},
]
VARIANTS: list[dict[str, Any]] = [
    *({}, *CHANGES, {"experts": EXPERTS[1]}, {"experts": EXPERTS[4]}, {"sharded": True}),
    {"float32_residual": True, "sharded": True, "quant": PACKED},
    *({"quant": quant, "return_normed": True} for quant in QUANTS),
    *({"quant": quant, "sharded": True} for quant in (PACKED, SMALL, *TILES)),
]
IN_PLACE = Memory(out="x", residual_out="residual")
PAIRS = _blocks(2, 4)


# ---- ExpertSums as they occur in serving ---------------------------------------------------------


def _index(case: Case, *rows: Sequence[int]) -> torch.Tensor:
    """Returns an index; token i chooses `rows[i]`, starting over after the last of `rows`."""
    chosen = [rows[token % len(rows)] for token in range(case.num_tokens)]
    return torch.tensor(chosen, dtype=torch.int32, device=device())


def unused_nan(case: Case, rank: int) -> allnorm.ExpertSum:
    """Returns expert rows with NaN in a row that no token uses."""
    rows = case.rows(rank, 5).clone()
    rows[3] = torch.nan
    return allnorm.ExpertSum(rows, None, _index(case, (0, 4, 2, -1)))


def no_rows(case: Case, rank: int) -> allnorm.ExpertSum:
    """Returns an ExpertSum that has no rows on rank 0."""
    index = _index(case, (-1, 3) if rank else (-1, -1))
    return allnorm.ExpertSum(case.rows(rank, 4 if rank else 0), None, index)


def other_top_k(case: Case, rank: int) -> allnorm.ExpertSum:
    """Returns a different number of choices on each rank."""
    index = torch.arange(case.num_tokens * (rank + 1), dtype=torch.int32, device=device()) % 7
    return allnorm.ExpertSum(case.rows(rank, 7), None, index.view(case.num_tokens, rank + 1))


def odd_memory(case: Case, rank: int) -> allnorm.ExpertSum:
    """Returns strided and unaligned tensors."""
    tokens = case.num_tokens
    rows = Layout(offset=1).place(case.rows(rank, 3 * tokens))
    index = torch.zeros(tokens, 5, dtype=torch.int32, device=device())[:, 1:4]
    index[:] = torch.arange(3 * tokens, device=device()).view(tokens, 3) - 1
    weights = torch.rand(tokens, 7, generator=torch.Generator().manual_seed(rank)).to(device())
    shared = Layout(pad=136, offset=3).place(case.rows(rank + 8, tokens))
    return allnorm.ExpertSum(rows, weights[:, 2:5], index, shared)


def negated(case: Case, rank: int) -> allnorm.ExpertSum:
    """Returns weights that are negated views, with strided rows."""
    wide = torch.rand(case.num_tokens, 5, generator=torch.Generator().manual_seed(rank))
    index = torch.arange(2 * case.num_tokens, dtype=torch.int32, device=device()).view(-1, 2)
    weights = torch._neg_view(wide.to(device())[:, 1:3])
    return allnorm.ExpertSum(case.rows(rank, 2 * case.num_tokens), weights, index)


def repeated(case: Case, rank: int) -> allnorm.ExpertSum:
    """Returns one index shared by all tokens, and rows of stride 0."""
    index = _index(case, (2, 2, 0))[:1].expand(case.num_tokens, 3)
    return allnorm.ExpertSum(case.rows(rank, 1).expand(3, case.hidden_size), None, index)


def padding(case: Case, rank: int) -> allnorm.ExpertSum:
    """Returns NaN weights for tokens without experts."""
    weights = torch.full((case.num_tokens, 2), torch.nan, device=device())
    weights[::2] = 0.5
    return allnorm.ExpertSum(case.rows(rank, 2), weights, _index(case, (0, 1), (-1, -1)))


def no_such_row(case: Case, rank: int) -> allnorm.ExpertSum:
    """Returns invalid indices on one rank; the tokens that have them become NaN."""
    index = _index(case, (0, 1))
    if rank == 1:
        index[1, 0], index[2, 1], index[4, 1] = 2, -2, 2**31 - 1
    return allnorm.ExpertSum(case.rows(rank, 2), None, index)


INCIDENTS: list[Any] = [
    *(unused_nan, no_rows, other_top_k, odd_memory, negated, repeated, padding, no_such_row),
]


# ---- islands -------------------------------------------------------------------------------------


def _over_islands(tokens: Sequence[int], hidden_sizes: Sequence[int]) -> Cases:
    """Returns calls with both algorithms and both kinds of residual; other fields are random."""
    axes = {"sharded": BOTH, "algorithm": list(BETWEEN_ISLANDS), "dtype": DTYPE_LIST}
    return possible(
        varied(
            every(shape=_shapes(tokens, hidden_sizes), **axes),
            quant=(None, None, *QUANTS, allnorm.Fp8PerGroup(16, "column_major")),
            gather=BOTH,
            return_normed=BOTH,
            post_norm=BOTH,
            second_norm=BOTH,
            scale=(1.0, 1.0, 0.22),
            experts=(None, None, None, Experts(), Experts(3, False, True, False)),
            **WEIGHTS,
        )
    )


_OTHER_OPS = varied(
    every(
        op=["all_reduce", "all_gather_rows"],
        shape=_shapes((0, 1, 3, 10), (256,)),
        dtype=DTYPE_LIST,
        algorithm=list(BETWEEN_ISLANDS),
    ),
    memory=(Memory(), Memory(out="own"), Memory(x=Layout(256), results=Layout(8))),
)
_UNEVEN = every(
    shape=[(5, 256), (0, 256), (1, 120)],
    dtype=DTYPE_LIST,
    sharded=BOTH,
    algorithm=["auto", "unfused"],
    quant=[None, allnorm.Fp8PerToken()],
)
_UNEVEN += tuple(case.but(gather=False) for case in _UNEVEN if case.sharded)


# ---- the table -----------------------------------------------------------------------------------

# fmt: off
CORNERS: dict[str, Corner] = {
    "rounding modes, post norms, scales, no second norm": Corner(
        "post norms and experts",
        each(every(shape=(5, 1024), dtype=DTYPE_LIST, numerics=MODES, algorithm=AUTO,
                   residual=BOTH), [{}, *CHANGES]),
        (1, 2, 3, 5), range(1, 9)),
    "eps and weight_bias that are no float32, or extreme": Corner(
        "options",
        every(shape=(3, 264), dtype=DTYPE_LIST, eps=[0.0, 1e-45, 1e-6, 1e30], numerics=MODES,
              weight_bias=[0.0, 0.1, -1.0], float32_weight=True), gpu=(2, 3)),
    "weights of -0.0 with a weight_bias of either sign": Corner(
        "options",
        every(shape=(4, 64), float32_weight=True, weight_bias=[0.0, -0.0, 0.0],
              put=(("weight", ..., -0.0),)), (2,)),
    "hidden sizes: one column, no whole vectors, wider than a block; no tokens": Corner(
        "post norms and experts",
        varied(each(every(shape=_shapes((0, 1, 2, 5), WIDTHS), algorithm=list(FUSED),
                          dtype=DTYPE_LIST),
                    [{}, {"post_norm": True}, {"experts": Experts(2)}]), **WEIGHTS),
        (2, 3), range(2, 9)),
    "float32 residuals: every width, format and rounding mode, in place and apart": Corner(
        "post norms and experts",
        varied(every(shape=_shapes((0, 1, 5), (1, 7, 120, 2880, 2944, 5760)), dtype=NARROW,
                     float32_residual=True, algorithm=AUTO),
               numerics=MODES, float32_weight=BOTH, post_norm=(False, False, True),
               memory=(Memory(), IN_PLACE, Memory(residual=Layout(8), residual_out="residual"),
                       Memory(residual=Layout(3, 1), residual_out="own", results=Layout(5, 3))))
        + possible(varied(
            every(shape=_shapes((1, 3, 33), (2880, 5760)), dtype=NARROW, float32_residual=True,
                  quant=[SMALL, allnorm.Fp8PerToken(), GIVEN, *TILES], sharded=BOTH),
            numerics=MODES, return_normed=BOTH, scale=(1.0, 0.22), experts=(None, Experts()),
            kind=("normal", "sentinels"), memory=(Memory(), IN_PLACE))),
        (2, 3), range(1, 9)),
    "more rows than blocks": Corner(
        "options",
        each(every(shape=[(17, 4096), (64, 2304), (257, 120), (1025, 1024)], algorithm=AUTO),
             [{}, *CHANGES[:2], {"experts": EXPERTS[2]}, {"quant": allnorm.Fp8PerToken()}]),
        (2,), range(2, 9)),
    "prefill": Corner(
        "options",
        varied(every(shape=[(2048, 4096), (777, 7168), (300, 16384)], dtype=DTYPE_LIST,
                     quant=[None, TMA, GIVEN, *TILES], algorithm=["one_shot", "two_shot", "auto"]),
               numerics=MODES)
        + every(shape=(2048, 4096), dtype=DTYPE_LIST, sharded=True, quant=[None, PACKED, GIVEN, NV])
        + every(shape=(129, 20480), dtype=DTYPE_LIST),  # too wide for a fused kernel
        (), (2, 3, 8)),
    "leading dimensions": Corner(
        "options",
        each(every(shape=[(64,), (2, 3, 64), (2, 1, 3, 64), (0, 3, 64), (2, 0, 64)],
                   algorithm=AUTO), [*VARIANTS[:6], *VARIANTS[8:]]),
        (2, 3, 4), (2, 4, 8)),
    "fewer rows than ranks: sharded and gathered": Corner(
        "sharded residual",
        varied(every(op=["norm", "all_gather_rows"], dtype=DTYPE_LIST, algorithm=AUTO, sharded=True,
                     shape=_shapes((0, 1, 2, 3, 5, 7, 33), (1, 7, 1024)),
                     kind=["normal", "sentinels"]),
               memory=(Memory(), Memory(Layout(8), Layout(8), out="own", results=Layout(8)),
                       Memory(Layout(3), Layout(0, 1), out="own", results=Layout(3, 1)))),
        (1, 2, 3, 5), (1, 2, 3, 8)),
    "rows of this rank only": Corner(
        "sharded residual",
        varied(each(every(shape=_shapes((0, 1, 2, 7, 33, 131), (120, 1024)), dtype=DTYPE_LIST,
                          algorithm=OWNED, sharded=True, gather=False),
                    [{}, *CHANGES, {"experts": EXPERTS[1]}]), **WEIGHTS)
        + possible(every(shape=_shapes((0, 1, 5, 35), (2880, 2944)), algorithm=OWNED, sharded=True,
                         gather=False, quant=[*QUANTS, allnorm.Fp8PerToken()],
                         return_normed=BOTH)),
        (1, 2, 3), (1, 2, 3, 8)),
    "values: zeros, denormals, overflow, NaN, infinities, words of a transport": Corner(
        "special values",
        each(every(shape=(7, 256), kind=list(VALUES), dtype=DTYPE_LIST, algorithm="two_shot"),
             VARIANTS)
        + every(shape=(7, 256), kind=list(VALUES), dtype=DTYPE_LIST, residual=BOTH,
                algorithm=["one_shot", "unfused"], quant=[None, *QUANTS])
        + every(shape=(7, 256), kind=list(VALUES), dtype=DTYPE_LIST, numerics="vllm"),
        (2, 3), (1, 2, 3, 8)),
    "every word of a transport in every position is ordinary data": Corner(
        "sentinel patterns",
        # 24 words x 5 positions = 120 packs per cycle; 16 rows of 64 packs hold all of them
        tuple(case for dtype in DTYPE_LIST for case in every(
            op=["norm", "all_reduce"], shape=(16, 64 * 16 // dtype.itemsize), dtype=dtype,
            kind=["sentinels", "finite_sentinels"], algorithm=AUTO, call=[0, 1, 2])),
        (1, 2, 3), (2, 3, 8)),
    "nothing but one word": Corner(
        "sentinel patterns",
        every(shape=(4, 256), dtype=DTYPE_LIST, algorithm=list(FUSED),
              kind=[f"word {word:#x}" for word in SENTINEL_WORDS])),
    "a NaN in one place stays in its row or column": Corner(
        "special values",
        every(shape=(5, 1032), algorithm=AUTO, put=[
            ((name, index, torch.nan),)
            for name, index in (("x1", (2, 1000)), ("residual", (2, 3)), ("weight", 9))])),
    "results: one or both in place, whole and sharded": Corner(
        "in place",
        every(shape=_shapes((1, 5, 40), (7, 120, 4096)), dtype=DTYPE_LIST, algorithm=AUTO,
              memory=[Memory(out="x"), Memory(residual_out="residual"), IN_PLACE])
        + every(shape=_shapes((0, 1, 3, 7, 33), (264,)), dtype=DTYPE_LIST, sharded=True,
                memory=[IN_PLACE, Memory(residual=Layout(6, 3), residual_out="residual")])
        + every(op="all_reduce", shape=[(5, 120), (40, 7)], algorithm=AUTO, memory=Memory(out="x")),
        (1, 2, 3), (1, 2, 3, 8)),
    "in place in rows that lie apart, of several dimensions": Corner(
        "in place",
        # three times, because repeated calls take a different path
        every(shape=(2, 3, 72), algorithm=AUTO, op=["norm", "all_reduce"], memory=[
            Memory(one, one, out="x", residual_out="residual")
            for one in (Layout(8), Layout(reverse=True))]) * 3,
        (1, 2, 3), (1, 2)),
    "memory for results: strided, unaligned, and new again afterwards": Corner(
        "strided rows",
        _then_new(every(shape=(6, 264), algorithm=AUTO, memory=[
            Memory(out="own", residual_out="own", results=Layout(*where))
            for where in ((0, 0), (8, 0), (3, 0), (0, 1), (8, 8), (5, 3))])),
        (1, 2), (1, 2, 8)),
    "inputs: strided, unaligned": Corner(
        "strided rows",
        every(op=["norm", "all_reduce"], shape=[(1, 520), (9, 520)], dtype=DTYPE_LIST,
              algorithm=AUTO, memory=[Memory(Layout(*where), Layout(*where), where[1])
                      for where in ((8, 0), (3, 0), (0, 1), (16, 8), (5, 3), (4096, 0))]),
        (1, 2, 3), (1, 2, 8)),
    "inputs: aligned after unaligned, and the other way round": Corner(
        "strided rows",
        tuple(Case((4, 64), memory=Memory(Layout(*where), Layout(16, where[1])))
              for where in ((0, 0), (0, 1), (0, 0), (8, 1), (8, 0), (8, 1))), (2,), (2,)),
    "views: reversed dimensions, one row for all tokens, every second row, one column": Corner(
        "strided rows",
        every(shape=(4, 6, 64), dtype=DTYPE_LIST, quant=[None, allnorm.Fp8PerToken()],
              memory=Memory(Layout(reverse=True)))
        + every(shape=(5, 64), kind="equal_rows", residual=BOTH, memory=Memory(Layout(expand=True)))
        + every(shape=(5, 64), memory=Memory(Layout(pad=64)))
        + every(op="all_reduce", shape=(6, 1), memory=Memory(Layout(pad=3))), (1, 2), (1, 2)),
    "chunks: more rows than the workspace holds": Corner(
        "chunks",
        every(shape=[(1, 512), (50, 512), (200, 120), (333, 64)], algorithm=list(FUSED),
              memory=[Memory(), Memory(out="x")])
        + every(shape=(133, 512), algorithm=list(FUSED), quant=QUANTS, return_normed=BOTH)
        + every(shape=[(1, 512), (50, 512), (131, 512)], sharded=True, quant=[None, *QUANTS])
        + every(op="all_gather_rows", shape=[(300, 512), (77, 4096)]),
        (2, 3, 8), (2, 3, 8), workspace_bytes=64 << 10, pieces=True),
    "chunks of tiles: rows keep their place": Corner(
        "chunks",
        every(shape=(400, 512), algorithm=list(FUSED), quant=TILES)
        + every(shape=(400, 512), sharded=True, quant=TILES),
        (2,), (2,), workspace_bytes=256 << 10, pieces=True),
    "every scale": Corner(
        "quantization",
        with_rows((0, 1, 2, 3, 5, 7, 8), varied(tuple(
            case for width in (7, 16, 48, 96, 120, 144, 160, 1024, 2880, 2944)
            for case in every(shape=(1, width), quant=specs(width), algorithm=AUTO)),
            dtype=DTYPE_LIST, return_normed=BOTH, **WEIGHTS)),
        (1, 2, 3), (1, 2, 3, 4, 8)),
    "scales of wide rows, whose last groups fill no vector": Corner(
        "quantization",
        with_rows((1, 2, 5, 33), every(
            shape=(1, 5760), algorithm=AUTO, quant=[
                *TILES, *(allnorm.Fp8PerGroup(128, *name) for name in SCALE_NAMES)])
            + every(shape=(1, 7168), quant=[allnorm.Fp8PerGroup(512, *n) for n in SCALE_NAMES]))),
    "tiles of scales: more rows than one holds, groups that fill none": Corner(
        "quantization",
        varied(every(shape=[(129, 1024), (130, 160), (300, 96), (33, 32), (0, 96)], quant=TILES,
                     dtype=DTYPE_LIST, algorithm=list(ALGORITHMS))
               + every(shape=[(129, 1024), (131, 160)], quant=TILES, sharded=True, algorithm=OWNED),
               return_normed=BOTH, **WEIGHTS),
        (1, 2, 3), (1, 2, 3, 4, 8)),
    "given scales: zero, negative, denormal, infinite, NaN": Corner(
        "quantized special values",
        every(shape=(4, 64), dtype=DTYPE_LIST, algorithm=AUTO, quant=[
            *(allnorm.Fp8PerTensor(torch.tensor([value]))
              for value in (0.0, -0.0, -2.5, 1e-38, 1e-45, 1e38, torch.inf, torch.nan)),
            *(allnorm.NvFp4(torch.tensor([value])) for value in (1.0, 0.02, 1e-30, 2688.0))]),
        (2,), (2,)),
    "groups of zeros of both signs, of a NaN and of an infinity": Corner(
        "quantized special values",
        every(shape=(5, 256), float32_weight=True, weight_bias=[0.0, -0.0], algorithm=AUTO,
              quant=[allnorm.Fp8PerGroup(32), allnorm.Fp8PerGroup(32, "row_major", "ue8m0"),
                     allnorm.Fp8PerGroup(16, "column_major_tma", "ue8m0_packed"), *TILES],
              put=(("weight", slice(32, 64), 0.0), ("weight", slice(64, 96), -0.0),
                   ("weight", 130, torch.nan), ("weight", 200, torch.inf))),
        (1, 2), (1, 2)),
    "quantized results: in place, strided, unaligned, and new again afterwards": Corner(
        "in place",
        _then_new(every(
            shape=(7, 320), algorithm=OWNED, sharded=BOTH,
            quant=[*QUANTS, allnorm.Fp8PerGroup(64), allnorm.Fp8PerGroup(64, "column_major")],
            memory=[IN_PLACE, Memory(out="own", residual_out="own", results=Layout(8)),
                    Memory(Layout(3), Layout(5, 3), 1, out="own", results=Layout(5, 3))])),
        (1, 2, 3), (1, 2)),
    "experts: every kind": Corner(
        "post norms and experts",
        every(shape=(5, 1024), dtype=DTYPE_LIST, algorithm=AUTO, residual=BOTH, experts=EXPERTS)
        + each(every(shape=_shapes((0, 1, 5, 33), (256,)), sharded=BOTH, algorithm=OWNED,
                     experts=EXPERTS[:2], post_norm=BOTH),
               [{"quant": quant} for quant in (None, PACKED, GIVEN, *TILES)]),
        (1, 2, 3), range(1, 9)),
    "experts as serving brings them: tokens without any, ranks without rows, odd memory": Corner(
        "post norms and experts",
        every(shape=(9, 264), algorithm=AUTO, experts=[
            Experts(4, True, shared, True, absent) for shared in BOTH for absent in (0.9, 1.0)])
        + every(shape=(6, 264), algorithm=AUTO, experts=INCIDENTS) * 3,
        (1, 2, 3), (1, 2, 3)),
    "without an exchange": Corner(
        "options",
        varied(tuple(case for width in (7, 144, 512)
                     for case in every(op="local", shape=(5, width), quant=[None, *specs(width)]))
               + every(op="local", shape=(5, 2880), experts=EXPERTS, quant=[None, TMA],
                       post_norm=BOTH)
               + each(every(op="local", shape=(3, 264)), CHANGES),
               dtype=DTYPE_LIST, scale=(1.0, 2.0), **WEIGHTS),
        (1,), (1,)),
    "unfused calls in pieces": Corner(
        "chunks",
        possible(every(shape=_shapes((3, 33, 35), (256,)), quant=[None, *specs(256)], sharded=BOTH,
                       algorithm="unfused", return_normed=True)),
        gpu=(2, 3), pieces=True, policy=(("UNFUSED_GATHER_BYTES", 5 * 2 * 256 * 2),)),
    "two islands": Corner(
        "islands",
        _over_islands((0, 1, 2, 5, 9, 40), (256, 1024)) + _over_islands((3,), (1, 7, 120, 4095))
        + _OTHER_OPS
        + every(shape=(11, 256), sharded=BOTH, quant=[None, PACKED, NV], memory=IN_PLACE),
        (4,), (4,), PAIRS),
    "three islands": Corner(
        "islands",
        _over_islands((0, 1, 2, 5, 9, 40), (256,)) + _OTHER_OPS, (6,), (), _blocks(2, 6)),
    "islands of three": Corner(
        "islands", _over_islands((0, 1, 4, 7, 29), (384,)), (6,), (), _blocks(3, 6)),
    "four islands": Corner("islands", _over_islands((1, 3, 21), (256,)), (8,), (), _blocks(2, 8)),
    "two islands of one rank": Corner(
        "islands",
        _over_islands((0, 1, 2, 5), (256, 120)), (2,), (2,), _blocks(1, 2)),
    "three islands of one rank": Corner(
        "islands",
        _over_islands((0, 1, 2, 5), (256, 120)), (3,), (), _blocks(1, 3)),
    "islands whose launches are cut into chunks": Corner(
        "islands",
        every(shape=(257, 512), dtype=torch.float32, sharded=BOTH, quant=[None, TMA],
              algorithm="hierarchical"),
        (4,), (), PAIRS, workspace_bytes=64 << 10),
    "sums between islands in pieces of a few rows": Corner(
        "islands",
        every(shape=(10, 256), dtype=torch.float32, quant=[None, *QUANTS[:5]],
              experts=[None, Experts(), Experts(2, True, True, False)], algorithm="hierarchical"),
        (4,), (4,), PAIRS, pieces=True, policy=(("HIERARCHICAL_SUM_BYTES", 4 * 256 * 3),)),
    "uneven islands": Corner("islands", _UNEVEN, (4,), (4,), ((0, 1, 2), (3,))),
    "islands that do not follow each other": Corner(
        "islands", _UNEVEN, (4,), (4,), ((0, 2), (1, 3))),
    "islands that lie in each other": Corner("islands", _UNEVEN, (4,), (4,), ((0, 3), (1, 2))),
}
# fmt: on
