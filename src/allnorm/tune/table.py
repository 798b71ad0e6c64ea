"""Converts measurements to the stored table and to rows of the results file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allnorm import tuning
from allnorm.policy import Curve
from allnorm.tune import crossovers, prefetch, run
from allnorm.tune.run import LINK_SHAPE, CurveTimes, LinkTimes, Result
from allnorm.tuning import Curves, Measured

LINK_ARM = "link"
"""The arm name in rows that hold a call's time at a link rate."""


def curves_of(result: Result) -> Curves:
    """Returns the curves by dtype and epilogue, without curves that have no correct results."""
    curves: Curves = {}
    for curve in result.curves:
        if steps := crossovers.steps(curve.times, without=result.wrong):
            product = (result.product, run.PRODUCT_TOKENS if result.product else 0)
            curves.setdefault(curve.name, []).append(Curve(curve.hidden_size, steps, *product))
    return curves


def store(
    result: Result, directory: Path | None, device: str, world_size: int, provenance: dict[str, Any]
) -> Path:
    """Writes the table of a device; keeps what is stored and was not measured again.

    For `directory` see `tuning.path_of`. `provenance` has commit, versions, command and date.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    name, path = tuning.device_name(device), path_of(directory, device, world_size)
    before = _stored(directory, device, world_size)
    ahead = before.prefetch_tokens if result.prefetch.tokens is None else result.prefetch.tokens
    table = Measured(merge(before.curves, curves_of(result)), result.link.gbps, ahead)
    tuning.save(path, tuning.document(table, name, world_size, provenance))
    return path


def path_of(directory: Path | None, device: str, world_size: int) -> Path:
    """Returns the file of a device's table."""
    return tuning.path_of(directory, tuning.device_name(device), world_size)


def _stored(directory: Path | None, device: str, world_size: int) -> Measured:
    path = path_of(directory, device, world_size)
    return tuning.read(path, tuning.device_name(device), world_size).tuned


def changes(result: Result, directory: Path | None, device: str, world_size: int) -> list[str]:
    """Returns a line per curve that is new or differs from the stored one."""
    stored, lines = _stored(directory, device, world_size), []
    if result.link.gbps != stored.link_gbps:
        lines.append(f"link rate: {stored.link_gbps:.0f} -> {result.link.gbps:.0f} GB/s")
    ahead = result.prefetch.tokens
    if ahead is not None and ahead != stored.prefetch_tokens:
        was = prefetch.describe(stored.prefetch_tokens)
        lines.append(f"prefetch: {was} -> {prefetch.describe(ahead)}")
    before = {(n, c.hidden_size): c for n, curves in stored.curves.items() for c in curves}
    for name, curves in curves_of(result).items():
        for curve in curves:
            old = before.get((name, curve.hidden_size))
            if old != curve:
                was = describe(old) if old else "none"
                what = f"{curve.hidden_size} columns, {', '.join(name)}"
                lines.append(f"{what}: {was} -> {describe(curve)}")
    widths = {c.hidden_size for curves in curves_of(result).values() for c in curves}
    if len(widths | {width for _, width in before}) == 1:
        lines.append("only one width: the table applies to widths from half to twice of it")
    return lines


def merge(before: Curves, measured: Curves) -> Curves:
    """Returns the new curves and the stored ones that were not measured again."""
    merged = {name: list(curves) for name, curves in measured.items()}
    for name, curves in before.items():
        again = {curve.hidden_size for curve in merged.get(name, [])}
        kept = [curve for curve in curves if curve.hidden_size not in again]
        merged[name] = [*merged.get(name, []), *kept]
    return merged


def describe(curve: Curve) -> str:
    """Describes a curve: the candidate for each range of tokens."""
    parts, first = [], 1
    for step in curve.steps:
        name = str(crossovers.Candidate.of(step))
        span = f"from {first}" if step.max_tokens is None else f"{first}-{step.max_tokens}"
        parts.append(f"{span}: {name}")
        first = (step.max_tokens or 0) + 1
    return "; ".join(parts)


def describe_link(result: Result) -> str:
    """Describes the best link rate and its gain; "" if rates were not measured."""
    us, gbps = result.link.us, result.link.gbps
    if 0.0 not in us:
        return ""
    unpaced = f"{LINK_SHAPE} takes {us[0.0]:.1f} us"
    if not gbps:
        return f"link rate: pacing makes no difference; {unpaced}"
    return f"link rate: {gbps:.0f} GB/s; {unpaced} without pacing, {us[gbps]:.1f} us with"


def link_rows(link: LinkTimes) -> Iterator[dict[str, Any]]:
    """Yields a results row for each link rate that was tried."""
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
    """Yields a results row for each time of a curve."""
    chosen = crossovers.winners(crossovers.leave_out(curve.times, curve.wrong))
    for in_chain, times in ((False, curve.times), (True, curve.chain)):
        for tokens, found in times.items():
            after_gemm = product and not in_chain and tokens <= run.PRODUCT_TOKENS
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
                    "mode": "product" if after_gemm else "chain",
                    "product": product if after_gemm else 0,
                    "p50_us": us,
                    "correct": candidate not in curve.wrong,
                    "chosen": not in_chain and chosen.get(tokens) == candidate,
                }
