"""How the operators of a thread nest: parents, self times, and who was running at a moment."""

from __future__ import annotations

import numpy as np

from profkit.trace.columns import Ints, rows_by_value


class OperatorForest:
    """The operators of all threads, each under the one that called it.

    A moment belongs to the operator that began last among those open on its thread. For operators that nest, an
    operator's self time is then its duration less its children's; where rounded times let a child outlive its parent,
    the moments after the parent's end are still the child's. Either way the self times of a thread sum to the time it
    spent in operators. Operators with equal times nest in the order in which they are given.
    """

    parent: Ints
    """Operator → the one around it, or -1."""
    self_ns: Ints

    def __init__(self, start_ns: Ints, end_ns: Ints, thread: Ints) -> None:
        self._start_ns, self._end_ns, self._thread = start_ns, end_ns, thread
        # Thread by thread, outer before inner.
        self._order: Ints = np.lexsort((-end_ns, start_ns, thread)).astype(np.int64)
        self.parent = np.full(len(start_ns), -1, dtype=np.int64)
        self.self_ns = np.zeros(len(start_ns), dtype=np.int64)
        threads, first = np.unique(thread[self._order], return_index=True)
        parts = np.split(self._order, first[1:]) if len(threads) else []
        self._timelines = {
            one: self._nest(operators.tolist()) for one, operators in zip(threads.tolist(), parts, strict=True)
        }

    def innermost_at(self, moment_ns: Ints, thread: Ints) -> Ints:
        """Return the innermost operator open at each moment on its thread, or -1."""
        found = np.full(len(moment_ns), -1, dtype=np.int64)
        for one, rows in rows_by_value(thread).items():
            if one in self._timelines:
                times, innermost = self._timelines[one]
                found[rows] = np.append(innermost, -1)[np.searchsorted(times, moment_ns[rows], side="right") - 1]
        return found

    def inherit(self, values: Ints) -> Ints:
        """Return each operator's own value, or where that is -1 its nearest ancestor's."""
        inherited: list[int] = values.tolist()
        parents = self.parent.tolist()
        for index in self._order.tolist():
            if inherited[index] < 0 <= parents[index]:
                inherited[index] = inherited[parents[index]]
        return np.array(inherited, dtype=np.int64)

    def _nest(self, operators: list[int]) -> tuple[Ints, Ints]:
        """Sweep one thread's operators in order of their starts, crediting every moment to its owner.

        Returns the moments at which another operator becomes the innermost, and that operator, -1 for none.
        """
        starts, ends = self._start_ns, self._end_ns
        open_now: list[tuple[int, int]] = []  # end, operator
        changes: list[tuple[int, int]] = []
        credited_to = 0  # every moment of this thread before it has its owner
        for index, start, end in zip(operators, starts[operators].tolist(), ends[operators].tolist(), strict=True):
            credited_to = self._close_until(start, open_now, credited_to, changes)
            if open_now:
                caller = open_now[-1][1]
                self.parent[index] = caller
                self.self_ns[caller] += max(0, start - credited_to)
            credited_to = start
            open_now.append((end, index))
            changes.append((start, index))
        self._close_until(None, open_now, credited_to, changes)
        columns = np.array(changes, dtype=np.int64)
        # A child that outlives its parent by a rounded time closes after it.
        return np.maximum.accumulate(columns[:, 0]), columns[:, 1]

    def _close_until(
        self, moment: int | None, open_now: list[tuple[int, int]], credited_to: int, changes: list[tuple[int, int]]
    ) -> int:
        while open_now and (moment is None or open_now[-1][0] <= moment):
            end, operator = open_now.pop()
            self.self_ns[operator] += max(0, end - credited_to)
            credited_to = max(credited_to, end)
            changes.append((end, open_now[-1][1] if open_now else -1))
        return credited_to
