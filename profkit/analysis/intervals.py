"""Time in integers: unions of intervals by group, and sets of time with what two of them have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from profkit.trace.columns import Bools, Ints, Work, distinct_values, empty_ints
from profkit.trace.nesting import nest_spans

_EVER = 1 << 62


@dataclass(frozen=True, eq=False)
class Stretches:
    """A set of nanoseconds: sorted half-open stretches, none of them empty, no two of which share a moment."""

    start_ns: Ints
    end_ns: Ints

    def __len__(self) -> int:
        return len(self.start_ns)

    def until(self, time_ns: Ints) -> Ints:
        """Return how much of the set lies before each time."""
        if not len(self):
            return np.zeros(len(time_ns), dtype=np.int64)
        begun = np.searchsorted(self.start_ns, time_ns, side="right")
        still_open = np.maximum(self.end_ns[np.maximum(begun - 1, 0)] - time_ns, 0)
        return self._before[begun] - np.where(begun > 0, still_open, 0)

    def within(self, start_ns: Ints, end_ns: Ints) -> Ints:
        """Return how much of the set lies between each two times."""
        return self.until(end_ns) - self.until(start_ns)

    @cached_property
    def _before(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self.end_ns - self.start_ns)])


NOTHING = Stretches(empty_ints(), empty_ints())


def unite(start_ns: Ints, end_ns: Ints) -> Stretches:
    """Return the time in which at least one of the intervals is open; one that ends before it starts is empty."""
    if not len(start_ns):
        return NOTHING
    if (start_ns[1:] < start_ns[:-1]).any():
        order = np.argsort(start_ns, kind="stable")
        start_ns, end_ns = start_ns[order], end_ns[order]
    reach = np.maximum.accumulate(np.maximum(end_ns, start_ns))
    first = np.flatnonzero(np.concatenate([[True], start_ns[1:] > reach[:-1]]))
    start_ns, end_ns = start_ns[first], reach[np.append(first[1:] - 1, len(reach) - 1)]
    kept = start_ns < end_ns
    return Stretches(start_ns[kept], end_ns[kept])


def unite_all(sets: list[Stretches]) -> Stretches:
    sets = [part for part in sets if len(part)]
    if not sets:
        return NOTHING
    if len(sets) == 1:
        return sets[0]
    return unite(np.concatenate([part.start_ns for part in sets]), np.concatenate([part.end_ns for part in sets]))


def intersect(first: Stretches, other: Stretches) -> Stretches:
    low = np.searchsorted(other.end_ns, first.start_ns, side="right")
    high = np.searchsorted(other.start_ns, first.end_ns, side="left")
    mine, theirs = spread(low, high)
    start_ns = np.maximum(first.start_ns[mine], other.start_ns[theirs])
    end_ns = np.minimum(first.end_ns[mine], other.end_ns[theirs])
    kept = start_ns < end_ns
    return Stretches(start_ns[kept], end_ns[kept])


def subtract(first: Stretches, other: Stretches) -> Stretches:
    start_ns, end_ns = np.append(-_EVER, other.end_ns), np.append(other.start_ns, _EVER)
    kept = start_ns < end_ns
    return intersect(first, Stretches(start_ns[kept], end_ns[kept]))


def fill_gaps(stretches: Stretches, longest_ns: int) -> Stretches:
    """Return the set together with the gaps between its stretches that last no longer than this."""
    is_long = stretches.start_ns[1:] - stretches.end_ns[:-1] > longest_ns
    starts, ends = np.append(True, is_long), np.append(is_long, True)
    return Stretches(stretches.start_ns[starts], stretches.end_ns[ends]) if len(stretches) else NOTHING


def spread(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return which pair each number from a ``first`` up to its ``last`` (exclusive) is of, and the numbers."""
    count = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(count) - count - first, count)


def union_ns(group: Ints, start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints]:
    """Return the groups and, for each, the time in which at least one of its intervals was open."""
    if not len(group):
        return group, group
    group, start, end = disjoint_pieces(group, start_ns, end_ns)
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    return group[first], np.add.reduceat(end - start, first)


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


class BusyTime:
    """How long work kept its devices busy: the union of the stretches in which it ran, summed over devices.

    So two GPUs busy at once count twice; of CPU operators a process is the device. An operator runs itself only while
    no operator within it does, as its self time has it: what lies within it may count for another range.
    """

    def __init__(self, work: Work) -> None:
        """Find the stretches of each row: those from its number in ``_first`` up to the next one's, else itself."""
        device, self._start_ns, self._end_ns = work.device, work.start_ns, work.end_ns
        self._first: Ints | None = None
        if (work.duration_ns != work.end_ns - work.start_ns).any():
            device = work.process
            row, self._start_ns, self._end_ns = _between_operators(work)
            self._first = np.searchsorted(row, np.arange(len(work) + 1))
        devices = distinct_values(device)
        self._number, self._device_count = np.searchsorted(devices, device), len(devices)

    def total_ns(self, rows: Bools) -> int:
        chosen = np.flatnonzero(rows)
        return int(self.sum_by(np.zeros_like(chosen), chosen, 1)[0])

    def sum_by(self, group: Ints, rows: Ints, count: int) -> Ints:
        """Return the busy time of each group of rows; groups are numbers below ``count``, and a row may be in many."""
        key, stretch = group * self._device_count + self._number[rows], rows
        if self._first is not None:
            which, stretch = spread(self._first[rows], self._first[rows + 1])
            key = key[which]
        keys, unions = union_ns(key, self._start_ns[stretch], self._end_ns[stretch])
        busy = np.zeros(count, dtype=np.int64)
        np.add.at(busy, keys // max(self._device_count, 1), unions)
        return busy


def _between_operators(work: Work) -> tuple[Ints, Ints, Ints]:
    timelines, _ = nest_spans(work.start_ns, work.end_ns, work.launch_thread)
    stretches = [np.stack(timeline.own_stretches()) for timeline in timelines.values()]
    row, start_ns, end_ns = np.concatenate(stretches, axis=1) if stretches else np.zeros((3, 0), dtype=np.int64)
    order = np.argsort(row, kind="stable")
    return row[order], start_ns[order], end_ns[order]


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
