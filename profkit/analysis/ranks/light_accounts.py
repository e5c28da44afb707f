"""What ranks did before the collective that waited, from light records: phases on the host, and on the GPU.

In each step there is a first collective that makes the median rank wait long. What a rank's host did between its call
of the collective before and its call of that one is where the time went: the phases, the time between two of them
(named after the later), and waits for data. Between two phases the host may wait for the GPU: what counts there is the
time in which the GPU was between phases too. What kernels took longer is known for whole phases only, from events on
the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profkit.analysis.intervals import NOTHING, Stretches, spread, subtract, unite
from profkit.analysis.ranks.accounts import Account, StepParts, clock_of, part_on_host
from profkit.analysis.ranks.matching import Matched
from profkit.analysis.ranks.own_time import BEFORE
from profkit.analysis.ranks.reduced import ReducedRank
from profkit.names import BACKWARD
from profkit.run.light_columns import Phases
from profkit.trace.columns import Ints


@dataclass(frozen=True, eq=False)
class _Spans:
    """What a host did when: spans in order, none of which begin before another ends, and each one's name."""

    start_ns: Ints
    end_ns: Ints
    name: Ints
    names: list[str]


_AT_THE_END = ("all_reduce", "reduce_scatter")
"""What is launched in a backward pass and waited for at its end: reductions of gradients."""


def account_before_waits(rank: ReducedRank, matched: Sequence[Matched]) -> Account:
    """Return what a rank did before the first long wait of each measured step; without one, in the whole step."""
    number = rank.record.rank
    mine = [(one, one.ranks.index(number)) for one in matched if number in one.ranks]
    begin, end = _find_windows(rank, mine)
    on_host = _sum_spans(_host_spans(rank), _host_waits(mine), begin, end)
    named = rank.steps.named
    nothing = np.zeros(len(named))
    return Account(rank.record.rank, on_host.beside(rank.on_gpu), nothing, False, clock_of(rank.steps, named))


def _host_spans(rank: ReducedRank) -> _Spans:
    """Return when the host was in each phase or between two while its GPU was in none, by the rank's own clock."""
    start, end = _when(rank, rank.steps.phases)
    order = np.lexsort((rank.steps.phases.name, end, start))
    start, end, name, names = start[order], end[order], rank.steps.phases.name[order], rank.steps.phases.names
    reach = np.maximum.accumulate(np.concatenate([start[:1], end]))
    before = np.flatnonzero(start > reach[:-1])
    between = subtract(Stretches(reach[before], start[before]), _gpu_phases(rank))
    followed_by = name[before[np.searchsorted(start[before], between.start_ns, side="right")]]
    start = np.concatenate([between.start_ns, np.maximum(start, reach[:-1])])
    end = np.concatenate([between.end_ns, np.maximum(end, reach[:-1])])
    order = np.lexsort((end, start))
    number = np.concatenate([followed_by + len(names), name])
    return _Spans(start[order], end[order], number[order], [*names, *(f"{BEFORE}{name}" for name in names)])


def has_untimed_waits(ranks: Sequence[ReducedRank], matched: Sequence[Matched]) -> bool:
    """Return whether ranks may have waited where nobody timed it.

    Of what is reduced in a backward pass the wait at the pass's end is known; not so of other collectives.
    """
    by_number = {rank.record.rank: rank for rank in ranks}
    for one in matched:
        rank = by_number.get(one.ranks[0])
        if rank is None or not one.is_untimed.any():
            continue
        phases = rank.steps.phases
        is_backward = np.array([name == BACKWARD for name in phases.names], dtype=np.bool_)[phases.name]
        starts, ends = (when[is_backward] for when in _when(rank, phases))
        called = one.called_ns[0]
        at = np.searchsorted(starts, called, side="right") - 1
        in_backward = (at >= 0) & (called < ends[at]) if len(ends) else np.zeros(len(called), dtype=np.bool_)
        is_reduced = np.array([kind in _AT_THE_END for kind in one.kind], dtype=np.bool_)
        if (one.is_untimed & ~(in_backward & is_reduced)).any():
            return True
    return False


def _when(rank: ReducedRank, phases: Phases) -> tuple[Ints, Ints]:
    """Return the starts and ends of phases by the rank's own clock."""
    begin = rank.record.clock_base_ns + rank.steps.start_ns[phases.step]
    return begin + phases.start_ns, begin + phases.end_ns


def _gpu_phases(rank: ReducedRank) -> Stretches:
    """Return when the GPU was in any phase, by the rank's own clock."""
    start, end = _when(rank, rank.steps.gpu_phases)
    known = start <= end
    return unite(start[known], end[known])


def _host_waits(mine: Sequence[tuple[Matched, int]]) -> Stretches:
    """Return when the host of a rank waited in collectives of which only the call is known, as of gloo's."""
    starts, ends = [], []
    for one, here in mine:
        if one.only_called.any():
            called = one.called_ns[here][one.only_called]
            starts.append(called)
            ends.append(called + one.wait_ns[here, one.only_called])
    return unite(np.concatenate(starts), np.concatenate(ends)) if starts else NOTHING


def _find_windows(rank: ReducedRank, mine: Sequence[tuple[Matched, int]]) -> tuple[Ints, Ints]:
    """Return for each measured step the call of the collective before the first one that waited long, and of that one.

    Of a step without one, its own start and end. Long is half of the longest wait of the step: whoever is late in one
    collective is often late in all after it.
    """
    steps = rank.steps
    begin, end = (rank.record.clock_base_ns + side for side in (steps.start_ns, steps.end_ns))
    longest = np.zeros(len(steps), dtype=np.int64)
    for one, here in mine:
        np.maximum.at(longest, one.step[here], one.median_wait_ns)
    found = []
    for one, here in mine:
        step, called = one.step[here], one.called_ns[here]
        is_long = (one.median_wait_ns > 0) & (one.median_wait_ns * 2 >= longest[step])
        # Where nobody timed a collective the rank may have waited in it or not: what came before it counts too.
        timed = np.flatnonzero(~one.is_untimed)
        which = np.flatnonzero(is_long[timed])
        which = which[which > 0]
        before, rows = called[timed[which - 1]], timed[which]
        known = (before > 0) & (called[rows] > before)
        found.append((step[rows][known], before[known], called[rows][known]))
    if found:
        step, before, called = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.lexsort((called, step))
        step, first = np.unique(step[order], return_index=True)
        begin[step], end[step] = before[order[first]], called[order[first]]
    return begin[steps.named], end[steps.named]


def _sum_spans(spans: _Spans, waits: Stretches, begin_ns: Ints, end_ns: Ints) -> StepParts:
    """Return for each stretch of time what the host did in it, without waiting in collectives."""
    first = np.searchsorted(spans.end_ns, begin_ns, side="right")
    last = np.searchsorted(spans.start_ns, end_ns, side="left")
    which, at = spread(first, last)
    start, stop = np.maximum(spans.start_ns[at], begin_ns[which]), np.minimum(spans.end_ns[at], end_ns[which])
    names, name = np.unique(spans.name[at], return_inverse=True)
    times = np.zeros((len(begin_ns), len(names)))
    np.add.at(times, (which, name), stop - start - waits.within(start, stop))
    return StepParts(tuple(part_on_host(spans.names[name]) for name in names.tolist()), times)
