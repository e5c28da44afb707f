"""How reserved memory is divided into blocks at a moment: what is in use, what is cached, and where it is torn."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profkit.allocator.history import History
from profkit.allocator.rules import SMALL_BYTES, SMALL_SEGMENT_BYTES
from profkit.allocator.start import find_regions
from profkit.snapshot.columns import ALLOCATED, INACTIVE, PENDING, SEGMENT_ALLOC, SEGMENT_UNMAP, Device, Ints


@dataclass(frozen=True, eq=False)
class Layout:
    """The segments of one device at one moment, by address, and the blocks that fill them without a gap.

    Pages of an expandable segment that lie next to each other count as one segment. ``segment`` is each block's row
    among the segments, and ``row`` its allocation, a row of the replay; -1 for free memory, and where none is known.
    """

    segment_address: Ints
    segment_bytes: Ints
    is_expandable: npt.NDArray[np.bool_]
    address: Ints
    size_bytes: Ints
    state: Ints
    segment: Ints
    row: Ints

    @property
    def reserved_bytes(self) -> int:
        """Return what PyTorch held from CUDA."""
        return int(self.segment_bytes.sum())

    def bytes_in(self, state: int) -> int:
        """Return the bytes of all blocks in one state: ``ALLOCATED``, ``PENDING`` or ``INACTIVE``."""
        return int(self.size_bytes[self.state == state].sum())

    @property
    def free_blocks(self) -> Ints:
        """Return the sizes of the free blocks."""
        sizes: Ints = self.size_bytes[self.state == INACTIVE]
        return sizes

    @property
    def releasable_bytes(self) -> int:
        """Return what ``empty_cache()`` would give back."""
        free = self.state == INACTIVE
        return sum_releasable(self.size_bytes[free], self.segment[free], self.segment_bytes, self.is_expandable)


def sum_releasable(size_bytes: Ints, segment: Ints, segment_bytes: Ints, is_expandable: npt.NDArray[np.bool_]) -> int:
    """Return what ``empty_cache()`` would give back of free blocks: segments without a block in use.

    Of expandable segments it is an estimate: all that is free, although only whole pages can be unmapped.

    Args:
        size_bytes: of the free blocks.
        segment: of each free block, the row of its segment.
        segment_bytes: of all segments.
        is_expandable: which segments are.
    """
    return int(size_bytes[is_expandable[segment] | (size_bytes == segment_bytes[segment])].sum())


def lay_out(history: History, moment: int) -> Layout | None:
    """Return how memory lay at a moment on the curves; None if the recorded blocks do not fit into the segments."""
    replay = history.replay
    used = np.flatnonzero((replay.birth < moment) & (replay.completed >= moment))
    state = np.where(replay.freed[used] >= moment, ALLOCATED, PENDING)
    return _fill(history.device, moment, np.stack([replay.address[used], replay.size_bytes[used], state, used]))


def lay_out_end(history: History) -> Layout | None:
    """Return how memory lay when recording ended, as the snapshot itself lists it; None if its blocks do not fit."""
    blocks, replay = history.device.blocks, history.replay
    live = np.flatnonzero(replay.completed == replay.event_count)
    row_at = dict(zip(replay.address[live].tolist(), live.tolist(), strict=True))
    used = blocks.state != INACTIVE
    rows = np.array([row_at.get(address, -1) for address in blocks.address[used].tolist()], dtype=np.int64)
    columns = (blocks.address[used], blocks.size_bytes[used], blocks.state[used], rows)
    return _fill(history.device, replay.event_count, np.stack(columns))


def _fill(device: Device, moment: int, used: Ints) -> Layout | None:
    """Return the segments of a moment, each filled with the blocks in use and the free memory between them.

    ``used`` holds the address, size, state and row of each block in use, in this order.
    """
    plain, mapped = find_regions(device, Counter(), moment)
    regions = sorted(
        [(begin, begin + length, False) for begin, length in plain.items()] + [(*one, True) for one in mapped]
    )
    address, size, state, row = used[:, np.argsort(used[0], kind="stable")].tolist()
    found: list[tuple[int, int, int, int, int]] = []
    covered = 0
    for number, (begin, end, _) in enumerate(regions):
        first, last = bisect_left(address, begin), bisect_left(address, end)
        covered += last - first
        at = begin
        for block in range(first, last):
            if address[block] < at or address[block] + size[block] > end:
                return None
            found += _gap(at, address[block], number)
            found.append((address[block], size[block], state[block], number, row[block]))
            at = address[block] + size[block]
        found += _gap(at, end, number)
    if covered != len(address):
        return None
    blocks = np.array(found, dtype=np.int64).reshape(-1, 5)
    extents = np.array([(begin, end - begin) for begin, end, _ in regions], dtype=np.int64).reshape(-1, 2)
    is_expandable = np.array([kind for _, _, kind in regions], dtype=np.bool_)
    return Layout(extents[:, 0], extents[:, 1], is_expandable, *blocks.T)


def _gap(begin: int, end: int, segment: int) -> Iterator[tuple[int, int, int, int, int]]:
    if begin < end:
        yield begin, end - begin, INACTIVE, segment, -1


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
