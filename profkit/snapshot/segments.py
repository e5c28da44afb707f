"""Read the segments and blocks of a snapshot into columns, and check that they are whole.

A segment's blocks tile it: the first begins where it begins, each next where the one before ends, and the last ends
where it ends. A file in which they do not is damaged.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from profkit.snapshot.columns import ALLOCATED, INACTIVE, PENDING, Blocks, Segments

_STATES = {
    "active_allocated": ALLOCATED,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,  # what the docstring calls it
    "inactive": INACTIVE,
}

_LARGEST = 2**60


def no_segments() -> tuple[Segments, Blocks]:
    """Return the segments and blocks of a device on which nothing is reserved."""
    return _build([])


def read_segments(entries: list[dict[str, Any]]) -> dict[int, tuple[Segments, Blocks]]:
    """Return each device's segments and blocks.

    Raises:
        ValueError: blocks do not tile their segment, segments overlap, or a block's state is unknown.
        KeyError: a segment or block lacks its address, size or state.
    """
    by_device: dict[int, list[dict[str, Any]]] = {}
    for entry in entries:
        by_device.setdefault(int(entry.get("device", 0)), []).append(entry)
    return {device: _build(found) for device, found in by_device.items()}


def _build(entries: list[dict[str, Any]]) -> tuple[Segments, Blocks]:
    entries = sorted(entries, key=lambda entry: int(entry["address"]))
    rows: list[tuple[int, int, int, int, int]] = []
    raw: list[dict[str, Any]] = []
    end = 0
    for index, entry in enumerate(entries):
        start = int(entry["address"])
        if start < end:
            raise ValueError("segments overlap")
        end = start
        for block in entry["blocks"]:
            size = int(block["size"])
            if size <= 0 or int(block.get("address", end)) != end:
                raise ValueError("a segment's blocks do not tile it")
            state = _STATES.get(block["state"])
            if state is None:
                raise ValueError(f"a block in state {block['state']!r}")
            rows.append((end, size, _requested(block, size), state, index))
            raw.append(block)
            end += size
        if end != start + int(entry["total_size"]) or not 0 <= start <= end < _LARGEST:
            raise ValueError("a segment's blocks do not tile it")
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5)
    segments = Segments(
        address=np.array([int(entry["address"]) for entry in entries], dtype=np.int64),
        size_bytes=np.array([int(entry["total_size"]) for entry in entries], dtype=np.int64),
        stream=np.array([int(entry.get("stream", 0)) for entry in entries], dtype=np.int64),
        is_large=np.array([entry.get("segment_type") != "small" for entry in entries], dtype=np.bool_),
        is_expandable=np.array([bool(entry.get("is_expandable")) for entry in entries], dtype=np.bool_),
        pool=[_pool(entry.get("segment_pool_id")) for entry in entries],
    )
    address, size_bytes, requested_bytes, state_codes, segment = columns.T
    return segments, Blocks(address, size_bytes, requested_bytes, state_codes.astype(np.int8), segment, raw)


def _requested(block: dict[str, Any], size: int) -> int:
    """Return the bytes that the program asked for; snapshots before torch 2.1 keep them in the block's history."""
    if "requested_size" in block:
        return int(block["requested_size"])
    history = block.get("history")
    return int(history[0].get("real_size", size)) if history else size


def _pool(value: Any) -> tuple[int, int]:
    if value is None:
        return (0, 0)
    first, second = value
    return (int(first), int(second))
