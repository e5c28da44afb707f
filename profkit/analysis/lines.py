"""The lines of source behind a step's time: found in steps of their own, and scaled to the unprofiled ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from profkit.analysis import NotebookResult, table_of
from profkit.analysis.time_account.step_times import samples_by_phase
from profkit.errors import RunError
from profkit.names import BACKWARD, OPTIMIZER, STEP
from profkit.run.directory import Run
from profkit.run.lines import FEWEST_SAMPLES, LineTime, calls_backward
from profkit.run.manifest import Samples

_PART = 0.1
_MOST_NAMED = 2

_FEWEST_ALIKE, _ALIKE = 5, 0.1
"""So few samples name a line if their error is below this share of its time: all steps agree."""

_LARGEST_SCALE = 1.5
"""Looking for lines has slowed no step by more than this, nor sped it up."""


@dataclass(frozen=True, repr=False)
class LinesResult(NotebookResult):
    """The lines of one rank, the longest first: times are scaled to an unprofiled step.

    ``callers`` are those of their lines that had called others: their times are the others', and no part of the sum.
    ``unnamed_ns`` is the time a step with no line of the user's own, or with too few samples to name one, ``ahead_ns``
    that in which Python was done and the GPU was not: profkit waited for it at the step's end. ``step_ns`` is the
    unprofiled step, ``batch_ns`` what a worker takes for a batch and ``batch_cpu_ns`` what its CPUs do, None without
    workers.
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

    @property
    def worker_cpus(self) -> float | None:
        """How many CPUs a loader's worker keeps busy while it makes a batch, None if that is unknown."""
        return self.batch_cpu_ns / self.batch_ns if self.batch_ns and self.batch_cpu_ns is not None else None

    @property
    def knows_waits(self) -> bool:
        return self.no_waits is None or any(line.waits or line.waiting_ns for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_pandas(self) -> Any:
        """Return one row per line, phase and thread."""
        return table_of(self.lines, LineTime)


def find_lines(run: Run, rank: int = 0) -> LinesResult:
    """Return the lines of a run, scaled phase by phase to its unprofiled steps.

    Raises:
        RunError: they were not recorded, or their file cannot be read.
    """
    found = run.lines(rank)
    if found is None:
        whose = f" of rank {rank}" if rank else ""
        raise RunError(
            f"{run.path}: holds no lines of source{whose}; record them with `profkit run` (without --no-lines) "
            "of a script that makes steps after the recorded ones"
        )
    looked = _step_times(Samples(found.steps.steps))
    unprofiled = _step_times(run.manifest.unprofiled or Samples())
    scale = _scales(looked, unprofiled)
    named = [line for line in found.lines if line.file is not None and _is_known(line)]
    rows = [_row(line, scale) for line in named]
    callers = [_row(line, scale) for line in found.callers if _is_known(line)]
    own = [line for line in found.lines if line.thread != "worker"]
    ahead_ns = max(looked.get(STEP, 0) - sum(line.time_ns for line in own), 0)
    step_ns = unprofiled.get(STEP, looked.get(STEP, 0))
    return LinesResult(
        run=str(run.path),
        rank=rank,
        steps=len(found.steps.steps),
        step_ns=round(step_ns),
        is_scaled=bool(scale),
        lines=tuple(sorted(rows, key=lambda row: (row.thread == "worker", -row.time_ns, -row.waits))),
        callers=tuple(callers),
        unnamed_ns=sum(_scaled(line.time_ns, line, scale) for line in own if line not in named),
        ahead_ns=round(ahead_ns * scale.get(STEP, 1.0)),
        batches=found.steps.batches,
        batch_ns=found.steps.batch_ns if found.steps.batches else None,
        batch_cpu_ns=found.steps.batch_cpu_ns,
        no_waits=found.steps.no_waits,
    )


def choose_lines(result: LinesResult) -> tuple[LineTime, ...]:
    """Return the two lines whose own time is at least `_PART` of a step, then those that wait for the GPU.

    One that runs a trainer says nothing of where in it the time goes, and would come once for each of its phases.
    """
    trainers = lines_of_trainers((*result.lines, *result.callers))
    main = [line for line in result.lines if line.thread != "worker" and not calls_backward(line.called)]
    own = [line for line in main if line.place not in trainers]
    longest = [line for line in own if line.own_ns >= _PART * result.step_ns][:_MOST_NAMED]
    return (*longest, *[line for line in own if line.waits >= 1 and line not in longest][:_MOST_NAMED])


def lines_of_trainers(lines: Iterable[LineTime]) -> frozenset[tuple[str | None, int]]:
    """Return the file and number of each line that runs a trainer: all of a step's phases, or several, lie in it."""
    phases: dict[tuple[str | None, int], set[str | None]] = {}
    for line in lines:
        phases.setdefault(line.place, set()).add(line.phase)
    return frozenset(place for place, own in phases.items() if len(own) > 1 and own & {BACKWARD, OPTIMIZER})


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
    """Return a time as in an unprofiled step; a worker's is that of a batch and stays."""
    return time_ns if line.thread == "worker" else round(time_ns * scale.get(line.phase, scale.get(STEP, 1.0)))


def _step_times(samples: Samples) -> dict[str, float]:
    context = next(iter(samples.contexts), None)
    return {phase: times.time_ns for phase, times in samples_by_phase(samples, context).items()}


def _scales(looked: Mapping[str, float], unprofiled: Mapping[str, float]) -> dict[str | None, float]:
    """Return what each phase's times are multiplied by; that of the step is for time outside of phases too."""
    scales: dict[str | None, float] = {}
    for phase, time_ns in unprofiled.items():
        if looked.get(phase) and 1 / _LARGEST_SCALE <= time_ns / looked[phase] <= _LARGEST_SCALE:
            scales[phase] = time_ns / looked[phase]
    return scales
