"""What the program and its run said of allocations: phases and steps, and whose tensors they hold.

``record_function`` ranges with the name of a phase are phases: profkit's own names, common short forms, torch's
``Optimizer.step#…``, and the globs that the user gives. They do not overlap: of nested ones the outermost counts.

The owners' file (`profkit.run.owners`) names storages by address and time: an entry names an allocation that began at
its address, has its requested size, and was alive at its time, give or take `_CLOCK_SLACK_US`. Several tensors may lie
in one storage (a bucket of gradients, a flat parameter, tied weights). It also holds the allocator's own peaks, against
which the replay is checked. Metadata is what the program set with ``torch.cuda.memory._set_memory_metadata``:
profkit's hooks set ``profkit:PHASE:MODULE``; any other text is the owner's name as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np

from profkit.allocator.replay import History, Replay
from profkit.names import BACKWARD, FORWARD, LOSS, MEMORY_TEXT, MODEL, OPTIMIZER, PHASES, RECOMPUTE, STEP, WARMUP
from profkit.run.owners import ROLES, START, Figures, Owned, Owners
from profkit.snapshot.columns import Annotation, Device, Ints

_NAMES = {name: name for name in PHASES} | {
    "fwd": FORWARD,
    "bwd": BACKWARD,
    "opt": OPTIMIZER,
    "optim": OPTIMIZER,
}
_OPTIMIZER_STEP = "Optimizer.step#"
_STEPS = (f"{STEP} *", WARMUP, "ProfilerStep#*")


@dataclass(frozen=True)
class Phase:
    """A stretch of time with a name."""

    name: str
    start_us: int
    end_us: int


@dataclass(frozen=True)
class Timeline:
    """When the events happened, and in which phase and step. Moments are points on the curves (`Curves`)."""

    times_us: Ints
    """Times of the events, made monotonic: the clocks of two threads may differ slightly."""
    phases: tuple[Phase, ...]
    steps: tuple[Phase, ...]
    recomputations: tuple[Phase, ...] = ()

    def phase_at(self, event: int) -> str | None:
        """Return the phase in which an event happened; None outside all phases and before the first event."""
        phase = self._at(self.phases, event)
        return phase.name if phase else None

    def gap_at(self, event: int) -> str | None:
        """Return between which phases an event outside all of them happened; None if there are no phases."""
        if event < 0 or not self.phases:
            return None
        at = bisect_right(self.phases, int(self.times_us[event]), key=lambda phase: phase.start_us)
        if at == 0:
            return "before the first phase"
        if at == len(self.phases):
            return "after the last phase"
        return f"between {self.phases[at - 1].name} and {self.phases[at].name}"

    def recomputation_at(self, event: int) -> Phase | None:
        """Return what was being computed again when an event happened, if anything."""
        return self._at(self.recomputations, event)

    def step_at(self, event: int) -> int:
        """Return the index of the step in which an event happened, or the last one before it; -1 before the first."""
        return (
            bisect_right(self.steps, int(self.times_us[event]), key=lambda step: step.start_us) - 1
            if event >= 0
            else -1
        )

    def moments_of(self, phase: Phase) -> tuple[int, int]:
        """Return the first and last moment of a phase: where it began, and after its last event."""
        first = int(np.searchsorted(self.times_us, phase.start_us, "left"))
        last = int(np.searchsorted(self.times_us, phase.end_us, "right"))
        return first, max(first, last)

    def moment_at(self, time_us: int) -> int:
        """Return the moment at a time: after the last event until then."""
        return int(np.searchsorted(self.times_us, time_us, "right"))

    def _at(self, spans: tuple[Phase, ...], event: int) -> Phase | None:
        if event < 0 or not spans:
            return None
        time = int(self.times_us[event])
        at = bisect_right(spans, time, key=lambda span: span.start_us) - 1
        return spans[at] if at >= 0 and time <= spans[at].end_us else None


def find_timeline(device: Device, named: Mapping[str, str] | None = None, steps: Iterable[Phase] = ()) -> Timeline:
    """Return the phases and steps of a device's history.

    ``named`` is phase name → glob on the names of annotations, and takes precedence. If the run recorded no ``steps``,
    annotations give them, else the ends of the optimizer's steps.
    """
    events = device.events
    times = np.maximum.accumulate(events.time_us) if len(events) else events.time_us
    if not len(events):
        return Timeline(times, (), ())
    end = int(times[-1])
    annotations = device.annotations
    phases = _outermost(_phases(annotations, named or {}, end))
    named_steps = (
        _span(annotation, annotation.name, end)
        for annotation in annotations
        if annotation.end_us is not None and any(fnmatchcase(annotation.name, glob) for glob in _STEPS)
    )
    known_steps = sorted(steps, key=lambda step: step.start_us) or list(_outermost(named_steps))
    again = _outermost(
        _span(annotation, annotation.name, end) for annotation in annotations if annotation.name == RECOMPUTE
    )
    if not known_steps:  # from one optimizer step's end to the next one's; the first starts at the first event
        borders = [int(times[0]), *(phase.end_us for phase in phases if phase.name == OPTIMIZER)]
        known_steps = [Phase(f"{STEP} {number}", low, high) for number, (low, high) in enumerate(pairwise(borders))]
    return Timeline(times, phases, tuple(known_steps), again)


def _phases(annotations: Iterable[Annotation], named: Mapping[str, str], end: int) -> Iterable[Phase]:
    for annotation in annotations:
        name = next((name for name, glob in named.items() if fnmatchcase(annotation.name, glob)), None)
        if name is None:
            name = OPTIMIZER if annotation.name.startswith(_OPTIMIZER_STEP) else _NAMES.get(annotation.name.lower())
        if name is not None:
            yield _span(annotation, name, end)


def _span(annotation: Annotation, name: str, end: int) -> Phase:
    return Phase(name, annotation.start_us, end if annotation.end_us is None else annotation.end_us)


def _outermost(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    kept: list[Phase] = []
    for phase in sorted(phases, key=lambda span: (span.start_us, -span.end_us)):
        if not kept or phase.start_us >= kept[-1].end_us:
            kept.append(phase)
    return tuple(kept)


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
            continue  # a tensor without bytes has no allocation
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
    """Return the owner that an event's metadata names: text, or (newer torch) a dictionary's text values joined."""
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


_KINDS = ("allocated", "reserved", "requested")


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
    compared: dict[str, int] = {}
    for kind, peak, earlier in zip(_KINDS, peaks, before or (None,) * len(peaks), strict=True):
        most = int(getattr(history.curves, kind).max())
        compared[f"{kind}_peak_bytes"] = peak
        compared[f"{kind}_difference_bytes"] = 0 if earlier == peak and most <= peak else most - peak
    return AllocatorCheck(
        **compared,
        unmatched_entries=unmatched_entries,
        earlier_peak_bytes=None if before is None else before[0],
        unread_saved_tensors=0 if recorded is None else recorded.unread_saved_tensors,
        is_from_before=before is not None and before[0] == peaks[0],
    )


def _highest(figures: Sequence[Figures]) -> list[int] | None:
    if not figures:
        return None
    return [max(getattr(entry, f"{kind}_peak_bytes") for entry in figures) for kind in _KINDS]


def find_capacity(recorded: Owners | None, device: int) -> int | None:
    figures = recorded.figures if recorded else ()
    return next((entry.capacity_bytes for entry in figures if entry.device == device and entry.capacity_bytes), None)
