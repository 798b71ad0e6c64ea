"""Pictures of a benchmark: latency against the number of tokens, all arms and the floor."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from allnorm.bench.modes import Mode, family
from allnorm.bench.report import Measurement, best
from allnorm.cli import output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
"""Supported file name suffixes of pictures."""
BANDS = "lines: p50; bands: p50 to p99"
"""Legend of a panel's lines and bands."""

_PANEL_INCHES = (7.6, 4.2)
_COLUMNS = 2
_INK = "#123457"  # unique placeholder; replaced by the text color of the page
_OWN_COLOR = "#d62728"
_OWN_STYLES = {"allnorm:one_shot": ":", "allnorm:two_shot": "-.", "allnorm:unfused": (0, (1, 4))}
# These colors are readable on white and on black; none is close to red.
_OTHER_COLORS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b"),
    *("#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)


@dataclass(frozen=True)
class Panel:
    """The plot of one world size, mode, hidden size and GEMM."""

    world_size: int
    mode: Mode
    hidden_size: int
    product: int = 0

    def shows(self, m: Measurement) -> bool:
        """Returns whether the measurement belongs to this panel."""
        return self == Panel(m.world_size, m.mode, m.shape.hidden_size, m.product)


def check_installed(option: str) -> None:
    """Checks for matplotlib before anything is measured.

    Raises:
        typer.BadParameter: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        text = "needs matplotlib, which is not installed: pip install allnorm[plot]"
        raise typer.BadParameter(text, param_hint=option)


def panels(measurements: Sequence[Measurement]) -> list[Panel]:
    """Returns the panels of the measurements, in order of first use."""
    found = (Panel(m.world_size, m.mode, m.shape.hidden_size, m.product) for m in measurements)
    return list(dict.fromkeys(found))


def save(measurements: Sequence[Measurement], path: Path, heading: str) -> None:
    """Writes a picture with all panels: .png, .svg or .pdf, by its ending."""
    shown = panels(measurements)
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure = _figure(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows)
    for index, panel in enumerate(shown):
        _draw(figure.add_subplot(rows, columns, index + 1), measurements, panel)
    figure.suptitle(heading)
    output.write_results(path, lambda file: figure.savefig(file, dpi=150))


def svg(measurements: Sequence[Measurement], panel: Panel) -> str:
    """Returns one panel as an inline SVG element that inherits the page's text color and font."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": repr(panel),  # ids must not clash with those of other panels
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
        "axes.edgecolor": _INK,
    }
    with matplotlib.rc_context(settings):
        figure = _figure(*_PANEL_INCHES)
        _draw(figure.add_subplot(), measurements, panel)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # HTML needs no namespace declarations


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # pyplot would look for a window system

    return Figure(figsize=(width, height), layout="constrained")


def _draw(axes: Axes, measurements: Sequence[Measurement], panel: Panel) -> None:
    from matplotlib.ticker import LogFormatter

    # After a GEMM, the empty kernel is the zero line.
    shown = [m for m in measurements if panel.shows(m) and m.arm != "empty"]
    shown = [m for m in shown if m.shown_us > 0]
    kinds = list(dict.fromkeys(family(m.arm) for m in shown))
    for kind in kinds:
        _line(axes, [m for m in shown if family(m.arm) == kind], kind, _look(kind, kinds))
    floors = {m.shape.num_tokens: m.floor_us for m in shown if math.isfinite(m.floor_us)}
    if floors:
        tokens = sorted(floors)
        times = [floors[t] for t in tokens]
        axes.plot(tokens, times, "--", color="gray", linewidth=1, label="wire floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if floors and shown:  # the floor of one token is far below everything else
        axes.set_ylim(bottom=min(m.shown_us for m in shown) / 2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("us in excess of an empty kernel" if panel.product else "us per call")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(LogFormatter())  # plain numbers instead of powers of ten
    what = f", {panel.mode}" if str(panel.mode) else ""
    what += f", after a GEMM (K = {panel.product})" if panel.product else ""
    title = f"{output.ranks(panel.world_size)}, hidden size {panel.hidden_size}{what}"
    axes.set_title(f"{title}\n{BANDS}", fontsize="medium")
    axes.grid(alpha=0.25)
    if shown:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")


def _line(axes: Axes, members: list[Measurement], kind: str, look: dict[str, Any]) -> None:
    """Draws the p50 of the fastest variant per number of tokens, with a band up to its p99."""
    sizes = sorted({m.shape.num_tokens for m in members})
    fastest = (best(m for m in members if m.shape.num_tokens == size) for size in sizes)
    points = [m for m in fastest if m is not None]
    tokens = [m.shape.num_tokens for m in points]
    low, high = [m.shown_us for m in points], [m.shown_p99_us for m in points]
    axes.plot(tokens, low, label=kind, **look)
    axes.fill_between(tokens, low, high, color=look["color"], alpha=0.12, linewidth=0)


def _look(kind: str, kinds: list[str]) -> dict[str, Any]:
    """Returns the style of a line: bold for allnorm, dotted for its algorithms."""
    if kind == "allnorm":
        return {"color": _OWN_COLOR, "marker": "o", "linewidth": 2.2, "zorder": 3}
    if kind.startswith("allnorm:"):
        return {"color": _OWN_COLOR, "linestyle": _OWN_STYLES[kind], "linewidth": 1}
    others = [k for k in kinds if not k.startswith("allnorm:") and k != "allnorm"]
    color = _OTHER_COLORS[others.index(kind) % len(_OTHER_COLORS)]
    return {"color": color, "marker": ".", "linewidth": 1.2}
