"""Draws the pictures of the README and of the site, each for light and for dark backgrounds.

    python benchmarks/pictures.py [FOLDER]      (docs/pictures; `make pictures` does this)

Times come from the rows of `benchmarks/results/` that `CHARTS`, `PRODUCTS` and `ENGINES` name.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import NullLocator

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "pictures"


class Theme(NamedTuple):
    """Colors for one kind of background. The background itself is transparent."""

    ending: str  # suffix of the file names
    ink: str  # text and axes
    quiet: str  # secondary text and lines
    box: str  # fill of boxes
    own: str  # allnorm


LIGHT = Theme("", "#1f2328", "#6e7781", "#eaeef2", "#cf222e")
DARK = Theme("-dark", "#e6edf3", "#8b949e", "#30363d", "#ff6b63")

Row = dict[str, Any]


class Source(NamedTuple):
    """The rows of one commit; if `libraries` is not empty, only the rows of these libraries."""

    file: str
    commit: str
    libraries: tuple[str, ...] = ()


class Chart(NamedTuple):
    """A chart of the time per call against the number of tokens."""

    world_size: int
    sources: tuple[Source, ...]
    hidden_size: int = 4096


# Maps each library to its `bench` arms; its fastest arm is drawn. The colors are distinct with
# red-green color blindness, and have enough contrast with both backgrounds.
LIBRARIES = {
    "allnorm": ("allnorm",),
    "SGLang": ("sglang", "sglang:one_shot", "sglang:two_shot", "sglang+local"),
    "FlashInfer": ("flashinfer", "flashinfer:one_shot", "flashinfer:two_shot"),
    "vLLM": ("vllm", "vllm+local"),
    "symm. memory": ("symm_mem:one_shot+local", "symm_mem:two_shot+local"),
    "NCCL": ("nccl+local", "nccl+torch"),
}
COLORS = {
    "SGLang": "#e69f00",
    "FlashInfer": "#0f9d76",
    "vLLM": "#3b8eea",
    "symm. memory": "#b07aa1",
    "NCCL": "#8c8c8c",
}

CHARTS = {
    "h200x2": Chart(2, (Source("h200x2-peers.jsonl", "b272a2f"),)),
    "h200x4": Chart(
        4,
        (
            Source("h200x4-peers.jsonl", "f2624c4", ("SGLang", "FlashInfer")),
            Source("h200x4-paced.jsonl", "8450e99"),
        ),
    ),
}

# Rows of benchmarks/behind_product.py, measured in separate processes.
PRODUCTS = {"h100x2-product": Source("h100x2-product.jsonl", "00b13f4")}
# GEMMs with more tokens draw all of the GPU's power, so times vary (docs/performance.md).
COOL_TOKENS = 64
PRODUCT_PANELS = {
    "chain": ("p50_us", "in a chain of the same calls", "us per call"),
    "product": ("beyond_empty_us", "right after a GEMM", "us in excess of an empty kernel"),
}

# Maps each panel title to rows of benchmarks/engines/vllm_latency.py and to labels of its arms.
# FlashInfer was not installed when the older rows were measured, so their "default" is vLLM without
# its fusion.
ENGINES = {
    "Llama 3.1 8B, two H200s": (
        Source("h200x2-vllm-8b-installed.jsonl", "f0f02a6"),
        {"unfused": "vLLM without its fusion", "default": "vLLM as installed"},
    ),
    "Llama 3.1 70B, four H200s, older kernels": (
        Source("h200x4-vllm-70b.jsonl", "790f543"),
        {"default": "vLLM without its fusion"},
    ),
}


@functools.cache
def stored(file: str) -> list[Row]:
    """Returns all rows of a results file."""
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


def of_commit(source: Source) -> list[Row]:
    """Returns the rows measured at the commit of `source`."""
    return [row for row in stored(source.file) if row["commit"].startswith(source.commit)]


def library_of(arm: str) -> str | None:
    """Returns the library of an arm; None if it is not drawn."""
    return next((name for name, arms in LIBRARIES.items() if arm in arms), None)


def chart_rows(chart: Chart) -> dict[str, dict[int, Row]]:
    """Returns the fastest row of each library at each number of tokens.

    If several sources have a library, the first one is used.
    """
    found: dict[str, dict[int, Row]] = {}
    for source in chart.sources:
        mine: dict[str, dict[int, Row]] = {}
        for row in of_commit(source):
            library = library_of(row["arm"])
            if (
                library is None
                or (source.libraries and library not in source.libraries)
                or (row["world_size"], row["hidden_size"]) != (chart.world_size, chart.hidden_size)
                or row["quant"]
                or row["residual_sharded"]
                or row.get("float32_residual")
                or row.get("slices")
                or row.get("streams")
                or not (row["supported"] and row["correct"])
            ):
                continue
            best = mine.setdefault(library, {})
            tokens = row["num_tokens"]
            if tokens not in best or row["p50_us"] < best[tokens]["p50_us"]:
                best[tokens] = row
        found = {**mine, **found}
    return found


def mode_times(source: Source, mode: str, hidden_size: int = 4096) -> dict[str, dict[int, float]]:
    """Returns each library's fastest time in us, by number of tokens: the median over processes.

    `mode` is a key of PRODUCT_PANELS. Mode "product" also has "local": the norm alone.
    """
    field = PRODUCT_PANELS[mode][0]
    found: dict[tuple[str, str, int], list[float]] = {}
    for row in of_commit(source):
        name = "local" if row["arm"] == "local" else library_of(row["arm"])
        if name and row["mode"] == mode and row["hidden_size"] == hidden_size and row["correct"]:
            found.setdefault((name, row["arm"], row["num_tokens"]), []).append(row[field])
    times: dict[str, dict[int, float]] = {}
    for (name, _, tokens), values in sorted(found.items()):
        of = times.setdefault(name, {})
        of[tokens] = min(statistics.median_low(values), of.get(tokens, math.inf))
    return times


def engine_times(source: Source) -> dict[str, dict[int, float]]:
    """Returns the milliseconds per output token by arm and batch."""
    times: dict[str, dict[int, float]] = {}
    for row in of_commit(source):
        if row["kind"] == "latency":
            times.setdefault(row["arm"], {})[row["batch"]] = row["tpot_ms"]
    return times


def latency(figure: Figure, theme: Theme, chart: Chart) -> None:
    """Draws a labeled line per library, and the minimum time of the link."""
    axes = figure.add_subplot()
    rows = chart_rows(chart)
    height = 0.0
    for library in sorted(rows, key=lambda name: rows[name][1]["p50_us"]):
        tokens = sorted(rows[library])
        times = [rows[library][t]["p50_us"] for t in tokens]
        look = line(library, theme)
        axes.plot(tokens, times, **look)
        height = max(times[0], height * 1.38)  # names must not overlap
        place = {"ha": "right", "va": "center", "color": look["color"]}
        place["weight"] = "bold" if library == "allnorm" else "normal"
        axes.text(tokens[0] * 0.8, height, library, **place)
    floor = link_times(rows["allnorm"])
    axes.plot(list(floor), list(floor.values()), "--", color=theme.quiet, linewidth=1.2)
    place = {"ha": "left", "va": "top", "textcoords": "offset points"}
    axes.annotate(
        "minimum time\nof the link", (256, floor[256]), (8, -4), color=theme.quiet, **place
    )
    scale(axes, [1, 4, 16, 64, 256, 1024, 8192], [2, 5, 10, 20, 50, 100, 200, 400])
    axes.set_xlim(0.03)
    axes.set_ylim(1.6)
    axes.set_ylabel("us per call")
    axes.set_title(
        f"tokens x {chart.hidden_size}, bf16, {chart.world_size} H200s: p50 in CUDA graphs"
    )


def line(library: str, theme: Theme) -> dict[str, Any]:
    """Returns the style of a library's line; allnorm's is thick and in front."""
    own = library == "allnorm"
    return {
        "marker": "o",
        "color": theme.own if own else COLORS.get(library, theme.quiet),
        "linewidth": 2.6 if own else 1.4,
        "markersize": 5 if own else 3,
        "zorder": 3 if own else 2,
    }


def scale(axes: Axes, tokens: list[int], times: list[int]) -> None:
    """Makes both axes logarithmic, with these numbers of tokens and times as ticks."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xticks(tokens, map(str, tokens))
    axes.set_yticks(times, map(str, times))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    axes.set_xlabel("tokens")


def both_modes(figure: Figure, theme: Theme, source: Source) -> None:
    """Draws the times in a chain and right after a GEMM side by side."""
    for index, (mode, (_, title, label)) in enumerate(PRODUCT_PANELS.items()):
        axes = figure.add_subplot(1, len(PRODUCT_PANELS), index + 1)
        times = mode_times(source, mode)
        if mode == "product":
            times = {
                library: {tokens: us for tokens, us in of.items() if tokens <= COOL_TOKENS}
                for library, of in times.items()
            }
        for library, of in times.items():
            local = library == "local"
            look = {"label": "the norm alone" if local else library, **line(library, theme)}
            axes.plot(list(of), list(of.values()), linestyle="--" if local else "-", **look)
        scale(axes, sorted(times["allnorm"]), [1, 2, 5, 10, 20, 50])
        axes.set_ylabel(label)
        axes.set_title(title)
    bottoms, tops = zip(*(axes.get_ylim() for axes in figure.axes), strict=True)
    for axes in figure.axes:
        axes.set_ylim(min(bottoms), max(tops))
    legend(figure)
    figure.suptitle("tokens x 4096, bf16, 2 H100s: p50 in CUDA graphs", fontsize="large")


def legend(figure: Figure) -> None:
    """Draws one legend below all axes, with the entries of the last axes."""
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def link_times(rows: dict[int, Row]) -> dict[int, float]:
    """Returns the minimum time of the link in us, where it is long enough to be seen."""
    times = {tokens: row["floor_us"] for tokens, row in rows.items() if row["floor_us"]}
    return {tokens: us for tokens, us in sorted(times.items()) if us > 1.5}


def engines(figure: Figure, theme: Theme) -> None:
    """Draws bars of vLLM's time per output token, with the time that allnorm saves."""
    colors = {"vLLM without its fusion": COLORS["NCCL"], "vLLM as installed": COLORS["vLLM"]}
    for index, (title, (source, others)) in reversed([*enumerate(ENGINES.items())]):
        axes = figure.add_subplot(1, len(ENGINES), index + 1)
        arms = {**others, "allnorm": "with allnorm"}
        times = engine_times(source)
        batches = sorted(times["allnorm"])
        for number, (arm, label) in enumerate(arms.items()):
            middle = (len(arms) - 1) / 2
            places = [place + (number - middle) * 0.27 for place in range(len(batches))]
            heights = [times[arm][batch] for batch in batches]
            axes.bar(places, heights, 0.25, color=colors.get(label, theme.own), label=label)
            if arm == "allnorm":
                look: dict[str, Any] = {
                    "ha": "center",
                    "va": "top",
                    "rotation": 90,
                    "color": "white",
                }
                for place, height, batch in zip(places, heights, batches, strict=True):
                    saved = 1 - height / times["default"][batch]
                    axes.text(place, height * 0.97, f"-{saved:.1%}", fontsize="small", **look)
        axes.set_xticks(range(len(batches)), map(str, batches))
        axes.set_xlabel("sequences in the batch")
        axes.set_title(title)
        axes.margins(y=0.12)
    figure.axes[-1].set_ylabel("ms per output token")
    legend(figure)
    figure.suptitle("vLLM 0.26: time per output token, bf16, no NVLink multicast", fontsize="large")


def idea(figure: Figure, theme: Theme) -> None:
    """Draws how the four kernels between two GEMMs become one; schematic."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 34)

    def box(x: float, y: float, width: float, text: str, own: bool = False) -> None:
        look: dict[str, Any] = {
            "facecolor": theme.box,
            "edgecolor": theme.own if own else theme.quiet,
        }
        shape = "round,pad=0,rounding_size=1"
        axes.add_patch(FancyBboxPatch((x, y), width, 5, shape, linewidth=1.4, **look))
        axes.text(x + width / 2, y + 2.4, text, ha="center", va="center")

    def arrow(x: float, to: float, y: float) -> None:
        axes.annotate("", (to, y), (x, y), arrowprops={"arrowstyle": "->", "color": theme.quiet})

    quiet: dict[str, Any] = {"color": theme.quiet, "fontsize": "small", "va": "center"}
    axes.text(1, 31.5, "separate steps: 4 kernels, rows go through memory between them", **quiet)
    widths = {"GEMM": 11, "all-reduce": 16, "add": 10, "RMSNorm": 16, "quantize": 14}
    x = 1.0
    for text, width in [*widths.items(), ("GEMM", 11)]:
        box(x, 24, width, text)
        if x > 1:
            arrow(x - 4, x, 26.5)
        x += width + 4
    axes.text(1, 16.5, "allnorm: 1 kernel, rows stay in registers", **quiet)
    box(1, 8.5, 11, "GEMM")
    arrow(12, 16.4, 11)
    box(16.4, 8.5, 45, "", own=True)
    middle = 16.4 + 45 / 2
    axes.text(middle, 12.1, "allnorm", ha="center", va="center", weight="bold", color=theme.own)
    parts = "all-reduce, add, RMSNorm, quantize"
    axes.text(middle, 9.9, parts, ha="center", va="center", fontsize="small")
    arrow(61.4, 65.8, 11)
    box(65.8, 8.5, 11, "GEMM")
    look = {"arrowstyle": "<->", "color": theme.own, "linestyle": "--"}
    axes.annotate("", (99, 11), (77.6, 11), arrowprops=look)
    saved: dict[str, Any] = {"color": theme.own, "ha": "center", "fontsize": "small"}
    axes.text(88.3, 12.4, "saved, twice\nper layer", va="bottom", **saved)
    axes.text(1, 3, "time runs left to right, not to scale; results are bit-identical", **quiet)


def draw(folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes every picture into `folder` for both themes and returns the paths.

    The pictures of the first page are narrow, so that a phone shows their text large enough.
    """
    pictures: dict[str, tuple[tuple[float, float], Callable[[Figure, Theme], None]]] = {
        "engines": ((8.4, 4.2), engines),
        "idea": ((6.4, 2.6), idea),
    }
    for name, chart in CHARTS.items():
        pictures[name] = ((6.4, 4.4), functools.partial(latency, chart=chart))
    for name, source in PRODUCTS.items():
        pictures[name] = ((8.4, 4.4), functools.partial(both_modes, source=source))
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, (inches, drawing) in pictures.items():
        for theme in (LIGHT, DARK):
            path = folder / f"{name}{theme.ending}.svg"
            ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
            # Fixed ids: a file changes only if its rows do.
            settings: Any = {
                **dict.fromkeys(ink, theme.ink),
                "axes.spines.right": False,
                "axes.spines.top": False,
                "axes.titlesize": "medium",
                "font.size": 11.5,
                "svg.fonttype": "path",
                "svg.hashsalt": path.name,
            }
            with matplotlib.rc_context(settings):
                figure = Figure(figsize=inches, layout=None if name == "idea" else "constrained")
                drawing(figure, theme)
                figure.savefig(path, transparent=True, metadata={"Date": None})
            written.append(path)
    return written


if __name__ == "__main__":
    for path in draw(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(path)
