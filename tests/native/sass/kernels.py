"""The kernels that `csrc/gpu/kernel_table.cuh` lists, and their accesses to workspaces."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import re
from collections import Counter
from collections.abc import Iterator

from native.accesses import read_table

TABLE = read_table()
KERNEL_TABLE = pathlib.Path(__file__).resolve().parents[3] / "csrc" / "gpu" / "kernel_table.cuh"
DTYPES = ("Bfloat16", "Float16", "Float32")
ANY_WORLD_SIZE = 0  # marks kernels that receive the world size at run time
MOST_RANKS = 8

# Copied from csrc/gpu: enumerations, the values of Features, and lists of formats.
_ENUMS = {"Grid": ("kSparse", "kDense", "kFew"), "Owned": ("kSum", "kFinished", "kGiven")}
_FEATURES = {
    "{}": "kBasic",  # clang's spelling
    "{false, false, false, false, false}": "kBasic",
    "{true}": "kExperts",  # likewise
    "{true, false, false, false, false}": "kExperts",
    "{true, true, true, true, true}": "kExtended",
    "{false, true, true, true, true}": "kExtendedDense",
}
_FEATURE_WORDS = {
    "kBasic": "basic",
    "kExperts": "experts",
    "kExtended": "extended",
    "kExtendedDense": "dense",
}
_FORMATS = {
    "OnlyPlain": ("Plain",),
    "kBasic": ("Plain", "E4m3"),
    "kExtended": ("Plain", "AnyQuantized"),
    "kExtendedDense": ("Plain", "AnyQuantized"),
}
_FUNCTIONS = {
    "Fused": "fused_kernel",
    "Owned": "owned_rows_kernel",
    "Local": "local_rows_kernel",
    "AnyRows": "local_kernel",
    "WideRows": "wide_rows_kernel",
    "Slices": "slices_kernel",
    "LocalSlices": "local_slices_kernel",
    "LocalStreams": "local_streams_kernel",
    "StreamInput": "stream_input_kernel",
    "ClusterInput": "cluster_input_kernel",
    "StreamsInput": "streams_input_kernel",
    "Team": "team_rows_kernel",
}
TEAM_PARTS = 4  # kTeamParts: packs of a row per thread


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Counts of strong workspace accesses in the sources, keyed by their size in bytes."""

    pushes: Counter[int]
    polls: Counter[int]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel's template arguments."""

    kind: str  # one_shot, owned_sum, local_rows, ...: see KernelKind
    dtype: str
    world_size: int  # 1 for local kernels; or ANY_WORLD_SIZE
    quantized: bool
    features: str = "kBasic"

    @property
    def extended(self) -> bool:
        return self.features != "kBasic"

    @property
    def is_local(self) -> bool:
        return self.kind.startswith("local")

    @property
    def exchanges_sums(self) -> bool:
        """Returns whether the kernel exchanges sums of squares instead of rows."""
        return self.kind == "slices"

    @property
    def mixes_streams(self) -> bool:
        """Returns whether the kernel mixes residual streams; its traffic is that of a sum."""
        return self.kind.startswith("streams_")

    @property
    def is_wide(self) -> bool:
        return self.kind.endswith("_wide")

    @property
    def needs_clusters(self) -> bool:
        return self.kind.endswith("_clusters") or self.kind in ("streams_input", "one_shot_few")

    @property
    def has_single_blocks(self) -> bool:
        """Returns whether the kernel's blocks form no clusters on any GPU."""
        return self.exchanges_sums or self.kind == "one_shot_few"

    @property
    def most_ranks(self) -> int:
        """The largest world size that the kernel supports."""
        return MOST_RANKS if self.world_size == ANY_WORLD_SIZE else self.world_size

    @property
    def polled_together(self) -> tuple[int, ...]:
        """The number of loads in each group of polls that receives a pack of partial sums.

        A kernel for any world size has a group for every world size that has no kernel of its own.
        A group receives the sums of squares of up to eight ranks in two packs.
        """
        if self.exchanges_sums:
            return (2,)
        if self.kind == "one_shot_few":
            return (TEAM_PARTS,)
        if self.world_size == ANY_WORLD_SIZE:
            own = world_sizes(self.dtype)
            return tuple(ranks for ranks in range(3, MOST_RANKS + 1) if ranks not in own)
        return (1 if self.world_size == 2 else self.world_size,)

    @property
    def traffic(self) -> Traffic:
        """The workspace accesses in exchange.cuh, fused.cuh, owned_rows.cuh and the transports.

        A group of polls loads the packs of all ranks; the load of the rank's own pack is predicated
        off. With two ranks, a group loads only the peer's pack.
        """
        ranks, peers = sum(self.polled_together), self.most_ranks - 1
        if self.exchanges_sums:
            # sent by a lane per peer: the first unit, and one ahead
            return self._with_service(Counter({4: 2}), Counter({16: ranks}))
        wide = {
            # sent: the first row, and one ahead; received: one group
            "one_shot": (2 * peers, ranks),
            # with a post norm, the code that sends the row ahead appears twice
            "one_shot_dense": ((3 if self.features == "kExtendedDense" else 2) * peers, ranks),
            # sent: the first row, and one ahead; received: one group
            "one_shot_few": (2 * TEAM_PARTS, ranks),
            # sent: the first row, and two ahead; relayed and received: the first row, and one ahead
            "two_shot": (3 + 2 * peers, 2 * ranks + 1),
            "owned_sum": (2 + peers, ranks + 1),
            "owned_sum_few": (2 + peers, ranks + 1),
            "owned_finished": (2 + peers, ranks + 1),
            "owned_given": (peers, 1),
            # sent: the first token, and further ones; received: one group
            "input": (2 * peers, ranks),
        }[self.kind.removeprefix("streams_")]
        return self._with_service(Counter({16: wide[0]}), Counter({16: wide[1]}))

    def _with_service(self, pushes: Counter[int], polls: Counter[int]) -> Traffic:
        """Adds the accesses of the service cluster, and those to rows in their format."""
        peers = self.most_ranks - 1
        parts = {"roll_call": 1, "hand_back": 1, "head": 1}
        if self.kind == "owned_finished" and self.quantized:
            parts |= {"packed_own": peers, "packed_receive": 1}
        for part, times in parts.items():
            for row in TABLE.part(part):
                verb = TABLE.verbs[row.verb]
                if verb.order == "weak" or verb.operation not in ("st", "ld"):
                    continue
                # A float32 pack has half as many elements.
                halved = row.place == "finished" and self.dtype == "Float32"
                (pushes if verb.operation == "st" else polls)[verb.bytes // (1 + halved)] += times
        return Traffic(pushes, polls)

    @property
    def most_frame_bytes(self) -> int:
        """The allowed local memory per thread in bytes, with nvcc 13.0 for sm_90.

        Kernels for few tokens must not spill: a GEMM evicts spilled registers from the caches,
        which costs the next call up to a microsecond. Kernels for rows with owners spill only with
        many ranks, for extended formats or finished float32 rows. `one_shot_dense` trades registers
        for two blocks per SM, and is not chosen for more than two ranks.
        """
        if self.exchanges_sums or self.mixes_streams or self.kind == "local_slices":
            return 0
        if self.kind == "two_shot":
            return 32 if self.most_ranks > 4 and self.quantized and self.extended else 0
        if self.kind == "owned_finished" and self.most_ranks > 4:
            return 88 if self.dtype == "Float32" else 32 if self.extended else 0
        if self.kind == "one_shot_dense" and self.features != "kExtended":
            return {2: 32 if self.extended else 8, 4: 32, 8: 112}[self.most_ranks]
        if self.kind == "local_rows" and self.quantized and self.extended:
            return 8
        if self.kind == "local_aligned":
            return 112 if self.extended else 24 if self.quantized else 0
        return 0


def world_sizes(dtype: str) -> tuple[int, ...]:
    """Returns the world sizes that kernels are compiled for (gpu/params.h)."""
    return (ANY_WORLD_SIZE, 2) if dtype == "Float32" else (ANY_WORLD_SIZE, 2, 4, 8)


def _ranks(text: str, dtype: str) -> tuple[int, ...]:
    own = world_sizes(dtype)
    of = {"kAll": own, "k2": (2,), "k48": tuple(ranks for ranks in own if ranks > 2), "k1": (1,)}
    return (ANY_WORLD_SIZE,) if text == "kAny" else of[text]


def _kernels_of(entry: str, arguments: list[str]) -> Iterator[tuple[tuple[str, ...], Variant]]:
    """Yields a table entry's kernels, each with its function name and template arguments."""
    kind, *rest = arguments
    if entry == "Slices":
        # The name of the class stands for the kernel; the formats are left out.
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.removeprefix("k")).lower()
        function = _FUNCTIONS[rest[1].removesuffix("Kernel")]
        for dtype in DTYPES:
            (world_size,) = _ranks(rest[0], dtype)
            yield (function, dtype), Variant(name, dtype, world_size, quantized=False)
        return
    if entry == "LocalStreams":
        for dtype in DTYPES:
            key = (_FUNCTIONS[entry], dtype, rest[0])
            yield key, Variant("local_streams", dtype, 1, quantized=False, features=rest[0])
        return
    if entry in ("StreamInput", "ClusterInput"):
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.removeprefix("k")).lower()
        for dtype in DTYPES:
            key = (_FUNCTIONS[entry], dtype, *rest[:-1])  # without the formats
            yield key, Variant(name, dtype, 1, quantized=False)
        return
    if entry == "StreamsInput":
        for dtype in DTYPES[:2]:  # of 16 bits
            for world_size in _ranks(rest[0], dtype):
                key = (_FUNCTIONS[entry], dtype, str(world_size))
                yield key, Variant("streams_input", dtype, world_size, quantized=False)
        return
    if entry == "Team":
        for dtype in DTYPES:
            for stored_as in _FORMATS[rest[1]]:
                key = (_FUNCTIONS[entry], dtype, "2", stored_as)
                yield key, Variant("one_shot_few", dtype, 2, stored_as != "Plain")
        return
    ranks = rest.pop(0) if entry in ("Fused", "Streams", "Owned", "WideRows") else "k1"
    if entry == "Streams":
        rest.pop()  # the formats, which are no argument
        features = rest.pop()  # the source implies them
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.removeprefix("k")).lower()
        for dtype in DTYPES:
            for world_size in _ranks(ranks, dtype):
                key = (_FUNCTIONS["Fused"], dtype, str(world_size), *rest)
                yield key, Variant(name, dtype, world_size, quantized=False, features=features)
        return
    formats = _FORMATS[rest.pop() if rest[-1] == "OnlyPlain" else rest[-1]]
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.removeprefix("k")).lower()
    for dtype in DTYPES:
        for world_size in _ranks(ranks, dtype):
            for stored_as in formats:
                size = () if world_size == 1 else (str(world_size),)
                key = (_FUNCTIONS[entry], dtype, *size, *rest, stored_as)
                yield key, Variant(name, dtype, world_size, stored_as != "Plain", rest[-1])


@functools.cache
def _table() -> dict[tuple[str, ...], Variant]:
    """Returns every kernel, keyed by its function name and template arguments."""
    text = re.sub(r"//[^\n]*", "", KERNEL_TABLE.read_text())
    text = text[text.index("using Kernels =") : text.index("using table::Kernels;")]
    found: dict[tuple[str, ...], Variant] = {}
    for entry, arguments in re.findall(r"(\w+)Entry<([^<>]*)>", text):
        for key, variant in _kernels_of(entry, re.split(r"\s*,\s*", arguments.strip())):
            if found.setdefault(key, variant) is not variant:
                raise ValueError(f"{KERNEL_TABLE.name} lists {key} twice")
    return found


def all_variants(clusters: bool = True) -> set[Variant]:
    """Returns every kernel that a library contains for each architecture.

    Args:
        clusters: Whether its GPUs have clusters. Others have kernels for wide rows instead.
    """
    missing = "is_wide" if clusters else "needs_clusters"
    return {found for found in _table().values() if not getattr(found, missing)}


def instantiation(variant: Variant) -> str:
    """Returns the declaration of a kernel, for an explicit instantiation in namespace allnorm."""
    function, *arguments = next(key for key, found in _table().items() if found == variant)
    entry = next(entry for entry, name in _FUNCTIONS.items() if name == function)
    if variant.mixes_streams and entry == "Fused":
        entry = "Streams"
    if entry.endswith("Slices"):
        return f"{function}<{entry}Kernel<{arguments[0]}>>(const __grid_constant__ SlicesParams)"
    kernel = {"Local": "LocalRows"}.get(entry, entry)
    params = {"Owned": "OwnedRows", "AnyRows": "Local", "WideRows": "Fused"}
    params |= {"Streams": "Fused", "LocalStreams": "Local", "ClusterInput": "StreamInput"}
    params["Team"] = "Fused"
    return (
        f"{function}<{kernel}Kernel<{', '.join(arguments)}>>"
        f"(const __grid_constant__ {params.get(entry, entry)}Params)"
    )


def traits(variant: Variant) -> tuple[str, ...]:
    """Returns a kernel's dtype, kind, world size, features and format as words of its name."""
    ranks = variant.world_size
    return (
        variant.dtype.lower(),
        variant.kind,
        "any" if ranks == ANY_WORLD_SIZE else f"x{ranks}",
        _FEATURE_WORDS[variant.features],
        "quantized" if variant.quantized else "plain",
    )


def _demangled(name: str) -> str:
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    demangle.restype = ctypes.c_char_p  # never freed; there are only two hundred
    return (demangle(name.encode(), None, None, None) or b"").decode()


def variant_of(name: str) -> Variant | None:
    """Returns the kernel with this mangled name, or None if the table does not list it."""
    text = _demangled(name).replace("allnorm::", "")
    match = re.search(r"(\w+_kernel)<(?:\w+Kernel<)?(.*?)[ >]*\(\w+Params\)", text)
    if match is None:
        return None
    arguments = re.sub(r"Features(\{.*?\})", lambda found: _FEATURES[found[1]], match[2])
    arguments = re.sub(r"\((\w+)\)(\d)", lambda e: _ENUMS[e[1]][int(e[2])], arguments)
    words = arguments.split(", ")
    if match[1] == _FUNCTIONS["WideRows"]:
        words.pop()  # the number of parts, which the table leaves out
    return _table().get((match[1], *words))
