"""Which call a row of an nsys export belongs to, by correlation id: the launch of work, and what calls wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profkit.trace.columns import NO_LAUNCH, Bools, Ints, Syncs, distinct_values, rows_by_value
from profkit.trace.nsys_ranges import PID_SHIFT, POSITIVE
from profkit.trace.sqlite import ColumnRequest, SqliteFile

SYNCS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
EVENTS = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"

_NONE = 0xFFFF_FFFF
_NEEDED = {"globalPid", "correlationId", "streamId", "eventId"}


# A table with a place for every id from the smallest to the largest is fastest, unless most places stay empty.
_SPARSEST = 32
_ALWAYS_DENSE = 1 << 16


@dataclass(frozen=True, eq=False)
class _ProcessCalls:
    """One process's calls: ``rows`` by correlation id. Either ``table`` (id less ``low`` → row, -1: none) or sorted."""

    low: int
    table: npt.NDArray[np.int32] | None
    ids: Ints
    rows: Ints

    def first_of(self, ids: Ints) -> Ints:
        """Return the row of the first call that has each id, -1 where there is none."""
        if not len(self.ids):
            return np.full(len(ids), -1, dtype=np.int64)
        if self.table is not None:
            place = ids - self.low
            inside = (place >= 0) & (place < len(self.table))
            return np.where(inside, self.table[np.where(inside, place, 0)], -1).astype(np.int64)
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.rows[at], -1)


class LaunchIndex:
    """Finds the call that launched a piece of work; ids alone are not unique across the processes of one report."""

    def __init__(self, process: Ints, correlation: Ints, start_ns: Ints, thread: Ints) -> None:
        """Index calls that are sorted by time; CUPTI's id 0 means none."""
        self._start_ns, self._thread = start_ns, thread
        self._used = np.zeros(len(start_ns), dtype=np.bool_)
        self._processes = {p: self._index(rows, correlation) for p, rows in rows_by_value(process).items()}
        self.shared_count = 0
        """How many pieces of work had several calls to choose from, on other threads or at other times."""

    def find(self, process: Ints, correlation: Ints, work_start_ns: Ints) -> tuple[Ints, Ints]:
        """Return launch time and launching thread of each piece of work (`NO_LAUNCH` where no call is recorded).

        Of several calls with one id, the last one that began before the work counts: nested runtime and driver calls
        may share an id, and ids may be used again.
        """
        launch_ns = np.zeros(len(process), dtype=np.int64)
        launch_thread = np.full(len(process), NO_LAUNCH, dtype=np.int64)
        for number, rows in rows_by_value(process).items():
            if number not in self._processes:
                continue
            calls, ids = self._processes[number], correlation[rows]
            call = calls.first_of(ids)
            if calls.table is None:
                call = self._choose_among_shared(calls, call, ids, work_start_ns[rows])
            known = call >= 0
            self._used[call[known]] = True
            launch_ns[rows[known]] = self._start_ns[call[known]]
            launch_thread[rows[known]] = self._thread[call[known]]
        return launch_ns, launch_thread

    def first_calls(self, process: Ints, correlation: Ints) -> Ints:
        """Return the row of the first call that has each correlation id in its process, -1 where there is none."""
        call = np.full(len(process), -1, dtype=np.int64)
        for number, rows in rows_by_value(process).items():
            if number in self._processes:
                call[rows] = self._processes[number].first_of(correlation[rows])
        return call

    def used(self) -> Bools:
        """Return which calls share their correlation id with work that was passed to `find`."""
        return self._used

    @staticmethod
    def _index(rows: Ints, correlation: Ints) -> _ProcessCalls:
        ids = correlation[rows]
        named = ids != 0
        if not named.all():
            rows, ids = rows[named], ids[named]
        if not len(ids):
            return _ProcessCalls(0, None, ids, rows)
        low, high = int(ids.min()), int(ids.max())
        if high - low < max(_SPARSEST * len(ids), _ALWAYS_DENSE):
            table = np.full(high - low + 1, -1, dtype=np.int32)
            table[ids - low] = rows
            if np.array_equal(table[ids - low], rows):
                return _ProcessCalls(low, table, ids, rows)
        order = np.argsort(ids, kind="stable")
        return _ProcessCalls(low, None, ids[order], rows[order])

    def _choose_among_shared(self, calls: _ProcessCalls, first_call: Ints, ids: Ints, work_start_ns: Ints) -> Ints:
        first = np.searchsorted(calls.ids, ids, side="left")
        last = np.searchsorted(calls.ids, ids, side="right")
        call = first_call.copy()
        # All work of one id at once: a damaged file may give every call and every kernel the same.
        for low, rows in rows_by_value(np.where(last - first > 1, first, -1)).items():
            if low < 0:
                continue
            candidates = calls.rows[low : last[rows[0]]]
            begun = np.searchsorted(self._start_ns[candidates], work_start_ns[rows], side="right")
            call[rows] = candidates[np.maximum(begun - 1, 0)]
            self._used[candidates] = True
            has_threads = len(distinct_values(self._thread[candidates])) > 1
            self.shared_count += len(rows) if has_threads else int(np.count_nonzero(begun < len(candidates)))
        return call


def read_syncs(file: SqliteFile, tables: Mapping[str, frozenset[str]], calls: LaunchIndex) -> Syncs | None:
    """Return what the calls wait for; None where the export does not say.

    nsys counts each recording of an event (``eventSyncId``); older versions know only the event, which stands for its
    last recording before the call.
    """
    if not tables.get(SYNCS, frozenset()) >= _NEEDED:
        return None
    call, device, stream, wanted = _read(file, tables, SYNCS, calls)
    record_call, *record_place, recorded = _read(file, tables, EVENTS, calls)
    at = _find_last(recorded, record_call, wanted, call)
    records = (np.append(column, -1)[at] for column in (record_call, *record_place))
    columns = (call, device, np.where(stream == _NONE, -1, stream), *records)
    known = call >= 0
    return Syncs(*(column[known] for column in columns))


def _read(
    file: SqliteFile, tables: Mapping[str, frozenset[str]], table: str, calls: LaunchIndex
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return call, device and stream of each row, and what names one recording of an event (rows, 3).

    That is the process and the recording's number, where there is one, else the event.
    """
    names = ("globalPid", "correlationId", "deviceId", "streamId", "eventId", "eventSyncId")
    there = [name for name in names if name in tables.get(table, ())]
    found = {}
    if set(there) | {"streamId"} >= _NEEDED:
        found = dict(zip(there, file.columns([ColumnRequest(table, dict.fromkeys(there, -1))])[0], strict=True))
    size = len(found.get("globalPid", ()))
    process, ids, device, stream, event, number = (found.get(name, np.full(size, -1, dtype=np.int64)) for name in names)
    process = (process & POSITIVE) >> PID_SHIFT
    numbered = (number >= 0) & (number != _NONE)
    recording = np.stack([process, np.where(numbered, -1, event), np.where(numbered, number, -1)], axis=1)
    return calls.first_calls(process, ids), device, stream, recording


def _find_last(recorded: Ints, record_call: Ints, wanted: Ints, call: Ints) -> Ints:
    """Return the row of the last recording of each wanted event before each call, -1 if there is none."""
    _, key = np.unique(np.concatenate([recorded, wanted]), axis=0, return_inverse=True)
    record_key, key = np.split(key.reshape(-1), [len(recorded)])
    rows = np.flatnonzero(record_call >= 0)
    rows = rows[np.lexsort((record_call[rows], record_key[rows]))]
    span = int(max(record_call.max(initial=0), call.max(initial=0))) + 2
    before = np.searchsorted(record_key[rows] * span + record_call[rows], key * span + call) - 1
    found = np.append(rows, -1)[before]
    is_same = (before >= 0) & (np.append(record_key, -1)[found] == key)
    return np.where(is_same, found, -1)
