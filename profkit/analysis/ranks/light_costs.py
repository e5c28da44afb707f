"""What ranks did and cost by light records: phases on the host and on the GPU, before the collective that waited.

In each step there is a first collective that makes the median rank wait long. What a rank's host did between its call
of the collective before and its call of that one is where the time went: the phases, the time between two of them
(named after the later), and waits for data. Between two phases the host may wait for the GPU: what counts there is the
time in which the GPU was between phases too. What kernels took longer is known for whole phases only, from events on
the GPU. A rank is late by its longest wait of each step, and a host counts as in the last step in which no full queue
of launches held it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from profkit.analysis.intervals import NOTHING, Stretches, spread, subtract, unite
from profkit.analysis.ranks.costs import Cost, saved_beside, sum_cost
from profkit.analysis.ranks.matching import Matched, waits_by_step
from profkit.analysis.ranks.own_time import BEFORE, Account, Floats, Part, ReducedRank, clock_of
from profkit.names import BACKWARD, DATA
from profkit.run.light_columns import UNKNOWN, Phases, StepColumns, rows_of_steps
from profkit.trace.columns import Bools, Ints

_MUCH = 0.05
"""A host is free in a phase if its GPU is behind it by at most this share of a step when the phase begins. Less than
this share is hardly anything."""
_FEWEST_UNRECORDED = 3
_MOST_FREE = 0.1
"""At least this share of its steps count as free: those in which its GPU was least behind."""
_TIED = 0.5
"""A host is tied to its GPU if what it takes once its GPU began varies by less than this share of what it takes in
all."""
_FEWEST_TIED = 8
"""From half as many steps as are judged nobody could tell that."""


_AT_THE_END = ("all_reduce", "reduce_scatter")
"""What is launched in a backward pass and waited for at its end: reductions of gradients."""


def account_before_waits(rank: ReducedRank, matched: Sequence[Matched]) -> Account:
    """Return what a rank did before the first long wait of each measured step; without one, in the whole step."""
    number, named = rank.record.rank, rank.steps.named
    mine = [(match, match.ranks.index(number)) for match in matched if number in match.ranks]
    on_host, times_ns = _sum_phases(rank.steps, _host_waits(mine), *_find_windows(rank.steps, mine))
    on_gpu, longer_ns = rank.longer_on_gpu
    clock = clock_of(rank.steps, named)
    return Account(on_host + on_gpu, np.hstack([times_ns, longer_ns]), np.zeros(len(named)), False, clock)


def _host_spans(steps: StepColumns) -> tuple[Ints, Ints, Ints, list[str]]:
    """Return when the host was in each phase or between two while its GPU was in none."""
    phases, gpu = steps.phases, steps.gpu_phases
    order = np.lexsort((phases.name, phases.end_ns, phases.start_ns))
    start, end, name, names = phases.start_ns[order], phases.end_ns[order], phases.name[order], phases.names
    reach = np.maximum.accumulate(np.concatenate([start[:1], end]))
    before = np.flatnonzero(start > reach[:-1])
    known = gpu.start_ns <= gpu.end_ns
    between = subtract(Stretches(reach[before], start[before]), unite(gpu.start_ns[known], gpu.end_ns[known]))
    followed_by = name[before[np.searchsorted(start[before], between.start_ns, side="right")]]
    start = np.concatenate([between.start_ns, np.maximum(start, reach[:-1])])
    end = np.concatenate([between.end_ns, np.maximum(end, reach[:-1])])
    order = np.lexsort((end, start))
    number = np.concatenate([followed_by + len(names), name])
    return start[order], end[order], number[order], [*names, *(f"{BEFORE}{name}" for name in names)]


def has_untimed_waits(ranks: Sequence[ReducedRank], matched: Sequence[Matched]) -> bool:
    """Return whether ranks may have waited where nobody timed it.

    Of what is reduced in a backward pass the wait at the pass's end is known; not so of other collectives.
    """
    phases_of = {rank.record.rank: rank.steps.phases for rank in ranks}
    for match in matched:
        if not match.is_untimed.any():
            continue
        phases = phases_of[match.ranks[0]]
        is_backward = np.array([name == BACKWARD for name in phases.names], dtype=np.bool_)[phases.name]
        starts, ends, called = phases.start_ns[is_backward], phases.end_ns[is_backward], match.called_ns[0]
        at = np.searchsorted(starts, called, side="right") - 1
        in_backward = (at >= 0) & (called < ends[at]) if len(ends) else np.zeros(len(called), dtype=np.bool_)
        if (match.is_untimed & ~(in_backward & np.isin(match.kind, _AT_THE_END))).any():
            return True
    return False


def _host_waits(mine: Sequence[tuple[Matched, int]]) -> Stretches:
    called = [match.called_ns[here][match.only_called] for match, here in mine]
    waits = [match.wait_ns[here, match.only_called] for match, here in mine]
    return unite(np.concatenate(called), np.concatenate(called) + np.concatenate(waits)) if mine else NOTHING


def _find_windows(steps: StepColumns, mine: Sequence[tuple[Matched, int]]) -> tuple[Ints, Ints]:
    """Return for each measured step the call of the collective before the first one that waited long, and of that one.

    Of a step without one, its own start and end. Long is half of the longest wait of the step: whoever is late in one
    collective is often late in all after it.
    """
    begin, end = steps.start_ns.copy(), steps.end_ns.copy()
    longest = np.zeros(len(steps), dtype=np.int64)
    for match, here in mine:
        np.maximum.at(longest, match.step[here], match.median_wait_ns)
    windows = []
    for match, here in mine:
        step, called = match.step[here], match.called_ns[here]
        is_long = (match.median_wait_ns > 0) & (match.median_wait_ns * 2 >= longest[step])
        # Where nobody timed a collective the rank may have waited in it or not: what came before it counts too.
        timed = np.flatnonzero(~match.is_untimed)
        which = np.flatnonzero(is_long[timed])
        which = which[which > 0]
        before, rows = called[timed[which - 1]], timed[which]
        known = (before > 0) & (called[rows] > before)
        windows.append((step[rows][known], before[known], called[rows][known]))
    if windows:
        step, before, called = (np.concatenate(column) for column in zip(*windows, strict=True))
        order = np.lexsort((called, step))
        step, first = np.unique(step[order], return_index=True)
        begin[step], end[step] = before[order[first]], called[order[first]]
    return begin[steps.named], end[steps.named]


def _sum_phases(steps: StepColumns, waits: Stretches, begin_ns: Ints, end_ns: Ints) -> tuple[tuple[Part, ...], Floats]:
    start_ns, stop_ns, number, of_number = _host_spans(steps)
    first, last = np.searchsorted(stop_ns, begin_ns, side="right"), np.searchsorted(start_ns, end_ns, side="left")
    which, at = spread(first, last)
    start, stop = np.maximum(start_ns[at], begin_ns[which]), np.minimum(stop_ns[at], end_ns[which])
    names, name = np.unique(number[at], return_inverse=True)
    times = np.zeros((len(begin_ns), len(names)))
    np.add.at(times, (which, name), stop - start - waits.within(start, stop))
    phases = [of_number[name] for name in names.tolist()]
    return tuple(("data" if phase == DATA else "python", phase, "") for phase in phases), times


def step_times(steps: StepColumns) -> Floats:
    """Return the time from each measured step to the next; of one step, its own."""
    starts, ends = steps.start_ns[steps.named], steps.end_ns[steps.named]
    times: Floats = (np.diff(starts) if len(starts) > 1 else ends - starts).astype(np.float64)
    return times


def cost_by_waits(
    accounts: Sequence[Account],
    ranks: Sequence[ReducedRank],
    matched: Sequence[Matched],
    *,
    kept: Bools,
    is_untimed: bool,
) -> tuple[Cost, Cost, Set[str]]:
    """Return what each rank cost by how long others waited for it, and their phases on hosts and GPUs; twice.

    A step costs the longest wait; or what phases took longer on the others' GPUs, as far as they waited meanwhile, if
    that is more: many short waits, and kernels next to them that are slower. The first step is left out: what was
    before it is not known; those that are not ``kept``; and those before which all GPUs had nothing to do for a whole
    step, as while a recorder starts. If ``is_untimed`` some waits are unknown: then a rank also
    saves what its host was late.

    The second one is an estimate for phases in which hosts are held up in nearly every step, which are returned too.
    """
    count = min(map(len, accounts))
    step_ns = float(np.median(np.concatenate([step_times(rank.steps) for rank in ranks])))
    idle = np.array([rank.steps.launch_wait_ns[rank.steps.named[:count]] for rank in ranks])
    idle = np.where(idle == UNKNOWN, 0, idle).astype(np.float64)
    compared = kept[:count] & (idle.min(axis=0) <= step_ns)
    compared[0] = False
    if not compared.any():
        compared[min(1, count - 1) :] = True
    phases = _tabulate_phases([rank.steps for rank in ranks], count, step_ns)
    longest_waits, waits = (
        np.array([each[:count] for each in waits_by_step(ranks, matched, join)]) for join in (np.maximum, np.add)
    )
    longest, total = saved_beside(longest_waits), saved_beside(waits)
    on_gpu = sum(np.maximum(saved_beside(phase.on_gpu), 0.0) for phase in phases.values())
    saved = np.maximum(longest, np.minimum(on_gpu, total))
    if is_untimed:
        by_hosts = _late_hosts(idle, phases.values())
        saved = np.where(np.abs(by_hosts) > np.abs(saved), by_hosts, saved)
    did = []
    for at, account in enumerate(accounts):
        times = account.times_ns[:count].copy()
        for part, phase in _in_phases(account.parts, phases):
            times[:, part] = _usual_if_free(times[:, part], phase.free[at])
        did.append(replace(account, times_ns=times[compared]))
    steps = np.flatnonzero(compared)
    cost = sum_cost(did, saved[:, steps], step_ns)
    cost = replace(cost, longer_ns=_own_extra_time(cost, phases, steps))
    tied = {name for name, phase in phases.items() if phase.tied.any()}
    return cost, _estimate(cost, phases, waits, steps) if tied else cost, tied


def _in_phases(parts: Iterable[tuple[str, ...]], phases: Mapping[str, _Phase]) -> Iterator[tuple[int, _Phase]]:
    for at, (cause, phase, *_) in enumerate(parts):
        if cause == "python" and phase in phases:
            yield at, phases[phase]


def _estimate(cost: Cost, phases: Mapping[str, _Phase], waits_ns: Floats, steps: Ints) -> Cost:
    """Return the costs without what held up hosts in phases in which they are tied.

    There a host seems to take as long as the one it waits for. It was held up for as long as its GPU waited in the step
    (``waits_ns``), without what another one evidently did longer. Late there is no host that is held up itself, by
    others or by its own GPU, nor one that evidently did more longer elsewhere.
    """
    evident = np.maximum(cost.longer_ns, 0.0).sum(axis=2)
    is_first = np.arange(len(evident))[:, None] == evident.argmax(axis=0)
    by_others = np.where(is_first, np.partition(evident, -2, axis=0)[-2], evident.max(axis=0))
    held_up = np.maximum(waits_ns[:, steps] - by_others, 0.0)
    freed = []
    for rank, account in enumerate(cost.accounts):
        times = account.times_ns.copy()
        for at, phase in _in_phases(account.parts, phases):
            if phase.tied[rank]:
                times[:, at] = np.maximum(times[:, at] - held_up[rank], 0.0)
        freed.append(replace(account, times_ns=times))
    estimate = sum_cost(freed, cost.saved_ns, cost.step_ns)
    longer = _own_extra_time(estimate, phases, steps)
    for at, phase in _in_phases(estimate.places, phases):
        is_paced = np.median(phase.behind_at_end[:, steps], axis=1) > _MUCH * cost.step_ns
        is_elsewhere = np.median(evident, axis=1) > np.median(longer[:, :, at], axis=1)
        not_late = phase.tied | (phase.tied.any() & (is_paced | is_elsewhere))
        longer[not_late, :, at] = np.minimum(longer[not_late, :, at], 0.0)
    return replace(estimate, longer_ns=longer)


def _own_extra_time(cost: Cost, phases: Mapping[str, _Phase], steps: Ints) -> Floats:
    """Return the extra time of each rank that waiting for others does not explain, as (ranks, steps, places).

    Kernels may be waits; so may a phase that others usually take longer for, at whose end their GPUs are not behind
    their hosts, or in which they are held up: that these take longer counts for nobody. (A host that is ahead of its
    GPU has waited for nothing.) Between phases a host may wait for its GPU, or seem to do nothing while that is in one:
    there counts only much more.
    """
    longer = cost.longer_ns.copy()
    least = _MUCH * cost.step_ns
    for at, (cause, phase) in enumerate(cost.places):
        mine = longer[:, :, at]
        if cause == "kernels":
            longer[:, :, at] = np.maximum(mine, 0.0)
        elif cause == "python" and phase.startswith(BEFORE):
            longer[:, :, at] = np.where(mine < least, 0.0, mine)
    for at, where in _in_phases(cost.places, phases):
        longer[:, :, at] = _discount_others_waits(longer[:, :, at], where.behind_at_end[:, steps], where.tied, least)
    return longer


def _discount_others_waits(longer_ns: Floats, behind_ns: Floats, tied: Bools, least_ns: float) -> Floats:
    """Return what hosts took longer for a phase, as (ranks, steps), without what others may have waited in it.

    ``behind_ns`` is how far GPUs were behind their hosts at its end: less than ``least_ns`` on a host that waited.
    ``tied`` hosts are held up in it.
    """
    may_wait = (behind_ns + saved_beside(behind_ns) <= least_ns) & (np.median(longer_ns, axis=1) <= -least_ns)[:, None]
    others_tied = 2 * (tied.sum() - tied) >= len(tied) - 1
    unless: Floats = np.where(may_wait | others_tied[:, None], np.maximum(longer_ns, 0.0), longer_ns)
    return unless


@dataclass(frozen=True, eq=False)
class _Phase:
    """What a phase took, as (ranks, steps): on hosts, on GPUs, and how far these were behind at either end."""

    on_host: Floats
    on_gpu: Floats
    behind_at_start: Floats
    behind_at_end: Floats
    step_ns: float

    @property
    def since_gpu_began(self) -> Floats:
        since: Floats = np.maximum(self.on_host - self.behind_at_start, 0.0)
        return since

    @cached_property
    def free(self) -> Bools:
        """Where a host was not held up by a queue full of launches: its GPU was hardly behind it."""
        least = np.maximum(np.quantile(self.behind_at_start, _MOST_FREE, axis=1), _MUCH * self.step_ns)
        is_free: Bools = self.behind_at_start <= least[:, None]
        return is_free

    @cached_property
    def usual_on_host(self) -> Floats:
        return np.array([_usual_if_free(*both) for both in zip(self.on_host, self.free, strict=True)])

    @cached_property
    def tied(self) -> Bools:
        """Which hosts are held up in it in nearly every step.

        Such a host ends the phase when its GPU gets there, so what it takes varies with when its GPU began. That is
        judged by the half of the steps in which its GPU was least behind: a host held up seldom would be free there.
        """
        behind = self.behind_at_start
        ranks, steps = behind.shape
        if steps < 2 * _FEWEST_TIED:
            return np.zeros(ranks, dtype=np.bool_)
        half = np.argsort(behind, axis=1, kind="stable")[:, : steps // 2]
        varies, varies_since = (
            _spread(np.take_along_axis(times, half, axis=1)) for times in (self.on_host, self.since_gpu_began)
        )
        is_behind = np.quantile(behind, _MOST_FREE, axis=1) > _MUCH * self.step_ns
        is_tied: Bools = is_behind & (np.median(self.since_gpu_began, axis=1) > 0) & (varies_since < _TIED * varies)
        return is_tied


def _tabulate_phases(ranks: Sequence[StepColumns], count: int, step_ns: float) -> dict[str, _Phase]:
    found = {}
    for name in sorted({name for steps in ranks for name in {*steps.phases.names} & {*steps.gpu_phases.names}}):
        rows = []
        for steps in ranks:
            begin, end, took = _when(steps.phases, name, steps)
            began, ended, took_there = _when(steps.gpu_phases, name, steps)
            both = (begin != UNKNOWN) & (began != UNKNOWN)
            rows.append(np.where(both, [took, took_there, began - begin, ended - end], 0)[:, :count])
        on_host, on_gpu, at_start, at_end = np.array(rows, dtype=np.float64).swapaxes(0, 1)
        found[name] = _Phase(on_host, on_gpu, at_start, at_end, step_ns)
    return found


def _when(phases: Phases, name: str, steps: StepColumns) -> tuple[Ints, Ints, Ints]:
    begin, end = np.full((2, len(steps)), UNKNOWN)
    mine = phases.name == (phases.names.index(name) if name in phases.names else -1)
    step = phases.step[mine]
    begin[step[::-1]], end[step] = phases.start_ns[mine][::-1], phases.end_ns[mine]
    named = steps.named
    return begin[named], end[named], phases.times_of(name, len(steps))[named]


def _spread(times_ns: Floats) -> Floats:
    spread: Floats = np.median(np.abs(times_ns - np.median(times_ns, axis=1)[:, None]), axis=1)
    return spread


def _usual_if_free(times_ns: Floats, free: Bools) -> Floats:
    """Return what a host took in each step; where it may have been held up, at most what it took when last free."""
    last = np.maximum.accumulate(np.where(free, np.arange(len(free)), -1))
    last = np.where(last < 0, free.argmax(), last)
    usual: Floats = np.where(free, times_ns, np.minimum(times_ns, times_ns[last]))
    return usual


def _late_hosts(idle_ns: Floats, phases: Iterable[_Phase]) -> Floats:
    """Return how late each rank's host was in each step, as (ranks, steps); negative where others were.

    ``idle_ns`` is how long each GPU had nothing to do between two phases, as (ranks, steps).

    It was late by what its GPU had nothing to do for longer than theirs between two phases; or by what it took longer
    for a phase than their hosts do where they are free, as far as they waited: their GPUs were farther behind their
    hosts at the phase's end than its own, and hosts whose queue was full were held up for the rest. The longest of
    these counts. Recorders that empty the queues now and then, as profkit's own, leave steps in which hosts are free.
    """
    latest = -saved_beside(idle_ns)
    for phase in phases:
        host, usual = phase.on_host, phase.usual_on_host
        behind = saved_beside(phase.behind_at_end)
        theirs, theirs_free = host + saved_beside(host), usual + saved_beside(usual)
        late = np.where(behind > 0, np.clip(usual - theirs_free, 0.0, behind + theirs - theirs_free), 0.0)
        late = -saved_beside(late)
        latest = np.where(np.abs(late) > np.abs(latest), late, latest)
    return latest


def keep_steps(rank: ReducedRank, named: Set[str | None]) -> ReducedRank:
    kept = [at for at, name in enumerate(rank.steps.names) if name in named]
    parts, longer_ns = rank.longer_on_gpu
    return replace(
        rank,
        steps=rank.steps.only(kept),
        calls=rows_of_steps(rank.calls, kept, len(rank.steps)),
        longer_on_gpu=(parts, longer_ns[np.isin(rank.steps.named, kept)]),
    )


def keep_unrecorded(ranks: Sequence[ReducedRank]) -> list[ReducedRank] | None:
    """Return ranks that left full traces by what their light records say of the steps that no profiler recorded.

    The first step is left out. None where hardly any others are left, or ranks do not know the same ones.
    """
    light = [rank.light for rank in ranks if rank.light is not None]
    if len(light) < len(ranks):
        return None
    recorded = {name for rank in ranks for name in rank.steps.names}
    kept = [keep_steps(rank, _unrecorded([rank.steps for rank in light], recorded)) for rank in light]
    is_alike = len({rank.steps.names for rank in kept}) == 1
    return kept if is_alike and len(kept[0].steps) >= _FEWEST_UNRECORDED else None


def _unrecorded(light: Sequence[StepColumns], recorded: Set[str | None]) -> Set[str | None]:
    return set.intersection(*(set(steps.names[1:]) for steps in light)) - recorded


def host_factor(light: Sequence[StepColumns], recorded: Set[str | None]) -> float | None:
    """Return the factor on the hosts' time in phases that a profiler recorded with which it is as without one.

    It is that of the median rank. None where no phase is known of both kinds of steps.
    """
    names = _unrecorded(light, recorded)
    factors = []
    for steps in light:
        without, within = _phases_in(steps, names), _phases_in(steps, recorded)
        shared = without.keys() & within.keys()
        recorded_ns = sum(float(np.median(within[name].on_host)) for name in shared)
        if recorded_ns:
            factors.append(sum(float(np.median(without[name].usual_on_host)) for name in shared) / recorded_ns)
    return float(np.median(factors)) if factors else None


def _phases_in(steps: StepColumns, names: Set[str | None]) -> dict[str, _Phase]:
    chosen = steps.only([at for at, name in enumerate(steps.names) if name in names])
    times_ns = chosen.end_ns - chosen.start_ns
    return _tabulate_phases([chosen], len(chosen), float(np.median(times_ns))) if len(chosen) else {}


def longer_unrecorded(ranks: Sequence[ReducedRank], late: int) -> dict[str, Floats] | None:
    """Return how much longer the host of a rank was in each phase than the others', by step that no profiler recorded.

    The steps before which all GPUs had nothing to do for a whole step are left out. None where hardly any others are
    left, or no phase ran on a GPU: on the CPU a host also waits within its phases. ``late`` is the position of the rank
    that is asked about; all left full traces.
    """
    unrecorded = keep_unrecorded(ranks)
    if unrecorded is None:
        return None
    light = [rank.steps for rank in unrecorded]
    step_ns = float(np.median([steps.end_ns - steps.start_ns for steps in light]))
    is_step = np.min([steps.launch_wait_ns for steps in light], axis=0) <= step_ns
    phases = _tabulate_phases(light, len(is_step), step_ns)
    if not phases or is_step.sum() < _FEWEST_UNRECORDED:
        return None
    longer = {}
    for name, phase in phases.items():
        usual = phase.usual_on_host
        if not phase.tied[late]:
            usual = np.where(phase.tied[:, None], np.minimum(usual, phase.since_gpu_began), usual)
        late_by = _discount_others_waits(-saved_beside(usual), phase.behind_at_end, phase.tied, _MUCH * step_ns)
        longer[name] = late_by[late, is_step]
    return longer
