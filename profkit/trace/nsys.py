"""Read the SQLite export of Nsight Systems, schema 3.1 to today's, into the columns of a `Trace`.

A table is missing if nothing was recorded for it, a column if the version did not know it; the error names what is
needed and missing. The meaning of the tables comes from the comments in the export's own CREATE TABLE statements and
from its ENUM_* tables.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import numpy as np

from profkit.errors import TraceError
from profkit.trace.columns import (
    Calls,
    Copies,
    Diagnostic,
    Ints,
    Severity,
    Syncs,
    Trace,
    Work,
    distinct_values,
    empty_ints,
    number_in_graph,
    report_left_out,
    rows_by_value,
    take_rows,
)
from profkit.trace.nsys_rows import (
    NO_TIME,
    PID_SHIFT,
    POSITIVE,
    LaunchIndex,
    Names,
    has_invisible_ranges,
    read_ranges,
    read_syncs,
)
from profkit.trace.sqlite import ColumnRequest, SqliteFile

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
SETS = "CUPTI_ACTIVITY_KIND_MEMSET"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
DEVICES = "TARGET_INFO_CUDA_DEVICE"
STARTED = "TARGET_INFO_SESSION_START_TIME"
_ROWS = {CALLS: "calls", KERNELS: "kernels", GRAPHS: "CUDA graphs", COPIES: "memory copies", SETS: "memory sets"}
_FAR_NS = 2**62

_OS_PID_MASK = (1 << 24) - 1

# ENUM_CUDA_MEMCPY_OPER
_FROM_HOST = 1

# ENUM_DIAGNOSTIC_SEVERITY_LEVEL; 4 is verbose. An unknown level is a warning.
_SEVERITIES: dict[object, Severity] = {0: "info", 1: "info", 2: "warning", 3: "error", 4: "info"}

_LARGEST_ID = 1 << 62

# Half of an export's tables only spell out numbers.
_ENUMS = "ENUM_"

_GRAPH_NAME = "CUDA graph {}"

Columns = dict[str, Ints]
_Wanted = dict[str, tuple[str, int]]

_TIMES: _Wanted = {"start": ("start", NO_TIME), "end": ("end", NO_TIME), "correlation": ("correlationId", 0)}
_ON_GPU = _TIMES | {"process": ("globalPid", 0), "device": ("deviceId", 0), "stream": ("streamId", -1)}
_MOVED = _ON_GPU | {"node": ("graphNodeId", -1), "bytes": ("bytes", 0), "kind": ("copyKind", 0)}
_WANTED = {
    CALLS: _TIMES | {"thread": ("globalTid", 0), "name": ("nameId", -1), "status": ("returnValue", 0)},
    KERNELS: _ON_GPU | {"name": ("demangledName", -1), "node": ("graphNodeId", -1)},
    COPIES: _MOVED,
    SETS: _MOVED,
    GRAPHS: _ON_GPU | {"graph": ("graphId", -1)},
}
"""Table → our name of a column → its name there and our value for NULL."""
_OPTIONAL = {"status", "stream", "graph", "node", "bytes", "kind"}


def read_nsys(path: Path) -> Trace:
    """Return the trace in an nsys SQLite export.

    Kernels, whole graphs, copies and sets get their launch by correlation id *and* process
    (``globalTid & ~0xFFFFFF == globalPid``): ids alone are not unique across the processes of one report. Rows that end
    before they start are left out and named in an error `Diagnostic`.

    Raises:
        TraceError: the file cannot be read, is no nsys export, or lacks a column that matching needs.
    """
    try:
        with SqliteFile(path) as file:
            tables = file.tables(without=_ENUMS)
            known = {"META_DATA_EXPORT", "ANALYSIS_DETAILS", STARTED, CALLS, KERNELS, "NVTX_EVENTS"}
            if "StringIds" not in tables or not tables.keys() & known:
                raise TraceError(f"{path}: a SQLite database, but no Nsight Systems export (it has no StringIds table)")
            return _Reader(file, tables).read()
    except MemoryError:  # a damaged page may ask for any amount
        raise TraceError(f"{path}: damaged, or too large for this machine's memory; export it again") from None


class _Reader:
    """One export being read; every method fills one part of the trace."""

    def __init__(self, file: SqliteFile, tables: dict[str, frozenset[str]]) -> None:
        self.file = file
        self.tables = tables
        rows = file.rows("SELECT name, value FROM META_DATA_EXPORT") if "META_DATA_EXPORT" in tables else []
        self.metadata = {str(name): str(value) for name, value in rows}
        self.schema = self.metadata.get("EXPORT_SCHEMA_VERSION", "unknown")
        self.names: list[str] = []
        self.notes: list[str] = []
        self.left_out: list[Diagnostic] = []

    def read(self) -> Trace:
        requests = {table: wanted for table, wanted in _WANTED.items() if table in self.tables}
        tables = {table: {name: empty_ints() for name in wanted} for table, wanted in _WANTED.items()}
        tables |= {table: self._without_reversed(table, rows) for table, rows in self._read_tables(requests).items()}
        self._number_gpus(tables)
        calls = _sorted_by_start(tables[CALLS])
        process = calls["thread"] >> PID_SHIFT
        launches = LaunchIndex(process, calls["correlation"], calls["start"], calls["thread"])
        work = self._build_work(tables, launches)
        copies = self._build_copies(tables, launches)
        if launches.shared_count:
            self.notes.append(
                f"{launches.shared_count:,} kernels or copies have several launches with their correlation id; each was"
                " matched with the last launch before it"
            )
        names = self._intern(work.name, calls["name"])
        ends = [int(column.max()) for column in (work.end_ns, calls["end"]) if len(column)]
        ranges = read_ranges(self.file, self.tables, names, max(ends, default=0))
        is_reversed = ranges.end_ns < ranges.start_ns
        if is_reversed.any():
            first = names.strings[int(ranges.name[np.argmax(is_reversed)])]
            self.left_out.append(report_left_out("ranges", int(is_reversed.sum()), first))
            ranges = take_rows(ranges, ~is_reversed)
        processes = {*rows_by_value(work.process), *rows_by_value(process), *rows_by_value(ranges.process)}
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
                process=process,
                correlation=calls["correlation"],
                has_work=launches.used,
                failed=calls["status"] != 0,
            ),
            ranges=ranges,
            thread_names=self._thread_names(),
            process_ids={number: number & _OS_PID_MASK for number in sorted(processes)},
            main_threads=frozenset(number << PID_SHIFT | (number & _OS_PID_MASK) for number in processes),
            gpus=self._gpus(),
            clock_base_ns=self._started_ns(),
            diagnostics=(*self._diagnostics(processes), *self.left_out),
            has_kernel_table=KERNELS in self.tables or GRAPHS in self.tables,
            notes=tuple(self.notes),
            syncs=self._read_syncs(launches, process),
            has_invisible_ranges=not len(ranges) and has_invisible_ranges(self.file, self.tables),
        )

    def _read_tables(self, requests: dict[str, _Wanted]) -> dict[str, Columns]:
        """Return the tables' columns under our names; one that only some versions have reads as its NULL."""
        there = {table: self._there(table, wanted) for table, wanted in requests.items()}
        arrays = self.file.columns([ColumnRequest(table, dict(columns.values())) for table, columns in there.items()])
        tables = {}
        for (table, wanted), columns in zip(requests.items(), arrays, strict=True):
            parts = {
                ours: np.full(len(columns[0]), null) for ours, (_, null) in wanted.items() if ours not in there[table]
            }
            parts |= dict(zip(there[table], columns, strict=True))
            if "process" in parts:
                parts["process"] = (parts["process"] & POSITIVE) >> PID_SHIFT
            if "thread" in parts:
                parts["thread"] &= POSITIVE
            tables[table] = parts
        return tables

    def _there(self, table: str, wanted: _Wanted) -> _Wanted:
        there = {ours: theirs for ours, theirs in wanted.items() if theirs[0] in self.tables[table]}
        missing = next(
            (theirs[0] for ours, theirs in wanted.items() if ours not in there and ours not in _OPTIONAL), None
        )
        if missing is not None:
            raise TraceError(
                f"{self.file.path}: table {table} has no column {missing}, which is needed to place its rows"
                f" (export schema {self.schema}); export the report again with a newer nsys"
            )
        return there

    def _without_reversed(self, table: str, columns: Columns) -> Columns:
        """Return the rows that do not end before they start; what such a call launched has no launch record."""
        is_reversed = (columns["end"] < columns["start"]) & (columns["end"] != NO_TIME)
        if not is_reversed.any():
            return columns
        what = _ROWS[table]
        names = Names(self.file).values([int(columns["name"][np.argmax(is_reversed)])]) if "name" in columns else {}
        self.left_out.append(report_left_out(what, int(is_reversed.sum()), next(iter(names.values()), what)))
        return {name: column[~is_reversed] for name, column in columns.items()}

    def _read_syncs(self, launches: LaunchIndex, process: Ints) -> Syncs | None:
        syncs = read_syncs(self.file, self.tables, launches)
        if syncs is not None:
            for device in (syncs.device, syncs.record_device):
                self._number_gpus({"waits": {"device": device, "process": process[syncs.call]}})
        return syncs

    def _number_gpus(self, tables: dict[str, Columns]) -> None:
        """A process counts the GPUs that it sees: each rank of a job may know its GPU as 0."""
        if not {"gpuId", "cudaId", "pid"} <= self.tables.get(DEVICES, frozenset()):
            return
        are_numbers = " AND ".join(f"typeof({column}) = 'integer'" for column in ("pid", "cudaId", "gpuId"))
        known = self.file.rows(
            f"SELECT DISTINCT pid, cudaId, gpuId FROM {DEVICES} WHERE {are_numbers} AND gpuId != cudaId"
        )
        for columns in tables.values() if known else ():
            if "device" in columns:
                device, pid = columns["device"].copy(), columns["process"] & _OS_PID_MASK
                for owner, number, gpu in known:
                    columns["device"][(pid == owner) & (device == number)] = gpu

    def _build_work(self, tables: dict[str, Columns], launches: LaunchIndex) -> Work:
        kernels, graphs = tables[KERNELS], tables[GRAPHS]
        graphs = graphs | {
            "name": -2 - np.clip(graphs["graph"], 0, _LARGEST_ID),
            "node": np.full_like(graphs["end"], -1),
        }
        placed = _place([kernels, graphs], launches)
        return Work(
            name=_join([kernels, graphs], "name"),
            duration_ns=placed["end_ns"] - placed["start_ns"],
            is_graph=np.arange(len(placed["start_ns"])) >= len(kernels["start"]),
            **placed,
        )

    def _build_copies(self, tables: dict[str, Columns], launches: LaunchIndex) -> Copies:
        parts = [tables[COPIES], tables[SETS]]
        placed = _place(parts, launches)
        return Copies(
            is_memset=np.arange(len(placed["start_ns"])) >= len(parts[0]["start"]),
            from_host=_join(parts, "kind") == _FROM_HOST,
            byte_count=_join(parts, "bytes"),
            **placed,
        )

    def _intern(self, *columns: Ints) -> Names:
        names = Names(self.file)
        for column in columns:
            graphs = {i: _GRAPH_NAME.format(-2 - i) for i in distinct_values(column[column < -1]).tolist()}
            column[:] = names.indices(column, graphs)
        return names

    def _product(self) -> str:
        name = self.metadata.get("EXPORT_PRODUCT_NAME", "Nsight Systems").removeprefix("NVIDIA ")
        version = self.metadata.get("EXPORT_PRODUCT_VERSION", "of unknown version")
        return f"{name} {version} (export schema {self.schema})"

    def _started_ns(self) -> int:
        """Return when the capture's clock began, in nanoseconds since 1970; 0 if it does not say so."""
        if "utcEpochNs" not in self.tables.get(STARTED, ()):
            return 0
        moments = [number for (number,) in self.file.rows(f"SELECT utcEpochNs FROM {STARTED}")]
        return moments[0] if len(moments) == 1 and isinstance(moments[0], int) and 0 <= moments[0] < _FAR_NS else 0

    def _thread_names(self) -> dict[int, str]:
        if not {"ThreadNames", "StringIds"} <= self.tables.keys():
            return {}
        are_numbers = "typeof(globalTid) = 'integer' AND typeof(nameId) = 'integer'"
        rows = self.file.rows(f"SELECT globalTid, nameId FROM ThreadNames WHERE {are_numbers}")
        names = Names(self.file).values(list({name for _, name in rows}))
        return {thread & POSITIVE: names[name] for thread, name in rows if name in names}

    def _gpus(self) -> tuple[str, ...]:
        if "TARGET_INFO_GPU" not in self.tables or "name" not in self.tables["TARGET_INFO_GPU"]:
            return ()
        return tuple(str(name) for (name,) in self.file.rows("SELECT name FROM TARGET_INFO_GPU"))

    def _diagnostics(self, recorded: Container[int]) -> tuple[Diagnostic, ...]:
        columns = self.tables.get("DIAGNOSTIC_EVENT", frozenset())
        if not {"severity", "text"} <= columns:
            return ()
        process = "globalPid" if "globalPid" in columns else "NULL"
        diagnostics = []
        for severity, text, number in self.file.rows(f"SELECT severity, text, {process} FROM DIAGNOSTIC_EVENT"):
            # The profiler's own messages have no process, or a negative number.
            concerned = number >> PID_SHIFT if isinstance(number, int) and number > 0 else None
            is_silent = concerned is not None and concerned not in recorded
            pid = concerned & _OS_PID_MASK if concerned is not None and is_silent else None
            diagnostics.append(Diagnostic(_SEVERITIES.get(severity, "warning"), str(text), pid))
        return tuple(diagnostics)


def _sorted_by_start(calls: Columns) -> Columns:
    if (calls["start"][1:] >= calls["start"][:-1]).all():
        return calls
    order = np.argsort(calls["start"], kind="stable")
    return {name: column[order] for name, column in calls.items()}


def _place(parts: list[Columns], launches: LaunchIndex) -> Columns:
    names = {"start_ns": "start", "end_ns": "end", "device": "device", "stream": "stream", "process": "process"}
    placed = {ours: _join(parts, name) for ours, name in names.items()}
    launch_ns, launch_thread = launches.find(placed["process"], _join(parts, "correlation"), placed["start_ns"])
    node = number_in_graph(_join(parts, "node"))
    return {**placed, "launch_ns": launch_ns, "launch_thread": launch_thread, "graph_node": node}


def _join(parts: list[Columns], name: str) -> Ints:
    filled = [part[name] for part in parts if len(part[name])]
    return filled[0] if len(filled) == 1 else np.concatenate(filled or [empty_ints()])
