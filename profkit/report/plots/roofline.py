"""Draw the ranges on a roofline: FLOP/s against FLOPs per least byte, under the peaks of their GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import hypot, sqrt
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from profkit.analysis.efficiency.summary import EfficiencyResult, EfficiencyRow
from profkit.analysis.efficiency.work import Peaks
from profkit.analysis.tree.selection import split_path
from profkit.errors import TraceError
from profkit.names import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE, phase_of
from profkit.report.commands.step_replay import LIMITS
from profkit.report.document import UNTRUSTED
from profkit.report.plots import draw_png
from profkit.report.text import make_visible, shorten
from profkit.report.units import format_ns, four_digits
from profkit.run.directory import find_run

_LABEL_WIDTH = 34
_CLOSE = 1.4
_MARGIN = 4.0
"""How far, on a logarithmic axis, the picture reaches beyond its outermost points."""

# Okabe and Ito's colours, which colour-blind people can distinguish.
_COLOURS = {
    "compute-bound": "#0072B2",
    "memory-bound": "#E69F00",
    "launch-bound": "#D55E00",
    "communication-bound": "#CC79A7",
    "host-bound": "#009E73",
    None: "#777777",
}
_MARKERS = {FORWARD: "o", BACKWARD: "v", RECOMPUTE: "P", OPTIMIZER: "D"}
_OTHER_MARKER = "s"
_LARGEST_AREA, _LEAST_AREA = 420.0, 18.0
"""Areas of points, in square points: that of the longest range, and the smallest that can be seen."""
_LINE = {"arrowstyle": "-", "color": "#AAAAAA", "linewidth": 0.6, "shrinkB": 3}
_NEAR = 10
"""A label this near to the edge of its point, in points (1/72 inch), needs no line to it."""
# Where a label may stand, relative to its point, in points, the nearest first.
_PLACES = [
    (distance, x, y, horizontal, vertical)
    for distance in (4, 13, 25, 39, 55)
    for x, y, horizontal, vertical in (
        (1, 0, "left", "center"),
        (0.7, 0.7, "left", "bottom"),
        (0.7, -0.7, "left", "top"),
        (-1, 0, "right", "center"),
        (-0.7, 0.7, "right", "bottom"),
        (-0.7, -0.7, "right", "top"),
        (0, 1, "center", "bottom"),
        (0, -1, "center", "top"),
    )
]


def plot_roofline(result: EfficiencyResult, path: Path, *, untrusted: bool = False) -> None:
    """Write the roofline to a PNG file, one point per row of the table whose operations and least bytes are known.

    A point's height is all operations per second of GPU busy, its area the time of GPU busy, its shape the phase, its
    colour what limits the range. A solid roof was measured by `profkit ceilings` on such a
    GPU; a dashed one is the datasheet's, and the picture says so. An ``untrusted`` capture failed its self-check.

    Raises:
        TraceError: no range has known operations and least bytes, or the GPU's peaks are unknown.
        OSError: the file cannot be written.
    """
    points = [row for row in result.ranges if row.intensity and row.busy_ns and row.flops is not None]
    points.sort(key=lambda row: -row.busy_ns)  # the small ones are drawn over the large ones
    if not points or result.peaks is None:
        if not points:
            lacking = "FLOPs and least bytes of its ranges"
            cure = result.uncounted or "record it with `profkit run --flops`"
        else:
            lacking, cure = "the GPU's peaks", "measure them with `profkit ceilings` and give its file to --ceilings"
        raise TraceError(f"{result.trace}: {lacking} are unknown, so there is no roofline to draw; {cure}")
    with draw_png(path, 9.5, 6) as (figure, axes):
        _draw(axes, result, result.peaks, points)
        if untrusted:
            figure.suptitle(UNTRUSTED, fontsize=10, fontweight="bold", color="#B00020")
        _label(figure, axes, points)


def rate_of(row: EfficiencyRow) -> float:
    """Return all operations of a row per second of GPU busy: its height."""
    return ((row.flops or 0) + (row.other_flops or 0)) / row.busy_ns * 1e9


def _draw(axes: Axes, result: EfficiencyResult, peaks: Peaks, points: list[EfficiencyRow]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9g}"))
    _draw_roofs(axes, result, peaks, points)
    longest = max(row.busy_ns for row in points)
    for word, phase in dict.fromkeys((row.verdict, _phase_of(row)) for row in points):
        mine = [row for row in points if (row.verdict, _phase_of(row)) == (word, phase)]
        axes.scatter(
            [row.intensity or 0 for row in mine],
            [rate_of(row) / 1e12 for row in mine],
            s=[_area(row, longest) for row in mine],
            color=_COLOURS[word],
            marker=_MARKERS.get(phase, _OTHER_MARKER),
            alpha=0.85,
            zorder=3,
        )
    axes.set_xlabel("operations per least byte")
    axes.set_ylabel("TFLOP/s while the GPU is busy")
    axes.grid(True, which="major", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(handles=_legend(points), loc="lower right", fontsize=9, frameon=False)
    axes.set_title(make_visible(_title(result)), fontsize=10, loc="left")


def _area(row: EfficiencyRow, longest_ns: int) -> float:
    return max(_LARGEST_AREA * row.busy_ns / longest_ns, _LEAST_AREA)


def _phase_of(row: EfficiencyRow) -> str:
    names = (phase_of(part) or part for part in reversed(split_path(row.path)))
    return next((name for name in names if name in _MARKERS), "")


def _legend(points: list[EfficiencyRow]) -> list[Artist]:
    handles: list[Artist] = []
    for word in dict.fromkeys(row.verdict for row in points):
        label = "limit unknown" if word is None else f"limited by {LIMITS[word]}"
        handles.append(Patch(color=_COLOURS[word], label=label))
    for phase in dict.fromkeys(map(_phase_of, points)):
        shape = _MARKERS.get(phase, _OTHER_MARKER)
        handles.append(Line2D([], [], linestyle="", marker=shape, color="#555555", label=phase or "other range"))
    label = f"area: GPU time, the largest {format_ns(max(row.busy_ns for row in points))}"
    return [*handles, Line2D([], [], linestyle="", label=label)]


def _title(result: EfficiencyResult) -> str:
    gpu, dtype = result.gpu or "unknown GPU", result.dtype or "unknown dtype"
    path = Path(result.trace)
    # Every run's trace file has the same name; the run directory's name says more.
    run = find_run(path)
    name = path.name if run is None else run.path.name
    return f"{shorten(name, 60)}: ranges on the roofline of an {gpu}, {dtype}"


def _draw_roofs(axes: Axes, result: EfficiencyResult, peaks: Peaks, points: list[EfficiencyRow]) -> None:
    """Draw one roof per dtype; that of the run's products is the bold one."""
    intensities = [row.intensity or 1.0 for row in points]
    ridge = max(peaks.flops_per_s.values()) / peaks.bytes_per_s
    low, high = min(*intensities, ridge) / _MARGIN, max(*intensities, ridge) * _MARGIN
    style = "-" if peaks.source == "measured" else "--"
    for dtype, peak in peaks.flops_per_s.items():
        own = dtype == result.dtype
        colour = "#222222" if own else "#AAAAAA"
        corner = peak / peaks.bytes_per_s
        roof = [low * peaks.bytes_per_s / 1e12, peak / 1e12, peak / 1e12]
        axes.plot([low, corner, high], roof, style, color=colour, linewidth=1.8 if own else 1.0, zorder=2)
    for named in _groups(peaks):
        axes.annotate(
            ", ".join(f"{dtype} {four_digits(peaks.flops_per_s[dtype] / 1e12)}" for dtype in named) + " TFLOP/s",
            (high, peaks.flops_per_s[named[0]] / 1e12),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color="#222222" if result.dtype in named else "#888888",
        )
    source = "measured" if peaks.source == "measured" else "from the datasheet"
    axes.annotate(
        f"memory {four_digits(peaks.bytes_per_s / 1e9)} GB/s; peaks {source}",
        (0.01, 0.985),
        xycoords="axes fraction",
        va="top",
        fontsize=9,
        color="#222222",
    )
    axes.set_xlim(low, high)
    rates = [rate_of(row) / 1e12 for row in points]
    axes.set_ylim(min(rates) / _MARGIN, max(*rates, *(peak / 1e12 for peak in peaks.flops_per_s.values())) * 2)


def _groups(peaks: Peaks) -> list[list[str]]:
    """Return the dtypes, the fastest first; those whose roofs are too close for separate labels form one group."""
    groups: list[list[str]] = []
    for dtype in sorted(peaks.flops_per_s, key=lambda dtype: -peaks.flops_per_s[dtype]):
        if groups and peaks.flops_per_s[groups[-1][0]] < _CLOSE * peaks.flops_per_s[dtype]:
            groups[-1].append(dtype)
        else:
            groups.append([dtype])
    return groups


def _label(figure: Figure, axes: Axes, points: list[EfficiencyRow]) -> None:
    """Label the points, the largest first, where a label covers no other label, no point and no roof's figure.

    Points without such a place stay without a label and are counted in a corner.
    """
    figure.draw_without_rendering()
    places = [axes.transData.transform((row.intensity or 0.0, rate_of(row) / 1e12)) for row in points]
    longest = max(row.busy_ns for row in points)
    radii = {row.path: sqrt(_area(row, longest)) / 2 for row in points}
    taken = []
    for (x, y), row in zip(places, points, strict=True):
        reach = radii[row.path] * figure.dpi / 72 + 2
        taken.append(Bbox.from_bounds(x - reach, y - reach, 2 * reach, 2 * reach))
    taken += [Text.get_window_extent(text) for text in axes.texts]
    taken += [box for line in axes.lines for box in _along(axes, line)]
    legend = axes.get_legend()
    taken += [legend.get_window_extent()] if legend is not None else []
    ordered = sorted(points, key=lambda row: -row.kernel_time_ns)
    nameless = [row for row in ordered if not _place_name(axes, row, radii[row.path], taken)]
    if nameless:
        text = f"{len(nameless)} more without room for a name"
        axes.text(0.01, 0.015, text, transform=axes.transAxes, fontsize=9)


def _along(axes: Axes, line: Line2D) -> Iterator[Bbox]:
    corners = axes.transData.transform(line.get_xydata())
    for (x0, y0), (x1, y1) in pairwise(corners.tolist()):
        steps = max(1, int(hypot(x1 - x0, y1 - y0) / 4))
        for step in range(steps + 1):
            x, y = x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps
            yield Bbox.from_bounds(x - 2, y - 2, 4, 4)


def _place_name(axes: Axes, row: EfficiencyRow, radius: float, taken: list[Bbox]) -> bool:
    """Put a row's name where there is room and mark that place as taken; return whether there was any."""
    inside = axes.get_window_extent()
    for distance, x, y, horizontal, vertical in _PLACES:
        away = distance + radius
        text = axes.annotate(
            shorten(make_visible(row.name), _LABEL_WIDTH),
            (row.intensity or 0.0, rate_of(row) / 1e12),
            xytext=(away * x, away * y),
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            fontsize=9,
            arrowprops=_LINE if distance > _NEAR else None,
        )
        text.update_positions(axes.figure.canvas.get_renderer())  # type: ignore[attr-defined]
        box = Text.get_window_extent(text)
        if inside.contains(*box.min) and inside.contains(*box.max) and not box.count_overlaps(taken):
            taken.append(box)
            return True
        text.remove()
    return False
