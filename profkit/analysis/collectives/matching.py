"""The collectives of all ranks side by side: who arrived last, who waited for whom, and what the wire carried.

A collective of a kind in which every rank waits for every other ends on all of them at once. So the rank whose part was
the shortest arrived last, its part is the time at the wire, and what the others took longer was waiting: no clock of
one rank is held against that of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profkit.run.light_record import Collectives, Group, LightRecord
from profkit.trace.columns import Ints

WAITS_FOR_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""The kinds in which every rank waits for every other."""

LATE_NS = 20_000
"""Who arrives last in a collective is said if the others waited at least this long: ranks that arrive together differ
by some microseconds (2 × H200, NVLink)."""

_UNKNOWN = -1
_ENDS_EARLY = 0.5
"""A rank that has fewer of a group's collectives than this share of the median rank's is left out of the group."""


@dataclass(frozen=True, eq=False)
class Matched:
    """The collectives of one group that all of its ranks recorded, as (ranks, collectives); -1 is unknown.

    ``step`` is the position of each rank's step in its record; ``wait_ns`` is 0 for kinds in which nobody need wait.
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
    blocked_ns: Ints
    """When each rank began to wait on its host, by its own clock, where that is all that is known; else -1."""
    last: Ints
    """The position in ``ranks`` of who arrived last; -1 where nobody was late."""


def match_collectives(records: Sequence[LightRecord]) -> list[Matched]:
    """Return the groups, the largest first, each with the collectives that its ranks have in common.

    What was called outside the measured steps counts only in records without any.
    """
    found: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, tuple[int, ...]]]] = {}
    described: dict[tuple[str, tuple[int, ...]], Group] = {}
    facts: dict[tuple[tuple[str, tuple[int, ...]], int], tuple[str, str | None]] = {}
    for record in records:
        groups = {group.number: group for group in record.groups}
        has_steps = any(step.name is not None for step in record.steps)
        for number, step in enumerate(record.steps):
            calls = step.collectives if step.name is not None or not has_steps else Collectives()
            for at, group_number in enumerate(calls.group):
                group = groups.get(group_number)
                if group is None or len(group.ranks) < 2:
                    continue
                key = (group.name, group.ranks)
                if described.setdefault(key, group).dimension is None and group.dimension is not None:
                    described[key] = group
                facts.setdefault((key, calls.sequence[at]), (calls.kind[at], calls.dtype[at]))
                row = _row(calls, at, record.clock_base_ns + step.start_ns)
                found.setdefault(key, {}).setdefault(record.rank, {})[calls.sequence[at]] = (*row, number)
    return [
        _match(
            described[key], by_rank, {sequence: facts[key, sequence] for one in by_rank.values() for sequence in one}
        )
        for key, by_rank in sorted(found.items(), key=lambda item: (-len(item[0][1]), item[0]))
        if len(by_rank) > 1
    ]


def _row(calls: Collectives, at: int, begin_ns: int) -> tuple[int, int, int, int, int]:
    """Return bytes, duration, hidden time, end and call of one collective."""
    start, end, called = calls.start_ns[at], calls.end_ns[at], calls.called_ns[at]
    size, hidden = calls.bytes[at], calls.hidden_ns[at]
    known = start is not None and end is not None and end >= start
    return (
        _UNKNOWN if size is None else size,
        (end or 0) - (start or 0) if known else _UNKNOWN,
        _UNKNOWN if hidden is None else hidden,
        begin_ns + (end or 0) if known else _UNKNOWN,
        _UNKNOWN if called is None else begin_ns + called,
    )


def _match(
    group: Group, by_rank: dict[int, dict[int, tuple[int, ...]]], facts: dict[int, tuple[str, str | None]]
) -> Matched:
    typical = float(np.median([len(rows) for rows in by_rank.values()]))
    ranks = tuple(sorted(rank for rank, rows in by_rank.items() if len(rows) >= _ENDS_EARLY * typical))
    common = sorted(set.intersection(*(set(by_rank[rank]) for rank in ranks)))
    shape = (len(ranks), len(common), 6)
    table = np.array([[by_rank[rank][one] for one in common] for rank in ranks], dtype=np.int64).reshape(shape)
    size, duration, hidden, end, called, step = (table[:, :, column] for column in range(6))
    kind = [facts[one][0] for one in common]
    # Without a profiler the end of gloo's collectives is unknown: they end when the last rank has called.
    no_end = (duration == _UNKNOWN).all(axis=0) & (called != _UNKNOWN).all(axis=0)
    duration = np.where(no_end, called.max(axis=0, initial=0) - called, duration)
    waits = np.array([one in WAITS_FOR_ALL for one in kind], dtype=np.bool_) & (duration >= 0).all(axis=0)
    wire = duration.min(axis=0, initial=1 << 62)
    wait = np.where(waits, duration - wire, 0)
    is_late = wait.max(axis=0, initial=0) >= LATE_NS
    return Matched(
        group=group,
        ranks=ranks,
        missing=tuple(sorted(set(group.ranks) - set(ranks))),
        kind=kind,
        dtype=[facts[one][1] for one in common],
        byte_count=size.max(axis=0, initial=_UNKNOWN),
        duration_ns=duration,
        hidden_ns=hidden,
        end_ns=end,
        step=step,
        wait_ns=wait,
        wire_ns=np.where(waits & ~no_end, wire, _UNKNOWN),
        blocked_ns=np.where(waits & no_end, called, _UNKNOWN),
        last=np.where(is_late, duration.argmin(axis=0), _UNKNOWN),
    )


def sum_waits(matched: Sequence[Matched], rank_count: int, index: dict[int, int]) -> Ints:
    """Return how long each rank waited for each other: (who waited, for whom), in ranks' order."""
    sums = np.zeros((rank_count, rank_count), dtype=np.int64)
    for one in matched:
        where = np.array([index[rank] for rank in one.ranks], dtype=np.int64)
        late = np.flatnonzero(one.last >= 0)
        for here in range(len(one.ranks)):
            np.add.at(sums[where[here]], where[one.last[late]], one.wait_ns[here, late])
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
