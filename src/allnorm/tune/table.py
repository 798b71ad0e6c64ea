"""From what was measured to the table that is stored, and to rows of results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allnorm import tuning
from allnorm.policy import Curve
from allnorm.tune import crossovers, run
from allnorm.tune.run import LINK_SHAPE, CurveTimes, LinkTimes, Result
from allnorm.tuning import Curves, Measured

LINK_ARM = "link"
"""Rows of this arm say what a call takes at some rate of the link."""


def curves_of(result: Result) -> Curves:
    """The curves by dtype and epilogue; none where nothing was measured or all was wrong."""
    curves: Curves = {}
    for curve in result.curves:
        if steps := crossovers.steps(curve.times, without=result.wrong):
            product = (result.product, run.PRODUCT_TOKENS if result.product else 0)
            curves.setdefault(curve.name, []).append(Curve(curve.hidden_size, steps, *product))
    return curves


def store(
    result: Result, directory: Path | None, device: str, world_size: int, provenance: dict[str, Any]
) -> Path:
    """Writes the table of a device; curves of an earlier one that were not measured again stay.

    For `directory` see `tuning.path_of`; `provenance` is commit, versions, command and date.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    name, path = tuning.device_name(device), path_of(directory, device, world_size)
    before = _stored(directory, device, world_size).curves
    table = Measured(merge(before, curves_of(result)), result.link.gbps)
    tuning.save(path, tuning.document(table, name, world_size, provenance))
    return path


def path_of(directory: Path | None, device: str, world_size: int) -> Path:
    """Where the table of a device is kept."""
    return tuning.path_of(directory, tuning.device_name(device), world_size)


def _stored(directory: Path | None, device: str, world_size: int) -> Measured:
    path = path_of(directory, device, world_size)
    return tuning.read(path, tuning.device_name(device), world_size).tuned


def changes(result: Result, directory: Path | None, device: str, world_size: int) -> list[str]:
    """What storing would change, in lines: each curve that is new or other than the stored one."""
    stored, lines = _stored(directory, device, world_size), []
    if result.link.gbps != stored.link_gbps:
        lines.append(f"rate of the link: {stored.link_gbps:.0f} -> {result.link.gbps:.0f} GB/s")
    before = {(n, c.hidden_size): c for n, curves in stored.curves.items() for c in curves}
    for name, curves in curves_of(result).items():
        for curve in curves:
            old = before.get((name, curve.hidden_size))
            if old != curve:
                was = describe(old) if old else "nothing"
                what = f"{curve.hidden_size} columns, {', '.join(name)}"
                lines.append(f"{what}: {was} -> {describe(curve)}")
    widths = {c.hidden_size for curves in curves_of(result).values() for c in curves}
    if len(widths | {width for _, width in before}) == 1:
        lines.append("one width alone: decides for widths up to twice or half as wide, no others")
    return lines


def merge(before: Curves, measured: Curves) -> Curves:
    """The new curves, and of the stored ones those that were not measured again."""
    merged = {name: list(curves) for name, curves in measured.items()}
    for name, curves in before.items():
        again = {curve.hidden_size for curve in merged.get(name, [])}
        kept = [curve for curve in curves if curve.hidden_size not in again]
        merged[name] = [*merged.get(name, []), *kept]
    return merged


def describe(curve: Curve) -> str:
    """A curve in words: which candidate from how many tokens on."""
    parts, first = [], 1
    for step in curve.steps:
        name = str(crossovers.Candidate.of(step))
        span = f"from {first}" if step.max_tokens is None else f"{first}-{step.max_tokens}"
        parts.append(f"{span}: {name}")
        first = (step.max_tokens or 0) + 1
    return "; ".join(parts)


def describe_link(result: Result) -> str:
    """Which rate of the link was found, and what it brings; "" where none was looked for."""
    us, gbps = result.link.us, result.link.gbps
    if 0.0 not in us:
        return ""
    unpaced = f"{LINK_SHAPE} takes {us[0.0]:.1f} us"
    if not gbps:
        return f"rate of the link: none makes a difference, {unpaced}"
    return f"rate of the link: {gbps:.0f} GB/s; {unpaced} without it, {us[gbps]:.1f} with"


def link_rows(link: LinkTimes) -> Iterator[dict[str, Any]]:
    """A row for each rate of the link that was tried."""
    for rate, us in link.us.items():
        yield {
            "num_tokens": LINK_SHAPE.num_tokens,
            "hidden_size": LINK_SHAPE.hidden_size,
            "dtype": "bfloat16",
            "quant": "",
            "arm": LINK_ARM,
            "link_gbps": rate,
            "p50_us": us,
            "correct": True,
            "chosen": rate == link.gbps,
        }


def curve_rows(curve: CurveTimes, link_gbps: float, product: int) -> Iterator[dict[str, Any]]:
    """A row for each time of a curve, measured at a rate of the link and behind a product."""
    chosen = crossovers.winners(crossovers.leave_out(curve.times, curve.wrong))
    for beside, times in ((False, curve.times), (True, curve.chain)):
        for tokens, found in times.items():
            behind = product and not beside and tokens <= run.PRODUCT_TOKENS
            for candidate, us in found.items():
                yield {
                    "num_tokens": tokens,
                    "hidden_size": curve.hidden_size,
                    "dtype": curve.dtype,
                    "quant": curve.quant,
                    "arm": f"allnorm:{candidate.algorithm}",
                    "num_blocks": candidate.num_blocks,
                    "cluster_size": candidate.cluster_size,
                    "link_gbps": link_gbps,
                    "mode": "product" if behind else "chain",
                    "product": product if behind else 0,
                    "p50_us": us,
                    "correct": candidate not in curve.wrong,
                    "chosen": not beside and chosen.get(tokens) == candidate,
                }
