"""Which work was launched while a range was open: on the launching thread, or on the thread that one worked for."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from profkit.analysis.attribution import Placement
from profkit.analysis.busy import running_maximum
from profkit.trace.columns import Copies, Ints, Ranges, Work, distinct_values, empty_ints, rows_by_value

NEVER = 1 << 62
"""A time after all others."""


class Launches:
    """The work of a trace, thread by thread in order of launch.

    A range holds what was launched from its first nanosecond to just before its last, by its own thread or by a
    thread that worked for it: the rule of `profkit.analysis.selection.select_work`, here for many ranges at once.
    """

    def __init__(self, rows: Work | Copies, placed: Placement) -> None:
        self._placed = placed
        self._row_count = len(rows)
        self._queues: dict[int, list[tuple[int, Ints]]] = {}  # thread → where its launches begin in _order, and when
        order, begin = [], 0
        for thread_of_row in (rows.launch_thread, placed.host_thread):
            for thread, found in rows_by_value(thread_of_row).items():
                if thread < 0:
                    continue
                times = rows.launch_ns[found]
                in_order = (times[1:] >= times[:-1]).all()
                queue = found if in_order else found[np.argsort(times, kind="stable")]
                self._queues.setdefault(thread, []).append((begin, rows.launch_ns[queue]))
                order.append(queue)
                begin += len(queue)
        self._order = np.concatenate(order) if order else empty_ints()

    def count(self, ranges: Ranges, members: Ints) -> Ints:
        """Return how many rows lie under each range."""
        two_threads = ranges.thread[members] != ranges.end_thread[members]
        found, low, high = self._slices(ranges, members)
        counts = np.zeros(len(members), dtype=np.int64)
        np.add.at(counts, found, high - low)
        if two_threads.any():
            # One row may be launched on one of its threads on behalf of the other.
            which = np.flatnonzero(two_threads)
            counts[which] = np.bincount(self.under(ranges, members[which], which)[1], minlength=len(members))[which]
        return counts

    def under(self, ranges: Ranges, members: Ints, group: Ints) -> tuple[Ints, Ints]:
        """Return each row that lies under ranges of a group, and the group; every such pair once."""
        found, low, high = self._slices(ranges, members)
        if not len(found):
            return found, found
        order = np.lexsort((low, group[found]))
        groups, low, high = group[found][order], low[order], high[order]
        first = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        before = np.concatenate([[0], running_maximum(high, first)[:-1]])
        before[first] = low[first]
        low = np.maximum(low, before)
        length = np.maximum(high - low, 0)
        step = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
        rows, groups = self._order[np.repeat(low, length) + step], np.repeat(groups, length)
        if self._has_two_places and len(rows):
            keys = distinct_values(groups * self._row_count + rows)
            rows, groups = keys % self._row_count, keys // self._row_count
        return rows, groups

    def extent(self, ranges: Ranges, members: Ints, start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints]:
        """Return the least start and the greatest end among the rows under each range; `NEVER` and -`NEVER` of none.

        ``start_ns`` and ``end_ns`` are the rows', in their own order, or `NEVER` and -`NEVER` of rows to pass over.
        """
        first = np.full(len(members), NEVER, dtype=np.int64)
        last = np.full(len(members), -NEVER, dtype=np.int64)
        found, low, high = self._slices(ranges, members)
        some = np.flatnonzero(high > low)
        # In order of their beginnings, what lies between one stretch and the next is passed over once at most.
        some = some[np.argsort(low[some], kind="stable")]
        if len(some):
            edges = np.stack([low[some], high[some]], axis=1).reshape(-1)
            starts, ends = np.append(start_ns[self._order], NEVER), np.append(end_ns[self._order], -NEVER)
            np.minimum.at(first, found[some], np.minimum.reduceat(starts, edges)[::2])
            np.maximum.at(last, found[some], np.maximum.reduceat(ends, edges)[::2])
        return first, last

    @cached_property
    def _has_two_places(self) -> bool:
        """Whether any row lies under ranges of its own thread and of the one it worked for."""
        return bool(((self._placed.own >= 0) & (self._placed.host_thread >= 0)).any())

    def _slices(self, ranges: Ranges, members: Ints) -> tuple[Ints, Ints, Ints]:
        """Return stretches of ``_order`` that lie under the ranges, and which range each is under (its position)."""
        elsewhere = np.flatnonzero(ranges.end_thread[members] != ranges.thread[members])
        position = np.concatenate([np.arange(len(members)), elsewhere])
        threads = np.concatenate([ranges.thread[members], ranges.end_thread[members[elsewhere]]])
        none = empty_ints()
        parts = [(none, none, none)]
        for thread, which in rows_by_value(threads).items():
            mine = members[position[which]]
            for begin, times in self._queues.get(thread, []):
                low = begin + np.searchsorted(times, ranges.start_ns[mine], side="left")
                high = begin + np.searchsorted(times, ranges.end_ns[mine], side="left")
                parts.append((position[which], low, np.maximum(low, high)))
        found, low, high = (np.concatenate(column) for column in zip(*parts, strict=True))
        return found, low, high
