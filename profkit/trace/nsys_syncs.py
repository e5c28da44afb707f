"""What calls wait for, by the tables of synchronizations and of recorded events in an nsys export."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np

from profkit.trace.columns import Ints, Syncs, distinct_values
from profkit.trace.sqlite import ColumnRequest, SqliteFile

SYNCS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
EVENTS = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"

_NONE = 0xFFFF_FFFF
_PID_SHIFT = 24
_NEEDED = {"globalPid", "correlationId", "streamId", "eventId"}


def read_syncs(
    file: SqliteFile, tables: Mapping[str, frozenset[str]], process: Ints, correlation: Ints
) -> Syncs | None:
    """Return what the calls of these processes and correlation ids wait for; None where the export does not say.

    nsys counts each recording of an event (``eventSyncId``); older versions know only the event, which stands for its
    last recording before the call.
    """
    if not tables.get(SYNCS, frozenset()) >= _NEEDED:
        return None
    calls = _CallIndex(process, correlation)
    pid, ids, device, stream, event, number = _read(file, tables, SYNCS, ("deviceId", "streamId"))
    call = calls.find(pid, ids)
    recorded = _Recordings(calls, _read(file, tables, EVENTS, ("deviceId", "streamId")))
    at = recorded.find(_keys(pid, event, number), call)
    known = call >= 0
    columns = (call, device, np.where(stream == _NONE, -1, stream), *recorded.places(at))
    return Syncs(*(column[known] for column in columns))


def _read(file: SqliteFile, tables: Mapping[str, frozenset[str]], table: str, more: tuple[str, ...]) -> list[Ints]:
    """Return process, correlation id, the columns ``more``, event and number of its recording."""
    names = ("globalPid", "correlationId", *more, "eventId", "eventSyncId")
    there = [name for name in names if name in tables.get(table, ())]
    found = {}
    if set(there) | {"streamId"} >= _NEEDED:
        found = dict(zip(there, file.columns([ColumnRequest(table, dict.fromkeys(there, -1))])[0], strict=True))
    size = len(found.get("globalPid", ()))
    columns = [found.get(name, np.full(size, -1, dtype=np.int64)) for name in names]
    columns[0] = columns[0] >> _PID_SHIFT
    return columns


def _keys(process: Ints, event: Ints, number: Ints) -> list[tuple[int, int, int]]:
    """Return what names one recording of an event: its number, where there is one, else the event."""
    numbered = (number >= 0) & (number != _NONE)
    return list(
        zip(
            process.tolist(),
            np.where(numbered, -1, event).tolist(),
            np.where(numbered, number, -1).tolist(),
            strict=True,
        )
    )


class _Recordings:
    """The calls that recorded events, and on which streams."""

    def __init__(self, calls: _CallIndex, columns: list[Ints]) -> None:
        process, ids, device, stream, event, number = columns
        self._call, self._device, self._stream = calls.find(process, ids), device, stream
        self._rows: dict[tuple[int, int, int], list[int]] = {}
        keys = _keys(process, event, number)
        for row in np.argsort(self._call, kind="stable").tolist():
            if self._call[row] >= 0:
                self._rows.setdefault(keys[row], []).append(row)

    def find(self, keys: list[tuple[int, int, int]], call: Ints) -> Ints:
        """Return the last recording of each event before each call, -1 if there is none."""
        found = []
        for key, row in zip(keys, call.tolist(), strict=True):
            rows = self._rows.get(key, [])
            before = bisect_left(rows, row, key=lambda at: int(self._call[at]))
            found.append(rows[before - 1] if before else -1)
        return np.array(found, dtype=np.int64)

    def places(self, at: Ints) -> tuple[Ints, Ints, Ints]:
        """Return call, device and stream of recordings, -1 for none."""
        call, device, stream = (np.append(column, -1)[at] for column in (self._call, self._device, self._stream))
        return call, device, stream


class _CallIndex:
    """Finds a call's row by process and correlation id."""

    def __init__(self, process: Ints, correlation: Ints) -> None:
        self._processes = distinct_values(process)
        key = self._key(process, correlation)
        self._order = np.argsort(key, kind="stable")
        self._sorted = key[self._order]

    def find(self, process: Ints, correlation: Ints) -> Ints:
        """Return the first row of each, -1 where there is none."""
        if not len(self._sorted):
            return np.full(len(process), -1, dtype=np.int64)
        key = self._key(process, correlation)
        at = np.minimum(np.searchsorted(self._sorted, key), len(self._sorted) - 1)
        return np.where(self._sorted[at] == key, self._order[at], -1)

    def _key(self, process: Ints, correlation: Ints) -> Ints:
        known = np.searchsorted(self._processes, process)
        inside = np.minimum(known, len(self._processes) - 1)
        is_there = self._processes[inside] == process if len(self._processes) else np.zeros(len(process), dtype=bool)
        return np.where(is_there, inside << 33 | (correlation & _NONE), -1)
