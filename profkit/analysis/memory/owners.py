"""Which tensor an allocation belongs to, if a run recorded it: the owners' file, or metadata on the event.

The owners' file (`profkit.run.owners`) names storages by address and time. An entry names an allocation that began at
its address, has its requested size, and was alive at its time; clocks may differ by `_CLOCK_SLACK_US`. It also holds
the allocator's own peaks, against which the replay is checked. Metadata is what the program set with
``torch.cuda.memory._set_memory_metadata`` when it allocated: profkit's hooks set ``profkit:PHASE:MODULE``; any other
text is the owner's name as it is.

Several tensors may lie in one storage: a bucket of gradients, a flat parameter, tied weights. Its owner then bears the
names of all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from profkit.allocator.replay import History, Replay
from profkit.analysis.memory.phases import Timeline
from profkit.names import BACKWARD, LOSS, MEMORY_TEXT, MODEL
from profkit.run.owners import ROLES, START, Figures, Owned, Owners

_CLOCK_SLACK_US = 500
_FAR = 2**62


_SHOWN_NAMES = 2
_LONGEST_TEXT = 4096
# Allocations before and after a moment of which one may be meant; clocks differ by less than one lives.
_NEAR = 16

# A saved tensor has the name of a module, and several modules may save the same one.
_NAMED_BY_MODULE = "saved"


@dataclass(frozen=True)
class Part:
    """One of the tensors in a storage; where its bytes are and how large an element is, if the run recorded that."""

    name: str
    offset: int | None = None
    bytes: int | None = None
    element_bytes: int | None = None


@dataclass(frozen=True)
class Owner:
    """The tensors in a storage, and their role (a key of `ROLES`)."""

    role: str
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """What people read: the tensor's name, or the first and last one's of several. Tied ones are the same bytes."""
        names = list(dict.fromkeys(part.name for part in self.parts))
        if len(names) == 1 or self.role == _NAMED_BY_MODULE:
            return next(filter(None, names), "")
        listed = ", ".join(names) if len(names) == _SHOWN_NAMES else f"{names[0]} … {names[-1]}"
        extents = {(part.offset, part.bytes) for part in self.parts}
        if len(extents) == 1 and (None, None) not in extents:
            return f"{listed} (tied)"
        storage = "gradient bucket" if self.role == "gradient" else "shared storage"
        return f"{storage}: {listed} ({len(names):,} {ROLES.get(self.role, 'tensors')})"


def match_owners(recorded: Owners, device: int, replay: Replay, timeline: Timeline) -> tuple[dict[int, Owner], int]:
    """Return the owner of each allocation (row) that the run recorded, and how many entries match no allocation.

    Where entries of several roles name one allocation (a parameter that was also saved for backward), the role that
    comes first in `ROLES` wins: parameters before what is made from them.
    """
    rank = {role: place for place, role in enumerate(ROLES)}
    rows_at: dict[tuple[int, int], list[int]] = {}
    wanted = {entry.address for entry in recorded.owned if entry.device == device}
    for row, place in enumerate(zip(replay.address.tolist(), replay.requested_bytes.tolist(), strict=True)):
        if place[0] in wanted:
            rows_at.setdefault(place, []).append(row)
    parts_of: dict[int, dict[str, dict[Part, None]]] = {}
    missed = 0
    for entry in recorded.owned:
        if entry.device != device or not entry.size_bytes:
            continue  # a tensor without bytes has no allocation; an older run wrote it down
        match = _find(entry, rows_at.get((entry.address, entry.size_bytes), []), replay, timeline)
        if match is None:
            missed += 1
        else:
            part = Part(entry.name, entry.offset_bytes, entry.own_bytes, entry.element_bytes)
            parts_of.setdefault(match, {}).setdefault(entry.role, {})[part] = None
    owners = {}
    for row, by_role in parts_of.items():
        role = min(by_role, key=lambda role_name: rank.get(role_name, _FAR))
        owners[row] = Owner(role, tuple(by_role[role]))
    return owners, missed


@dataclass(frozen=True)
class Text:
    """What profkit's hooks wrote into an allocation: the phase and the module that ran, "" outside all modules."""

    phase: str
    module: str


def read_text(raw: dict[str, Any]) -> Text | None:
    """Return what profkit's hooks wrote into an event; None if its text is the program's own or there is none."""
    value = raw.get("user_metadata")
    if not isinstance(value, str) or not value.startswith(MEMORY_TEXT):
        return None
    phase, _, module = value[:_LONGEST_TEXT].removeprefix(MEMORY_TEXT).partition(":")
    # An earlier profkit called by this name what ran in backward before the first module's.
    return Text(phase, "" if (phase, module) == (BACKWARD, LOSS) else module)


def read_metadata(raw: dict[str, Any]) -> str | None:
    """Return the owner that an event's metadata names: text, or (newer torch) a dictionary's text values joined.

    Of profkit's own text this is the module.
    """
    text = read_text(raw)
    if text is not None:
        return shown_module(text.module)
    value = raw.get("user_metadata")
    if isinstance(value, dict):
        texts = {key: some for key, some in value.items() if isinstance(key, str) and isinstance(some, str)}
        value = " ".join(f"{key}={some}" for key, some in texts.items())
    return value[:_LONGEST_TEXT] if isinstance(value, str) and value else None


def shown_module(name: str) -> str | None:
    """Return a module's name as people read it: what stands before the names of the only model's parts is left out."""
    return name.removeprefix(f"{MODEL}/").removesuffix("/") or (MODEL if name else None)


def _find(entry: Owned, rows: list[int], replay: Replay, timeline: Timeline) -> int | None:
    """Return the allocation that was alive at the entry's time, or else was so nearly.

    The ``rows`` are of the entry's address and size, and so one after another in time; one of a thousand may be meant.
    """

    def born_at(row: int) -> int:
        return _time(timeline, int(replay.birth[row]), -_FAR)

    begun = bisect_right(rows, entry.time_us, key=born_at)
    later = bisect_right(rows, born_at(rows[begun]), begun, key=born_at) if begun < len(rows) else begun
    best, least = None, _CLOCK_SLACK_US
    for row in (*rows[max(begun - _NEAR, 0) : begun], *rows[max(later - _NEAR, begun) : later]):
        freed = _time(timeline, int(replay.freed[row]), _FAR)
        distance = max(born_at(row) - entry.time_us, entry.time_us - freed, 0)
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
    unread_saved_tensors: int = 0
    """How many tensors that autograd kept for a backward pass the run could not find."""
    is_from_before: bool = False
    """Whether the allocator's peaks are those from before the recording, which says nothing of peaks in it."""

    @property
    def agrees(self) -> bool:
        """Return whether all three peaks are the same."""
        differences = (self.allocated_difference_bytes, self.reserved_difference_bytes, self.requested_difference_bytes)
        return not any(differences)


def check_with_allocator(recorded: Owners | None, history: History, unmatched_entries: int) -> AllocatorCheck | None:
    """Compare the replayed peaks with the highest that the allocator reported; None if the run recorded none.

    A script may have reset the allocator's peaks meanwhile; the recorder notes them before that happens. Peaks that
    were as high before a recording in the middle of a program must not be below the replayed ones, and prove no more.
    """
    figures = [] if recorded is None else [entry for entry in recorded.figures if entry.device == history.device.index]
    before = _highest([entry for entry in figures if entry.moment == START])
    peaks = _highest([entry for entry in figures if entry.moment != START])
    if peaks is None:
        return None
    curves = history.curves
    replayed = (history.allocated_peak_bytes, int(curves.reserved.max()), int(curves.requested.max()))
    allocated, reserved, requested = (
        0 if earlier == peak and most <= peak else most - peak
        for most, peak, earlier in zip(replayed, peaks, before or (None,) * len(peaks), strict=True)
    )
    return AllocatorCheck(
        *peaks,
        allocated_difference_bytes=allocated,
        reserved_difference_bytes=reserved,
        requested_difference_bytes=requested,
        unmatched_entries=unmatched_entries,
        earlier_peak_bytes=None if before is None else before[0],
        unread_saved_tensors=0 if recorded is None else recorded.unread_saved_tensors,
        is_from_before=before is not None and before[0] == peaks[0],
    )


def _highest(figures: Sequence[Figures]) -> tuple[int, int, int] | None:
    """Return the highest peaks of allocated, reserved and requested bytes; None if there are no figures."""
    if not figures:
        return None
    names = ("allocated_peak_bytes", "reserved_peak_bytes", "requested_peak_bytes")
    allocated, reserved, requested = (max(getattr(entry, name) for entry in figures) for name in names)
    return allocated, reserved, requested


def find_capacity(recorded: Owners | None, device: int) -> int | None:
    """Return the device's memory in bytes, if the run recorded it."""
    figures = recorded.figures if recorded else ()
    return next((entry.capacity_bytes for entry in figures if entry.device == device and entry.capacity_bytes), None)
