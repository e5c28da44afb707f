"""How long a device was busy: the length of the union of intervals, apart for each group."""

from __future__ import annotations

import numpy as np

from profkit.trace.columns import Ints


def union_ns(group: Ints, start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints]:
    """Return the groups and, for each, the time in which at least one of its intervals was open.

    A group is any integer: a device, or a device within a range. The busy time of several devices is the sum of
    their unions, so two GPUs busy at once count twice.
    """
    if not len(group):
        return group, group
    group, start, end = disjoint_pieces(group, start_ns, end_ns)
    groups, first = np.unique(group, return_index=True)
    return groups, np.add.reduceat(end - start, first)


def disjoint_pieces(group: Ints, start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the intervals by group and start, each less what earlier ones of its group cover already.

    There are as many as were given; one that adds nothing is empty, at its end.
    """
    if not len(group):
        return group, start_ns, end_ns
    order = np.lexsort((start_ns, group))
    group, start, end = group[order], start_ns[order], end_ns[order]
    first = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    reach = running_maximum(end, first)
    before = np.concatenate([[start[0]], reach[:-1]])
    before[first] = start[first]
    start = np.maximum(start, before)
    return group, start, np.maximum(start, end)


def busy_ns(device: Ints, start_ns: Ints, end_ns: Ints) -> int:
    """Return the union of intervals per device, summed over devices."""
    return int(union_ns(device, start_ns, end_ns)[1].sum())


def running_maximum(values: Ints, first: Ints) -> Ints:
    """Return the running maximum within each group; ``first`` are the groups' first rows."""
    rank = np.zeros(len(values), dtype=np.int64)
    rank[first[1:]] = 1
    # Lifting each group above all before it lets one running maximum serve all groups.
    low, high = int(values.min()), int(values.max())
    lift = np.cumsum(rank) * (high - low + 1)
    if len(first) * (high - low + 1) < 1 << 62:
        return np.maximum.accumulate(values + lift) - lift
    return np.concatenate([np.maximum.accumulate(part) for part in np.split(values, first[1:])])
