"""Replay the caching allocator: from the recorded events to the blocks that it charged, byte for byte.

An event names an address and the bytes requested. What the allocator charged is the block at that address: the request
rounded up, plus the rest of the free block where that was too small to split off. So the replay keeps the free blocks
and follows the allocator's own rules (`profkit.allocator.rules`): split on alloc, merge with free neighbours of the
same segment on free, add and remove segments. The addresses are recorded, so nothing is searched, and an event costs a
few dictionary operations.

The allocator counts a block as allocated until ``free_requested``, and as requested and active until
``free_completed``, when its memory can be used again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from profkit.allocator.rules import (
    MIN_BLOCK_BYTES,
    NEVER,
    SMALL_BYTES,
    depends_on_settings,
    round_sizes,
    smallest_rests,
)
from profkit.allocator.start import Start, find_expandable_ranges, find_start
from profkit.snapshot.columns import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    INACTIVE,
    OTHER,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Codes,
    Device,
    Ints,
    Settings,
)

_CHUNK = 2**15
"""Events turned into Python numbers at a time; more would only take memory."""

_FREE = -1
"""A ``free_requested`` and the ``free_completed`` that directly follows it, as one event."""

_FAR = 2**62

_MOST_LOOKS = 2**25
"""Blocks that a replay looks through where their addresses do not lead to them; real histories need thousands."""

_UNKNOWN_FREE = "frees of memory that was never allocated"


@dataclass(frozen=True, eq=False)
class Replay:
    """Every allocation that the history shows on one device, and the memory reserved before the first event.

    Allocations are rows: first those from before the first event, by address, then the others by birth. Moments are
    indices of events: ``birth`` is -1 for rows from before the first event; ``freed`` and ``completed`` are the number
    of events if that never happened.
    """

    address: Ints
    size_bytes: Ints
    """What the allocator charged."""
    slack_bytes: Ints
    """How much larger the block may have been: 0 where its size is proven, as it nearly always is."""
    requested_bytes: Ints
    birth: Ints
    freed: Ints
    completed: Ints
    final_block: Ints
    """For a row from before the first event that is still there at the dump: its block's index. Otherwise -1."""
    start_count: int
    """How many rows are from before the first event."""
    start_reserved_bytes: int
    event_count: int
    final_free: dict[int, int]
    """Free blocks after the last event: address → size."""
    contradictions: dict[str, int]
    """What the history says that no allocator could have done → how often."""
    contradicts_settings: bool
    """Whether an allocator with the same settings all the time would have done something else."""

    def __len__(self) -> int:
        return len(self.address)


def replay_device(device: Device, settings: Settings, is_settled: bool = True) -> Replay:
    """Return what the allocator did on ``device``, from the first recorded event to the last.

    Args:
        is_settled: whether the settings were the same all the time. If not, a rest that other settings would have
            treated in another way counts as slack, unless a later event or the dump shows what became of it.
    """
    events = device.events
    start = find_start(device, settings, is_settled)
    births = np.flatnonzero(events.action == ALLOC)
    rounded = round_sizes(events.size_bytes[births], settings)
    expandable = find_expandable_ranges(device)
    only_expandable = bool(expandable) and not start.fences and not np.any(events.action == SEGMENT_ALLOC)
    has_both_kinds = bool(expandable) and not only_expandable
    is_other_kind = settings.is_recorded and settings.expandable_segments != bool(expandable)
    heap = _Heap(start, expandable, events.address[births], rounded.tolist())
    segments = device.segments
    extents = zip(segments.address.tolist(), (segments.address + segments.size_bytes).tolist(), strict=True)
    heap.private = [extent for extent, pool in zip(extents, segments.pool, strict=True) if pool != (0, 0)]
    rests = smallest_rests(rounded, settings, only_expandable)
    if not is_settled:
        heap.final_sizes = _final_sizes(device, start.address + events.address[births].tolist())
        rests = np.where(rounded > SMALL_BYTES, NEVER, rests)
    action = _join_frees(device)
    rows = _run(heap, _chunks(device, action, births, rounded, rests))
    freed, completed = _time_frees(heap, action, rows, start.is_pending + [False] * len(births))
    heap.settle(events.address[births], np.searchsorted(births, freed))
    heap.count_doubts()
    no_block = np.full(len(births), -1, dtype=np.int64)
    return Replay(
        address=heap.address,
        size_bytes=np.array(heap.size_bytes, dtype=np.int64),
        slack_bytes=np.array(heap.slack_bytes, dtype=np.int64),
        requested_bytes=np.concatenate([np.array(start.requested_bytes, dtype=np.int64), events.size_bytes[births]]),
        birth=np.concatenate([np.full(heap.start_count, -1, dtype=np.int64), births]),
        freed=freed,
        completed=completed,
        final_block=np.concatenate([np.array(start.final_block, dtype=np.int64), no_block]),
        start_count=heap.start_count,
        start_reserved_bytes=start.reserved_bytes,
        event_count=len(events),
        final_free=heap.free,
        contradictions=dict(heap.contradictions),
        contradicts_settings=heap.contradicts_settings or has_both_kinds or is_other_kind,
    )


def reserved_changes(device: Device) -> Ints:
    """Return, per event, by how many bytes it changed what the device has reserved."""
    action, size = device.events.action, device.events.size_bytes
    grows = (action == SEGMENT_ALLOC) | (action == SEGMENT_MAP)
    shrinks = (action == SEGMENT_FREE) | (action == SEGMENT_UNMAP)
    return np.where(grows, size, np.where(shrinks, -size, 0))


def _final_sizes(device: Device, addresses: list[int]) -> dict[int, int]:
    """Return the size at the dump of each row that is still there; ``addresses`` are those of the rows."""
    blocks = device.blocks
    row_at = {address: row for row, address in enumerate(addresses)}
    used = blocks.state != INACTIVE
    found = zip(blocks.address[used].tolist(), blocks.size_bytes[used].tolist(), strict=True)
    return {row_at[address]: size for address, size in found if address in row_at}


def _join_frees(device: Device) -> Codes:
    """Return the actions with `_FREE` for a ``free_completed`` that directly follows its request, which is left out."""
    events = device.events
    action = events.action.copy()
    follows = (action[1:] == FREE_COMPLETED) & (action[:-1] == FREE_REQUESTED)
    requests = np.flatnonzero(follows & (events.address[1:] == events.address[:-1]))
    action[requests + 1] = _FREE
    action[requests] = OTHER
    return action


_Event = tuple[int, int, int, int]


def _chunks(device: Device, action: Codes, births: Ints, rounded: Ints, rests: Ints) -> Iterator[Iterator[_Event]]:
    """Yield chunks of (action, address, size, size of a free block that is split), the latter two of allocs rounded."""
    sizes = device.events.size_bytes.copy()
    splits_from = np.zeros_like(sizes)
    sizes[births], splits_from[births] = rounded, rounded + rests
    where = np.flatnonzero(action <= SEGMENT_UNMAP)
    for low in range(0, len(where), _CHUNK):
        part = where[low : low + _CHUNK]
        columns = (action[part], device.events.address[part], sizes[part], splits_from[part])
        yield zip(*(column.tolist() for column in columns), strict=True)


def _run(heap: _Heap, chunks: Iterator[Iterator[_Event]]) -> tuple[list[int], list[int]]:
    """Run the events through the heap; return the rows of each ``free_requested``, and of each other free."""
    free, start_of, fences, live, sizes = heap.free, heap.start_of, heap.fences, heap.live, heap.size_bytes
    requested: list[int] = []
    completed: list[int] = []
    born = heap.start_count
    for chunk in chunks:
        for action, address, size, splits_from in chunk:
            if action == ALLOC:
                have = free.pop(address, 0)
                if have >= splits_from:
                    free[address + size] = have - size
                    start_of[address + have] = address + size
                elif have == size:
                    start_of.pop(address + have, None)
                else:
                    sizes[born] = heap.take_whole(born, address, size, splits_from - size, have)
                live[address] = born
                born += 1
            elif action <= FREE_COMPLETED:  # or _FREE
                row = live.pop(address, -1)
                completed.append(row)
                if row >= 0:
                    # As `_Heap.insert` does. The call would cost a tenth of the replay.
                    begin, end = address, address + sizes[row]
                    if begin not in fences:
                        before = start_of.pop(begin, None)
                        if before is not None:
                            free.pop(before, None)
                            begin = before
                    if end not in fences:
                        end += free.pop(end, 0)
                    free[begin] = end - begin
                    start_of[end] = begin
            elif action == FREE_REQUESTED:
                requested.append(live.get(address, -1))
            else:
                heap.do_segment(action, address, size)
    return requested, completed


def _time_frees(
    heap: _Heap, action: Codes, rows: tuple[list[int], list[int]], pending: list[bool]
) -> tuple[Ints, Ints]:
    """Return, per row, the event at which it was freed and the one at which that was completed.

    ``rows`` are those that `_run` returned; ``pending`` are the rows that were freed before the first event.
    """
    never = len(action)
    freed = np.where(np.array(pending, dtype=np.bool_), -1, never).astype(np.int64)
    completed = np.full(len(freed), never, dtype=np.int64)

    where, row = np.flatnonzero(action == FREE_REQUESTED), np.array(rows[0], dtype=np.int64)
    request_count = len(row)
    where, row = where[row >= 0], row[row >= 0]
    row, first = np.unique(row, return_index=True)
    is_new = freed[row] == never
    freed[row[is_new]] = where[first[is_new]]
    heap.count_contradictions(_UNKNOWN_FREE, request_count - np.count_nonzero(is_new))

    where = np.flatnonzero((action == _FREE) | (action == FREE_COMPLETED))
    row, is_joined = np.array(rows[1], dtype=np.int64), action[where] == _FREE
    heap.count_contradictions(_UNKNOWN_FREE, np.count_nonzero(row < 0) + np.count_nonzero((row < 0) & is_joined))
    where, row, is_joined = where[row >= 0], row[row >= 0], is_joined[row >= 0]
    completed[row] = where
    is_new = freed[row] == never
    freed[row[is_new]] = where[is_new] - is_joined[is_new]
    heap.count_contradictions(_UNKNOWN_FREE, np.count_nonzero(is_joined & ~is_new))
    heap.count_contradictions("frees completed without a request", np.count_nonzero(is_new & ~is_joined))
    return freed, completed


class _Heap:
    """State of one device's allocator during a replay; begins as `Start`, and takes over its containers.

    ``addresses`` and ``sizes`` are those of all later allocs, rounded; a size changes if the alloc gets more.

    ``free`` maps where a free block begins to its size; ``start_of`` maps where it ends to where it begins; ``fences``
    are the beginnings of segments, across which nothing merges. ``live`` maps addresses to rows; the lists are columns
    of rows.
    """

    def __init__(self, start: Start, expandable: list[tuple[int, int]], addresses: Ints, sizes: list[int]) -> None:
        self.free = start.free
        self.start_of = {begin + size: begin for begin, size in start.free.items()}
        self.fences = start.fences
        self.live = {address: row for row, address in enumerate(start.address)}
        self.start_count = len(start.address)
        self.address = np.concatenate([np.array(start.address, dtype=np.int64), addresses])
        self.size_bytes = start.size_bytes + sizes
        self.slack_bytes = start.slack_bytes + [0] * len(sizes)
        self.contradictions = start.contradictions
        self._uncertain = start.uncertain
        self.final_sizes: dict[int, int] | None = None
        """Where the settings may have changed: size at the dump of the rows that are still there."""
        self.contradicts_settings = False
        self.private: list[tuple[int, int]] = []
        """Segments of private pools at the dump: from, to."""
        self._doubts: dict[int, int] = {}
        self._padded: dict[int, int] = {}
        self._expandable = expandable
        self._looks_left = _MOST_LOOKS

    def count_contradictions(self, what: str, count: np.integer[Any] | int) -> None:
        """Add to the contradictions, if there are any."""
        if count:
            self.contradictions[what] += int(count)

    def insert(self, begin: int, size: int) -> None:
        """Add free memory, merged with the free memory on both sides in the same segment."""
        end = begin + size
        if begin not in self.fences:
            before = self.start_of.pop(begin, None)
            if before is not None:
                self.free.pop(before, None)
                begin = before
        if end not in self.fences:
            end += self.free.pop(end, 0)
        self.free[begin] = end - begin
        self.start_of[end] = begin

    def take_whole(self, row: int, address: int, want: int, least: int, have: int) -> int:
        """Serve an alloc that does not cleanly split a free block; return what the allocator charged.

        ``have`` is the size of the free block that began at ``address`` and has been taken out of ``free``, 0 if there
        was none; ``least`` is the smallest rest that is split off outside expandable segments.
        """
        if have == 0:
            have = self._reveal(address)
        rest = have - want
        if have == 0 or rest < 0:
            return self._take_impossible(address, want, have)
        if self._splits(row, address, want, rest, least):
            self.free[address + want] = rest
            self.start_of[address + have] = address + want
            return want
        self.start_of.pop(address + have, None)
        if rest:
            self._padded[address + want] = address
        return have

    def _splits(self, row: int, address: int, want: int, rest: int, least: int) -> bool:
        """Return whether the rest of a free block is split off, or counts as such; notes the doubt."""
        if self.final_sizes is None:
            return rest >= least or (rest >= MIN_BLOCK_BYTES and self._is_expandable(address))
        if row in self.final_sizes:
            return rest > 0 and self.final_sizes[row] == want
        if not depends_on_settings(want, rest):
            return rest >= MIN_BLOCK_BYTES
        self._doubts[row] = rest
        return False

    def count_doubts(self) -> None:
        """Count the rests that nothing has shown to be split off as slack."""
        for row, rest in self._doubts.items():
            self.size_bytes[row] -= rest
            self.slack_bytes[row] = rest

    def do_segment(self, action: int, address: int, size: int) -> None:
        """Reserve or release a segment, or map or unmap pages of an expandable one."""
        if action == SEGMENT_ALLOC:
            if address in self.free or address in self.live:
                self.contradictions["segments reserved where memory is reserved already"] += 1
                return
            self.fences.add(address)
            self.free[address] = size
            self.start_of[address + size] = address
        elif action == SEGMENT_MAP:
            self.insert(address, size)
        elif action == SEGMENT_FREE:
            if self.free.get(address) == size:
                self.free.pop(address)
                self.start_of.pop(address + size, None)
                self.fences.discard(address)
            else:
                self.contradictions["segments released while in use"] += 1
        elif not self._carve(address, size) and not (self._reveal_around(address) and self._carve(address, size)):
            self.contradictions["pages unmapped while in use"] += 1

    def settle(self, address: Ints, first_free: Ints) -> None:
        """Drop the doubt about a block if a later alloc began exactly where the block ends without the doubtful bytes.

        ``address`` are the addresses of the allocs in the order of events; ``first_free`` is, per row, how many allocs
        came before it was freed.
        """
        if not self._uncertain:
            return
        places: dict[int, int] = {}
        for order, place in enumerate(address.tolist()):
            if place in self._uncertain:
                places.setdefault(place, order)
        for place, row in self._uncertain.items():
            if place in places and places[place] < first_free[row]:
                self.slack_bytes[row] = 0

    def _is_expandable(self, address: int) -> bool:
        at = bisect_right(self._expandable, (address, _FAR)) - 1
        return at >= 0 and address < self._expandable[at][1]

    def _reveal(self, address: int) -> int:
        """Find the free block that must begin at ``address``, where none was known; take it out, return its size.

        Either the block before it was split after all (a CUDA graph's pool that is restored to a checkpoint splits
        exactly), or that block is from before the first event, and its size, unknown so far, is now clear.
        """
        owner = self._padded.get(address)
        row = self.live.get(owner, -1) if owner is not None else -1
        if owner is not None and row >= 0 and owner + self.size_bytes[row] > address:
            self._split_after_all(row, address)
            # In an impossible history it has merged with free memory in front of it.
            return self.free.pop(address, 0)
        for begin, row in self._uncertain.items() if self._may_look_through(self._uncertain) else ():
            have = begin + self.free.get(begin, 0) - address
            is_there = begin < address <= begin + self.slack_bytes[row] and have > 0
            if is_there and self.live.get(int(self.address[row])) == row:
                del self.free[begin], self._uncertain[begin]
                self.start_of[address + have] = address
                self.size_bytes[row] += address - begin
                self.slack_bytes[row] = 0
                return have
        return 0

    def _reveal_around(self, address: int) -> bool:
        """Split off the rest that must be free because ``address`` lies in it; False if there is none."""
        for begin, owner in self._padded.items() if self._may_look_through(self._padded) else ():
            row = self.live.get(owner, -1)
            if row >= 0 and begin <= address < owner + self.size_bytes[row]:
                self._split_after_all(row, begin)
                return True
        return False

    def _split_after_all(self, row: int, address: int) -> None:
        rest = int(self.address[row]) + self.size_bytes[row] - address
        self.size_bytes[row] -= rest
        self._doubts.pop(row, None)
        self.insert(address, rest)
        # The pool of a CUDA graph that is restored to a checkpoint splits exactly, whatever the settings.
        at = bisect_right(self.private, (address, _FAR)) - 1
        self.contradicts_settings |= at < 0 or address >= self.private[at][1]

    def _take_impossible(self, address: int, want: int, have: int) -> int:
        """Serve an alloc that no allocator could have served, as well as possible, and count it."""
        if have:
            self.start_of.pop(address + have, None)
            self.contradictions["allocs larger than the free block that they begin"] += 1
        elif address in self.live:
            self.contradictions["allocs where a live block begins"] += 1
        elif self._carve(address, want):
            self.contradictions["allocs in the middle of a free block"] += 1
        else:
            self.contradictions["allocs where no free memory is known"] += 1
        return want

    def _may_look_through(self, blocks: Sized) -> bool:
        """Return whether the blocks may be looked through one by one, which no whole history often needs."""
        self._looks_left -= len(blocks)
        if self._looks_left < 0:
            self.contradictions["blocks that were not looked for, after so many that had to be"] += 1
        return self._looks_left >= 0

    def _carve(self, begin: int, size: int) -> bool:
        """Take ``size`` bytes at ``begin`` out of the free block around them; False if there is none."""
        low, extent = begin, self.free.get(begin, 0)
        if extent < size:
            for low, extent in self.free.items() if self._may_look_through(self.free) else ():
                if low <= begin and begin + size <= low + extent:
                    break
            else:
                return False
        high = low + extent
        del self.free[low]
        self.start_of.pop(high, None)
        if low < begin:
            self.free[low] = begin - low
            self.start_of[begin] = low
        if begin + size < high:
            self.free[begin + size] = high - begin - size
            self.start_of[high] = begin + size
        return True
