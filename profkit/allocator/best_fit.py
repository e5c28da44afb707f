"""Whether each block is the one that the allocator would have chosen: a check of the settings, and of the replay.

A request gets the smallest free block that is large enough, of equal ones the first. ``max_split_size_mb`` decides
which blocks may be split and which are too large for a request. A program can change it while it runs, and if it then
uses no memory that the last limit would not have split off, no event contradicts that limit. But the replay's free
blocks are wrong then, and a later request may get another block than the best of them.

Only plain segments of the default pool are checked. A private pool may be restored to a checkpoint, which takes blocks
in any order, and expandable segments ignore the limit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from profkit.allocator.replay import Replay
from profkit.allocator.rules import (
    MIN_SPLIT_LIMIT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    is_oversized,
    round_sizes,
)
from profkit.allocator.start import find_regions
from profkit.snapshot.columns import ALLOC, OTHER, SEGMENT_ALLOC, SEGMENT_FREE, Device, Settings

_DEFAULT_POOL = (0, 0)
_FREE = -1
_BEFORE = -1
"""Stands for the event of a segment that was reserved before the first."""


def chose_best_fits(device: Device, settings: Settings, replay: Replay) -> bool:
    """Return whether every large request got the block that these settings and the replay's free blocks give it."""
    if not np.any(replay.size_bytes >= MIN_SPLIT_LIMIT_BYTES):
        return True  # no limit decides about the sizes
    sizes = replay.size_bytes.tolist()
    pool = _LargePool(settings)
    segments = _default_segments(device)
    # The rows from before the first event are sorted by address.
    begins = replay.address[: replay.start_count].tolist()
    for (event, address), (size, stream) in segments.items():
        if event == _BEFORE:
            inside = range(bisect_left(begins, address), bisect_left(begins, address + size))
            pool.reserve(address, size, stream, [(begins[row], sizes[row]) for row in inside])
    reserved = None
    for event, action, address, want, row in _operations(device, settings, replay):
        if action == SEGMENT_ALLOC:
            reserved = address
            if (event, address) in segments:
                pool.reserve(address, *segments[event, address])
        elif action == SEGMENT_FREE:
            pool.release(address)
        elif action == _FREE:
            pool.free(address, sizes[row])
        else:
            if not pool.serve(address, want, sizes[row], is_new=address == reserved):
                return False
            reserved = None
    return True


def _operations(device: Device, settings: Settings, replay: Replay) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield what happened to segments and large blocks, in order: (event, what, address, rounded request, row)."""
    events = device.events
    action, row = events.action.astype(np.int64), np.full(len(events), -1, dtype=np.int64)
    action[(action != SEGMENT_ALLOC) & (action != SEGMENT_FREE)] = OTHER
    is_large = replay.size_bytes > SMALL_BYTES
    freed = np.flatnonzero(is_large & (replay.completed < replay.event_count))
    born = np.flatnonzero(is_large & (replay.birth >= 0))
    for event, some, what in ((replay.completed[freed], freed, _FREE), (replay.birth[born], born, ALLOC)):
        action[event], row[event] = what, some
    where = np.flatnonzero(action != OTHER)
    wanted = round_sizes(events.size_bytes[where], settings)
    columns = (where, action[where], events.address[where], wanted, row[where])
    return zip(*(column.tolist() for column in columns), strict=True)


def _default_segments(device: Device) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the large plain segments of the default pool: (reserving event, address) → (size, stream).

    Newer torch writes the pool into the event. Else it is known of the segments at the dump alone; others are left out.
    """
    segments, events = device.segments, device.events
    pools = dict(zip(segments.address.tolist(), segments.pool, strict=True))
    last = {
        address: (pool, stream) for (address, pool), stream in zip(pools.items(), segments.stream.tolist(), strict=True)
    }
    found: dict[tuple[int, int], tuple[int, int]] = {}
    where = (events.action == SEGMENT_ALLOC) | (events.action == SEGMENT_FREE)
    for event in np.flatnonzero(where)[::-1].tolist():
        address = int(events.address[event])
        if events.action[event] == SEGMENT_FREE:
            last[address] = events.raw[event].get("pool_id"), int(events.stream[event])
            continue
        pool, stream = last.pop(address, (None, 0))
        if pool == _DEFAULT_POOL and events.size_bytes[event] > SMALL_SEGMENT_BYTES:
            found[event, address] = int(events.size_bytes[event]), stream
    for address, size in find_regions(device, Counter())[0].items():
        pool, stream = last.get(address, (None, 0))
        if pool == _DEFAULT_POOL and size > SMALL_SEGMENT_BYTES:
            found[_BEFORE, address] = size, stream
    return found


class _LargePool:
    """The blocks of large segments: free ones by stream, and the streams of those in use."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._fences: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._begin_of: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        """Of every block, by its beginning."""
        self._ordered: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def reserve(self, address: int, size: int, stream: int, live: Iterable[tuple[int, int]] = ()) -> None:
        """Add a segment, free but for the blocks (address, size) that are ``live`` in it, sorted."""
        self._fences.add(address)
        at = address
        for begin, extent in live:
            self._add(at, begin - at, stream)
            self._streams[begin] = stream
            at = begin + extent
        self._add(at, address + size - at, stream)

    def release(self, address: int) -> None:
        """Remove a segment, all free; nothing happens if it was not added."""
        if address in self._fences and address in self._sizes:
            self._fences.discard(address)
            self._remove(address)

    def serve(self, address: int, want: int, size: int, *, is_new: bool) -> bool:
        """Use ``size`` bytes of the free block at ``address``; return whether it is the one that a request gets.

        Args:
            want: the bytes of the request.
            is_new: whether the block is a segment that was reserved because no free block served the request.
        """
        have = self._sizes.get(address)
        if have is None:
            return True
        stream = self._streams[address]
        self._remove(address)
        blocks = self._ordered[stream]
        at = bisect_left(blocks, (want, 0))
        other = blocks[at] if at < len(blocks) else None
        self._streams[address] = stream
        self._add(address + size, have - size, stream)
        if is_new:
            return other is None or is_oversized(other[0], want, self._settings)
        return not is_oversized(have, want, self._settings) and (other is None or (have, address) < other)

    def free(self, address: int, size: int) -> None:
        """Free a block, which merges with its free neighbours; nothing happens if its segment was not added."""
        stream = self._streams.pop(address, None)
        if stream is None:
            return
        end = address + size
        if address not in self._fences and address in self._begin_of:
            address = self._begin_of[address]
            self._remove(address)
        if end not in self._fences and end in self._sizes:
            end += self._remove(end)
        self._add(address, end - address, stream)

    def _add(self, begin: int, size: int, stream: int) -> None:
        if size > 0:
            self._sizes[begin], self._begin_of[begin + size], self._streams[begin] = size, begin, stream
            insort(self._ordered[stream], (size, begin))

    def _remove(self, begin: int) -> int:
        size = self._sizes.pop(begin)
        del self._begin_of[begin + size]
        blocks = self._ordered[self._streams.pop(begin)]
        del blocks[bisect_left(blocks, (size, begin))]
        return size
