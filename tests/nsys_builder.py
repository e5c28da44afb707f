"""Write tiny nsys exports for the cases that real captures do not have, or not all in one."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

VM = 1 << 48

_ON_GPU = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL,"
    " correlationId INTEGER, globalPid INTEGER"
)
_TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    "ThreadNames": "nameId INTEGER, priority INTEGER, globalTid INTEGER",
    "TARGET_INFO_GPU": "id INTEGER, name TEXT",
    "TARGET_INFO_CUDA_DEVICE": "gpuId INTEGER, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL",
    "DIAGNOSTIC_EVENT": "timestamp INTEGER, severity INTEGER, text TEXT, globalPid INTEGER",
    "NVTX_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER,"
        " endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER,"
        " doubleValue REAL"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER,"
        " nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL"
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        f"{_ON_GPU}, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, graphNodeId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
        "globalPid INTEGER, correlationId INTEGER, deviceId INTEGER, streamId INTEGER, eventId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_ON_GPU}, graphId INTEGER, graphExecId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_ON_GPU}, bytes INTEGER, copyKind INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_ON_GPU}, bytes INTEGER, graphNodeId INTEGER",
}


def process_of(pid: int) -> int:
    """Return the serialized globalPid of a process."""
    return VM | pid << 24


def thread_of(pid: int, tid: int) -> int:
    """Return the serialized globalTid of a thread."""
    return process_of(pid) | tid


class NsysBuilder:
    """Collects rows and writes them as an export; a table without rows is absent, as in the real ones.

    It begins with these ranges: name, start and end of each.
    """

    def __init__(self, *ranges: tuple[str, int, int | None]) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in _TABLES}
        self.strings: dict[str, int] = {}
        self.correlation = 0
        self.rows["META_DATA_EXPORT"] = [
            {"name": "EXPORT_PRODUCT_NAME", "value": "NVIDIA Nsight Systems"},
            {"name": "EXPORT_PRODUCT_VERSION", "value": "2023.4.4.54"},
            {"name": "EXPORT_SCHEMA_VERSION", "value": "3.7.2"},
        ]
        self.ranges(*ranges)

    def string(self, value: str) -> int:
        return self.strings.setdefault(value, len(self.strings) + 1)

    def name_thread(self, name: str, tid: int, pid: int = 100) -> None:
        self.rows["ThreadNames"].append({"nameId": self.string(name), "priority": 1, "globalTid": thread_of(pid, tid)})

    def ranges(self, *rows: tuple[str, int, int | None], **where: Any) -> None:
        """Add ranges, all of them on one thread: name, start and end of each."""
        for name, start, end in rows:
            self.range(name, start, end, **where)

    def range(
        self,
        name: str,
        start: int,
        end: int | None,
        *,
        tid: int = 100,
        pid: int = 100,
        end_tid: int | None = None,
        registered: bool = False,
        domain: int = 0,
        **payload: float,
    ) -> None:
        start_end = end_tid is not None
        self.rows["NVTX_EVENTS"].append(
            {
                "start": start,
                "end": end,
                "eventType": 60 if start_end else 59,
                "text": None if registered else name,
                "textId": self.string(name) if registered else None,
                "globalTid": thread_of(pid, tid),
                "endGlobalTid": thread_of(pid, end_tid) if end_tid is not None else None,
                "domainId": domain,
                **payload,
            }
        )

    def domain(self, number: int, name: str, pid: int = 100) -> None:
        self.rows["NVTX_EVENTS"].append(
            {"start": 0, "eventType": 75, "text": name, "globalTid": thread_of(pid, pid), "domainId": number}
        )

    def call(
        self,
        start: int,
        *,
        tid: int = 100,
        pid: int = 100,
        name: str = "cudaLaunchKernel_v7000",
        correlation: int | None = None,
        duration: int = 1,
        status: int = 0,
    ) -> int:
        if correlation is None:
            self.correlation += 1
            correlation = self.correlation
        self.rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append(
            {
                "start": start,
                "end": start + duration,
                "globalTid": thread_of(pid, tid),
                "correlationId": correlation,
                "nameId": self.string(name),
                "returnValue": status,
            }
        )
        return correlation

    def kernel(
        self,
        launch: int | None,
        duration: int,
        *,
        name: str = "k",
        tid: int = 100,
        pid: int = 100,
        device: int = 0,
        start: int | None = None,
        correlation: int | None = None,
    ) -> int:
        """Add a kernel and, unless ``launch`` is None or a correlation id is given, the call that launched it."""
        if correlation is None:
            self.correlation += 1
            correlation = self.correlation
            if launch is not None:
                self.call(launch, tid=tid, pid=pid, correlation=correlation)
        begin = start if start is not None else (launch or 0) + 10
        self.rows["CUPTI_ACTIVITY_KIND_KERNEL"].append(
            {
                "start": begin,
                "end": begin + duration,
                "deviceId": device,
                "streamId": 7,
                "correlationId": correlation,
                "globalPid": process_of(pid),
                "demangledName": self.string(name),
                "shortName": self.string(name),
            }
        )
        return correlation

    def copy(
        self,
        launch: int,
        duration: int,
        *,
        kind: int = 1,
        tid: int = 100,
        pid: int = 100,
        device: int = 0,
        start: int,
        call_ns: int = 1,
    ) -> None:
        """Add a memory copy (kind 1: from the host, 2: to it) and the call that launched it, which took ``call_ns``."""
        self.add(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start=start,
            end=start + duration,
            deviceId=device,
            streamId=7,
            correlationId=self.call(launch, tid=tid, pid=pid, name="cudaMemcpyAsync_v3020", duration=call_ns),
            globalPid=process_of(pid),
            bytes=1,
            copyKind=kind,
        )

    def graph(self, launch: int | None, start: int, end: int, *, number: int = 1) -> None:
        """Add a CUDA graph that was traced whole, and unless ``launch`` is None the call that launched it."""
        correlation = 0 if launch is None else self.call(launch, name="cudaGraphLaunch_v10000")
        self.add(
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
            **{"start": start, "end": end, "deviceId": 0, "streamId": 7, "correlationId": correlation},
            **{"globalPid": process_of(100), "graphId": number, "graphExecId": number},
        )

    def add(self, table: str, **values: Any) -> None:
        self.rows[table].append(values)

    def write(self, path: Path, *, drop_columns: dict[str, set[str]] | None = None) -> Path:
        connection = sqlite3.connect(path)
        # Each table would wait for the disk, and nobody restores a capture of a test after a power cut.
        connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")
        self.rows["StringIds"] = [{"id": number, "value": value} for value, number in self.strings.items()]
        for table, declaration in _TABLES.items():
            if not self.rows[table] and table != "StringIds":
                continue
            dropped = (drop_columns or {}).get(table, set())
            parts = [part.strip() for part in declaration.split(", ")]
            kept = [part for part in parts if part.split()[0] not in dropped]
            connection.execute(f"CREATE TABLE {table} ({', '.join(kept)})")
            columns = [part.split()[0] for part in kept]
            marks = ", ".join("?" * len(columns))
            values = [tuple(row.get(column) for column in columns) for row in self.rows[table]]
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        connection.commit()
        connection.close()
        return path
