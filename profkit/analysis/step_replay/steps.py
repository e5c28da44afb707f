"""The recorded steps of a trace, ready to be run again: proven on themselves, and fitted to the unprofiled steps."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from profkit.analysis.kernels import categorize
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.step_replay import NONE, ProcessCalls, StepColumns
from profkit.analysis.step_replay.calibrate import (
    AS_RECORDED,
    PAUSE_NS,
    PROFILED_HOST,
    Fit,
    Phases,
    find_phases,
    fit_host,
    fit_outside,
    level_phases,
    measure_tracing,
    without_tracing,
)
from profkit.analysis.step_replay.limits import (
    OUTSIDE,
    Cause,
    Limit,
    LimitPart,
    Piece,
    RankRun,
    StepLimits,
    classify_piece,
    cut_before,
    find_limits,
    join_parts,
    place_lines,
)
from profkit.analysis.step_replay.replay import (
    Constants,
    Proof,
    Steady,
    measure_constants,
    prepare,
    prove,
    run,
    run_steadily,
)
from profkit.analysis.time_account import measured_ranges
from profkit.analysis.time_account.account import TimeAccount, share_out
from profkit.analysis.time_account.gpu_time import is_data_wait
from profkit.analysis.tree.modules import Place, places_of_ranges
from profkit.names import DATA, STEP
from profkit.run.lines import LineTime, lines_of_trainers
from profkit.trace.columns import Ints, Trace, rows_by_value
from profkit.trace.nesting import NO_RANGE

if TYPE_CHECKING:
    from profkit.analysis.time_account.step_times import StepTimes

FROM_HOST = "copy from the host"
"""The name of an operation that copies from the host's memory."""

MOST_STEPS = 5
"""More recorded steps than these say nothing new, and take as long again."""

MOST_CALLS = 250_000
"""The last steps that make no more calls than these are enough, and the last one in any case."""

LARGEST_ERROR = 0.02
"""A step whose replay ends further off than this share of it predicts nothing; what is less widens a prediction."""

NOT_FITTED = "no speed of the host makes the recorded steps take as long as the unprofiled ones"
"""Why nothing is predicted of a step by itself; ranks that waited for each other are fitted together."""

_LEAST_SPREAD = 0.005
"""Unprofiled steps that differ less than this share of the step are not told apart."""

_IN_BURSTS = 0.5
"""Where recorded steps wait for data for less than this part of what unprofiled ones do, those wait in bursts."""
_FOREIGN_PAUSE = 0.25
_ALLOCATES = re.compile(
    r"^(cuda|cu)(Malloc|Free|HostAlloc|Host(Un)?[Rr]egister|Mem(Alloc|Free|Create|Release|Map|Unmap))"
)


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """A recorded step, and how it runs: ``columns`` are ready to run, ``fit`` is the host's speed in them.

    ``names`` and ``categories`` are those of its operations by their rows; ``phase`` is that of each call, and
    ``gap_phases`` are those of the Python before it, with their nanoseconds. ``module`` are those of the calls,
    ``operation_module`` those of the operations. ``allocating`` are the calls that allocate or free memory,
    ``recomputing`` those of what a checkpoint computes again. ``copied_bytes`` is the size of copies, by row.
    """

    columns: StepColumns
    phases: Phases
    proof: Proof
    fit: Fit
    names: Mapping[int, str]
    categories: Mapping[int, str]
    phase: Sequence[str]
    gap_phases: Sequence[Mapping[str, int]]
    module: Sequence[str | None]
    operation_module: Sequence[str | None]
    allocating: Collection[int] = ()
    recomputing: Collection[int] = ()
    copied_bytes: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def operation_names(self) -> list[str]:
        """The names of the operations, in the order of the columns."""
        return [self.names[row] for row in self.columns.row.tolist()]

    @cached_property
    def paused_ns(self) -> int:
        """How long the host stood still in long pauses, without waits for data."""
        gaps = zip(self.columns.gap_ns, self.gap_phases, strict=True)
        return sum(gap_ns - phases.get(DATA, 0) for gap_ns, phases in gaps if gap_ns > PAUSE_NS)

    def calls_in(self, phases: Collection[str]) -> list[int]:
        return [call for call, phase in enumerate(self.phase) if phase in phases]

    def at_speed(self, factor: float) -> StepColumns:
        return self.phases.scale_host(self.columns, factor)

    def find_parts(self, step: StepColumns, steady: Steady, whole_ns: int) -> list[LimitPart]:
        """Return what limits this step, or a changed form of it, piece by piece, scaled to sum up to ``whole_ns``."""
        chain = find_limits([RankRun(step, steady.found)])
        pieces = cut_before((piece for _, piece in chain), steady.ended_ns)
        parts = [part for piece in pieces for part in self.place(step, piece)]
        if step.late_ns:
            parts.append(LimitPart(Limit.PYTHON, Cause.PYTHON.value, DATA, None, step.late_ns))
        times = share_out(whole_ns, [part.time_ns for part in parts])
        return [part._replace(time_ns=time_ns) for part, time_ns in zip(parts, times, strict=True)]

    def place(self, step: StepColumns, piece: Piece) -> Iterator[LimitPart]:
        at, is_call, time_ns = piece.to.at, piece.to.is_call, piece.end_ns - piece.start_ns
        phases: Mapping[str, int] = {self.phase[at if is_call else step.launcher[at]]: time_ns}
        if piece.cause == Cause.PYTHON:
            phases = self.gap_phases[at] or phases
        category = "" if is_call else self.categories[int(step.row[at])]
        cause = category if piece.cause == Cause.OPERATION else piece.cause.value
        if piece.cause == Cause.CALL and at in self.allocating:
            cause = Cause.ALLOCATING.value
        module = (self.module if is_call else self.operation_module)[at]
        for phase, share_ns in zip(phases, share_out(time_ns, [*phases.values()]), strict=True):
            yield LimitPart(classify_piece(piece, step, cause, phase), cause, phase, module, share_ns)


@dataclass(frozen=True, eq=False)
class StepReplay:
    """The recorded steps of one process. ``refusal`` says why nothing may be predicted from them, None if it may.

    ``unprofiled_ns`` is the step time without a profiler, None if it was not taken; ``recorded_ns`` is the recorded
    one. Both are those of the time account.
    """

    constants: Constants
    steps: tuple[ReplayedStep, ...]
    unprofiled_ns: int | None
    spread_ns: int
    refusal: str | None
    recorded_ns: int | None = None
    variation: float = 0.0
    """By which share of the unprofiled step most of them lie apart, waits for data aside."""

    @property
    def now_ns(self) -> int | None:
        """The measured step: unprofiled if that is known, else as recorded."""
        return self.unprofiled_ns or self.recorded_ns

    @property
    def proof(self) -> Proof | None:
        """The proof of the step that was replayed worst."""
        return max((step.proof for step in self.steps), key=lambda proof: abs(proof.error), default=None)

    @property
    def fit(self) -> Fit:
        """The factors on the host's time of all steps: the least, the middle one's median, the most."""
        fits = [step.fit for step in self.fitted] or [AS_RECORDED]
        return Fit(
            min(fit.least for fit in fits),
            median(fit.middle for fit in fits),
            max(fit.most for fit in fits),
            max(fit.range for fit in fits),
        )

    @property
    def fitted(self) -> Sequence[ReplayedStep]:
        """The steps that take as long as unprofiled at some speed of the host; all, where none does.

        Without those whose host stood still for longer than another's by a quarter of the step: the machine did that.
        """
        fitting = [step for step in self.steps if step.fit is not AS_RECORDED] or self.steps
        least_ns = min((step.paused_ns for step in fitting), default=0)
        most_ns = least_ns + max(PAUSE_NS, _FOREIGN_PAUSE * (self.now_ns or 0))
        return [step for step in fitting if step.paused_ns <= most_ns]

    @property
    def typical(self) -> ReplayedStep | None:
        """The fitted step of the median length, at its unprofiled speed."""
        ordered = sorted(self.fitted, key=lambda step: step.proof.recorded_ns)
        return ordered[len(ordered) // 2] if ordered else None

    @cached_property
    def typical_on_fast_host(self) -> StepColumns | None:
        """The typical step as it would be if the profiler slowed the host as much as profilers do."""
        if self.typical is None:
            return None
        columns = self.typical.columns
        whole = find_phases(columns, {STEP: [(0, columns.recorded_ns)]})
        return whole.scale_host(columns, PROFILED_HOST)

    @cached_property
    def fast_ns(self) -> int:
        """How long `typical_on_fast_host` takes; 0 where there is none."""
        return 0 if self.typical_on_fast_host is None else self.run(self.typical_on_fast_host).step_ns

    def run(self, step: StepColumns) -> Steady:
        """Run one of the steps, or a changed form of it, after others like it."""
        return run_steadily(step, self.constants)

    def limits(self, lines: Sequence[LineTime]) -> StepLimits:
        """Return what limits the typical step at its unprofiled speed; nothing where nothing may be predicted."""
        step = self.typical
        if step is None or self.refusal is not None:
            return StepLimits(0, self.unprofiled_ns, self.proof, self.fit, self.refusal)
        columns = step.at_speed(step.fit.middle)
        found = self.run(columns)
        step_ns = self.now_ns or found.step_ns
        pieces = step.find_parts(columns, found, step_ns)
        placed, unplaced_ns = place_lines(pieces, lines)
        return StepLimits(
            step_ns,
            self.unprofiled_ns,
            self.proof,
            self.fit,
            parts=join_parts(pieces),
            lines=placed,
            unplaced_ns=unplaced_ns,
            trainers=lines_of_trainers(lines),
            calibrated_ns=found.step_ns,
        )


def replay_steps(account: TimeAccount, *, failed_check: bool = False) -> StepReplay:
    trace = account.attribution.trace
    processes = rows_by_value(trace.ranges.process[account.steps])
    refusal = _why_not(trace, processes, failed_check=failed_check)
    if refusal is not None:
        return StepReplay(Constants(), (), None, 0, refusal)
    ((process, rows),) = processes.items()
    windows = _windows(trace, process, account.steps[rows])
    calls = ProcessCalls(trace, process)
    recorded = [calls.step(*window) for window in windows]
    constants = measure_constants(recorded)
    places = [*places_of_ranges(account.attribution), Place(None)]
    allocates = {number for number, name in enumerate(trace.names) if _ALLOCATES.match(name)}
    steps = []
    phases = {label: rows for label, rows in measured_ranges(account.attribution).items() if label != STEP}
    waits = {DATA: np.flatnonzero(is_data_wait(trace))}
    for step, (begin_ns, end_ns, _) in zip(recorded, windows, strict=True):
        phases_of_step, waits_of_step = (
            _find_intervals(trace, labelled, begin_ns, end_ns) for labelled in (phases, waits)
        )
        columns = prepare(step, constants)
        names, categories = _names(trace, columns)
        phase, gap_phases = _phases_of_calls(columns, phases_of_step | {DATA: waits_of_step.get(DATA, [])})
        of_calls, of_operations = _places_of(account.attribution, columns, places)
        allocating = {at for at, name in enumerate(trace.calls.name[columns.call].tolist()) if name in allocates}
        steps.append(
            ReplayedStep(
                columns,
                find_phases(columns, phases_of_step, waits_of_step.get(DATA, [])),
                prove((columns, run(columns, constants))),
                AS_RECORDED,
                names,
                categories,
                phase,
                gap_phases,
                [_module(place) for place in of_calls],
                [_module(place) for place in of_operations],
                allocating,
                {at for at, place in enumerate(of_calls) if place.is_again},
                _copied_bytes(trace, columns),
            )
        )
    if account.timed is not None:
        steps = _calibrate(steps, constants, account)
    unprofiled_ns, recorded_ns = (
        None if time_ns is None else round(time_ns) for time_ns in (account.step_ns(), account.recorded_step_ns())
    )
    unprofiled, spread_ns = _unprofiled_phases(account)
    found = StepReplay(constants, tuple(steps), unprofiled_ns, spread_ns, None, recorded_ns, find_variation(account))
    return replace(found, refusal=_why_doubtful(found, has_times=bool(unprofiled)))


def _why_not(trace: Trace, processes: Mapping[int, Ints], *, failed_check: bool) -> str | None:
    if failed_check:
        return "the capture failed its self-check: what it lost cannot be replayed"
    if trace.measure != "gpu-kernel" or not len(trace.calls):
        return "the capture holds no CUDA calls: a step is replayed from its launches"
    if not processes:
        return "the capture holds no recorded step"
    if len(processes) > 1:
        return "several processes were recorded; `profkit efficiency --rank N` takes one"
    return None


def _why_doubtful(found: StepReplay, *, has_times: bool) -> str | None:
    proof = found.proof
    if proof is None or not any(len(step.columns.row) for step in found.steps):
        return "the recorded steps hold no GPU work"
    if abs(proof.error) > LARGEST_ERROR:
        return f"the replay of a recorded step ends {abs(proof.error):.1%} off: more than {LARGEST_ERROR:.1%}"
    if has_times and all(step.fit is AS_RECORDED for step in found.steps):
        return NOT_FITTED
    return None


def _windows(trace: Trace, process: int, steps: Ints) -> list[tuple[int, int, int]]:
    """Return when the last steps begin, until when they make calls, and when their Python ends.

    Each lasts to the start of the next one. The last one's Python ends with its range; of the calls after that those
    are its own that follow the step before, too: some programs wait for the GPU after their step, and a recorder makes
    calls at its end.
    """
    order = np.argsort(trace.ranges.start_ns[steps])
    starts, ends = trace.ranges.start_ns[steps][order], trace.ranges.end_ns[steps][order]
    mine = trace.calls.process == process
    calls_ns, names = trace.calls.start_ns[mine], trace.calls.name[mine]
    last_ns = int(ends[-1])
    if len(starts) > 1:
        usual = names[(calls_ns >= ends[-2]) & (calls_ns < starts[-1])]
        following = np.flatnonzero(calls_ns >= last_ns)[: len(usual)]
        alike = names[following] == usual[: len(following)]
        own = following[np.logical_and.accumulate(alike)]
        last_ns = max([last_ns, *(calls_ns[own] + 1).tolist()])
    windows = zip(starts.tolist(), [*starts[1:].tolist(), last_ns], [*starts[1:].tolist(), int(ends[-1])], strict=True)
    made = np.searchsorted(calls_ns, last_ns) - np.searchsorted(calls_ns, starts)
    return list(windows)[-min(MOST_STEPS, max(1, int((made <= MOST_CALLS).sum()))) :]


def _find_intervals(
    trace: Trace, labelled: Mapping[str, Ints], begin_ns: int, end_ns: int
) -> dict[str, list[tuple[int, int]]]:
    """One within another counts as the outer one."""
    ranges = trace.ranges
    found: list[tuple[int, int, str]] = []
    for label, rows in labelled.items():
        mine = rows[(ranges.start_ns[rows] >= begin_ns) & (ranges.start_ns[rows] < end_ns)]
        starts, ends = ((edge[mine] - begin_ns).tolist() for edge in (ranges.start_ns, ranges.end_ns))
        found += [(start, -end, label) for start, end in zip(starts, ends, strict=True)]
    kept: dict[str, list[tuple[int, int]]] = {}
    reach = -1
    for start, end, label in sorted(found):
        if start >= reach:
            kept.setdefault(label, []).append((start, -end))
            reach = -end
    return kept


def _calibrate(steps: Sequence[ReplayedStep], constants: Constants, account: TimeAccount) -> list[ReplayedStep]:
    unprofiled, spread_ns = _unprofiled_phases(account)
    timed, step_ns = account.timed, account.step_ns()
    if timed is None or step_ns is None or not unprofiled:
        return list(steps)
    steps = _wait_as_unprofiled(steps, timed)
    added_ns = [measure_tracing(step.columns, constants, step.phases, unprofiled) for step in steps]
    usual_ns = median([one for one in added_ns if one is not None] or [0.0])
    on_host = {name: round(ns) for name, ns in timed.host_ns.items()}
    calibrated = []
    for step in steps:
        columns = without_tracing(step.columns, usual_ns)
        fit = fit_host(columns, constants, step.phases, unprofiled, spread_ns, on_host_ns=on_host)
        if fit is None:
            calibrated.append(step)
            continue
        phases = level_phases(columns, constants, step.phases, fit.middle, on_host)
        phases = fit_outside(columns, constants, phases, fit.middle, round(step_ns))
        by_phase = {DATA: phases.waiting, OUTSIDE: phases.outside}
        gap_phases = [
            gap
            if by_phase.keys().isdisjoint(gap)
            else {name: round(time_ns * by_phase.get(name, 1.0)) for name, time_ns in gap.items()}
            for gap in step.gap_phases
        ]
        calibrated.append(replace(step, columns=columns, phases=phases, fit=fit, gap_phases=gap_phases))
    return calibrated


def _wait_as_unprofiled(steps: Sequence[ReplayedStep], timed: StepTimes) -> list[ReplayedStep]:
    """Return the steps with the unprofiled ones' waits for data.

    Each waits for as long as these on average. But where one of many steps waits for all, that mean would be hidden by
    the GPU's work: each waits as most recorded ones do, and what nothing hides is added.
    """
    data, step_times = timed.find(DATA, None), timed.find(STEP, None)
    waits_ns = 0.0 if data is None else data.clean_ns
    usual_ns = median(step.phases.wait_ns() for step in steps)
    exposed_ns = 0.0 if step_times is None else step_times.unprofiled.exposed_ns
    late_ns = round(exposed_ns * (1 - usual_ns / (waits_ns or 1)))
    if step_times is None or usual_ns >= _IN_BURSTS * waits_ns or late_ns <= LARGEST_ERROR * step_times.clean_ns:
        return [_wait_for_data(step, waits_ns) for step in steps]
    return [
        _wait_for_data(
            replace(step, columns=replace(step.columns, late_ns=late_ns)), min(usual_ns, step.phases.wait_ns())
        )
        for step in steps
    ]


def _wait_for_data(step: ReplayedStep, time_ns: float) -> ReplayedStep:
    return replace(step, phases=replace(step.phases, waiting=time_ns / (step.phases.wait_ns() or 1)))


def _unprofiled_phases(account: TimeAccount) -> tuple[dict[str, int], int]:
    if account.timed is None:
        return {}, 0
    phases = {
        times.phase: round(times.clean_ns)
        for times in account.timed.phases
        if times.clock == "cuda-events" and times.phase not in (STEP, DATA)
    }
    return phases, find_spread(account)


def find_spread(account: TimeAccount) -> int:
    """Return by how much the unprofiled steps differ without their waits for data, 0 where none was timed.

    Workers deliver in bursts: one step waits for all, and the next ones do not.
    """
    step = None if account.timed is None else account.timed.find(STEP, None)
    if step is None:
        return 0
    from profkit.analysis.time_account.step_times import summarize_samples  # a run alone has such times

    rest = summarize_samples(step.unprofiled.rest_ns[step.unprofiled.counted])
    return round(max(rest.median_absolute_deviation, _LEAST_SPREAD * step.clean_ns))


def find_variation(account: TimeAccount) -> float:
    """Return the error of the typical unprofiled step as a share of it, without waits for data.

    The 10th and the 90th percentile lie 1.28 standard deviations from the middle. Of ten steps that do not depend on
    each other a mean would be within 0.52 of one in nine of ten runs; steps do depend, and half of 1.28 is taken. Rare,
    long steps, those of a checkpoint say, are no part of the typical one.
    """
    step, data = (None if account.timed is None else account.timed.find(name, None) for name in (STEP, DATA))
    if step is None or not step.clean_ns:
        return 0.0
    times_ns = step.unprofiled.total_ns
    waits_ns = np.zeros_like(times_ns) if data is None else data.unprofiled.total_ns
    is_usual = step.unprofiled.counted
    if len(waits_ns) == len(times_ns):
        times_ns, waits_ns = times_ns[is_usual], waits_ns[is_usual]
    step_spread, wait_spread = (np.subtract(*np.percentile(each, (90, 10))) for each in (times_ns, waits_ns))
    return max(0.0, float(step_spread - wait_spread)) / 4 / step.clean_ns


def _names(trace: Trace, step: StepColumns) -> tuple[dict[int, str], dict[int, str]]:
    count = len(trace.work)
    names, categories = {}, {}
    for row in step.row.tolist():
        if row < count:
            names[row] = trace.names[trace.work.name[row]]
            categories[row] = categorize(names[row], trace.measure).name
        else:
            categories[row] = "fill" if trace.copies.is_memset[row - count] else "copy"
            names[row] = FROM_HOST if trace.copies.from_host[row - count] else categories[row]
    return names, categories


def _copied_bytes(trace: Trace, step: StepColumns) -> dict[int, int]:
    count = len(trace.work)
    return {row: int(trace.copies.byte_count[row - count]) for row in step.row.tolist() if row >= count}


def _phases_of_calls(
    step: StepColumns, intervals: Mapping[str, Sequence[tuple[int, int]]]
) -> tuple[list[str], list[dict[str, int]]]:
    spans = sorted((start, end, label) for label, some in intervals.items() for start, end in some)
    edges = [NONE, *(edge for start, end, _ in spans for edge in (start, end))]
    labels = [OUTSIDE, *(label for span in spans for label in (span[2], OUTSIDE))]

    def split(start_ns: int, end_ns: int) -> dict[str, int]:
        first, last = bisect_right(edges, start_ns) - 1, bisect_left(edges, end_ns)
        if last == first + 1:
            return {labels[first]: end_ns - start_ns}
        shares: dict[str, int] = {}
        for (begin, end), label in zip(pairwise([*edges[first:last], end_ns]), labels[first:last], strict=True):
            shares[label] = shares.get(label, 0) + end - max(begin, start_ns)
        return shares

    gaps = zip(step.call_start_ns, step.gap_ns, strict=True)
    return (
        [labels[max(0, bisect_right(edges, begun) - 1)] for begun in step.call_start_ns],
        [split(max(0, begun - gap), begun) if gap > 0 else {} for begun, gap in gaps],
    )


def _module(place: Place) -> str | None:
    return place.modules[-1] if place.modules else None


def _places_of(attribution: Attribution, step: StepColumns, places: Sequence[Place]) -> tuple[list[Place], list[Place]]:
    """Return the places of calls and of operations; a call that launches is in its first operation's.

    Any other call is in the innermost range of its thread, and where that has none, in the place of the call before.
    """
    innermost = np.concatenate([attribution.work.innermost, attribution.copies.innermost])
    of_operations = [places[at] for at in innermost[step.row].tolist()]
    calls, timelines = attribution.trace.calls, attribution.timelines
    own = np.full(len(step.call), NO_RANGE, dtype=np.int64)
    for thread, rows in rows_by_value(np.array(step.thread, dtype=np.int64)).items():
        if thread in timelines:
            own[rows] = timelines[thread].innermost_at(calls.start_ns[step.call[rows]])
    of_calls: list[Place] = []
    for (first, last), around in zip(step.launches, own.tolist(), strict=True):
        if first < last:
            of_calls.append(of_operations[first])
        elif around == NO_RANGE and of_calls:
            of_calls.append(of_calls[-1])
        else:
            of_calls.append(places[around])
    return of_calls, of_operations
