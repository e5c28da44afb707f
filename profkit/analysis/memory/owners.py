"""Which tensor an allocation belongs to, if a run recorded it: the owners' file, or metadata on the event.

The owners' file (`profkit.run.owners`) names storages by address and time. An entry names an allocation that began at
its address, has its requested size, and was alive at its time; clocks may differ by `_CLOCK_SLACK_US`. It also holds
the allocator's own peaks, against which the replay is checked. Metadata is what the program set with
``torch.cuda.memory._set_memory_metadata`` when it allocated: profkit's backward hooks set
``profkit:backward:MODULE``; any other text is the owner's name as it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from profkit.allocator.history import History
from profkit.allocator.replay import Replay
from profkit.analysis.memory.phases import Timeline
from profkit.run.owners import ROLES, START, Owned, Owners

METADATA_PREFIX = "profkit:"

_CLOCK_SLACK_US = 500
_FAR = 2**62


@dataclass(frozen=True)
class Owner:
    """A name, and the tensor's role (a key of `ROLES`, or None where only the name is known)."""

    name: str
    role: str | None


def match_owners(recorded: Owners, device: int, replay: Replay, timeline: Timeline) -> tuple[dict[int, Owner], int]:
    """Return the owner of each allocation (row) that the run recorded, and how many entries match no allocation.

    Where two entries name one allocation (a gradient that views a bucket, tied weights), the role that comes first in
    `ROLES` wins: parameters before what is made from them.
    """
    rank = {role: place for place, role in enumerate(ROLES)}
    rows_at: dict[int, list[int]] = {}
    wanted = {entry.address for entry in recorded.owned if entry.device == device}
    for row, address in enumerate(replay.address.tolist()):
        if address in wanted:
            rows_at.setdefault(address, []).append(row)
    owners: dict[int, Owner] = {}
    missed: Counter[str] = Counter()
    for entry in recorded.owned:
        if entry.device != device:
            continue
        match = _find(entry, rows_at.get(entry.address, []), replay, timeline)
        if match is None:
            missed[entry.name] += 1
        elif match not in owners or rank.get(entry.role, _FAR) < rank.get(owners[match].role or "", _FAR):
            owners[match] = Owner(entry.name, entry.role)
    return owners, sum(missed.values())


def read_metadata(raw: dict[str, Any]) -> str | None:
    """Return the owner that an event's metadata names: text, or (newer torch) a dictionary's text values joined."""
    value = raw.get("user_metadata")
    if isinstance(value, dict):
        value = " ".join(f"{key}={text}" for key, text in value.items())
    if not isinstance(value, str) or not value:
        return None
    return value.removeprefix(METADATA_PREFIX).rpartition(":")[2] if value.startswith(METADATA_PREFIX) else value


def _find(entry: Owned, rows: list[int], replay: Replay, timeline: Timeline) -> int | None:
    """Return the allocation that was alive at the entry's time, or else was so nearly."""
    best, least = None, _CLOCK_SLACK_US
    for row in rows:
        if int(replay.requested_bytes[row]) != entry.size_bytes:
            continue
        born = _time(timeline, int(replay.birth[row]), -_FAR)
        freed = _time(timeline, int(replay.freed[row]), _FAR)
        distance = max(born - entry.time_us, entry.time_us - freed, 0)
        if distance <= least:
            best, least = row, distance
    return best


def _time(timeline: Timeline, event: int, otherwise: int) -> int:
    return int(timeline.times_us[event]) if 0 <= event < len(timeline.times_us) else otherwise


@dataclass(frozen=True)
class AllocatorCheck:
    """The allocator's own peaks in the run, the replay's difference from each, and owners that match no allocation."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    requested_peak_bytes: int
    allocated_difference_bytes: int
    reserved_difference_bytes: int
    requested_difference_bytes: int
    unmatched_entries: int
    earlier_peak_bytes: int | None
    """The allocator's own peak before the recording began, where the run recorded it."""

    @property
    def agrees(self) -> bool:
        """Return whether all three peaks are the same."""
        differences = (self.allocated_difference_bytes, self.reserved_difference_bytes, self.requested_difference_bytes)
        return not any(differences)


def check_with_allocator(recorded: Owners | None, history: History, unmatched_entries: int) -> AllocatorCheck | None:
    """Compare the replayed peaks with the highest that the allocator reported; None if the run recorded none.

    A script may have reset the allocator's peaks meanwhile; the recorder notes them before that happens.
    """
    figures = [] if recorded is None else [one for one in recorded.figures if one.device == history.device.index]
    earlier = [one.allocated_peak_bytes for one in figures if one.moment == START]
    figures = [one for one in figures if one.moment != START]
    if not figures:
        return None
    allocated = max(one.allocated_peak_bytes for one in figures)
    reserved = max(one.reserved_peak_bytes for one in figures)
    requested = max(one.requested_peak_bytes for one in figures)
    return AllocatorCheck(
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=reserved,
        requested_peak_bytes=requested,
        allocated_difference_bytes=history.allocated_peak_bytes - allocated,
        reserved_difference_bytes=int(history.curves.reserved.max()) - reserved,
        requested_difference_bytes=int(history.curves.requested.max()) - requested,
        unmatched_entries=unmatched_entries,
        earlier_peak_bytes=earlier[0] if earlier else None,
    )


def find_capacity(recorded: Owners | None, device: int) -> int | None:
    """Return the device's memory in bytes, if the run recorded it."""
    figures = recorded.figures if recorded else ()
    return next((one.capacity_bytes for one in figures if one.device == device and one.capacity_bytes), None)
