"""A SQLite file that is only ever read: opened with suspicion, and its integer columns read fast.

Nothing here knows what the tables mean. SQLite hands out rows one value at a time, which for a million rows costs more
than everything that follows. A table of integers is simple on disk (https://www.sqlite.org/fileformat2.html, sections
1.5, 1.6 and 2.1): a b-tree whose leaves hold cells, each a payload length, a row number, and a record, which is a
header with one serial type per column, then the columns' bytes, big-endian. `PageReader` does each step as one NumPy
operation on a whole batch of pages, and leaves every table in which it meets anything else to SQLite.

Measured: a trace of 357,179 kernels and 785,066 CUDA calls is read in 0.2 s, through SQLite's own SQL in 1.4 s; that is
0.5 s for ``profkit kernels`` or 1.7 s.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from profkit.errors import TraceError
from profkit.trace.columns import Ints, empty_ints

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100

# SQLite counts in steps of its virtual machine; whole exports take 5 for each of their bytes, at 50 million a second.
_STEPS_PER_BYTE = 40
_LEAST_STEPS = 200_000_000
_STEPS_AT_A_TIME = 1_000_000
# The longest values of an export are the environments of processes, which the kernel limits to 6 MiB.
_LONGEST_VALUE_BYTES = 2**26

# As Python's objects rows take ten times the memory of their columns.
_ROWS_AT_ONCE = 1 << 13

# What SQLite says → what that means here.
_COMPLAINTS = (
    (("locked", "busy"), "another process is writing it; wait until the export is done"),
    (("malformed", "not a database", "corrupt"), "a damaged SQLite file ({}); export it again from the .nsys-rep"),
    (("no such column: rowid",), "holds a table without row numbers, and nsys writes none; export it again"),
    (("interrupted",), "takes more steps to read than a file of its size can need; export it again"),
    (("too big",), f"holds a value of over {_LONGEST_VALUE_BYTES >> 20} MiB, and nsys writes none; export it again"),
)

Bytes = npt.NDArray[np.uint8]

_LEAF, _INTERIOR = 0x0D, 0x05
# Small enough that a batch and the columns of its rows stay in a core's own cache: 1.7 times faster than 4 MiB.
_BATCH_BYTES = 1 << 19
_SLACK = 16  # so that an 8-byte read at the last byte stays in the buffer

_REFUSED = 255
# Bytes of an integer column by its serial type; 0, 8 and 9 (NULL, 0 and 1) take none.
_SIZES = np.full(256, _REFUSED, dtype=np.int64)
_SIZES[[0, 1, 2, 3, 4, 5, 6, 8, 9]] = [0, 1, 2, 3, 4, 6, 8, 0, 0]
# Of a column that is passed over: 7 is a float, from 12 on text and bytes. The type of a longer text takes two bytes.
_SIZES_PASSED = _SIZES.copy()
_SIZES_PASSED[7] = 8
_SIZES_PASSED[12:128] = np.arange(12, 128) - 12 >> 1


@dataclass(frozen=True)
class ColumnRequest:
    """Integer columns to read from one table (column → our number for NULL).

    ``only`` is one of these columns and which of its values a row must have.
    """

    table: str
    columns: dict[str, int]
    only: tuple[str, tuple[int, ...]] | None = None

    @property
    def where(self) -> str:
        return "" if self.only is None else f" WHERE {self.only[0]} IN ({','.join(map(str, self.only[1]))})"


class SqliteFile:
    """A read-only SQLite database; use as a context manager.

    The file and its folder are left as they were: no lock is waited for, no journal, index or cache is written.

    Raises:
        TraceError: the file is missing, empty, no SQLite database, cut short, malformed, or not at rest (a non-empty
            ``-wal`` or ``-journal`` lies next to it, or another process is writing); it holds anything but plain
            tables and indices, such as views, triggers or computed columns; or reading it takes more steps than a file
            of its size can need.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = _refuse_unfit(path)
        uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro"
        if header[18:20] == b"\x02\x02":
            # At rest, a database in WAL mode is whole; opened in the ordinary way SQLite would create files next to it.
            uri += "&immutable=1"
        self._layout: dict[str, tuple[str, ...]] = {}
        self._steps_left = _LEAST_STEPS + _STEPS_PER_BYTE * path.stat().st_size
        self._file = path.open("rb")
        self._pages = PageReader(self._file.fileno(), header)
        try:
            self._connection = sqlite3.connect(uri, uri=True, timeout=0)
            self._connection.text_factory = _decode
            self._connection.set_progress_handler(self._is_over_budget, _STEPS_AT_A_TIME)
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE_BYTES)
            self._connection.execute("PRAGMA trusted_schema = OFF")
            # A read transaction, so that nobody can begin to write meanwhile.
            self._connection.execute("BEGIN")
            self._refuse_programs()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self.__exit__()
            raise self.error(error) from None
        except TraceError:
            self.__exit__()
            raise

    def __enter__(self) -> SqliteFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._file.close()

    def _is_over_budget(self) -> bool:
        self._steps_left -= _STEPS_AT_A_TIME
        return self._steps_left < 0

    def _refuse_programs(self) -> None:
        """Refuse what computes when it is read: views, triggers, virtual tables."""
        rows = self.rows("SELECT type, name, rootpage FROM sqlite_master")
        for kind, name, root_page in rows:
            if not isinstance(name, str):
                raise TraceError(f"{self.path}: a damaged SQLite file (a table's name is no text); export it again")
            if kind == "trigger":
                raise TraceError(f"{self.path}: holds triggers, and nsys writes none; export it again")
            if kind not in ("table", "index") or (kind == "table" and not root_page):
                what = "virtual" if kind == "table" else f"a {kind}"
                raise TraceError(f"{self.path}: {str(name)[:80]} is {what}, and nsys writes tables; export it again")

    def error(self, error: sqlite3.Error | UnicodeDecodeError) -> TraceError:
        text = "malformed: names that are no UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        for words, meaning in _COMPLAINTS:
            if any(word in text for word in words):
                return TraceError(f"{self.path}: {meaning.format(text)}")
        return TraceError(f"{self.path}: SQLite says: {text}")

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self.error(error) from None

    def each_row(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query one by one, as there may be millions."""
        try:
            yield from self._connection.execute(sql)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self.error(error) from None

    def tables(self, without: str | None = None) -> dict[str, frozenset[str]]:
        """Return the columns of every table, except those whose names begin with ``without``."""
        columns_of: dict[str, list[str]] = {}
        sql = (
            "SELECT m.name, c.name, c.hidden FROM sqlite_master m JOIN pragma_table_xinfo(m.name) c"
            " WHERE m.type = 'table' AND m.name NOT LIKE 'sqlite~_%' ESCAPE '~' ORDER BY c.cid"
        )
        for table, column, is_computed in self.rows(sql):
            if is_computed:
                raise TraceError(
                    f"{self.path}: {table[:80]} has a computed column, and nsys writes none; export it again"
                )
            if without is None or not table.startswith(without):
                columns_of.setdefault(table, []).append(column)
        self._layout = {table: tuple(columns) for table, columns in columns_of.items()}
        return {table: frozenset(columns) for table, columns in columns_of.items()}

    def columns(self, requests: Sequence[ColumnRequest]) -> list[list[Ints]]:
        """Return the requested integer columns, one list of arrays per request, rows in the order of their rowids.

        Integers among short texts are decoded from the file's pages, any other columns by SQLite.
        """
        return [self._read_plain(request) or self._read_by_sql(request) for request in requests]

    def _read_plain(self, request: ColumnRequest) -> list[Ints] | None:
        layout = self._layout.get(request.table, ())
        if not request.columns.keys() <= set(layout):
            return None
        root = self.rows("SELECT rootpage, sql FROM sqlite_master WHERE type = 'table' AND name = ?", (request.table,))
        # A row number kept as a column, or rows kept in an index, are laid out otherwise.
        if not root or re.search(r"PRIMARY\s+KEY|WITHOUT\s+ROWID", str(root[0][1]), re.IGNORECASE):
            return None
        places = {name: layout.index(name) for name in request.columns}
        order = sorted(places, key=places.__getitem__)
        try:
            read = self._pages.read(
                root[0][0], [places[name] for name in order], [request.columns[name] for name in order]
            )
        except NotPlain:
            return None
        columns = {name: read[order.index(name)] for name in request.columns}
        if request.only is None:
            return list(columns.values())
        name, values = request.only
        kept = np.isin(columns[name], values)
        return [column[kept] for column in columns.values()]

    def _read_by_sql(self, request: ColumnRequest) -> list[Ints]:
        cells = ", ".join(f'coalesce("{name}", {null})' for name, null in request.columns.items())
        rows = self.each_row(f'SELECT {cells} FROM "{request.table}"{request.where} ORDER BY rowid')
        columns = [array("q") for _ in request.columns]
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            for name, column, values in zip(request.columns, columns, zip(*some, strict=True), strict=True):
                try:
                    column.extend(values)
                except TypeError:
                    what = f"{request.table}.{name} holds values that are not integers"
                    raise TraceError(f"{self.path}: damaged: {what}") from None
        return [np.frombuffer(column, dtype=np.int64) for column in columns]


def _refuse_unfit(path: Path) -> bytes:
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
        # SQLite looks next to the file itself, not next to a link.
        side = path.resolve().with_name(path.resolve().name + suffix)
        if side.exists() and side.stat().st_size:
            raise TraceError(f"{path}: {side.name} lies next to it, so the export is unfinished; export it again")
    return header


def _declared_bytes(header: bytes) -> int:
    """https://www.sqlite.org/fileformat.html: page size at 16, size in pages at 28, valid when the change counter at 24
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


class NotPlain(Exception):
    """The table is not laid out as its pages are read here; SQLite itself must read it."""


class PageReader:
    """Reads integer columns of tables of one database file, open and at rest."""

    def __init__(self, descriptor: int, header: bytes) -> None:
        """``header`` is the first 100 bytes of the file."""
        self._descriptor = descriptor
        self._most_pages = os.fstat(descriptor).st_size // 512
        size = int.from_bytes(header[16:18], "big")
        self._page_bytes = 65536 if size == 1 else size
        # The last bytes of a page may be reserved for extensions; a longer payload spills into overflow pages.
        self._largest_payload = self._page_bytes - header[20] - 35

    def read(self, root_page: int, columns: Sequence[int], null_values: Sequence[int]) -> list[Ints]:
        """Return columns (by position in the table) of all rows, in the order of their row numbers.

        Raises:
            NotPlain: a column that is asked for holds anything but integers, or one before it a text of over 57 bytes.
        """
        try:
            leaves = self._leaves(root_page)
            step = max(_BATCH_BYTES // self._page_bytes, 1)
            # Each by itself, so that a column that nobody keeps frees its memory.
            whole, row_count = [empty_ints() for _ in columns], 0
            for start in range(0, len(leaves), step):
                count, batch = self._decode(leaves[start : start + step], columns, null_values)
                end = row_count + count
                if end > len(whole[0]):
                    wanted = end * len(leaves) // min(start + step, len(leaves))
                    whole = [_with_room(column, row_count, wanted) for column in whole]
                for column, values in zip(whole, batch, strict=True):
                    column[row_count:end] = values
                row_count = end
        except (IndexError, ValueError, OSError):  # a damaged page points outside itself or the file
            raise NotPlain from None
        return [column[:row_count] for column in whole]

    def _leaves(self, root_page: int) -> Ints:
        level = np.array([root_page], dtype=np.int64)
        for _ in range(20):  # deeper than any b-tree of 2³² pages
            first = self._pages(level[:1])[0]
            kind = first[100] if level[0] == 1 else first[0]
            if kind == _LEAF:
                return level
            # A damaged tree may lead to one page by many ways, and so to more leaves than any file has.
            children = [self._children(int(page)) for page in level]
            if sum(map(len, children)) > self._most_pages:
                raise NotPlain
            level = np.concatenate(children)
        raise NotPlain

    def _children(self, number: int) -> Ints:
        page = self._pages(np.array([number]))[0]
        if number == 1 or page[0] != _INTERIOR:
            raise NotPlain
        count = int(page[3]) << 8 | int(page[4])
        cells = page[12 : 12 + 2 * count].view(">u2").astype(np.int64)
        if len(cells) != count or (cells + 4 > self._page_bytes).any():
            raise NotPlain
        # The child to the right of all cells stands in the page's header.
        children: Ints = page[np.append(cells, 8)[:, None] + np.arange(4)].view(">u4").ravel().astype(np.int64)
        return children

    def _pages(self, numbers: Ints) -> Bytes:
        size = self._page_bytes
        buffer = np.empty(len(numbers) * size + _SLACK, dtype=np.uint8)
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        for first, last in zip(np.append(0, breaks).tolist(), np.append(breaks, len(numbers)).tolist(), strict=True):
            view = buffer.data[first * size : last * size]
            if os.preadv(self._descriptor, [view], (int(numbers[first]) - 1) * size) != len(view):
                raise NotPlain
        return buffer[: len(numbers) * size].reshape(len(numbers), size)

    def _decode(self, numbers: Ints, columns: Sequence[int], null_values: Sequence[int]) -> tuple[int, list[Ints]]:
        """Return how many rows some leaves hold, and their columns: one value for all where these are equal."""
        pages = self._pages(numbers)
        if (pages[:, 0] != _LEAF).any() or (numbers == 1).any():
            raise NotPlain
        cells = self._cells(pages)
        data = pages.base if isinstance(pages.base, np.ndarray) else pages
        data = data.reshape(-1)
        payload, at = _varint2(data, cells)
        if (payload > self._largest_payload).any():
            raise NotPlain
        at = _skip_varint(data, at)
        header_end = at + data[at]
        if (data[at] >= 0x80).any() or (at + columns[-1] + 1 >= header_end).any():
            raise NotPlain  # a header of over 127 bytes, or a row with fewer columns than asked for
        return len(cells), _decode_columns(data, at + 1, header_end, columns, null_values)

    def _cells(self, pages: Bytes) -> Ints:
        counts = pages[:, 3].astype(np.int64) << 8 | pages[:, 4]
        most = int(counts.max(initial=0))
        if 8 + 2 * most > self._page_bytes:
            raise NotPlain
        pointers = pages[:, 8 : 8 + 2 * most].reshape(len(pages), most, 2).astype(np.int64)
        offsets = pointers[:, :, 0] << 8 | pointers[:, :, 1]
        there = np.arange(most) < counts[:, None]
        starts = offsets + np.arange(len(pages))[:, None] * self._page_bytes
        return starts[there]


def _with_room(column: Ints, used: int, wanted: int) -> Ints:
    """Return the column with room for the wanted rows and a twentieth more; memory is taken as it is filled."""
    larger = np.empty(wanted + wanted // 20, dtype=np.int64)
    larger[:used] = column[:used]
    return larger


def _decode_columns(
    data: Bytes, types_at: Ints, body: Ints, columns: Sequence[int], null_values: Sequence[int]
) -> list[Ints]:
    """Return the wanted columns; ``types_at`` is where each row's serial types begin, ``body`` where its values do."""
    # Every position of the batch read as a big-endian 64-bit number: a column's value is its high bytes.
    words = np.ndarray(shape=(len(data) - 7,), dtype=">i8", buffer=data, strides=(1,))
    kinds = _read_types(data, types_at, columns[-1] + 1)
    decoded = []
    at, passed = body, 0
    for column, null in zip(columns, null_values, strict=True):
        kind = _one_or_each(kinds[:, column])
        size = _sizes(_SIZES, kind)
        empty = size == 0
        # Values that take no bytes (NULL, 0, 1) stand in the header.
        value = np.where(kind == 0, null, kind.astype(np.int64) - 8)
        if not empty.all():
            # Only here does it matter where the values are: optional columns stand last, and often hold only NULL.
            for other in range(passed, column):
                at = at + _sizes(_SIZES_PASSED, _one_or_each(kinds[:, other]))
            # Shifting by 64 is undefined.
            stored = words[at].astype(np.int64) >> (8 * (8 - np.maximum(size, 1)))
            value = np.where(empty, value, stored) if empty.any() else stored
            at, passed = at + size, column + 1
        decoded.append(value)
    return decoded


def _read_types(data: Bytes, types_at: Ints, count: int) -> Bytes:
    """Return the serial types of the first columns: ``(rows, columns)``."""
    headers = np.ndarray(shape=(len(data) - count + 1,), dtype=f"V{count}", buffer=data, strides=(1,))
    types = headers[types_at].view(np.uint8).reshape(-1, count)
    if (types >= 0x80).any():
        raise NotPlain  # it takes two bytes, and those of the columns after it stand elsewhere
    return types


def _one_or_each(kinds: Bytes) -> Bytes:
    """Return the type of a column in each row, or one for all where they are equal, which is quicker to use."""
    return kinds[:1] if len(kinds) and (kinds == kinds[0]).all() else kinds


def _sizes(known: Ints, kinds: Bytes) -> Ints:
    sizes = known.take(kinds)
    if (sizes == _REFUSED).any():
        raise NotPlain
    return sizes


def _varint2(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    first, second = data.take(at).astype(np.int64), data.take(at + 1).astype(np.int64)
    long = first >= 0x80
    if (long & (second >= 0x80)).any():
        raise NotPlain
    return np.where(long, (first & 0x7F) << 7 | second, first), at + 1 + long


def _skip_varint(data: Bytes, at: Ints) -> Ints:
    more = data.take(at) >= 0x80
    at = at + 1
    for _ in range(8):
        if not more.any():
            break
        following = data[np.minimum(at, len(data) - 1)] >= 0x80
        at = at + more
        more = more & following
    return at
