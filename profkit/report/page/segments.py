"""How the memory that PyTorch holds lies in segments when the recording ends: what is cached, and where it is torn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.result import MemoryResult
from profkit.report.document import Column, Table
from profkit.report.page.markup import view_table
from profkit.report.units import BYTES, TEXT, format_bytes, format_count
from profkit.snapshot.columns import ALLOCATED, INACTIVE, PENDING

_MOST_SEGMENTS = 48
_COLUMNS = 400
_KINDS = {ALLOCATED: "allocated", INACTIVE: "unused", PENDING: "pending"}


def build_segments(memory: DeviceMemory, result: MemoryResult) -> dict[str, Any]:
    """Return the largest segments with their blocks, in per cent of the largest one, and what is unused when."""
    segments, blocks = memory.device.segments, memory.device.blocks
    order = np.argsort(-segments.size_bytes, kind="stable")[:_MOST_SEGMENTS].tolist()
    longest = int(segments.size_bytes.max(initial=1))
    bars = []
    for number in order:
        size = int(segments.size_bytes[number])
        mine = np.flatnonzero(blocks.segment == number)
        free = int(blocks.size_bytes[mine][blocks.state[mine] == INACTIVE].sum())
        bars.append(
            {
                "label": f"{format_bytes(size)}, {format_bytes(free)} unused",
                "width": round(100 * size / longest, 2),
                "blocks": merge_blocks(
                    zip(
                        (blocks.address[mine] - segments.address[number]).tolist(),
                        blocks.size_bytes[mine].tolist(),
                        blocks.state[mine].tolist(),
                        strict=True,
                    ),
                    longest,
                ),
            }
        )
    return {
        "bars": bars,
        "hidden": format_count(max(len(segments) - _MOST_SEGMENTS, 0), "smaller segment"),
        "has_hidden": len(segments) > _MOST_SEGMENTS,
        "table": view_table(_unused_table(result)),
    }


def merge_blocks(blocks: Iterable[tuple[int, int, int]], longest: int) -> list[dict[str, Any]]:
    """Return blocks of (offset, size, state) as bars in per cent; neighbours too narrow to be seen are one.

    A bar of blocks of several states shows what most of its bytes are.
    """
    bars: list[dict[str, Any]] = []
    columns: dict[int, dict[int, int]] = {}
    unit = longest / _COLUMNS
    for offset, size, state in blocks:
        last = bars[-1] if bars else None
        right = offset + size
        if last is not None and right <= (last["column"] + 1) * unit:
            last["right"] = right
        else:
            bars.append({"column": int(offset / unit), "offset": offset, "right": right})
        sizes = columns.setdefault(len(bars) - 1, {})
        sizes[state] = sizes.get(state, 0) + size
    return [_bar(one["offset"], one["right"], columns[at], longest) for at, one in enumerate(bars)]


def _bar(offset: int, right: int, sizes: dict[int, int], longest: int) -> dict[str, Any]:
    most = max(sizes, key=lambda state: sizes[state])
    return {
        "left": round(100 * offset / longest, 2),
        "width": round(100 * (right - offset) / longest, 2),
        "kind": _KINDS[most],
        "text": ", ".join(f"{format_bytes(size)} {_KINDS[state]}" for state, size in sizes.items()),
    }


def _unused_table(result: MemoryResult) -> Table:
    """Return what PyTorch held and did not use, at the moment explained and when recording ended."""
    some = result.fragmentation
    rows = [
        ("held from CUDA", some.reserved_bytes, result.totals.reserved_end_bytes),
        ("allocated", some.allocated_bytes, result.totals.allocated_end_bytes),
        ("freed, still used by another stream", some.pending_bytes, None),
        ("unused", some.free_bytes, some.end_free_bytes),
        ("largest unused piece", None, some.end_largest_free_bytes),
        ("what empty_cache() would give back", None, some.end_releasable_bytes),
        ("lost to rounding, within allocated", some.padding_bytes, None),
    ]
    columns = (
        Column("what", "memory", TEXT),
        Column("at_bytes", f"at the {result.composition.what}", BYTES),
        Column("end_bytes", "when recording ended", BYTES),
    )
    return Table(columns, [{"what": what, "at_bytes": at, "end_bytes": end} for what, at, end in rows])
