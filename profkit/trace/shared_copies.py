"""Copies of traces to share: what profkit reads of an nsys export or a torch.profiler trace, written anew."""

from __future__ import annotations

import errno
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from profkit.files import whole_file, whole_stream
from profkit.text_kinds import (
    GPU,
    GROUP,
    KERNEL,
    LEFT_OUT,
    OPERATOR,
    PRODUCT,
    PROFILER,
    RANGE,
    THREAD,
    VERSION,
    WORD,
    Keeper,
    Kind,
)
from profkit.trace.kineto import THREAD_NAME
from profkit.trace.kineto_events import (
    Event,
    RowKind,
    Rows,
    job_of,
    load_chrome_trace,
    objects_in,
    parse_integer,
    parse_microseconds,
)
from profkit.trace.nsys import CALLS, COPIES, DEVICES, GRAPHS, KERNELS, SETS, STARTED
from profkit.trace.nsys_rows import EVENTS, PAYLOADS, SYNCS, TABLE, TYPES_READ
from profkit.trace.sqlite import SqliteFile

# Kind of row → how it is written, and what its name is.
_ROWS: dict[RowKind, tuple[str, Kind]] = {
    "kernel": ("kernel", KERNEL),
    "memcpy": ("gpu_memcpy", KERNEL),
    "memset": ("gpu_memset", KERNEL),
    "call": ("cuda_runtime", WORD),
    "sync": ("cuda_sync", WORD),
    "operator": ("cpu_op", OPERATOR),
    "annotation": ("user_annotation", RANGE),
    "flow": ("fwdbwd", WORD),
}
ARGUMENTS: dict[str, Kind | None] = {
    **dict.fromkeys(("correlation", "stream", "device", "bytes", "graph node id", "finished"), None),
    **dict.fromkeys(("wait_on_stream", "wait_on_cuda_event_record_corr_id"), None),
    **dict.fromkeys(("In msg nelems", "Out msg nelems", "Seq"), None),
    **dict.fromkeys(("Collective name", "dtype", "Process Group Description"), WORD),
    "Process Group Name": GROUP,
    "Process Group Ranks": Kind("ranks", r"\[[\d, ]*\]"),
}
_DIGITS = re.compile(r"-?[0-9]{1,20}")
_FIRST_TRACK = 1 << 40
"""Numbers from here on stand for threads that have no number in the trace."""


def write_shared_kineto(path: Path, output: Path, keeper: Keeper) -> None:
    """Write what profkit reads of the trace ``path`` to ``output``, gzipped if its name says so."""
    header, rows = load_chrome_trace(path)
    copy = _KinetoCopy(keeper)
    with whole_stream(output) as file:
        file.write(f'{json.dumps(copy.header(header))[:-1]}, "traceEvents": [\n'.encode())
        for number, row in enumerate(copy.rows(rows)):
            file.write(((",\n" if number else "") + row).encode())
        file.write(b"\n]}\n")


class _KinetoCopy:
    """Makes the parts of a copy from those that `load_chrome_trace` returns."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self._tracks: dict[str, int] = {}

    def header(self, header: Mapping[str, Any]) -> dict[str, Any]:
        copy = _integers(header, "schemaVersion", "cuda_runtime_version", "baseTimeNanoseconds")
        devices = [
            self.keeper.text_or_none(GPU, device.get("name")) for device in objects_in(header.get("deviceProperties"))
        ]
        copy["deviceProperties"] = [{} if name is None else {"name": name} for name in devices]
        if job := job_of(header):
            groups = [self._group(group) for group in objects_in(job.get("pg_config"))]
            copy["distributedInfo"] = {**_integers(job, "rank", "world_size"), "pg_config": groups}
        return copy

    def rows(self, rows: Rows) -> Iterator[str]:
        for kind, (category, name_kind) in _ROWS.items():
            for event in rows[kind]:
                name = self.keeper.text_or_none(name_kind, event.get("name"))
                yield self._row(event, {"ph": event["ph"], "cat": category, "bp": "e", "name": name})
        for event in rows["metadata"]:
            name = event.get("args", {}).get("name")
            if event.get("name") == "thread_name" and isinstance(name, str):
                inner = THREAD_NAME.match(name.strip())
                kept = self.keeper.text(THREAD, inner[1] if inner else name.strip())
                if kept != LEFT_OUT:
                    yield self._row(event, {"ph": "M", "name": "thread_name"}, {"name": kept})

    def _row(self, event: Event, begin: dict[str, Any], arguments: dict[str, Any] | None = None) -> str:
        row = {key: value for key, value in begin.items() if value is not None} | _integers(event, "pid", "id")
        row["tid"] = self._track(event.get("tid"))
        row["args"] = self._arguments(event.get("args", {})) if arguments is None else arguments
        times = {key: parse_microseconds(event.get(key)) for key in ("ts", "dur")}
        # Decimals as they are counted, in whole nanoseconds: more digits than a double can hold.
        written = (f', "{key}": {_decimal(time_ns)}' for key, time_ns in times.items() if time_ns is not None)
        return json.dumps(row)[:-1] + "".join(written) + "}"

    def _arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        kept = {key: self._argument(ARGUMENTS[key], value) for key, value in given.items() if key in ARGUMENTS}
        return {key: value for key, value in kept.items() if value is not None}

    def _argument(self, kind: Kind | None, value: object) -> object:
        if kind is None:
            return _number(value)
        return self.keeper.text_or_none(kind, str(value) if type(value) is int else value)

    def _track(self, track: object) -> object:
        number = parse_integer(track)
        if number is not None or track is None:
            return number
        return self._tracks.setdefault(str(track), _FIRST_TRACK + len(self._tracks))

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        ranks = group.get("ranks")
        listed = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
        name = self.keeper.text(GROUP, str(group.get("pg_name")))
        return {"pg_name": name, "ranks": listed, **_integers(group, "pg_size")}


def _integers(record: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    numbers = {key: parse_integer(record.get(key)) for key in keys}
    return {key: number for key, number in numbers.items() if number is not None}


def _number(value: object) -> object:
    """Return a number, which may be written as text, or a truth; None for anything else."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    if isinstance(value, str):
        try:
            decimal = float(value)
        except ValueError:
            return None
        return decimal if isfinite(decimal) else None
    return value if isinstance(value, int) and abs(value) < 1 << 64 else None


def _decimal(time_ns: int) -> str:
    whole, part = divmod(abs(time_ns), 1000)
    return f"{'-' if time_ns < 0 else ''}{whole}.{part:03d}"


_STRINGS = "StringIds"
_NUMBER, _REAL = "INTEGER", "REAL"
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
    },
}
"""Table → column → the kind of its text, or what else it holds. Nothing else of an export is in a copy."""

_ROWS_READ = {
    TABLE: f"eventType IN ({', '.join(map(str, TYPES_READ))})",
    "META_DATA_EXPORT": "name GLOB 'EXPORT_SCHEMA_VERSION*' OR name GLOB 'EXPORT_PRODUCT_[NV]*'",
}
"""The condition on the rows of a table that are read, if there is one."""


def write_shared_export(path: Path, output: Path, keeper: Keeper) -> None:
    """Write what profkit reads of the nsys export ``path`` to ``output``."""
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

    def write(self) -> None:
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
        return value if isinstance(value, float if kind == _REAL else int) else None


def _type_of(kind: Kind | TextId | str) -> str:
    if isinstance(kind, str):
        return kind
    return "TEXT" if isinstance(kind, Kind) else _NUMBER
