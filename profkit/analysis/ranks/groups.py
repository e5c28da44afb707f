"""What groups of ranks exchange: collectives by kind with their bandwidth, and what pipeline stages spend in between.

A stage that receives waits for the stage before it, and in backward for the stage after it: sends and receives pair
ranks off, so nobody arrives last as in a collective. But the stage that works longest never waits for a slower one.
What it spends in send and recv all the same is the filling and draining of the pipeline, and the transfers: the bubble.
The other stages also wait for it, by as much as they work less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from profkit.analysis.ranks.matching import Matched, steps_between_matches
from profkit.analysis.ranks.own_time import ReducedRank
from profkit.run.light_columns import UNKNOWN
from profkit.run.light_record import Group
from profkit.trace.columns import Ints

_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "gather": 1, "scatter": 1}
"""How often each rank's part passes every other rank."""


def bus_factor(kind: str, ranks: int) -> float:
    """Return what nccl-tests multiplies the algorithm bandwidth by to get the bus bandwidth."""
    return _ROUNDS[kind] * (ranks - 1) / ranks if kind in _ROUNDS else 1.0


@dataclass(frozen=True)
class GroupRow:
    """One kind of collective in the groups of one name; times are sums over all of them.

    ``count`` counts each collective once, not once a rank. ``byte_count`` and the bandwidths (bytes per second) are
    None where sizes are unknown, ``wire_ns`` where nobody need wait, so that the last arrival is unknown. Hidden,
    exposed and waiting time are those of the mean rank of all ranks in these groups; ``hidden_ns`` and ``exposed_ns``
    are None where a rank does not say.

    A send is counted at its sender, a receive at its receiver. ``wire_ns`` of sends is how long they took there: NCCL
    takes a message into its own buffer, so that a sender need not wait for a receiver that comes late, unless that
    buffer is full. A receive also waits for its sender: it has no ``wire_ns``, nor has a send in one kernel with a
    receive.
    """

    group: str
    rank_count: int
    kind: str
    dtype: str | None
    count: int
    byte_count: int | None
    wire_ns: int | None
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None
    hidden_ns: int | None
    exposed_ns: int | None
    waiting_ns: int


def _group_label(group: Group, world_size: int) -> str:
    if group.dimension:
        return group.dimension
    size = len(group.ranks)
    return "all ranks" if size == world_size else f"groups of {size}"


class _Part(NamedTuple):
    """Collectives of one group and kind, one each in ``byte_count`` and ``wire_ns``; the others are of ``ranks``."""

    ranks: tuple[int, ...]
    byte_count: Ints
    wire_ns: Ints
    lengths_ns: Ints
    hidden_ns: Ints
    wait_ns: Ints


_Key = tuple[str, int, str, str | None]
"""A row's group, number of ranks, kind and dtype."""


def sum_groups(matched: Sequence[Matched], ranks: Sequence[ReducedRank], world_size: int) -> list[GroupRow]:
    """Return a row for each name of groups, kind and dtype; the longest first."""
    parts_of_row: dict[_Key, list[_Part]] = {}
    for group, kind, dtype, part in (*_parts_of(matched), *_sent(ranks, matched)):
        key = _group_label(group, world_size), len(group.ranks), kind, dtype
        parts_of_row.setdefault(key, []).append(part)
    rows = [_sum_one(*key, parts) for key, parts in parts_of_row.items()]
    return sorted(rows, key=lambda row: (-(row.wire_ns or 0) - row.waiting_ns, row.group, row.kind, row.dtype or ""))


def _parts_of(matched: Sequence[Matched]) -> Iterator[tuple[Group, str, str | None, _Part]]:
    for match in matched:
        for kind, dtype in dict.fromkeys(zip(match.kind, match.dtype, strict=True)):
            some = match.take((match.kind == kind) & (match.dtype == dtype))
            times = some.duration_ns, some.hidden_ns, some.wait_ns
            yield match.group, kind, dtype, _Part(match.ranks, some.byte_count, some.wire_ns, *times)


def _sent(ranks: Sequence[ReducedRank], matched: Sequence[Matched]) -> Iterator[tuple[Group, str, str | None, _Part]]:
    named = {(group.name, group.ranks): group for rank in ranks for group in rank.record.groups if group.dimension}
    for rank in ranks:
        calls = rank.calls.take(rank.calls.is_pairwise)
        calls = calls.take(steps_between_matches(rank.record.rank, calls.step, matched))
        for group in rank.record.groups if len(calls) else ():
            of_group = calls.take(calls.group == group.number)
            for what in np.unique(of_group.what).tolist() if len(group.ranks) > 1 else ():
                (kind, dtype), some = calls.names[what], of_group.take(of_group.what == what)
                # Of a kernel that receives too, or of which nobody says that it only sends, the size is unknown.
                wire_ns = np.where((kind == "send") & (some.bytes != UNKNOWN), some.duration_ns, UNKNOWN)
                part = _Part(group.ranks, some.bytes, wire_ns, some.duration_ns, some.hidden_ns, np.zeros(0, np.int64))
                yield named.get((group.name, group.ranks), group), kind, dtype, part


def _sum_one(label: str, size: int, kind: str, dtype: str | None, parts: Sequence[_Part]) -> GroupRow:
    # A rank is in one of the groups of a mesh dimension, as a rule: what ranks of different groups did adds up to no
    # rank's time.
    ranks = len({rank for part in parts for rank in part.ranks})
    sizes, wires, lengths, hidden, waits = (
        np.concatenate([column.reshape(-1) for column in columns]) for columns in list(zip(*parts, strict=True))[1:]
    )
    total_bytes, wire_ns = (int(column.sum()) if (column >= 0).all() else None for column in (sizes, wires))
    rate = total_bytes / wire_ns * 1e9 if total_bytes is not None and wire_ns else None
    is_hidden_known = bool((hidden >= 0).all() and (lengths >= 0).all())
    hidden_ns = round(int(hidden.sum()) / ranks) if is_hidden_known else None
    return GroupRow(
        group=label,
        rank_count=size,
        kind=kind,
        dtype=dtype,
        count=len(sizes),
        byte_count=total_bytes,
        wire_ns=wire_ns,
        algorithm_bandwidth=rate,
        bus_bandwidth=None if rate is None else rate * bus_factor(kind, size),
        hidden_ns=hidden_ns,
        exposed_ns=None if hidden_ns is None else round(int(lengths.sum()) / ranks) - hidden_ns,
        waiting_ns=round(int(waits.sum()) / ranks),
    )


@dataclass(frozen=True)
class Pipeline:
    """The ranks of one pipeline, in the order of its group; times are per step.

    ``between_ns`` is what each rank spends in send and recv that nothing hides, ``own_ns`` what it does by itself.
    """

    group: Group
    ranks: tuple[int, ...]
    between_ns: tuple[int, ...]
    own_ns: tuple[int, ...]
    step_ns: int

    @property
    def longest(self) -> int:
        """Return the position of the rank that works longest."""
        return self.own_ns.index(max(self.own_ns))

    @property
    def bubble_ns(self) -> int:
        """Return what even the rank that works longest spends in send and recv."""
        return self.between_ns[self.longest]

    @property
    def uneven_ns(self) -> int:
        """Return how much longer it works than the rank that works least."""
        return max(self.own_ns) - min(self.own_ns)


def find_pipelines(ranks: Sequence[ReducedRank]) -> list[Pipeline]:
    """Return the groups whose ranks send to each other, where each of them left a full trace; the first one first."""
    by_group: dict[tuple[tuple[int, ...], str], dict[int, tuple[Group, int, int, float]]] = {}
    for rank in ranks:
        if rank.exact is None or not len(rank.exact):
            continue
        own_ns, count = rank.exact.sums(), len(rank.exact)
        step_ns = float((own_ns + rank.exact.exposed_ns).sum()) / count
        for group in rank.record.groups:
            if group.number in rank.between_ns:
                times = round(rank.between_ns[group.number] / count), round(float(own_ns.sum()) / count), step_ns
                by_group.setdefault((group.ranks, group.name), {})[rank.record.rank] = group, *times
    pipelines = []
    for (numbers, _), of_ranks in sorted(by_group.items(), key=lambda item: item[0][0]):
        if len(numbers) > 1 and set(numbers) <= of_ranks.keys():
            _, between, own, steps = zip(*(of_ranks[number] for number in numbers), strict=True)
            group = next(iter(of_ranks.values()))[0]
            pipelines.append(Pipeline(group, numbers, between, own, round(float(np.median(steps)))))
    return pipelines
