"""Which kernels `csrc/gpu/instantiate.cuh` makes, and what each says to its peers."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

from native.accesses import read_table

TABLE = read_table()
DTYPES = ("Bfloat16", "Float16", "Float32")
ANY_WORLD_SIZE = 0  # what a kernel is compiled for that is told the number of ranks
MOST_RANKS = 8
FEW_WORLD_SIZE = 2
OWNED = ("owned_sum", "owned_finished", "owned_given")
OWNED_FEW = "owned_sum_few"

# gpu/formats.cuh
# and whether it is of the extended family
_FORMAT = r"NS_\d+(Plain|E4m3|AnyQuantized)ELb([01])EE"
_FUSED = re.compile(
    r"12fused_kernelINS_\d+(\w+?)ENS_\d+(Dense|Expert|PrefetchedExpert)RowsELi(\d+)ENS_7(One|Two)ShotE"
    r"LNS_4GridE([012])E" + _FORMAT
)
_GRIDS = ("", "_dense", "_few")
_OWNED = re.compile(
    r"17owned_rows_kernelINS_\d+(\w+?)ENS_(?:9Dense|10Expert)RowsELi(\d+)ELNS_5OwnedE([012])ELb([01])E"
    + _FORMAT
)
_LOCAL_ROWS = re.compile(
    r"17local_rows_kernelINS_\d+(\w+?)ENS_(?:10Summed|15LocalExpert)RowsE" + _FORMAT
)
_LOCAL = re.compile(r"12local_kernelINS_\d+(\w+?)ELb([01])E" + _FORMAT)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Strong accesses to workspaces, in bytes each, as often as they stand in the sources."""

    pushes: Counter[int]
    polls: Counter[int]


@dataclasses.dataclass(frozen=True)
class Variant:
    """The template arguments of a kernel."""

    kind: (
        # one_shot, also _dense, _few and, of two ranks where others have none, _experts,
        # _dense_experts; two_shot, one of OWNED; local, local_aligned, local_rows
        str
    )
    dtype: str
    world_size: int  # 1: local; ANY_WORLD_SIZE
    quantized: bool
    extended: bool = False  # knows numerics steps 0 and 1c, NVFP4, and scales in tiles

    @property
    def is_local(self) -> bool:
        return self.kind.startswith("local")

    @property
    def most_ranks(self) -> int:
        """How many there may be."""
        return MOST_RANKS if self.world_size == ANY_WORLD_SIZE else self.world_size

    @property
    def polled_together(self) -> tuple[int, ...]:
        """Loads of each group of polls for partial sums, wherever a pack is received.

        A kernel of any number of ranks has one for each that has no kernel of its own.
        """
        if self.world_size == ANY_WORLD_SIZE:
            own = world_sizes(self.dtype)
            return tuple(ranks for ranks in range(3, MOST_RANKS + 1) if ranks not in own)
        return (1 if self.world_size == 2 else self.world_size,)

    @property
    def traffic(self) -> Traffic:
        """What the sources say: exchange.cuh, fused.cuh, owned_rows.cuh and the transports.

        A group of polls loads the pack of every rank, of which the own one is predicated off; of
        two ranks it loads the other's alone.
        """
        ranks, peers = sum(self.polled_together), self.most_ranks - 1
        wide = {
            # sent: the first row, and one ahead; received: one group
            "one_shot": (2 * peers, ranks),
            "one_shot_experts": (2 * peers, ranks),
            # with a post norm the one ahead stands there twice, for when it is due
            "one_shot_dense": ((3 if self.extended else 2) * peers, ranks),
            "one_shot_dense_experts": (2 * peers, ranks),
            # sent: the first two rows, and one ahead; received: two looks, and one group of polls
            "one_shot_few": (3 * peers, 2 + ranks),
            # sent: the first row, and two ahead; relayed and received: the first row, and one ahead
            "two_shot": (3 + 2 * peers, 2 * ranks + 1),
            "owned_sum": (2 + peers, ranks + 1),
            OWNED_FEW: (2 + peers, ranks + 1),
            "owned_finished": (2 + peers, ranks + 1),
            "owned_given": (peers, 1),
        }[self.kind]
        pushes, polls = Counter({16: wide[0]}), Counter({16: wide[1]})
        parts = {"roll_call": 1, "hand_back": 1, "head": 1}
        if self.kind == "owned_finished" and self.quantized:
            parts |= {"packed_own": peers, "packed_receive": 1}
        for part, times in parts.items():
            for row in TABLE.part(part):
                verb = TABLE.verbs[row.verb]
                if verb.order == "weak" or verb.operation not in ("st", "ld"):
                    continue
                # A pack of float32 has half as many elements.
                halved = row.place == "finished" and self.dtype == "Float32"
                (pushes if verb.operation == "st" else polls)[verb.bytes // (1 + halved)] += times
        return Traffic(pushes, polls)

    @property
    def most_frame_bytes(self) -> int:
        """Local memory of a thread that is accepted: nvcc 13.0, sm_90.

        None in the kernels of few tokens, and none in those of rows with owners, but for formats of
        the extended family and finished rows of float32, both of many ranks. A product sweeps what
        was spilled out of the caches: it costs a call behind one up to a microsecond.
        `one_shot_dense` trades registers for two blocks an SM; of more than two ranks tables do not
        choose it.
        """
        if self.kind == "two_shot":
            return 32 if self.most_ranks > 4 and self.quantized and self.extended else 0
        if self.kind == "owned_finished" and self.most_ranks > 4:
            return 88 if self.dtype == "Float32" else 32 if self.extended else 0
        if self.kind == "one_shot_dense":
            return {2: 24 if self.extended else 8, 4: 32, 8: 112}[self.most_ranks]
        if self.kind == "local_rows" and self.quantized and self.extended:
            return 8
        if self.kind == "local_aligned":
            return 104 if self.extended else 24 if self.quantized else 0
        return 0


def variant_of(name: str) -> Variant | None:
    """What a mangled name says; None if it is no kernel of ours."""
    if match := _FUSED.search(name):
        dtype, source, ranks, transport, grid, quantized, extended = match.groups()
        kind = f"{transport.lower()}_shot{_GRIDS[int(grid)]}"
        # Of more ranks, and in two_shot, the extended family has only kernels that know experts.
        if source != "Dense" and transport == "One" and int(ranks) == 2:
            kind += "_experts"
        return Variant(kind, dtype, int(ranks), quantized != "Plain", extended == "1")
    if match := _OWNED.search(name):
        dtype, ranks, owned, few, quantized, extended = match.groups()
        kind = OWNED[int(owned)] + ("_few" if few == "1" else "")
        return Variant(kind, dtype, int(ranks), quantized != "Plain", extended == "1")
    if match := _LOCAL.search(name):
        dtype, aligned, quantized, extended = match.groups()
        kind = "local_aligned" if aligned == "1" else "local"
        return Variant(kind, dtype, 1, quantized != "Plain", extended == "1")
    if match := _LOCAL_ROWS.search(name):
        dtype, quantized, extended = match.groups()
        return Variant("local_rows", dtype, 1, quantized != "Plain", extended == "1")
    return None


def world_sizes(dtype: str) -> tuple[int, ...]:
    """What kernels of more than one rank are compiled for: gpu/params.h."""
    return (ANY_WORLD_SIZE, 2) if dtype == "Float32" else (ANY_WORLD_SIZE, 2, 4, 8)


def all_variants() -> set[Variant]:
    """Every kernel that a library has for each architecture."""
    kinds = [
        (kind, quantized, extended)
        for kind in ("one_shot", "one_shot_dense", "two_shot", *OWNED, OWNED_FEW)
        for quantized in (False, True)
        for extended in (False, True)
        if not (kind == "owned_given" and (quantized or extended))
        and not (kind == OWNED_FEW and extended)
    ]
    return (
        {
            Variant(kind, dtype, world_size, quantized, extended)
            for dtype in DTYPES
            for world_size in world_sizes(dtype)
            for kind, quantized, extended in kinds
            if kind != "one_shot_dense"
            or world_size == 2
            or (not extended and world_size != ANY_WORLD_SIZE)
        }
        | {
            Variant(kind, dtype, 2, quantized, True)
            for dtype in DTYPES
            for kind in ("one_shot_experts", "one_shot_dense_experts")
            for quantized in (False, True)
        }
        | {
            Variant("one_shot_few", dtype, FEW_WORLD_SIZE, quantized)
            for dtype in DTYPES
            for quantized in (False, True)
        }
        | {
            Variant(kind, dtype, 1, quantized, extended)
            for dtype in DTYPES
            for kind in ("local", "local_aligned", "local_rows")
            for quantized in (False, True)
            for extended in (False, True)
        }
    )
