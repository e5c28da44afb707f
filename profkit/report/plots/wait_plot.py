"""Draw who waits for whom as a matrix, fit for a report."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profkit.analysis.ranks.comparison import RanksResult
from profkit.report.commands.late_rank import describe_verdict
from profkit.report.plots.pictures import draw_png
from profkit.report.units import format_ns

_MOST_WRITTEN = 8
"""A matrix of up to this many ranks has room for figures."""
_TITLE_WIDTH = 80


def plot_waits(result: RanksResult, path: Path) -> None:
    """Write the matrix of waits per step to a PNG file.

    Raises:
        OSError: it cannot be written.
    """
    with draw_png(path, 7.5, 6.5) as (figure, axes):
        _draw(figure, axes, result)


def _draw(figure: Figure, axes: Axes, result: RanksResult) -> None:
    axes.spines[:].set_visible(True)
    waits = result.waits_ns / max(result.step_count, 1) / 1e6
    picture = axes.imshow(waits, cmap="Reds", vmin=0.0, interpolation="nearest")
    numbers = [rank.rank for rank in result.ranks]
    every = max(1, -(-len(numbers) // 16))
    where = list(range(0, len(numbers), every))
    axes.set_xticks(where, [str(numbers[at]) for at in where])
    axes.set_yticks(where, [str(numbers[at]) for at in where])
    if len(numbers) <= _MOST_WRITTEN:
        for at, to in zip(*waits.nonzero(), strict=True):
            color = "white" if waits[at, to] * 2 > waits.max() else "black"
            axes.text(to, at, format_ns(round(waits[at, to] * 1e6)), ha="center", va="center", color=color)
    axes.set_xlabel("waits for rank")
    axes.set_ylabel("rank")
    axes.set_title("\n".join(wrap(describe_verdict(result)[0], _TITLE_WIDTH)), fontsize="medium")
    figure.colorbar(picture, ax=axes, label="waiting in collectives, ms a step")
