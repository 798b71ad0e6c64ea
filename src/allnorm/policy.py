"""Which algorithm runs: a pure function of what all ranks agree on.

Admission (can it run) is separate from preference (what is fastest). Nothing here looks at a
pointer, a clock or the local machine: a rank that decided otherwise than its peers would deadlock
the collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from allnorm import islands as islands_
from allnorm.islands import Islands
from allnorm.names import FUSED

# The widest row of one block on a GPU. Kernels that take no wider ones know no clusters of blocks.
_BLOCK_ROW_BYTES = 8192

# Temporary memory that `unfused` may take for the gathered partial sums of one row chunk.
UNFUSED_GATHER_BYTES = 256 << 20

# Float32 sums of one piece of a hierarchical call, of all its rows: what a rank may hold at a time;
# and on GPUs, where the exchange of one piece overlaps the launches of others, into how many pieces
# of how many bytes a call is cut at most. Two islands of two H100s, NCCL at 30 GB/s, 2026-11: in
# pieces of 16 to 64 MiB it takes as long within 5 %, of 8 half as long again (engineering log).
HIERARCHICAL_SUM_BYTES = 64 << 20
_OVERLAPPED_SUM_BYTES = 16 << 20
_OVERLAPPED_PIECES = 4

# Between more than two islands sums cross in two hops where that sends so many bytes less. A hop of
# NCCL between hosts takes some 15 us, in which a card of 50 GB/s sends 750 KB and one of 12.5 GB/s
# 190 KB. Between two it was a quarter less, and took as long (docs/engineering-log, 2026-11-26).
HIERARCHICAL_HOP_BYTES = 512 << 10

# More blocks than any GPU holds at once: a limit of so many, or more, limits nothing.
MOST_BLOCKS = 1 << 16

# What the second hop of two_shot takes, as bytes on the link: one_shot of n ranks pushes (n - 1)
# (n - 2) / n rows more. Behind a product, H100, bf16, CUDA graphs, 2026-11 (docs/engineering-log,
# 2026-11-27): at 4 ranks 16 rows of 4096 columns take 3.1 us in one_shot and 3.2 in two_shot, 24
# rows 3.7 and 3.5; at 3 ranks 40 rows 3.8 and 3.9, 48 rows 4.2 and 4.1. At two ranks both send the
# same bytes, one_shot in one hop: 8192x4096 takes 198 us in both where the rate of the link is not
# known, else 188 and 189 (H200).
_SECOND_HOP_BYTES_CUDA = 240 << 10
# On CPU a rank reads its peers' rows in place: one_shot costs no extra bytes, only extra sums.
_ONE_SHOT_MAX_BYTES_CPU = 64 << 10

# Tables are measured without a limit of blocks. With one, two_shot falls behind at two ranks, which
# send the same bytes in both: H200, bf16, 64 blocks, 2026-11, 2048x4096 takes 75 us in two_shot and
# 56 in one_shot, 8192x4096 285 and 204 (docs/engineering-log, "A part of the GPU").
_LIMITED_PAIR = "two ranks and a limit of {} blocks: what two_shot does twice would cost more"

_SAME_WIDTH = {"bfloat16": "float16", "float16": "bfloat16"}

_OWNED_ROWS = (
    "each row belongs to one rank, which alone has its residual: rows go through their owners, as "
    "only two_shot sends them"
)


# Up to so many tokens a row with a second norm, or of experts, is spread as it would be without a
# table, whose blocks are those of plain calls. Two H100s, bf16, 2026-11, one block and as many as
# without a table, behind a product and in a chain: post norm, 16 rows 4.27 and 4.17, 3.82 and 3.44
# us, 32 rows 4.56 and 4.75, 4.12 and 3.86; eight experts, 16 rows 5.50 and 5.24, 4.60 and 3.91
# (docs/engineering-log).
_SPREAD_EXTENDED_TOKENS = 16


@dataclass(frozen=True)
class Plan:
    """What a call will do.

    Attributes:
        algorithm: "one_shot", "two_shot", "hierarchical" or "unfused".
        reason: why, in one sentence.
        num_chunks: launches the rows are cut into, "hierarchical": pieces; 0 for no rows.
        num_blocks: most blocks of a launch on a GPU; 0: as many as it holds.
        source: what decided: "tuned FILE, DATE", "seed NAME", "default" (the rule built in),
            "caller", or "" if nothing else can run.
        link_gbps: many rows are sent at this rate: GB/s that a rank pushes to all its peers
            together; 0: not known, they are sent as fast as the stores are taken.
        cluster_size: blocks of a GPU that share a row; 0: the library chooses.
    """

    algorithm: str
    reason: str
    num_chunks: int
    num_blocks: int = 0
    source: str = ""
    link_gbps: float = 0.0
    cluster_size: int = 0


@dataclass(frozen=True)
class Step:
    """What is fastest up to some number of tokens.

    Attributes:
        max_tokens: inclusive; None: any.
        algorithm: one of ALGORITHMS.
        num_blocks: as of a Plan.
        cluster_size: as of a Plan.
    """

    max_tokens: int | None
    algorithm: str
    num_blocks: int = 0
    cluster_size: int = 0


@dataclass(frozen=True)
class Curve:
    """What is fastest at one hidden size: steps of rising `max_tokens`, the last of them None.

    Attributes:
        hidden_size: columns.
        steps: in that order.
        product: columns of the matrix product behind which calls were measured; 0: in a chain of
            the same calls.
        product_tokens: the most tokens that were measured behind it; more were in a chain.
    """

    hidden_size: int
    steps: tuple[Step, ...]
    product: int = 0
    product_tokens: int = 0

    def mode(self, num_tokens: int) -> str:
        """Where so many tokens were measured, in words."""
        behind = self.product and num_tokens <= self.product_tokens
        return "behind a matrix product" if behind else "in a chain of calls"


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of device with one number of ranks.

    Attributes:
        source: where it comes from, as plans say it.
        curves: by name of the dtype and epilogue, at least one each.
        link_gbps: as of a Plan; what the newest of the curves were measured with.
    """

    source: str
    curves: Mapping[tuple[str, str], Sequence[Curve]]
    link_gbps: float = 0.0

    def find(
        self, dtype: str, epilogue: str, num_tokens: int, hidden_size: int
    ) -> tuple[Step, str] | None:
        """The step for a call, and where it was found in words; None if nothing is known.

        Other hidden sizes than those measured take the nearest, at the same number of bytes: what
        decides is latency against bandwidth. Other epilogues take the plain norm's, and one 16-bit
        dtype the other's.
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
        # Of another width a row has other threads: those may be more than a block takes, or few.
        alike = curve.hidden_size < 2 * hidden_size <= 2 * curve.hidden_size
        return step if alike else replace(step, cluster_size=0), where


@dataclass(frozen=True)
class Traits:
    """What all ranks of a communicator agree on.

    Attributes:
        backend: "cuda" or "cpu".
        world_size: number of ranks.
        split: why ranks of one host are several islands; empty if they are not.
        exchange: empty if ranks can write to each other's memory, else the reason why they cannot.
        max_row_bytes: the widest row that the fused kernels of every rank hold; None: any.
        tables: what was measured, the first that knows a call decides.
        max_blocks: most blocks of any launch on a GPU; 0: as many as it holds.
        islands: ranks that write to each other's memory, set beside set; empty: all of them.
        between: with several islands: empty if "hierarchical" can run, else why it cannot.
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
        """Ranks among which the kernels exchange."""
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
        traits: the communicator.
        num_tokens: rows.
        hidden_size: columns.
        element_bytes: bytes of an element of `x`.
        rows_per_chunk: rows of this hidden size that one launch among the ranks of an island
            holds, for "one_shot" and "two_shot", and with several islands for each launch of a
            "hierarchical" call; 0 if none fits.
        requested: "auto" or the name of an algorithm.
        owned_rows: whether each row is finished, or given, by the rank it belongs to.
        kind: name of the dtype, and epilogue.
        extended: whether the sum is changed before the residual is added, or is of experts' rows;
            tables are of other calls.

    Returns:
        The plan; its algorithm is "unfused" with the obstacle as the reason if the requested
        algorithm cannot run.
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
        algorithm, reason = requested, "asked for by the caller"
    elif owned_rows:
        algorithm, reason = "two_shot", _OWNED_ROWS
    else:
        step, reason, source = _prefer(traits, num_tokens, hidden_size, element_bytes, kind)
        algorithm, num_blocks, cluster_size = step.algorithm, step.num_blocks, step.cluster_size
    if algorithm == "unfused":
        rows = _unfused_rows(traits, num_tokens, hidden_size, element_bytes)
    else:
        rows = rows_per_chunk[algorithm]
        # Measured with as many blocks as the GPU holds.
        if traits.max_blocks or (extended and num_tokens <= _SPREAD_EXTENDED_TOKENS):
            cluster_size = 0
        limits = [limit for limit in (num_blocks, traits.max_blocks) if limit]
        num_blocks = min(limits, default=0)
        # Of the first table, whichever one knows the call: its curves hold at this rate.
        link_gbps = next((table.link_gbps for table in traits.tables), 0.0)
    num_chunks = -(-num_tokens // rows) if num_tokens else 0
    return Plan(algorithm, reason, num_chunks, num_blocks, source, link_gbps, cluster_size)


def _choose_between(
    traits: Traits,
    num_tokens: int,
    hidden_size: int,
    element_bytes: int,
    rows_per_chunk: dict[str, int],
    requested: str,
    owned_rows: bool,
) -> Plan:
    """As `choose`, of ranks in several islands, for "auto" and "hierarchical"."""
    obstacle = traits.between
    if not obstacle and owned_rows and not islands_.is_in_blocks(traits.islands):
        obstacle = (
            "rows belong to ranks, and the ranks of an island do not follow each other "
            f"({islands_.describe(traits.islands)}): no block of rows is one island's"
        )
    if not obstacle and traits.island_size > 1:
        # What the kernels need inside an island.
        inside = replace(traits, world_size=traits.island_size, islands=(), exchange="")
        rows_inside = {"two_shot": rows_per_chunk["hierarchical"]}
        obstacle = _obstacle(
            inside, hidden_size, element_bytes, rows_inside, "two_shot", owned_rows
        )
    if obstacle:
        rows = _unfused_rows(traits, num_tokens, hidden_size, element_bytes)
        return Plan("unfused", obstacle, -(-num_tokens // rows) if num_tokens else 0)
    number = len(traits.islands)
    reason = f"{number} islands of {traits.island_size} ranks: sums inside each, then between them"
    if traits.island_size == 1:
        reason = f"{number} islands of one rank: the process group exchanges rows between them"
    if traits.split:
        reason += f" ({traits.split})"
    rows = hierarchical_rows(traits.backend, traits.island_size, num_tokens, hidden_size)
    pieces = -(-num_tokens // rows)
    if owned_rows:  # one of each island that has a row; fewer rows than ranks are the first ranks'
        pieces = min(number, -(-num_tokens // traits.island_size))
    blocks = traits.max_blocks if traits.max_blocks < MOST_BLOCKS else 0
    source = "default" if requested == "auto" else "caller"
    return Plan(
        "hierarchical",
        reason if requested == "auto" else "asked for by the caller",
        pieces,
        blocks,
        source,
    )


def hierarchical_rows(backend: str, island_size: int, num_tokens: int, hidden_size: int) -> int:
    """Rows of a piece of a hierarchical call whose rows belong to nobody."""
    row_bytes = 4 * hidden_size
    most = max(1, HIERARCHICAL_SUM_BYTES // row_bytes)
    if backend == "cpu":
        return most
    pieces = 1
    # Islands of one rank have no launch A, and B is a norm that takes a fraction of the exchange:
    # 8192x4096 over sockets, two H100s, 2026-11: as long as NCCL and a norm in two pieces, 1.07 to
    # 1.12 times in four (docs/engineering-log).
    if island_size > 1:
        pieces = min(_OVERLAPPED_PIECES, num_tokens * row_bytes // _OVERLAPPED_SUM_BYTES)
    height = -(-num_tokens // max(1, pieces))
    # In fours, so that rows of FP8 begin where the kernels can store a whole pack.
    return max(4, min(most, height + 3) // 4 * 4)


def is_sooner_in_parts(
    num_islands: int, island_size: int, num_sums: int, sum_bytes: int, row_bytes: int
) -> bool:
    """Returns whether the sums of a piece cross in two hops: each island adds a part of them.

    Args:
        num_islands: more than two.
        island_size: ranks of an island, which share the sums.
        num_sums: elements of the piece; not of this rank, whose part may differ from its peers'.
        sum_bytes: of one of them.
        row_bytes: of what the sum of all islands is rounded to.
    """
    others = num_islands - 1
    in_one_hop = others * sum_bytes
    in_two = others * (sum_bytes + row_bytes) / num_islands
    return (in_one_hop - in_two) * num_sums >= HIERARCHICAL_HOP_BYTES * island_size


def _unfused_rows(traits: Traits, num_tokens: int, hidden_size: int, element_bytes: int) -> int:
    """Rows that are gathered at a time."""
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
    """Why only `unfused` can run, or an empty string."""
    if requested == "unfused":
        return "asked for by the caller"
    if traits.world_size == 1:
        return "one rank: there is nothing to exchange"
    if requested == "hierarchical":
        return "all ranks are one island: they exchange directly, without the process group"
    if traits.exchange:
        return traits.exchange
    if traits.backend == "cuda" and hidden_size * element_bytes % 16:
        multiple = 16 // element_bytes
        return f"hidden_size {hidden_size} is not a multiple of {multiple} for this dtype"
    if traits.max_row_bytes is not None and hidden_size * element_bytes > traits.max_row_bytes:
        limit = traits.max_row_bytes // element_bytes
        return (
            f"hidden_size {hidden_size} is above {limit}, the widest fused row of this dtype here"
        )
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
    """What is fastest: a step, the reason, the source."""
    if traits.backend == "cuda" and traits.world_size == 2 and 0 < traits.max_blocks < MOST_BLOCKS:
        return Step(None, "one_shot"), _LIMITED_PAIR.format(traits.max_blocks), "default"
    for table in traits.tables:
        found = table.find(*kind, num_tokens, hidden_size)
        if found is not None:
            step, where = found
            reason = f"measured as the fastest {where} at {traits.world_size} ranks"
            if traits.max_row_bytes is not None and traits.max_row_bytes <= _BLOCK_ROW_BYTES:
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
        limit = _SECOND_HOP_BYTES_CUDA * ranks // ((ranks - 1) * (ranks - 2))
    size = f"{num_bytes} bytes at {traits.world_size} ranks"
    if num_bytes <= limit:
        return "one_shot", f"{size}: up to {limit} bytes latency decides, one hop is fastest"
    return "two_shot", f"{size}: above {limit} bytes the link decides, two_shot sends fewest bytes"


# A table of one width says nothing of widths further away than this: widths that were measured side
# by side show how choices change with them, one width does not.
_MAX_RATIO_OF_ONE_CURVE = 2


def _ratio(a: int, b: int) -> float:
    """How far apart two sizes are; the same in both directions."""
    return max(a, b) / min(a, b)
