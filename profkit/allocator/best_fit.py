"""Whether each block is the one that the allocator would have chosen: a check of the settings, and of the replay.

A request gets the smallest free block that is large enough, of equal ones the first. ``max_split_size_mb`` decides
which blocks may be split and which are too large for a request. A program can change it while it runs, and if it then
uses no memory that the last limit would not have split off, no event contradicts that limit. But the replay's free
blocks are wrong then, and a later request may get another block than the best of them.

Only plain segments of the default pool are checked. A private pool may be restored to a checkpoint, which takes blocks
in any order, and expandable segments ignore the limit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator

import numpy as np

from profkit.allocator.replay import Replay
from profkit.allocator.rules import LARGE_SEGMENT_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, round_sizes
from profkit.allocator.start import find_regions
from profkit.snapshot.columns import ALLOC, OTHER, SEGMENT_ALLOC, SEGMENT_FREE, Device, Settings

_DEFAULT_POOL = (0, 0)
_FREE = -1
_BEFORE = -1
"""Stands for the event of a segment that was reserved before the first."""


def chose_best_fits(device: Device, settings: Settings, replay: Replay) -> bool:
    """Return whether every large request got the block that these settings and the replay's free blocks give it."""
    events, begins, sizes = device.events, replay.address.tolist(), replay.size_bytes.tolist()
    pool = _LargePool(settings.max_split_size_bytes)
    segments = _default_segments(device)
    for (event, address), (size, stream) in segments.items():
        if event == _BEFORE:
            pool.reserve(address, size, stream)
    for begin, size in zip(begins[: replay.start_count], sizes, strict=False):
        pool.take(begin, size)
    rounded = round_sizes(events.size_bytes, settings).tolist()
    reserved = None
    for event, action, row in _operations(device, replay):
        address = int(events.address[event])
        if action == SEGMENT_ALLOC:
            reserved = address
            if (event, address) in segments:
                pool.reserve(address, *segments[event, address])
        elif action == SEGMENT_FREE:
            pool.release(address)
        elif action == _FREE:
            pool.free(begins[row], sizes[row])
        else:
            if not pool.is_best(address, rounded[event], is_new=address == reserved):
                return False
            pool.take(address, sizes[row])
            reserved = None
    return True


def _operations(device: Device, replay: Replay) -> Iterator[tuple[int, int, int]]:
    """Yield what happened to segments and large blocks, in order: the event, what it did, the row of the allocation."""
    action, row = device.events.action.astype(np.int64), np.full(len(device.events), -1, dtype=np.int64)
    action[(action != SEGMENT_ALLOC) & (action != SEGMENT_FREE)] = OTHER
    is_large = replay.size_bytes > SMALL_BYTES
    freed = np.flatnonzero(is_large & (replay.completed < replay.event_count))
    born = np.flatnonzero(is_large & (replay.birth >= 0))
    for event, some, what in ((replay.completed[freed], freed, _FREE), (replay.birth[born], born, ALLOC)):
        action[event], row[event] = what, some
    where = np.flatnonzero(action != OTHER)
    return zip(where.tolist(), action[where].tolist(), row[where].tolist(), strict=True)


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
    """The free blocks of large segments, by stream."""

    def __init__(self, split_limit_bytes: int) -> None:
        self._limit = split_limit_bytes
        self._segments: list[int] = []
        self._end_and_stream: dict[int, tuple[int, int]] = {}
        self._sizes: dict[int, int] = {}
        self._begin_of: dict[int, int] = {}
        self._ordered: dict[int, list[tuple[int, int]]] = {}

    def reserve(self, address: int, size: int, stream: int) -> None:
        """Add a segment, all free."""
        insort(self._segments, address)
        self._end_and_stream[address] = address + size, stream
        self._add(address, size, stream)

    def release(self, address: int) -> None:
        """Remove a segment, all free; nothing happens if it was not added."""
        if address in self._end_and_stream:
            _, stream = self._end_and_stream.pop(address)
            self._segments.remove(address)
            self._remove(address, stream)

    def is_best(self, address: int, want: int, *, is_new: bool) -> bool:
        """Return whether a request for ``want`` bytes gets the free block at ``address``.

        Args:
            is_new: whether the block is a segment that was reserved because no free block served the request.
        """
        stream = self._stream_at(address)
        if stream is None:
            return True
        own = self._sizes.get(address, 0), address
        blocks = self._ordered[stream]
        at = bisect_left(blocks, (want, 0))
        if is_new and blocks[at : at + 1] == [own]:
            at += 1
        best = blocks[at] if at < len(blocks) else None
        is_served = best is not None and not self._is_too_large(best[0], want)
        return not is_served if is_new else is_served and best == own

    def take(self, address: int, size: int) -> None:
        """Use ``size`` bytes at ``address`` of the free block that holds them."""
        stream = self._stream_at(address)
        if stream is None:
            return
        begin = address if address in self._sizes else max((b for b in self._sizes if b < address), default=address)
        have = self._remove(begin, stream)
        self._add(begin, address - begin, stream)
        self._add(address + size, begin + have - address - size, stream)

    def free(self, address: int, size: int) -> None:
        """Free a block, which merges with its free neighbours."""
        stream = self._stream_at(address)
        if stream is None:
            return
        end = address + size
        if address not in self._end_and_stream and address in self._begin_of:
            before = self._begin_of[address]
            self._remove(before, stream)
            address = before
        if end not in self._end_and_stream and end in self._sizes:
            end += self._remove(end, stream)
        self._add(address, end - address, stream)

    def _is_too_large(self, size: int, want: int) -> bool:
        return size >= self._limit if want < self._limit else size >= want + LARGE_SEGMENT_BYTES

    def _stream_at(self, address: int) -> int | None:
        at = bisect_right(self._segments, address) - 1
        end, stream = self._end_and_stream[self._segments[at]] if at >= 0 else (0, 0)
        return stream if address < end else None

    def _add(self, begin: int, size: int, stream: int) -> None:
        if size > 0:
            self._sizes[begin], self._begin_of[begin + size] = size, begin
            insort(self._ordered.setdefault(stream, []), (size, begin))

    def _remove(self, begin: int, stream: int) -> int:
        size = self._sizes.pop(begin, 0)
        if size:
            del self._begin_of[begin + size]
            blocks = self._ordered[stream]
            del blocks[bisect_left(blocks, (size, begin))]
        return size
