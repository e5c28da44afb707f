"""A copy of an nsys export to share: the tables and columns that profkit reads, in a new database."""

from __future__ import annotations

import errno
import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from profkit.files import whole_file
from profkit.text_kinds import GPU, KERNEL, PRODUCT, PROFILER, RANGE, THREAD, VERSION, WORD, Keeper, Kind
from profkit.trace.nsys import CALLS, COPIES, DEVICES, GRAPHS, KERNELS, SETS, STARTED
from profkit.trace.nsys_calls import EVENTS, SYNCS
from profkit.trace.nsys_collectives import ENTRIES, ENTRIES_READ, keep_wanted, read_schemas
from profkit.trace.nsys_ranges import PAYLOADS, TABLE, TYPES_READ
from profkit.trace.sqlite import SqliteFile

_STRINGS = "StringIds"
_NUMBER, _REAL, _PAYLOAD = "INTEGER", "REAL", "BLOB"
_PRODUCT = Kind("profiler", f"{PRODUCT.shape}|{VERSION.shape}")


@dataclass(frozen=True)
class TextId:
    """A number that stands for a text in StringIds, of a kind."""

    kind: Kind


_TIMES = dict.fromkeys(("start", "end", "correlationId"), _NUMBER)
_WORK = _TIMES | dict.fromkeys(("globalPid", "deviceId", "graphNodeId"), _NUMBER)
_WAITS: dict[str, Kind | TextId | str] = dict.fromkeys(
    ("globalPid", "correlationId", "deviceId", "streamId", "eventId", "eventSyncId"), _NUMBER
)

TABLES: dict[str, dict[str, Kind | TextId | str]] = {
    "META_DATA_EXPORT": {"name": WORD, "value": _PRODUCT},
    STARTED: {"utcEpochNs": _NUMBER},
    "TARGET_INFO_GPU": {"name": GPU},
    DEVICES: dict.fromkeys(("gpuId", "cudaId", "pid"), _NUMBER),
    "ThreadNames": {"globalTid": _NUMBER, "nameId": TextId(THREAD)},
    "DIAGNOSTIC_EVENT": {"severity": _NUMBER, "text": PROFILER, "globalPid": _NUMBER},
    CALLS: {**_TIMES, "globalTid": _NUMBER, "returnValue": _NUMBER, "nameId": TextId(WORD)},
    KERNELS: {**_WORK, "streamId": _NUMBER, "demangledName": TextId(KERNEL), "shortName": TextId(KERNEL)},
    GRAPHS: {**_WORK, "streamId": _NUMBER, "graphId": _NUMBER},
    COPIES: {**_WORK, "streamId": _NUMBER, "bytes": _NUMBER, "copyKind": _NUMBER},
    SETS: {**_WORK, "streamId": _NUMBER, "bytes": _NUMBER, "copyKind": _NUMBER},
    SYNCS: _WAITS,
    EVENTS: _WAITS,
    TABLE: {
        **dict.fromkeys(("start", "end", "eventType", "globalTid", "endGlobalTid", "domainId"), _NUMBER),
        "textId": TextId(RANGE),
        "text": RANGE,
        **{name: _REAL if name.startswith(("double", "float")) else _NUMBER for name in PAYLOADS},
        "binaryData": _PAYLOAD,
    },
    ENTRIES: {
        **dict.fromkeys(("domainId", "schemaId", "type", "offset"), _NUMBER),
        "name": Kind("entry", "|".join(map(re.escape, ENTRIES_READ))),
    },
}
"""Table → column → the kind of its text, or what else it holds. Nothing else of an export is in a copy."""

_ROWS_READ = {
    TABLE: f"eventType IN ({', '.join(map(str, TYPES_READ))})",
    "META_DATA_EXPORT": "name GLOB 'EXPORT_SCHEMA_VERSION*' OR name GLOB 'EXPORT_PRODUCT_[NV]*'",
}
"""The condition on the rows of a table that are read, if there is one."""


def write_shared_export(path: Path, output: Path, keeper: Keeper) -> None:
    """Write what profkit reads of the nsys export ``path`` to ``output``.

    Raises:
        TraceError: it cannot be read, or is no export.
        OSError: the copy cannot be written.
    """
    with SqliteFile(path) as file, whole_file(output) as partial:
        partial.touch(mode=0o600)  # until it is whole, nobody else may read it; a missing folder is said plainly
        try:
            with closing(sqlite3.connect(partial)) as target:
                target.execute("PRAGMA journal_mode = OFF")
                _ExportCopy(file, target, keeper).write()
                target.commit()
        except sqlite3.Error as error:
            raise OSError(errno.EIO, f"SQLite cannot write it: {error}", str(output)) from None


class _ExportCopy:
    """Copies table by table; a text keeps its number unless texts of two kinds had one."""

    def __init__(self, file: SqliteFile, target: sqlite3.Connection, keeper: Keeper) -> None:
        self._file, self._target, self._keeper = file, target, keeper
        self._tables = file.tables()
        self._texts: dict[int, str] = {}
        self._numbers: dict[tuple[Kind, int], int] = {}
        self._schemas = read_schemas(file) if ENTRIES in self._tables else {}

    def write(self) -> None:
        """Write all tables, StringIds last."""
        for table, declared in TABLES.items():
            columns = {name: kind for name, kind in declared.items() if name in self._tables.get(table, ())}
            if columns:
                self._write_table(table, columns)
        self._target.execute(f"CREATE TABLE {_STRINGS} (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
        self._target.executemany(f"INSERT INTO {_STRINGS} VALUES (?, ?)", sorted(self._texts.items()))

    def _write_table(self, table: str, columns: Mapping[str, Kind | TextId | str]) -> None:
        self._number_texts(table, columns)
        types = (f"{name} {_type_of(kind)}" for name, kind in columns.items())
        self._target.execute(f"CREATE TABLE {table} ({', '.join(types)})")
        where = f" WHERE {_ROWS_READ[table]}" if table in _ROWS_READ else ""
        rows = self._file.each_row(f"SELECT {', '.join(columns)} FROM {table}{where} ORDER BY rowid")
        copies = ([self._cell(kind, value) for kind, value in zip(columns.values(), row, strict=True)] for row in rows)
        self._target.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", copies)

    def _number_texts(self, table: str, columns: Mapping[str, Kind | TextId | str]) -> None:
        for name, text_id in columns.items():
            if not isinstance(text_id, TextId):
                continue
            sql = (
                f"SELECT id, value FROM {_STRINGS} WHERE id IN (SELECT {name} FROM {table}) AND typeof(value) = 'text'"
            )
            for number, value in self._file.rows(sql):
                kept = self._keeper.text(text_id.kind, value)
                at = number if self._texts.setdefault(number, kept) == kept else max(self._texts) + 1
                self._texts[at] = kept
                self._numbers[text_id.kind, number] = at

    def _cell(self, kind: Kind | TextId | str, value: object) -> object:
        if isinstance(kind, Kind):
            return self._keeper.text_or_none(kind, value)
        if isinstance(kind, TextId):
            # A number that stands for no text stays: what it names is one thing all the same.
            return self._numbers.get((kind.kind, value), value) if isinstance(value, int) else None
        if kind == _PAYLOAD:
            return keep_wanted(value, self._schemas) if isinstance(value, bytes) else None
        return value if isinstance(value, float if kind == _REAL else int) else None


def _type_of(kind: Kind | TextId | str) -> str:
    if isinstance(kind, str):
        return kind
    return "TEXT" if isinstance(kind, Kind) else _NUMBER
