"""Make a large nsys export out of a small real one: the same steps again and again, later and with ids of their own.

Kernels, copies, sets, synchronizations, API calls and ranges repeat whole; the last repetition is cut off where the
wanted number of kernels is reached. Where the wanted number of API calls is larger than what the repetitions bring,
calls without work follow the launches, on the same threads. The source is opened read-only.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

KERNELS, CALLS, RANGES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
TABLES = (
    KERNELS,
    CALLS,
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
    RANGES,
)
GAP_NS = 1_000_000
# Push/pop and start/end ranges; the other events (domains, categories, threads) are said once.
RANGE_EVENTS = "eventType IN (59, 60)"


def tile_trace(source: Path, target: Path, kernel_count: int, call_count: int = 0) -> None:
    """Write ``source`` repeated to ``target`` until it holds ``kernel_count`` kernels and at least as many calls."""
    target.unlink(missing_ok=True)
    with (
        closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as original,
        closing(sqlite3.connect(target)) as copy,
    ):
        original.backup(copy)
    with closing(sqlite3.connect(target, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        tables = [table for table in TABLES if _columns(database, table)]
        first, last = _extent(database, tables)
        kernels_each = _count(database, KERNELS)
        whole, cut = divmod(kernel_count, kernels_each)
        for table in tables:
            database.execute(f"CREATE TEMP TABLE base_{table} AS SELECT * FROM {table} WHERE {_repeated(table)}")
            database.execute(f"DELETE FROM {table} WHERE {_repeated(table)}")
        ids = _largest_id(database, tables) + 1
        for table in tables:
            _repeat(database, table, range(whole), last - first + GAP_NS, ids, "1")
        if cut:
            _repeat_cut(database, tables, whole, cut, last - first + GAP_NS, ids)
        missing = call_count - _count(database, CALLS)
        if missing > 0:
            _add_idle_calls(database, missing, ids * (whole + 1))
        database.execute("COMMIT")


def _columns(database: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


def _count(database: sqlite3.Connection, table: str) -> int:
    return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def _repeated(table: str) -> str:
    return RANGE_EVENTS if table == RANGES else "1"


def _extent(database: sqlite3.Connection, tables: list[str]) -> tuple[int, int]:
    rows = [
        database.execute(
            f"SELECT min(start), max(coalesce(end, start)) FROM {table} WHERE {_repeated(table)}"
        ).fetchone()
        for table in tables
    ]
    return min(row[0] for row in rows if row[0] is not None), max(row[1] for row in rows if row[1] is not None)


def _largest_id(database: sqlite3.Connection, tables: list[str]) -> int:
    return max(
        int(database.execute(f"SELECT coalesce(max({column}), 0) FROM base_{table}").fetchone()[0])
        for table in tables
        for column in ("correlationId", "rangeId")
        if column in _columns(database, table)
    )


def _repeat(database: sqlite3.Connection, table: str, tiles: range, period_ns: int, ids: int, where: str) -> None:
    shifted = {
        "start": f"start + tile * {period_ns}",
        "end": f"end + tile * {period_ns}",
        "correlationId": f"correlationId + tile * {ids}",
        "rangeId": f"rangeId + tile * {ids}",
    }
    columns = _columns(database, table)
    database.execute(
        f"WITH RECURSIVE tiles(tile) AS (SELECT {tiles.start} UNION ALL SELECT tile + 1 FROM tiles"
        f" WHERE tile < {tiles.stop - 1})"
        f" INSERT INTO {table} ({', '.join(columns)})"
        f" SELECT {', '.join(shifted.get(column, column) for column in columns)}"
        f" FROM tiles CROSS JOIN base_{table} WHERE {where}"
    )


def _repeat_cut(
    database: sqlite3.Connection, tables: list[str], tile: int, kernel_count: int, period_ns: int, ids: int
) -> None:
    """Add the first ``kernel_count`` kernels of one more repetition, and what else began before their last launch."""
    database.execute(
        f"CREATE TEMP TABLE kept AS SELECT correlationId FROM base_{KERNELS} ORDER BY start LIMIT {kernel_count}"
    )
    (until,) = database.execute(
        f"SELECT max(start) FROM base_{CALLS} WHERE correlationId IN (SELECT correlationId FROM kept)"
    ).fetchone()
    launches = f"correlationId IN (SELECT correlationId FROM base_{KERNELS})"
    kept = "correlationId IN (SELECT correlationId FROM kept)"
    conditions = {KERNELS: kept, CALLS: f"(start <= {until} AND NOT {launches}) OR {kept}"}
    for table in tables:
        _repeat(database, table, range(tile, tile + 1), period_ns, ids, conditions.get(table, f"start <= {until}"))


def _add_idle_calls(database: sqlite3.Connection, count: int, first_id: int) -> None:
    """Add calls that launch nothing, each a nanosecond after a launch, on its thread."""
    columns = _columns(database, CALLS)
    new = {"start": "end + 1", "end": "end + 2", "correlationId": f"{first_id} + row_number() OVER (ORDER BY rowid)"}
    (name,) = database.execute(
        f"SELECT nameId FROM base_{CALLS} WHERE correlationId NOT IN (SELECT correlationId FROM base_{KERNELS}) LIMIT 1"
    ).fetchone()
    new["nameId"] = str(name)
    launches = _count(database, CALLS)
    while count > 0:
        added = min(count, launches)
        database.execute(
            f"INSERT INTO {CALLS} ({', '.join(columns)})"
            f" SELECT {', '.join(new.get(column, column) for column in columns)} FROM {CALLS} LIMIT {added}"
        )
        count -= added
