"""Curves of memory over the events, and their peaks.

A curve has one value more than there are events: value 0 is before the first, value k after the k-th. That is what the
allocator's own ``max_memory_allocated`` takes the maximum of, when its peak statistics are reset at the first event.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.memory.allocator import Replay, replay_device, reserved_changes
from profkit.analysis.memory.check import find_contradictions
from profkit.snapshot.columns import ALLOCATED, Device, Ints, Settings


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
        """The replayed peak; the lower end where sizes are not proven."""
        return int(self.curves.allocated.max())

    @property
    def allocated_end_bytes(self) -> int:
        """What the snapshot itself says is allocated at the dump."""
        return int(self.device.blocks.size_bytes[self.device.blocks.state == ALLOCATED].sum())

    @property
    def bounds(self) -> tuple[int, int | None] | None:
        """Where the true peak lies, when it is not proven to be `allocated_peak_bytes`; the upper end may be unknown.

        Unproven sizes leave little room. After contradictions nothing of the replay counts: only that the peak was no
        lower than the end and no higher than what was reserved. Without a history not even the latter.
        """
        end = self.allocated_end_bytes
        if not len(self.device.events):
            return end, None
        if self.contradictions:
            return end, int(self.curves.reserved.max())
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
    """Replay a device, check the replay against the state at the dump, and draw its curves."""
    replay = replay_device(device, settings)
    curves = Curves(
        allocated=_curve(replay, replay.freed, replay.size_bytes),
        requested=_curve(replay, replay.completed, replay.requested_bytes),
        reserved=replay.start_reserved_bytes + np.cumsum(np.concatenate([[0], reserved_changes(device)])),
        slack=_curve(replay, replay.freed, replay.slack_bytes),
    )
    return History(device, settings, replay, curves, find_contradictions(device, settings, replay))


def _curve(replay: Replay, end: Ints, weight: Ints) -> Ints:
    """Return the sum of the rows' weights after each event, counted from birth to ``end``."""
    change = np.zeros(replay.event_count + 2, dtype=np.int64)
    np.add.at(change, replay.birth + 1, weight)
    np.subtract.at(change, end + 1, weight)
    return change[:-1].cumsum()
