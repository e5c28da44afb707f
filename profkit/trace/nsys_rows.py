"""Rows of nsys exports: NVTX ranges and strings; which call launched a piece of work; and what calls wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profkit.errors import TraceError
from profkit.trace.columns import (
    NO_LAUNCH,
    Bools,
    Ints,
    NamesWithNew,
    Ranges,
    Syncs,
    distinct_values,
    empty_ints,
    rows_by_value,
)
from profkit.trace.sqlite import ColumnRequest, SqliteFile

TABLE = "NVTX_EVENTS"

# ENUM_NSYS_EVENT_TYPE: push/pop and start/end ranges, traced live (59, 60) or imported from a text log (70, 71).
_RANGE_TYPES = (59, 60, 70, 71)
_START_END_TYPES = (60, 71)
_DOMAIN_TYPES = (75, 76)
TYPES_READ = (*_RANGE_TYPES, *_DOMAIN_TYPES)
_DOMAIN_CREATE = 75

PAYLOADS = ("uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue")

_SMALL_SPAN = 1 << 22
_UNNAMED = "(unnamed)"
NO_TIME = -(1 << 62)
"""Read for NULL. A range without an end is open; any other missing time is an impossible one."""
PID_SHIFT = 24
"""A serialized global id is vm·2⁴⁸ + pid·2²⁴ + tid: all above the thread names the process."""
POSITIVE = (1 << 63) - 1
"""The highest bit of a serialized global id is a hardware number's: without it, no id is negative in 64 bits."""


def read_ranges(file: SqliteFile, tables: dict[str, frozenset[str]], names: Names, end_of_capture: int) -> Ranges:
    """Return the push/pop and start/end ranges of every domain.

    A name stands in ``text`` or, registered, in StringIds under ``textId``. A range without an end (the capture stopped
    inside it) ends with the capture and is marked open.
    """
    if TABLE not in tables:
        return _no_ranges()
    columns = tables[TABLE]
    for needed in ("start", "end", "eventType", "globalTid"):
        if needed not in columns:
            raise TraceError(f"{file.path}: table {TABLE} has no column {needed}, without which it holds no ranges")
    wanted = {"start": NO_TIME, "end": NO_TIME, "globalTid": 0, "eventType": 0}
    optional = {"endGlobalTid": -1, "domainId": 0, "textId": -1}
    there = wanted | {name: null for name, null in optional.items() if name in columns}
    request = ColumnRequest(TABLE, there, only=("eventType", _RANGE_TYPES))
    read = file.columns([request])[0]
    column = {name: np.full(len(read[0]), null) for name, null in optional.items()} | dict(
        zip(there, read, strict=True)
    )
    start, end, end_thread, event_type = (column[name] for name in ("start", "end", "endGlobalTid", "eventType"))
    if not len(start):
        return _no_ranges()
    is_open = end == NO_TIME
    last = max(end_of_capture, int(start.max()), int(end.max()))
    end_thread = np.where(end_thread == -1, -1, end_thread & POSITIVE)
    thread = column["globalTid"] & POSITIVE
    process = thread >> PID_SHIFT
    return Ranges(
        name=_range_names(file, columns, names, column["textId"], request.where),
        domain=_domain_names(file, columns, names, process, column["domainId"]),
        start_ns=start,
        end_ns=np.where(is_open, last, end),
        process=process,
        thread=thread,
        # Only start/end ranges can end on another thread.
        end_thread=np.where(np.isin(event_type, _START_END_TYPES) & (end_thread != -1), end_thread, thread),
        is_open=is_open,
        payload=_payloads(file, columns, request.where, len(start)),
    )


def has_invisible_ranges(file: SqliteFile, tables: dict[str, frozenset[str]]) -> bool:
    """Return whether NVTX domains came and went in the capture, but no range."""
    if TABLE not in tables or "eventType" not in tables[TABLE]:
        return False
    types = {
        kind for (kind,) in file.rows(f"SELECT DISTINCT eventType FROM {TABLE} WHERE typeof(eventType) = 'integer'")
    }
    return bool(types & set(_DOMAIN_TYPES)) and not types & set(_RANGE_TYPES)


def _range_names(file: SqliteFile, columns: frozenset[str], names: Names, text_id: Ints, where: str) -> Ints:
    result = names.indices(text_id, {-1: _UNNAMED})
    if "text" not in columns or not (text_id == -1).any():
        return result
    # As bytes, so that only the distinct ones are decoded.
    texts = [text for (text,) in file.rows(f"SELECT CAST(text AS BLOB) FROM {TABLE}{where} ORDER BY rowid")]
    if len(texts) != len(result):
        raise TraceError(f"{file.path}: damaged: the rows of {TABLE} are out of order; export it again")
    interned = {text: names.intern(text.decode("utf-8", "replace")) for text in set(texts) if text is not None}
    return np.array(
        [known if text is None else interned[text] for text, known in zip(texts, result.tolist(), strict=True)],
        dtype=np.int64,
    )


def _domain_names(file: SqliteFile, columns: frozenset[str], names: Names, process: Ints, domain: Ints) -> Ints:
    if "domainId" not in columns:
        return np.full(len(domain), names.intern(""), dtype=np.int64)
    text, text_id = (name if name in columns else "NULL" for name in ("text", "textId"))
    process_id = f"(globalTid & {POSITIVE}) >> {PID_SHIFT}"
    rows = file.rows(
        f"SELECT {process_id}, domainId, {text}, {text_id} FROM {TABLE} WHERE eventType = {_DOMAIN_CREATE}"
    )
    registered = names.values([row[3] for row in rows if isinstance(row[3], int)])
    known = {(p, d): text if text is not None else registered.get(i, "") for p, d, text, i in rows}
    index = np.empty(len(domain), dtype=np.int64)
    for p, of_process in rows_by_value(process).items():
        for d, there in rows_by_value(domain[of_process]).items():
            index[of_process[there]] = names.intern("" if d == 0 else str(known.get((p, d)) or f"domain {d}"))
    return index


def _payloads(file: SqliteFile, columns: frozenset[str], where: str, count: int) -> dict[int, int | float]:
    there = [name for name in PAYLOADS if name in columns]
    if not there:
        return {}
    value = f"coalesce({', '.join(there)})" if len(there) > 1 else there[0]
    # A REAL may be infinite.
    is_number = f"typeof({value}) IN ('integer', 'real') AND {value} BETWEEN -1e300 AND 1e300"
    rows = file.rows(f"SELECT rowid, {value} FROM {TABLE}{where} AND {is_number}")
    numbers = file.rows(f"SELECT rowid FROM {TABLE}{where} ORDER BY rowid") if rows else []
    index_of = {row: index for index, (row,) in enumerate(numbers[:count])}
    # A damaged table may hold other rows by another query.
    return {index_of[row]: number for row, number in rows if row in index_of}


def _no_ranges() -> Ranges:
    none = empty_ints()
    return Ranges(none, none, none, none, none, none, none, none.astype(np.bool_))


class Names(NamesWithNew):
    """The strings that a trace uses, each once, filled from the export's StringIds as they are asked for."""

    def __init__(self, file: SqliteFile) -> None:
        super().__init__(())
        self._file = file

    def indices(self, string_ids: Ints, given: dict[int, str]) -> Ints:
        """Return the index of each string id; ``given`` names the ones that are no StringIds."""
        ids = distinct_values(string_ids)
        strings = self.values([i for i in ids.tolist() if i not in given]) | given
        index = [self.intern(strings.get(i, f"(unnamed, string id {i})")) for i in ids.tolist()]
        if not len(ids) or int(ids[-1]) - int(ids[0]) >= _SMALL_SPAN:
            return np.array(index, dtype=np.int64).take(np.searchsorted(ids, string_ids))
        table = np.zeros(int(ids[-1]) - int(ids[0]) + 1, dtype=np.int64)
        table[ids - ids[0]] = index
        indices: Ints = table[string_ids - ids[0]]
        return indices

    def values(self, string_ids: list[int]) -> dict[int, str]:
        strings: dict[int, str] = {}
        for start in range(0, len(string_ids), 500):
            some = string_ids[start : start + 500]
            marks = ",".join("?" * len(some))
            strings.update(self._file.rows(f"SELECT id, value FROM StringIds WHERE id IN ({marks})", some))
        return {key: str(value) for key, value in strings.items()}


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
        self.used: Bools = np.zeros(len(start_ns), dtype=np.bool_)
        """Which calls share their correlation id with work that was passed to `find`."""
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
            self.used[call[known]] = True
            launch_ns[rows[known]] = self._start_ns[call[known]]
            launch_thread[rows[known]] = self._thread[call[known]]
        return launch_ns, launch_thread

    def first_calls(self, process: Ints, correlation: Ints) -> Ints:
        call = np.full(len(process), -1, dtype=np.int64)
        for number, rows in rows_by_value(process).items():
            if number in self._processes:
                call[rows] = self._processes[number].first_of(correlation[rows])
        return call

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
            self.used[candidates] = True
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
    """Return call, device and stream of each row, and what names one recording of an event (rows, 3)."""
    names = ("globalPid", "correlationId", "deviceId", "streamId", "eventId", "eventSyncId")
    there = [name for name in names if name in tables.get(table, ())]
    columns = {}
    if set(there) | {"streamId"} >= _NEEDED:
        columns = dict(zip(there, file.columns([ColumnRequest(table, dict.fromkeys(there, -1))])[0], strict=True))
    size = len(columns.get("globalPid", ()))
    process, ids, device, stream, event, number = (
        columns.get(name, np.full(size, -1, dtype=np.int64)) for name in names
    )
    process = (process & POSITIVE) >> PID_SHIFT
    numbered = (number >= 0) & (number != _NONE)
    recording = np.stack([process, np.where(numbered, -1, event), np.where(numbered, number, -1)], axis=1)
    return calls.first_calls(process, ids), device, stream, recording


def _find_last(recorded: Ints, record_call: Ints, wanted: Ints, call: Ints) -> Ints:
    _, key = np.unique(np.concatenate([recorded, wanted]), axis=0, return_inverse=True)
    record_key, key = np.split(key.reshape(-1), [len(recorded)])
    rows = np.flatnonzero(record_call >= 0)
    rows = rows[np.lexsort((record_call[rows], record_key[rows]))]
    span = int(max(record_call.max(initial=0), call.max(initial=0))) + 2
    before = np.searchsorted(record_key[rows] * span + record_call[rows], key * span + call) - 1
    last = np.append(rows, -1)[before]
    is_same = (before >= 0) & (np.append(record_key, -1)[last] == key)
    return np.where(is_same, last, -1)
