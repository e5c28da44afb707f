"""One device's memory: its history, what is known of each of its allocations, and what it was made of at a moment.

The parts of a moment add up: the categories sum to what was allocated, and so do the stacks, the phases, and the
modules at the top of their tree. Sizes are what the allocator charged, with the bytes lost to rounding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress

import numpy as np

from profkit.allocator.replay import History
from profkit.analysis.memory import shown_module
from profkit.analysis.memory.categories import CATEGORIES, EVIDENCE, Classifier
from profkit.analysis.memory.generated_memory import ReplayedDevice
from profkit.analysis.memory.places import (
    BEFORE_RECORDING,
    IN_NO_PHASE,
    PartRow,
    Piece,
    Place,
    Places,
    sum_by_module,
    sum_by_phase,
)
from profkit.analysis.memory.stacks import StackFacts, format_frame, sum_by_stack
from profkit.names import kind_of

NOT_SELECTED = "(not selected)"

LARGEST_COUNT = 10


@dataclass(frozen=True)
class Filter:
    """Which allocations are shown; the others are added up as one line, so that the sums stay whole."""

    stack: str | None = None
    """Text that must occur in a frame of the stack (``file:line function``) or in the owner's name."""
    min_bytes: int = 0


@dataclass(frozen=True)
class PhasePeak:
    """The highest allocated memory in any instance of a phase."""

    name: str
    instances: int
    peak_bytes: int
    time_us: int
    moment: int
    """Where on the curves it is."""


class DeviceMemory(ReplayedDevice):
    """One device's history and what is known about its allocations, computed on first use."""

    @cached_property
    def classifier(self) -> Classifier:
        return Classifier(self)

    @cached_property
    def places(self) -> Places:
        return Places(self)

    def place_of(self, row: int, moment: int | None = None) -> Place:
        """Return the module that an allocation (a row of the replay) belongs to, by default when it is made.

        Compiled code hands memory on from module to module: it belongs to the one that holds it at the moment.
        """
        return self.places.place_of(row, self.generated.held(row, moment))

    def owner_of(self, row: int, moment: int | None = None) -> str | None:
        """Return the name of an allocation's tensor, or of the module that holds it at a moment; None if unknown."""
        place = self.place_of(row, moment)
        if place.evidence != "code":
            return self.classifier.claim_of(row).owner
        return place.shared or shown_module(place.modules[0][0])

    def running_place_of(self, row: int) -> Place:
        """Return the module that ran when an allocation was made; of compiled code, the one that was compiled."""
        return self.places.place_of(row, None)

    @cached_property
    def _lines(self) -> dict[str, StackFacts]:
        """A line of source whose result compiled code holds → the stack that stands for it, one for all rows of it."""
        return {}

    def stack_of(self, row: int, moment: int) -> StackFacts:
        """Return the stack that asked for an allocation; of compiled code the line whose result it holds then."""
        facts, held = self.stacks.facts_of(row), self.generated.held(row, moment)
        if held is None or held.source is None or (held.is_first and facts.own):
            return facts
        for other in self.generated.same_call(row):
            stack = self.stacks.facts_of(other)
            if stack.own and format_frame(stack.own[0]).endswith(held.source):
                return stack
        place, _, function = held.source.rpartition(" ")
        file, _, line = place.rpartition(":")
        return self._lines.setdefault(
            held.source, StackFacts((*facts.python[:1], (function, file, int(line) if line.isdecimal() else 0)))
        )

    def live_rows(self, moment: int) -> list[int]:
        replay = self.history.replay
        return np.flatnonzero((replay.birth < moment) & (replay.freed >= moment)).tolist()

    def selects(self, rows: list[int], wanted: Filter) -> list[bool]:
        sizes, text = self.history.replay.size_bytes, wanted.stack
        return [int(sizes[row]) >= wanted.min_bytes and (text is None or self._mentions(row, text)) for row in rows]

    def phase_peaks(self) -> tuple[PhasePeak, ...]:
        moments: dict[str, list[int]] = {}
        allocated = self.history.curves.allocated
        for phase in self.timeline.phases:
            first, last = self.timeline.moments_of(phase)
            moments.setdefault(phase.name, []).append(first + int(allocated[first : last + 1].argmax()))
        peaks = {name: max(highest, key=allocated.__getitem__) for name, highest in moments.items()}
        return tuple(
            PhasePeak(name, len(moments[name]), int(allocated[peak]), self.history.time_us(peak) or 0, peak)
            for name, peak in peaks.items()
        )

    def _mentions(self, row: int, text: str) -> bool:
        owner = self.owner_of(row) or ""
        return text in owner or any(text in frame for frame in self.stacks.facts_of(row).user_first)


@dataclass(frozen=True)
class CategoryRow:
    """Bytes of one category; ``evidence`` splits them by how the category is known."""

    category: str
    bytes: int
    share: float
    count: int
    evidence: dict[str, int]


@dataclass(frozen=True)
class StackRow:
    bytes: int
    share: float
    count: int
    stack: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class LargeRow:
    bytes: int
    requested_bytes: int
    category: str
    phase: str | None
    owner: str | None
    stack: tuple[str, ...]
    label: str
    is_from_before: bool
    count: int = 1
    """How many equal allocations this row stands for: of one size, purpose, phase, owner and stack."""


@dataclass(frozen=True)
class Composition:
    """What was allocated at one moment."""

    what: str
    """``peak``, ``phase:backward``, or the time that was asked for."""
    moment: int
    time_us: int | None
    phase: str | None
    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    by_category: tuple[CategoryRow, ...]
    by_stack: tuple[StackRow, ...]
    by_module: tuple[PartRow, ...]
    """The tree of modules, depth first; next to it what is in no module."""
    by_phase: tuple[PartRow, ...]
    largest: tuple[LargeRow, ...]
    largest_groups: tuple[LargeRow, ...]
    """The largest allocations, equal ones as one row."""
    evidence: dict[str, int]


@dataclass(frozen=True)
class Fragmentation:
    """Reserved memory that is not allocated, at one moment."""

    reserved_bytes: int
    allocated_bytes: int
    free_bytes: int
    """Neither allocated nor still used by another stream."""
    free_share: float
    """Of the reserved bytes."""
    padding_bytes: int
    """Allocated beyond what was requested: rounding, and rests too small to split off. Shown as lost to rounding."""


def compose(memory: DeviceMemory, what: str, moment: int, wanted: Filter) -> Composition:
    """Return what was allocated at a moment on the curves; ``what`` is the moment as the user named it."""
    curves, replay = memory.history.curves, memory.history.replay
    live = memory.live_rows(moment)
    rows = list(compress(live, memory.selects(live, wanted)))
    total = int(curves.allocated[moment])
    rest_bytes, rest_count = total - int(replay.size_bytes[rows].sum()), len(live) - len(rows)
    rest_share = _share(rest_bytes, total)
    pieces = [piece_of(memory, row, moment) for row in rows]
    by_category, by_stack = _by_category(pieces, total), _by_stack(memory, moment, rows, total)
    by_module, by_phase = sum_by_module(pieces, total, memory.places.modules), sum_by_phase(pieces, total)
    if rest_count:
        by_category.append(CategoryRow(NOT_SELECTED, rest_bytes, rest_share, rest_count, {}))
        by_stack.append(StackRow(rest_bytes, rest_share, rest_count, (), NOT_SELECTED))
        other = PartRow(NOT_SELECTED, (NOT_SELECTED,), rest_bytes, rest_share, rest_count, rest_bytes, {}, {})
        by_module, by_phase = (*by_module, other), (*by_phase, other)
    ordered = sorted(rows, key=lambda row: (-int(replay.size_bytes[row]), row))
    return Composition(
        what=what,
        moment=moment,
        time_us=memory.history.time_us(moment),
        phase=memory.timeline.phase_at(moment - 1),
        allocated_bytes=total,
        requested_bytes=int(replay.requested_bytes[live].sum()),
        reserved_bytes=int(curves.reserved[moment]),
        by_category=tuple(by_category),
        by_stack=tuple(by_stack),
        by_module=by_module,
        by_phase=by_phase,
        largest=tuple(_large_row(memory, moment, row) for row in ordered[:LARGEST_COUNT]),
        largest_groups=_largest_groups(memory, moment, ordered),
        evidence={kind: sum(row.evidence.get(kind, 0) for row in by_category) for kind in EVIDENCE},
    )


def _by_category(pieces: list[Piece], total: int) -> list[CategoryRow]:
    sizes, counts = defaultdict[str, Counter[str]](Counter), Counter[str]()
    for piece in pieces:
        sizes[piece.category][piece.evidence] += piece.bytes
        counts[piece.category] += 1
    rows = [
        CategoryRow(
            category,
            by_evidence.total(),
            _share(by_evidence.total(), total),
            counts[category],
            {kind: by_evidence[kind] for kind in EVIDENCE if kind in by_evidence},
        )
        for category, by_evidence in sizes.items()
    ]
    return sorted(rows, key=lambda row: (-row.bytes, CATEGORIES.index(row.category)))


def _by_stack(memory: DeviceMemory, moment: int, rows: list[int], total: int) -> list[StackRow]:
    stacks = (memory.stack_of(row, moment) for row in rows)
    sums = sum_by_stack(stacks, memory.history.replay.size_bytes[rows].tolist())
    by_stack = [
        StackRow(size, _share(size, total), count, stack.user_first, stack.label) for stack, size, count in sums
    ]
    return sorted(by_stack, key=lambda row: (-row.bytes, row.label))


def piece_of(memory: DeviceMemory, row: int, moment: int) -> Piece:
    claim = memory.classifier.claim_of(row)
    size, place = int(memory.history.replay.size_bytes[row]), memory.place_of(row, moment)
    return Piece(size, claim.category, place, _phase_of(memory, row), claim.evidence)


def _phase_of(memory: DeviceMemory, row: int) -> str:
    birth = int(memory.history.replay.birth[row])
    if birth < 0:
        return BEFORE_RECORDING
    gap = memory.timeline.gap_at(birth)
    return memory.places.phase_of(row) or (IN_NO_PHASE if gap is None else f"({gap})")


def _largest_groups(memory: DeviceMemory, moment: int, ordered: list[int]) -> tuple[LargeRow, ...]:
    """Owners that differ only in a number are equal: ``h.*.weight`` stands for ``h.0.weight`` and ``h.1.weight``."""
    groups: dict[LargeRow, list[LargeRow]] = {}
    for row in ordered:
        large = _large_row(memory, moment, row)
        if len(groups) >= LARGEST_COUNT and large.bytes < next(reversed(groups)).bytes:
            break
        kind = replace(large, owner=None if large.owner is None else kind_of(large.owner))
        groups.setdefault(kind, []).append(large)
    rows = [
        replace(kind if len({large.owner for large in some}) > 1 else some[0], count=len(some))
        for kind, some in groups.items()
    ]
    return tuple(sorted(rows, key=lambda large: (-large.bytes, -large.count))[:LARGEST_COUNT])


def _large_row(memory: DeviceMemory, moment: int, row: int) -> LargeRow:
    replay, stack = memory.history.replay, memory.stack_of(row, moment)
    return LargeRow(
        bytes=int(replay.size_bytes[row]),
        requested_bytes=int(replay.requested_bytes[row]),
        category=memory.classifier.claim_of(row).category,
        phase=memory.places.phase_of(row),
        owner=memory.owner_of(row, moment),
        stack=stack.user_first,
        label=stack.label,
        is_from_before=bool(replay.birth[row] < 0),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def measure_fragmentation(history: History, moment: int) -> Fragmentation:
    replay, curves = history.replay, history.curves
    is_live = (replay.birth < moment) & (replay.freed >= moment)
    is_pending = (replay.freed < moment) & (replay.completed >= moment)
    allocated, reserved = int(curves.allocated[moment]), int(curves.reserved[moment])
    pending = int(replay.size_bytes[is_pending].sum())
    # Less than nothing only where the replay contradicts itself, which `History.contradictions` says.
    free = max(reserved - allocated - pending, 0)
    return Fragmentation(
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        free_bytes=free,
        free_share=free / reserved if reserved else 0.0,
        padding_bytes=max(allocated - int(replay.requested_bytes[is_live].sum()), 0),
    )
