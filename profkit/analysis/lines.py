"""The lines of source behind a step's time, found in steps of their own and scaled to the unprofiled ones; and those
that run in rare, long steps alone, as of an evaluation.

A line's time is its mean of all steps in which lines were looked for. What rare steps among these took longer is known
of each phase, and is taken from its lines as their standard errors say; what is left is what the usual steps took on
average. This is scaled to what the typical unprofiled step has of the phase, so that the lines sum up to the step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress, pairwise
from operator import not_
from statistics import fmean, median
from typing import Any

from profkit.analysis import NotebookResult
from profkit.analysis.time_account.step_times import (
    PhaseSamples,
    mark_rare_steps,
    samples_by_phase,
    samples_on_host,
    settle_waits,
)
from profkit.errors import Finding, RunError
from profkit.names import DATA, EVALUATION, INFERENCE, STEP
from profkit.run.directory import Run
from profkit.run.lines import FEWEST_SAMPLES, NEAR, CallTree, LineTime, RunLines, calls_backward, lines_of_trainers
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

    Medians of phases may add up to more than the median of the step. Phases of which no factor is known have what the
    others leave of it.
    """
    if STEP not in unprofiled:
        return scale
    step_ns, own = unprofiled[STEP].typical_ns, [line for line in lines if line.thread == "main"]
    if STEP not in scale:
        known_ns = sum(line.time_ns * scale[line.phase] for line in own if line.phase in scale)
        unknown_ns = sum(line.time_ns for line in own if line.phase not in scale)
        if 0 < step_ns - known_ns < unknown_ns:
            scale = scale | dict.fromkeys((None, STEP), (step_ns - known_ns) / unknown_ns)
    whole_ns = sum(_scaled(line.time_ns, line, scale) for line in own)
    fit = min(1.0, step_ns / whole_ns) if whole_ns else 1.0
    return {phase: factor * fit for phase, factor in scale.items()}


_LEAST_LONGER = 0.02
_COVERED = 0.5
_OF_ERROR = 0.9
_FAR_MORE = 1.25
_OF_CHANCE = 2
"""So many times the standard error that its few samples give a line is hardly chance."""
_LEAST_OF_LONGER = 0.1
"""A line with less of what rare steps take longer says nothing of them."""
_MOST_OF_LONGEST = 0.8
_HELD_NS = 10_000_000
"""The thread that samples each millisecond waits so long only where another one keeps Python's lock."""
_STRAY = 1
"""One sample in another step may be of a pause."""
_FEW = 2
"""Of more rare steps a line that explains them runs in several."""
_LAST, _EXCEPTIONS, _SHORTER = 10, 2, 0.7
"""The last so many steps, but for exceptions, take less than this share of the timed ones that were warming up."""


@dataclass(frozen=True)
class RareSteps:
    """Steps that took far longer than most of those in which lines were looked for: the typical step leaves them out.

    ``count`` of ``of`` steps took ``longer_ns`` longer than the typical one, on average: one in ``every``, None if that
    is not known; the steps that were timed before are among them. ``line`` is the longest of those that ran in them
    alone, None if there was none; with those that stand near it, it takes ``lines_ns`` of such a step, on average.
    ``call`` is the line in whose call it ran if that is what takes so long, and ``line`` has only most of it.
    ``copy`` is a line that moves tensors to the CPU for longer than anything else takes, passes of the model included.
    """

    count: int
    of: int
    longer_ns: int
    every: int | None
    line: LineTime | None
    lines_ns: int = 0
    call: LineTime | None = None
    copy: LineTime | None = None

    @property
    def which(self) -> str:
        """How often they come, as the beginning of a sentence: ``one step in 24 takes``."""
        return f"one step in {self.every} takes" if self.every else f"{self.count} of {self.of} steps took"

    @property
    def one_in(self) -> float:
        """Of how many steps one is rare: as they come, else of those that were seen."""
        return self.every or self.of / self.count

    @property
    def mean_longer_ns(self) -> int:
        """By how much they make the mean step longer than the typical one."""
        return round(self.longer_ns / self.one_in)

    @property
    def is_explained(self) -> bool:
        """Whether the line has most of what makes these steps longer; else only ``lines_ns`` of it are its own."""
        return self.lines_ns >= _MOST_OF_LONGEST * self.longer_ns

    @property
    def evaluates(self) -> bool:
        """Whether most of it is a model's passes without gradients."""
        is_most = self.call is None or (
            self.line is not None and self.line.time_ns >= _MOST_OF_LONGEST * self.call.time_ns
        )
        return is_most and self.line is not None and self.line.phase == INFERENCE


def find_rare_steps(found: RunLines, timed: Sequence[Mapping[str, int]] = ()) -> RareSteps | None:
    """Return the steps of a run that are rare and long, of which the recorded ones need hold none.

    How long they are, and why, show those in which lines were looked for. How many there are show the ``timed``, too.

    Waits for data are part of the typical step, which has their mean; what a rare one waits longer, for batches of an
    evaluation say, is part of the rare one. The first step counts for none, if looking for lines began in it. A line
    that runs in rare steps alone has the standard error that so few of so many steps give it.
    """
    times, waits = _split_waits(found.steps.steps)
    usual_ns = median(times) if times else 0
    is_rare = mark_rare_steps(found.steps.steps).tolist()
    usual_wait_ns = fmean([*compress(waits, map(not_, is_rare))] or [0])
    rare = [at for at, marked in enumerate(is_rare) if marked and (at or found.steps.is_after_rare)]
    apart_ns = sum(times[at] - usual_ns for at in rare)
    longer_ns = apart_ns + sum(max(0.0, waits[at] - usual_wait_ns) for at in rare)
    if not rare or longer_ns < _LEAST_LONGER * sum(times):
        return None
    alone, elsewhere = _find_exclusive(found, len(rare))
    if len(rare) > _FEW:
        # What ran in one of them alone may be a pause of the machine's, and says nothing of the others.
        alone = [
            line for line in alone if not _is_of_one_step(line) or line.time_ns * len(times) >= _COVERED * longer_ns
        ]
    places = _join_phases(alone)
    line = _choose_exclusive(places, elsewhere, _sum_by_phase(alone))
    innermost = [line for line in places if not line.is_caller]
    # One alone may be a pause of the machine's, unless a line shows what ran in it; it waits where others wait, too.
    if len(rare) == 1 and sum(line.time_ns for line in innermost) * len(times) < _COVERED * apart_ns:
        return None
    every = _distance_of([*[-1] * found.steps.is_after_rare, *rare], len(times))
    together = [] if line is None or line.is_caller else [each for each in innermost if _is_near(each, line)]
    lines_ns = sum(each.time_ns for each in together) if line is None or together else line.time_ns
    if lines_ns * len(times) < _LEAST_OF_LONGER * longer_ns:
        line, lines_ns = None, 0
    if line is None and len(rare) + found.steps.is_after_rare <= _FEW:
        every = None  # two pauses of the machine's have a distance, too
    count, of = len(rare) + int(mark_rare_steps(timed).sum()), len(times) + len(timed)
    most = line
    if line is not None and line.is_caller:
        only = [each for each in alone if each.place not in elsewhere]
        most = CallTree(found.lines, found.callers).most_of(line, only)
    return RareSteps(
        count,
        of,
        round(longer_ns / len(rare)),
        every,
        most,
        round(lines_ns * len(times) / len(rare)),
        line if most is not line else None,
        _find_copy(innermost, longer_ns / len(times), found.steps.steps, rare),
    )


def _find_copy(
    lines: Sequence[LineTime], longer_ns: float, steps: Sequence[Mapping[str, int]], rare: Sequence[int]
) -> LineTime | None:
    """Return the line that copies to the CPU for most of ``longer_ns``, both as means of all steps.

    It also waits for what the GPU was given before: for passes without gradients, of which the steps have the times.
    """
    passes = (step.get(f"{phase}_event_ns", 0) for step in (steps[at] for at in rare) for phase in EVALUATION)
    least_ns = max(_COVERED * longer_ns, 2 * sum(passes) / len(steps))
    copies = [line for line in lines if line.may_move_to_cpu and line.time_ns > least_ns]
    return max(copies, key=lambda line: line.time_ns, default=None)


def _split_waits(steps: Iterable[Mapping[str, int]]) -> tuple[list[int], list[int]]:
    """Return what each step took without its waits for data, and these."""
    waits = [(step[f"{STEP}_ns"], step.get(f"{DATA}_ns", 0)) for step in steps]
    return [step_ns - wait_ns for step_ns, wait_ns in waits], [wait_ns for _, wait_ns in waits]


def _find_exclusive(found: RunLines, rare: int) -> tuple[list[LineTime], set[tuple[str | None, int]]]:
    """Return the lines that run in so many rare steps alone, and where lines run in other steps, too.

    A trainer's line runs all of every step: of one that has most of its time in rare steps that part is returned.
    """
    steps = len(found.steps.steps)
    spread = _spread_of(rare, steps)
    known = [line for line in (*found.lines, *found.callers) if line.file and line.thread != "worker"]
    alone = [line for line in known if _varies_as_rare(line, spread)]
    others, trainers = [line for line in known if line not in alone], lines_of_trainers(known)
    added = _added_by_rare_steps(found.steps.steps)
    alone = [_within_added(line, added) for line in alone]
    elsewhere = {line.place for line in others if line.samples > _STRAY}
    alone += [
        replace(line, time_ns=round(_most_added(line, spread)))
        for line in others
        if line.place in trainers and _most_added(line, spread) >= _COVERED * line.time_ns
    ]

    waiting = {line.place for line in others if line.phase == DATA and line.samples > _STRAY}

    def is_named(line: LineTime) -> bool:
        is_seen = line.samples >= _enough_samples(spread) or _holds_lock(line, steps)
        return is_seen and (line.phase != DATA or line.place not in waiting)

    return list(filter(is_named, alone)), elsewhere


def _within_added(line: LineTime, added: Mapping[str | None, float]) -> LineTime:
    """Return a line of rare steps with hardly more than these add to its phase, and to waits for data in it.

    A pause in one of all steps makes the error of a line that runs in all of them as large.
    """
    most_ns = added.get(line.phase, float(line.time_ns)) + (added.get(DATA, 0.0) if line.phase != DATA else 0.0)
    return replace(line, time_ns=round(most_ns)) if line.time_ns > _FAR_MORE * most_ns else line


def _distance_of(rare: Sequence[int], steps: int) -> int | None:
    """Return after how many steps the next rare one comes, None if they are not at equal distances in all ``steps``."""
    apart = {later - earlier for earlier, later in pairwise(rare)}
    if len(apart) != 1:
        return None
    every = apart.pop()
    return every if every > 1 and rare[0] <= every and rare[-1] + every >= steps else None


def find_rare_steps_of(run: Run) -> RareSteps | None:
    """Return the rare steps of a run's first rank, of the timed ones, too; None of a run without lines."""
    found, timed = run.lines(), run.manifest.unprofiled
    return None if found is None else find_rare_steps(found, () if timed is None else timed.steps)


def find_later_step(found: RunLines, timed_ns: float) -> int | None:
    """Return the median of the last steps that were looked at, if they are far shorter than those that were timed.

    These were still warming up, as where each new length is planned. Hardly any of the last may be an exception.
    ``timed_ns`` is one of those; of all steps their waits for data are left out.
    """
    times, _ = _split_waits(found.steps.steps)
    last = sorted(times[-_LAST:])
    is_shorter = len(times) > _LAST and last[_LAST - 1 - _EXCEPTIONS] < _SHORTER * timed_ns
    return round(median(last)) if is_shorter else None


def describe_later_step(later_ns: int, timed_ns: float) -> Finding:
    return Finding(
        "steps-become-shorter",
        f"the steps become shorter: the last {_LAST} that were seen took {later_ns / 1e6:.3g} ms, waits for data aside,"
        f" and those that were timed {timed_ns / 1e6:.3g}; time later ones (`profkit run --warmup 60`)",
    )


def _is_of_one_step(line: LineTime) -> bool:
    """Return whether one step has a line's whole time: the standard error of the mean is then as large as that."""
    return line.error_ns >= _OF_ERROR * line.time_ns


def _holds_lock(line: LineTime, steps: int) -> bool:
    """Return whether a line keeps Python's lock, as gc.collect does: few samples, since no other thread runs."""
    return line.time_ns * steps >= _HELD_NS * line.samples > 0


def _is_near(one: LineTime, other: LineTime) -> bool:
    return (one.file, one.function) == (other.file, other.function) and abs(one.line - other.line) <= NEAR


def _join_phases(lines: Iterable[LineTime]) -> list[LineTime]:
    """Return one line for each place, with what it takes in all phases: a call may evaluate a model, and write files.

    It is in the phase in which it takes most, and calls nothing by name if it calls different things.
    """
    together: dict[tuple[object, ...], list[LineTime]] = {}
    for line in lines:
        together.setdefault((line.place, line.function, line.is_caller), []).append(line)
    return [
        replace(
            max(own, key=lambda line: line.time_ns),
            called=own[0].called if len({line.called for line in own}) == 1 else None,
            samples=sum(line.samples for line in own),
            time_ns=sum(line.time_ns for line in own),
            error_ns=sum(line.error_ns for line in own),
            waits=sum(line.waits for line in own),
            waiting_ns=sum(line.waiting_ns for line in own),
        )
        for own in together.values()
    ]


def _sum_by_phase(lines: Iterable[LineTime]) -> Mapping[tuple[str | None, int], Counter[str | None]]:
    times_ns = defaultdict[tuple[str | None, int], Counter[str | None]](Counter)
    for line in lines:
        times_ns[line.place][line.phase] += line.time_ns
    return times_ns


def _choose_exclusive(
    lines: Sequence[LineTime],
    elsewhere: Collection[tuple[str | None, int]],
    by_phase: Mapping[tuple[str | None, int], Counter[str | None]],
) -> LineTime | None:
    """Return the longest of the lines that run nowhere else, if it has most of what these take with all they call.

    Else the innermost that has: the lines of a model that is evaluated run in every step, and that which calls it for
    the evaluation does not. Lines that run nowhere else say little where another one takes far longer in rare steps.
    What takes longer in a phase than the longest line, ``by_phase``, is not called by that.
    """
    only = [line for line in lines if line.place not in elsewhere]
    longest = max(only, key=lambda line: line.time_ns, default=None)
    longest_own_ns = max((line.time_ns for line in lines if not line.is_caller), default=0)
    most = []
    if longest is not None and longest.time_ns >= _COVERED * longest_own_ns:
        most = [line for line in only if line.time_ns >= _MOST_OF_LONGEST * longest.time_ns]
    own = [line for line in (most or lines) if not line.is_caller]
    if own or longest is None:
        return max(own, key=lambda line: line.time_ns, default=None)
    nested = [line for line in most if by_phase[line.place] <= by_phase[longest.place]]
    return min(nested, key=lambda line: line.time_ns, default=None)


def leave_out_rare_steps(found: RunLines) -> RunLines:
    """Return the lines with what the usual steps took on average, without those that run in rare steps alone.

    What rare steps add to the mean of a phase is known; a line's standard error says how much of that may be its own.
    """
    steps = found.steps.steps
    rare = int(mark_rare_steps(steps).sum())
    if not rare or len({step.get("context") for step in steps}) > 1:
        return found
    spread, added = _spread_of(rare, len(steps)), _added_by_rare_steps(steps)
    alone = _find_alone(found, spread)
    by_phase: dict[str | None, list[LineTime]] = {}
    for line in found.lines:
        if line.thread != "worker":
            by_phase.setdefault(line.phase, []).append(line)
    taken: dict[tuple[object, ...], float] = {}
    for phase, own in by_phase.items():
        taken |= _share_added(own, added.get(phase, 0.0), spread, alone)
    # A line that had called others has what these have, and the others of its phase are no part of it.
    of_callers = [
        0.0 if line.thread == "worker" else min(_most_added(line, spread), added.get(line.phase, 0.0))
        for line in found.callers
    ]
    lines = [_take(line, taken.get(line.identity, 0.0), spread) for line in found.lines]
    callers = [_take(line, rare_ns, spread) for line, rare_ns in zip(found.callers, of_callers, strict=True)]
    return replace(found, lines=_drop_none(lines), callers=_drop_none(callers))


def _drop_none(lines: Iterable[LineTime | None]) -> tuple[LineTime, ...]:
    return tuple(line for line in lines if line is not None)


def _added_by_rare_steps(steps: Sequence[Mapping[str, int]]) -> dict[str | None, float]:
    """Return by how much rare steps make the mean of each phase longer; that of time outside of phases has no name."""
    looked = samples_on_host(steps)
    added = {
        phase: max(float(times.total_ns.sum()) / len(steps) - times.mean_ns, 0.0) for phase, times in looked.items()
    }
    outside_ns = max(added.pop(STEP, 0.0) - sum(added.values()), 0.0)
    return added | {None: outside_ns}


def _find_alone(found: RunLines, spread: float) -> set[tuple[object, ...]]:
    """Return which lines run in rare steps alone: as their errors say, or those of their callers for few samples."""
    usual = {line.place for line in found.callers if not _varies_as_rare(line, spread)}
    calling = {line.place for line in found.callers if _is_alone(line, spread)} - usual
    return {
        line.identity
        for line in found.lines
        if _is_alone(line, spread) or (_varies_as_rare(line, spread) and line.caller_place in calling)
    }


def _varies_as_rare(line: LineTime, spread: float) -> bool:
    """Return whether the standard error of a line is that of one which runs in rare steps alone; see `_spread_of`."""
    return line.error_ns * spread >= _OF_ERROR * line.time_ns


def _is_alone(line: LineTime, spread: float) -> bool:
    return line.thread != "worker" and line.samples >= _enough_samples(spread) and _varies_as_rare(line, spread)


def _enough_samples(spread: float) -> float:
    """Return from how many samples on chance alone hardly gives a line of all steps the error of rare steps' lines."""
    return max(FEWEST_SAMPLES, (_OF_CHANCE * spread / _OF_ERROR) ** 2)


def _spread_of(rare: int, steps: int) -> float:
    """Return what the standard error of a mean of steps is multiplied by to be what rare ones alone add to the mean."""
    return math.sqrt(rare * (steps - 1) / (steps - rare))


def _most_added(line: LineTime, spread: float) -> float:
    return min(float(line.time_ns), line.error_ns * spread)


def _share_added(
    lines: Sequence[LineTime], added_ns: float, spread: float, alone: Collection[tuple[object, ...]]
) -> dict[tuple[object, ...], float]:
    """Return how much of what rare steps add to a phase's mean is each line's; first come lines of rare steps alone."""
    taken: dict[tuple[object, ...], float] = {}
    for is_alone in (True, False):
        own = [line for line in lines if (line.identity in alone) == is_alone]
        weights = {line.identity: _most_added(line, spread) for line in own}
        whole = sum(weights.values())
        part = min(added_ns / whole, 1.0) if whole else 0.0
        taken |= {key: part * weight for key, weight in weights.items()}
        added_ns -= part * whole
    return taken


def _leave_unnamed(line: LineTime, time_ns: int) -> LineTime | None:
    """Return what usual steps take of a line that rare steps have nearly all of: too little to name, and some time."""
    if line.is_caller or time_ns <= 0:
        return None
    return LineTime(None, 0, "", None, line.phase, line.thread, 0, time_ns, 0, 0.0)


def _take(line: LineTime, rare_ns: float, spread: float) -> LineTime | None:
    """Return a line without its time in rare steps, which made its error larger; of hardly any other without a name."""
    if not rare_ns:
        return line
    left = 1 - rare_ns / line.time_ns
    if rare_ns >= _OF_ERROR * line.time_ns:
        return _leave_unnamed(line, round(left * line.time_ns))
    of_few_ns = left * line.time_ns / math.sqrt(max(left * line.samples, 1.0))
    usual_error_ns = math.sqrt(max(line.error_ns**2 - (rare_ns / spread) ** 2, 0.0))
    return replace(
        line,
        time_ns=round(left * line.time_ns),
        error_ns=round(max(usual_error_ns, min(of_few_ns, line.error_ns))),
        waiting_ns=round(left * line.waiting_ns),
    )
