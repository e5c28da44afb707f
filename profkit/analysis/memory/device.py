"""One device's memory: its history, and what is known about each of its allocations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from profkit.allocator.replay import History, replay_history
from profkit.analysis.memory.categories import Classifier
from profkit.analysis.memory.generated_memory import GeneratedMemory
from profkit.analysis.memory.places import Place, Places
from profkit.analysis.memory.recorded import Owner, Phase, Timeline, find_timeline, match_owners, shown_module
from profkit.analysis.memory.stacks import StackBook, StackFacts, format_frame
from profkit.run.owners import Owners
from profkit.snapshot.columns import OOM, Device, Settings

if TYPE_CHECKING:
    from profkit.run.compiled_code import CompiledGraph


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


class DeviceMemory:
    """One device's history and what is known about its allocations, computed on first use."""

    def __init__(
        self,
        device: Device,
        settings: Settings,
        recorded: Owners | None = None,
        named: Mapping[str, str] | None = None,
        *,
        compiled: Iterable[CompiledGraph] = (),
        is_only_device: bool = True,
    ) -> None:
        """Replay a device.

        Args:
            settings: the allocator's.
            recorded: the run's ledger.
            named: phase name → glob on the names of annotations.
            compiled: what the run knows of its compiled code.
            is_only_device: whether the process used no other device.
        """
        self.device = device
        self._is_only_device = is_only_device
        self._compiled = compiled
        self.recorded = recorded
        self._lines: dict[str, StackFacts] = {}
        self.history: History = replay_history(device, settings)
        steps = [Phase(step.name, step.start_us, step.end_us) for step in recorded.steps] if recorded else []
        self.timeline: Timeline = find_timeline(device, named, steps)

    @cached_property
    def stacks(self) -> StackBook:
        """The stacks of the allocations, interned on first use."""
        return StackBook(self.device, self.history.replay)

    @cached_property
    def generated(self) -> GeneratedMemory:
        """Finds who holds what compiled code allocated."""
        ends_failing = self.device.events.action[-1:].tolist() == [OOM]
        return GeneratedMemory(self._compiled, self.history.replay, self.stacks, ends_failing=ends_failing)

    @cached_property
    def classifier(self) -> Classifier:
        """Finds the category of an allocation."""
        return Classifier(self.history, self.timeline, self.stacks, self.owners, self.generated)

    @cached_property
    def places(self) -> Places:
        """Finds the module and the phase of an allocation."""
        return Places(
            self.timeline,
            self.device.annotations,
            self.recorded,
            self.owners,
            self.stacks,
            is_only_device=self._is_only_device,
        )

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

    def stack_of(self, row: int, moment: int) -> StackFacts:
        """Return the stack that asked for an allocation; of compiled code the line whose result it holds then."""
        facts, held = self.stacks.of(row), self.generated.held(row, moment)
        if held is None or held.source is None or (held.is_first and facts.own):
            return facts
        for other in self.generated.same_call(row):
            like = self.stacks.of(other)
            if like.own and format_frame(like.own[0]).endswith(held.source):
                return like
        place, _, function = held.source.rpartition(" ")
        file, _, line = place.rpartition(":")
        return self._lines.setdefault(
            held.source, StackFacts((*facts.python[:1], (function, file, int(line) if line.isdecimal() else 0)))
        )

    @property
    def owners(self) -> dict[int, Owner]:
        """The recorded tensors of each allocation (a row of the replay) that the run knows."""
        return self._owners[0]

    @property
    def unmatched_entries(self) -> int:
        """How many recorded owners on this device match no allocation of the history."""
        return self._owners[1]

    def live_rows(self, moment: int) -> list[int]:
        """Return the allocations (rows of the replay) that were live at a moment on the curves."""
        replay = self.history.replay
        return np.flatnonzero((replay.birth < moment) & (replay.freed >= moment)).tolist()

    def selects(self, rows: list[int], wanted: Filter) -> list[bool]:
        """Return for each allocation whether a filter wants it."""
        sizes, text = self.history.replay.size_bytes, wanted.stack
        return [int(sizes[row]) >= wanted.min_bytes and (text is None or self._mentions(row, text)) for row in rows]

    def phase_peaks(self) -> tuple[PhasePeak, ...]:
        """Return each phase's peak, in the order in which they first occur."""
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
        return text in owner or any(text in frame for frame in self.stacks.of(row).user_first)

    @cached_property
    def _owners(self) -> tuple[dict[int, Owner], int]:
        if self.recorded is None:
            return {}, 0
        return match_owners(self.recorded, self.device.index, self.history.replay, self.timeline)
