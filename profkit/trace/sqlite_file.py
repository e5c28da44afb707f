"""A SQLite file that is only ever read: opening it with all the doubts it deserves, and reading columns fast.

Nothing here knows what the tables mean.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from profkit.errors import TraceError
from profkit.trace.columns import Ints, empty_ints
from profkit.trace.sqlite_pages import NotPlain, PageReader

if TYPE_CHECKING:
    from sqlite_utils import Database

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100

# One aggregate string of this many rows stays far below SQLite's limit of 10⁹ bytes, and small in memory.
_CHUNK_ROWS = 1 << 15


@dataclass(frozen=True)
class ColumnRequest:
    """Integer columns to read from one table: column → the number that stands for NULL; and a condition on its rows."""

    table: str
    columns: dict[str, int]
    where: str | None = None


class SqliteFile:
    """A read-only SQLite database; use as a context manager.

    The file and its folder are left as they were: no lock is waited for, no journal, index or cache is written.

    Raises:
        TraceError: the file is missing, empty, no SQLite database, cut short, malformed, or not at rest (a non-empty
            ``-wal`` or ``-journal`` lies beside it, or another process is writing).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = _refuse_unfit(path)
        uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro"
        if header[18:20] == b"\x02\x02":
            # At rest, a database in WAL mode is whole; opened the ordinary way SQLite would create files beside it.
            uri += "&immutable=1"
        self._layout: dict[str, tuple[str, ...]] = {}
        self._views: frozenset[str] = frozenset()
        self._file = path.open("rb")
        self._pages = PageReader(self._file.fileno(), header)
        try:
            self._connection = sqlite3.connect(uri, uri=True, timeout=0)
            self._connection.text_factory = _decode
            # A read transaction, so that nobody can begin to write meanwhile.
            self._connection.execute("BEGIN")
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            self._file.close()
            raise self.error(error) from None

    def __enter__(self) -> SqliteFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._file.close()

    def error(self, error: sqlite3.Error) -> TraceError:
        """Return SQLite's complaint as a line for a person."""
        text = str(error)
        if "locked" in text or "busy" in text:
            return TraceError(f"{self.path}: another process is writing it; wait until the export is done")
        if "malformed" in text or "not a database" in text or "corrupt" in text:
            return TraceError(f"{self.path}: a damaged SQLite file ({text}); export it again from the .nsys-rep")
        if "no such column: rowid" in text:
            return TraceError(
                f"{self.path}: holds a table without row numbers, which nsys does not write; export it again"
            )
        return TraceError(f"{self.path}: SQLite says: {text}")

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise self.error(error) from None

    def tables(self, without: str | None = None) -> dict[str, frozenset[str]]:
        """Return the columns of every table and view, but not of those whose names begin with ``without``."""
        try:
            database = _open_database(self._connection)
            self._views = frozenset(database.view_names())
            names = [*database.table_names(), *self._views]
            self._layout = {
                name: tuple(database[name].columns_dict)
                for name in names
                if without is None or not name.startswith(without)
            }
        except sqlite3.Error as error:
            raise self.error(error) from None
        return {name: frozenset(columns) for name, columns in self._layout.items()}

    def columns(self, requests: Sequence[ColumnRequest]) -> list[list[Ints]]:
        """Return the requested integer columns, one list of arrays per request, rows in the order of their rowids.

        Tables of plain integers are decoded from the file's pages (`profkit.trace.sqlite_pages`). For any other SQLite
        concatenates each column into one string, which NumPy parses: still many times faster than Python integers.
        """
        for request in requests:
            if request.table in self._views:
                raise TraceError(f"{self.path}: {request.table} is a view, and nsys writes tables; export it again")
        return [self._read_plain(request) or self._read_by_sql(request) for request in requests]

    def _read_plain(self, request: ColumnRequest) -> list[Ints] | None:
        """Return the columns from the pages of a table of plain integers, None of any other table."""
        layout = self._layout.get(request.table, ())
        if request.where is not None or not request.columns.keys() <= set(layout):
            return None
        root = self.rows("SELECT rootpage, sql FROM sqlite_master WHERE type = 'table' AND name = ?", (request.table,))
        # A row number kept as a column, or rows kept in an index, are laid out otherwise.
        if not root or re.search(r"PRIMARY\s+KEY|WITHOUT\s+ROWID|GENERATED|\bAS\s*\(", root[0][1], re.IGNORECASE):
            return None
        size = self.rows(f'SELECT count(*) FROM "{request.table}"')[0][0]
        places = {name: layout.index(name) for name in request.columns}
        order = sorted(places, key=places.__getitem__)
        try:
            found = self._pages.read(
                root[0][0], [places[name] for name in order], [request.columns[name] for name in order], size
            )
        except NotPlain:
            return None
        return [found[order.index(name)] for name in request.columns]

    def _read_by_sql(self, request: ColumnRequest) -> list[Ints]:
        size = self.rows(f'SELECT count(*) FROM "{request.table}"')[0][0]
        expressions = [f'coalesce("{name}", {null})' for name, null in request.columns.items()]
        joined = ", ".join(f"CAST(group_concat({expression}) AS BLOB)" for expression in expressions)
        where = f" AND {request.where}" if request.where else ""
        sql = f'SELECT count(*), {joined} FROM "{request.table}" WHERE rowid BETWEEN ? AND ?{where}'
        columns = [np.empty(size, dtype=np.int64) for _ in expressions]
        done = 0
        for low, high in self._chunks(request.table, size):
            count, *texts = self.rows(sql, (low, high))[0]
            if count:
                for column, text, name in zip(columns, texts, request.columns, strict=True):
                    column[done : done + count] = self._parse(text, count, f"{request.table}.{name}")
            done += count
        return [column[:done] for column in columns]

    def _chunks(self, table: str, size: int) -> Iterator[tuple[int, int]]:
        """Yield the first and last rowid of each chunk of a table with ``size`` rows."""
        if not size:
            return
        first, last = self.rows(f'SELECT min(rowid), max(rowid) FROM "{table}"')[0]
        # Rows may have been deleted or numbered by hand: the numbers may be as far apart as they like.
        sql = (
            f'SELECT max(rowid) FROM (SELECT rowid FROM "{table}" WHERE rowid >= ? ORDER BY rowid LIMIT {_CHUNK_ROWS})'
        )
        low = first
        while low <= last:
            high = self.rows(sql, (low,))[0][0]
            yield low, high
            low = high + 1

    def _parse(self, text: bytes | None, count: int, what: str) -> Ints:
        try:
            numbers = np.fromstring(text or b"", dtype=np.int64, sep=",")
        except ValueError:
            numbers = empty_ints()
        if len(numbers) != count:
            raise TraceError(f"{self.path}: damaged: {what} holds values that are no integers")
        return numbers


def _refuse_unfit(path: Path) -> bytes:
    """Return the file's header; raise unless the file looks like a whole SQLite database at rest."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceError(f"{path}: not a regular file; write the export to a file and give that")
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
        # SQLite looks beside the file itself, not beside a link to it.
        side = path.resolve().with_name(path.resolve().name + suffix)
        if side.exists() and side.stat().st_size:
            raise TraceError(f"{path}: {side.name} lies beside it, so the export is unfinished; export it again")
    return header


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


def _decode(text: bytes) -> str:
    """Return a string of the database; one name in a foreign encoding must not cost the whole capture."""
    return text.decode("utf-8", "replace")


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
    # Plugins could write; and to look for them takes longer than all else here.
    return Database(connection, execute_plugins=False)
