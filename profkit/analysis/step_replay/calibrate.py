"""Fits the host's speed in a recorded step to the steps that nothing recorded: a profiler slows the host, not the GPU.

One factor on the host's time within phases, so that their sum on the GPU's clock is what it was unprofiled. Time
outside of the phases stays, and so do pauses of over `PAUSE_NS` between two calls: no profiler makes them. Where the
GPU sets the pace, many factors fit; all that fit are kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from profkit.analysis.step_replay.columns import HOST, LAUNCH, NONE, StepColumns
from profkit.analysis.step_replay.replay import Constants, Proof, Replayed, run
from profkit.trace.columns import Bools, Ints

PAUSE_NS = 1_000_000

SLOWEST, FASTEST = 1.15, 0.2
"""The factors that are tried: a recording has made the host up to five times slower, and never faster."""

PROFILED_HOST = 0.4
"""A profiler leaves at least this part of the host's time without it: of programs on H200s it was 0.31 to 0.82."""

SLOWER_GPU = 0.03
"""By no larger share does tracing slow the GPU."""

_HOST_SPREAD = 0.03
"""The host's time in the phases of a few recorded steps is that of the others, give or take this share."""

_APART = 0.1
"""What the host's time says of its factor may lie so far from all factors that fit; then the nearest one stands."""

_ROUNDS = 9
"""Halvings of the factors that are tried: to a third of a percent."""

_IDENTIFIED = 0.25
"""Factors that fit and lie this close together are known."""


@dataclass(frozen=True)
class Mark:
    """A moment of the host: ``after_ns`` after the end of ``call``, `NONE` for the step's beginning.

    ``scaled_ns`` is the part of ``after_ns`` that the host's factor scales.
    """

    call: int
    after_ns: int
    scaled_ns: int

    def host_ns(self, found: Replayed, factor: float) -> int:
        """Return when the host passes it."""
        ended_ns = 0 if self.call == NONE else found.call_end_ns[self.call]
        return ended_ns + self.after_ns + round(self.scaled_ns * factor) - self.scaled_ns


@dataclass(frozen=True)
class Phases:
    """The phases of a step, on the host, by name; they do not overlap."""

    marks: Mapping[str, Sequence[tuple[Mark, Mark]]]
    scaled_ns: Ints
    """The part of each call's gap that lies within phases, and that the host's factor scales."""
    is_inside: Bools
    """Whether each call lies within a phase."""

    def time_ns(self, step: StepColumns, found: Replayed, factor: float, names: Iterable[str]) -> int:
        """Return how long the phases took by events that are recorded at their begin and end."""
        latest = _latest_on_busiest(step, found)

        def passed(mark: Mark) -> int:
            launched = 0 if mark.call == NONE else step.launches[mark.call][1]
            return max(mark.host_ns(found, factor), int(latest[launched]))

        return sum(passed(end) - passed(begin) for name in names for begin, end in self.marks.get(name, ()))

    def host_ns(self, found: Replayed, factor: float, names: Iterable[str]) -> int:
        """Return how long the host was in the phases."""
        marks = [pair for name in names for pair in self.marks.get(name, ())]
        return sum(end.host_ns(found, factor) - begin.host_ns(found, factor) for begin, end in marks)

    def scale_host(self, step: StepColumns, factor: float) -> StepColumns:
        """Return the step with the host's time within phases scaled; waits and copies keep their own times."""
        kind, own, scaled = np.array(step.kind), np.array(step.own_ns), self.scaled_ns
        is_scaled = self.is_inside & ((kind == HOST) | (kind == LAUNCH))
        return replace(
            step,
            gap_ns=(np.array(step.gap_ns) + np.rint(scaled * factor).astype(np.int64) - scaled).tolist(),
            own_ns=np.where(is_scaled, np.rint(own * factor).astype(np.int64), own).tolist(),
        )


def find_phases(step: StepColumns, intervals: Mapping[str, Sequence[tuple[int, int]]]) -> Phases:
    """Return the phases of a step from when each began and ended on the host, in nanoseconds since the step began."""
    inside = sorted(interval for some in intervals.values() for interval in some)
    starts = [start for start, _ in inside]
    ends = _latest_ends(step)

    def overlap(start_ns: int, end_ns: int) -> int:
        if end_ns - start_ns > PAUSE_NS:
            return 0
        first = max(0, bisect_right(starts, start_ns) - 1)
        last = bisect_right(starts, end_ns)
        return sum(max(0, min(end, end_ns) - max(start, start_ns)) for start, end in inside[first:last])

    def mark(time_ns: int) -> Mark:
        call = bisect_right(ends, time_ns) - 1
        ended = 0 if call == NONE else step.call_end_ns[call]
        after = max(0, time_ns - ended)
        following = step.call_start_ns[call + 1] if call + 1 < len(ends) else time_ns
        return Mark(call, after, 0 if following - ended > PAUSE_NS else overlap(ended, ended + after))

    gaps = [
        overlap(start - gap, start) if gap > 0 else 0
        for start, gap in zip(step.call_start_ns, step.gap_ns, strict=True)
    ]
    marks = {name: [(mark(start), mark(end)) for start, end in some] for name, some in intervals.items()}
    is_inside = np.array([overlap(start, start + 1) > 0 for start in step.call_start_ns], dtype=np.bool_)
    return Phases(marks, np.array(gaps, dtype=np.int64), is_inside)


def _latest_ends(step: StepColumns) -> list[int]:
    """Return until when each call and all calls before it had ended."""
    latest, ends = 0, []
    for end in step.call_end_ns:
        latest = max(latest, end)
        ends.append(latest)
    return ends


def _latest_on_busiest(step: StepColumns, found: Replayed) -> Ints:
    """Return when the busiest stream had ended its work among the first operations, for each number of them."""
    stream, ends = np.array(step.stream, dtype=np.int64), np.array(found.end_ns, dtype=np.int64)
    if not len(stream):
        return np.zeros(1, dtype=np.int64)
    busiest = int(np.bincount(stream).argmax())
    free_ns = step.free_ns.get(busiest, 0)
    return np.maximum.accumulate(np.concatenate([[free_ns], np.where(stream == busiest, ends, free_ns)]))


@dataclass(frozen=True)
class Fit:
    """The factors on the host's time with which a step fits the unprofiled ones: the least, the middle, the most."""

    least: float
    middle: float
    most: float
    open: float | None = None
    """Of several steps: by how much the factors differ that fit the one of which most do."""

    @property
    def is_identified(self) -> bool:
        """Whether the recording says what the factor is; if the GPU sets the pace, it does not."""
        return (self.most - self.least if self.open is None else self.open) <= _IDENTIFIED


AS_RECORDED = Fit(1.0, 1.0, 1.0)


def describe_replay(proof: Proof | None, fit: Fit) -> dict[str, Any] | None:
    """Return how well a replay is proven, as JSON-ready data; None without one."""
    if proof is None:
        return None
    return {
        "recorded_ns": proof.recorded_ns,
        "replayed_ns": proof.replayed_ns,
        "error": proof.error,
        "operations_p50_ns": proof.operations_p50_ns,
        "operations_p95_ns": proof.operations_p95_ns,
        "host_factor": [fit.least, fit.most],
        "identified": fit.is_identified,
    }


def fit_host(
    step: StepColumns,
    constants: Constants,
    phases: Phases,
    unprofiled_ns: Mapping[str, int],
    spread_ns: int,
    *,
    on_host_ns: Mapping[str, int] | None = None,
) -> Fit | None:
    """Return the factors with which phases take what they take unprofiled, in all, give or take ``spread_ns``.

    Where many do, those stand with which the host is in the phases as long as unprofiled, ``on_host_ns``. None if none
    does: what keeps the step from fitting is not the host's speed.
    """

    @cache
    def replayed(factor: float) -> tuple[StepColumns, Replayed]:
        scaled = phases.scale_host(step, factor)
        return scaled, run(scaled, constants)

    known = [name for name in unprofiled_ns if name in phases.marks]
    wanted_ns = sum(unprofiled_ns[name] for name in known)

    def excess_ns(factor: float) -> int:
        return phases.time_ns(*replayed(factor), factor, known) - wanted_ns

    # Where the GPU sets the pace, tracing it shows: between two operations a tenth of a microsecond more passes.
    too_slow_ns = excess_ns(FASTEST) if known else 0
    if spread_ns < too_slow_ns <= SLOWER_GPU * wanted_ns:
        spread_ns += too_slow_ns
    fit = _fit(excess_ns, spread_ns) if known else None
    on_host = [name for name in on_host_ns or () if name in phases.marks]
    if fit is None or fit.is_identified or on_host_ns is None or not on_host:
        return fit
    host_ns = sum(on_host_ns[name] for name in on_host)
    found = _fit(
        lambda factor: phases.host_ns(replayed(factor)[1], factor, on_host) - host_ns, round(_HOST_SPREAD * host_ns)
    )
    if found is None or found.most < fit.least - _APART or found.least > fit.most + _APART:
        return fit
    least, most = min(max(fit.least, found.least), fit.most), max(min(fit.most, found.most), fit.least)
    return Fit(least, (least + most) / 2, most)


def _fit(excess_ns: Callable[[float], int], spread_ns: int) -> Fit | None:
    """Return the factors with which what is asked is at most so far from 0, None if there is none."""
    if excess_ns(FASTEST) > spread_ns or excess_ns(SLOWEST) < -spread_ns:
        return None
    least = _first(lambda factor: excess_ns(factor) >= -spread_ns)
    most = _first(lambda factor: excess_ns(factor) > spread_ns)
    return Fit(least, (least + most) / 2, most)


def _first(holds: Callable[[float], bool]) -> float:
    """Return the least factor from which on something holds, which it does for all larger ones."""
    low, high = FASTEST, SLOWEST
    if holds(low):
        return low
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
