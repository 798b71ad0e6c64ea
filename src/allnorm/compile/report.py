"""What the pass did, and why not more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Site:
    """One reduction of a graph.

    Attributes:
        nodes: names of the nodes that were replaced, in the order of the graph, the reduction first
            and the norm last; of a missed site those of the reduction. Names are the graph's before
            the rewrite.
        shape: of the tensor that is reduced; a dimension that is not a constant is text. None if
            unknown.
        dtype: of the tensor that is reduced; None if unknown.
        group: name of the process group, or of the communicator; empty if the graph does not say.
        numerics: the rounding mode that computes what the graph computed; None if missed.
        reason: why the site was missed; None if it was fused.
        quant: the quantisation that was fused too, such as "per_group 128"; None if none was.
        note: what else of a fused site could nearly have been fused, and why it was not.
        boundary: what is beside a residual and one norm, such as "post norm, scale 0.5"; empty if
            nothing is.
    """

    nodes: tuple[str, ...]
    shape: tuple[int | str, ...] | None
    dtype: torch.dtype | None
    group: str
    numerics: str | None = None
    reason: str | None = None
    quant: str | None = None
    note: str = ""
    boundary: str = ""

    @property
    def fused(self) -> bool:
        """Whether the site was replaced."""
        return self.reason is None

    def __str__(self) -> str:
        return " | ".join(_cells(self))


class FusionReport:
    """Every reduction that was seen, fused or missed with the reason; `print` shows a table.

    Attributes:
        sites: all reductions, in the order of the graph.
    """

    def __init__(self, sites: Iterable[Site] = ()) -> None:
        self.sites: list[Site] = list(sites)

    @property
    def fused(self) -> list[Site]:
        """The sites that were replaced."""
        return [site for site in self.sites if site.fused]

    @property
    def missed(self) -> list[Site]:
        """The sites that were left as they were; each says why in `reason`."""
        return [site for site in self.sites if not site.fused]

    def __repr__(self) -> str:
        return f"<FusionReport: {len(self.fused)} of {len(self.sites)} reductions fused>"

    def __str__(self) -> str:
        title = f"{len(self.fused)} of {len(self.sites)} reductions fused"
        if not self.sites:
            return title
        rows = [("site", "shape", "group", "numerics", "nodes"), *map(_cells, self.sites)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [title]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[4]]).rstrip())
        return "\n".join(lines)


def _cells(site: Site) -> tuple[str, str, str, str, str]:
    shape = "?" if site.shape is None else "x".join(map(str, site.shape)) or "scalar"
    dtype = "" if site.dtype is None else f" {str(site.dtype).removeprefix('torch.')}"
    nodes = site.nodes if len(site.nodes) <= 2 else (site.nodes[0], "...", site.nodes[-1])
    return (
        "fused" if site.fused else "missed",
        shape + dtype,
        site.group or "?",
        ", ".join(part for part in (site.numerics, site.boundary, site.quant) if part) or "-",
        " ".join(nodes) + (f": {site.reason or site.note}" if site.reason or site.note else ""),
    )
