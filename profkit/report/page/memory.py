"""The section of memory: memory over time, and what held it at a moment.

The data of the chart are packed: sizes are differences from sample to sample, in the largest unit that divides them all
(usually 512 bytes), texts are numbers, and all of it is gzipped, so that eight thousand samples of forty series take a
few hundred kilobytes. uPlot, whose code and licence are in the page, draws the chart; without it there is a picture.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from profkit.analysis.memory.bins import Bins, Series, Shape, bin_history
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.opened_snapshot import MemoryResult
from profkit.report import colours
from profkit.report.commands.memory import EVIDENCE_WORDS, By, build_memory_document
from profkit.report.document import Lines, Table
from profkit.report.page.markup import Interned, pack, view_parts, view_table, view_tree
from profkit.report.text import make_visible
from profkit.report.units import format_bytes
from profkit.snapshot.columns import Ints

_MAX_PHASES = 4000
_FRAMES_KEPT = 20
_PICTURE_COLUMNS = 360
_SHAPE_NUMBERS = ("bytes", "requested_bytes", "first", "end", "born_us", "freed_us", "born_event", "freed_event")
_SHAPE_TEXTS = ("category", "owner", "module", "label")


def build_memory(memory: DeviceMemory, result: MemoryResult) -> dict[str, Any]:
    """Return what the section shows of a device and its account."""
    bins = bin_history(memory)
    document = build_memory_document(result, by="category", leaks=True)
    head, *others = [part for part in document.parts if isinstance(part, Lines)]
    return {
        "facts": [" ".join(line.split()) for line in head.lines],
        "notes": view_parts(others),
        "data": pack(build_data(bins, memory)),
        "picture": _picture(bins),
        "at": result.composition.what,
        "peak": format_bytes(int(bins.allocated[bins.peak])),
        "peak_bytes": int(bins.allocated[bins.peak]),
        "tables": {
            "module": view_tree(_table_by(result, "module"), lambda row: (len(row["path"]) - 1, row["number"])),
            "line": view_table(_table_by(result, "stack")),
            "category": view_table(_table_by(result, "category")),
        },
    }


def _table_by(result: MemoryResult, by: By) -> Table:
    document = build_memory_document(
        result, by=by, top=len(result.composition.by_stack) + len(result.composition.by_module)
    )
    return next(part for part in document.parts if isinstance(part, Table))


def build_data(bins: Bins, memory: DeviceMemory) -> dict[str, Any]:
    """Return what the page's script reads."""
    texts = Interned()
    groups = {"category": bins.by_category, "module": bins.by_module, "stack": bins.by_stack}
    columns = [bins.allocated, bins.lowest, bins.reserved]
    columns += [series.bytes for group in groups.values() for series in group]
    unit = int(np.gcd.reduce([int(np.gcd.reduce(column)) for column in columns])) or 1
    frames: dict[tuple[str, ...], int] = {}
    return {
        "has_times": bins.has_times,
        "prefers_events": bins.prefers_events,
        "unit": unit,
        "peak": bins.peak,
        "moments": _deltas(bins.moments, 1),
        "times_us": _deltas(bins.times_us, 1),
        "allocated": _deltas(bins.allocated, unit),
        "lowest": _deltas(bins.lowest, unit),
        "reserved": _deltas(bins.reserved, unit),
        "series": {
            key: [_series(part, unit, texts, frames) for part in group] for key, group in groups.items() if group
        },
        "phases": _phases(memory, texts),
        "shapes": _shapes(bins.shapes, texts, frames),
        "stacks": [[texts.number(frame) for frame in stack[:_FRAMES_KEPT]] for stack in frames],
        "colours": {
            "categories": colours.MEMORY,
            "stacks": colours.STACKS,
            "rest": colours.REST_OF_MEMORY,
            "phases": colours.PHASES,
            "phase": colours.OTHER_PHASE,
        },
        # Last, when all of them have their numbers.
        "texts": texts.texts,
    }


def _series(series: Series, unit: int, texts: Interned, frames: dict[tuple[str, ...], int]) -> dict[str, Any]:
    return {
        "name": texts.number(series.name),
        "values": _deltas(series.bytes, unit),
        "stack": frames.setdefault(series.stack, len(frames)),
        "stack_count": series.stack_count,
    }


def _shapes(shapes: tuple[Shape, ...], texts: Interned, frames: dict[tuple[str, ...], int]) -> dict[str, Any]:
    columns: dict[str, Any] = {name: [getattr(shape, name) for shape in shapes] for name in _SHAPE_NUMBERS}
    for name in _SHAPE_TEXTS:
        columns[name] = [-1 if getattr(shape, name) is None else texts.number(getattr(shape, name)) for shape in shapes]
    columns["evidence"] = [texts.number(EVIDENCE_WORDS[shape.evidence]) for shape in shapes]
    columns["stack"] = [frames.setdefault(shape.stack, len(frames)) for shape in shapes]
    return columns


def _phases(memory: DeviceMemory, texts: Interned) -> list[dict[str, int]]:
    """Return the phases by time and by moment; if there are very many, only the longest."""
    timeline = memory.timeline
    longest = sorted(timeline.phases, key=lambda phase: phase.start_us - phase.end_us)[:_MAX_PHASES]
    spans = []
    for phase in sorted(longest, key=lambda phase: phase.start_us):
        first, last = timeline.moments_of(phase)
        start = memory.device.zero_us
        times = {"start_us": phase.start_us - start, "end_us": phase.end_us - start}
        spans.append({"name": texts.number(phase.name), "first": first, "last": last, **times})
    return spans


def _picture(bins: Bins) -> dict[str, Any]:
    """Return the categories as stacked areas on a canvas of 1000 × 300; the highest sample of each column stands."""
    count = len(bins.allocated)
    edges = np.unique(np.linspace(0, count, min(_PICTURE_COLUMNS, count) + 1).astype(np.int64))
    picked = np.array([low + int(np.argmax(bins.allocated[low:high])) for low, high in pairwise(edges.tolist())])
    x = 1000 * np.arange(len(picked) + 1) / len(picked)
    top = max(int(bins.reserved.max()), 1)
    below = np.zeros(len(picked), dtype=np.int64)
    layers: list[dict[str, Any]] = []
    for category in bins.by_category:
        above = below + category.bytes[picked]
        if category.bytes.any():
            layers.append(
                {
                    "name": category.name,
                    "colour": colours.MEMORY[category.name],
                    "path": _outline(x, 300 - 300 * above / top, 300 - 300 * below / top),
                    "at_peak": int(category.bytes[bins.peak]),
                    "shown": format_bytes(int(category.bytes[bins.peak])),
                }
            )
        below = above
    peak_at = int(np.argmax(bins.allocated[picked]))
    return {
        "layers": layers,
        "reserved": _line(x, 300 - 300 * bins.reserved[picked] / top),
        "peak_x": round(float(x[peak_at]), 1),
        "top": format_bytes(top),
        "label": ", ".join(f"{make_visible(layer['name'])} {layer['shown']}" for layer in layers),
    }


def _outline(x: Any, upper: Any, lower: Any) -> str:
    return f"M{_line(x, upper)[1:]}L{_line(x[::-1], lower[::-1])[1:]}Z"


def _line(x: Any, y: Any) -> str:
    steps = [f"{x[at]:.0f},{y[at]:.1f}L{x[at + 1]:.0f},{y[at]:.1f}" for at in range(len(y))]
    return "M" + "L".join(steps)


def _deltas(values: Ints, unit: int) -> list[int]:
    deltas: list[int] = np.diff(values // unit, prepend=0).tolist()
    return deltas
