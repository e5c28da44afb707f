"""The section of memory: memory over time, what held it at a moment, and how it lies in segments.

The data of the chart are packed: sizes are differences from sample to sample, in the largest unit that divides them all
(usually 512 bytes), texts are numbers, and all of it is gzipped, so that eight thousand samples of forty series take a
few hundred kilobytes. uPlot, whose code and licence are in the page, draws the chart; without it there is a picture.

What is cached is not allocated and still held from CUDA. It is torn where it lies between blocks in use:
``empty_cache()`` cannot give it back, and a request larger than each piece cannot use it.

The colours of categories are Okabe and Ito's palette, which the colour-blind can distinguish, lighter or darker for the
rarer ones. Phases have no hue, so that nobody takes one for a category.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from profkit.allocator.layout import Layout, lay_out, lay_out_end
from profkit.analysis.memory.bins import Bins, Series, Shape, bin_history
from profkit.analysis.memory.categories import CATEGORIES
from profkit.analysis.memory.device import DeviceMemory, Filter
from profkit.analysis.memory.opened_snapshot import MemoryResult
from profkit.report import colours
from profkit.report.commands.memory import EVIDENCE_WORDS, By, build_memory_document
from profkit.report.document import Column, Lines, Table
from profkit.report.page.markup import Interned, pack, view_parts, view_table, view_tree
from profkit.report.text import make_visible
from profkit.report.units import BYTES, TEXT, format_bytes, format_count
from profkit.snapshot.columns import ALLOCATED, INACTIVE, PENDING, Ints

_FRAME = re.compile(r"^(?P<file>.+):(?P<line>\d{1,9}) ")
_LONGEST_SOURCE = 160
_MOST_SEGMENTS = 48
_COLUMNS = 400
_UNUSED, _PENDING = "unused", "pending"
_WORDS = {_UNUSED: "cached but unused", _PENDING: "freed, still used by another stream"}
_WITHOUT_LAYOUT = "not known: the history contradicts the segments that the snapshot lists"

Block = tuple[int, int, str, int]
"""Offset in its segment, bytes, kind (a category, unused or pending) and allocation, -1 if there is none."""

_MAX_PHASES = 4000
_FRAMES_KEPT = 20
_PICTURE_COLUMNS = 360
_SHAPE_NUMBERS = ("bytes", "requested_bytes", "first", "end", "born_us", "freed_us", "born_event", "freed_event")
_SHAPE_TEXTS = ("category", "owner", "module", "label")


def build_memory(
    memory: DeviceMemory,
    result: MemoryResult,
    *,
    wanted: Filter | None = None,
    source: Path | None = None,
) -> dict[str, Any]:
    """Return what the section shows.

    Args:
        memory: the device.
        result: its account.
        wanted: which allocations to show; the others are added up as one.
        source: the folder below which source lines are looked up and embedded; by default none are.
    """
    bins = bin_history(memory, wanted)
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
            "line": view_table(_add_source(_table_by(result, "stack"), result, source)),
            "category": view_table(_table_by(result, "category")),
        },
        "segments": build_segments(memory, result),
        "colours": colours.MEMORY,
    }


def _table_by(result: MemoryResult, by: By) -> Table:
    """Return the whole table that ``profkit memory --by`` prints."""
    document = build_memory_document(
        result, by=by, top=len(result.composition.by_stack) + len(result.composition.by_module)
    )
    return next(part for part in document.parts if isinstance(part, Table))


def _add_source(table: Table, result: MemoryResult, folder: Path | None) -> Table:
    """Return the table of lines with the source text of each, if a folder to look it up in is given."""
    if folder is None:
        return table
    sources = [_find_source(place.stack, folder) for place in result.composition.by_stack]
    rows = [{**row, "source": source} for row, source in zip(table.rows, sources, strict=True)]
    return replace(table, columns=[*table.columns, Column("source", "source", TEXT)], rows=rows)


def _find_source(stack: tuple[str, ...], folder: Path) -> str:
    match = _FRAME.match(stack[0]) if stack else None
    if match is None:
        return ""
    try:
        file = Path(os.path.realpath(folder / match["file"]))
        if not file.is_relative_to(os.path.realpath(folder)) or file.suffix != ".py":
            return ""
    except (OSError, ValueError):
        # The name comes from a capture, and may be none that a file can have.
        return ""
    return linecache.getline(str(file), int(match["line"])).strip()[:_LONGEST_SOURCE]


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


def build_segments(memory: DeviceMemory, result: MemoryResult) -> dict[str, Any]:
    """Return the largest segments with their blocks at both moments, and what is allocated and cached then.

    A segment of both moments stands in one row. Widths are per cent of the largest segment.
    """
    layouts = [lay_out(memory.history, result.composition.moment), lay_out_end(memory.history)]
    known = [layout for layout in layouts if layout is not None]
    sizes: dict[int, int] = {}
    for layout in known:
        for address, size in zip(layout.segment_address.tolist(), layout.segment_bytes.tolist(), strict=True):
            sizes[address] = max(size, sizes.get(address, 0))
    drawn = dict(sorted(sizes.items(), key=lambda place: (-place[1], place[0]))[:_MOST_SEGMENTS])
    moments = (result.composition.moment, memory.history.replay.event_count)
    sides = [_draw(memory, layout, moment, drawn) for layout, moment in zip(layouts, moments, strict=True)]
    kinds = {bar["kind"] for side in sides for view in side.values() for bar in view["blocks"]}
    whens = (f"At the {result.composition.what}", "When recording ended")
    return {
        "heads": [f"{when}: {_describe(layout)}" for when, layout in zip(whens, layouts, strict=True)],
        "rows": [[side.get(address) for side in sides] for address in drawn],
        "kinds": [(kind, _WORDS.get(kind, kind)) for kind in (*CATEGORIES, _PENDING, _UNUSED) if kind in kinds],
        "hidden": format_count(len(sizes) - len(drawn), "smaller segment") if len(sizes) > len(drawn) else "",
        "table": view_table(_table(memory, result, layouts)),
    }


def _describe(layout: Layout | None) -> str:
    if layout is None:
        return _WITHOUT_LAYOUT
    free = layout.free_blocks
    pieces = f" in {format_count(len(free), 'piece')}" if len(free) else ""
    return f"{format_count(len(layout.segment_bytes), 'segment')}, {format_bytes(int(free.sum()))} unused{pieces}"


def _draw(memory: DeviceMemory, layout: Layout | None, moment: int, sizes: dict[int, int]) -> dict[int, dict[str, Any]]:
    """Return the segments of a layout that are drawn, by address; ``sizes`` are the drawn ones, the longest first."""
    if layout is None:
        return {}

    def name_of(row: int) -> str:
        return memory.owner_of(row, moment) or memory.stack_of(row, moment).label

    segments, longest = {}, max(sizes.values(), default=1)
    number_at = {address: number for number, address in enumerate(layout.segment_address.tolist())}
    for address in sizes:
        if address not in number_at:
            continue
        number = number_at[address]
        mine = np.flatnonzero(layout.segment == number)
        size, is_free = int(layout.segment_bytes[number]), layout.state[mine] == INACTIVE
        unused = format_bytes(int(layout.size_bytes[mine][is_free].sum()))
        blocks = zip(
            (layout.address[mine] - address).tolist(),
            layout.size_bytes[mine].tolist(),
            [
                _kind(memory, *block)
                for block in zip(layout.state[mine].tolist(), layout.row[mine].tolist(), strict=True)
            ],
            layout.row[mine].tolist(),
            strict=True,
        )
        segments[address] = {
            "label": f"{format_bytes(size)}, {unused} unused",
            "width": round(100 * size / longest, 2),
            "blocks": merge_blocks(blocks, longest, name_of),
        }
    return segments


def _kind(memory: DeviceMemory, state: int, row: int) -> str:
    if state != ALLOCATED:
        return _UNUSED if state == INACTIVE else _PENDING
    return memory.classifier.claim_of(row).category if row >= 0 else "unknown"


def merge_blocks(blocks: Iterable[Block], longest: int, name_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return blocks as bars in per cent of the longest segment; neighbours too narrow to be seen are one.

    A bar of blocks of several kinds shows what most of its bytes are. Its text names the largest allocation in it.
    """
    bars: list[list[Block]] = []
    unit, column = longest / _COLUMNS, 0
    for block in blocks:
        if bars and block[0] + block[1] <= (column + 1) * unit:
            bars[-1].append(block)
        else:
            bars.append([block])
            column = int(block[0] / unit)
    return [_bar(merged, longest, name_of) for merged in bars]


def _bar(blocks: list[Block], longest: int, name_of: Callable[[int], str]) -> dict[str, Any]:
    sizes: dict[str, int] = {}
    for _, size, kind, _ in blocks:
        sizes[kind] = sizes.get(kind, 0) + size
    left, right = blocks[0][0], blocks[-1][0] + blocks[-1][1]
    largest = max(blocks, key=lambda block: block[1] if block[3] >= 0 else 0)
    words = [f"{format_bytes(size)} {kind}" for kind, size in sizes.items()]
    return {
        "left": round(100 * left / longest, 2),
        "width": round(100 * (right - left) / longest, 2),
        "kind": max(sizes, key=lambda kind: sizes[kind]),
        "text": ", ".join(words) + (f"; {make_visible(name_of(largest[3]))}" if largest[3] >= 0 else ""),
    }


def _table(memory: DeviceMemory, result: MemoryResult, layouts: list[Layout | None]) -> Table:
    """Return what PyTorch held at both moments: the first row is the sum of the next three."""
    unused, blocks = result.fragmentation, memory.device.blocks
    used = blocks.state == ALLOCATED
    at, end = ({} if layout is None else _sums(layout) for layout in layouts)
    # What the snapshot says of its own blocks holds even where they do not fit together.
    at = {"held": unused.reserved_bytes, "allocated": unused.allocated_bytes, "unused": unused.free_bytes, **at}
    at["padding"] = unused.padding_bytes
    totals = result.totals
    end = {
        "held": totals.reserved_end_bytes,
        "allocated": totals.allocated_end_bytes,
        "unused": unused.end_free_bytes,
        "largest": unused.end_largest_free_bytes,
        "padding": int((blocks.size_bytes - blocks.requested_bytes)[used].sum()),
        **end,
    }
    rows = {
        "held": "held from CUDA",
        "allocated": "allocated",
        "pending": "freed, still used by another stream",
        "unused": "cached but unused",
        "releasable": "unused segments: empty_cache() gives them back",
        "torn": "fragmented: unused, in segments that also hold blocks in use",
        "largest": "largest unused piece",
        "padding": "lost to rounding, within allocated",
    }
    columns = (
        Column("what", "memory", TEXT),
        Column("at_bytes", f"at the {result.composition.what}", BYTES),
        Column("end_bytes", "when recording ended", BYTES),
    )
    return Table(
        columns,
        [{"what": words, "at_bytes": at.get(key), "end_bytes": end.get(key)} for key, words in rows.items()],
    )


def _sums(layout: Layout) -> dict[str, int]:
    unused, releasable = layout.bytes_in(INACTIVE), layout.releasable_bytes
    return {
        "held": layout.reserved_bytes,
        "allocated": layout.bytes_in(ALLOCATED),
        "pending": layout.bytes_in(PENDING),
        "unused": unused,
        "releasable": releasable,
        "torn": unused - releasable,
        "largest": int(layout.free_blocks.max(initial=0)),
    }
