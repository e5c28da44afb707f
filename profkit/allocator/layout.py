"""How reserved memory is divided into blocks at a moment: what is in use, what is cached, and where it is torn."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from profkit.allocator.recorded_heap import find_regions
from profkit.allocator.replay import History
from profkit.allocator.rules import SMALL_BYTES, SMALL_SEGMENT_BYTES
from profkit.snapshot.columns import ALLOCATED, INACTIVE, PENDING, SEGMENT_ALLOC, SEGMENT_UNMAP, Ints


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
    rows = np.flatnonzero((replay.birth < moment) & (replay.completed >= moment))
    states = np.where(replay.freed[rows] >= moment, ALLOCATED, PENDING)
    used = np.stack([replay.address[rows], replay.size_bytes[rows], states, rows])
    plain, mapped = find_regions(history.device, Counter(), moment)
    regions = sorted(
        [(begin, begin + length, False) for begin, length in plain.items()] + [(*stretch, True) for stretch in mapped]
    )
    address, size, state, row = used[:, np.argsort(used[0], kind="stable")].tolist()
    filled: list[tuple[int, int, int, int, int]] = []
    covered = 0
    for number, (begin, end, _) in enumerate(regions):
        first, last = bisect_left(address, begin), bisect_left(address, end)
        covered += last - first
        at = begin
        for block in range(first, last):
            if address[block] < at or address[block] + size[block] > end:
                return None
            filled += _gap(at, address[block], number)
            filled.append((address[block], size[block], state[block], number, row[block]))
            at = address[block] + size[block]
        filled += _gap(at, end, number)
    if covered != len(address):
        return None
    blocks = np.array(filled, dtype=np.int64).reshape(-1, 5)
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
    """Return the free blocks at a moment on the curves, the largest first; none if the blocks do not fit together."""
    layout = lay_out(history, moment)
    if layout is None:
        return []
    begins, streams = _streams(history)
    borders = np.searchsorted(layout.segment, np.arange(len(layout.segment_bytes) + 1)).tolist()
    blocks = []
    for segment, (first, end) in enumerate(pairwise(borders)):
        stream = streams[max(bisect_right(begins, int(layout.segment_address[segment])) - 1, 0)] if streams else 0
        is_large = _holds_large_blocks(layout, segment, slice(first, end))
        used = np.flatnonzero(layout.row[first:end] >= 0) + first
        for at in (np.flatnonzero(layout.state[first:end] == INACTIVE) + first).tolist():
            blocks.append(
                FreeBlock(
                    int(layout.address[at]),
                    int(layout.size_bytes[at]),
                    int(layout.segment_bytes[segment]),
                    stream,
                    is_large,
                    _nearest(layout, used, at),
                )
            )
    return sorted(blocks, key=lambda block: (-block.size_bytes, block.address))


def _holds_large_blocks(layout: Layout, segment: int, blocks: slice) -> bool:
    sizes = layout.size_bytes[blocks][layout.row[blocks] >= 0]
    is_small_segment = layout.segment_bytes[segment] == SMALL_SEGMENT_BYTES and not layout.is_expandable[segment]
    return not is_small_segment and (not len(sizes) or int(sizes.max()) > SMALL_BYTES)


def _nearest(layout: Layout, used: Ints, free: int) -> tuple[int, ...]:
    """Return the allocations (rows) nearest to a free block; ``used`` are the used blocks of its segment."""
    at = int(np.searchsorted(used, free))
    near = used[max(at - _MOST_NEIGHBOURS, 0) : at + _MOST_NEIGHBOURS]
    begin, end = layout.address[free], layout.address[free] + layout.size_bytes[free]
    distance = np.minimum(np.abs(layout.address[near] - end), np.abs(begin - layout.address[near]))
    rows: list[int] = layout.row[near][np.argsort(distance, kind="stable")][:_MOST_NEIGHBOURS].tolist()
    return tuple(rows)


def _streams(history: History) -> tuple[list[int], list[int]]:
    """Return, sorted by address, where segments and mapped pages began, and on which stream."""
    events, segments = history.device.events, history.device.segments
    where = (events.action >= SEGMENT_ALLOC) & (events.action <= SEGMENT_UNMAP)
    known = dict(zip(events.address[where].tolist(), events.stream[where].tolist(), strict=True))
    known |= dict(zip(segments.address.tolist(), segments.stream.tolist(), strict=True))
    return sorted(known), [known[address] for address in sorted(known)]
