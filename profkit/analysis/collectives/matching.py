"""The collectives of all ranks side by side: who arrived last, who waited for whom, and what the wire carried.

A collective of a kind in which every rank waits for every other ends on all of them at once. So the rank whose part was
the shortest arrived last, its part is the time at the wire, and what the others took longer was waiting: no clock of
one rank is held against that of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from profkit.analysis.intervals import disjoint_pieces
from profkit.run.light_record import WAITS_FOR_ALL, Collectives, Group, LightRecord
from profkit.trace.columns import Bools, Ints

LATE_NS = 20_000
"""Who arrives last in a collective is said if the others waited at least this long: ranks that arrive together differ
by some microseconds (2 × H200, NVLink)."""

_NCCL = "nccl"
_UNKNOWN = -1
_MISSING = -(1 << 62)
"""For null in a column of times, which may be negative."""
_ENDS_EARLY = 0.5
"""A rank that has fewer of a group's collectives than this share of the median rank's is left out of the group."""


Key = tuple[str, tuple[int, ...]]
"""What a group is known by on all its ranks: its name and its ranks."""


@dataclass(frozen=True, eq=False)
class Calls:
    """The collectives of one rank in one group as columns in order of their sequence, each number once; -1 is unknown.

    ``step`` is the position of the step in the rank's record. Ends and calls are nanoseconds since the epoch.
    ``exposed_ns`` is how long nothing else ran at the end of a backward pass.
    """

    group: Group
    sequence: Ints
    kind: list[str]
    dtype: list[str | None]
    byte_count: Ints
    duration_ns: Ints
    hidden_ns: Ints
    exposed_ns: Ints
    end_ns: Ints
    called_ns: Ints
    step: Ints


@dataclass(frozen=True, eq=False)
class Matched:
    """The collectives of one group that all of its ranks recorded, as (ranks, collectives); -1 is unknown.

    ``step`` is the position of each rank's step in its record; ``wait_ns`` is 0 for kinds in which nobody need wait,
    and where the wait is unknown: ``is_untimed``.
    """

    group: Group
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    kind: list[str]
    dtype: list[str | None]
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


def tabulate_calls(record: LightRecord) -> dict[Key, Calls]:
    """Return the collectives of a rank by group; those outside the measured steps only if there are no such steps."""
    groups = {group.number: group for group in record.groups if len(group.ranks) > 1}
    has_steps = any(step.name is not None for step in record.steps)
    parts: list[tuple[int, int, Collectives]] = [
        (number, record.clock_base_ns + step.start_ns, step.collectives)
        for number, step in enumerate(record.steps)
        if len(step.collectives) and (step.name is not None or not has_steps)
    ]
    if not parts:
        return {}
    columns = {
        name: _numbers([getattr(calls, name) for _, _, calls in parts])
        for name in ("group", "sequence", "bytes", "called_ns", "start_ns", "end_ns", "hidden_ns", "exposed_ns")
    }
    counts = [len(calls) for _, _, calls in parts]
    step, begin = (np.repeat(np.array([part[at] for part in parts], dtype=np.int64), counts) for at in (0, 1))
    start, end, called = columns["start_ns"], columns["end_ns"], columns["called_ns"]
    known = (start != _MISSING) & (end != _MISSING) & (end >= start)
    kinds = [kind for _, _, calls in parts for kind in calls.kind]
    dtypes = [dtype for _, _, calls in parts for dtype in calls.dtype]
    found = {}
    for number, group in groups.items():
        rows = np.flatnonzero(columns["group"] == number)
        sequence, first = np.unique(columns["sequence"][rows], return_index=True)
        rows = rows[first]
        if not len(rows):
            continue
        found[group.name, group.ranks] = Calls(
            group=group,
            sequence=sequence,
            kind=[kinds[row] for row in rows.tolist()],
            dtype=[dtypes[row] for row in rows.tolist()],
            byte_count=_or_unknown(columns["bytes"][rows]),
            duration_ns=np.where(known, end - start, _UNKNOWN)[rows],
            hidden_ns=_or_unknown(columns["hidden_ns"][rows]),
            exposed_ns=_or_unknown(columns["exposed_ns"][rows]),
            end_ns=np.where(known, begin + end, _UNKNOWN)[rows],
            called_ns=np.where(called != _MISSING, begin + called, _UNKNOWN)[rows],
            step=step[rows],
        )
    return found


def _numbers(columns: Iterable[list[int | None]]) -> Ints:
    """Return columns behind each other."""
    values = list(chain.from_iterable(columns))
    if None in values:
        values = [_MISSING if value is None else value for value in values]
    return np.array(values, dtype=np.int64)


def _or_unknown(column: Ints) -> Ints:
    return np.where(column == _MISSING, _UNKNOWN, column)


def match_collectives(records: Sequence[LightRecord]) -> list[Matched]:
    """Return the groups, the largest first, each with the collectives that its ranks have in common."""
    found: dict[Key, dict[int, Calls]] = {}
    for record in records:
        for key, calls in tabulate_calls(record).items():
            found.setdefault(key, {})[record.rank] = calls
    ordered = sorted(found.items(), key=lambda item: (-len(item[0][1]), item[0]))
    return [_match(by_rank) for _, by_rank in ordered if len(by_rank) > 1]


def _match(by_rank: dict[int, Calls]) -> Matched:
    typical = float(np.median([len(calls.sequence) for calls in by_rank.values()]))
    ranks = tuple(sorted(rank for rank, calls in by_rank.items() if len(calls.sequence) >= _ENDS_EARLY * typical))
    mine = [by_rank[rank] for rank in ranks]
    common = mine[0].sequence
    for calls in mine[1:]:
        if not np.array_equal(calls.sequence, common):
            common = np.intersect1d(common, calls.sequence, assume_unique=True)
    rows = [np.searchsorted(calls.sequence, common) for calls in mine]

    def table(name: str) -> Ints:
        return np.stack([getattr(calls, name)[where] for calls, where in zip(mine, rows, strict=True)])

    duration, called, exposed = table("duration_ns"), table("called_ns"), table("exposed_ns")
    kind = [mine[0].kind[row] for row in rows[0].tolist()]
    named = next((calls.group for calls in mine if calls.group.dimension is not None), mine[0].group)
    # Without a profiler the end of gloo's collectives is unknown: they end when the last rank has called. (The host
    # that calls NCCL's runs ahead of its GPU, as far as it likes.)
    no_end = (duration == _UNKNOWN).all(axis=0) & (called != _UNKNOWN).all(axis=0) & (named.backend != _NCCL)
    duration = np.where(no_end, called.max(axis=0) - called, duration)
    # What a GPU waited for at the end of its backward pass ends on all ranks at once too.
    at_end = (duration == _UNKNOWN).any(axis=0) & (exposed != _UNKNOWN).all(axis=0)
    length = np.where(at_end, exposed, duration)
    may_wait = np.array([one in WAITS_FOR_ALL for one in kind], dtype=np.bool_)
    waits = may_wait & (length >= 0).all(axis=0)
    least = length.min(axis=0)
    wait = np.where(waits, length - least, 0)
    return Matched(
        group=named,
        ranks=ranks,
        missing=tuple(sorted(set(named.ranks) - set(ranks))),
        kind=kind,
        dtype=[mine[0].dtype[row] for row in rows[0].tolist()],
        byte_count=table("byte_count").max(axis=0),
        duration_ns=duration,
        hidden_ns=table("hidden_ns"),
        end_ns=table("end_ns"),
        step=table("step"),
        wait_ns=wait,
        wire_ns=np.where(waits & ~no_end & ~at_end, least, _UNKNOWN),
        called_ns=called,
        is_untimed=may_wait & ~waits,
        only_called=waits & no_end,
        last=np.where(wait.max(axis=0) >= LATE_NS, length.argmin(axis=0), _UNKNOWN),
        # Whoever came last waited for nobody: the others are the rest in order of their waits.
        median_wait_ns=np.median(np.sort(wait, axis=0)[1:], axis=0).astype(np.int64)
        if len(ranks) > 1
        else np.zeros(len(common), dtype=np.int64),
    )


def sum_waits(matched: Sequence[Matched], rank_count: int, index: dict[int, int]) -> Ints:
    """Return how long each rank waited for each other: (who waited, for whom), in ranks' order.

    A rank that waits in several collectives at once counts that time once, for the one that it was in first.
    """
    sums = np.zeros((rank_count, rank_count), dtype=np.int64)
    placed: list[list[tuple[Ints, Ints, Ints]]] = [[] for _ in range(rank_count)]
    for one in matched:
        late = np.flatnonzero(one.last >= 0)
        where = np.array([index[rank] for rank in one.ranks], dtype=np.int64)
        to = where[one.last[late]]
        for here, rank in enumerate(where.tolist()):
            wait, ended = one.wait_ns[here, late], one.end_ns[here, late]
            begin = np.where(ended != _UNKNOWN, ended - one.duration_ns[here, late], one.called_ns[here, late])
            known = (ended != _UNKNOWN) | one.only_called[late]
            np.add.at(sums[rank], to[~known], wait[~known])
            placed[rank].append((begin[known], wait[known], to[known]))
    for rank, parts in enumerate(placed):
        if parts:
            begin, wait, to = (np.concatenate(column) for column in zip(*parts, strict=True))
            order = np.argsort(begin, kind="stable")
            _, start, end = disjoint_pieces(np.zeros(len(order), dtype=np.int64), begin[order], (begin + wait)[order])
            np.add.at(sums[rank], to[order], end - start)
    return sums


@dataclass(frozen=True)
class ClockFit:
    """How well the clocks of ranks agree once each is shifted so that collectives end together."""

    count: int
    largest_offset_ns: int
    residual_ns: int
    """The median distance of a collective's end on one rank from the median rank's, after the shift."""


def fit_clocks(matched: Sequence[Matched]) -> ClockFit | None:
    """Return the fit on the largest group's collectives; None where no ends are known."""
    for one in matched:
        known = [at for at, kind in enumerate(one.kind) if kind in WAITS_FOR_ALL and (one.end_ns[:, at] > 0).all()]
        if len(known) < 2:
            continue
        ends = one.end_ns[:, known]
        apart = ends - np.sort(ends, axis=0)[len(ends) // 2]
        offset = np.median(apart, axis=1).astype(np.int64)
        residual = np.abs(apart - offset[:, None])
        return ClockFit(len(known), int(np.abs(offset).max()), int(np.median(residual)))
    return None
