"""Fits a recorded step to the steps that nothing recorded: a profiler slows the host, and the GPU a little.

- One factor on the host's time within phases, so that their sum on the GPU's clock is what it was unprofiled. Pauses
  of over `PAUSE_NS` between two calls stay: no profiler makes them. Where the GPU sets the pace, many factors fit; all
  that fit are kept.
- Of phases in which Python runs, each takes as much of that as unprofiled: hooks slow down the forward pass most.
- Another one on the host's time outside of the phases, so that the whole step is as long as unprofiled.
- Waits for data are as long as unprofiled: in recorded steps a loader is further ahead, or behind. Those of which one
  of many steps has all are added to the step (`StepColumns.late_ns`).
- Tracing adds a little between two operations: what phases last even on the fastest host, and did not unprofiled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from profkit.analysis.step_replay import HOST, LAUNCH, NONE, StepColumns
from profkit.analysis.step_replay.replay import STEADY, Constants, Proof, Replayed, run_steadily
from profkit.trace.columns import Bools, Ints

PAUSE_NS = 1_000_000

SLOWEST, FASTEST = 1.15, 0.2
"""The factors that are tried: a recording has made the host up to five times slower, and never faster."""

USUAL_HOST = (0.42, 0.76)
"""Between these lie the factors of most recordings on H200s that say them; others' are taken to."""

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

_HELD = 0.1
"""A host whose time in the phases hardly grows with its factor is held by a full queue, or waits: it says nothing."""

_PYTHONS = 0.8
"""A phase is Python's if it takes this share of the host's time there."""

_MOST_UNEVEN = 2.0
"""By no more than this is the host slower or faster in one phase than in all together."""

_ROUNDS = 15
_HALVED = 2
_NEAR_ENOUGH, _FINE = 0.05, 0.003
"""A factor is found once the phases take as long as wanted but for this share of their spread, or to this."""

_OF_OPERATIONS = 0.02
"""A stream on which a step begins and ends is the program's own if it has this share of all."""

_IDENTIFIED = 0.25
"""Factors that fit and lie this close together are known."""


@dataclass(frozen=True)
class Mark:
    """A moment of the host: ``after_ns`` after the end of ``call``, `NONE` for the step's beginning.

    ``parts_ns`` are the parts of ``after_ns`` that the host's factors scale, as in `Phases`.
    """

    call: int
    after_ns: int
    parts_ns: tuple[int, ...]


@dataclass(frozen=True)
class Phases:
    """The phases of a step, on the host, by name; they do not overlap.

    ``parts_ns`` are, by call, the parts of the gap before it that lie in each phase, in waits for data, and elsewhere;
    those of phases are 0 in pauses. The host's factor, times what is ``uneven`` of each phase, scales them; ``waiting``
    and ``outside`` scale the others. ``phase`` is that of each call by its place in ``marks``, `NONE` outside.
    """

    marks: Mapping[str, Sequence[tuple[Mark, Mark]]]
    parts_ns: Ints
    phase: Ints
    uneven: tuple[float, ...]
    waiting: float = 1.0
    outside: float = 1.0

    def time_ns(self, step: StepColumns, found: Replayed, factor: float, names: Iterable[str]) -> int:
        """Return how long the phases took by events that are recorded at their begin and end."""
        latest = _latest_on_main(step, found)

        def passed(mark: Mark) -> int:
            launched = 0 if mark.call == NONE else step.launches[mark.call][1]
            return max(self._passes_ns(mark, found, factor), int(latest[launched]))

        return sum(passed(end) - passed(begin) for name in names for begin, end in self.marks.get(name, ()))

    def host_ns(self, found: Replayed, factor: float, names: Iterable[str]) -> int:
        marks = [pair for name in names for pair in self.marks.get(name, ())]
        return sum(self._passes_ns(end, found, factor) - self._passes_ns(begin, found, factor) for begin, end in marks)

    def _passes_ns(self, mark: Mark, found: Replayed, factor: float) -> int:
        ended_ns = 0 if mark.call == NONE else found.call_end_ns[mark.call]
        scaled_ns = sum(part * (by - 1) for part, by in zip(mark.parts_ns, self._factors(factor), strict=True))
        return ended_ns + mark.after_ns + round(scaled_ns)

    def python_ns(self, step: StepColumns, factor: float) -> list[float]:
        """Return how long Python and launches take in each phase, without pauses and waits."""
        own = np.where(_do_not_wait(step), step.own_ns, 0)
        times = [int(self.parts_ns[at].sum() + own[self.phase == at].sum()) for at in range(len(self.marks))]
        return [time_ns * by for time_ns, by in zip(times, self._factors(factor), strict=False)]

    def _factors(self, factor: float) -> tuple[float, ...]:
        return *(factor * by for by in self.uneven), self.waiting, self.outside

    def scale_host(self, step: StepColumns, factor: float) -> StepColumns:
        """Return the step with the host's time scaled; waits and copies keep their own times."""
        own, gap = np.array(step.own_ns), np.array(step.gap_ns)
        factors = np.array(self._factors(factor))
        changes = (factors - 1) @ self.parts_ns
        scaled = np.rint(own * factors[self.phase]).astype(np.int64)  # the last factor is that of what is in no phase
        return replace(
            step,
            gap_ns=(gap + np.rint(changes).astype(np.int64)).tolist(),
            own_ns=np.where(_do_not_wait(step), scaled, own).tolist(),
        )

    def outside_ns(self, step: StepColumns) -> int:
        is_outside = (self.phase == NONE) & _do_not_wait(step)
        return int(self.parts_ns[_OUTSIDE].sum() + np.array(step.own_ns)[is_outside].sum())

    def wait_ns(self) -> int:
        return int(self.parts_ns[_WAITING].sum())


_WAITING, _OUTSIDE = -2, -1


def _do_not_wait(step: StepColumns) -> Bools:
    kind = np.array(step.kind)
    found: Bools = (kind == HOST) | (kind == LAUNCH)
    return found


def find_phases(
    step: StepColumns, intervals: Mapping[str, Sequence[tuple[int, int]]], waits: Sequence[tuple[int, int]] = ()
) -> Phases:
    """Return the phases of a step from when each began and ended on the host, in nanoseconds since the step began.

    Args:
        waits: when the host waited for data; what lies within a phase counts as the phase.
    """
    within, waiting = [_Covered(some) for some in intervals.values()], _Covered(waits)
    ends = _latest_ends(step)

    def split(start_ns: Ints, end_ns: Ints, is_pause: Bools) -> Ints:
        in_phases = [phase.between(start_ns, end_ns) for phase in within]
        rest_ns = end_ns - start_ns - sum(in_phases)
        for_data = np.minimum(waiting.between(start_ns, end_ns), rest_ns)
        return np.array([*(np.where(is_pause, 0, own_ns) for own_ns in in_phases), for_data, rest_ns - for_data])

    def mark(time_ns: int) -> Mark:
        call = bisect_right(ends, time_ns) - 1
        ended = 0 if call == NONE else step.call_end_ns[call]
        after = max(0, time_ns - ended)
        following = step.call_start_ns[call + 1] if call + 1 < len(ends) else time_ns
        edges = np.array([[ended], [ended + after]], dtype=np.int64)
        parts = split(edges[0], edges[1], np.array([following - ended > PAUSE_NS]))[:, 0].tolist()
        return Mark(call, after, tuple(parts))

    starts, gaps = (np.array(column, dtype=np.int64) for column in (step.call_start_ns, step.gap_ns))
    gaps = np.maximum(gaps, 0)
    marks = {name: [(mark(start), mark(end)) for start, end in some] for name, some in intervals.items()}
    parts = split(starts - gaps, starts, gaps > PAUSE_NS)
    phase = np.full(len(starts), NONE)
    for at, covered in enumerate(within):
        phase[covered.between(starts, starts + 1) > 0] = at
    return Phases(marks, parts, phase, (1.0,) * len(marks))


class _Covered:
    """How much of a time spans cover that do not overlap."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._edges = np.array(sorted(spans), dtype=np.float64).reshape(-1)
        lengths = np.where(np.arange(len(self._edges)) % 2, np.diff(self._edges, prepend=0.0), 0.0)
        self._until = np.cumsum(lengths)

    def between(self, start_ns: Ints, end_ns: Ints) -> Ints:
        if not len(self._edges):
            return np.zeros_like(start_ns)
        before, after = (np.rint(np.interp(time, self._edges, self._until)) for time in (start_ns, end_ns))
        covered: Ints = (after - before).astype(np.int64)
        return covered


def _latest_ends(step: StepColumns) -> list[int]:
    latest, ends = 0, []
    for end in step.call_end_ns:
        latest = max(latest, end)
        ends.append(latest)
    return ends


def _latest_on_main(step: StepColumns, found: Replayed) -> Ints:
    stream, ends = np.array(step.stream, dtype=np.int64), np.array(found.end_ns, dtype=np.int64)
    if not len(stream):
        return np.zeros(1, dtype=np.int64)
    main = _find_main(stream)
    free_ns = step.free_ns.get(main, 0)
    return np.maximum.accumulate(np.concatenate([[free_ns], np.where(stream == main, ends, free_ns)]))


def _find_main(stream: Ints) -> int:
    """Return the stream on which a program records its events: where its step begins and ends, else the busiest.

    cuDNN runs the layers of a recurrent network on streams of its own, one of which may have most operations.
    """
    counts = np.bincount(stream)
    first, last = int(stream[0]), int(stream[-1])
    return last if first == last and counts[last] >= _OF_OPERATIONS * len(stream) else int(counts.argmax())


@dataclass(frozen=True)
class Fit:
    """The factors on the host's time with which a step fits the unprofiled ones: the least, the middle, the most."""

    least: float
    middle: float
    most: float
    open: float | None = None
    """By how much the factors differ that fit, where the recording alone does not say which; of several steps the most.
    """

    @property
    def is_identified(self) -> bool:
        """Whether the recording says what the factor is; if the GPU sets the pace, it does not."""
        return self.range <= _IDENTIFIED

    @property
    def range(self) -> float:
        """By how much the factors differ with which the recording fits."""
        return self.most - self.least if self.open is None else self.open

    def as_usual(self) -> Fit:
        """Return the factors that fit and are usual, of a recording that does not say its own; all if none is."""
        least, most = max(self.least, USUAL_HOST[0]), min(self.most, USUAL_HOST[1])
        if self.is_identified or least > most:
            return self
        return Fit(least, (least + most) / 2, most, self.range)


AS_RECORDED = Fit(1.0, 1.0, 1.0)


_PROVEN = ("recorded_ns", "replayed_ns", "error", "operations_p50_ns", "operations_p95_ns")


def describe_replay(proof: Proof | None, fit: Fit) -> dict[str, Any] | None:
    """Return how well a replay is proven, as JSON-ready data; None without one."""
    if proof is None:
        return None
    return {
        **{name: getattr(proof, name) for name in _PROVEN},
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

    Where many do, those stand with which the host is in the phases as long as unprofiled, ``on_host_ns``, and that are
    usual. None if none does: what keeps the step from fitting is not the host's speed.
    """

    @cache
    def replayed(factor: float) -> tuple[StepColumns, Replayed]:
        steady = run_steadily(phases.scale_host(step, factor), constants)
        return steady.begun, steady.found

    known = [name for name in unprofiled_ns if name in phases.marks]
    wanted_ns = sum(unprofiled_ns[name] for name in known)

    def excess_ns(factor: float) -> int:
        return phases.time_ns(*replayed(factor), factor, known) - wanted_ns

    # What tracing adds differs from step to step: a step that is off by less than that still is the GPU's.
    off_ns = abs(excess_ns(FASTEST)) if known else 0
    if spread_ns < off_ns <= SLOWER_GPU * wanted_ns:
        spread_ns += off_ns
    fit = _fit(excess_ns, spread_ns) if known else None
    on_host = [name for name in on_host_ns or () if name in phases.marks]
    # Where even the fastest host fits, the GPU sets the pace, which says nothing of the host but that it is in time.
    if fit is None or (fit.is_identified and fit.least > FASTEST):
        return fit
    if on_host_ns is None or not on_host:
        return fit.as_usual()
    host_ns = sum(on_host_ns[name] for name in on_host)

    @cache
    def on_host_with(factor: float) -> int:
        return phases.host_ns(replayed(factor)[1], factor, on_host)

    if on_host_with(fit.most) < on_host_with(fit.least) * (1 + _HELD * (fit.most / fit.least - 1)):
        return fit.as_usual()
    found = _fit(lambda factor: on_host_with(factor) - host_ns, round(_HOST_SPREAD * host_ns))
    if found is None or found.most < fit.least - _APART or found.least > fit.most + _APART:
        return fit.as_usual()
    least, most = min(max(fit.least, found.least), fit.most), max(min(fit.most, found.most), fit.least)
    return Fit(least, (least + most) / 2, most).as_usual()


def level_phases(
    step: StepColumns, constants: Constants, phases: Phases, factor: float, on_host_ns: Mapping[str, int]
) -> Phases:
    """Return the phases with the host's time in each as uneven as it is unprofiled: hooks slow the forward pass most.

    Phases in which the host waits, or stands still, for more than a part of the time keep the common factor, and the
    others together take as long as with it.
    """
    found = run_steadily(phases.scale_host(step, factor), constants).found
    python_ns = dict(zip(phases.marks, phases.python_ns(step, factor), strict=True))
    uneven = {}
    for name, own_ns in python_ns.items():
        host_ns, wanted_ns = phases.host_ns(found, factor, [name]), on_host_ns.get(name, 0)
        if wanted_ns and own_ns > _PYTHONS * host_ns:
            uneven[name] = min(max((wanted_ns - host_ns + own_ns) / own_ns, 1 / _MOST_UNEVEN), _MOST_UNEVEN)
    whole_ns = sum(python_ns[name] * by for name, by in uneven.items())
    level = sum(python_ns[name] for name in uneven) / (whole_ns or 1)
    return replace(phases, uneven=tuple(uneven[name] * level if name in uneven else 1.0 for name in phases.marks))


def measure_tracing(
    step: StepColumns, constants: Constants, phases: Phases, unprofiled_ns: Mapping[str, int]
) -> float | None:
    """Return what tracing adds between two operations: phases last longer by so much even on the fastest host.

    None where the host sets the pace, or where another reason makes a phase longer than tracing can.
    """
    steady = run_steadily(phases.scale_host(step, FASTEST), constants)
    whole_ns = sum(unprofiled_ns.values())
    excess_ns, operations = 0, 0
    for name, time_ns in unprofiled_ns.items():
        late_ns = phases.time_ns(steady.begun, steady.found, FASTEST, [name]) - time_ns
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
        if not outside_ns or abs(late_ns) <= STEADY * step_ns:
            break
        phases = replace(phases, outside=min(max(phases.outside - late_ns / outside_ns, FASTEST), _SLOWEST_OUTSIDE))
    return best


def _fit(excess_ns: Callable[[float], int], spread_ns: int) -> Fit | None:
    known = {factor: excess_ns(factor) for factor in (FASTEST, SLOWEST)}
    if known[FASTEST] > spread_ns or known[SLOWEST] < -spread_ns:
        return None
    least, most = (_cross(excess_ns, wanted_ns, spread_ns, known) for wanted_ns in (-spread_ns, spread_ns))
    return Fit(least, (least + most) / 2, most)


def _cross(excess_ns: Callable[[float], int], wanted_ns: int, spread_ns: int, known: dict[float, int]) -> float:
    for number in range(_ROUNDS):
        high = min((factor for factor, excess in known.items() if excess >= wanted_ns), default=None)
        if high is None or high == FASTEST:
            break
        low = max(factor for factor in known if factor < high)
        # Between two bounds where it would be if it grew evenly; it seldom does, so that every third time halves them.
        share = (wanted_ns - known[low]) / (known[high] - known[low])
        middle = low + (high - low) * (0.5 if number % 3 == _HALVED else share)
        known[middle] = excess_ns(middle)
        if abs(known[middle] - wanted_ns) <= spread_ns * _NEAR_ENOUGH or high - low < _FINE:
            return middle
    return SLOWEST if high is None else high
