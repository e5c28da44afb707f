"""A device's history: the replay, the curves of memory over the events, and how far both are proven.

A curve has one value more than there are events: value 0 is before the first, value k after the k-th. The allocator's
own ``max_memory_allocated`` is the maximum of these values, if its peak statistics are reset at the first event.

The proof: an allocator that was replayed wrongly (other rules, other settings, events lost in between) ends with other
blocks than the snapshot lists. Only where every address, size and state agrees is a replayed peak called exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.allocator.replay import Replay, replay_device, reserved_changes
from profkit.allocator.rules import (
    MIN_LARGE_SEGMENT_REQUEST_BYTES,
    SMALL_BYTES,
    round_sizes,
    segment_size_bytes,
)
from profkit.snapshot.columns import ALLOC, ALLOCATED, INACTIVE, PENDING, SEGMENT_ALLOC, Device, Ints, Settings


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
        """What is allocated at the dump, as the snapshot itself says."""
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
        """Return the time of a point on the curves; None where the file records no times."""
        events = self.device.events
        if not len(events) or not events.has_times:
            return None
        return int(events.time_us[max(moment - 1, 0)])


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
    """Return the sum of the rows' weights after each event, counted from birth to ``end``."""
    change = np.zeros(replay.event_count + 2, dtype=np.int64)
    np.add.at(change, replay.birth + 1, weight)
    np.subtract.at(change, end + 1, weight)
    return change[:-1].cumsum()


def _find_contradictions(device: Device, settings: Settings, replay: Replay) -> dict[str, int]:
    """Return what speaks against the replay, and how often; empty when its figures are proven."""
    contradictions = dict(replay.contradictions)
    odd_segments = 0 if settings.is_recorded else _count_odd_segments(device, settings)
    for what, count in (
        ("blocks at the dump that the history does not lead to", _count_differences(device, replay)),
        ("segments of a size that the default settings do not give", odd_segments),
    ):
        if count:
            contradictions[what] = count
    return contradictions


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


def _count_odd_segments(device: Device, settings: Settings) -> int:
    """Return how many segments a default allocator would have made of another size.

    A segment is reserved for the alloc that follows it; one for 1 to 10 MiB may be of a size set by the user.
    """
    action, address = device.events.action, device.events.address
    segments = np.flatnonzero((action[:-1] == SEGMENT_ALLOC) & (action[1:] == ALLOC) & (address[:-1] == address[1:]))
    rounded = round_sizes(device.events.size_bytes[segments + 1], settings)
    is_fixed = (rounded <= SMALL_BYTES) | (rounded >= MIN_LARGE_SEGMENT_REQUEST_BYTES)
    expected = [segment_size_bytes(size) for size in rounded.tolist()]
    return int(np.count_nonzero(is_fixed & (device.events.size_bytes[segments] != expected)))
