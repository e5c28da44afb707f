"""The simulated allocator: free blocks, segments, and the rules by which they are chosen, split, merged and released.

The rules are those of c10/cuda/CUDACachingAllocator.cpp, torch 2.4 to 2.13; each method names its function there.

A free block is one integer, its size and then its address, so that a sorted list of them is in the allocator's own
order. Such a list holds the free blocks of one kind (pool and stream) and size class: up to 1 MiB, or larger.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from random import Random

import numpy as np

from profkit.allocator.requests import DEFAULT_POOL, Release, Requests
from profkit.allocator.rules import (
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    round_sizes,
    segment_size_bytes,
    smallest_rests,
)
from profkit.snapshot.columns import NO_SPLIT_LIMIT, Settings

_SHIFT: int = 64
_ADDRESS: int = (1 << _SHIFT) - 1

_DRAWN = 2**60
"""Drawn bases are above this; recorded addresses are below."""

_SPACE_BYTES = 2**40
"""Addresses that an expandable segment may grow into: more than a GPU has memory."""


class Heap:
    """State of the simulated allocator of one device.

    ``_free`` maps where a free block begins to its size, ``_start_of`` where it ends to where it begins; ``_fences``
    are the beginnings of segments, across which nothing merges.
    """

    def __init__(self, requests: Requests, settings: Settings, draw: int, capacity_bytes: int | None) -> None:
        """Begin with what was reserved and live before the first event, or empty."""
        self._requests = requests
        self._settings = settings
        self._capacity = capacity_bytes
        self._is_expandable = settings.expandable_segments
        self._is_limited = settings.max_split_size_bytes < NO_SPLIT_LIMIT
        wants = round_sizes(requests.requested_bytes, settings)
        self._wants: list[int] = wants.tolist()
        self._splits_from: list[int] = (wants + smallest_rests(wants, settings, self._is_expandable)).tolist()
        self._list_of: list[int] = (2 * requests.kind + (wants <= SMALL_BYTES)).tolist()
        self._lists: list[list[int]] = [[] for _ in range(2 * len(requests.kinds))]
        self._segments: list[dict[int, int]] = [{} for _ in self._lists]
        """Plain segments by kind and size class: base → bytes."""
        self._spaces: list[list[int]] = [[] for _ in self._lists]
        """Bases of expandable segments by kind and size class, sorted."""
        self._holes: list[list[int]] = [[] for _ in self._lists]
        """Where addresses without pages begin in expandable segments, sorted."""
        self._unmapped: dict[int, int] = {}
        """The same → where they end."""
        self._free: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._fences: set[int] = set()
        self._bases = _Bases(requests, self._is_expandable, draw, max(self._wants, default=0))
        self._seen_released = {DEFAULT_POOL}
        """Pools that give cached memory back: a private one only when its graphs are gone, which its releases show."""
        self.reserved_bytes = 0
        self.changes: list[tuple[float, int]] = []
        """By how much the reserved memory changed, and where."""
        self.addresses = [0] * len(requests)
        self.sizes = [0] * len(requests)
        """What was charged per row; 0 before its birth."""
        self.completed_early: dict[int, float] = {}
        """Rows whose free was completed because memory was short, and when."""
        self.release_count = 0
        self.failed: int | None = None
        """The row of the request that did not fit."""
        self.is_placed = np.zeros(len(requests), dtype=np.bool_)
        """Rows that were live before the first event and keep their recorded place."""
        if requests.start and all(region.is_expandable == self._is_expandable for region in requests.start):
            self._lay_out()
            self.is_placed = np.array(self.sizes) > 0

    def run(self, operations: list[int]) -> None:
        """Serve births (a row) and completed frees (the complement of a row); stop at a request that fails."""
        serve, add, early = self._serve, self._add, self.completed_early
        list_of, addresses, sizes = self._list_of, self.addresses, self.sizes
        for operation in operations:
            if operation >= 0:
                if not serve(operation):
                    self.failed = operation
                    return
            elif not (early and ~operation in early):
                row = ~operation
                add(list_of[row], addresses[row], sizes[row])

    def _serve(self, row: int) -> bool:
        """Serve a request; return whether it fits (``malloc``)."""
        want, blocks, free = self._wants[row], self._lists[self._list_of[row]], self._free
        at = bisect_left(blocks, want << _SHIFT)
        if at < len(blocks):
            key = blocks[at]
            if self._unmapped and (key & _ADDRESS) + (key >> _SHIFT) in self._unmapped:
                at = self._prefer_unexpandable(blocks, at)
            elif at + 1 < len(blocks) and (blocks[at + 1] ^ key) >> _SHIFT == 0 and not self._bases.decide:
                self._bases.note_tie(blocks, at)
            if self._is_limited and self._is_oversized(blocks[at] >> _SHIFT, want):
                at = len(blocks)
        if at == len(blocks):
            begin = self._grow(row)
            if begin is None:
                return False
            at = bisect_left(blocks, (free[begin] << _SHIFT) + begin)
        key = blocks.pop(at)
        address, have = key & _ADDRESS, key >> _SHIFT
        del free[address]
        if have >= self._splits_from[row]:
            rest = address + want
            free[rest] = have - want
            self._start_of[address + have] = rest
            insort(blocks, ((have - want) << _SHIFT) + rest)
            have = want
        else:
            del self._start_of[address + have]
        self.addresses[row], self.sizes[row] = address, have
        return True

    def _add(self, number: int, begin: int, size: int) -> None:
        """Add free memory to a list and merge it with its free neighbours (``free_block``, ``try_merge_blocks``)."""
        blocks, free, end = self._lists[number], self._free, begin + size
        if begin not in self._fences:
            before = self._start_of.pop(begin, None)
            if before is not None:
                del blocks[bisect_left(blocks, (free.pop(before) << _SHIFT) + before)]
                begin = before
        if end not in self._fences:
            size = free.pop(end, 0)
            if size:
                del blocks[bisect_left(blocks, (size << _SHIFT) + end)]
                end += size
        free[begin] = end - begin
        self._start_of[end] = begin
        insort(blocks, ((end - begin) << _SHIFT) + begin)

    def release(self, release: Release) -> None:
        """Release cached memory where the recording did: all of it for the program, else the recorded pieces alone."""
        pools = {pool for base, _ in release.pieces for pool in [self._pool_of(base)] if pool is not None}
        self._seen_released |= pools
        if release.by_program:
            self._release_all(release.position)
            return
        for base, size in release.pieces:
            for number in range(len(self._lists)):
                if self._segments[number].get(base) == size == self._free.get(base):
                    self._release_segment(number, base, release.position)
                elif self._space_of(number, base) is not None:
                    self._unmap(number, base, size, release.position)

    @property
    def bases_decide(self) -> bool:
        """Whether a choice between equal blocks hung on a base that is not the recorded one."""
        return self._bases.decide

    def _lay_out(self) -> None:
        """Reserve what was reserved before the first event, and place the rows that were live there."""
        requests = self._requests
        early = np.flatnonzero((requests.born < 0) & (requests.row >= 0))
        address = requests.addresses[requests.row[early]]
        order = np.argsort(address, kind="stable")
        rows, begins = early[order].tolist(), address[order].tolist()
        for region in requests.start:
            number, at, end = 2 * region.kind + region.is_small, region.address, region.address + region.size_bytes
            self.reserved_bytes += region.size_bytes
            if region.is_expandable:
                self._extend_space(number, at, end)
            else:
                self._segments[number][at] = region.size_bytes
                self._fences.add(at)
                self._bases.note(at, region.size_bytes)
            for row in rows[bisect_left(begins, at) : bisect_left(begins, end)]:
                begin, size = int(requests.addresses[requests.row[row]]), int(requests.sizes[requests.row[row]])
                if size < self._wants[row] or begin < at:
                    continue  # an edit made it larger: it finds a place as any other request does
                self.addresses[row], self._list_of[row] = begin, number
                self.sizes[row] = self._wants[row] if size >= self._splits_from[row] else size
                if at < begin:
                    self._add(number, at, begin - at)
                at = begin + self.sizes[row]
            if at < end:
                self._add(number, at, end - at)

    def _extend_space(self, number: int, begin: int, end: int) -> None:
        """Note that an expandable segment had pages from ``begin`` to ``end``; those of one kind lie in one segment."""
        if self._spaces[number]:
            hole = self._holes[number][-1]
            self._unmapped[hole] = begin
        else:
            self._spaces[number].append(begin)
            self._fences.add(begin)
            self._bases.note(begin, _SPACE_BYTES)
        self._holes[number].append(end)
        self._unmapped[end] = self._spaces[number][0] + _SPACE_BYTES

    def _pool_of(self, address: int) -> tuple[int, int] | None:
        """Return the pool of a reserved address."""
        for number, segments in enumerate(self._segments):
            if address in segments or self._space_of(number, address) is not None:
                return self._requests.kinds[number // 2][0]
        return None

    def _space_of(self, number: int, address: int) -> int | None:
        """Return the base of the expandable segment of a list that an address lies in."""
        base = self._bases.of(address)
        return base if base in self._spaces[number] else None

    def _take(self, number: int, begin: int) -> int:
        """Remove a free block; return its size."""
        size = self._free.pop(begin)
        del self._start_of[begin + size]
        blocks = self._lists[number]
        del blocks[bisect_left(blocks, (size << _SHIFT) + begin)]
        return size

    def _is_oversized(self, have: int, want: int) -> bool:
        """Return whether ``max_split_size_mb`` keeps a block from a request (``get_free_block``)."""
        limit = self._settings.max_split_size_bytes
        return have >= limit if want < limit else have >= want + LARGE_SEGMENT_BYTES

    def _prefer_unexpandable(self, blocks: list[int], at: int) -> int:
        """Return the block to take where the best fit could grow: that which could grow least (``get_free_block``)."""
        while at + 1 < len(blocks) and self._expanded_bytes(blocks[at + 1]) < self._expanded_bytes(blocks[at]):
            at += 1
        return at

    def _expanded_bytes(self, key: int) -> int:
        """Return how large a free block could become if the addresses behind it got pages."""
        begin, size = key & _ADDRESS, key >> _SHIFT
        return self._unmapped.get(begin + size, begin + size) - begin

    def _grow(self, row: int) -> int | None:
        """Reserve memory for a request that no free block serves; return where a free block begins that does.

        Without capacity for it, cached memory is released: first as the garbage collection threshold and
        ``max_split_size_mb`` say, then all of it. None: it does not fit even then.
        """
        number, want = self._list_of[row], self._wants[row]
        size, position = segment_size_bytes(want), float(self._requests.born[row])
        if self._capacity is not None:
            self._collect(position)
            if self.reserved_bytes + size > self._capacity:
                self._release_oversized(number, want, position)
            if self.reserved_bytes + size > self._capacity:
                self._complete_frees(position)
                self._release_all(position)
                self.release_count += 1
            if self.reserved_bytes + size > self._capacity:
                return None
        if self._is_expandable:
            return self._map(row, number, want, position)
        base = self._bases.choose(row, size)
        self._segments[number][base] = size
        self._fences.add(base)
        self._add(number, base, size)
        self._change(size, position)
        return base

    def _change(self, size: int, position: float) -> None:
        self.reserved_bytes += size
        self.changes.append((position, size))

    def _map(self, row: int, number: int, want: int, position: float) -> int:
        """Map pages at the lowest place of an expandable segment with room (``try_allocate_expandable_block``)."""
        begin = self._find_room(number, want)
        if begin is None:
            begin = self._bases.choose(row, _SPACE_BYTES)
            insort(self._spaces[number], begin)
            insort(self._holes[number], begin)
            self._unmapped[begin] = begin + _SPACE_BYTES
            self._fences.add(begin)
        page = SMALL_SEGMENT_BYTES if number % 2 else LARGE_SEGMENT_BYTES
        while self._free.get(begin, 0) < want:
            hole = begin + self._free.get(begin, 0)
            end = self._unmapped.pop(hole)
            size = min(-(-(want - (hole - begin)) // page) * page, end - hole)
            holes = self._holes[number]
            del holes[bisect_left(holes, hole)]
            if hole + size < end:
                insort(holes, hole + size)
                self._unmapped[hole + size] = end
            self._add(number, hole, size)
            self._change(size, position)
        return begin

    def _find_room(self, number: int, want: int) -> int | None:
        """Return the lowest place with room for a request, free or without pages (``find_expandable_block``)."""
        for hole in self._holes[number]:
            begin = self._start_of.get(hole, hole) if hole not in self._fences else hole
            at = begin
            while at - begin < want:
                step = self._free.get(at) or (self._unmapped[at] - at if at in self._unmapped else 0)
                if not step or (at != begin and at in self._fences):
                    break
                at += step
            if at - begin >= want:
                return begin
        return None

    def _release_all(self, position: float) -> None:
        """Release every segment without a live block, and every page without one (``release_cached_blocks``)."""
        for number, blocks in enumerate(self._lists):
            if self._requests.kinds[number // 2][0] not in self._seen_released:
                continue
            for key in list(blocks):
                base, size = key & _ADDRESS, key >> _SHIFT
                if self._segments[number].get(base) == size:
                    self._release_segment(number, base, position)
                elif self._space_of(number, base) is not None:
                    self._unmap(number, base, size, position)

    def _release_segment(self, number: int, base: int, position: float) -> None:
        """Release a segment that is all free (``release_block``)."""
        self._fences.discard(base)
        self._bases.forget(base)
        del self._segments[number][base]
        self._change(-self._take(number, base), position)

    def _unmap(self, number: int, begin: int, size: int, position: float) -> None:
        """Unmap the whole pages of a range that is free (``unmap_block``)."""
        space, page = self._bases.of(begin), SMALL_SEGMENT_BYTES if number % 2 else LARGE_SEGMENT_BYTES
        low = space + -(-(begin - space) // page) * page
        high = space + (begin + size - space) // page * page
        around = max((key & _ADDRESS for key in self._lists[number] if key & _ADDRESS <= begin), default=high)
        end = around + self._free.get(around, 0)
        if low >= high or end < high:
            return
        self._take(number, around)
        for left, right in ((around, low), (high, end)):
            if left < right:
                self._free[left], self._start_of[right] = right - left, left
                insort(self._lists[number], ((right - left) << _SHIFT) + left)
        self._change(low - high, position)
        holes = self._holes[number]
        at = bisect_left(holes, low)
        if at < len(holes) and holes[at] == high:
            high = self._unmapped.pop(holes.pop(at))
        if at and self._unmapped[holes[at - 1]] == low:
            low = holes[at - 1]
        else:
            holes.insert(at, low)
        self._unmapped[low] = high
        if low == space and high == space + _SPACE_BYTES:
            # Without any page the segment itself goes, and the next one begins elsewhere.
            holes.remove(low)
            del self._unmapped[low]
            self._spaces[number].remove(space)
            self._fences.discard(space)
            self._bases.forget(space)

    def _release_oversized(self, number: int, want: int, position: float) -> None:
        """Release just enough blocks over ``max_split_size_mb`` (``release_available_cached_blocks``)."""
        limit = self._settings.max_split_size_bytes
        if limit == NO_SPLIT_LIMIT:
            return
        blocks, least = self._lists[number], max(want, limit)
        at = bisect_left(blocks, least << _SHIFT)
        if at < len(blocks):
            self._release_segment(number, blocks[at] & _ADDRESS, position)
            return
        released = 0
        while blocks and released < least and blocks[-1] >> _SHIFT >= limit:
            released += blocks[-1] >> _SHIFT
            self._release_segment(number, blocks[-1] & _ADDRESS, position)

    def _collect(self, position: float) -> None:
        """Release the older cached segments above the threshold (``garbage_collect_cached_blocks``).

        The age of a segment is how many large requests came since its last block was freed.
        """
        requests, lists = self._requests, np.array(self._list_of)
        limit = int(self._settings.garbage_collection_threshold * (self._capacity or 0))
        target = self.reserved_bytes - limit
        if not limit or target <= 0:
            return
        numbers = [2 * kind for kind, (pool, _) in enumerate(requests.kinds) if pool == DEFAULT_POOL]
        calls = np.sort(requests.born[np.isin(lists, numbers) & (requests.born >= 0)])
        addresses, lives = np.array(self.addresses), np.array(self.sizes) > 0
        ages: dict[tuple[int, int], int] = {}
        for number in numbers:
            for base, size in self._segments[number].items():
                if self._free.get(base) == size:
                    inside = lives & (addresses >= base) & (addresses < base + size)
                    ended = requests.completed[inside & (requests.completed <= position)].max(initial=-1.0)
                    ages[number, base] = int(np.searchsorted(calls, position, "right") - np.searchsorted(calls, ended))
        while ages and target > 0:
            average = sum(ages.values()) / len(ages)
            for (number, base), age in list(ages.items()):
                if age >= average:
                    target -= self._segments[number][base]
                    del ages[number, base]
                    self._release_segment(number, base, position)

    def _complete_frees(self, position: float) -> None:
        """Wait for the streams that still use freed memory (``synchronize_and_free_events``)."""
        requests = self._requests
        waits = (requests.born < position) & (requests.freed <= position) & (requests.completed > position)
        for row in np.flatnonzero(waits).tolist():
            if self.sizes[row] and row not in self.completed_early:
                self.completed_early[row] = position
                self._add(self._list_of[row], self.addresses[row], self.sizes[row])


class _Bases:
    """Where segments begin: at their recorded bases, or drawn."""

    def __init__(self, requests: Requests, is_expandable: bool, draw: int, largest: int) -> None:
        self._requests = requests
        self._is_expandable = is_expandable
        self._draw = draw
        self._dice = Random(draw)
        self._bits = max(largest, LARGE_SEGMENT_BYTES, _SPACE_BYTES if is_expandable else 0).bit_length() + 1
        self._drawn: set[int] = set()
        self._next = _DRAWN if draw == 0 else 2 * _DRAWN
        self._expected = sorted(requests.bases)
        self._matched = 0
        """How many segments were reserved as recorded, from the first one on; -1 after another one was."""
        self._known: list[int] = []
        self._end: dict[int, int] = {}
        self.proven: set[int] = set()
        """Bases that CUDA would choose again, because up to them it was asked for the same."""
        self.decide = False

    def choose(self, row: int, size: int) -> int:
        """Return the base of a segment that is reserved for a row of the requests."""
        known_row = int(self._requests.row[row])
        base, recorded = self._requests.bases.get(known_row, (-1, -1))
        is_same = recorded == (0 if self._is_expandable else size)
        if self._matched >= 0:
            is_next = self._matched < len(self._expected) and self._expected[self._matched] == known_row
            self._matched = self._matched + 1 if is_same and is_next else -1
        if not is_same or self._draw > 1 or not self._is_vacant(base, size):
            base = self._draw_base(size)
        elif self._matched >= 0 or self._is_expandable:
            self.proven.add(base)
        self.note(base, size, is_proven=base in self.proven)
        return base

    def note(self, base: int, size: int, *, is_proven: bool = True) -> None:
        """Add a segment."""
        insort(self._known, base)
        self._end[base] = base + size
        if is_proven:
            self.proven.add(base)

    def note_tie(self, blocks: list[int], at: int) -> None:
        """Note whether the choice between equal free blocks, the first of which is at ``at``, hangs on a base."""
        size, found = blocks[at] >> _SHIFT, set()
        while at < len(blocks) and blocks[at] >> _SHIFT == size:
            found.add(self.of(blocks[at] & _ADDRESS))
            at += 1
        self.decide = len(found) > 1 and not found <= self.proven

    def forget(self, base: int) -> None:
        """Remove a segment."""
        del self._known[bisect_left(self._known, base)], self._end[base]
        self.proven.discard(base)

    def of(self, address: int) -> int:
        """Return the base of the segment that an address lies in."""
        return self._known[max(bisect_right(self._known, address) - 1, 0)] if self._known else -1

    def _is_vacant(self, base: int, size: int) -> bool:
        at = bisect_right(self._known, base)
        before_ends = at == 0 or self._end[self._known[at - 1]] <= base
        return self._is_expandable or (before_ends and (at == len(self._known) or base + size <= self._known[at]))

    def _draw_base(self, size: int) -> int:
        if self._draw < 2:
            step = -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
            self._next += step if self._draw == 0 else -step
            return self._next - step if self._draw == 0 else self._next
        rank = self._dice.randrange(2 ** (62 - self._bits))
        while rank in self._drawn:
            rank = self._dice.randrange(2 ** (62 - self._bits))
        self._drawn.add(rank)
        return _DRAWN + (rank << self._bits)
