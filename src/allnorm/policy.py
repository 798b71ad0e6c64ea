"""The choice of the algorithm: a pure function of values that are equal on all ranks.

Admission (whether an algorithm can run) is separate from preference (which is fastest). This module
does not use pointers, clocks or the local machine: a rank that decided differently would deadlock
its peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from allnorm import islands as islands_
from allnorm.islands import Islands
from allnorm.names import FUSED

# The widest row on a GPU with clusters of blocks. Kernels with a lower limit do not use clusters.
_CLUSTER_ROW_BYTES = 64 << 10

# Temporary memory of `unfused` for the gathered partial sums of one chunk of rows.
UNFUSED_GATHER_BYTES = 256 << 20

# Maximum bytes of the float32 sums of one piece of a hierarchical call.
HIERARCHICAL_SUM_BYTES = 64 << 20
# On GPUs, the exchange of one piece overlaps the launches of other pieces: a call is cut into up to
# this many pieces of at least this many bytes. Smaller pieces were slower (docs/engineering-log).
_OVERLAPPED_SUM_BYTES = 16 << 20
_OVERLAPPED_PIECES = 4

# With more than two islands, sums cross in two hops if that saves this many bytes. A hop of NCCL
# between hosts takes about 15 us, in which a 50 GB/s card sends 750 KB (docs/engineering-log).
HIERARCHICAL_HOP_BYTES = 512 << 10

# More blocks than any GPU can run at once. A limit of at least this many has no effect.
MOST_BLOCKS = 1 << 16

# The cost of two_shot's second hop, as bytes on the link: one_shot with n ranks pushes
# (n - 1)(n - 2) / n rows more. With two ranks both send the same bytes, one_shot in one hop.
# The cost is this many bytes times (n + 4): a rank relays to more peers. Measured with 3, 4 and 8
# ranks (docs/engineering-log/2026-11-29-four-ranks-on-two-gpus.md).
_SECOND_HOP_BYTES_CUDA = 34 << 10
# On CPU a rank reads its peers' rows in place: one_shot sends no extra bytes, but adds more.
_ONE_SHOT_MAX_BYTES_CPU = 64 << 10

# Tables are measured without a limit on blocks. With a limit and two ranks, two_shot is slower: up
# to 1.4 times on H200s (docs/engineering-log, "A part of the GPU").
_LIMITED_PAIR = "two ranks and a limit of {} blocks: one_shot needs less work per block"

_REQUESTED = "requested by the caller"

_SAME_WIDTH = {"bfloat16": "float16", "float16": "bfloat16"}

_OWNED_ROWS = (
    "each row belongs to one rank, the only one with its residual: rows go through their owners, "
    "which only two_shot supports"
)


# Up to this many tokens, calls with a post norm or experts use the default number of blocks per row
# instead of the table's, because tables are measured with plain calls (docs/engineering-log).
_SPREAD_EXTENDED_TOKENS = 16
# Off unless a table of `allnorm tune` turns it on: issued by one cluster, 4 MiB made every call of
# two H200s 0.4 to 5 us slower (docs/engineering-log/2026-11-27-prefetch.md).
_PREFETCH_TOKENS = 0
_PREFETCH_BYTES = 4 << 20


@dataclass(frozen=True)
class Plan:
    """The algorithm and grid of a call, and the reason for them.

    Attributes:
        algorithm: "one_shot", "two_shot", "hierarchical" or "unfused".
        reason: the reason for the choice, in one sentence.
        num_chunks: number of launches, each for a part of the rows; for "hierarchical" the number
            of pieces; 0 if there are no rows.
        num_blocks: maximum blocks of a launch on a GPU; 0: as many as the GPU can run.
        source: origin of the decision: "tuned FILE, DATE", "seed NAME", "default" (built-in rule),
            "caller", or "" if nothing else can run.
        link_gbps: rate at which large calls are sent: GB/s that a rank pushes to all its peers
            together; 0: unknown, so rows are sent without pacing.
        cluster_size: GPU blocks per row; 0: the library chooses.
        prefetch_bytes: bytes of the next weight that a call loads into the L2 cache, at most.
    """

    algorithm: str
    reason: str
    num_chunks: int
    num_blocks: int = 0
    source: str = ""
    link_gbps: float = 0.0
    cluster_size: int = 0
    prefetch_bytes: int = 0


@dataclass(frozen=True)
class Step:
    """The fastest choice for up to a number of tokens.

    Attributes:
        max_tokens: maximum number of tokens, inclusive; None: no limit.
        algorithm: one of ALGORITHMS.
        num_blocks: as in Plan.
        cluster_size: as in Plan.
    """

    max_tokens: int | None
    algorithm: str
    num_blocks: int = 0
    cluster_size: int = 0


@dataclass(frozen=True)
class Curve:
    """The fastest choices at one hidden size.

    Attributes:
        hidden_size: number of columns.
        steps: steps with ascending `max_tokens`; None in the last one.
        product: input features (K) of the GEMM after which calls were measured; 0: calls were
            measured in a chain.
        product_tokens: maximum tokens measured after the GEMM; more were measured in a chain.
    """

    hidden_size: int
    steps: tuple[Step, ...]
    product: int = 0
    product_tokens: int = 0

    def mode(self, num_tokens: int) -> str:
        """Describes how calls with this many tokens were measured."""
        after_gemm = self.product and num_tokens <= self.product_tokens
        return "after a GEMM" if after_gemm else "in a chain of calls"


@dataclass(frozen=True)
class Table:
    """Measured curves for one kind of device and one number of ranks.

    Attributes:
        source: origin of the table, as in Plan.
        curves: at least one curve per key, keyed by dtype name and epilogue.
        link_gbps: as in Plan; the newest curves were measured with it.
        prefetch_tokens: maximum tokens of calls that prefetch the next weight; 0: none do; None:
            not measured.
    """

    source: str
    curves: Mapping[tuple[str, str], Sequence[Curve]]
    link_gbps: float = 0.0
    prefetch_tokens: int | None = None

    def find(
        self, dtype: str, epilogue: str, num_tokens: int, hidden_size: int
    ) -> tuple[Step, str] | None:
        """Returns the step for a call and its description; None if the table has no step for it.

        For a hidden size that was not measured, it uses the nearest measured one, at the same
        number of bytes, because the choice depends on latency and bandwidth. For an epilogue that
        was not measured it uses the plain norm's curves, and for a 16-bit dtype the other 16-bit
        dtype's curves.
        """
        names = [(d, e) for e in (epilogue, "norm") for d in (dtype, _SAME_WIDTH.get(dtype, dtype))]
        name = next((name for name in names if self.curves.get(name)), None)
        if name is None:
            return None
        curves = self.curves[name]
        curve = min(curves, key=lambda c: (_ratio(c.hidden_size, hidden_size), c.hidden_size))
        if len(curves) == 1 and _ratio(curve.hidden_size, hidden_size) > _MAX_RATIO_OF_ONE_CURVE:
            return None
        step = next(
            s
            for s in curve.steps
            if s.max_tokens is None or num_tokens * hidden_size <= s.max_tokens * curve.hidden_size
        )
        limit = "from there on" if step.max_tokens is None else f"up to {step.max_tokens} tokens"
        mode = curve.mode(-(-num_tokens * hidden_size // curve.hidden_size))
        where = f"{limit} of {curve.hidden_size} columns, {', '.join(name)}, {mode}"
        # At a different width the measured blocks per row may be too few or too many.
        alike = curve.hidden_size < 2 * hidden_size <= 2 * curve.hidden_size
        return step if alike else replace(step, cluster_size=0), where


@dataclass(frozen=True)
class Traits:
    """Properties of a communicator that are equal on all ranks.

    Attributes:
        backend: "cuda" or "cpu".
        world_size: number of ranks.
        split: why one host's ranks form multiple islands; empty if they do not.
        exchange: why ranks cannot write to each other's memory; empty if they can.
        max_row_bytes: widest row that the fused kernels of every rank support; None: no limit.
        tables: measured tables; the first one that has a step for a call decides.
        max_blocks: maximum blocks of any launch on a GPU; 0: as many as the GPU can run.
        islands: the islands; empty: all ranks are one island.
        between: with multiple islands: why "hierarchical" cannot run; empty if it can.
    """

    backend: str
    world_size: int
    exchange: str = ""
    split: str = ""
    max_row_bytes: int | None = None
    tables: tuple[Table, ...] = field(default=(), repr=False)
    max_blocks: int = 0
    islands: Islands = ()
    between: str = ""

    @property
    def island_size(self) -> int:
        """The number of ranks per island."""
        return len(self.islands[0]) if self.islands else self.world_size


def choose(
    traits: Traits,
    num_tokens: int,
    hidden_size: int,
    element_bytes: int,
    rows_per_chunk: dict[str, int],
    requested: str = "auto",
    owned_rows: bool = False,
    kind: tuple[str, str] = ("bfloat16", "norm"),
    extended: bool = False,
) -> Plan:
    """Chooses the algorithm of one call.

    Args:
        traits: the communicator's properties.
        num_tokens: rows.
        hidden_size: columns.
        element_bytes: bytes of an element of `x`.
        rows_per_chunk: maximum rows of this hidden size per launch within an island: for
            "one_shot", "two_shot" and, with multiple islands, each launch of "hierarchical"; 0: a
            single row does not fit.
        requested: "auto" or the name of an algorithm.
        owned_rows: whether rows have owners.
        kind: dtype name and epilogue.
        extended: whether the call has a post norm, a scale, experts or a float32 residual; tables
            are measured without them.

    Returns:
        The plan. If the requested algorithm cannot run, its algorithm is "unfused" and its reason
        says why.
    """
    if len(traits.islands) > 1 and requested in ("auto", "hierarchical"):
        return _choose_between(
            traits, num_tokens, hidden_size, element_bytes, rows_per_chunk, requested, owned_rows
        )
    obstacle = _obstacle(traits, hidden_size, element_bytes, rows_per_chunk, requested, owned_rows)
    num_blocks = cluster_size = 0
    source = "" if requested == "auto" else "caller"
    link_gbps = 0.0
    if obstacle:
        algorithm, reason = "unfused", obstacle
        source = "caller" if requested == "unfused" else ""
    elif requested != "auto":
        algorithm, reason = requested, _REQUESTED
    elif owned_rows:
        algorithm, reason = "two_shot", _OWNED_ROWS
    else:
        step, reason, source = _prefer(traits, num_tokens, hidden_size, element_bytes, kind)
        algorithm, num_blocks, cluster_size = step.algorithm, step.num_blocks, step.cluster_size
    if algorithm == "unfused":
        rows = _unfused_rows(traits, num_tokens, hidden_size, element_bytes)
    else:
        rows = rows_per_chunk[algorithm]
        # Tables' cluster sizes are measured without a limit on blocks.
        if traits.max_blocks or (extended and num_tokens <= _SPREAD_EXTENDED_TOKENS):
            cluster_size = 0
        limits = [limit for limit in (num_blocks, traits.max_blocks) if limit]
        num_blocks = min(limits, default=0)
        # The rate comes from the first table even if a later one has the step: its curves need this
        # rate.
        link_gbps = next((table.link_gbps for table in traits.tables), 0.0)
    num_chunks = -(-num_tokens // rows) if num_tokens else 0
    ahead = _prefetch_bytes(traits, algorithm, num_tokens)
    return Plan(algorithm, reason, num_chunks, num_blocks, source, link_gbps, cluster_size, ahead)


def choose_slices(
    traits: Traits,
    num_tokens: int,
    sizes: Sequence[int],
    element_bytes: int,
    rows_per_launch: int,
    requested: str = "auto",
) -> Plan:
    """Chooses the algorithm of a call of rms_norm_sharded.

    Args:
        traits: the communicator's properties.
        num_tokens: rows.
        sizes: this rank's columns of each tensor.
        element_bytes: bytes of an element.
        rows_per_launch: maximum rows per launch; 0: the kernels do not support such a row.
        requested: "auto" or the name of an algorithm.
    """
    obstacle = ""
    if traits.world_size > 1 and len(traits.islands) > 1:
        obstacle = (
            f"{len(traits.islands)} islands: the process group exchanges the sums of squares, a "
            "few bytes per row"
        )
    elif requested in ("two_shot", "hierarchical"):
        obstacle = "each rank needs only the sums of squares of its peers, in one hop"
    else:
        obstacle = next(
            (
                found
                for size in sizes
                if (found := _slice_obstacle(traits, size, element_bytes, requested))
            ),
            "",
        )
    if not obstacle and not rows_per_launch:
        obstacle = f"a slice of {max(sizes)} columns is too wide for the kernels"
    if obstacle:
        source = "caller" if requested == "unfused" else ""
        return Plan("unfused", obstacle, int(num_tokens > 0), source=source)
    reason = "only sums of squares are exchanged, in one hop"
    num_chunks = -(-num_tokens // rows_per_launch)
    return Plan(
        "one_shot",
        reason if requested == "auto" else _REQUESTED,
        num_chunks,
        traits.max_blocks,
        "default" if requested == "auto" else "caller",
    )


def _slice_obstacle(traits: Traits, size: int, element_bytes: int, requested: str) -> str:
    """Returns why only `unfused` can norm slices of this size; empty if one_shot can."""
    wide = replace(traits, max_row_bytes=None)  # the kernel for slices has a limit of its own
    return _obstacle(wide, size, element_bytes, dict.fromkeys(FUSED, 1), requested, False)


def prefetch_tokens(traits: Traits) -> int:
    """Returns up to how many rows a call prefetches the next weight; 0: none does."""
    measured = (table.prefetch_tokens for table in traits.tables)
    return next((tokens for tokens in measured if tokens is not None), _PREFETCH_TOKENS)


def _prefetch_bytes(traits: Traits, algorithm: str, num_tokens: int) -> int:
    """Returns how much of the next weight a call loads into the L2 cache while it waits."""
    # With two_shot and wider rows, every block has a row.
    fits = traits.backend == "cuda" and algorithm == "one_shot"
    return _PREFETCH_BYTES if fits and num_tokens <= prefetch_tokens(traits) else 0


def _choose_between(
    traits: Traits,
    num_tokens: int,
    hidden_size: int,
    element_bytes: int,
    rows_per_chunk: dict[str, int],
    requested: str,
    owned_rows: bool,
) -> Plan:
    """Chooses between "hierarchical" and "unfused" for ranks in multiple islands; see `choose`."""
    obstacle = traits.between
    if not obstacle and owned_rows and not islands_.is_in_blocks(traits.islands):
        obstacle = (
            "rows have owners, but the ranks of an island do not follow each other "
            f"({islands_.describe(traits.islands)}), so an island does not own a block of rows"
        )
    if not obstacle and traits.island_size > 1:
        # The kernels within an island have their own requirements.
        inside = replace(traits, world_size=traits.island_size, islands=(), exchange="")
        rows_inside = {"two_shot": rows_per_chunk["hierarchical"]}
        obstacle = _obstacle(
            inside, hidden_size, element_bytes, rows_inside, "two_shot", owned_rows
        )
    if obstacle:
        rows = _unfused_rows(traits, num_tokens, hidden_size, element_bytes)
        return Plan("unfused", obstacle, -(-num_tokens // rows) if num_tokens else 0)
    number = len(traits.islands)
    reason = f"{number} islands of {traits.island_size} ranks: sums within each, then across them"
    if traits.island_size == 1:
        reason = f"{number} islands of one rank: the process group exchanges rows between them"
    if traits.split:
        reason += f" ({traits.split})"
    rows = hierarchical_rows(traits.backend, traits.island_size, num_tokens, hidden_size)
    pieces = -(-num_tokens // rows)
    if owned_rows:  # one piece per island that owns rows; with few rows, only the first ranks do
        pieces = min(number, -(-num_tokens // traits.island_size))
    blocks = traits.max_blocks if traits.max_blocks < MOST_BLOCKS else 0
    source = "default" if requested == "auto" else "caller"
    return Plan(
        "hierarchical",
        reason if requested == "auto" else _REQUESTED,
        pieces,
        blocks,
        source,
    )


def hierarchical_rows(backend: str, island_size: int, num_tokens: int, hidden_size: int) -> int:
    """Returns the rows per piece of a hierarchical call with a replicated residual."""
    row_bytes = 4 * hidden_size
    most = max(1, HIERARCHICAL_SUM_BYTES // row_bytes)
    if backend == "cpu":
        return most
    pieces = 1
    # With one rank per island there is little to overlap: launch A does not run, and launch B is
    # short compared with the exchange. More pieces were slower (docs/engineering-log).
    if island_size > 1:
        pieces = min(_OVERLAPPED_PIECES, num_tokens * row_bytes // _OVERLAPPED_SUM_BYTES)
    height = -(-num_tokens // max(1, pieces))
    # Rounds to a multiple of four, so that pieces of FP8 rows start at a whole pack.
    return max(4, min(most, height + 3) // 4 * 4)


def is_sooner_in_parts(
    num_islands: int, island_size: int, num_sums: int, sum_bytes: int, row_bytes: int
) -> bool:
    """Returns whether a piece's sums cross in two hops, where each island adds a part of them.

    Args:
        num_islands: number of islands, more than two.
        island_size: ranks per island, which share the sums.
        num_sums: elements of the piece on all ranks; this rank's share may differ from its peers'.
        sum_bytes: bytes of one island's sum.
        row_bytes: bytes of the sum over all islands, after rounding.
    """
    others = num_islands - 1
    in_one_hop = others * sum_bytes
    in_two = others * (sum_bytes + row_bytes) / num_islands
    return (in_one_hop - in_two) * num_sums >= HIERARCHICAL_HOP_BYTES * island_size


def _unfused_rows(traits: Traits, num_tokens: int, hidden_size: int, element_bytes: int) -> int:
    """Returns the rows per chunk of an unfused call."""
    if traits.world_size == 1:
        return max(1, num_tokens)
    return max(1, UNFUSED_GATHER_BYTES // (traits.world_size * hidden_size * element_bytes))


def _obstacle(
    traits: Traits,
    hidden_size: int,
    element_bytes: int,
    rows_per_chunk: dict[str, int],
    requested: str,
    owned_rows: bool,
) -> str:
    """Returns why only `unfused` can run; empty if the requested algorithm can."""
    if requested == "unfused":
        return _REQUESTED
    if traits.world_size == 1:
        return "one rank: there is nothing to exchange"
    if requested == "hierarchical":
        return "all ranks are one island: hierarchical calls need several"
    if traits.exchange:
        return traits.exchange
    if traits.backend == "cuda" and hidden_size * element_bytes % 16:
        multiple = 16 // element_bytes
        return f"hidden_size {hidden_size} is not a multiple of {multiple} for this dtype"
    if traits.max_row_bytes is not None and hidden_size * element_bytes > traits.max_row_bytes:
        limit = traits.max_row_bytes // element_bytes
        return f"hidden_size {hidden_size} is above {limit}, the limit of fused rows of this dtype"
    if owned_rows and requested == "one_shot":
        return _OWNED_ROWS
    needed: tuple[str, ...] = (requested,)
    if requested == "auto":
        needed = ("two_shot",) if owned_rows else FUSED
    if not all(rows_per_chunk[name] for name in needed):
        return f"a row of hidden_size {hidden_size} is too wide for the workspace"
    return ""


def _prefer(
    traits: Traits, num_tokens: int, hidden_size: int, element_bytes: int, kind: tuple[str, str]
) -> tuple[Step, str, str]:
    """Returns the fastest step, the reason, and the source of the decision."""
    if traits.backend == "cuda" and traits.world_size == 2 and 0 < traits.max_blocks < MOST_BLOCKS:
        return Step(None, "one_shot"), _LIMITED_PAIR.format(traits.max_blocks), "default"
    for table in traits.tables:
        found = table.find(*kind, num_tokens, hidden_size)
        if found is not None:
            step, where = found
            reason = f"measured as the fastest {where} at {traits.world_size} ranks"
            if traits.max_row_bytes is not None and traits.max_row_bytes < _CLUSTER_ROW_BYTES:
                step = replace(step, cluster_size=0)
            return step, reason, table.source
    algorithm, reason = _default(traits, num_tokens * hidden_size * element_bytes)
    return Step(None, algorithm), reason, "default"


def _default(traits: Traits, num_bytes: int) -> tuple[str, str]:
    if traits.world_size == 2:
        return "one_shot", "two ranks: both algorithms send the same bytes, one_shot in one hop"
    if traits.backend == "cpu":
        limit = _ONE_SHOT_MAX_BYTES_CPU
    else:
        ranks = traits.world_size
        hop_bytes = _SECOND_HOP_BYTES_CUDA * (ranks + 4)
        limit = hop_bytes * ranks // ((ranks - 1) * (ranks - 2))
    size = f"{num_bytes} bytes at {traits.world_size} ranks"
    if num_bytes <= limit:
        return "one_shot", f"{size}: up to {limit} bytes latency dominates, and one hop is fastest"
    return "two_shot", (
        f"{size}: above {limit} bytes bandwidth dominates, and two_shot sends fewest bytes"
    )


# A table with a single width applies to widths up to this factor away. Multiple measured widths
# show how choices change with the width; a single width does not.
_MAX_RATIO_OF_ONE_CURVE = 2


def _ratio(a: int, b: int) -> float:
    """Returns the ratio of the larger size to the smaller one."""
    return max(a, b) / min(a, b)
