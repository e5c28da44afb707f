"""Integer columns straight out of a SQLite file's pages, decoded for all rows of many pages at once.

SQLite hands out rows one value at a time, which for a million rows costs more than everything that is then done with
them. A table of integers is simple on disk (https://www.sqlite.org/fileformat2.html, sections 1.5, 1.6 and 2.1): a
b-tree whose leaves hold cells, each a payload length, a row number, and a record: a header with one serial type per
column, then the columns' bytes, big-endian. Here each step of that is one NumPy operation over a whole batch of pages.

What this does not understand (text among the columns, overflow pages, rows with fewer columns than the table) it
declines with `NotPlain`, and the caller asks SQLite. It never guesses: every type and every offset is checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from profkit.trace.columns import Ints

Bytes = npt.NDArray[np.uint8]

_LEAF, _INTERIOR = 0x0D, 0x05
# Small enough that a batch and the columns of its rows stay in a core's own cache: 1.7 times faster than 4 MiB.
_BATCH_BYTES = 1 << 19
_SLACK = 16  # so that an 8-byte read at the last byte stays in the buffer

_REFUSED = 255
# Bytes of a column by its serial type; 0, 8 and 9 (NULL, 0 and 1) take none, 7 is a float, 12 and above are no numbers.
_SIZES = np.full(256, _REFUSED, dtype=np.int64)
_SIZES[[0, 1, 2, 3, 4, 5, 6, 8, 9]] = [0, 1, 2, 3, 4, 6, 8, 0, 0]


class NotPlain(Exception):
    """The table is not laid out as plain integers; SQLite itself must read it."""


class PageReader:
    """Reads tables of one database file, open and at rest."""

    def __init__(self, descriptor: int, header: bytes) -> None:
        """``header`` is the first 100 bytes of the file."""
        self._descriptor = descriptor
        size = int.from_bytes(header[16:18], "big")
        self._page_bytes = 65536 if size == 1 else size
        # The last bytes of a page may be reserved for extensions; a longer payload spills into overflow pages.
        self._largest_payload = self._page_bytes - header[20] - 35

    def read(self, root_page: int, columns: Sequence[int], null_values: Sequence[int], row_count: int) -> list[Ints]:
        """Return columns (by position in the table) of all rows, in the order of their row numbers.

        Raises:
            NotPlain: the table holds anything but integers in the columns up to the last one asked for, or the number
                of rows found is not ``row_count``.
        """
        try:
            return self._read(root_page, columns, null_values, row_count)
        except (IndexError, ValueError, OSError):  # a damaged page points outside itself or the file
            raise NotPlain from None

    def _read(self, root_page: int, columns: Sequence[int], null_values: Sequence[int], row_count: int) -> list[Ints]:
        results = [np.empty(row_count, dtype=np.int64) for _ in columns]
        done = 0
        for batch in self._batches(self._leaves(root_page)):
            decoded = self._decode(batch, columns, null_values)
            count = len(decoded[0])
            if done + count > row_count:
                raise NotPlain
            for result, values in zip(results, decoded, strict=True):
                result[done : done + count] = values
            done += count
        if done != row_count:
            raise NotPlain
        return results

    def _leaves(self, root_page: int) -> Ints:
        """Return the numbers of the leaf pages from left to right."""
        level = np.array([root_page], dtype=np.int64)
        for _ in range(20):  # deeper than any b-tree of 2³² pages
            first = self._pages(level[:1])[0]
            kind = first[100] if level[0] == 1 else first[0]
            if kind == _LEAF:
                return level
            level = np.concatenate([self._children(int(page)) for page in level])
        raise NotPlain

    def _children(self, number: int) -> Ints:
        page = self._pages(np.array([number]))[0]
        if number == 1 or page[0] != _INTERIOR:
            raise NotPlain
        count = int(page[3]) << 8 | int(page[4])
        cells = page[12 : 12 + 2 * count].view(">u2").astype(np.int64)
        if len(cells) != count or (cells + 4 > self._page_bytes).any():
            raise NotPlain
        left = [_big_endian(page, cells + i) << (24 - 8 * i) for i in range(4)]
        right = int.from_bytes(page[8:12].tobytes(), "big")
        return np.append(left[0] | left[1] | left[2] | left[3], right)

    def _batches(self, leaves: Ints) -> Iterator[tuple[Ints, Bytes]]:
        step = max(_BATCH_BYTES // self._page_bytes, 1)
        for start in range(0, len(leaves), step):
            some = leaves[start : start + step]
            yield some, self._pages(some)

    def _pages(self, numbers: Ints) -> Bytes:
        """Return the pages, one a row, neighbours in the file read at once."""
        size = self._page_bytes
        buffer = np.empty(len(numbers) * size + _SLACK, dtype=np.uint8)
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        for first, last in zip(np.append(0, breaks).tolist(), np.append(breaks, len(numbers)).tolist(), strict=True):
            view = buffer.data[first * size : last * size]
            if os.preadv(self._descriptor, [view], (int(numbers[first]) - 1) * size) != len(view):
                raise NotPlain
        return buffer[: len(numbers) * size].reshape(len(numbers), size)

    def _decode(self, batch: tuple[Ints, Bytes], columns: Sequence[int], null_values: Sequence[int]) -> list[Ints]:
        numbers, pages = batch
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
        return _decode_columns(data, at + 1, header_end, columns, null_values)

    def _cells(self, pages: Bytes) -> Ints:
        """Return where every cell of the pages begins, counted from the start of the batch."""
        counts = pages[:, 3].astype(np.int64) << 8 | pages[:, 4]
        most = int(counts.max(initial=0))
        if 8 + 2 * most > self._page_bytes:
            raise NotPlain
        pointers = pages[:, 8 : 8 + 2 * most].reshape(len(pages), most, 2).astype(np.int64)
        offsets = pointers[:, :, 0] << 8 | pointers[:, :, 1]
        there = np.arange(most) < counts[:, None]
        starts = offsets + np.arange(len(pages))[:, None] * self._page_bytes
        return starts[there]


def _decode_columns(
    data: Bytes, types_at: Ints, body: Ints, columns: Sequence[int], null_values: Sequence[int]
) -> list[Ints]:
    """Return the wanted columns; ``types_at`` is where each row's serial types begin, ``body`` where its values do."""
    # Every position of the batch read as a big-endian 64-bit number: a column's value is its high bytes.
    words = np.ndarray(shape=(len(data) - 7,), dtype=">i8", buffer=data, strides=(1,))
    wanted = dict(zip(columns, null_values, strict=True))
    found = []
    at = body
    for column in range(columns[-1] + 1):
        kind = data.take(types_at + column)
        size = _SIZES.take(kind)
        if (size == _REFUSED).any():
            raise NotPlain
        if column in wanted:
            if int(at.max(initial=0)) >= len(words):
                raise NotPlain
            # Shifting by 64 is undefined, so what takes no bytes (NULL, 0, 1) is set apart.
            value = words[at].astype(np.int64) >> (8 * (8 - np.maximum(size, 1)))
            empty = size == 0
            if empty.any():
                value[empty] = np.where(kind[empty] == 0, wanted[column], kind[empty].astype(np.int64) - 8)
            found.append(value)
        at = at + size
    return found


def _varint2(data: Bytes, at: Ints) -> tuple[Ints, Ints]:
    """Return the varints of one or two bytes at these places, and where they end."""
    first, second = data.take(at).astype(np.int64), data.take(at + 1).astype(np.int64)
    long = first >= 0x80
    if (long & (second >= 0x80)).any():
        raise NotPlain
    return np.where(long, (first & 0x7F) << 7 | second, first), at + 1 + long


def _skip_varint(data: Bytes, at: Ints) -> Ints:
    """Return where the varints at these places end."""
    more = data.take(at) >= 0x80
    at = at + 1
    for _ in range(8):
        if not more.any():
            break
        following = data[np.minimum(at, len(data) - 1)] >= 0x80
        at = at + more
        more = more & following
    return at


def _big_endian(page: Bytes, at: Ints) -> Ints:
    return page[at].astype(np.int64)
