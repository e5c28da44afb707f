"""Pictures in PNG files, fit for a report: kernels as bars, memory over time, and the ranges on a
roofline: FLOP/s against FLOPs per least byte, under the peaks of their GPU.

Names stand in them as they are, and a file is written whole or not at all.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter

from profkit.analysis.efficiency import Peaks
from profkit.analysis.efficiency.summary import EfficiencyResult, EfficiencyRow
from profkit.analysis.kernels.summary import KernelRow, KernelsResult
from profkit.analysis.memory.bins import Bins, bin_history
from profkit.analysis.memory.device import DeviceMemory, Filter
from profkit.analysis.memory.opened_snapshot import MemoryResult
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.step_replay.limits import StepLimits
from profkit.analysis.tree import split_path
from profkit.errors import TraceError
from profkit.files import write_whole
from profkit.names import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE, phase_of
from profkit.report import colours, make_visible, shorten, shorten_apart, simplify_name
from profkit.report.commands.kernels import count_line, sort_rows, subject
from profkit.report.commands.steps import DATA, WAITING, name_limits
from profkit.report.document import UNTRUSTED
from profkit.report.units import format_bytes, format_ns, format_share, four_digits, ns_over
from profkit.run.directory import find_run
from profkit.trace.columns import distinct_values

_DPI = 150


@contextmanager
def draw_png(path: Path, width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """Yield an empty figure of ``width`` by ``height`` inches and its axes; write it to ``path`` when the block ends.

    A dollar sign in a name is a dollar sign, and no formula; a missing glyph is a box.
    """
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        yield figure, axes
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=_DPI, metadata={"Software": "profkit"})
    write_whole(path, picture.getvalue())


MOST_BARS = 60
"""More would be a picture that nobody reads, and that no page holds."""

_LABEL_WIDTH = 58
_TITLE_WIDTH = 110
_BAR_INCHES, _BAR_HEIGHT = 0.3, 0.74
_TRIES = 2
_WAITING = "////"


def plot_kernels(
    opened: OpenedTrace, result: KernelsResult, path: Path, *, top: int, sort: str = "total", totals: bool = False
) -> None:
    """Write the first ``top`` lines of the table (`MOST_BARS` at most), and all others as one bar, to a PNG file.

    Bars are averages per step where the steps are known, or sums with ``totals``. What a collective waited for other
    ranks is the hatched part of its bar.
    """
    steps = None if totals else result.steps
    bars = _list_bars(result, min(top, MOST_BARS), sort)
    with draw_png(path, 9.5, 1.7 + _BAR_INCHES * max(len(bars), 3)) as (figure, axes):
        texts = _draw_bars(axes, bars, result.total_ns, steps)
        what = "self time" if result.measure == "cpu-operator" else "kernel time"
        axes.set_xlabel(f"{what}, ms" + ("" if steps is None else " per step"))
        failed = [UNTRUSTED] if opened.self_check.failed else []
        text, colour = "\n".join([*failed, *_kernels_title(opened, result, steps)]), "#B00020" if failed else "black"
        figure.suptitle(text, fontsize=10, x=0.01, ha="left", color=colour)
        if result.by in ("kernel", "category"):
            _add_legend(figure, bars)
        _make_room(figure, axes, texts)


@dataclass(frozen=True)
class _Bar:
    """A line of the table; what is left of all others has no category."""

    label: str
    category: str | None
    time_ns: int
    waiting_ns: int

    @property
    def colour(self) -> str:
        rest, other = colours.REST_OF_KERNELS, colours.KERNELS["gemm"]
        return rest if self.category is None else colours.KERNELS.get(self.category, other)


def _list_bars(result: KernelsResult, top: int, sort: str) -> list[_Bar]:
    ordered = sort_rows(result.kernels, sort)
    rows, rest = ordered[:top], ordered[top:]
    labels = shorten_apart([_label(result, row) for row in rows], _LABEL_WIDTH)
    bars = [
        _Bar(label, row.category, row.total_ns, row.waiting_ns or 0) for label, row in zip(labels, rows, strict=True)
    ]
    return [*bars, _Bar(f"({len(rest)} more)", None, sum(row.total_ns for row in rest), 0)] if rest else bars


def _draw_bars(axes: Axes, bars: list[_Bar], whole_ns: int, steps: int | None) -> list[Annotation]:
    places, unit = range(len(bars)), 1e6 * (steps or 1)
    working = [(bar.time_ns - bar.waiting_ns) / unit for bar in bars]
    waiting = [bar.waiting_ns / unit for bar in bars]
    colours = [bar.colour for bar in bars]
    axes.barh(places, working, color=colours, height=_BAR_HEIGHT)
    if any(waiting):
        axes.barh(
            places, waiting, left=working, height=_BAR_HEIGHT, facecolor="white", edgecolor=colours, hatch=_WAITING
        )
    axes.set_yticks(places, [bar.label for bar in bars], fontsize=8, fontfamily="monospace")
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.grid(True, color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    return [
        axes.annotate(
            _figures(bar, whole_ns, steps),
            (bar.time_ns / unit, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        for place, bar in enumerate(bars)
    ]


def _figures(bar: _Bar, whole_ns: int, steps: int | None) -> str:
    each = ns_over(steps).show
    share = format_share(bar.time_ns / whole_ns if whole_ns else 0.0)
    return f"{share}  {each(bar.time_ns)}" + (f" ({each(bar.waiting_ns)} waiting)" if bar.waiting_ns else "")


def _make_room(figure: Figure, axes: Axes, texts: list[Annotation]) -> None:
    axes.set_xlim(left=0)
    for _ in range(_TRIES):  # other ticks may change the width of the axes a little
        figure.draw_without_rendering()
        whole = axes.get_window_extent()
        needs = [(text.xy[0], text.get_window_extent().x1 - axes.transData.transform(text.xy)[0]) for text in texts]
        right = max((x * whole.width / (whole.width - beside) for x, beside in needs if x), default=0.0)
        if right:
            axes.set_xlim(right=1.01 * right)


def _label(result: KernelsResult, row: KernelRow) -> str:
    simple = result.by == "kernel" and result.measure == "gpu-kernel"
    return make_visible(simplify_name(row.name) if simple else row.name)


def _kernels_title(opened: OpenedTrace, result: KernelsResult, steps: int | None) -> list[str]:
    name = opened.run.path.name if opened.run is not None else Path(result.trace).name
    counted = f"{subject(result)}: {count_line(result, steps)}, {ns_over(steps).show(result.total_ns)}"
    work, known = opened.trace.work, opened.trace.gpus
    used = [known[device] for device in distinct_values(work.device).tolist() if 0 <= device < len(known)]
    gpus = " and ".join(f"{count} × {gpu}" for gpu, count in Counter(used).items())
    return [shorten(make_visible(text), _TITLE_WIDTH) for text in (" · ".join(filter(None, (name, gpus))), counted)]


def _add_legend(figure: Figure, bars: list[_Bar]) -> None:
    categories = {bar.category for bar in bars}
    present = [category for category in colours.KERNELS if category in categories]
    if len(present) < 2:
        return
    handles = [Patch(color=colours.KERNELS[category], label=category) for category in present]
    if any(bar.waiting_ns for bar in bars):
        colour = colours.KERNELS["communication"]
        handles.append(Patch(facecolor="white", edgecolor=colour, hatch=_WAITING, label="waiting for another rank"))
    columns = min(len(handles), 7)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


_GIB = 2**30
_PHASES_SHOWN = 6
_INK = "#1b1f24"


def plot_timeline(path: Path, memory: DeviceMemory, result: MemoryResult, wanted: Filter | None) -> None:
    """Draw the stacked allocations, the peak, the phases and the reserved memory of one device into a PNG."""
    bins = bin_history(memory, wanted)
    by_events = bins.prefers_events or not bins.has_times
    with draw_png(path, 10, 5.6) as (figure, axes):
        x = bins.moments if by_events else bins.times_us / 1e6
        style: dict[str, Any] = {"color": _INK, "linewidth": 1.1, "linestyle": (0, (2, 2)), "zorder": 3}
        handles: list[Artist] = [*_draw_series(axes, x, bins)]
        handles += axes.step(x, bins.reserved / _GIB, where="post", label="reserved", **style)
        _shade_phases(axes, memory, by_events)
        _mark_peak(axes, float(x[bins.peak]), int(bins.allocated[bins.peak]))
        axes.set_xlim(float(x[0]), float(x[-1]) if x[-1] > x[0] else float(x[0]) + 1)
        axes.set_ylim(0, max(float(bins.reserved.max()) / _GIB * 1.12, 1e-6))
        axes.set_xlabel("recorded allocator event" if by_events else "time since the first event, s")
        axes.set_ylabel("GiB (2³⁰ B)")
        axes.set_title(_memory_title(result), fontsize=10, loc="left")
        if by_events:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        figure.legend(
            handles=[*handles, *_phase_handles(memory)],
            loc="outside lower center",
            ncols=5,
            fontsize=8,
            frameon=False,
        )


def _draw_series(axes: Axes, x: Any, bins: Bins) -> list[Patch]:
    series = bins.by_category
    shades = [colours.MEMORY[part.name] for part in series]
    axes.stackplot(x, *(part.bytes / _GIB for part in series), colors=shades, step="post", linewidth=0, zorder=2)
    axes.step(x, bins.allocated / _GIB, where="post", color=_INK, linewidth=0.7, zorder=3)
    return [Patch(color=colours.MEMORY[part.name], label=part.name) for part in reversed(series) if np.any(part.bytes)]


def _phase_handles(memory: DeviceMemory) -> list[Patch]:
    names = dict.fromkeys(phase.name for phase in memory.timeline.phases)
    return [
        Patch(color=colours.PHASES.get(name, colours.OTHER_PHASE), alpha=0.85, label=f"phase: {make_visible(name)}")
        for name in list(names)[:_PHASES_SHOWN]
    ]


def _shade_phases(axes: Axes, memory: DeviceMemory, by_events: bool) -> None:
    timeline = memory.timeline
    if not timeline.phases:
        return
    start = memory.device.zero_us
    whole = len(timeline.times_us) if by_events else (int(timeline.times_us[-1]) - start) / 1e6
    for phase in timeline.phases:
        first, last = timeline.moments_of(phase)
        left, right = (first, last) if by_events else ((phase.start_us - start) / 1e6, (phase.end_us - start) / 1e6)
        colour = colours.PHASES.get(phase.name, colours.OTHER_PHASE)
        axes.axvspan(left, right, color=colour, alpha=0.1, linewidth=0, zorder=1)
        axes.axvspan(left, right, ymin=0.965, ymax=1, color=colour, alpha=0.85, linewidth=0, zorder=3)
        if right - left > 0.0075 * len(phase.name) * whole:
            axes.annotate(
                make_visible(phase.name),
                ((left + right) / 2, 0.9825),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )


def _mark_peak(axes: Axes, x: float, peak: int) -> None:
    axes.plot([x, x], [0, peak / _GIB], color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=4)
    axes.plot([x], [peak / _GIB], marker="o", markersize=4, color=_INK, zorder=4)
    axes.annotate(
        f"peak {format_bytes(peak)}",
        (x, peak / _GIB),
        xytext=(5, 5),
        textcoords="offset points",
        fontsize=8,
        fontweight="bold",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
    )


def _memory_title(result: MemoryResult) -> str:
    totals = result.totals
    proof = "exact" if totals.exact else "not proven"
    return (
        f"{make_visible(PurePath(result.snapshot).name)}, device {totals.device}: allocated peak "
        f"{format_bytes(totals.allocated_peak_bytes)} ({totals.allocated_peak_bytes:,} B, {proof})"
    )


_POINT_NAME_WIDTH = 34
_CLOSE = 1.4
_MARGIN = 4.0
"""How far, on a logarithmic axis, the picture reaches beyond its outermost points."""

# Okabe and Ito's colours, which colour-blind people can distinguish; those of rare limits are between them.
_COLOURS = {
    "arithmetic": "#0072B2",
    "memory bandwidth": "#E69F00",
    "kernel launches": "#D55E00",
    "communication": "#CC79A7",
    "Python": "#009E73",
    DATA: "#7A5195",
    "waits for the GPU": "#56B4E9",
    "memory copies": "#66A61E",
    "allocations": "#B58B5A",
}
_OTHER_COLOUR = "#777777"
_MARKERS = {FORWARD: "o", BACKWARD: "v", RECOMPUTE: "P", OPTIMIZER: "D"}
_OTHER_MARKER = "s"
_LARGEST_AREA, _LEAST_AREA = 420.0, 18.0
"""Areas of points, in square points: that of the longest range, and the smallest that can be seen."""
_MOST_NAMED = 24


def plot_roofline(
    result: EfficiencyResult,
    path: Path,
    *,
    limits: StepLimits | None = None,
    late_rank: int | None = None,
    untrusted: bool = False,
) -> None:
    """Write the roofline to a PNG file, one point per row of the table whose operations and least bytes are known.

    A point's height is all operations per second of GPU busy, its area the time of GPU busy, its shape the phase, its
    colour what limits the range, as in the table. A solid roof was measured by `profkit ceilings` on such a GPU; a
    dashed one is the datasheet's, and the picture says so. An ``untrusted`` capture failed its self-check.

    Raises:
        TraceError: no range has known operations and least bytes, or the GPU's peaks are unknown.
    """
    points = [
        row
        for row in result.ranges
        if row.intensity and row.busy_ns and row.flops is not None
        # The least bytes of a range that holds others are those of one kernel for all of them.
        if row.verdict != "memory-bound" or row.roof_share is not None
    ]
    points.sort(key=lambda row: -row.busy_ns)  # the small ones are drawn over the large ones
    if not points or result.peaks is None:
        if not points:
            lacking = "FLOPs and least bytes of its ranges"
            cure = result.uncounted or "record it with `profkit run --flops`"
        else:
            lacking, cure = "the GPU's peaks", "measure them with `profkit ceilings` and give its file to --ceilings"
        raise TraceError(f"{result.trace}: {lacking} are unknown, so there is no roofline to draw; {cure}")
    with draw_png(path, 9.5, 6) as (figure, axes):
        _draw(axes, result, result.peaks, points, name_limits(result.ranges, limits, late_rank))
        if untrusted:
            figure.suptitle(UNTRUSTED, fontsize=10, fontweight="bold", color="#B00020")
        _name_points(axes, points)


def rate_of(row: EfficiencyRow) -> float:
    return ((row.flops or 0) + (row.other_flops or 0)) / row.busy_ns * 1e9


def _draw(
    axes: Axes,
    result: EfficiencyResult,
    peaks: Peaks,
    points: list[EfficiencyRow],
    limited_by: Mapping[str, str | None],
) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9g}"))
    _draw_roofs(axes, result, peaks, points)
    longest = max(row.busy_ns for row in points)
    for words, phase in dict.fromkeys((limited_by[row.path], _phase_of(row)) for row in points):
        mine = [row for row in points if (limited_by[row.path], _phase_of(row)) == (words, phase)]
        axes.scatter(
            [row.intensity or 0 for row in mine],
            [rate_of(row) / 1e12 for row in mine],
            s=[max(_LARGEST_AREA * row.busy_ns / longest, _LEAST_AREA) for row in mine],
            color=_colour_of(words),
            marker=_MARKERS.get(phase, _OTHER_MARKER),
            alpha=0.85,
            zorder=3,
        )
    axes.set_xlabel("operations per least byte")
    axes.set_ylabel("TFLOP/s while the GPU is busy")
    axes.grid(True, which="major", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(handles=_legend(points, limited_by), loc="lower right", fontsize=9, frameon=False)
    axes.set_title(make_visible(_title(result)), fontsize=10, loc="left")


def _phase_of(row: EfficiencyRow) -> str:
    names = (phase_of(part) or part for part in reversed(split_path(row.path)))
    return next((name for name in names if name in _MARKERS), "")


def _colour_of(words: str | None) -> str:
    kind = "communication" if words == WAITING or (words or "").startswith("waiting for rank") else words
    return _COLOURS.get(kind or "", _OTHER_COLOUR)


def _legend(points: list[EfficiencyRow], limited_by: Mapping[str, str | None]) -> list[Artist]:
    handles: list[Artist] = []
    for words in dict.fromkeys(limited_by[row.path] for row in points):
        label = "limit unknown" if words is None else f"limited by {words}"
        handles.append(Patch(color=_colour_of(words), label=label))
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


def _name_points(axes: Axes, points: list[EfficiencyRow]) -> None:
    named = sorted(points, key=lambda row: -row.kernel_time_ns)[:_MOST_NAMED]
    names = []
    for number, row in enumerate(named, 1):
        names.append(f"{number}  {shorten(make_visible(row.name), _POINT_NAME_WIDTH)}")
        axes.annotate(
            str(number),
            (row.intensity or 0.0, rate_of(row) / 1e12),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=9,
            zorder=4,
        )
    names += [f"{len(points) - len(named)} more without a number"] if len(points) > len(named) else []
    axes.text(1.02, 1, "\n".join(names), transform=axes.transAxes, va="top", fontsize=9)
