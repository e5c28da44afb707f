"""Fits a recorded step to the steps that nothing recorded: a profiler slows the host, and the GPU a little.

- One factor on the host's time within phases, so that their sum on the GPU's clock is what it was unprofiled. Pauses
  of over `PAUSE_NS` between two calls stay: no profiler makes them. Where the GPU sets the pace, many factors fit; all
  that fit are kept.
- Another one on the host's time outside of the phases, so that the whole step is as long as unprofiled.
- Waits for data are as long as unprofiled: in recorded steps a loader is further ahead, or behind.
- Tracing adds a little between two operations: what phases last even on the fastest host, and did not unprofiled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from profkit.analysis.step_replay.columns import HOST, LAUNCH, NONE, StepColumns
from profkit.analysis.step_replay.replay import Constants, Proof, Replayed, run, run_steadily
from profkit.trace.columns import Bools, Ints

PAUSE_NS = 1_000_000

SLOWEST, FASTEST = 1.15, 0.2
"""The factors that are tried: a recording has made the host up to five times slower, and never faster."""

PROFILED_HOST = 0.4
"""A profiler leaves at least this part of the host's time without it: of programs on H200s it was 0.31 to 0.82."""

SLOWER_GPU = 0.03
"""By no larger share does tracing slow the GPU."""

_MOST_TRACING_NS = 800
"""Tracing adds no more than this between two operations: on H200s it was 100 to 600 ns."""

_LARGE_PHASE = 0.1
"""Phases of a smaller share of all say nothing of what tracing adds."""

_OUTSIDE_ROUNDS = 3
_SLOWEST_OUTSIDE = 2.0
"""What Python does between phases may differ from step to step as much as this; no profiler speeds it up."""

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

    ``parts_ns`` are the parts of ``after_ns`` that the host's factors scale, as in `Phases`.
    """

    call: int
    after_ns: int
    parts_ns: tuple[int, int, int]


@dataclass(frozen=True)
class Phases:
    """The phases of a step, on the host, by name; they do not overlap.

    ``parts_ns`` are, by call, the parts of the gap before it that lie within phases, in waits for data, and elsewhere;
    the first is 0 in pauses. The host's factor scales the first; ``waiting`` and ``outside`` scale the others.
    """

    marks: Mapping[str, Sequence[tuple[Mark, Mark]]]
    parts_ns: Ints
    is_inside: Bools
    """Whether each call lies within a phase."""
    waiting: float = 1.0
    outside: float = 1.0

    def time_ns(self, step: StepColumns, found: Replayed, factor: float, names: Iterable[str]) -> int:
        """Return how long the phases took by events that are recorded at their begin and end."""
        latest = _latest_on_busiest(step, found)

        def passed(mark: Mark) -> int:
            launched = 0 if mark.call == NONE else step.launches[mark.call][1]
            return max(self._passes_ns(mark, found, factor), int(latest[launched]))

        return sum(passed(end) - passed(begin) for name in names for begin, end in self.marks.get(name, ()))

    def host_ns(self, found: Replayed, factor: float, names: Iterable[str]) -> int:
        """Return how long the host was in the phases."""
        marks = [pair for name in names for pair in self.marks.get(name, ())]
        return sum(self._passes_ns(end, found, factor) - self._passes_ns(begin, found, factor) for begin, end in marks)

    def _passes_ns(self, mark: Mark, found: Replayed, factor: float) -> int:
        """Return when the host passes a mark."""
        ended_ns = 0 if mark.call == NONE else found.call_end_ns[mark.call]
        scaled_ns = sum(part * (by - 1) for part, by in zip(mark.parts_ns, self._factors(factor), strict=True))
        return ended_ns + mark.after_ns + round(scaled_ns)

    def _factors(self, factor: float) -> tuple[float, float, float]:
        return factor, self.waiting, self.outside

    def scale_host(self, step: StepColumns, factor: float) -> StepColumns:
        """Return the step with the host's time scaled; waits and copies keep their own times."""
        kind, own, gap = np.array(step.kind), np.array(step.own_ns), np.array(step.gap_ns)
        changes = (np.array(self._factors(factor)) - 1) @ self.parts_ns
        scaled = np.rint(own * np.where(self.is_inside, factor, self.outside)).astype(np.int64)
        return replace(
            step,
            gap_ns=(gap + np.rint(changes).astype(np.int64)).tolist(),
            own_ns=np.where((kind == HOST) | (kind == LAUNCH), scaled, own).tolist(),
        )

    def outside_ns(self, step: StepColumns) -> int:
        """Return the host's recorded time outside of phases and of waits for data."""
        kind, own = np.array(step.kind), np.array(step.own_ns)
        is_outside = ~self.is_inside & ((kind == HOST) | (kind == LAUNCH))
        return int(self.parts_ns[_OUTSIDE].sum() + own[is_outside].sum())

    def wait_ns(self) -> int:
        """Return the recorded waits for data."""
        return int(self.parts_ns[_WAITING].sum())


_WAITING, _OUTSIDE = 1, 2


def find_phases(
    step: StepColumns, intervals: Mapping[str, Sequence[tuple[int, int]]], waits: Sequence[tuple[int, int]] = ()
) -> Phases:
    """Return the phases of a step from when each began and ended on the host, in nanoseconds since the step began.

    Args:
        waits: when the host waited for data; what lies within a phase counts as the phase.
    """
    inside = sorted(interval for some in intervals.values() for interval in some)
    ends = _latest_ends(step)

    def split(start_ns: int, end_ns: int, *, is_pause: bool) -> tuple[int, int, int]:
        within = _overlap(inside, start_ns, end_ns)
        waiting = min(_overlap(waits, start_ns, end_ns), end_ns - start_ns - within)
        return 0 if is_pause else within, waiting, end_ns - start_ns - within - waiting

    def mark(time_ns: int) -> Mark:
        call = bisect_right(ends, time_ns) - 1
        ended = 0 if call == NONE else step.call_end_ns[call]
        after = max(0, time_ns - ended)
        following = step.call_start_ns[call + 1] if call + 1 < len(ends) else time_ns
        return Mark(call, after, split(ended, ended + after, is_pause=following - ended > PAUSE_NS))

    parts = [
        split(start - gap, start, is_pause=gap > PAUSE_NS) if gap > 0 else (0, 0, 0)
        for start, gap in zip(step.call_start_ns, step.gap_ns, strict=True)
    ]
    marks = {name: [(mark(start), mark(end)) for start, end in some] for name, some in intervals.items()}
    is_inside = np.array([_overlap(inside, start, start + 1) > 0 for start in step.call_start_ns], dtype=np.bool_)
    return Phases(marks, np.array(parts, dtype=np.int64).reshape(-1, 3).T, is_inside)


def _overlap(spans: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """Return how much of a time lies in spans that are sorted and do not overlap."""
    first = max(0, bisect_right(spans, start_ns, key=_begin) - 1)
    last = bisect_right(spans, end_ns, key=_begin)
    return sum(max(0, min(end, end_ns) - max(start, start_ns)) for start, end in spans[first:last])


def _begin(span: tuple[int, int]) -> int:
    return span[0]


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

    # What tracing adds differs from step to step: a step that is too long by less than that still is the GPU's.
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


def measure_tracing(
    step: StepColumns, constants: Constants, phases: Phases, unprofiled_ns: Mapping[str, int]
) -> float | None:
    """Return what tracing adds between two operations: phases last longer by so much even on the fastest host.

    None where the host sets the pace, or where another reason makes a phase longer than tracing can.
    """
    fastest = phases.scale_host(step, FASTEST)
    found = run(fastest, constants)
    whole_ns = sum(unprofiled_ns.values())
    excess_ns, operations = 0, 0
    for name, time_ns in unprofiled_ns.items():
        late_ns = phases.time_ns(fastest, found, FASTEST, [name]) - time_ns
        if name in phases.marks and time_ns > _LARGE_PHASE * whole_ns and 0 < late_ns <= SLOWER_GPU * time_ns:
            excess_ns += late_ns
            operations += sum(
                (0 if end.call == NONE else step.launches[end.call][1])
                - (0 if begin.call == NONE else step.launches[begin.call][1])
                for begin, end in phases.marks[name]
            )
    return min(excess_ns / operations, _MOST_TRACING_NS) if operations else None


def without_tracing(step: StepColumns, added_ns: float) -> StepColumns:
    """Return the step with less time between two operations, of none more than it has."""
    between = [time_ns if time_ns <= 0 else max(0, round(time_ns - added_ns)) for time_ns in step.between_ns]
    return replace(step, between_ns=between)


def fit_outside(step: StepColumns, constants: Constants, phases: Phases, factor: float, step_ns: int) -> Phases:
    """Return the phases with the factor outside of them with which a step lasts ``step_ns``, or comes near that."""
    outside_ns = phases.outside_ns(step)
    best, best_ns = phases, None
    for _ in range(_OUTSIDE_ROUNDS):
        late_ns = run_steadily(phases.scale_host(step, factor), constants).step_ns - step_ns
        if best_ns is None or abs(late_ns) < abs(best_ns) / 2:
            best, best_ns = phases, late_ns
        if not outside_ns:
            break
        phases = replace(phases, outside=min(max(phases.outside - late_ns / outside_ns, FASTEST), _SLOWEST_OUTSIDE))
    return best


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
