"""A SQLite file that is only ever read: opening it with all the doubts it deserves, and reading columns fast.

Nothing here knows what the tables mean.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from profkit.errors import TraceError
from profkit.trace.columns import Ints, empty_ints

if TYPE_CHECKING:
    from sqlite_utils import Database

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100

# One aggregate string of this many rows stays far below SQLite's limit of 10⁹ bytes, and small in memory.
_CHUNK_ROWS = 1 << 15


@dataclass(frozen=True)
class ColumnRequest:
    """Integer columns to read from one table: SQL expressions that are never NULL, and a condition on its rows."""

    table: str
    expressions: tuple[str, ...]
    where: str = "1"


class SqliteFile:
    """A read-only SQLite database; use as a context manager.

    The file and its folder are left as they were: no lock is waited for, no journal, index or cache is written.

    Raises:
        TraceError: the file is missing, empty, no SQLite database, cut short, malformed, or not at rest (a non-empty
            ``-wal`` or ``-journal`` lies beside it, or another process is writing).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_unfit(path)
        self._uri = f"file:{quote(str(path.resolve()))}?mode=ro"
        if _is_wal(path):
            # At rest, a database in WAL mode is whole; opened the ordinary way SQLite would create files beside it.
            self._uri += "&immutable=1"
        self._connection = self.connect()
        try:
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            self._connection.close()
            raise self.error(error) from None

    def __enter__(self) -> SqliteFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def connect(self) -> sqlite3.Connection:
        """Return a new read-only connection, for use by one thread."""
        try:
            return sqlite3.connect(self._uri, uri=True, timeout=0, check_same_thread=False)
        except sqlite3.Error as error:
            raise self.error(error) from None

    def error(self, error: sqlite3.Error) -> TraceError:
        """Return SQLite's complaint as a line for a person."""
        text = str(error)
        if "locked" in text or "busy" in text:
            return TraceError(f"{self.path}: another process is writing it; wait until the export is done")
        if "malformed" in text or "not a database" in text or "corrupt" in text:
            return TraceError(f"{self.path}: a damaged SQLite file ({text}); export it again from the .nsys-rep")
        return TraceError(f"{self.path}: SQLite says: {text}")

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise self.error(error) from None

    def tables(self) -> dict[str, frozenset[str]]:
        """Return the columns of every table."""
        try:
            database = _open_database(self._connection)
            return {name: frozenset(database[name].columns_dict) for name in database.table_names()}
        except sqlite3.Error as error:
            raise self.error(error) from None

    def columns(self, requests: Sequence[ColumnRequest]) -> list[list[Ints]]:
        """Return the requested integer columns, one list of arrays per request, rows in the order of their rowids.

        SQLite concatenates each column into one string, which NumPy parses: many times faster than rows of Python
        integers. Requests run on threads of their own (SQLite lets go of the interpreter lock while it scans).
        """
        with ThreadPoolExecutor(max_workers=2) as pool:
            return list(pool.map(self._read_columns, requests))

    def _read_columns(self, request: ColumnRequest) -> list[Ints]:
        connection = self.connect()
        try:
            return self._read_chunks(connection, request)
        except sqlite3.Error as error:
            raise self.error(error) from None
        finally:
            connection.close()

    def _read_chunks(self, connection: sqlite3.Connection, request: ColumnRequest) -> list[Ints]:
        size = connection.execute(f'SELECT count(*) FROM "{request.table}"').fetchone()[0]
        joined = ", ".join(f"CAST(group_concat({expression}) AS BLOB)" for expression in request.expressions)
        sql = f'SELECT count(*), {joined} FROM "{request.table}" WHERE rowid BETWEEN ? AND ? AND {request.where}'
        columns = [np.empty(size, dtype=np.int64) for _ in request.expressions]
        done = 0
        for low, high in _chunks(connection, request.table, size):
            count, *texts = connection.execute(sql, (low, high)).fetchone()
            if count:
                for column, text, expression in zip(columns, texts, request.expressions, strict=True):
                    column[done : done + count] = self._parse(text, count, f"{request.table}.{expression}")
            done += count
        return [column[:done] for column in columns]

    def _parse(self, text: bytes | None, count: int, what: str) -> Ints:
        try:
            numbers = np.fromstring(text or b"", dtype=np.int64, sep=",")
        except ValueError:
            numbers = empty_ints()
        if len(numbers) != count:
            raise TraceError(f"{self.path}: damaged: {what} holds values that are no integers")
        return numbers


def _chunks(connection: sqlite3.Connection, table: str, size: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last rowid of each chunk of a table with ``size`` rows."""
    first, last = connection.execute(f'SELECT min(rowid), max(rowid) FROM "{table}"').fetchone()
    if not size:
        return
    if last - first + 1 == size:
        yield from ((low, low + _CHUNK_ROWS - 1) for low in range(first, last + 1, _CHUNK_ROWS))
        return
    # Rows were deleted, or numbered by hand: count them off, for the numbers may be as far apart as they like.
    sql = f'SELECT max(rowid) FROM (SELECT rowid FROM "{table}" WHERE rowid >= ? ORDER BY rowid LIMIT {_CHUNK_ROWS})'
    low = first
    while low <= last:
        high = connection.execute(sql, (low,)).fetchone()[0]
        yield low, high
        low = high + 1


def _refuse_unfit(path: Path) -> None:
    """Raise unless the file looks like a whole SQLite database at rest."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
            size = file.seek(0, 2)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    if size == 0:
        raise TraceError(f"{path}: the file is empty")
    if not header.startswith(_MAGIC):
        raise TraceError(f"{path}: not a SQLite database; give the export of `nsys export --type sqlite`")
    if len(header) < _HEADER_BYTES or size < _declared_bytes(header):
        raise TraceError(f"{path}: cut short ({size:,} bytes); export it again from the .nsys-rep")
    for suffix in ("-wal", "-journal"):
        side = path.with_name(path.name + suffix)
        if side.exists() and side.stat().st_size:
            raise TraceError(f"{path}: {side.name} lies beside it, so the export is unfinished; export it again")


def _declared_bytes(header: bytes) -> int:
    """Return the size that the database header declares, or 0 where it says that it does not know.

    https://www.sqlite.org/fileformat.html: page size at 16, size in pages at 28, valid when the change counter at 24
    equals the version-valid-for number at 92.
    """
    page_bytes = int.from_bytes(header[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    if header[24:28] != header[92:96]:
        return 0
    return page_bytes * int.from_bytes(header[28:32], "big")


def _is_wal(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def _open_database(connection: sqlite3.Connection) -> Database:
    """Return sqlite-utils' view of a connection.

    Its module imports pandas wherever that is installed, 0.6 s that no table here needs; so pandas is hidden for the
    length of that one import, unless somebody has loaded it already.
    """
    hidden = "pandas" not in sys.modules
    if hidden:
        sys.modules["pandas"] = None  # type: ignore[assignment]
    try:
        from sqlite_utils import Database
    finally:
        if hidden:
            del sys.modules["pandas"]
    return Database(connection)
