"""How all pictures look, and their bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")


def png_bytes(figure: Figure) -> bytes:
    """Return a figure as a PNG file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150, metadata={"Software": "profkit"})
    return picture.getvalue()


def new_figure(title: str, *, width: float = 9.0, height: float = 4.5) -> Figure:
    """Return an empty figure with a title, sized for the width of a page."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


class _Plain(LogFormatter):
    """Labels the same ticks, but writes 0.4 and 10000."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:.10g}" if super().__call__(x, pos) else ""


def label_plainly(panel: Any) -> None:
    """Label a logarithmic axis with 20 and 0.4, between decades too where there are few labels."""
    panel.yaxis.set_major_formatter(_Plain())
    panel.yaxis.set_minor_formatter(_Plain(minor_thresholds=(2, 0.5)))


def with_gaps(points: Iterable[tuple[int, object]]) -> tuple[list[int], list[float]]:
    """Return the places and values of a line, by place; a value that was not measured breaks the line."""
    line = sorted(points, key=lambda point: point[0])
    return [place for place, _ in line], [float(str(value)) if value else math.nan for _, value in line]
