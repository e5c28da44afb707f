"""Memory over time as a picture, fit for a report."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from profkit.analysis.memory.bins import Bins, bin_history
from profkit.analysis.memory.device import DeviceMemory, Filter
from profkit.analysis.memory.opened_snapshot import MemoryResult
from profkit.report import colours
from profkit.report.plots import draw_png
from profkit.report.text import make_visible
from profkit.report.units import format_bytes

_GIB = 2**30
_PHASES_SHOWN = 6
_INK = "#1b1f24"


def plot_timeline(path: Path, memory: DeviceMemory, result: MemoryResult, wanted: Filter | None = None) -> None:
    """Draw the stacked allocations, the peak, the phases and the reserved memory of one device into a PNG.

    Raises:
        OSError: it cannot be written.
    """
    bins = bin_history(memory, wanted)
    by_events = bins.prefers_events or not bins.has_times
    with draw_png(path, 10, 5.6) as (figure, axes):
        x = bins.moments if by_events else bins.times_us / 1e6
        handles = [*_draw_series(axes, x, bins), _draw_reserved(axes, x, bins)]
        _shade_phases(axes, memory, by_events)
        _mark_peak(axes, float(x[bins.peak]), int(bins.allocated[bins.peak]))
        axes.set_xlim(float(x[0]), float(x[-1]) if x[-1] > x[0] else float(x[0]) + 1)
        axes.set_ylim(0, max(float(bins.reserved.max()) / _GIB * 1.12, 1e-6))
        axes.set_xlabel("recorded allocator event" if by_events else "time since the first event, s")
        axes.set_ylabel("GiB (2³⁰ B)")
        axes.set_title(_title(result), fontsize=10, loc="left")
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
    """Stack the categories under the allocated memory; return what the legend shows of them."""
    series = bins.by_category
    shades = [colours.MEMORY[part.name] for part in series]
    axes.stackplot(x, *(part.bytes / _GIB for part in series), colors=shades, step="post", linewidth=0, zorder=2)
    axes.step(x, bins.allocated / _GIB, where="post", color=_INK, linewidth=0.7, zorder=3)
    return [Patch(color=colours.MEMORY[part.name], label=part.name) for part in reversed(series) if np.any(part.bytes)]


def _draw_reserved(axes: Axes, x: Any, bins: Bins) -> Artist:
    style: dict[str, Any] = {"color": _INK, "linewidth": 1.1, "linestyle": (0, (2, 2)), "zorder": 3}
    (line,) = axes.step(x, bins.reserved / _GIB, where="post", label="reserved", **style)
    return line


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


def _title(result: MemoryResult) -> str:
    totals = result.totals
    proof = "exact" if totals.exact else "not proven"
    return (
        f"{make_visible(PurePath(result.snapshot).name)}, device {totals.device}: allocated peak "
        f"{format_bytes(totals.allocated_peak_bytes)} ({totals.allocated_peak_bytes:,} B, {proof})"
    )
