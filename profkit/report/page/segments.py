"""How the memory that PyTorch holds lies in segments, at the moment explained and when recording ended.

What is cached is not allocated and still held from CUDA. It is torn where it lies between blocks in use:
``empty_cache()`` cannot give it back, and a request larger than each piece cannot use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from profkit.allocator.layout import Layout, lay_out, lay_out_end
from profkit.analysis.memory.categories import CATEGORIES
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.result import MemoryResult
from profkit.report.document import Column, Table
from profkit.report.page.markup import view_table
from profkit.report.text import make_visible
from profkit.report.units import BYTES, TEXT, format_bytes, format_count
from profkit.snapshot.columns import ALLOCATED, INACTIVE, PENDING

_MOST_SEGMENTS = 48
_COLUMNS = 400
_UNUSED, _PENDING = "unused", "pending"
_WORDS = {_UNUSED: "cached but unused", _PENDING: "freed, still used by another stream"}
_WITHOUT_LAYOUT = "not known: the history contradicts the segments that the snapshot lists"

Block = tuple[int, int, str, int]
"""Offset in its segment, bytes, kind (a category, unused or pending) and allocation, -1 if there is none."""


def build_segments(memory: DeviceMemory, result: MemoryResult) -> dict[str, Any]:
    """Return the largest segments with their blocks at both moments, and what is allocated and cached then.

    A segment of both moments stands in one row. Widths are per cent of the largest segment.
    """
    layouts = [lay_out(memory.history, result.composition.moment), lay_out_end(memory.history)]
    known = [one for one in layouts if one is not None]
    sizes: dict[int, int] = {}
    for layout in known:
        for address, size in zip(layout.segment_address.tolist(), layout.segment_bytes.tolist(), strict=True):
            sizes[address] = max(size, sizes.get(address, 0))
    drawn = dict(sorted(sizes.items(), key=lambda one: (-one[1], one[0]))[:_MOST_SEGMENTS])
    moments = (result.composition.moment, memory.history.replay.event_count)
    sides = [_draw(memory, layout, moment, drawn) for layout, moment in zip(layouts, moments, strict=True)]
    kinds = {bar["kind"] for side in sides for view in side.values() for bar in view["blocks"]}
    whens = (f"At the {result.composition.what}", "When recording ended")
    return {
        "heads": [_head(when, layout) for when, layout in zip(whens, layouts, strict=True)],
        "rows": [[side.get(address) for side in sides] for address in drawn],
        "kinds": [(kind, _WORDS.get(kind, kind)) for kind in (*CATEGORIES, _PENDING, _UNUSED) if kind in kinds],
        "hidden": format_count(len(sizes) - len(drawn), "smaller segment") if len(sizes) > len(drawn) else "",
        "table": view_table(_table(memory, result, layouts)),
    }


def _head(when: str, layout: Layout | None) -> str:
    if layout is None:
        return f"{when}: {_WITHOUT_LAYOUT}"
    free = layout.free_blocks
    pieces = f" in {format_count(len(free), 'piece')}" if len(free) else ""
    return (
        f"{when}: {format_count(len(layout.segment_bytes), 'segment')}, {format_bytes(int(free.sum()))} unused{pieces}"
    )


def _draw(memory: DeviceMemory, layout: Layout | None, moment: int, sizes: dict[int, int]) -> dict[int, dict[str, Any]]:
    """Return the segments of a layout that are drawn, by address; ``sizes`` are the drawn ones, the longest first."""
    if layout is None:
        return {}

    def name_of(row: int) -> str:
        return memory.owner_of(row, moment) or memory.stack_of(row, moment).label

    found, longest = {}, max(sizes.values(), default=1)
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
            [_kind(memory, *one) for one in zip(layout.state[mine].tolist(), layout.row[mine].tolist(), strict=True)],
            layout.row[mine].tolist(),
            strict=True,
        )
        found[address] = {
            "label": f"{format_bytes(size)}, {unused} unused",
            "width": round(100 * size / longest, 2),
            "blocks": merge_blocks(blocks, longest, name_of),
        }
    return found


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
    return [_bar(some, longest, name_of) for some in bars]


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
    some, blocks = result.fragmentation, memory.device.blocks
    used = blocks.state == ALLOCATED
    at, end = ({} if layout is None else _sums(layout) for layout in layouts)
    # What the snapshot says of its own blocks holds even where they do not fit together.
    at = {"held": some.reserved_bytes, "allocated": some.allocated_bytes, "unused": some.free_bytes, **at}
    at["padding"] = some.padding_bytes
    totals = result.totals
    end = {
        "held": totals.reserved_end_bytes,
        "allocated": totals.allocated_end_bytes,
        "unused": some.end_free_bytes,
        "largest": some.end_largest_free_bytes,
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
