"""Comparison with an earlier results file, to find regressions beyond the measurement spread.

An earlier row matches a new one if hardware, ranks, shape, dtype, rounding mode, mode and arm are
equal. An arm has regressed if its median exceeds the median in the file by more than the tolerance.
If the file has multiple matching rows, the median of their medians counts. The tolerance is the
largest of

- the spread in the file: with multiple rows, their largest minus their smallest median; with
  one row, p99 - p50;
- the spread p99 - p50 of the new measurement;
- the variation between quiet runs: 0.1 us and 2 % (docs/performance.md).

An arm has also regressed if it was right in the file and is now wrong, or does not run. Other
libraries' arms are compared and shown, but only allnorm's arms count as regressions.

The speed of a CPU machine varies between runs. If other libraries' arms are slower than in the
file, the file's times are scaled by the median of the time ratios.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allnorm.bench.modes import is_other

_RUN_TO_RUN_US = 0.1
_RUN_TO_RUN_SHARE = 0.02

# The fields that identify a row, with defaults for fields that older versions did not write.
_KEY: dict[str, Any] = {
    **dict.fromkeys(("gpu", "cpu", "world_size", "num_tokens", "hidden_size", "eps", "dtype")),
    "arm": None,
    "weight_bias": 0.0,
    "numerics": "rounded",
    "quant": "",
    "residual_sharded": False,
    "return_normed": False,
    "post_norm": False,
    "experts": 0,
    "float32_residual": False,
    "own_rows": False,
    "slices": 0,
    "streams": 0,
    "next_input": False,
    "product": 0,
    "max_blocks": 0,
    "island_size": 0,
}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """An arm's times in the file and now."""

    row: Row  # the new row
    before_us: float  # the median in the file; NaN if the file has no time
    tolerance_us: float  # allowed difference
    # On CPU: factor by which other libraries have become slower; 1 if they have not, or unknown.
    slowdown: float = 1.0

    @property
    def now_us(self) -> float:
        """The new median; NaN if the arm was not timed."""
        return _number(self.row, "p50_us")

    @property
    def difference_us(self) -> float:
        """The new median minus the old one; infinite if the arm is now wrong or does not run."""
        right = self.row["correct"] and math.isfinite(self.now_us)
        return self.now_us - self.before_us if right else math.inf

    @property
    def slower(self) -> bool:
        """Whether the arm is slower by more than the tolerance."""
        machine_us = self.before_us * (self.slowdown - 1)
        return self.difference_us > self.tolerance_us + machine_us

    @property
    def regressed(self) -> bool:
        """Whether the arm is slower and belongs to allnorm."""
        return self.slower and str(self.row["arm"]).startswith("allnorm")

    @property
    def faster(self) -> bool:
        """Whether the arm is faster by more than the tolerance."""
        return -self.difference_us > self.tolerance_us


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a results file.

    Raises:
        ValueError: the file does not exist or is not a results file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not rows or not all(
        isinstance(row, dict) and {"arm", "p50_us"} <= row.keys() for row in rows
    ):
        raise ValueError(f"{path}: expected the JSON lines that bench --json wrote")
    return rows


def changes(before: Iterable[Row], now: Iterable[Row]) -> list[Change]:
    """Returns a Change for each new row whose arm was right in the file (`before`)."""
    earlier: dict[tuple[Any, ...], list[Row]] = {}
    for row in before:
        if row.get("correct") and math.isfinite(_number(row, "p50_us")):
            earlier.setdefault(_key(row), []).append(row)
    found = []
    for row in now:
        same = earlier.get(_key(row))
        absent = row["reason"] and is_other(str(row["arm"]))  # the library is not installed here
        if same and not absent:
            median = statistics.median(_number(old, "p50_us") for old in same)
            found.append(Change(row, median, _tolerance(same, row, median)))
    return [replace(change, slowdown=_slowdown(change, found)) for change in found]


def _slowdown(change: Change, found: Iterable[Change]) -> float:
    """Returns the factor by which other libraries are slower with this number of CPU ranks."""
    if not change.row.get("cpu") or is_other(str(change.row["arm"])):
        return 1.0
    ranks = change.row["world_size"]
    ratios = [
        other.now_us / other.before_us
        for other in found
        if is_other(str(other.row["arm"]))
        and other.row["world_size"] == ranks
        and math.isfinite(other.difference_us)
    ]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def summary(found: list[Change], num_rows: int, name: str) -> str:
    """Returns a sentence with the counts of compared, regressed, faster and equal rows."""
    regressed = sum(change.regressed for change in found)
    slower = sum(change.slower for change in found) - regressed
    faster = sum(change.faster for change in found)
    same = len(found) - regressed - slower - faster
    return (
        f"{len(found)} of {num_rows} rows are in {name}: {regressed} regressed, {faster} faster, "
        f"{slower} of other libraries slower, {same} the same within the measured spread"
    )


def _tolerance(before: list[Row], now: Row, median: float) -> float:
    medians = [_number(row, "p50_us") for row in before]
    spread = max(medians) - min(medians) if len(before) > 1 else _spread(before[0])
    return max(spread, _spread(now), _RUN_TO_RUN_US, _RUN_TO_RUN_SHARE * median)


def _spread(row: Row) -> float:
    spread = _number(row, "p99_us") - _number(row, "p50_us")
    return spread if math.isfinite(spread) else 0.0


def _number(row: Row, key: str) -> float:
    """Returns a number from a row; the file stores NaN as null."""
    value = row.get(key)
    return math.nan if value is None else float(value)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name, default) for name, default in _KEY.items())
