"""Section 6: memory over time, what held it at the peak, and how it lies in segments.

The data are packed: sizes are differences from sample to sample, in the largest unit that divides them all (usually 512
bytes), texts are numbers, and all of it is gzipped, so that eight thousand samples of forty series take a few hundred
kilobytes. uPlot, whose code and licence are in the page, draws the chart; without it there is a picture.

The colours of categories are Okabe and Ito's palette, which the colour-blind can distinguish, lighter or darker for the
rarer ones. Phases have no hue, so that nobody takes one for a category.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from profkit.analysis.memory.bins import Bins, Series, Shape, bin_history
from profkit.analysis.memory.composition import NOT_SELECTED
from profkit.analysis.memory.device import DeviceMemory, Filter
from profkit.analysis.memory.result import MemoryResult
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER
from profkit.report.commands.memory import EVIDENCE_WORDS, build_memory_document
from profkit.report.document import Lines
from profkit.report.page.markup import Interned, pack, view_parts
from profkit.report.page.memory_tables import build_tables
from profkit.report.page.segments import build_segments
from profkit.report.text import make_visible
from profkit.report.units import format_bytes
from profkit.snapshot.columns import Ints

Stacking = Literal["category", "module", "stack", "allocation"]
STACKINGS: tuple[Stacking, ...] = ("category", "module", "stack", "allocation")

CATEGORY_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer state": "#009E73",
    "activations": "#E69F00",
    "temporaries": "#CC79A7",
    "inputs": "#F0E442",
    "buffers": "#4B6BDB",
    "communication": "#A6341B",
    "autocast copies": "#B58B5A",
    "workspace": "#56B4E9",
    "unknown": "#8C959F",
    NOT_SELECTED: "#C4C9CF",
}

STACK_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#7E6BAD",
    "#B58B5A",
    "#66A61E",
    "#A6341B",
    "#4B6BDB",
    "#D9A8C7",
    "#A3ABB5",
)

REST_COLOUR = "#A3ABB5"

PHASE_COLOURS = {FORWARD: "#6B737C", LOSS: "#8A929B", BACKWARD: "#3F464D", OPTIMIZER: "#16191D"}
"""Greys: white text can be read on each but the lightest, where the script writes in black."""

OTHER_PHASE_COLOUR = "#A8AFB7"

_MAX_PHASES = 4000
_FRAMES_KEPT = 20
_PICTURE_COLUMNS = 360
_SHAPE_NUMBERS = ("bytes", "requested_bytes", "first", "end", "born_us", "freed_us", "born_event", "freed_event")
_SHAPE_TEXTS = ("category", "owner", "module", "label")


def build_memory(
    memory: DeviceMemory,
    result: MemoryResult,
    *,
    by: Stacking = "category",
    wanted: Filter | None = None,
    source: Path | None = None,
) -> dict[str, Any]:
    """Return what the section shows.

    Args:
        memory: the device.
        result: its account.
        by: what is stacked at first; the reader can change it.
        wanted: which allocations to show; the others are added up as one.
        source: the folder below which source lines are looked up and embedded; by default none are.
    """
    bins = bin_history(memory, wanted)
    head, *others = [
        part for part in build_memory_document(result, by="category", leaks=True).parts if isinstance(part, Lines)
    ]
    return {
        "facts": [" ".join(line.split()) for line in head.lines],
        "notes": view_parts(others),
        "data": pack(build_data(bins, memory, by)),
        "picture": _picture(bins),
        "at": result.composition.what,
        "peak": format_bytes(int(bins.allocated[bins.peak])),
        "peak_bytes": int(bins.allocated[bins.peak]),
        "tables": build_tables(result, source),
        "segments": build_segments(memory, result),
        "colours": CATEGORY_COLOURS,
    }


def build_data(bins: Bins, memory: DeviceMemory, by: Stacking) -> dict[str, Any]:
    """Return what the page's script reads."""
    texts = Interned()
    groups = {"category": bins.by_category, "module": bins.by_module, "stack": bins.by_stack}
    unit = _common_unit(
        [bins.allocated, bins.lowest, bins.reserved, *(one.bytes for some in groups.values() for one in some)]
    )
    frames: dict[tuple[str, ...], int] = {}
    return {
        "mode": by,
        "has_times": bins.has_times,
        "prefers_events": bins.prefers_events,
        "unit": unit,
        "peak": bins.peak,
        "moments": _deltas(bins.moments, 1),
        "times_us": _deltas(bins.times_us, 1),
        "allocated": _deltas(bins.allocated, unit),
        "lowest": _deltas(bins.lowest, unit),
        "reserved": _deltas(bins.reserved, unit),
        "series": {key: [_series(one, unit, texts, frames) for one in some] for key, some in groups.items() if some},
        "phases": _phases(memory, texts),
        "shapes": _shapes(bins.shapes, texts, frames),
        "stacks": [[texts.number(frame) for frame in stack[:_FRAMES_KEPT]] for stack in frames],
        "colours": {
            "categories": CATEGORY_COLOURS,
            "stacks": STACK_COLOURS,
            "rest": REST_COLOUR,
            "phases": PHASE_COLOURS,
            "phase": OTHER_PHASE_COLOUR,
        },
        # Last, when all of them have their numbers.
        "texts": texts.texts,
    }


def _series(one: Series, unit: int, texts: Interned, frames: dict[tuple[str, ...], int]) -> dict[str, Any]:
    return {
        "name": texts.number(one.name),
        "values": _deltas(one.bytes, unit),
        "stack": frames.setdefault(one.stack, len(frames)),
        "stack_count": one.stack_count,
    }


def _shapes(shapes: tuple[Shape, ...], texts: Interned, frames: dict[tuple[str, ...], int]) -> dict[str, Any]:
    """Return the allocations as columns; each has the number of its own stack."""
    columns: dict[str, Any] = {name: [getattr(one, name) for one in shapes] for name in _SHAPE_NUMBERS}
    for name in _SHAPE_TEXTS:
        columns[name] = [-1 if getattr(one, name) is None else texts.number(getattr(one, name)) for one in shapes]
    columns["evidence"] = [texts.number(EVIDENCE_WORDS[one.evidence]) for one in shapes]
    columns["stack"] = [frames.setdefault(one.stack, len(frames)) for one in shapes]
    return columns


def _phases(memory: DeviceMemory, texts: Interned) -> list[dict[str, int]]:
    """Return the phases by time and by moment; if there are very many, only the longest."""
    timeline = memory.timeline
    longest = sorted(timeline.phases, key=lambda one: one.start_us - one.end_us)[:_MAX_PHASES]
    found = []
    for phase in sorted(longest, key=lambda one: one.start_us):
        first, last = timeline.moments_of(phase)
        start = memory.device.zero_us
        times = {"start_us": phase.start_us - start, "end_us": phase.end_us - start}
        found.append({"name": texts.number(phase.name), "first": first, "last": last, **times})
    return found


def _picture(bins: Bins) -> dict[str, Any]:
    """Return the categories as stacked areas on a canvas of 1000 × 300; the highest sample of each column stands."""
    count = len(bins.allocated)
    edges = np.unique(np.linspace(0, count, min(_PICTURE_COLUMNS, count) + 1).astype(np.int64))
    picked = np.array([low + int(np.argmax(bins.allocated[low:high])) for low, high in pairwise(edges.tolist())])
    x = 1000 * np.arange(len(picked) + 1) / len(picked)
    top = max(int(bins.reserved.max()), 1)
    below = np.zeros(len(picked), dtype=np.int64)
    layers: list[dict[str, Any]] = []
    for one in bins.by_category:
        above = below + one.bytes[picked]
        if one.bytes.any():
            layers.append(
                {
                    "name": one.name,
                    "colour": CATEGORY_COLOURS[one.name],
                    "path": _path(x, 300 - 300 * above / top, 300 - 300 * below / top),
                    "at_peak": int(one.bytes[bins.peak]),
                    "shown": format_bytes(int(one.bytes[bins.peak])),
                }
            )
        below = above
    peak_at = int(np.argmax(bins.allocated[picked]))
    return {
        "layers": layers,
        "reserved": _line(x, 300 - 300 * bins.reserved[picked] / top),
        "peak_x": round(float(x[peak_at]), 1),
        "top": format_bytes(top),
        "label": ", ".join(f"{make_visible(one['name'])} {one['shown']}" for one in layers),
    }


def _path(x: Any, upper: Any, lower: Any) -> str:
    """Return the outline of an area that steps from sample to sample."""
    return f"M{_line(x, upper)[1:]}L{_line(x[::-1], lower[::-1])[1:]}Z"


def _line(x: Any, y: Any) -> str:
    steps = [f"{x[at]:.0f},{y[at]:.1f}L{x[at + 1]:.0f},{y[at]:.1f}" for at in range(len(y))]
    return "M" + "L".join(steps)


def _common_unit(columns: list[Ints]) -> int:
    return int(np.gcd.reduce([int(np.gcd.reduce(column)) for column in columns])) or 1


def _deltas(values: Ints, unit: int) -> list[int]:
    found: list[int] = np.diff(values // unit, prepend=0).tolist()
    return found
