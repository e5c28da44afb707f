"""Whose memory an allocation is, where somebody wrote it down: the recorder's ledger, or metadata on the event.

The ledger names storages by address and time. An allocation is an entry's when it began at that address, was asked for
with as many bytes, and was alive at that time; clocks may differ by what `_CLOCK_SLACK_US` allows. Metadata is what the
program set with ``torch.cuda.memory._set_memory_metadata`` when it allocated: profkit's backward hooks set
``profkit:backward:MODULE``; any other text is taken for the owner's name as it stands.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from profkit.analysis.memory.allocator import Replay
from profkit.analysis.memory.phases import Timeline
from profkit.run.owners import ROLES, Owned, Owners

METADATA_PREFIX = "profkit:"

_CLOCK_SLACK_US = 500
_FAR = 2**62


@dataclass(frozen=True)
class Owner:
    """A name, and the role under which the ledger holds it (None where only the name is known)."""

    name: str
    role: str | None


def match_ledger(ledger: Owners, device: int, replay: Replay, timeline: Timeline) -> tuple[dict[int, Owner], int]:
    """Return the owner of each allocation (row) that the ledger names, and how many entries named none.

    Where two entries name one allocation (a gradient that views a bucket, tied weights), the first role of `ROLES`
    wins: parameters before what is made of them.
    """
    rank = {role: place for place, role in enumerate(ROLES)}
    rows_at: dict[int, list[int]] = {}
    wanted = {entry.address for entry in ledger.owned if entry.device == device}
    for row, address in enumerate(replay.address.tolist()):
        if address in wanted:
            rows_at.setdefault(address, []).append(row)
    owners: dict[int, Owner] = {}
    missed: Counter[str] = Counter()
    for entry in ledger.owned:
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
