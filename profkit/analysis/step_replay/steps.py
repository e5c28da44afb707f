"""The recorded steps of a trace, ready to be run again: proven on themselves, and fitted to the unprofiled steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from profkit.analysis.kernels.categories import categorize
from profkit.analysis.step_replay.calibrate import AS_RECORDED, Fit, Phases, find_phases, fit_host
from profkit.analysis.step_replay.columns import ProcessCalls, StepColumns
from profkit.analysis.step_replay.limits import Cause, find_limits
from profkit.analysis.step_replay.replay import Constants, Proof, Replayed, measure_constants, prepare, prove, run
from profkit.analysis.time_account.account import TimeAccount
from profkit.analysis.time_account.steps import measured_ranges
from profkit.names import DATA, STEP
from profkit.trace.columns import Ints, Trace, rows_by_value

OUTSIDE = "outside"
"""The phase of what lies in none."""

MOST_STEPS = 5
"""More recorded steps than these say nothing new, and take as long again."""

LARGEST_ERROR = 0.005
"""A step whose replay ends further off than this share of it predicts nothing."""

_LEAST_SPREAD = 0.005
"""Unprofiled steps that differ less than this share of the step are not told apart."""


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """A recorded step, and how it runs: ``columns`` are ready to run, ``fit`` is the host's speed in them.

    ``names`` and ``categories`` are those of its operations by their rows, ``phase`` that of each call.
    """

    columns: StepColumns
    phases: Phases
    proof: Proof
    fit: Fit
    names: Mapping[int, str]
    categories: Mapping[int, str]
    phase: Sequence[str]

    def at_speed(self, factor: float) -> StepColumns:
        """Return the step with its host's time scaled."""
        return self.phases.scale_host(self.columns, factor)

    def sum_limits(self, step: StepColumns, found: Replayed) -> dict[str, dict[str, int]]:
        """Return how long what limits this step, or a changed form of it: phase → cause → nanoseconds.

        An operation's cause is its category. The sums add up to the replayed step.
        """
        sums: dict[str, dict[str, int]] = {}
        for piece in find_limits(step, found):
            at = piece.to.at
            call = at if piece.to.is_call else step.launcher[at]
            cause = self.categories[int(step.row[at])] if piece.cause == Cause.OPERATION else piece.cause.value
            causes = sums.setdefault(self.phase[call], {})
            causes[cause] = causes.get(cause, 0) + piece.end_ns - piece.start_ns
        return sums


@dataclass(frozen=True)
class StepLimits:
    """What limits the step of the median length at its unprofiled speed, and how well its replay is proven.

    ``by_phase`` is phase (`OUTSIDE` of all) → cause → nanoseconds, which add up to ``step_ns``. A cause is one of
    `profkit.analysis.step_replay.limits.Cause`, or the category of an operation. ``unprofiled_ns`` is the measured
    step time without a profiler. ``refusal`` says why nothing is known; then ``step_ns`` is 0.
    """

    step_ns: int
    unprofiled_ns: int | None
    by_phase: Mapping[str, Mapping[str, int]]
    proof: Proof | None
    fit: Fit
    refusal: str | None

    @property
    def limited_by(self) -> dict[str, int]:
        """Cause → nanoseconds in all phases, the longest first; they add up to the step."""
        return sum_phases(self.by_phase)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "step_ns": self.step_ns,
            "unprofiled_ns": self.unprofiled_ns,
            "replay": describe_replay(self.proof, self.fit),
            "limited_by": self.limited_by,
            "by_phase": self.by_phase,
            "refusal": self.refusal,
        }


def sum_phases(by_phase: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return cause → nanoseconds of all phases together, the longest first."""
    sums: dict[str, int] = {}
    for causes in by_phase.values():
        for cause, time_ns in causes.items():
            sums[cause] = sums.get(cause, 0) + time_ns
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


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
        fits = [step.fit for step in self.steps] or [AS_RECORDED]
        return Fit(min(f.least for f in fits), median(f.middle for f in fits), max(f.most for f in fits))

    @property
    def typical(self) -> ReplayedStep | None:
        """The step of the median length, at its unprofiled speed."""
        ordered = sorted(self.steps, key=lambda step: step.proof.recorded_ns)
        return ordered[len(ordered) // 2] if ordered else None

    def run(self, step: StepColumns) -> Replayed:
        """Run one of the steps, or a changed form of it."""
        return run(step, self.constants)

    def limits(self) -> StepLimits:
        """Return what limits the typical step at its unprofiled speed; nothing where nothing may be predicted."""
        step = self.typical
        if step is None or self.refusal is not None:
            return StepLimits(0, self.unprofiled_ns, {}, self.proof, self.fit, self.refusal)
        columns = step.at_speed(step.fit.middle)
        found = self.run(columns)
        by_phase = step.sum_limits(columns, found)
        return StepLimits(found.step_ns, self.unprofiled_ns, by_phase, self.proof, self.fit, None)


def replay_steps(account: TimeAccount, *, failed_check: bool = False) -> StepReplay:
    """Return the steps of a trace, each replayed as it was recorded.

    Args:
        account: the time account of the trace.
        failed_check: whether the capture failed its self-check: what is missing in it cannot be replayed.
    """
    trace = account.attribution.trace
    processes = rows_by_value(trace.ranges.process[account.steps])
    refusal = _why_not(trace, processes, failed_check=failed_check)
    if refusal is not None:
        return StepReplay(Constants(), (), None, 0, refusal)
    ((process, rows),) = processes.items()
    windows = _windows(trace, account.steps[rows])
    calls = ProcessCalls(trace, process)
    recorded = [calls.step(start, end) for start, end in windows]
    constants = measure_constants(recorded)
    intervals = _phase_intervals(account, windows)
    unprofiled, spread_ns = _unprofiled_phases(account)
    steps = []
    for step, phases_of_step in zip(recorded, intervals, strict=True):
        columns = prepare(step, constants)
        phases = find_phases(columns, phases_of_step)
        fit = fit_host(columns, constants, phases, unprofiled, spread_ns) if unprofiled else None
        proof = prove(columns, run(columns, constants))
        names, categories = _names(trace, columns)
        phase = _phase_of_calls(columns, phases_of_step)
        steps.append(ReplayedStep(columns, phases, proof, fit or AS_RECORDED, names, categories, phase))
    unprofiled_ns, recorded_ns = (
        None if time_ns is None else round(time_ns) for time_ns in (account.step_ns(), account.recorded_step_ns())
    )
    found = StepReplay(constants, tuple(steps), unprofiled_ns, spread_ns, None, recorded_ns)
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
    if any(step.columns.unknown_waits for step in found.steps):
        return "streams wait for events, and the profiler does not say where these were recorded"
    if has_times and all(step.fit is AS_RECORDED for step in found.steps):
        return "no speed of the host makes the recorded steps take as long as the unprofiled ones"
    return None


def _windows(trace: Trace, steps: Ints) -> list[tuple[int, int]]:
    """Return from when to when the last steps ran: each to the start of the next one, the last as long as usual."""
    starts = np.sort(trace.ranges.start_ns[steps])
    lengths = np.diff(starts)
    ends = trace.ranges.end_ns[steps].max()
    last = starts[-1] + int(np.median(lengths)) if len(lengths) else ends
    windows = list(zip(starts.tolist(), [*starts[1:].tolist(), max(int(last), int(ends))], strict=True))
    return windows[-MOST_STEPS:]


def _phase_intervals(
    account: TimeAccount, windows: Sequence[tuple[int, int]]
) -> list[dict[str, list[tuple[int, int]]]]:
    """Return the phases of each window on the host, by name, in nanoseconds since it began."""
    ranges = account.attribution.trace.ranges
    labelled = {label: rows for label, rows in measured_ranges(account.attribution).items() if label != STEP}
    found = []
    for start, end in windows:
        phases: dict[str, list[tuple[int, int]]] = {}
        for label, rows in labelled.items():
            for row in rows[(ranges.start_ns[rows] >= start) & (ranges.start_ns[rows] < end)].tolist():
                interval = int(ranges.start_ns[row]) - start, int(ranges.end_ns[row]) - start
                phases.setdefault(label, []).append(interval)
        found.append(_disjoint(phases))
    return found


def _disjoint(phases: dict[str, list[tuple[int, int]]]) -> dict[str, list[tuple[int, int]]]:
    """Return the phases without those within another one, which count as the outer one."""
    kept: dict[str, list[tuple[int, int]]] = {}
    reach = -1
    for start, end, label in sorted((start, -end, label) for label, some in phases.items() for start, end in some):
        if start >= reach:
            kept.setdefault(label, []).append((start, -end))
            reach = -end
    return kept


def _unprofiled_phases(account: TimeAccount) -> tuple[dict[str, int], int]:
    """Return how long each phase takes unprofiled by the GPU's clock, and how much the unprofiled steps differ."""
    if account.timed is None:
        return {}, 0
    phases = {
        times.phase: round(times.clean_ns)
        for times in account.timed.phases
        if times.clock == "cuda-events" and times.phase not in (STEP, DATA)
    }
    step = account.timed.find(STEP, None)
    spread = 0.0 if step is None else max(step.clean.median_absolute_deviation, _LEAST_SPREAD * step.clean_ns)
    return phases, round(spread)


def _names(trace: Trace, step: StepColumns) -> tuple[dict[int, str], dict[int, str]]:
    """Return by row the names of operations and their categories: of kernels' names, else ``copy`` and ``fill``."""
    count = len(trace.work)
    names, categories = {}, {}
    for row in step.row.tolist():
        if row < count:
            names[row] = trace.names[trace.work.name[row]]
            categories[row] = categorize(names[row], trace.measure).name
        else:
            names[row] = categories[row] = "fill" if trace.copies.is_memset[row - count] else "copy"
    return names, categories


def _phase_of_calls(step: StepColumns, intervals: dict[str, list[tuple[int, int]]]) -> list[str]:
    spans = sorted((start, end, label) for label, some in intervals.items() for start, end in some)
    phases: list[str] = []
    at = 0
    for begun in step.call_start_ns:
        while at < len(spans) and spans[at][1] <= begun:
            at += 1
        phases.append(spans[at][2] if at < len(spans) and spans[at][0] <= begun else OUTSIDE)
    return phases
