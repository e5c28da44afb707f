"""The collectives of all ranks side by side: who arrived last, who waited for whom, and what the wire carried.

A collective of a kind in which every rank waits for every other ends on all of them at once. So the rank whose part was
the shortest arrived last, its part is the time at the wire, and what the others took longer was waiting: no clock of
one rank is held against that of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from profkit.analysis.intervals import Stretches, disjoint_pieces, unite
from profkit.analysis.ranks import Ranks
from profkit.analysis.time_account.gpu_time import communication_rows
from profkit.trace.columns import Bools, Ints, Trace, distinct_values

# Imported where they are needed: every trace is asked for waits, and few have records of several ranks to match.
if TYPE_CHECKING:
    from profkit.analysis.ranks.own_time import Floats, ReducedRank
    from profkit.run.light_columns import CallColumns
    from profkit.run.light_record import Group

    _Called = tuple[Group, CallColumns, Ints]
    """A group in the record of a rank, the rank's collectives, and those that are of the group, in their order."""

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


def _match(by_rank: Mapping[int, _Called]) -> Matched:
    from profkit.run.light_columns import UNKNOWN
    from profkit.run.light_record import WAITS_FOR_ALL

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


def sum_waits(matched: Sequence[Matched], index: Mapping[int, int]) -> Ints:
    """Return how long each rank waited for each other: (who waited, for whom), by their positions in ``index``.

    A rank that waits in several collectives at once counts that time once, for the one that it was in first.
    """
    from profkit.run.light_columns import UNKNOWN

    sums = np.zeros((len(index), len(index)), dtype=np.int64)
    placed: list[list[tuple[Ints, Ints, Ints]]] = [[] for _ in index]
    for match in matched:
        late = np.flatnonzero(match.last >= 0)
        where = np.array([index[rank] for rank in match.ranks], dtype=np.int64)
        to = where[match.last[late]]
        for here, rank in enumerate(where.tolist()):
            wait, ended = match.wait_ns[here, late], match.end_ns[here][late]
            begin = np.where(ended != UNKNOWN, ended - match.duration_ns[here, late], match.called_ns[here][late])
            known = (ended != UNKNOWN) | match.only_called[late]
            np.add.at(sums[rank], to[~known], wait[~known])
            placed[rank].append((begin[known], wait[known], to[known]))
    for rank, parts in enumerate(placed):
        if parts:
            begin, wait, to = (np.concatenate(column) for column in zip(*parts, strict=True))
            order = np.argsort(begin, kind="stable")
            _, start, end = disjoint_pieces(np.zeros(len(order), dtype=np.int64), begin[order], (begin + wait)[order])
            np.add.at(sums[rank], to[order], end - start)
    return sums


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


@dataclass(frozen=True, eq=False)
class Waiting:
    """When each GPU waited in a collective, in pieces: ``device`` for the one that arrived ``last``.

    ``is_known`` marks the communication kernels of which this is known; ``rank_of`` is device → rank.
    """

    device: Ints
    last: Ints
    start_ns: Ints
    end_ns: Ints
    is_known: Bools
    rank_of: dict[int, int]

    def waits_of(self, device: int, last: int | None = None) -> Stretches:
        """Return when the GPU ``device`` waited for another one: for any, or for this one."""
        mine = (self.device == device) & (True if last is None else self.last == last)
        return unite(self.start_ns[mine], self.end_ns[mine])

    def sum_by_rank(self, device: Ints, start_ns: Ints, end_ns: Ints) -> dict[int, int]:
        """Return rank → how long GPUs waited for it in these windows, in ns; windows that overlap count once."""
        sums: dict[int, int] = {}
        for here, last in sorted(set(zip(self.device.tolist(), self.last.tolist(), strict=True))):
            mine = device == here
            if last in self.rank_of and mine.any():
                none = np.zeros(int(mine.sum()), dtype=np.int64)
                _, starts, ends = disjoint_pieces(none, start_ns[mine], end_ns[mine])
                waited = int(self.waits_of(here, last).within(starts, ends).sum())
                sums[self.rank_of[last]] = sums.get(self.rank_of[last], 0) + waited
        return sums


def find_waiting(trace: Trace, ranks: Ranks) -> Waiting:
    """Return when the GPUs of one trace waited in collectives for one another.

    Ranks call their collectives in the same order: the n-th kernel of a name on one GPU is the partner of the n-th on
    the others. A name counts only if each GPU has equally many of them and all partners run at one moment. (A broadcast
    usually does not fit: its sender may finish before a receiver begins.) On one GPU alone nothing is known.
    """
    work, communicates = trace.work, communication_rows(trace)
    is_known = np.zeros(len(work), dtype=np.bool_)
    devices = distinct_values(work.device[communicates])
    pieces = [np.zeros((4, 0), dtype=np.int64)]
    for name in distinct_values(work.name[communicates]).tolist() if len(devices) > 1 else ():
        partners = _match_partners(trace, communicates & (work.name == name), devices.tolist())
        if partners is None:
            continue
        is_known[partners.reshape(-1)] = True
        waited, last = _wait_for_last(work.duration_ns[partners])
        here, which = np.nonzero(last != np.arange(len(devices))[:, None])
        begin = work.start_ns[partners[here, which]]
        pieces.append(np.stack([devices[here], devices[last[which]], begin, begin + waited[here, which]]))
    device, waits_for, start_ns, end_ns = np.concatenate(pieces, axis=1)
    return Waiting(device, waits_for, start_ns, end_ns, is_known, _ranks_by_device(trace, ranks))


def _match_partners(trace: Trace, rows: Bools, devices: list[int]) -> Ints | None:
    work = trace.work
    each = [np.flatnonzero(rows & (work.device == device)) for device in devices]
    if len({len(some) for some in each}) > 1:
        return None
    partners = np.stack([some[np.argsort(work.start_ns[some], kind="stable")] for some in each])
    together = work.start_ns[partners].max(axis=0) < work.end_ns[partners].min(axis=0)
    return partners if together.all() else None


def _ranks_by_device(trace: Trace, ranks: Ranks) -> dict[int, int]:
    by_device: dict[int, set[int]] = {}
    for number, process in ranks.members:
        for device in distinct_values(trace.work.device[trace.work.process == process]).tolist():
            by_device.setdefault(device, set()).add(number)
    return {device: numbers.pop() for device, numbers in by_device.items() if len(numbers) == 1}
