"""Measurements: from the records of all ranks, and what follows from several of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allnorm import topology
from allnorm.bench import floor, run
from allnorm.bench.modes import Mode, Shape, family
from allnorm.testing import DTYPES, OnMessage, run_ranks

_SECONDS = 3600.0  # that a run may take
TIMES = ("p50_us", "p90_us", "p99_us", "host_us", "eager_us")
BEHIND = ("product_us", "empty_us", "beyond_empty_us")


@dataclass(frozen=True)
class Measurement:
    """One arm at one shape in one mode, over all ranks."""

    shape: Shape  # what was run
    mode: Mode  # what the call returned
    world_size: int  # with how many ranks
    arm: str  # which way
    # Time per call; of every rank's figure the largest. Behind a product what is beyond it, and
    # `over_ranks` says how ranks' times were put together. NaN if not timed.
    p50_us: float
    p90_us: float
    p99_us: float
    # What a call without a graph costs the host, and until it is done; NaN if not measured.
    host_us: float
    eager_us: float
    error: str  # "" if the result was right, else what was wrong
    reason: str  # "" if it ran, else why it cannot
    # Columns of the matrix product in front of each call; 0: none, calls in a chain.
    product: int = 0
    # Of that product, beyond which p50_us to p99_us are; NaN without one.
    product_us: float = math.nan
    # What an empty kernel takes there, and what p50_us is beyond it; NaN without a product.
    empty_us: float = math.nan
    beyond_empty_us: float = math.nan
    # "slowest": of each rank's median, and percentile, the largest. Behind a product: the
    # percentiles of the "shortest" of the ranks' times in each replay, where ranks wait for each
    # other, or of the "longest".
    over_ranks: str = "slowest"
    # What sending the bytes of this shape and mode takes at least; NaN if unknown.
    floor_us: float = math.nan
    # Of allnorm's quantised arms, what they take beyond the 16-bit call.
    quant_cost_us: float = math.nan

    @property
    def correct(self) -> bool:
        """Whether it ran and its result was right."""
        return not self.reason and not self.error

    @property
    def shown_us(self) -> float:
        """What tables and pictures compare: p50, or what is beyond an empty kernel of it."""
        return self.beyond_empty_us if self.product else self.p50_us

    @property
    def shown_p99_us(self) -> float:
        """The 99th percentile likewise."""
        return self.p99_us - self.empty_us if self.product else self.p99_us

    @property
    def floor_share(self) -> float:
        """Which part of the time the link needs at least; NaN where that is unknown."""
        return _ratio(self.floor_us, self.shown_us)


def measure(
    job: run.Job,
    world_size: int,
    push_gbps: float = 0.0,
    keep: Callable[[list[Measurement]], None] = lambda measured: None,
    on_message: OnMessage | None = None,
) -> list[Measurement]:
    """Starts ranks and lets them measure; one measurement per shape, mode and arm.

    Args:
        job: what to measure.
        world_size: number of ranks.
        push_gbps: what a rank's link carries, for the floor; 0: what is known of this GPU.
        keep: called with the measurements of each shape and mode as soon as they are there, so that
            a run that is stopped keeps them.
        on_message: takes a rank and its progress: `text`, `done` and `total`.

    Raises:
        RankError: a rank raised, died or was late.
    """
    gpu = topology.device_name("cuda") if job.device == "cuda" else ""
    gbps = push_gbps or floor.push_gbps(gpu, world_size)
    measured: list[Measurement] = []

    def complete(ranks: list[list[dict[str, Any]]]) -> None:
        found = merge(ranks, job, gbps)
        measured.extend(found)
        keep(found)

    gatherer = Gatherer(world_size, complete, on_message or (lambda rank, message: None))
    run_ranks(
        run.run, world_size, device=job.device, args=(job,), timeout=_SECONDS, on_message=gatherer
    )
    return measured


def merge(
    ranks: Sequence[Sequence[dict[str, Any]]], job: run.Job, push_gbps: float | None
) -> list[Measurement]:
    """Joins the records of all ranks: the slowest rank's time counts, any rank's error counts.

    `ranks` are what `run.run` returned, in rank order, or a part of it.
    """
    plain = {
        _place(records[0]): _largest(r["p50_us"] for r in records)
        for records in zip(*ranks, strict=True)
        if records[0]["arm"] == "allnorm16"
    }
    merged = []
    for records in zip(*ranks, strict=True):
        first = records[0]
        shape, mode = job.shapes[first["shape"]], job.modes[first["mode"]]
        keys = (*TIMES, *BEHIND)
        times = {key: _largest(record.get(key, math.nan) for record in records) for key in keys}
        size = (shape.num_tokens, shape.hidden_size, DTYPES[job.dtype].itemsize)
        sent = floor.wire_bytes(len(ranks), *size, mode)
        cost = math.nan
        if mode.quant and first["arm"].partition(":")[0] == "allnorm":
            cost = times["p50_us"] - plain.get(_place(first), math.nan)
        merged.append(
            Measurement(
                shape,
                mode,
                len(ranks),
                first["arm"],
                **times,
                product=first.get("product", 0),
                over_ranks=first.get("over_ranks") or "slowest",
                error=next((record["error"] for record in records if record["error"]), ""),
                reason=next((record["reason"] for record in records if record["reason"]), ""),
                floor_us=floor.floor_us(sent, push_gbps),
                quant_cost_us=cost,
            )
        )
    return merged


class Gatherer:
    """Puts together what the ranks report, one shape and mode after the other.

    `complete` is called with the records of all ranks, in rank order, as soon as they are there,
    and `other` with every other message.
    """

    def __init__(
        self,
        world_size: int,
        complete: Callable[[list[list[dict[str, Any]]]], None],
        other: OnMessage,
    ) -> None:
        self._waiting: list[deque[list[dict[str, Any]]]] = [deque() for _ in range(world_size)]
        self._complete, self._other = complete, other

    def __call__(self, rank: int, message: dict[str, Any]) -> None:
        """Takes one message of a rank."""
        if "records" not in message:
            self._other(rank, message)
            return
        self._waiting[rank].append(message["records"])
        if all(self._waiting):
            self._complete([reported.popleft() for reported in self._waiting])


def json_row(m: Measurement, common: dict[str, Any]) -> dict[str, Any]:
    """One line of the results file."""
    return {
        **common,
        "world_size": m.world_size,
        **asdict(m.shape),
        **asdict(m.mode),
        "arm": m.arm,
        "mode": "product" if m.product else "chain",
        "product": m.product,
        **{key: getattr(m, key) for key in (*TIMES, *BEHIND)},
        "over_ranks": m.over_ranks,
        **{key: getattr(m, key) for key in ("quant_cost_us", "floor_us", "floor_share")},
        "correct": m.correct,
        "supported": not m.reason,
        "reason": m.reason,
        "error": m.error,
    }


def best(found: Iterable[Measurement]) -> Measurement | None:
    """The fastest of those that were timed."""
    timed = [m for m in found if math.isfinite(m.p50_us)]
    return min(timed, key=lambda m: m.p50_us, default=None)


def speed_up(found: Mapping[str, Measurement], others: Iterable[str]) -> float:
    """How many times faster "allnorm" is than the fastest of `others`; NaN if one was not timed."""
    other = best(found[arm] for arm in others if arm in found)
    return (
        _ratio(other.shown_us, found["allnorm"].shown_us)
        if other and "allnorm" in found
        else math.nan
    )


def missing(measurements: Iterable[Measurement]) -> dict[str, str]:
    """Why whole arms did not run, by arm; what runs at some shapes is left out."""
    measurements = list(measurements)
    ran = {family(m.arm) for m in measurements if not m.reason}
    return {m.arm: m.reason for m in measurements if m.reason and family(m.arm) not in ran}


def _place(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """Which calls a record is of."""
    return record["shape"], record["mode"], record.get("product", 0)


def _ratio(us: float, of_us: float) -> float:
    """NaN where there is no ratio: beyond a product, noise may leave no time, or less than none."""
    return us / of_us if of_us > 0 else math.nan


def _largest(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite, default=math.nan)
