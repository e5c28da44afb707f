"""Replay the caching allocator: from the recorded events to the blocks that it charged, byte for byte.

An event names an address and the bytes requested; what the allocator charged is the block at that address. So the
replay keeps the free blocks and follows the allocator's own rules (`profkit.allocator`): split on alloc, merge
with free neighbours of the same segment on free. Addresses are recorded, so nothing is searched. The allocator counts a
block as allocated until ``free_requested``, and as requested until ``free_completed``, when it can be used again.

The curves of memory have one value more than there are events: value 0 is before the first, value k after the k-th.
The allocator's own ``max_memory_allocated`` is the maximum of these values, if its peak statistics are reset at the
first event.

The proof: an allocator that was replayed wrongly (other rules, other settings, events lost in between) ends with other
blocks than the snapshot lists. Only where every address, size and state agrees is a replayed peak called exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from profkit.allocator import (
    MIN_LARGE_SEGMENT_REQUEST_BYTES,
    NEVER,
    SMALL_BYTES,
    round_sizes,
    segment_size_bytes,
    smallest_rests,
)
from profkit.allocator.recorded_heap import RecordedHeap, find_expandable_ranges, find_start
from profkit.snapshot.columns import (
    ALLOC,
    ALLOCATED,
    FREE_COMPLETED,
    FREE_REQUESTED,
    INACTIVE,
    OTHER,
    PENDING,
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
    """What no allocator could have done, but the history says → how often."""
    contradicts_settings: bool
    """Whether an allocator with the same settings all the time would have done something else."""

    def __len__(self) -> int:
        return len(self.address)


def replay_device(device: Device, settings: Settings, is_settled: bool = True) -> Replay:
    """Return what the allocator did on ``device``, from the first recorded event to the last.

    Args:
        is_settled: whether the settings were the same all the time. If not, the rest of a free block that some settings
            split off and others do not counts as slack, unless a later event or the dump shows what became of it.
    """
    events = device.events
    start = find_start(device, settings, is_settled)
    births = np.flatnonzero(events.action == ALLOC)
    rounded = round_sizes(events.size_bytes[births], settings)
    expandable = find_expandable_ranges(device)
    only_expandable = bool(expandable) and not start.fences and not np.any(events.action == SEGMENT_ALLOC)
    has_both_kinds = bool(expandable) and not only_expandable
    is_other_kind = settings.is_recorded and settings.expandable_segments != bool(expandable)
    heap = RecordedHeap(start, events.address[births], rounded.tolist())
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
        contradictions=dict(+heap.contradictions),
        contradicts_settings=heap.contradicts_settings or has_both_kinds or is_other_kind,
    )


def reserved_changes(device: Device) -> Ints:
    action, size = device.events.action, device.events.size_bytes
    grows = (action == SEGMENT_ALLOC) | (action == SEGMENT_MAP)
    shrinks = (action == SEGMENT_FREE) | (action == SEGMENT_UNMAP)
    return np.where(grows, size, np.where(shrinks, -size, 0))


def _final_sizes(device: Device, addresses: list[int]) -> dict[int, int]:
    blocks = device.blocks
    row_at = {address: row for row, address in enumerate(addresses)}
    used = blocks.state != INACTIVE
    used_blocks = zip(blocks.address[used].tolist(), blocks.size_bytes[used].tolist(), strict=True)
    return {row_at[address]: size for address, size in used_blocks if address in row_at}


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


def _run(heap: RecordedHeap, chunks: Iterator[Iterator[_Event]]) -> tuple[list[int], list[int]]:
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
                    # As `RecordedHeap.insert` does. The call would cost a tenth of the replay.
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
    heap: RecordedHeap, action: Codes, rows: tuple[list[int], list[int]], pending: list[bool]
) -> tuple[Ints, Ints]:
    """``rows`` are those that `_run` returned; ``pending`` are the rows that were freed before the first event."""
    never = len(action)
    freed = np.where(np.array(pending, dtype=np.bool_), -1, never).astype(np.int64)
    completed = np.full(len(freed), never, dtype=np.int64)

    where, row = np.flatnonzero(action == FREE_REQUESTED), np.array(rows[0], dtype=np.int64)
    request_count = len(row)
    where, row = where[row >= 0], row[row >= 0]
    row, first = np.unique(row, return_index=True)
    is_new = freed[row] == never
    freed[row[is_new]] = where[first[is_new]]
    heap.contradictions[_UNKNOWN_FREE] += int(request_count - np.count_nonzero(is_new))

    where = np.flatnonzero((action == _FREE) | (action == FREE_COMPLETED))
    row, is_joined = np.array(rows[1], dtype=np.int64), action[where] == _FREE
    heap.contradictions[_UNKNOWN_FREE] += int(np.count_nonzero(row < 0) + np.count_nonzero((row < 0) & is_joined))
    where, row, is_joined = where[row >= 0], row[row >= 0], is_joined[row >= 0]
    completed[row] = where
    is_new = freed[row] == never
    freed[row[is_new]] = where[is_new] - is_joined[is_new]
    heap.contradictions[_UNKNOWN_FREE] += int(np.count_nonzero(is_joined & ~is_new))
    heap.contradictions["frees completed without a request"] += int(np.count_nonzero(is_new & ~is_joined))
    return freed, completed


@dataclass(frozen=True, eq=False)
class Curves:
    """Bytes over the events; ``slack`` is by how much ``allocated`` may be too low."""

    allocated: Ints
    requested: Ints
    reserved: Ints
    slack: Ints


@dataclass(frozen=True, eq=False)
class History:
    """One device replayed: its allocations, its curves, and how far they are proven."""

    device: Device
    settings: Settings
    replay: Replay
    curves: Curves
    contradictions: dict[str, int]

    @property
    def peak_moment(self) -> int:
        """Where on the curves the allocated memory first stood at its peak."""
        return int(self.curves.allocated.argmax())

    @property
    def allocated_peak_bytes(self) -> int:
        """The replayed peak; a lower bound where sizes are not proven."""
        return int(self.curves.allocated.max())

    @property
    def allocated_end_bytes(self) -> int:
        return int(self.device.blocks.size_bytes[self.device.blocks.state == ALLOCATED].sum())

    @property
    def bounds(self) -> tuple[int, int | None] | None:
        """Where the true peak lies, if it is not proven to be `allocated_peak_bytes`; the upper end may be unknown.

        Unproven sizes leave little room. After contradictions the replay counts for nothing: the peak was at least
        what is allocated at the end, and at most what was reserved. Without a history the upper end is unknown.
        """
        end = self.allocated_end_bytes
        if not len(self.device.events):
            return end, None
        if self.contradictions:
            return end, max(int(self.curves.reserved.max()), end)
        high = int((self.curves.allocated + self.curves.slack).max())
        return None if high == self.allocated_peak_bytes else (self.allocated_peak_bytes, high)

    @property
    def is_complete(self) -> bool:
        """Whether the history begins with an empty allocator."""
        return bool(len(self.device.events)) and not self.replay.start_count and not self.replay.start_reserved_bytes

    def time_us(self, moment: int) -> int | None:
        times_us = self.device.events.time_us
        return int(times_us[max(moment - 1, 0)]) if len(times_us) else None


def replay_history(device: Device, settings: Settings) -> History:
    """Replay a device, check the replay against the state at the dump, and draw its curves.

    A program can change the settings while it runs, and the snapshot holds only the last ones. Where the history
    contradicts these, it is replayed once more without relying on them. A change of ``expandable_segments`` nearly
    always shows. A change of ``max_split_size_mb`` shows only if memory was used later that the last limit would not
    have split off: else the rest of a block can be counted wrongly.
    """
    replay = replay_device(device, settings)
    contradictions = _find_contradictions(device, settings, replay)
    if contradictions or replay.contradicts_settings:
        other = replay_device(device, settings, is_settled=False)
        others = _find_contradictions(device, settings, other)
        if replay.contradicts_settings or not (others or _count_odd_segments(device, settings)):
            replay, contradictions = other, others
    curves = Curves(
        allocated=_curve(replay, replay.freed, replay.size_bytes),
        requested=_curve(replay, replay.completed, replay.requested_bytes),
        reserved=replay.start_reserved_bytes + np.cumsum(np.concatenate([[0], reserved_changes(device)])),
        slack=_curve(replay, replay.freed, replay.slack_bytes),
    )
    return History(device, settings, replay, curves, contradictions | _find_broken_sums(replay, curves))


def _find_broken_sums(replay: Replay, curves: Curves) -> dict[str, int]:
    in_use = _curve(replay, replay.completed, replay.size_bytes)
    broken = {
        "moments with more memory in use than reserved": in_use > curves.reserved,
        "moments with less than nothing reserved": curves.reserved < 0,
        "blocks smaller than what was asked for": replay.size_bytes < replay.requested_bytes,
    }
    return {what: int(np.count_nonzero(where)) for what, where in broken.items() if where.any()}


def _curve(replay: Replay, end: Ints, weight: Ints) -> Ints:
    change = np.zeros(replay.event_count + 2, dtype=np.int64)
    np.add.at(change, replay.birth + 1, weight)
    np.subtract.at(change, end + 1, weight)
    return change[:-1].cumsum()


def _find_contradictions(device: Device, settings: Settings, replay: Replay) -> dict[str, int]:
    odd_segments = 0 if settings.is_recorded else _count_odd_segments(device, settings)
    found = {
        "blocks at the dump that the history does not lead to": _count_differences(device, replay),
        "segments of a size that the default settings do not give": odd_segments,
    }
    return replay.contradictions | {what: count for what, count in found.items() if count}


def _count_odd_segments(device: Device, settings: Settings) -> int:
    """A segment is reserved for the alloc that follows it; one for 1 to 10 MiB may be of a size set by the user."""
    action, address = device.events.action, device.events.address
    segments = np.flatnonzero((action[:-1] == SEGMENT_ALLOC) & (action[1:] == ALLOC) & (address[:-1] == address[1:]))
    rounded = round_sizes(device.events.size_bytes[segments + 1], settings)
    is_fixed = (rounded <= SMALL_BYTES) | (rounded >= MIN_LARGE_SEGMENT_REQUEST_BYTES)
    expected = [segment_size_bytes(size) for size in rounded.tolist()]
    return int(np.count_nonzero(is_fixed & (device.events.size_bytes[segments] != expected)))


def _count_differences(device: Device, replay: Replay) -> int:
    live = np.flatnonzero(replay.completed == replay.event_count)
    state = np.where(replay.freed[live] == replay.event_count, ALLOCATED, PENDING)
    columns = (replay.address[live], replay.size_bytes[live], state, replay.requested_bytes[live])
    ours = set(zip(*(column.tolist() for column in columns), strict=True))
    ours |= {(address, size, INACTIVE, 0) for address, size in replay.final_free.items()}
    blocks = device.blocks
    requested = np.where(blocks.state == INACTIVE, 0, blocks.requested_bytes)
    theirs = set(
        zip(*(column.tolist() for column in (blocks.address, blocks.size_bytes, blocks.state, requested)), strict=True)
    )
    return len(ours ^ theirs)
