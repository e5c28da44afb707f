"""Read the SQLite export of Nsight Systems, schema 3.1 to today's, into the columns of a `Trace`.

Tables are absent when nothing was recorded for them, columns when the version did not know them; what is needed and
not there is named in the error. Source of the table meanings: the comments in the export's own CREATE TABLE statements
and the ENUM_* tables beside them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from profkit.errors import TraceError
from profkit.trace.columns import (
    NO_LAUNCH,
    Bools,
    Calls,
    Copies,
    Diagnostic,
    Ints,
    Trace,
    Work,
    empty_bools,
    empty_ints,
)
from profkit.trace.nsys_names import Names
from profkit.trace.nsys_ranges import has_invisible_ranges, read_ranges
from profkit.trace.sqlite_file import ColumnRequest, SqliteFile

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
SETS = "CUPTI_ACTIVITY_KIND_MEMSET"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"

# A serialized global id is vm·2⁴⁸ + pid·2²⁴ + tid: all above the thread names the process.
_PID_SHIFT = 24
_OS_PID_MASK = (1 << 24) - 1

_SEVERITIES = {0: "info", 1: "info", 2: "warning", 3: "error"}

_GRAPH_NAME = "CUDA graph {}"

Columns = dict[str, Ints]


def read_nsys(path: Path) -> Trace:
    """Return the trace in an nsys SQLite export.

    Kernels, whole graphs, copies and sets get their launch by correlation id *and* process
    (``globalTid & ~0xFFFFFF == globalPid``): ids alone are not unique across the processes of one report.

    Raises:
        TraceError: the file cannot be read, is no nsys export, or lacks a column that matching needs.
    """
    with SqliteFile(path) as file:
        tables = file.tables()
        _refuse_foreign(path, tables)
        reader = _Reader(file, tables)
        return reader.read()


def _refuse_foreign(path: Path, tables: dict[str, frozenset[str]]) -> None:
    known = {"StringIds", "META_DATA_EXPORT", "ANALYSIS_DETAILS", "TARGET_INFO_SESSION_START_TIME"}
    if "StringIds" not in tables or not (tables.keys() & (known - {"StringIds"} | {CALLS, KERNELS, "NVTX_EVENTS"})):
        raise TraceError(f"{path}: a SQLite database, but no Nsight Systems export (it has no StringIds table)")


class _Reader:
    """One export being read; every method fills one part of the trace."""

    def __init__(self, file: SqliteFile, tables: dict[str, frozenset[str]]) -> None:
        self.file = file
        self.tables = tables
        self.metadata = self._read_metadata()
        self.schema = self.metadata.get("EXPORT_SCHEMA_VERSION", "unknown")
        self.names: list[str] = []
        self.notes: list[str] = []

    def read(self) -> Trace:
        requests = {name: self._request(name) for name in (CALLS, KERNELS, COPIES, SETS, GRAPHS) if name in self.tables}
        columns = self.file.columns([ColumnRequest(table, tuple(parts.values())) for table, parts in requests.items()])
        found: dict[str, Columns] = {
            table: dict(zip(parts, arrays, strict=True))
            for (table, parts), arrays in zip(requests.items(), columns, strict=True)
        }
        calls = _sorted_by_start(found.pop(CALLS, None))
        launches = _LaunchIndex(calls)
        work = self._build_work(found, launches)
        copies = self._build_copies(found, launches)
        names = self._intern(work.name, calls["name"])
        ranges = read_ranges(self.file, self.tables, names, _end_of_capture(work, calls))
        processes = np.unique(np.concatenate([work.process, calls["thread"] >> _PID_SHIFT, ranges.process]))
        return Trace(
            path=str(self.file.path),
            source="nsys",
            product=self._product(),
            measure="gpu-kernel",
            names=names.strings,
            work=work,
            copies=copies,
            calls=Calls(
                name=calls["name"],
                start_ns=calls["start"],
                end_ns=calls["end"],
                thread=calls["thread"],
                process=calls["thread"] >> _PID_SHIFT,
                correlation=calls["correlation"],
                has_work=launches.used(),
                failed=calls["status"] != 0,
            ),
            ranges=ranges,
            thread_names=self._thread_names(),
            process_ids={int(process): int(process) & _OS_PID_MASK for process in processes},
            main_threads=frozenset((int(p) << _PID_SHIFT) | (int(p) & _OS_PID_MASK) for p in processes),
            gpus=self._gpus(),
            diagnostics=self._diagnostics(),
            has_kernel_table=KERNELS in self.tables or GRAPHS in self.tables,
            notes=tuple(self.notes),
            has_invisible_ranges=has_invisible_ranges(self.file, self.tables),
        )

    def _request(self, table: str) -> dict[str, str]:
        """Return the columns to read from a table: our name → SQL."""
        needed = {"start": "start", "end": "end"}
        process = f"coalesce(globalPid, 0) >> {_PID_SHIFT}"
        correlation = "coalesce(correlationId, -1)"
        if table == CALLS:
            needed |= {"thread": "coalesce(globalTid, 0)", "correlation": correlation, "name": "nameId"}
            needed |= {"status": "coalesce(returnValue, 0)"}
        else:
            needed |= {"process": process, "correlation": correlation, "device": "deviceId"}
        if table in (KERNELS, GRAPHS):
            needed |= {"stream": "coalesce(streamId, -1)"}
        if table == KERNELS:
            needed |= {"name": self._kernel_name_column()}
        if table == GRAPHS:
            needed |= {"graph": "coalesce(graphId, -1)"}
        if table in (COPIES, SETS):
            needed |= {"bytes": "coalesce(bytes, 0)"}
        self._require(table, needed)
        return needed

    def _kernel_name_column(self) -> str:
        if "demangledName" in self.tables[KERNELS]:
            return "demangledName"
        self.notes.append("this export has no demangled kernel names; short names stand in, and categories are coarser")
        return "shortName"

    def _require(self, table: str, needed: dict[str, str]) -> None:
        for ours, sql in list(needed.items()):
            column = sql.removeprefix("coalesce(").partition(",")[0].strip() if "coalesce" in sql else sql
            if column in self.tables[table]:
                continue
            if column in ("returnValue", "streamId", "graphId", "bytes"):
                needed[ours] = "0"
                continue
            raise TraceError(
                f"{self.file.path}: table {table} has no column {column}, which is needed to place its rows"
                f" (export schema {self.schema}); export the report again with a newer nsys"
            )

    def _build_work(self, found: dict[str, Columns], launches: _LaunchIndex) -> Work:
        kernels, graphs = found.get(KERNELS, {}), found.get(GRAPHS, {})
        if graphs:
            graphs = {**graphs, "name": -2 - np.maximum(graphs["graph"], 0)}
        parts = [part for part in (kernels, graphs) if part]
        column = {name: _joined(parts, name) for name in ("name", "start", "end", "device", "stream", "process")}
        launch_ns, launch_thread = launches.find(column["process"], _joined(parts, "correlation"))
        is_graph = np.zeros(len(column["start"]), dtype=np.bool_)
        is_graph[len(kernels["start"]) if kernels else 0 :] = True
        return Work(
            name=column["name"],
            start_ns=column["start"],
            end_ns=column["end"],
            duration_ns=column["end"] - column["start"],
            device=column["device"],
            stream=column["stream"],
            process=column["process"],
            launch_ns=launch_ns,
            launch_thread=launch_thread,
            is_graph=is_graph,
        )

    def _build_copies(self, found: dict[str, Columns], launches: _LaunchIndex) -> Copies:
        parts = [found[table] for table in (COPIES, SETS) if table in found]
        column = {name: _joined(parts, name) for name in ("start", "end", "device", "process", "bytes")}
        launch_ns, launch_thread = launches.find(column["process"], _joined(parts, "correlation"))
        is_memset = np.zeros(len(column["start"]), dtype=np.bool_)
        is_memset[len(found[COPIES]["start"]) if COPIES in found else 0 :] = True
        return Copies(
            start_ns=column["start"],
            end_ns=column["end"],
            device=column["device"],
            process=column["process"],
            launch_ns=launch_ns,
            launch_thread=launch_thread,
            is_memset=is_memset,
            byte_count=column["bytes"],
        )

    def _intern(self, *columns: Ints) -> Names:
        """Replace string ids in the columns, in place, by indices into one table of names."""
        names = Names(self.file)
        for column in columns:
            ids = np.unique(column)
            graphs = {int(i): _GRAPH_NAME.format(-2 - int(i)) for i in ids if i < -1}
            indices = names.indices([int(i) for i in ids], graphs)
            column[:] = indices[np.searchsorted(ids, column)]
        return names

    def _read_metadata(self) -> dict[str, str]:
        if "META_DATA_EXPORT" not in self.tables:
            return {}
        return {str(name): str(value) for name, value in self.file.rows("SELECT name, value FROM META_DATA_EXPORT")}

    def _product(self) -> str:
        name = self.metadata.get("EXPORT_PRODUCT_NAME", "Nsight Systems").removeprefix("NVIDIA ")
        version = self.metadata.get("EXPORT_PRODUCT_VERSION", "of unknown version")
        return f"{name} {version} (export schema {self.schema})"

    def _thread_names(self) -> dict[int, str]:
        if not {"ThreadNames", "StringIds"} <= self.tables.keys():
            return {}
        sql = "SELECT t.globalTid, s.value FROM ThreadNames t JOIN StringIds s ON s.id = t.nameId"
        return {int(thread): str(name) for thread, name in self.file.rows(sql) if thread is not None}

    def _gpus(self) -> tuple[str, ...]:
        if "TARGET_INFO_GPU" not in self.tables or "name" not in self.tables["TARGET_INFO_GPU"]:
            return ()
        return tuple(str(name) for (name,) in self.file.rows("SELECT name FROM TARGET_INFO_GPU ORDER BY id"))

    def _diagnostics(self) -> tuple[Diagnostic, ...]:
        if not {"severity", "text"} <= self.tables.get("DIAGNOSTIC_EVENT", frozenset()):
            return ()
        rows = self.file.rows("SELECT severity, text FROM DIAGNOSTIC_EVENT ORDER BY timestamp")
        return tuple(Diagnostic(_SEVERITIES.get(severity, "error"), str(text)) for severity, text in rows)  # type: ignore[arg-type]


class _LaunchIndex:
    """Finds the call that launched a piece of work: the earliest of its process with the same correlation id."""

    def __init__(self, calls: Columns) -> None:
        self._calls = calls
        keys = _launch_keys(calls["thread"] >> _PID_SHIFT, calls["correlation"])
        # Calls are sorted by time and the sort is stable: the first of equal keys is the earliest call.
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]
        self._first_used: Bools = np.zeros(len(keys), dtype=np.bool_)

    def find(self, process: Ints, correlation: Ints) -> tuple[Ints, Ints]:
        """Return launch time and launching thread of each piece of work (`NO_LAUNCH` where no call is recorded)."""
        if not len(self._sorted):
            return np.zeros(len(process), dtype=np.int64), np.full(len(process), NO_LAUNCH, dtype=np.int64)
        keys = _launch_keys(process, correlation)
        at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        call = self._order[at]
        known = (self._sorted[at] == keys) & (correlation > 0)
        self._first_used[at[known]] = True
        launch_ns = np.where(known, self._calls["start"][call], 0)
        return launch_ns, np.where(known, self._calls["thread"][call], NO_LAUNCH)

    def used(self) -> Bools:
        """Return which calls share their correlation id with some work that `find` was asked about."""
        if not len(self._sorted):
            return empty_bools()
        group = np.concatenate([[0], np.cumsum(self._sorted[1:] != self._sorted[:-1])])
        used = np.zeros(len(self._sorted), dtype=np.bool_)
        used[self._order] = np.bincount(group, weights=self._first_used)[group] > 0
        return used


def _launch_keys(process: Ints, correlation: Ints) -> Ints:
    """Return one integer per (process, correlation id); ids are 32 bits wide, a pid is below 2²²."""
    return ((process & ((1 << 31) - 1)) << 32) | (correlation & 0xFFFFFFFF)


def _sorted_by_start(calls: Columns | None) -> Columns:
    if calls is None:
        return {name: empty_ints() for name in ("start", "end", "thread", "correlation", "name", "status")}
    if (calls["start"][1:] >= calls["start"][:-1]).all():
        return calls
    order = np.argsort(calls["start"], kind="stable")
    return {name: column[order] for name, column in calls.items()}


def _joined(parts: list[Columns], name: str) -> Ints:
    if len(parts) == 1:
        return parts[0][name]
    return np.concatenate([part[name] for part in parts]) if parts else empty_ints()


def _end_of_capture(work: Work, calls: Columns) -> int:
    ends = [int(column.max()) for column in (work.end_ns, calls["end"]) if len(column)]
    return max(ends, default=0)
