"""The simulated allocator: free blocks, segments, and the rules by which they are chosen, split, merged and released.

The rules are those of c10/cuda/CUDACachingAllocator.cpp, torch 2.4 to 2.13; each method names its function there.

A free block is one integer, its size and then its address, so that a sorted list of them is in the allocator's own
order. Such a list holds the free blocks of one kind (pool and stream) and size class: up to 1 MiB, or larger.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np

from profkit.allocator import (
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    is_oversized,
    round_sizes,
    segment_size_bytes,
    smallest_rests,
)
from profkit.allocator.requests import ADDRESS, DEFAULT_POOL, SHIFT, SPACE_BYTES, Bases, Region, Release, Requests
from profkit.snapshot.columns import NO_SPLIT_LIMIT, Settings


@dataclass(frozen=True)
class Limit:
    """The most that may be reserved.

    A memory fraction counts the segment that a request would need, even where pages of an expandable segment are fewer.
    The GPU itself runs out of pages (``counts_pages``).
    """

    capacity_bytes: int
    counts_pages: bool = False


class Heap:
    """State of the simulated allocator of one device.

    ``_free`` maps where a free block begins to its size, ``_start_of`` where it ends to where it begins; ``_fences``
    are the beginnings of segments, across which nothing merges.
    """

    def __init__(self, requests: Requests, settings: Settings, draw: int, limit: Limit | None) -> None:
        self._requests = requests
        self._settings = settings
        self._limit = limit
        self._is_expandable = settings.expandable_segments
        self._is_limited = settings.max_split_size_bytes < NO_SPLIT_LIMIT
        wants = round_sizes(requests.requested_bytes, settings)
        self._wants: list[int] = wants.tolist()
        self._splits_from: list[int] = (wants + smallest_rests(wants, settings, self._is_expandable)).tolist()
        self._list_of: list[int] = (2 * requests.kind + (wants <= SMALL_BYTES)).tolist()
        self._lists: list[list[int]] = [[] for _ in range(2 * len(requests.kinds))]
        self._number_at: dict[int, int] = {}
        """Base of a segment → which of the lists its free blocks are in."""
        self._segments: dict[int, int] = {}
        """Plain segments: base → bytes."""
        self._spaces: dict[int, int] = {}
        """Expandable segments: base → end of their addresses."""
        self._holes: list[list[int]] = [[] for _ in self._lists]
        """Where addresses without pages begin in expandable segments, sorted."""
        self._unmapped: dict[int, int] = {}
        """The same → where they end."""
        self._free: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._fences: set[int] = set()
        self._bases = Bases(requests, self._is_expandable, draw, max(self._wants, default=0))
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
        self.failed: int | None = None
        """The row of the request that did not fit."""

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
        at = bisect_left(blocks, want << SHIFT)
        if at < len(blocks):
            key = blocks[at]
            if self._unmapped and (key & ADDRESS) + (key >> SHIFT) in self._unmapped:
                # Where the best fit could grow, that which could grow least is taken (``get_free_block``).
                while at + 1 < len(blocks) and self._expanded_bytes(blocks[at + 1]) < self._expanded_bytes(blocks[at]):
                    at += 1
            elif at + 1 < len(blocks) and (blocks[at + 1] ^ key) >> SHIFT == 0 and not self._bases.decide:
                self._bases.note_tie(blocks, at)
            if self._is_limited and is_oversized(blocks[at] >> SHIFT, want, self._settings):
                at = len(blocks)
        if at == len(blocks):
            begin = self._grow(row)
            if begin is None:
                return False
            at = bisect_left(blocks, (free[begin] << SHIFT) + begin)
        key = blocks.pop(at)
        address, have = key & ADDRESS, key >> SHIFT
        del free[address]
        if have >= self._splits_from[row]:
            rest = address + want
            free[rest] = have - want
            self._start_of[address + have] = rest
            insort(blocks, ((have - want) << SHIFT) + rest)
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
                del blocks[bisect_left(blocks, (free.pop(before) << SHIFT) + before)]
                begin = before
        if end not in self._fences:
            size = free.pop(end, 0)
            if size:
                del blocks[bisect_left(blocks, (size << SHIFT) + end)]
                end += size
        free[begin] = end - begin
        self._start_of[end] = begin
        insort(blocks, ((end - begin) << SHIFT) + begin)

    def release(self, release: Release) -> None:
        """Release cached memory where the recording did: all of it for the program, else the recorded pieces alone."""
        numbers = [self._number_at.get(self._bases.base_around(address)) for address, _ in release.pieces]
        self._seen_released |= {self._requests.kinds[number // 2][0] for number in numbers if number is not None}
        if release.by_program:
            self._release_all(release.position)
            return
        for address, size in release.pieces:
            if self._segments.get(address) == size == self._free.get(address):
                self._release_segment(address, release.position)
            elif self._bases.base_around(address) in self._spaces:
                self._unmap(address, size, release.position)

    @property
    def bases_decide(self) -> bool:
        """Whether a choice between equal blocks hung on a base that is not the recorded one."""
        return self._bases.decide

    def lay_out(self) -> None:
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
                number = self._extend_space(number, region)
            else:
                self._bases.note(at, region.size_bytes)
                self._reserve(number, at, region.size_bytes)
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

    def _extend_space(self, number: int, region: Region) -> int:
        """Note that an expandable segment had pages in a region; its base tells which one."""
        if region.base not in self._spaces:
            self._bases.note(region.base, SPACE_BYTES)
            self._reserve(number, region.base, None)
        number = self._number_at[region.base]
        holes, end = self._holes[number], region.address + region.size_bytes
        hole = holes.pop(bisect_right(holes, region.address) - 1)
        last = self._unmapped.pop(hole)
        for low, high in ((hole, region.address), (end, last)):
            if low < high:
                insort(holes, low)
                self._unmapped[low] = high
        return number

    def _reserve(self, number: int, base: int, size: int | None) -> None:
        """Add a segment; None: an expandable one, without pages, that ends before the next segment."""
        self._number_at[base] = number
        self._fences.add(base)
        if size is not None:
            self._segments[base] = size
            return
        self._spaces[base] = self._unmapped[base] = min(base + SPACE_BYTES, self._bases.base_after(base))
        insort(self._holes[number], base)
        before = self._bases.base_around(base - 1)
        if self._spaces.get(before, base) > base:
            holes = self._holes[self._number_at[before]]
            self._spaces[before] = self._unmapped[holes[bisect_left(holes, base) - 1]] = base

    def _take(self, number: int, begin: int) -> int:
        size = self._free.pop(begin)
        del self._start_of[begin + size]
        blocks = self._lists[number]
        del blocks[bisect_left(blocks, (size << SHIFT) + begin)]
        return size

    def _expanded_bytes(self, key: int) -> int:
        """Return how large a free block could become if the addresses behind it got pages."""
        begin, size = key & ADDRESS, key >> SHIFT
        return self._unmapped.get(begin + size, begin + size) - begin

    def _grow(self, row: int) -> int | None:
        """Reserve memory for a request that no free block serves; return where a free block begins that does.

        Without capacity for it, cached memory is released: first as the garbage collection threshold and
        ``max_split_size_mb`` say, then all of it. None: it does not fit even then.
        """
        number, want = self._list_of[row], self._wants[row]
        size, position = segment_size_bytes(want), float(self._requests.born[row])
        if want > SPACE_BYTES // 2:
            return None  # no GPU has that
        if self._limit is not None:
            self._collect(position)
            if not self._has_room(number, want):
                self._release_oversized(number, want, position)
            if not self._has_room(number, want):
                self._complete_frees(position)
                self._release_all(position)
            if not self._has_room(number, want):
                return None
        if self._is_expandable:
            return self._map(row, number, want, position)
        base = self._bases.choose(row, size)
        self._reserve(number, base, size)
        self._add(number, base, size)
        self._change(size, position)
        return base

    def _has_room(self, number: int, want: int) -> bool:
        assert self._limit is not None
        size = segment_size_bytes(want)
        if self._limit.counts_pages and self._is_expandable:
            size = sum(end - begin for begin, end in self._pages(number, want, self._find_room(number, want)))
        return self.reserved_bytes + size <= self._limit.capacity_bytes

    def _change(self, size: int, position: float) -> None:
        self.reserved_bytes += size
        self.changes.append((position, size))

    def _map(self, row: int, number: int, want: int, position: float) -> int:
        """Map pages at the lowest place of an expandable segment with room (``try_allocate_expandable_block``)."""
        begin = self._find_room(number, want)
        if begin is None:
            begin = self._bases.choose(row, SPACE_BYTES)
            self._reserve(number, begin, None)
        for hole, end in self._pages(number, want, begin):
            last = self._unmapped.pop(hole)
            self._holes[number].remove(hole)
            if end < last:
                insort(self._holes[number], end)
                self._unmapped[end] = last
            self._add(number, hole, end - hole)
            self._change(end - hole, position)
        return begin

    def _pages(self, number: int, want: int, begin: int | None) -> list[tuple[int, int]]:
        """Return the pages (from, to) that are missing for a request at ``begin``; None: in a new segment."""
        page = SMALL_SEGMENT_BYTES if number % 2 else LARGE_SEGMENT_BYTES
        if begin is None:
            return [(0, -(-want // page) * page)]
        at, pages = begin, []
        while at < begin + want:
            end = at + self._free.get(at, 0)
            if end == at:
                end = min(at - (at - begin - want) // page * page, self._unmapped[at])
                pages.append((at, end))
            at = end
        return pages

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
            for key in blocks[bisect_left(blocks, SMALL_SEGMENT_BYTES << SHIFT) :]:
                base, size = key & ADDRESS, key >> SHIFT
                if self._segments.get(base) == size:
                    self._release_segment(base, position)
                elif self._bases.base_around(base) in self._spaces:
                    self._unmap(base, size, position)

    def _release_segment(self, base: int, position: float) -> None:
        """Release a segment that is all free (``release_block``)."""
        size = self._take(self._forget(base), base)
        del self._segments[base]
        self._change(-size, position)

    def _forget(self, base: int) -> int:
        self._fences.discard(base)
        self._bases.forget(base)
        return self._number_at.pop(base)

    def _unmap(self, begin: int, size: int, position: float) -> None:
        """Unmap the whole pages of a range that is free (``unmap_block``)."""
        space = self._bases.base_around(begin)
        number = self._number_at[space]
        page = SMALL_SEGMENT_BYTES if number % 2 else LARGE_SEGMENT_BYTES
        low = space + -(-(begin - space) // page) * page
        high = space + (begin + size - space) // page * page
        around = begin
        if begin not in self._free:
            around = max((key & ADDRESS for key in self._lists[number] if key & ADDRESS < begin), default=begin)
        end = around + self._free.get(around, 0)
        if low >= high or end < high:
            return
        self._take(number, around)
        for left, right in ((around, low), (high, end)):
            if left < right:
                self._free[left], self._start_of[right] = right - left, left
                insort(self._lists[number], ((right - left) << SHIFT) + left)
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
        if low == space and high == self._spaces[space]:
            # Without any page the segment itself goes, and the next one begins elsewhere.
            holes.remove(low)
            del self._unmapped[low]
            del self._spaces[space]
            self._forget(space)

    def _release_oversized(self, number: int, want: int, position: float) -> None:
        """Release just enough blocks over ``max_split_size_mb`` (``release_available_cached_blocks``)."""
        limit = self._settings.max_split_size_bytes
        if limit == NO_SPLIT_LIMIT:
            return
        blocks, least = self._lists[number], max(want, limit)
        at = bisect_left(blocks, least << SHIFT)
        released = 0
        while blocks and released < least:
            key = blocks[min(at, len(blocks) - 1)]
            if key >> SHIFT < limit or key & ADDRESS not in self._segments:
                return
            released += key >> SHIFT
            self._release_segment(key & ADDRESS, position)

    def _collect(self, position: float) -> None:
        """Release the older cached segments above the threshold (``garbage_collect_cached_blocks``)."""
        requests, lists = self._requests, np.array(self._list_of)
        limit = int(self._settings.garbage_collection_threshold * (self._limit.capacity_bytes if self._limit else 0))
        target = self.reserved_bytes - limit
        if not limit or target <= 0:
            return
        numbers = [2 * kind for kind, (pool, _) in enumerate(requests.kinds) if pool == DEFAULT_POOL]
        calls = np.sort(requests.born[np.isin(lists, numbers) & (requests.born >= 0)])
        addresses, lives = np.array(self.addresses), np.array(self.sizes) > 0
        ages: dict[int, int] = {}
        for base, size in self._segments.items():
            if self._free.get(base) == size and self._number_at[base] in numbers:
                inside = lives & (addresses >= base) & (addresses < base + size)
                ended = requests.completed[inside & (requests.completed <= position)].max(initial=-1.0)
                ages[base] = int(np.searchsorted(calls, position, "right") - np.searchsorted(calls, ended))
        while ages and target > 0:
            average = sum(ages.values()) / len(ages)
            for base, age in list(ages.items()):
                if age >= average:
                    target -= self._segments[base]
                    del ages[base]
                    self._release_segment(base, position)

    def _complete_frees(self, position: float) -> None:
        """Wait for the streams that still use freed memory (``synchronize_and_free_events``)."""
        requests = self._requests
        waits = (requests.born < position) & (requests.freed <= position) & (requests.completed > position)
        for row in np.flatnonzero(waits).tolist():
            if self.sizes[row] and row not in self.completed_early:
                self.completed_early[row] = position
                self._add(self._list_of[row], self.addresses[row], self.sizes[row])
