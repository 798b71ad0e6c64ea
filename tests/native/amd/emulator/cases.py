"""Calls for the emulator: short ones for every commit, and one for every kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from native.sass.kernels import ANY_WORLD_SIZE, Variant, all_variants, traits

from .calls import MOST_INSTRUCTIONS, Call, Edit, Group, Outcome
from .machine import Settings

GFX942, GFX950 = "gfx942", "gfx950"
# AllnormOp
ADD_RMS_NORM, ALL_GATHER_ROWS, SUM_ROWS, RMS_NORM_SHARDED = range(1, 5)
HYPER_CONNECTION, QUANTIZE = 5, 6
STREAM_INPUT = -2  # no AllnormOp: see input_call.h
ONE_SHOT, TWO_SHOT = 0, 1
SHARDED = 2  # ALLNORM_RESIDUAL_SHARDED
FLOAT32_RESIDUAL = 128  # ALLNORM_FLOAT32_RESIDUAL
NO_GATHER = 256  # ALLNORM_NO_GATHER
PER_GROUP, PER_TOKEN, NVFP4 = 1, 2, 4
WRAPS = 0xFFFFFFFD  # the counter of operations wraps after three


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls of a group, one after the other.

    Attributes:
        name: For the test's report.
        cpu: The GPU.
        ranks: The number of ranks.
        calls: The calls.
        late: Ranks that begin late.
        first_op: The number of the first operation.
    """

    name: str
    cpu: str
    ranks: int
    calls: tuple[Call, ...]
    late: tuple[int, ...] = ()
    first_op: int = WRAPS

    def run(
        self,
        settings: Settings,
        *,
        edit: Edit | None = None,
        faults: tuple[str, ...] = (),
        caches_workspaces: bool = False,
        most_instructions: int = MOST_INSTRUCTIONS,
    ) -> Outcome:
        """Runs the calls with the settings' seed; see Group.run()."""
        group = Group(
            self.ranks,
            self.cpu,
            settings.seed,
            first_op=self.first_op,
            workspace_bytes=workspace_bytes(self.ranks, self.calls),
        )
        for call in self.calls:
            group.add(call)
        return group.run(
            settings,
            late=self.late,
            edit=edit,
            faults=faults,
            caches_workspaces=caches_workspaces,
            most_instructions=most_instructions,
        )


def workspace_bytes(ranks: int, calls: tuple[Call, ...]) -> int:
    """Returns a size in which every call fits into one launch."""
    most = max(call.rows * call.hidden for call in calls) * 4 * (ranks + 1)
    size = 1 << 20
    while size < 4 * most:
        size *= 2
    return size


FP8 = {"quant": PER_GROUP, "group_size": 128}


def slices(rows: int, *sizes: int, dtype: str = "Bfloat16", **options: Any) -> Call:
    """Returns a call that norms rows of which every rank has a slice."""
    return Call(rows, op=RMS_NORM_SHARDED, dtype=dtype, slices=sizes, **options)


def streams(rows: int, hidden: int, count: int, **options: Any) -> Call:
    """Returns a call that mixes residual streams."""
    return Call(rows, hidden, op=HYPER_CONNECTION, streams=count, **options)


# With the kernels of these cases, each kind of kernel, dtype and number of ranks occurs.
SHORT = (
    Case("one_shot", GFX942, 2, (Call(3, 4096), Call(4, 2880, values="nasty"), Call(2, 64))),
    Case("zeros", GFX942, 2, (Call(2, 2880, values="zeros"), Call(1, 4096, values="finite"))),
    Case("modes", GFX942, 2,
         tuple(Call(2, 520, numerics=n, float32_weight=n < 2) for n in range(4))),
    Case("many_operations", GFX942, 2, tuple(Call(1 + n % 3, 64) for n in range(40))),
    Case("late", GFX942, 2, (Call(3, 512), Call(3, 512), Call(3, 512)), late=(1,)),
    Case("one_shot_8", GFX942, 8, (Call(1, 4096), Call(4, 2880, values="nasty"))),
    Case("prefetch", GFX942, 2, tuple(Call(1 + n % 3, 4096, num_blocks=4, prefetch=True)
                                      for n in range(4))),
    Case("late_8", GFX942, 8, (Call(2, 1024), Call(2, 1024)), late=(0, 5)),
    Case("two_shot_8", GFX942, 8, (Call(2, 4096, algorithm=1), Call(5, 2880, algorithm=1))),
    Case("owned_sum_4", GFX950, 4, (Call(5, 512, algorithm=1, dense=True),
                                    Call(6, 2880, algorithm=1, dense=True))),
    Case("fp8", GFX950, 2, (Call(3, 4096, **FP8), Call(2, 2048, **FP8, scale_format=1),
                            Call(3, 7168 // 2, **FP8, scale_format=2, normed=False))),
    Case("fp8_nasty", GFX950, 2, (Call(3, 4096, **FP8, values="nasty"),
                                  Call(2, 4096, **FP8, values="zeros"))),
    Case("fp8_sharded", GFX950, 2, (Call(5, 1024, algorithm=1, flags=SHARDED, **FP8, normed=False),
                                    Call(4, 1024, algorithm=1, flags=SHARDED, **FP8))),
    Case("any_number", GFX950, 3, (Call(3, 520, dtype="Float16"),
                                   Call(2, 2880, dtype="Float16", values="nasty"))),
    Case("wide", GFX942, 2, (Call(3, 7168), Call(2, 5120, values="nasty"),
                              Call(2, 5760, flags=FLOAT32_RESIDUAL, values="nasty"))),
    Case("wide_two_shot", GFX950, 2, (Call(2, 7168, algorithm=1), Call(1, 16384, algorithm=1))),
    Case("gathered", GFX942, 2, (Call(5, 512, op=ALL_GATHER_ROWS, algorithm=1, dtype="Float32"),)),
    Case("sharded", GFX942, 2, (
        Call(5, 1000, algorithm=1, flags=SHARDED, dtype="Float32"),
        Call(4, 512, algorithm=1, flags=SHARDED | NO_GATHER, dtype="Float32", values="nasty"))),
    Case("experts", GFX950, 2, (Call(3, 1024, experts=True), Call(2, 520, post_norm=True),
                                Call(3, 2880, flags=FLOAT32_RESIDUAL))),
    Case("slices", GFX942, 2, (slices(3, 1024, 128), slices(2, 5120, values="nasty"),
                               slices(1, 8, 2880, 64, 16))),
    Case("slices_8", GFX942, 8, (slices(2, 128, 1024), slices(3, 512, values="nasty")), late=(3,)),
    Case("streams", GFX942, 2, (streams(3, 512, 4), streams(2, 2880, 7, values="nasty"),
                                streams(2, 520, 3, flags=FLOAT32_RESIDUAL))),
    Case("streams_8", GFX942, 8, (streams(2, 512, 8, flags=FLOAT32_RESIDUAL),
                                  streams(3, 1024, 4, values="nasty")), late=(6,)),
)  # fmt: skip

# With these, the long run has each source, transport and epilogue.
MORE = (
    Case("own_rows", GFX942, 2, (Call(5, 520, algorithm=1, flags=SHARDED | NO_GATHER),
                                 Call(4, 512, algorithm=1, flags=SHARDED | NO_GATHER
                                      | FLOAT32_RESIDUAL, values="nasty"))),
    Case("own_rows_8", GFX950, 8, (Call(13, 512, algorithm=1, flags=SHARDED | NO_GATHER),
                                   Call(16, 1024, algorithm=1, flags=SHARDED | NO_GATHER,
                                        **FP8))),
    Case("float32_residual_8", GFX942, 8, (
        Call(9, 512, algorithm=1, flags=SHARDED | FLOAT32_RESIDUAL, values="nasty"),
        Call(2, 2880, flags=FLOAT32_RESIDUAL, dtype="Float16"))),
    Case("islands", GFX942, 2, (Call(3, 512, op=SUM_ROWS, algorithm=1, experts=True),
                                Call(4, 512, algorithm=1, islands=3),
                                Call(5, 520, algorithm=1, islands=2, flags=SHARDED))),
    Case("islands_8", GFX950, 8, (Call(9, 512, op=SUM_ROWS, algorithm=1),
                                  Call(9, 512, algorithm=1, islands=2))),
    Case("streams_dense", GFX942, 2, (streams(3, 512, 4, dense=True), streams(2, 64, 2, dense=True),
                                      streams(6, 520, 3, dense=True, values="nasty"))),
    Case("streams_two_shot", GFX942, 2, (streams(3, 512, 4, algorithm=1),
                                         streams(2, 4096, 5, algorithm=1, values="nasty"),
                                         streams(2, 512, 6, algorithm=1, flags=FLOAT32_RESIDUAL))),
    Case("streams_two_shot_8", GFX950, 8, (
        streams(2, 512, 4, algorithm=1), streams(3, 1024, 8, algorithm=1, flags=FLOAT32_RESIDUAL),
        streams(1, 4096, 3, algorithm=1, values="nasty"))),
    Case("slices_reused", GFX942, 2, tuple(slices(1 + n % 3, 64, 512) for n in range(36))),
    Case("streams_reused", GFX942, 2, tuple(streams(1 + n % 3, 512, 2 + n % 7) for n in range(36))),
)  # fmt: skip


def _call_for(variant: Variant, rows: int, hidden: int) -> Call:
    kind = variant.kind
    two_shot = kind.startswith(("two_shot", "owned"))
    quant: dict[str, int] = {}
    if variant.quantized:
        extended = variant.extended and rows % 2 == 0
        quant = {"quant": NVFP4} if extended else dict(FP8)
        hidden = hidden // 128 * 128
    op = ALL_GATHER_ROWS if kind == "owned_given" else ADD_RMS_NORM
    of_islands = kind.startswith("owned") and variant.extended and rows > 2
    if of_islands and kind == "owned_finished" and not variant.quantized and rows == 4:
        return Call(rows, hidden, op=SUM_ROWS, algorithm=TWO_SHOT, dtype=variant.dtype)
    return Call(
        rows,
        hidden,
        op=op,
        islands=rows - 1 if of_islands else 0,
        algorithm=TWO_SHOT if two_shot else ONE_SHOT,
        dtype=variant.dtype,
        flags=SHARDED if kind == "owned_finished" else 0,
        dense=kind in ("one_shot_dense", "owned_sum", "owned_sum_few"),
        experts=variant.features == "kExtended",
        post_norm=variant.extended and kind != "owned_given",
        values="mixed" if rows % 3 else "nasty",
        **quant,
    )


# So many operations write to slots again, while stores of earlier ones are late and torn.
REUSED = (
    Case("one_shot_reused", GFX942, 2, tuple(Call(1 + n % 3, 1024, few=False) for n in range(36))),
    Case(
        "two_shot_reused", GFX942, 2, tuple(Call(1 + n % 3, 1024, algorithm=1) for n in range(36))
    ),
)


def _slices_for(variant: Variant, number: int) -> Call:
    """Returns a call for a kernel of slices; local: of as many ranks' slices."""
    sizes = ((128,), (1024, 8), (2880, 64, 512), (8, 16, 4104, 1024))[number % 4]
    if variant.is_local and number % 2:
        sizes = tuple(size + 3 for size in sizes)  # no whole packs
    return slices(
        1 + number,
        *sizes,
        dtype=variant.dtype,
        values="nasty" if number == 2 else "mixed",
        sources=(1, 2, 5, 8)[number % 4] if variant.is_local else 0,
    )


def _streams_for(variant: Variant, number: int) -> Call:
    """Returns a call for a kernel of streams; local: of as many sources."""
    wide = number % 2 == 1 and variant.dtype != "Float32" and "dense" not in variant.kind
    dense = variant.kind.endswith("dense")
    hidden = (64, 512, 1440, 264)[number % 4]
    experts = variant.features == "kExperts"
    sources = 1 if experts else (1, 2, 4, 8)[number % 4]
    if variant.is_local and number in (1, 2):
        hidden += 3  # no whole packs
    return streams(
        1 + number,
        hidden,
        (2, 4, 3, 4)[number % 4] if dense else (2, 8, 5, 4)[number % 4],
        algorithm=TWO_SHOT if variant.kind.endswith("two_shot") else ONE_SHOT,
        dtype=variant.dtype,
        flags=FLOAT32_RESIDUAL if wide else 0,
        dense=dense,
        values="nasty" if number == 2 else "mixed",
        sources=sources if variant.is_local else 0,
        experts=experts,
    )


def _inputs_for(variant: Variant, number: int) -> Call:
    """Returns a call for a kernel that makes layers' inputs."""
    hidden = (64, 512, 1440, 264)[number % 4]
    return Call(
        1 + number,
        hidden + 3 if variant.kind.endswith("_any") else hidden,
        op=STREAM_INPUT,
        dtype=variant.dtype,
        streams=(4, 8, 3, 5)[number % 4],
        values="nasty" if number == 2 else "mixed",
        sources=1,
    )


def _local_calls_for(variant: Variant) -> tuple[Call, ...]:
    """Returns calls of one rank for a local kernel that norms rows."""
    widths = {"local_rows": (512, 1440), "local_aligned": (512, 7168), "local_any": (7, 2875)}
    norms = tuple(
        Call(
            1 + k,
            hidden,
            dtype=variant.dtype,
            dense=variant.kind == "local_aligned",
            experts=variant.extended and sources == 1,
            post_norm=variant.extended and sources > 1,
            values=values,
            quant=PER_TOKEN if variant.quantized else 0,
            sources=sources,
        )
        for k, (hidden, sources, values) in enumerate(
            (hidden, sources, "nasty" if sources == 5 else "mixed")
            for hidden in widths[variant.kind]
            for sources in (1, 2, 5)
        )
    )
    if not variant.quantized or variant.kind == "local_rows":
        return norms
    # Only local kernels for any width quantize rows alone.
    alone = tuple(
        Call(
            2 + number,
            hidden,
            op=QUANTIZE,
            dtype=variant.dtype,
            dense=True,
            values=("mixed", "nasty")[number],
            quant=NVFP4 if variant.extended and hidden % 16 == 0 else PER_TOKEN,
            normed=False,
            sources=1,
        )
        for number, hidden in enumerate(widths[variant.kind])
    )
    return (*norms, *alone)


def case_for(variant: Variant, cpu: str) -> Case:
    """Returns calls that run a kernel of the table, on some ranks if not on all."""
    name = "-".join(traits(variant))
    ranks = variant.world_size
    if ranks == ANY_WORLD_SIZE:
        ranks = 3 if variant.dtype != "Float32" else 5
    if variant.kind.endswith("slices"):
        if not variant.is_local:
            ranks = {"Bfloat16": 8, "Float16": 2, "Float32": 5}[variant.dtype]
        return Case(name, cpu, ranks, tuple(_slices_for(variant, k) for k in range(4)))
    if variant.mixes_streams or variant.kind == "local_streams":
        return Case(name, cpu, ranks, tuple(_streams_for(variant, k) for k in range(4)))
    if variant.kind.startswith("local_input"):
        return Case(name, cpu, ranks, tuple(_inputs_for(variant, k) for k in range(4)))
    if variant.is_local:
        return Case(name, cpu, ranks, _local_calls_for(variant))
    wide = variant.is_wide
    widths = (7168, 5120) if wide else (512, 1024, 2880)
    if variant.dtype == "Float32":
        widths = (2304, 4096) if wide else (256, 1024, 1440)
    calls = tuple(_call_for(variant, 1 + k, width) for k, width in enumerate((*widths, widths[0])))
    return Case(name, cpu, ranks, calls)


def all_kernels(cpu: str) -> Iterator[Case]:
    """Yields a case for every kernel."""
    for variant in sorted(all_variants(clusters=False), key=traits):
        yield case_for(variant, cpu)


def shapes(cpu: str) -> Iterator[Case]:
    """Yields 1 to 128 rows of the widths of models, with 2, 4 and 8 ranks."""
    for ranks in (2, 4, 8):
        for hidden in (2880, 4096, 7168):
            for rows in (1, 2, 3, 8, 16, 64, 128):
                quant = FP8 if cpu == GFX950 and hidden % 128 == 0 else {}
                for algorithm in (ONE_SHOT, TWO_SHOT):
                    call = Call(
                        rows, hidden, algorithm=algorithm, num_blocks=min(rows, 8) + 1, **quant
                    )
                    yield Case(f"{rows}x{hidden}, algorithm {algorithm}", cpu, ranks, (call,))


def shapes_of_others(cpu: str) -> Iterator[Case]:
    """Yields queries and keys of attention, and four streams, with 2, 4 and 8 ranks."""
    for ranks in (2, 4, 8):
        for rows in (1, 8, 64):
            blocks = min(rows, 8) + 1
            call = slices(rows, 8192 // ranks, 1024 // ranks, num_blocks=blocks)
            yield Case(f"{rows} rows of slices", cpu, ranks, (call,))
            for algorithm in (ONE_SHOT, TWO_SHOT):
                call = streams(rows, 4096, 4, algorithm=algorithm, num_blocks=blocks)
                yield Case(f"{rows} rows of streams, algorithm {algorithm}", cpu, ranks, (call,))
