"""The graph pass's report: which reductions were fused, and why the others were not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Site:
    """One reduction in a graph.

    Attributes:
        nodes: the names of the replaced nodes, in graph order before the rewrite: the reduction
            first, the norm last. For a missed site, only the name of the reduction.
        shape: the shape of the reduced tensor; symbolic dimensions are strings. None if unknown.
        dtype: the dtype of the reduced tensor; None if unknown.
        group: the name of the process group or of the communicator; empty if the graph does not
            name it.
        numerics: the rounding mode that reproduces the graph's results; None if the site was
            missed.
        reason: why the site was missed; None if it was fused.
        quant: the quantization that was also fused, such as "per_group 128"; None without one.
        note: for a fused site, what else could have been fused but was not, and why.
        boundary: the steps that were fused in addition to a residual add and one norm, such as
            "post norm, scale 0.5"; empty without such steps. "rows over ranks" if the call is
            `rms_norm_sharded`.
        merged_with: the name of an earlier site's reduction, if the call of that site replaces this
            reduction too: one launch norms the tensors of both. Empty otherwise.
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
    merged_with: str = ""

    @property
    def fused(self) -> bool:
        """Whether the site was fused."""
        return self.reason is None

    def __str__(self) -> str:
        return " | ".join(_cells(self))


class FusionReport:
    """A list of all reductions in a graph, fused or missed; `print` shows it as a table.

    Attributes:
        sites: all reductions, in graph order.
    """

    def __init__(self, sites: Iterable[Site] = ()) -> None:
        self.sites: list[Site] = list(sites)

    @property
    def fused(self) -> list[Site]:
        """The sites that were fused."""
        return [site for site in self.sites if site.fused]

    @property
    def missed(self) -> list[Site]:
        """The sites that were not fused; each has a `reason`."""
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
    text = site.reason or site.note
    if site.merged_with and not text:
        text = f"in the call of {site.merged_with}"
    nodes = site.nodes if len(site.nodes) <= 2 else (site.nodes[0], "...", site.nodes[-1])
    return (
        "fused" if site.fused else "missed",
        shape + dtype,
        site.group or "?",
        ", ".join(part for part in (site.numerics, site.boundary, site.quant) if part) or "-",
        " ".join(nodes) + (f": {text}" if text else ""),
    )
