"""The lines of source behind a step's time: found in steps of their own, and scaled to the unprofiled ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from profkit.analysis import NotebookResult, table_of
from profkit.analysis.time_account.step_times import mark_rare, samples_by_phase, settle_waits
from profkit.errors import RunError
from profkit.names import DATA, STEP
from profkit.run.directory import Run
from profkit.run.lines import FEWEST_SAMPLES, LineTime, RunLines, calls_backward, lines_of_trainers
from profkit.run.manifest import Samples

_PART = 0.1
_MOST_NAMED = 2

_FEWEST_ALIKE, _ALIKE = 5, 0.1
"""So few samples name a line if their error is below this share of its time: all steps agree."""

_LARGEST_SCALE = 1.5
"""Looking for lines has slowed no step by more than this, nor sped it up."""
_LEAST_LONGER = 0.02
_COVERED = 0.5
_OF_ERROR = 0.9
_MOST_OF_LONGEST = 0.8
NEAR = 8
"""Lines of a function that stand this close together do one thing."""
_STRAY = 1
"""One sample in another step may be of a pause."""


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


@dataclass(frozen=True)
class RareSteps:
    """Steps that took far longer than most of those in which lines were looked for: the typical step leaves them out.

    ``count`` of ``of`` steps took ``longer_ns`` longer than the typical one, on average: one in ``every``, None if that
    is not known. ``line`` is the longest of those that ran in them alone, None if there was none; with those that stand
    near it, it takes ``lines_ns`` of each step, on average.
    """

    count: int
    of: int
    longer_ns: int
    every: int | None
    line: LineTime | None
    lines_ns: int = 0

    @property
    def which(self) -> str:
        """How often they come, as the beginning of a sentence: ``one step in 24 takes``."""
        return f"one step in {self.every} takes" if self.every else f"{self.count} of {self.of} other steps took"


def find_rare_steps(found: RunLines) -> RareSteps | None:
    """Return the steps of a run that are rare and long, of which the recorded ones need hold none.

    Waits for data are part of the typical step, which has their mean. The first step counts for none: looking for lines
    began in it. A line that runs in rare steps alone has the standard error that so few of so many steps give it.
    """
    times = [step[f"{STEP}_ns"] - step.get(f"{DATA}_ns", 0) for step in found.steps.steps]
    usual_ns = median(times) if times else 0
    rare = [at for at, is_rare in enumerate(mark_rare(times)) if at and is_rare]
    longer_ns = sum(times[at] - usual_ns for at in rare)
    if not rare or longer_ns < _LEAST_LONGER * sum(times):
        return None
    least_error = _OF_ERROR * math.sqrt((len(times) - len(rare)) / (len(rare) * (len(times) - 1)))
    known = [line for line in (*found.lines, *found.callers) if line.file and line.thread != "worker"]
    alone = [line for line in known if line.error_ns >= least_error * line.time_ns]
    elsewhere = {line.place for line in known if line not in alone and line.samples > _STRAY}
    alone = [line for line in alone if line.samples >= FEWEST_SAMPLES]
    line = _choose_exclusive(alone, elsewhere)
    alone = [line for line in alone if not line.is_caller]
    # One alone may be a pause of the machine's, unless a line shows what ran in it.
    if len(rare) == 1 and sum(line.time_ns for line in alone) * len(times) < _COVERED * longer_ns:
        return None
    apart = {later - earlier for earlier, later in pairwise(rare)}
    every = apart.pop() if len(apart) == 1 else None
    together = [] if line is None or line.is_caller else [each for each in alone if _is_near(each, line)]
    lines_ns = sum(each.time_ns for each in together) if line is None or together else line.time_ns
    return RareSteps(len(rare), len(times), round(longer_ns / len(rare)), every, line, lines_ns)


def _is_near(one: LineTime, other: LineTime) -> bool:
    return (one.file, one.function) == (other.file, other.function) and abs(one.line - other.line) <= NEAR


def _choose_exclusive(lines: Sequence[LineTime], elsewhere: Collection[tuple[str | None, int]]) -> LineTime | None:
    """Return the longest of the lines that run nowhere else, if it has most of what these take with all they call.

    Else the innermost that has: the lines of a model that is evaluated run in every step, and that which calls it for
    the evaluation does not.
    """
    only = [line for line in lines if line.place not in elsewhere]
    longest_ns = max((line.time_ns for line in only), default=0)
    most = [line for line in only if line.time_ns >= _MOST_OF_LONGEST * longest_ns]
    own = [line for line in (most or lines) if not line.is_caller]
    if own:
        return max(own, key=lambda line: line.time_ns)
    return min(most, key=lambda line: line.time_ns, default=None)


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
    unprofiled = _step_times(settle_waits(run.manifest) or Samples())
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
