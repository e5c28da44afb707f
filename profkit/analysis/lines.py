"""The lines of source behind a step's time: found in steps of their own, and scaled to the unprofiled ones.

A line's time is its mean of all steps in which lines were looked for. What rare steps among these took longer is known
of each phase, and is taken from its lines as their standard errors say; what is left is what the usual steps took on
average. This is scaled to what the typical unprofiled step has of the phase, so that the lines sum up to the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from profkit.analysis import NotebookResult
from profkit.analysis.rare_steps import leave_out_rare_steps
from profkit.analysis.time_account.step_times import (
    PhaseSamples,
    samples_by_phase,
    settle_waits,
)
from profkit.errors import RunError
from profkit.names import DATA, STEP
from profkit.run.directory import Run
from profkit.run.lines import FEWEST_SAMPLES, LineTime, calls_backward, lines_of_trainers
from profkit.run.manifest import Samples

_PART = 0.1
_MOST_NAMED = 2

_FEWEST_ALIKE, _ALIKE = 5, 0.1
"""So few samples name a line if their error is below this share of its time: all steps agree."""

_LARGEST_SCALE = 1.5
"""Looking for lines has slowed no step by more than this, nor sped it up."""


@dataclass(frozen=True, repr=False)
class LinesResult(NotebookResult, rows="lines", row_type=LineTime):
    """The lines of one rank, the longest first: times are scaled to an unprofiled step.

    ``callers`` are those of their lines that had called others: their times are the others', and no part of the sum.
    ``rare`` are lines that ran in rare steps alone, which are no part of the typical step: their times are as sampled,
    the mean of all steps. ``unscaled`` are the phases whose factor cannot be right, empty for time outside of phases;
    their times are scaled as the whole step's, or as sampled where that has no factor (``is_step_scaled``).
    ``unnamed_ns`` is the time a step with no line of the user's own, or with too few samples to name one, ``ahead_ns``
    that in which Python was done and the GPU was not: profkit waited for it at the step's end. ``step_ns`` is the
    unprofiled step, ``batch_ns`` what a worker takes for a batch and ``batch_cpu_ns`` what its CPUs do, None without
    workers. ``of_library`` is what of a batch has no line of the user's own, if a function of a library's has most of
    it.
    """

    run: str
    rank: int
    steps: int
    step_ns: int
    is_scaled: bool
    lines: tuple[LineTime, ...]
    callers: tuple[LineTime, ...]
    unnamed_ns: int
    ahead_ns: int
    batches: int
    batch_ns: int | None
    batch_cpu_ns: int | None
    no_waits: str | None
    rare: tuple[LineTime, ...] = ()
    unscaled: tuple[str, ...] = ()
    is_step_scaled: bool = False
    of_library: LineTime | None = None

    @property
    def worker_cpus(self) -> float | None:
        """How many CPUs a loader's worker keeps busy while it makes a batch, None if that is unknown."""
        return self.batch_cpu_ns / self.batch_ns if self.batch_ns and self.batch_cpu_ns is not None else None

    @property
    def knows_waits(self) -> bool:
        return self.no_waits is None or any(line.waits or line.waiting_ns for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_lines(run: Run, rank: int = 0) -> LinesResult:
    """Return the lines of one rank of a run, scaled phase by phase to that rank's unprofiled steps."""
    found = run.lines(rank)
    if found is None:
        whose = f" of rank {rank}" if rank else ""
        raise RunError(
            f"{run.path}: holds no lines of source{whose}; record them with `profkit run` (without --no-lines) "
            "of a script that makes steps after the recorded ones"
        )
    looked, unprofiled = (
        samples_by_phase(samples, next(iter(samples.contexts), None))
        for samples in (Samples(found.steps.steps), settle_waits(run.manifest.of_rank(rank)) or Samples())
    )
    usual = leave_out_rare_steps(found)
    scale = _fit_step(_scales(looked, unprofiled), usual.lines, unprofiled)
    named = [line for line in usual.lines if line.file is not None and _is_known(line)]
    rows = [_row(line, scale) for line in named]
    callers = [_row(line, scale) for line in usual.callers if _is_known(line)]
    own = [line for line in usual.lines if line.thread != "worker"]
    looked_ns = looked[STEP].mean_ns if STEP in looked else 0.0
    ahead_ns = max(looked_ns - sum(line.time_ns for line in own), 0)
    step_ns = unprofiled[STEP].typical_ns if STEP in unprofiled else looked_ns
    own_ns = sum(_scaled(line.time_ns, line, scale) for line in own)
    kept = {line.identity for line in usual.lines}
    return LinesResult(
        run=str(run.path),
        rank=rank,
        steps=len(found.steps.steps),
        step_ns=round(step_ns),
        is_scaled=bool(scale),
        lines=tuple(sorted(rows, key=lambda row: (row.thread == "worker", -row.time_ns, -row.waits))),
        callers=tuple(callers),
        unnamed_ns=sum(_scaled(line.time_ns, line, scale) for line in own if line not in named),
        ahead_ns=max(0, min(round(ahead_ns * scale.get(STEP, 1.0)), round(step_ns) - own_ns)),
        batches=found.steps.batches,
        batch_ns=found.steps.batch_ns if found.steps.batches else None,
        batch_cpu_ns=found.steps.batch_cpu_ns,
        no_waits=found.steps.no_waits,
        rare=tuple(line for line in found.lines if line.file and _is_known(line) and line.identity not in kept),
        unscaled=_unscaled_phases(rows, scale),
        is_step_scaled=STEP in scale,
        of_library=next((line for line in usual.lines if _is_librarys(line)), None),
    )


def _is_librarys(line: LineTime) -> bool:
    return line.thread == "worker" and line.file is None and line.inside is not None and _is_known(line)


def _unscaled_phases(lines: Iterable[LineTime], scale: Mapping[str | None, float]) -> tuple[str, ...]:
    phases = dict.fromkeys(line.phase for line in lines if line.thread != "worker")
    return tuple(phase or "" for phase in phases if scale and phase not in scale)


def choose_lines(result: LinesResult) -> tuple[LineTime, ...]:
    """Return the two lines whose own time is at least `_PART` of a step, then those that wait for the GPU.

    One that runs a trainer says nothing of where in it the time goes, and would come once for each of its phases.
    """
    trainers = lines_of_trainers((*result.lines, *result.callers))
    main = [line for line in result.lines if line.thread != "worker" and not calls_backward(line.called)]
    own = [line for line in main if line.place not in trainers]
    longest = [line for line in own if line.own_ns >= _PART * result.step_ns][:_MOST_NAMED]
    return (*longest, *[line for line in own if line.waits >= 1 and line not in longest][:_MOST_NAMED])


def _is_known(line: LineTime) -> bool:
    """Return whether a line may be named: a call that keeps Python's lock, such as gc.collect, is seldom seen in it."""
    is_alike = line.samples >= _FEWEST_ALIKE and line.error_ns <= _ALIKE * line.time_ns
    return line.samples >= FEWEST_SAMPLES or is_alike or line.waits > 0


def _row(line: LineTime, scale: Mapping[str | None, float]) -> LineTime:
    return replace(
        line,
        time_ns=_scaled(line.time_ns, line, scale),
        error_ns=_scaled(line.error_ns, line, scale),
        waiting_ns=_scaled(line.waiting_ns, line, scale),
    )


def _scaled(time_ns: int, line: LineTime, scale: Mapping[str | None, float]) -> int:
    return time_ns if line.thread == "worker" else round(time_ns * scale.get(line.phase, scale.get(STEP, 1.0)))


def _scales(looked: Mapping[str, PhaseSamples], unprofiled: Mapping[str, PhaseSamples]) -> dict[str | None, float]:
    scales: dict[str | None, float] = {}
    for phase, times in unprofiled.items():
        mean_ns = looked[phase].mean_ns if phase in looked else 0.0
        # How long a step waits for data a queue decides, which may have been full before: these waits are the step's.
        is_right = phase == DATA or (mean_ns and 1 / _LARGEST_SCALE <= times.typical_ns / mean_ns <= _LARGEST_SCALE)
        if mean_ns and is_right:
            scales[phase] = times.typical_ns / mean_ns
    if STEP in scales:
        scales[None] = scales[STEP]
    return scales


def _fit_step(
    scale: dict[str | None, float], lines: Sequence[LineTime], unprofiled: Mapping[str, PhaseSamples]
) -> dict[str | None, float]:
    """Return the factors, all of them smaller where the lines of the thread that trains would exceed its step.

    Medians of phases may add up to more than the median of the step, and factors of some phases may not be known.
    """
    if STEP not in scale:
        return scale
    whole_ns = sum(_scaled(line.time_ns, line, scale) for line in lines if line.thread == "main")
    fit = min(1.0, unprofiled[STEP].typical_ns / whole_ns) if whole_ns else 1.0
    return {phase: factor * fit for phase, factor in scale.items()}
