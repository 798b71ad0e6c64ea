"""Measurements, merged from all ranks' records, and comparisons between them."""

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

_SECONDS = 3600.0  # time limit of a run
_TIMES = (
    *("p50_us", "p90_us", "p99_us", "host_us", "eager_us"),
    *("product_us", "empty_us", "beyond_empty_us"),
)


@dataclass(frozen=True)
class Measurement:
    """One arm at one shape in one mode, over all ranks."""

    shape: Shape  # shape of the call
    mode: Mode  # kind of the call
    world_size: int  # number of ranks
    arm: str  # name of the implementation
    # Time per call, the maximum over ranks. After a GEMM: the time in excess of the GEMM's time,
    # with ranks combined as in `over_ranks`. NaN if not timed.
    p50_us: float
    p90_us: float
    p99_us: float
    # For calls without a graph: host time per call, and time until it completes; NaN if not
    # measured.
    host_us: float = math.nan
    eager_us: float = math.nan
    error: str = ""  # error in the result; "" if it is right
    reason: str = ""  # why the arm cannot run; "" if it ran
    # Input features (K) of the GEMM before each call; 0: no GEMM, a chain of calls.
    product: int = 0
    # Time of the GEMM alone, already subtracted from p50_us to p99_us; NaN without a GEMM.
    product_us: float = math.nan
    # Time of an empty kernel after the GEMM, and p50_us minus it; NaN without a GEMM.
    empty_us: float = math.nan
    beyond_empty_us: float = math.nan
    # Rule that combines the ranks' times. "slowest": the largest of the ranks' percentiles. After a
    # GEMM: percentiles of the "shortest" time per replay if ranks wait for each other, otherwise of
    # the "longest".
    over_ranks: str = "slowest"
    # Minimum time to send the bytes of this shape in this mode; NaN if unknown.
    floor_us: float = math.nan
    # Time of a quantized allnorm arm in excess of the 16-bit call's time.
    quant_cost_us: float = math.nan

    @property
    def correct(self) -> bool:
        """Whether the arm ran and its result was right."""
        return not self.reason and not self.error

    @property
    def shown_us(self) -> float:
        """The p50 that tables and pictures show; after a GEMM, in excess of an empty kernel."""
        return self.beyond_empty_us if self.product else self.p50_us

    @property
    def shown_p99_us(self) -> float:
        """The p99 that tables and pictures show; after a GEMM, in excess of an empty kernel."""
        return self.p99_us - self.empty_us if self.product else self.p99_us

    @property
    def floor_share(self) -> float:
        """The wire floor divided by the time; NaN if unknown."""
        return _ratio(self.floor_us, self.shown_us)


def measure(
    job: run.Job,
    world_size: int,
    push_gbps: float = 0.0,
    keep: Callable[[list[Measurement]], None] = lambda measured: None,
    on_message: OnMessage | None = None,
) -> list[Measurement]:
    """Starts ranks that run the job; returns one measurement per shape, mode and arm.

    Args:
        job: what to measure.
        world_size: number of ranks.
        push_gbps: bandwidth of a rank's link, for the floor; 0: the known value of this GPU.
        keep: called with the measurements of each shape and mode as soon as they are complete, so
            that an interrupted run keeps them.
        on_message: takes a rank and its progress: `text`, `done` and `total`.

    Raises:
        RankError: a rank raised an error, died or timed out.
    """
    gpu = topology.device_name("cuda") if job.device == "cuda" else ""
    gbps = push_gbps or floor.push_gbps(gpu, world_size)
    measured: list[Measurement] = []

    def complete(ranks: list[list[dict[str, Any]]]) -> None:
        found = merge(ranks, job, gbps)
        measured.extend(found)
        keep(found)

    handle = gatherer(world_size, complete, on_message or (lambda rank, message: None))
    run_ranks(
        run.run, world_size, device=job.device, args=(job,), timeout=_SECONDS, on_message=handle
    )
    return measured


def merge(
    ranks: Sequence[Sequence[dict[str, Any]]], job: run.Job, push_gbps: float | None
) -> list[Measurement]:
    """Merges all ranks' records: takes the slowest rank's time, and any rank's error.

    `ranks` holds the results of `run.run`, in rank order, or a part of them.
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
        times = {key: _largest(record.get(key, math.nan) for record in records) for key in _TIMES}
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
                error=next(filter(None, (record["error"] for record in records)), ""),
                reason=next(filter(None, (record["reason"] for record in records)), ""),
                floor_us=floor.floor_us(sent, push_gbps),
                quant_cost_us=cost,
            )
        )
    return merged


def gatherer(
    world_size: int, complete: Callable[[list[list[dict[str, Any]]]], None], other: OnMessage
) -> OnMessage:
    """Returns a message handler that collects all ranks' records for each shape and mode.

    It calls `complete` with the records of all ranks, in rank order, once every rank has reported
    them. It calls `other` with every other message.
    """
    waiting: list[deque[list[dict[str, Any]]]] = [deque() for _ in range(world_size)]

    def handle(rank: int, message: dict[str, Any]) -> None:
        if "records" not in message:
            other(rank, message)
            return
        waiting[rank].append(message["records"])
        if all(waiting):
            complete([reported.popleft() for reported in waiting])

    return handle


def json_row(m: Measurement, common: dict[str, Any]) -> dict[str, Any]:
    """Returns one row of the results file."""
    values = asdict(m)
    return {
        **common,
        **values.pop("shape"),
        **values.pop("mode"),
        **values,
        "mode": "product" if m.product else "chain",
        "floor_share": m.floor_share,
        "correct": m.correct,
        "supported": not m.reason,
    }


def best(found: Iterable[Measurement]) -> Measurement | None:
    """Returns the fastest timed measurement; None if none was timed."""
    timed = [m for m in found if math.isfinite(m.p50_us)]
    return min(timed, key=lambda m: m.p50_us, default=None)


def speed_up(found: Mapping[str, Measurement], others: Iterable[str]) -> float:
    """Returns the speedup of "allnorm" over the fastest of `others`; NaN if either is missing."""
    other = best(found[arm] for arm in others if arm in found)
    return (
        _ratio(other.shown_us, found["allnorm"].shown_us)
        if other and "allnorm" in found
        else math.nan
    )


def missing(measurements: Iterable[Measurement]) -> dict[str, str]:
    """Returns the arms that ran at no shape, each with the reason why it did not run."""
    measurements = list(measurements)
    ran = {family(m.arm) for m in measurements if not m.reason}
    return {m.arm: m.reason for m in measurements if m.reason and family(m.arm) not in ran}


def _place(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns the shape, mode and GEMM of a record."""
    return record["shape"], record["mode"], record.get("product", 0)


def _ratio(us: float, of_us: float) -> float:
    """Returns the quotient; NaN if `of_us` is not positive, which noise can cause after a GEMM."""
    return us / of_us if of_us > 0 else math.nan


def _largest(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite, default=math.nan)
