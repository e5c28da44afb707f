"""Find the call that launched a piece of work: by correlation id and process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profkit.trace.columns import NO_LAUNCH, Bools, Ints, rows_by_value

# A table with a place for every id between the least and the greatest is fastest, if not too many places stay empty.
_SPARSEST = 32
_ALWAYS_DENSE = 1 << 16


@dataclass(frozen=True, eq=False)
class _Process:
    """One process's calls: ``rows`` by correlation id. Either ``table`` (id less ``low`` → row, -1: none) or sorted."""

    low: int
    table: npt.NDArray[np.int32] | None
    ids: Ints
    rows: Ints


class LaunchIndex:
    """Answers which call launched what; ids alone are not unique across the processes of one report."""

    def __init__(self, process: Ints, correlation: Ints, start_ns: Ints, thread: Ints) -> None:
        """Index calls that are sorted by time; ids of 0 and below name nothing."""
        self._start_ns, self._thread = start_ns, thread
        self._used = np.zeros(len(start_ns), dtype=np.bool_)
        self._processes = {p: self._index(rows, correlation) for p, rows in rows_by_value(process).items()}
        self.shared_count = 0
        """How many pieces of work had more than one call on other threads or at other times to choose from."""

    def find(self, process: Ints, correlation: Ints, work_start_ns: Ints) -> tuple[Ints, Ints]:
        """Return launch time and launching thread of each piece of work (`NO_LAUNCH` where no call is recorded).

        Of several calls with one id, the last that began before the work is taken: nested runtime and driver calls may
        share an id, and ids may come round again.
        """
        launch_ns = np.zeros(len(process), dtype=np.int64)
        launch_thread = np.full(len(process), NO_LAUNCH, dtype=np.int64)
        for number, rows in rows_by_value(process).items():
            if number not in self._processes:
                continue
            call = self._find_calls(self._processes[number], correlation[rows], work_start_ns[rows])
            known = call >= 0
            launch_ns[rows[known]] = self._start_ns[call[known]]
            launch_thread[rows[known]] = self._thread[call[known]]
        return launch_ns, launch_thread

    def used(self) -> Bools:
        """Return which calls share their correlation id with some work that `find` was asked about."""
        return self._used

    @staticmethod
    def _index(rows: Ints, correlation: Ints) -> _Process:
        ids = correlation[rows]
        named = ids > 0
        if not named.all():
            rows, ids = rows[named], ids[named]
        if not len(ids):
            return _Process(0, None, ids, rows)
        low, high = int(ids.min()), int(ids.max())
        if high - low < max(_SPARSEST * len(ids), _ALWAYS_DENSE):
            table = np.full(high - low + 1, -1, dtype=np.int32)
            table[ids - low] = rows
            if np.array_equal(table[ids - low], rows):
                return _Process(low, table, ids, rows)
        order = np.argsort(ids, kind="stable")
        return _Process(low, None, ids[order], rows[order])

    def _find_calls(self, process: _Process, ids: Ints, work_start_ns: Ints) -> Ints:
        if process.table is not None:
            place = ids - process.low
            inside = (place >= 0) & (place < len(process.table))
            call = np.where(inside, process.table[np.where(inside, place, 0)], -1).astype(np.int64)
            self._used[call[call >= 0]] = True
            return call
        if not len(process.ids):
            return np.full(len(ids), -1, dtype=np.int64)
        return self._find_among_shared(process, ids, work_start_ns)

    def _find_among_shared(self, process: _Process, ids: Ints, work_start_ns: Ints) -> Ints:
        first = np.searchsorted(process.ids, ids, side="left")
        last = np.searchsorted(process.ids, ids, side="right")
        at = first.copy()
        for row in np.flatnonzero(last - first > 1).tolist():
            candidates = process.rows[first[row] : last[row]]
            begun = int(np.searchsorted(self._start_ns[candidates], work_start_ns[row], side="right"))
            at[row] = first[row] + max(begun - 1, 0)
            self._used[candidates] = True
            self.shared_count += len(set(self._thread[candidates].tolist())) > 1 or begun < len(candidates)
        call = np.where(last > first, process.rows[np.minimum(at, len(process.rows) - 1)], -1)
        self._used[call[call >= 0]] = True
        return call
