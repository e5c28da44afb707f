"""The NVTX ranges of an nsys export, and its strings, fetched as they are asked for."""

from __future__ import annotations

import numpy as np

from profkit.errors import TraceError
from profkit.trace.columns import Ints, NamesWithNew, Ranges, distinct_values, empty_bools, empty_ints, rows_by_value
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
    where = f"eventType IN ({','.join(map(str, _RANGE_TYPES))})"
    wanted = {"start": NO_TIME, "end": NO_TIME, "globalTid": 0, "eventType": 0, "rowid": 0}
    optional = {"endGlobalTid": -1, "domainId": 0, "textId": -1}
    there = wanted | {name: null for name, null in optional.items() if name in columns}
    found = dict(zip(there, file.columns([ColumnRequest(TABLE, there, where)])[0], strict=True))
    start, end, thread, event_type = (found[name] for name in ("start", "end", "globalTid", "eventType"))
    if not len(start):
        return _no_ranges()
    is_open = end == NO_TIME
    last = max(end_of_capture, int(start.max()), int(end.max()))
    end_thread = found.get("endGlobalTid", thread)
    end_thread = np.where(end_thread == -1, -1, end_thread & POSITIVE)
    thread = thread & POSITIVE
    process = thread >> PID_SHIFT
    return Ranges(
        name=_range_names(file, columns, names, found.get("textId", np.full(len(start), -1)), where),
        domain=_domain_names(
            file, columns, names, process, found.get("domainId", np.zeros(len(start), dtype=np.int64))
        ),
        start_ns=start,
        end_ns=np.where(is_open, last, end),
        process=process,
        thread=thread,
        # Only start/end ranges can end on another thread.
        end_thread=np.where(np.isin(event_type, _START_END_TYPES) & (end_thread != -1), end_thread, thread),
        is_open=is_open,
        payload=_payloads(file, columns, where, found["rowid"]),
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
    """Return the index of each range's name; ``text``, where there is one, wins over ``textId``."""
    result = names.indices(text_id, {-1: _UNNAMED})
    if "text" not in columns or not (text_id == -1).any():
        return result
    # As bytes, so that only the distinct ones are decoded.
    texts = [text for (text,) in file.rows(f"SELECT CAST(text AS BLOB) FROM {TABLE} WHERE {where} ORDER BY rowid")]
    if len(texts) != len(result):
        raise TraceError(f"{file.path}: damaged: the rows of {TABLE} are out of order; export it again")
    interned = {text: names.intern(text.decode("utf-8", "replace")) for text in set(texts) if text is not None}
    return np.array(
        [known if text is None else interned[text] for text, known in zip(texts, result.tolist(), strict=True)],
        dtype=np.int64,
    )


def _domain_names(file: SqliteFile, columns: frozenset[str], names: Names, process: Ints, domain: Ints) -> Ints:
    """Return the index of each range's domain name: empty for the default domain, ids are per process."""
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


def _payloads(file: SqliteFile, columns: frozenset[str], where: str, row_id: Ints) -> dict[int, int | float]:
    there = [name for name in PAYLOADS if name in columns]
    if not there:
        return {}
    value = f"coalesce({', '.join(there)})" if len(there) > 1 else there[0]
    # A REAL may be infinite.
    is_number = f"typeof({value}) IN ('integer', 'real') AND {value} BETWEEN -1e300 AND 1e300"
    rows = file.rows(f"SELECT rowid, {value} FROM {TABLE} WHERE {where} AND {is_number}")
    index_of = {row: index for index, row in enumerate(row_id.tolist())} if rows else {}
    # A damaged table may hold other rows by another query.
    return {index_of[row]: number for row, number in rows if row in index_of}


def _no_ranges() -> Ranges:
    none = empty_ints()
    return Ranges(none, none, none, none, none, none, none, empty_bools())


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
        found: Ints = table[string_ids - ids[0]]
        return found

    def values(self, string_ids: list[int]) -> dict[int, str]:
        """Return the strings of these ids."""
        found: dict[int, str] = {}
        for start in range(0, len(string_ids), 500):
            some = string_ids[start : start + 500]
            marks = ",".join("?" * len(some))
            found.update(self._file.rows(f"SELECT id, value FROM StringIds WHERE id IN ({marks})", some))
        return {key: str(value) for key, value in found.items()}
