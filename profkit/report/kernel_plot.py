"""Draw the share table as a horizontal bar chart, fit for a report."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from profkit.analysis.checks.self_check import SelfCheck
from profkit.analysis.kernels import KernelRow, KernelsResult
from profkit.report.document import UNTRUSTED
from profkit.report.kernels import count_line, sort_rows, subject
from profkit.report.pictures import plain_text, write_png
from profkit.report.text import make_visible, shorten, simplify_name
from profkit.report.units import format_ns, format_share

MOST_BARS = 60
"""More would be a picture that nobody reads, and that no page holds."""

_LABEL_WIDTH = 58
_TITLE_WIDTH = 110
_BAR_INCHES = 0.3
# One colour a category, the same in every picture; a palette that the colour-blind can tell apart (Okabe and Ito's,
# lightened or darkened for the rarer ones).
_COLOURS = {
    "gemm": "#0072B2",
    "attention": "#56B4E9",
    "softmax": "#009E73",
    "normalization": "#66C2A5",
    "elementwise": "#E69F00",
    "reduction": "#F0C75E",
    "copy/cast": "#999999",
    "embedding/index": "#B58B5A",
    "optimizer": "#D55E00",
    "loss": "#A6341B",
    "communication": "#CC79A7",
    "random": "#7E6BAD",
    "graph": "#333333",
    "other": "#CCCCCC",
}


def plot_kernels(result: KernelsResult, check: SelfCheck, path: Path, *, top: int, sort: str = "total") -> None:
    """Write the first ``top`` lines of the table (`MOST_BARS` at most), and all others as one bar, to a PNG file.

    Raises:
        OSError: it cannot be written.
    """
    with plain_text():
        write_png(_draw(result, check, min(top, MOST_BARS), sort), path)


def _draw(result: KernelsResult, check: SelfCheck, top: int, sort: str) -> Figure:
    ordered = sort_rows(result.kernels, sort)
    rows, rest = ordered[:top], ordered[top:]
    labels = [_label(result, row) for row in rows] + ([f"({len(rest)} more)"] if rest else [])
    totals = [row.total_ns for row in rows] + ([sum(row.total_ns for row in rest)] if rest else [])
    colours = [_COLOURS.get(row.category, "#0072B2") for row in rows] + (["#EEEEEE"] if rest else [])

    figure = Figure(figsize=(9.5, 1.5 + _BAR_INCHES * max(len(labels), 3)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.barh(range(len(labels)), [total / 1e6 for total in totals], color=colours, height=0.74)
    axes.set_yticks(range(len(labels)), labels, fontsize=8, fontfamily="monospace")
    axes.invert_yaxis()
    axes.set_xlabel(f"{'self time' if result.measure == 'cpu-operator' else 'kernel time'}, ms")
    axes.margins(x=0.2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.grid(True, color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    for position, total in enumerate(totals):
        share = total / result.total_ns if result.total_ns else 0.0
        axes.annotate(
            f"{format_share(share)}  {format_ns(total)}",
            (total / 1e6, position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_title(_title(result), fontsize=10, loc="left")
    if check.failed:
        figure.suptitle(UNTRUSTED, fontsize=10, fontweight="bold", color="#B00020")
    _add_legend(figure, [row.category for row in rows] if result.by in ("kernel", "category") else [])
    return figure


def _label(result: KernelsResult, row: KernelRow) -> str:
    simple = result.by == "kernel" and result.measure == "gpu-kernel"
    return shorten(make_visible(simplify_name(row.name) if simple else row.name), _LABEL_WIDTH)


def _title(result: KernelsResult) -> str:
    return f"{shorten(make_visible(subject(result)), _TITLE_WIDTH)}\n{count_line(result)}, {format_ns(result.total_ns)}"


def _add_legend(figure: Figure, categories: list[str]) -> None:
    present = [category for category in _COLOURS if category in categories]
    if len(present) < 2:
        return
    handles = [Patch(color=_COLOURS[category], label=category) for category in present]
    figure.legend(handles, present, loc="outside lower center", ncols=min(len(present), 7), fontsize=8, frameon=False)
