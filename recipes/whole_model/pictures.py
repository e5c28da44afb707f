"""The pictures of end_to_end: times over the context, and the samples of the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from recipes.common.pictures import COLOURS, label_plainly, new_figure, with_gaps
from recipes.common.recipe import Row, whole
from recipes.whole_model.cells import COMPILED, EAGER, FORWARD_BACKWARD, SIZES

_STYLES: dict[tuple[str, str], tuple[Any, str]] = {
    ("fp32", EAGER): ("-", "o"),
    ("bf16", EAGER): ("--", "s"),
    ("fp32", COMPILED): (":", "^"),
    ("bf16", COMPILED): ("-.", "D"),
}
"""Lines and markers; TF32 stands in the table alone, a picture of six lines a size is read by nobody."""


def draw_times(rows: Sequence[Row]) -> Figure:
    """Draw forward and backward, timed in one pass of both, over the context, after the longest warm-up."""
    drawn = _of_both(rows)
    longest = max((whole(row["warmup"]) for row in drawn), default=0)
    drawn = [row for row in drawn if row["warmup"] == longest]
    asked = [row for row in rows if (row["passes"], row["warmup"]) == (FORWARD_BACKWARD, longest)]
    figure = new_figure(f"A whole model: median of the steps, {longest} steps of warm-up", width=11.5)
    contexts = sorted({whole(row["context"]) for row in drawn})
    panels = figure.subplots(1, 2)
    for panel, part in zip(panels, ("forward", "backward"), strict=True):
        for series in dict.fromkeys((row["size"], row["dtype"], row["mode"]) for row in drawn):
            _draw_series(panel, asked, series, f"{part}_ms")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(contexts, [str(context) for context in contexts])
        panel.set_xticks([], minor=True)
        label_plainly(panel)
        panel.set_xlabel("context")
        panel.set_ylabel(f"{part}, ms")
        panel.grid(True, color="#E5E5E5")
    _add_legend(panels[-1], drawn)
    return figure


def draw_warmup(rows: Sequence[Row]) -> Figure:
    """Draw each forward sample of fp32 eager in its order, a panel a size at the least context, a line a warm-up.

    Where no cell without warm-up was measured the picture says so, in the place of one of an earlier run.
    """
    drawn = [row for row in _of_both(rows) if (row["dtype"], row["mode"]) == ("fp32", EAGER)]
    least = min((whole(row["context"]) for row in drawn if not row["warmup"]), default=None)
    if least is None:
        figure = new_figure("Forward by timed step, by warm-up: fp32, eager", width=8.0, height=1.2)
        figure.text(0.01, 0.3, "Not run: no cell of forward and backward without warm-up was measured.", fontsize=10)
        return figure
    drawn = [row for row in drawn if row["context"] == least]
    sizes = list(dict.fromkeys(row["size"] for row in drawn))
    title = f"Forward by timed step, by warm-up: fp32, eager, context {least}"
    figure = new_figure(title, width=2.6 * len(sizes) + 3.5)
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    warmups = sorted({whole(row["warmup"]) for row in drawn})
    for panel, size in zip(panels, sizes, strict=True):
        for row in (row for row in drawn if row["size"] == size):
            samples: Any = row["forward_samples_ms"]
            colour = COLOURS[warmups.index(whole(row["warmup"])) % len(COLOURS)]
            panel.plot(range(1, len(samples) + 1), samples, "-o", markersize=3, color=colour)
        panel.set_yscale("log")
        panel.set_title(str(size), fontsize=10)
        panel.set_xlabel("timed step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        label_plainly(panel)
        panel.grid(True, color="#E5E5E5")
    panels[0].set_ylabel("forward, ms")
    handles = [Line2D([], [], color=COLOURS[place], marker="o", label=str(n)) for place, n in enumerate(warmups[:7])]
    panels[-1].legend(handles=handles, title="warm-up", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _of_both(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["passes"] == FORWARD_BACKWARD and row.get("forward_samples_ms")]


def _draw_series(panel: Any, rows: Sequence[Row], series: tuple[object, ...], key: str) -> None:
    style = _STYLES.get((str(series[1]), str(series[2])))
    own = [row for row in rows if (row["size"], row["dtype"], row["mode"]) == series]
    points = with_gaps((whole(row["context"]), row.get(key)) for row in own)
    if style is not None:
        line, marker = style
        panel.plot(*points, line, marker=marker, markersize=4, color=_colour(series[0]))


def _add_legend(panel: Any, rows: Sequence[Row]) -> None:
    """Name what is drawn: a colour a size, a line a way to run."""
    sizes = dict.fromkeys(row["size"] for row in rows)
    handles = [Line2D([], [], color=_colour(size), linewidth=3, label=str(size)) for size in sizes]
    for setting, (line, marker) in _STYLES.items():
        if any((row["dtype"], row["mode"]) == setting for row in rows):
            label = ", ".join(setting)
            handles.append(Line2D([], [], color="#333333", linestyle=line, marker=marker, markersize=4, label=label))
    if handles:
        panel.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _colour(size: object) -> str:
    return COLOURS[SIZES.index(str(size)) % len(COLOURS)]
