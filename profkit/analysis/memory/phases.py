"""Phases and steps on the time axis of a snapshot, from the annotations that were recorded with it.

A snapshot holds the ``record_function`` ranges of user scope. Those with the name of a phase are phases: profkit's own
names (`profkit.names.PHASES`), common short forms, torch's ``Optimizer.step#…``, and the globs that the user gives for
a phase. Phases do not overlap: of nested ones the outermost counts. What a checkpoint computes again within the
backward pass is noted besides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

import numpy as np

from profkit.names import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE, STEP, WARMUP
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

    Args:
        named: phase name → glob on the names of annotations; these take precedence.
        steps: steps that the run recorded; if there are none, annotations give them, else the ends of the optimizer's
            steps.
    """
    events = device.events
    times = np.maximum.accumulate(events.time_us) if len(events) else events.time_us
    if not events.has_times or not len(events):
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
