"""The recorded steps of a trace, ready to be run again: proven on themselves, and fitted to the unprofiled steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from profkit.analysis.kernels.categories import categorize
from profkit.analysis.step_replay.calibrate import AS_RECORDED, Fit, Phases, find_phases, fit_host
from profkit.analysis.step_replay.columns import ProcessCalls, StepColumns
from profkit.analysis.step_replay.limits import Cause, Piece, find_limits
from profkit.analysis.step_replay.replay import Constants, Proof, Replayed, measure_constants, prepare, prove, run
from profkit.analysis.time_account.account import TimeAccount
from profkit.analysis.time_account.steps import measured_ranges
from profkit.names import DATA, STEP
from profkit.trace.columns import Ints, Trace, empty_ints, rows_by_value

MOST_STEPS = 5
"""More recorded steps than these say nothing new, and take as long again."""

LARGEST_ERROR = 0.005
"""A step whose replay ends further off than this share of it predicts nothing."""

_LEAST_SPREAD = 0.005
"""Unprofiled steps that differ less than this share of the step are not told apart."""


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """A recorded step, and how it runs: ``columns`` are ready to run, ``fit`` is the host's speed in them.

    ``names`` and ``categories`` are those of its operations, ``phase`` that of each call, None outside of all.
    """

    columns: StepColumns
    phases: Phases
    proof: Proof
    fit: Fit
    names: Sequence[str]
    categories: Sequence[str]
    phase: Sequence[str | None]

    def at_speed(self, factor: float) -> StepColumns:
        """Return the step with its host's time scaled."""
        return self.phases.scale_host(self.columns, factor)


@dataclass(frozen=True, eq=False)
class StepReplay:
    """The recorded steps of one process. ``refusal`` says why nothing may be predicted from them, None if it may.

    ``unprofiled_ns`` is the step time without a profiler, None if it was not taken: then the recorded one stands.
    """

    constants: Constants
    steps: tuple[ReplayedStep, ...]
    unprofiled_ns: int | None
    spread_ns: int
    refusal: str | None

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

    def limits(self) -> tuple[ReplayedStep, list[Piece]] | None:
        """Return the typical step and what limits it at its unprofiled speed; None without any step."""
        step = self.typical
        if step is None:
            return None
        columns = step.at_speed(step.fit.middle)
        return step, find_limits(columns, self.run(columns))


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
    step_ns = account.step_ns()
    found = StepReplay(constants, tuple(steps), None if step_ns is None else round(step_ns), spread_ns, None)
    return replace(found, refusal=_why_doubtful(found, has_times=bool(unprofiled)))


def _why_not(trace: Trace, processes: Mapping[int, Ints], *, failed_check: bool) -> str | None:
    if failed_check:
        return "the capture failed its self-check: what it lost cannot be replayed"
    if trace.measure != "gpu-kernel" or not len(trace.calls):
        return "the capture holds no CUDA calls: a step is replayed from its launches"
    if not processes:
        return "the capture holds no recorded step"
    if len(processes) > 1:
        return "several processes were recorded: choose one with --rank"
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


def _names(trace: Trace, step: StepColumns) -> tuple[list[str], list[str]]:
    """Return the names of operations and their categories: of kernels' names, else ``copy`` and ``fill``."""
    count = len(trace.work)
    fills = np.concatenate([np.zeros(count, dtype=np.bool_), trace.copies.is_memset]) if len(step.row) else empty_ints()
    names, categories = [], []
    for row in step.row.tolist():
        name = trace.names[trace.work.name[row]] if row < count else "fill" if fills[row] else "copy"
        names.append(name)
        categories.append(categorize(name, trace.measure).name if row < count else name)
    return names, categories


def _phase_of_calls(step: StepColumns, intervals: dict[str, list[tuple[int, int]]]) -> list[str | None]:
    spans = sorted((start, end, label) for label, some in intervals.items() for start, end in some)
    phases: list[str | None] = []
    at = 0
    for begun in step.call_start_ns:
        while at < len(spans) and spans[at][1] <= begun:
            at += 1
        phases.append(spans[at][2] if at < len(spans) and spans[at][0] <= begun else None)
    return phases


def sum_causes(step: ReplayedStep, pieces: Sequence[Piece]) -> dict[tuple[str | None, Cause, str | None], int]:
    """Return how long each phase was limited by each cause; for an operation, and what follows it, by its category."""
    sums: dict[tuple[str | None, Cause, str | None], int] = {}
    for piece in pieces:
        call = piece.to.at if piece.to.is_call else step.columns.launcher[piece.to.at]
        category = step.categories[piece.to.at] if piece.cause == Cause.OPERATION else None
        key = step.phase[call], piece.cause, category
        sums[key] = sums.get(key, 0) + piece.end_ns - piece.start_ns
    return sums
