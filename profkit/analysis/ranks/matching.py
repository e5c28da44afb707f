"""The collectives of all ranks side by side: who arrived last, who waited for whom, and what the wire carried.

A collective of a kind in which every rank waits for every other ends on all of them at once. So the rank whose part was
the shortest arrived last, its part is the time at the wire, and what the others took longer was waiting: no clock of
one rank is held against that of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from profkit.analysis.intervals import unite
from profkit.analysis.ranks.own_time import Floats, ReducedRank
from profkit.run.light_columns import UNKNOWN, CallColumns
from profkit.run.light_record import WAITS_FOR_ALL, Group
from profkit.trace.columns import Bools, Ints

LATE_NS = 20_000
"""Who arrives last in a collective is said if the others waited at least this long: ranks that arrive together differ
by some microseconds (2 × H200, NVLink)."""

_NCCL = "nccl"
_NOBODY = -1
_NO_LAST = 1 << 62
_ENDS_EARLY = 0.5
"""A rank that has fewer of a group's collectives than this share of the median rank's is left out of the group."""


@dataclass(frozen=True, eq=False)
class Matched:
    """The collectives of one group that all of its ranks recorded, as (ranks, collectives).

    ``step`` is the position of each rank's step in its record. ``wait_ns`` is 0 for kinds in which nobody need wait,
    and where the wait is unknown: ``is_untimed``.
    """

    group: Group
    ranks: tuple[int, ...]
    kind: npt.NDArray[np.object_]
    dtype: npt.NDArray[np.object_]
    byte_count: Ints
    duration_ns: Ints
    hidden_ns: Ints
    end_ns: Ints
    step: Ints
    wait_ns: Ints
    wire_ns: Ints
    called_ns: Ints
    is_untimed: Bools
    only_called: Bools
    """Of which collectives the call alone is known: they end when the last rank has called."""
    last: Ints
    """The position in ``ranks`` of who arrived last; -1 where nobody was late."""
    median_wait_ns: Ints
    """How long the median one of the other ranks waited for the last."""

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: Ints | Bools) -> Matched:
        columns: dict[str, Any] = {
            name: column[..., rows] for name, column in vars(self).items() if isinstance(column, np.ndarray)
        }
        return replace(self, **columns)


def match_collectives(ranks: Sequence[ReducedRank]) -> list[Matched]:
    """Return the groups, the largest first, each with the collectives that its ranks have in common.

    Steps at the beginning or the end of which another rank lost its record are left out in all groups of the rank, so
    that what is waited for there is not taken for none.
    """
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, _Called]] = {}
    for rank in ranks:
        for group in {group.number: group for group in rank.record.groups}.values():
            rows = np.flatnonzero((rank.calls.group == group.number) & ~rank.calls.is_pairwise)
            if len(group.ranks) > 1 and len(rows):
                by_group.setdefault((group.name, group.ranks), {})[rank.record.rank] = group, rank.calls, rows
    ordered = sorted(by_group.items(), key=lambda item: (-len(item[0][1]), item[0]))
    groups = [by_rank for _, by_rank in ordered if len(by_rank) > 1]
    matched = [_match(by_rank) for by_rank in groups]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for match, by_rank in zip(matched, groups, strict=True):
        for number, step in zip(match.ranks, match.step, strict=True) if len(match) else ():
            _, calls, rows = by_rank[number]
            whole = calls.step[rows]
            if step.min() > whole.min():
                first[number] = max(first.get(number, 0), int(step.min()))
            if step.max() < whole.max():
                last[number] = min(last.get(number, _NO_LAST), int(step.max()))
    return [_drop_cut_steps(match, first, last) for match in matched]


def _drop_cut_steps(match: Matched, first: Mapping[int, int], last: Mapping[int, int]) -> Matched:
    kept = np.ones(len(match), dtype=np.bool_)
    for rank, step in zip(match.ranks, match.step, strict=True):
        kept &= step >= first.get(rank, 0)
        kept &= step <= last.get(rank, _NO_LAST)
    return match if kept.all() else match.take(kept)


def steps_between_matches(rank: int, step: Ints, matched: Sequence[Matched]) -> Bools:
    """Mark the steps of a rank between its first and its last matched collective; all of its steps if none matched.

    ``step`` are their positions in the rank's record.
    """
    mine = [match.step[match.ranks.index(rank)] for match in matched if rank in match.ranks and len(match)]
    first = min((int(steps.min()) for steps in mine), default=0)
    last = max((int(steps.max()) for steps in mine), default=_NO_LAST)
    return (step >= first) & (step <= last)


_Called = tuple[Group, CallColumns, Ints]
"""A group in the record of a rank, the rank's collectives, and those that are of the group, in their order."""


def _match(by_rank: Mapping[int, _Called]) -> Matched:
    typical = float(np.median([len(rows) for *_, rows in by_rank.values()]))
    ranks = tuple(sorted(rank for rank, (*_, rows) in by_rank.items() if len(rows) >= _ENDS_EARLY * typical))
    groups, calls_of_ranks, rows_of_ranks = zip(*(by_rank[rank] for rank in ranks), strict=True)
    sequences = [calls.sequence[rows] for calls, rows in zip(calls_of_ranks, rows_of_ranks, strict=True)]
    common = sequences[0]
    for sequence in sequences[1:]:
        if not np.array_equal(sequence, common):
            common = np.intersect1d(common, sequence, assume_unique=True)
    matches = [rows[np.searchsorted(sequence, common)] for rows, sequence in zip(rows_of_ranks, sequences, strict=True)]

    def table(name: str) -> Ints:
        return np.stack([getattr(calls, name)[rows] for calls, rows in zip(calls_of_ranks, matches, strict=True)])

    duration, called, exposed = table("duration_ns"), table("called_ns"), table("exposed_ns")
    ends = np.where(duration == UNKNOWN, UNKNOWN, table("end_ns"))
    names = [calls_of_ranks[0].names[what] for what in calls_of_ranks[0].what[matches[0]].tolist()]
    kind, dtype = (np.array([name[at] for name in names], dtype=np.object_) for at in (0, 1))
    named: Group = next((group for group in groups if group.dimension is not None), groups[0])
    # Without a profiler the end of gloo's collectives is unknown: they end when the last rank has called, also where
    # some ranks have one. (The host that calls NCCL's runs ahead of its GPU, as far as it likes.)
    no_end = (duration == UNKNOWN).any(axis=0) & (named.backend != _NCCL)
    if no_end.any():
        no_end &= (called != UNKNOWN).all(axis=0)
        duration = np.where(no_end, called.max(axis=0) - called, duration)
    # What a GPU waited for at the end of its backward pass ends on all ranks at once too.
    at_end = (duration == UNKNOWN).any(axis=0) & (exposed != UNKNOWN).all(axis=0)
    length = np.where(at_end, exposed, duration) if at_end.any() else duration
    may_wait = np.isin(kind, WAITS_FOR_ALL)
    waits = may_wait & (length >= 0).all(axis=0)
    waited, last = _wait_for_last(length)
    wait = np.where(waits, waited, 0)
    is_late = wait.max(axis=0) >= LATE_NS
    return Matched(
        group=named,
        ranks=ranks,
        kind=kind,
        dtype=dtype,
        byte_count=table("bytes").max(axis=0),
        duration_ns=duration,
        hidden_ns=table("hidden_ns"),
        end_ns=ends,
        step=table("step"),
        wait_ns=wait,
        wire_ns=np.where(waits & ~no_end & ~at_end, length.min(axis=0), UNKNOWN),
        called_ns=called,
        is_untimed=may_wait & ~waits,
        only_called=waits & no_end,
        last=np.where(is_late, last, _NOBODY),
        median_wait_ns=_median_of_others(wait),
    )


def _wait_for_last(length_ns: Ints) -> tuple[Ints, Ints]:
    """A collective ends on all ranks at once: whoever's part is the shortest came last (its position is returned)."""
    return length_ns - length_ns.min(axis=0), length_ns.argmin(axis=0)


def _median_of_others(wait: Ints) -> Ints:
    middle_waits = np.zeros(wait.shape[1], dtype=np.int64)
    some = np.flatnonzero(wait.any(axis=0))
    ordered = np.sort(wait[:, some], axis=0)[1:]
    if len(ordered):
        middle = ordered[(len(ordered) - 1) // 2].astype(np.int64) + ordered[len(ordered) // 2]
        middle_waits[some] = (middle / 2).astype(np.int64)
    return middle_waits


def sum_waits(matched: Sequence[Matched], ranks: Sequence[int]) -> list[int]:
    """Return how long each of these ranks waited for others; what it waited in several collectives at once counts once.

    When a rank waited may be unknown: those times are added up.
    """
    sums = dict.fromkeys(ranks, 0)
    waits: dict[int, list[tuple[Ints, Ints]]] = {rank: [] for rank in ranks}
    for match in matched:
        late = np.flatnonzero(match.last >= 0)
        for here, rank in enumerate(match.ranks):
            wait, ended = match.wait_ns[here, late], match.end_ns[here][late]
            begin = np.where(ended != UNKNOWN, ended - match.duration_ns[here, late], match.called_ns[here][late])
            known = (ended != UNKNOWN) | match.only_called[late]
            sums[rank] += int(wait[~known].sum())
            waits[rank].append((begin[known], (begin + wait)[known]))
    for rank, intervals in waits.items():
        if intervals:
            waited = unite(*(np.concatenate(column) for column in zip(*intervals, strict=True)))
            sums[rank] += int((waited.end_ns - waited.start_ns).sum())
    return list(sums.values())


def waits_by_step(ranks: Sequence[ReducedRank], matched: Sequence[Matched], join: np.ufunc = np.add) -> list[Floats]:
    """Return for each rank how long it waited in the collectives of each measured step: in all, or as ``join`` says."""
    return _by_step(ranks, matched, join, lambda match, here: match.wait_ns[here])


def lateness_by_step(ranks: Sequence[ReducedRank], matched: Sequence[Matched]) -> list[Floats]:
    """Return for each rank and each of its measured steps the longest time that the median other rank waited for it."""
    return _by_step(
        ranks, matched, np.maximum, lambda match, here: np.where(match.last == here, match.median_wait_ns, 0)
    )


def _by_step(
    ranks: Sequence[ReducedRank], matched: Sequence[Matched], join: np.ufunc, times_of: Callable[[Matched, int], Ints]
) -> list[Floats]:
    sums = {rank.record.rank: np.zeros(len(rank.steps)) for rank in ranks}
    for match in matched:
        for here, rank in enumerate(match.ranks):
            if rank in sums:
                join.at(sums[rank], match.step[here], times_of(match, here).astype(np.float64))
    return [sums[rank.record.rank][rank.steps.named] for rank in ranks]
