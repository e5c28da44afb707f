"""Pictures that look alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

# Okabe and Ito's palette, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")


def new_figure(title: str, *, width: float = 9.0, height: float = 4.5) -> Figure:
    """Return an empty figure with its title, fit for a page's width."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


class _Plain(LogFormatter):
    """Labels the same ticks, as 0.4 and 10000."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:.10g}" if super().__call__(x, pos) else ""


def label_plainly(panel: Any) -> None:
    """Write the values of a logarithmic axis as 20 and 0.4; between two decades too, where there are few."""
    panel.yaxis.set_major_formatter(_Plain())
    panel.yaxis.set_minor_formatter(_Plain(minor_thresholds=(2, 0.5)))


def with_gaps(points: Iterable[tuple[int, object]]) -> tuple[list[int], list[float]]:
    """Return places and values of a line, by place; what was not measured is no number, and breaks the line."""
    line = sorted(points, key=lambda point: point[0])
    return [place for place, _ in line], [float(str(value)) if value else math.nan for _, value in line]
