"""The heap that the replay keeps: free blocks by either end, live blocks by address, rows of all that ever was."""

from __future__ import annotations

from bisect import bisect_right

from profkit.analysis.memory.rules import MIN_BLOCK_BYTES
from profkit.analysis.memory.start import Start
from profkit.snapshot.columns import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, Ints

_FAR = 2**62


class Heap:
    """State of one device's allocator in the midst of a replay; begins as `Start`, whose containers it takes over.

    ``free`` maps where a free block begins to its size and ``start_of`` where it ends to where it begins; ``fences``
    are the beginnings of segments, across which nothing merges. ``live`` maps addresses to rows; the lists are columns
    of rows.
    """

    def __init__(self, start: Start, expandable: list[tuple[int, int]]) -> None:
        self.free = start.free
        self.start_of = {begin + size: begin for begin, size in start.free.items()}
        self.fences = start.fences
        self.live = {address: row for row, address in enumerate(start.address)}
        self.address = start.address
        self.size_bytes = start.size_bytes
        self.slack_bytes = start.slack_bytes
        self.contradictions = start.contradictions
        self._uncertain = start.uncertain
        self._padded: dict[int, int] = {}
        self._expandable = expandable

    def insert(self, begin: int, size: int) -> None:
        """Add free memory, merged with the free memory on both sides of it in the same segment."""
        end = begin + size
        if begin not in self.fences:
            before = self.start_of.pop(begin, None)
            if before is not None:
                self.free.pop(before, None)
                begin = before
        if end not in self.fences:
            after = self.free.pop(end, None)
            if after is not None:
                end += after
        self.free[begin] = end - begin
        self.start_of[end] = begin

    def take_whole(self, address: int, want: int, least: int, have: int) -> int:
        """Serve an alloc that does not cleanly split a free block; return what the allocator charged.

        ``have`` is the size of the free block that began at ``address`` and has been taken out of ``free``, 0 if there
        was none; ``least`` is the smallest rest that the plain rules split off.
        """
        if have == want:
            self.start_of.pop(address + have, None)
            return have
        if have == 0:
            have = self._reveal(address)
        rest = have - want
        if have == 0 or rest < 0:
            return self._take_impossible(address, want, have)
        if rest >= least or (rest >= MIN_BLOCK_BYTES and self._is_expandable(address)):
            self.free[address + want] = rest
            self.start_of[address + have] = address + want
            return want
        self.start_of.pop(address + have, None)
        if rest:
            self._padded[address + want] = address
        return have

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
        elif not self._carve(address, size):
            self.contradictions["pages unmapped while in use"] += 1

    def settle(self, address: Ints, first_free: Ints) -> None:
        """Drop the doubt about a block behind which an alloc began exactly where the unpadded block would end.

        ``address`` are those of the allocs in the order of events, ``first_free`` per row when it was freed, counted
        in allocs.
        """
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
        """Find the free block that must begin at ``address``, where none was known to; take it out, return its size.

        Either the block before it was split after all (a CUDA graph's pool that is restored to a checkpoint splits to
        measure), or that block is from before the first event and its padding, not known so far, ends here.
        """
        owner = self._padded.get(address)
        row = self.live.get(owner, -1) if owner is not None else -1
        if owner is not None and row >= 0 and self.address[row] + self.size_bytes[row] > address:
            rest = owner + self.size_bytes[row] - address
            self.size_bytes[row] -= rest
            self.insert(address, rest)
            return self.free.pop(address)
        for begin, row in self._uncertain.items():
            have = begin + self.free.get(begin, 0) - address
            is_there = begin < address <= begin + self.slack_bytes[row] and have > 0
            if is_there and self.live.get(self.address[row]) == row:
                del self.free[begin], self._uncertain[begin]
                self.start_of[address + have] = address
                self.size_bytes[row] += address - begin
                self.slack_bytes[row] = 0
                return have
        return 0

    def _take_impossible(self, address: int, want: int, have: int) -> int:
        """Serve an alloc that no allocator could have served, as best it can, and count it."""
        if have:
            self.start_of.pop(address + have, None)
            self.contradictions["allocs larger than the free block that they begin"] += 1
        elif address in self.live:
            self.contradictions["allocs where a live block begins"] += 1
        elif self._carve(address, want):
            self.contradictions["allocs in the midst of a free block"] += 1
        else:
            self.contradictions["allocs where no free memory is known"] += 1
        return want

    def _carve(self, begin: int, size: int) -> bool:
        """Take ``size`` bytes at ``begin`` out of the free block around them; False if there is none."""
        for low, extent in self.free.items():
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
