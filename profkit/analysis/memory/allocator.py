"""Replay the caching allocator: from the recorded events to the blocks that it charged, byte for byte.

An event names an address and the bytes requested; what the allocator charged is the block that it found there: the
request rounded, and the rest of the free block where that was too small to split off. So the replay keeps the free
blocks and follows the allocator's own rules (`profkit.analysis.memory.rules`): split on alloc, merge with free
neighbours of the same segment on free, segments that come and go. Where a block lies is recorded, so nothing is
searched and an event costs a few dictionary operations.

The allocator counts a block as allocated until ``free_requested`` and as requested and active until
``free_completed``, when its memory can be used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from profkit.analysis.memory.heap import Heap
from profkit.analysis.memory.rules import round_sizes, smallest_rests
from profkit.analysis.memory.start import find_start
from profkit.snapshot.columns import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Device,
    Ints,
    Settings,
)

_CHUNK = 2**15
"""Events turned into Python numbers at a time; more would only take memory."""


@dataclass(frozen=True, eq=False)
class Replay:
    """Every allocation that the history shows, and the reserved memory, on one device.

    Allocations are rows: those from before the first event first, by address, then by birth. Moments are indices of
    events: ``birth`` is -1 before the first; ``freed`` and ``completed`` are the number of events where they never
    came.
    """

    address: Ints
    size_bytes: Ints
    """What the allocator charged."""
    slack_bytes: Ints
    """How much larger the block may have been: 0 where its size is proven, as nearly always."""
    requested_bytes: Ints
    birth: Ints
    freed: Ints
    completed: Ints
    final_block: Ints
    """The block at the dump that a row from before the first event still is, or -1."""
    start_count: int
    """How many rows are from before the first event."""
    start_reserved_bytes: int
    event_count: int
    final_free: dict[int, int]
    """Free blocks after the last event: address → size."""
    contradictions: dict[str, int]
    """What the history says and no allocator could have done: how often."""

    def __len__(self) -> int:
        return len(self.address)


def replay_device(device: Device, settings: Settings) -> Replay:
    """Return what the allocator did on ``device``, from the first recorded event to the last."""
    events = device.events
    start = find_start(device, settings)
    start_count = len(start.address)
    expandable = _expandable_ranges(device)
    is_pure = bool(expandable) and not start.fences and not np.any(events.action == SEGMENT_ALLOC)
    heap = Heap(start, expandable)
    births = np.flatnonzero(events.action == ALLOC)
    heap.address.extend(events.address[births].tolist())
    freed = [-1 if is_pending else len(events) for is_pending in start.is_pending] + [len(events)] * len(births)
    completed = _run(heap, _events(device, settings, is_pure), freed, len(events))
    freed_column = np.array(freed, dtype=np.int64)
    heap.settle(events.address[births], np.searchsorted(births, freed_column))
    padding = np.full(len(births), -1, dtype=np.int64)
    return Replay(
        address=np.array(heap.address, dtype=np.int64),
        size_bytes=np.array(heap.size_bytes, dtype=np.int64),
        slack_bytes=np.concatenate([np.array(heap.slack_bytes, dtype=np.int64), np.zeros_like(births)]),
        requested_bytes=np.concatenate([np.array(start.requested_bytes, dtype=np.int64), events.size_bytes[births]]),
        birth=np.concatenate([np.full(start_count, -1, dtype=np.int64), births]),
        freed=freed_column,
        completed=np.array(completed, dtype=np.int64),
        final_block=np.concatenate([np.array(start.final_block, dtype=np.int64), padding]),
        start_count=start_count,
        start_reserved_bytes=start.reserved_bytes,
        event_count=len(events),
        final_free=heap.free,
        contradictions=dict(heap.contradictions),
    )


def reserved_changes(device: Device) -> Ints:
    """Return, per event, by how many bytes it changed what the device holds reserved."""
    action, size = device.events.action, device.events.size_bytes
    grows = (action == SEGMENT_ALLOC) | (action == SEGMENT_MAP)
    shrinks = (action == SEGMENT_FREE) | (action == SEGMENT_UNMAP)
    return np.where(grows, size, np.where(shrinks, -size, 0))


def _expandable_ranges(device: Device) -> list[tuple[int, int]]:
    """Return where expandable segments ever had pages, joined: CUDA gives those addresses to nothing else."""
    events, segments = device.events, device.segments
    mapped = (events.action == SEGMENT_MAP) | (events.action == SEGMENT_UNMAP)
    begins = np.concatenate([segments.address[segments.is_expandable], events.address[mapped]])
    ends = begins + np.concatenate([segments.size_bytes[segments.is_expandable], events.size_bytes[mapped]])
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(zip(begins.tolist(), ends.tolist(), strict=True)):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


_Event = tuple[int, int, int, int, int]


def _events(device: Device, settings: Settings, is_expandable: bool) -> Iterator[Iterator[_Event]]:
    """Yield chunks of (action, address, size, rounded size, smallest rest that is split off)."""
    events = device.events
    for low in range(0, len(events), _CHUNK):
        part = slice(low, low + _CHUNK)
        rounded = round_sizes(events.size_bytes[part], settings)
        rests = smallest_rests(rounded, settings, is_expandable)
        columns = (events.action[part], events.address[part], events.size_bytes[part], rounded, rests)
        yield zip(*(column.tolist() for column in columns), strict=True)


def _run(heap: Heap, chunks: Iterator[Iterator[_Event]], freed: list[int], never: int) -> list[int]:
    """Run the events through the heap; note per row when it was freed, and return when that was completed."""
    free, start_of, live, sizes, insert = heap.free, heap.start_of, heap.live, heap.size_bytes, heap.insert
    completed = [never] * len(freed)
    event = -1
    for chunk in chunks:
        for action, address, size, rounded, least in chunk:
            event += 1
            if action == ALLOC:
                have = free.pop(address, 0)
                rest = have - rounded
                charged = rounded
                if rest >= least:
                    free[address + rounded] = rest
                    start_of[address + have] = address + rounded
                else:
                    charged = heap.take_whole(address, rounded, least, have)
                live[address] = len(sizes)
                sizes.append(charged)
            elif action == FREE_COMPLETED:
                row = live.pop(address, -1)
                if row < 0:
                    heap.contradictions["frees of what was never allocated"] += 1
                    continue
                completed[row] = event
                if freed[row] == never:
                    freed[row] = event
                    heap.contradictions["frees completed that nobody had requested"] += 1
                insert(address, sizes[row])
            elif action == FREE_REQUESTED:
                row = live.get(address, -1)
                if row < 0 or freed[row] != never:
                    heap.contradictions["frees of what was never allocated"] += 1
                else:
                    freed[row] = event
            elif action <= SEGMENT_UNMAP:
                heap.do_segment(action, address, size)
    return completed
