"""Where reserved memory was free at a moment of the history, and which live blocks surrounded it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

import numpy as np

from profkit.allocator.history import History
from profkit.allocator.rules import SMALL_BYTES, SMALL_SEGMENT_BYTES
from profkit.allocator.start import find_regions
from profkit.snapshot.columns import SEGMENT_ALLOC, SEGMENT_UNMAP

_MOST_NEIGHBOURS = 16


@dataclass(frozen=True)
class FreeBlock:
    """A free block, and the live blocks (rows of the replay) next to it in its segment, up to 16, nearest first."""

    address: int
    size_bytes: int
    segment_bytes: int
    stream: int
    is_large: bool
    pinned_by: tuple[int, ...]


def find_free_blocks(history: History, moment: int) -> list[FreeBlock]:
    """Return the free blocks at a moment on the curves, the largest first."""
    device, replay = history.device, history.replay
    plain, mapped = find_regions(device, Counter(), moment)
    regions = sorted([(begin, begin + size) for begin, size in plain.items()] + mapped)
    live = np.flatnonzero((replay.birth < moment) & (replay.completed >= moment))
    live = live[np.argsort(replay.address[live], kind="stable")]
    begins = replay.address[live].tolist()
    ends = (replay.address[live] + replay.size_bytes[live]).tolist()
    streams = _streams(history)
    found = []
    at = 0
    for begin, end in regions:
        first = at = bisect_right(begins, begin - 1, at)
        while at < len(begins) and begins[at] < end:
            at += 1
        inside = live[first:at].tolist()
        is_large = (begin not in plain or end - begin != SMALL_SEGMENT_BYTES) and (
            not inside or int(replay.size_bytes[inside].max()) > SMALL_BYTES
        )
        edges = [begin, *(edge for row in range(first, at) for edge in (begins[row], ends[row])), end]
        for gap in range(0, len(edges), 2):
            low, high = edges[gap], edges[gap + 1]
            if low < high:
                near = inside[max(gap // 2 - _MOST_NEIGHBOURS, 0) : gap // 2 + _MOST_NEIGHBOURS]
                around = sorted(near, key=lambda row: _distance(int(replay.address[row]), low, high))
                stream = streams[1][max(bisect_right(streams[0], begin) - 1, 0)] if streams[0] else 0
                found.append(
                    FreeBlock(low, high - low, end - begin, stream, is_large, tuple(around[:_MOST_NEIGHBOURS]))
                )
    return sorted(found, key=lambda one: (-one.size_bytes, one.address))


def _distance(address: int, low: int, high: int) -> int:
    return min(abs(address - high), abs(low - address))


def _streams(history: History) -> tuple[list[int], list[int]]:
    """Return, sorted by address, where segments and mapped pages began, and on which stream."""
    events, segments = history.device.events, history.device.segments
    where = (events.action >= SEGMENT_ALLOC) & (events.action <= SEGMENT_UNMAP)
    known = dict(zip(events.address[where].tolist(), events.stream[where].tolist(), strict=True))
    known |= dict(zip(segments.address.tolist(), segments.stream.tolist(), strict=True))
    return sorted(known), [known[address] for address in sorted(known)]
