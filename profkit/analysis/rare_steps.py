"""Steps that are rare and long, such as those with an evaluation: the line that runs in them alone, and what it takes.

A line's time is a mean of all steps in which lines were looked for. What rare steps add to the mean of each phase is
known, and is taken from its lines as their standard errors say.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from operator import not_
from statistics import fmean, median

from profkit.analysis.time_account.step_times import mark_rare_steps, samples_on_host
from profkit.names import DATA, INFERENCE, STEP
from profkit.run.directory import Run
from profkit.run.lines import FEWEST_SAMPLES, NEAR, CallTree, LineTime, RunLines

_LEAST_LONGER = 0.02
_COVERED = 0.5
_OF_ERROR = 0.9
_MOST_OF_LONGEST = 0.8
_HELD_NS = 10_000_000
"""The thread that samples each millisecond waits so long only where another one keeps Python's lock."""
_STRAY = 1
"""One sample in another step may be of a pause."""


@dataclass(frozen=True)
class RareSteps:
    """Steps that took far longer than most of those in which lines were looked for: the typical step leaves them out.

    ``count`` of ``of`` steps took ``longer_ns`` longer than the typical one, on average: one in ``every``, None if that
    is not known; the steps that were timed before are among them. ``line`` is the longest of those that ran in them
    alone, None if there was none; with those that stand near it, it takes ``lines_ns`` of such a step, on average.
    ``call`` is the line in whose call it ran if that is what takes so long, and ``line`` has only most of it.
    """

    count: int
    of: int
    longer_ns: int
    every: int | None
    line: LineTime | None
    lines_ns: int = 0
    call: LineTime | None = None

    @property
    def which(self) -> str:
        """How often they come, as the beginning of a sentence: ``one step in 24 takes``."""
        return f"one step in {self.every} takes" if self.every else f"{self.count} of {self.of} steps took"

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
    places = _join_phases(alone)
    line = _choose_exclusive(places, elsewhere, _sum_by_phase(alone))
    innermost = [line for line in places if not line.is_caller]
    # One alone may be a pause of the machine's, unless a line shows what ran in it; it waits where others wait, too.
    if len(rare) == 1 and sum(line.time_ns for line in innermost) * len(times) < _COVERED * apart_ns:
        return None
    every = _distance_of([*[-1] * found.steps.is_after_rare, *rare], len(times))
    together = [] if line is None or line.is_caller else [each for each in innermost if _is_near(each, line)]
    lines_ns = sum(each.time_ns for each in together) if line is None or together else line.time_ns
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
    )


def _split_waits(steps: Iterable[Mapping[str, int]]) -> tuple[list[int], list[int]]:
    """Return what each step took without its waits for data, and these."""
    waits = [(step[f"{STEP}_ns"], step.get(f"{DATA}_ns", 0)) for step in steps]
    return [step_ns - wait_ns for step_ns, wait_ns in waits], [wait_ns for _, wait_ns in waits]


def _find_exclusive(found: RunLines, rare: int) -> tuple[list[LineTime], set[tuple[str | None, int]]]:
    """Return the lines that run in so many rare steps alone, and where lines run in other steps, too."""
    steps = len(found.steps.steps)
    spread = _spread_of(rare, steps)
    known = [line for line in (*found.lines, *found.callers) if line.file and line.thread != "worker"]
    alone = [line for line in known if _varies_as_rare(line, spread)]
    elsewhere = {line.place for line in known if line not in alone and line.samples > _STRAY}

    def is_named(line: LineTime) -> bool:
        is_seen = line.samples >= FEWEST_SAMPLES or _holds_lock(line, steps)
        return is_seen and (line.phase != DATA or line.place not in elsewhere)

    return list(filter(is_named, alone)), elsewhere


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
    return line.thread != "worker" and line.samples >= FEWEST_SAMPLES and _varies_as_rare(line, spread)


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
