"""The blocks of the caching allocator during a replay: which are free, and which allocation has which.

The addresses of allocations are recorded, so a free block is looked up, not chosen. What a history leaves open is
noted as a doubt and settled by later events: whether the rest of a block was split off, and how large a block from
before the first event is. What no allocator could have done is counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sized
from typing import Any

import numpy as np

from profkit.allocator.rules import MIN_BLOCK_BYTES, depends_on_settings
from profkit.allocator.start import Start
from profkit.snapshot.columns import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, Ints

_FAR = 2**62

_MOST_LOOKS = 2**25
"""How many blocks a replay may search one by one, where no address leads to the one it needs. Real histories need
thousands.
"""


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

    def count_contradictions(self, what: str, count: np.integer[Any] | int) -> None:
        """Add ``count`` contradictions of one kind."""
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
        """Split off the rest that must be free because ``address`` lies in it; False if there is none."""
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
        """Return whether these blocks may be searched one by one. A complete history seldom needs that."""
        self._looks_left -= len(blocks)
        if self._looks_left < 0:
            self.contradictions["blocks not searched for, after too many searches"] += 1
        return self._looks_left >= 0

    def _carve(self, begin: int, size: int) -> bool:
        """Take ``size`` bytes at ``begin`` out of the free block around them; False if there is none."""
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
