"""How the memory that PyTorch holds lies in segments when the recording ends: what is cached, and where it is torn."""

from __future__ import annotations

from typing import Any

import numpy as np

from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.result import MemoryResult
from profkit.report.document import Column, Table
from profkit.report.page.markup import view_table
from profkit.report.units import BYTES, TEXT, format_bytes, format_count
from profkit.snapshot.columns import ALLOCATED, INACTIVE

_MOST_SEGMENTS = 48


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
                "blocks": [_block(memory, int(row), int(segments.address[number]), longest) for row in mine],
            }
        )
    return {
        "bars": bars,
        "hidden": format_count(max(len(segments) - _MOST_SEGMENTS, 0), "smaller segment"),
        "has_hidden": len(segments) > _MOST_SEGMENTS,
        "table": view_table(_unused_table(result)),
    }


def _block(memory: DeviceMemory, row: int, start: int, longest: int) -> dict[str, Any]:
    blocks = memory.device.blocks
    size, state = int(blocks.size_bytes[row]), int(blocks.state[row])
    kind = {ALLOCATED: "allocated", INACTIVE: "unused"}.get(state, "pending")
    return {
        "left": round(100 * (int(blocks.address[row]) - start) / longest, 2),
        "width": round(100 * size / longest, 2),
        "kind": kind,
        "text": f"{format_bytes(size)} {kind}",
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
