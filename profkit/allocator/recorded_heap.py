"""The blocks of the caching allocator during a replay, from the state before the first recorded event on.

That state is worked back from the one at the dump: live blocks are those that the history frees without an alloc, and
those that are there at the end without one; the segments are those at the end, less those reserved since, plus those
released since. A block that is still there has its size in the snapshot. Of one freed meanwhile it is the request,
rounded, plus at most a rest too small to split off: a gap of up to 1 MiB (`SMALL_BYTES`) behind it belongs to it as a
whole; of a larger gap in the large pool at most what leaves a free block of more than 1 MiB, its ``slack_bytes`` until
the replay sees where a block begins.

What a history leaves open is noted as a doubt and settled by later events: whether the rest of a block was split off,
and how large a block from before the first event is. What no allocator could have done is counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sized
from dataclasses import dataclass, field

import numpy as np

from profkit.allocator import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    MIN_SPLIT_LIMIT_BYTES,
    SMALL_BYTES,
    depends_on_settings,
    round_sizes,
)
from profkit.snapshot.columns import (
    ALLOC,
    ALLOCATED,
    FREE_COMPLETED,
    FREE_REQUESTED,
    INACTIVE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Device,
    Ints,
    Settings,
)

_FAR = 2**62

_MOST_LOOKS = 2**25
"""How many blocks a replay may search one by one, where no address leads to the one it needs. Real histories need
thousands.
"""


@dataclass
class Start:
    """The state before the first event: rows of live blocks, sorted by address, and the free memory between them."""

    address: list[int] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)
    requested_bytes: list[int] = field(default_factory=list)
    slack_bytes: list[int] = field(default_factory=list)
    is_pending: list[bool] = field(default_factory=list)
    """Freed by the program before the first event, still used by another stream: no longer counted as allocated."""
    final_block: list[int] = field(default_factory=list)
    """Index of the same block at the dump, or -1 if it is gone by then."""
    free: dict[int, int] = field(default_factory=dict)
    """Free block → size."""
    fences: set[int] = field(default_factory=set)
    """Where segments begin that never merge with the memory before them."""
    uncertain: dict[int, int] = field(default_factory=dict)
    """Lowest possible start of a free block → row of the block before it, which may be larger than known."""
    reserved_bytes: int = 0
    contradictions: Counter[str] = field(default_factory=Counter)


def find_start(device: Device, settings: Settings, is_settled: bool) -> Start:
    """Return the state before the first event of ``device``; ``is_settled``: the settings never changed."""
    start = Start()
    plain, stretches = find_regions(device, start.contradictions)
    start.reserved_bytes = sum(plain.values()) + sum(end - begin for begin, end in stretches)
    start.fences = set(plain)
    # Where nothing was reserved nothing was live, and the events need not be sorted by address.
    live = _first_blocks(device, start.contradictions) if start.reserved_bytes else []
    rounded = round_sizes(np.array([requested for _, requested, _, _ in live], dtype=np.int64), settings).tolist()
    for (address, requested, is_pending, final), size in zip(live, rounded, strict=True):
        start.address.append(address)
        start.size_bytes.append(size if final < 0 else int(device.blocks.size_bytes[final]))
        start.requested_bytes.append(requested)
        start.slack_bytes.append(0)
        start.is_pending.append(is_pending)
        start.final_block.append(final)
    regions = [(begin, begin + size, False) for begin, size in plain.items()]
    regions += [(begin, end, True) for begin, end in stretches]
    _lay_out(start, sorted(regions), settings, is_settled)
    return start


def _first_blocks(device: Device, contradictions: Counter[str]) -> list[tuple[int, int, bool, int]]:
    """Return (address, requested bytes, is pending, final block or -1) of what was live before the first event."""
    events, blocks = device.events, device.blocks
    where = np.flatnonzero(events.action <= FREE_REQUESTED)  # alloc, free_completed, free_requested
    where = where[np.argsort(events.address[where], kind="stable")]
    borders = np.flatnonzero(np.diff(events.address[where], prepend=-1, append=-1))
    first, last = where[borders[:-1]], where[borders[1:] - 1]
    addresses, first_action, last_action = events.address[first], events.action[first], events.action[last]
    final_of = {int(blocks.address[row]): row for row in np.flatnonzero(blocks.state != INACTIVE).tolist()}
    live = []
    for row in np.flatnonzero(first_action != ALLOC).tolist():
        address, event = int(addresses[row]), int(first[row])
        still_waits = first[row] == last[row] and last_action[row] == FREE_REQUESTED
        final = final_of.get(address, -1) if still_waits else -1
        live.append((address, int(events.size_bytes[event]), bool(first_action[row] == FREE_COMPLETED), final))
    last_of = dict(zip(addresses.tolist(), last_action.tolist(), strict=True))
    for address, row in final_of.items():
        action = last_of.get(address)
        if action is None:
            live.append((address, int(blocks.requested_bytes[row]), int(blocks.state[row]) != ALLOCATED, row))
        elif action == FREE_COMPLETED:
            contradictions["blocks in use at the dump although their free was the last recorded event"] += 1
    return sorted(live)


def find_regions(
    device: Device, contradictions: Counter[str], moment: int = 0
) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Return the plain segments (address → size) and the mapped stretches (from, to) after ``moment`` events."""
    segments, events = device.segments, device.events
    extents = list(zip(segments.address.tolist(), segments.size_bytes.tolist(), segments.is_expandable, strict=True))
    plain = {address: size for address, size, is_expandable in extents if not is_expandable}
    mapped = _Stretches([(address, address + size) for address, size, is_expandable in extents if is_expandable])
    is_later = np.arange(len(events)) >= moment
    where = np.flatnonzero(is_later & (events.action >= SEGMENT_ALLOC) & (events.action <= SEGMENT_UNMAP))[::-1]
    columns = (events.action[where], events.address[where], events.size_bytes[where])
    for action, address, size in zip(*(column.tolist() for column in columns), strict=True):
        if action == SEGMENT_ALLOC:
            if plain.pop(address, None) != size:
                contradictions["segments reserved but neither released nor there at the dump"] += 1
        elif action == SEGMENT_FREE:
            if plain.setdefault(address, size) != size:
                contradictions["segments released although they are still there"] += 1
        elif action == SEGMENT_MAP:
            if not mapped.cut(address, address + size):
                contradictions["pages mapped but neither unmapped nor there at the dump"] += 1
        elif action == SEGMENT_UNMAP and not mapped.join(address, address + size):
            contradictions["pages unmapped although they are still there"] += 1
    return plain, mapped.ranges


def find_expandable_ranges(device: Device) -> list[tuple[int, int]]:
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


class _Stretches:
    """Disjoint address ranges, sorted, adjacent ones joined."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self.ranges: list[tuple[int, int]] = []
        for begin, end in sorted(ranges):
            self.join(begin, end)

    def cut(self, begin: int, end: int) -> bool:
        """Take a range out; return False, and do nothing, if it does not lie within one stretch."""
        at = bisect_right(self.ranges, (begin, _FAR)) - 1
        if at < 0 or self.ranges[at][1] < end:
            return False
        low, high = self.ranges[at]
        self.ranges[at : at + 1] = [part for part in ((low, begin), (end, high)) if part[0] < part[1]]
        return True

    def join(self, begin: int, end: int) -> bool:
        """Put a range in, joined to its neighbours; return False, and do nothing, if it overlaps one."""
        at = bisect_left(self.ranges, (begin, end))
        before, after = self.ranges[at - 1 : at] if at else [], self.ranges[at : at + 1]
        if (before and before[0][1] > begin) or (after and after[0][0] < end):
            return False
        low, high = at, at
        if before and before[0][1] == begin:
            begin, low = before[0][0], at - 1
        if after and after[0][0] == end:
            end, high = after[0][1], at + 1
        self.ranges[low:high] = [(begin, end)]
        return True


def _lay_out(start: Start, regions: list[tuple[int, int, bool]], settings: Settings, is_settled: bool) -> None:
    """Place the live blocks in their regions: fix their sizes, and make free blocks of the gaps between them."""
    row, count = 0, len(start.address)
    for begin, end, is_expandable in regions:
        while row < count and start.address[row] < begin:
            start.contradictions["live blocks that lie in no segment"] += 1
            row += 1
        at = begin
        while row < count and start.address[row] < end:
            address = start.address[row]
            if address < at:
                start.contradictions["live blocks that overlap"] += 1
            _add_free(start, at, address)
            limit = min(start.address[row + 1], end) if row + 1 < count else end
            _pad(start, row, limit, is_expandable, settings if is_settled else None)
            at = max(at, address + start.size_bytes[row])
            row += 1
        _add_free(start, at, end)
    start.contradictions["live blocks that lie in no segment"] += count - row
    start.contradictions += Counter()


def _add_free(start: Start, begin: int, end: int) -> None:
    if begin < end:
        start.free[begin] = end - begin


def _pad(start: Start, row: int, limit: int, is_expandable: bool, settings: Settings | None) -> None:
    """Give a block that was freed meanwhile the bytes that the gap up to ``limit`` proves, or note the doubt."""
    size = start.size_bytes[row]
    gap = limit - (start.address[row] + size)
    if start.final_block[row] >= 0 or size <= SMALL_BYTES or gap <= 0 or (is_expandable and settings is not None):
        return
    if settings is None:
        slack = min(SMALL_BYTES if size < MIN_SPLIT_LIMIT_BYTES else LARGE_SEGMENT_BYTES - MIN_BLOCK_BYTES, gap)
    elif gap <= SMALL_BYTES or size >= settings.max_split_size_bytes:
        start.size_bytes[row], slack = size + gap, 0
    else:
        slack = min(SMALL_BYTES, gap - SMALL_BYTES - MIN_BLOCK_BYTES)
    if slack:
        start.slack_bytes[row] = slack
        start.uncertain[start.address[row] + size] = row


class RecordedHeap:
    """The blocks of one device during a replay; begins as `Start`, and takes over its containers.

    ``addresses`` and ``sizes`` are those of all later allocs, rounded; a size changes if the alloc gets more.

    ``free`` maps where a free block begins to its size; ``start_of`` maps where it ends to where it begins; ``fences``
    are the beginnings of segments, across which nothing merges. ``live`` maps addresses to rows; the lists are columns
    of rows.
    """

    def __init__(self, start: Start, addresses: Ints, sizes: list[int]) -> None:
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
        self._looks_left = _MOST_LOOKS

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
        was none; ``least`` is the smallest rest that is split off.
        """
        if have == 0:
            have = self._reveal(address)
        rest = have - want
        if have == 0 or rest < 0:
            return self._take_impossible(address, want, have)
        if self._splits(row, want, rest, least):
            self.free[address + want] = rest
            self.start_of[address + have] = address + want
            return want
        self.start_of.pop(address + have, None)
        if rest:
            self._padded[address + want] = address
        return have

    def _splits(self, row: int, want: int, rest: int, least: int) -> bool:
        """Return whether the rest of a free block is split off; where the settings would decide, note the doubt."""
        if self.final_sizes is None:
            return rest >= least
        if row in self.final_sizes:
            return rest > 0 and self.final_sizes[row] == want
        if not depends_on_settings(want, rest):
            return rest >= MIN_BLOCK_BYTES
        self._doubts[row] = rest
        return False

    def count_doubts(self) -> None:
        """Turn each rest that nothing has shown to be split off, nor kept, into slack."""
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
        for begin, row in self._uncertain.items() if self._may_search(self._uncertain) else ():
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
        for begin, owner in self._padded.items() if self._may_search(self._padded) else ():
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

    def _may_search(self, blocks: Sized) -> bool:
        self._looks_left -= len(blocks)
        if self._looks_left < 0:
            self.contradictions["blocks not searched for, after too many searches"] += 1
        return self._looks_left >= 0

    def _carve(self, begin: int, size: int) -> bool:
        low, extent = begin, self.free.get(begin, 0)
        if extent < size:
            for low, extent in self.free.items() if self._may_search(self.free) else ():
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
