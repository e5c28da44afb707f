"""Columns decoded from pages against the same columns from SQLite, on any integers, page sizes and histories."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.trace import sqlite
from profkit.trace.sqlite import NotPlain, PageReader

EDGES = [0, 1, -1, 127, 128, -128, -129, 32767, 32768, -32768, 8388607, 8388608, 2147483647, 2147483648]
EDGES += [140737488355327, 140737488355328, -140737488355329, 2**63 - 1, -(2**63)]
INTEGERS = st.one_of(st.none(), st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1), st.integers(0, 300))


def _write(path: Path, rows: Sequence[Sequence[object]], page_bytes: int = 4096, more: str = "") -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA page_size = {page_bytes}")
    connection.execute("CREATE TABLE t (a INTEGER, b INTEGER, c INTEGER, d INTEGER)")
    connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)
    connection.executescript(more)
    connection.commit()
    connection.close()


def _read(path: Path, columns: Sequence[int], nulls: Sequence[int]) -> list[list[int]]:
    connection = sqlite3.connect(path)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 't'").fetchone()
    connection.close()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        reader = PageReader(descriptor, os.pread(descriptor, 100, 0))
        return [column.tolist() for column in reader.read(root, columns, nulls)]
    finally:
        os.close(descriptor)


def _by_sqlite(path: Path, columns: Sequence[int], nulls: Sequence[int]) -> list[list[int]]:
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT a, b, c, d FROM t ORDER BY rowid").fetchall()
    connection.close()
    return [[null if row[c] is None else row[c] for row in rows] for c, null in zip(columns, nulls, strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(INTEGERS, INTEGERS, INTEGERS, INTEGERS), max_size=200),
    columns=st.sampled_from([(0,), (1, 3), (0, 1, 2, 3), (2,)]),
    page_bytes=st.sampled_from([512, 1024, 4096, 65536]),
)
def test_any_integers_are_decoded_as_sqlite_reads_them(
    tmp_path_factory: pytest.TempPathFactory, rows: list, columns: tuple[int, ...], page_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("pages") / "t.sqlite"
    _write(path, rows, page_bytes)
    nulls = [-7 - c for c in columns]
    assert _read(path, columns, nulls) == _by_sqlite(path, columns, nulls)


@pytest.mark.parametrize("page_bytes", [512, 4096])
def test_tables_of_many_pages_and_levels_are_decoded_as_sqlite_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    monkeypatch.setattr(sqlite, "_BATCH_BYTES", 3 * page_bytes)
    path = tmp_path / "t.sqlite"
    rows = [(i, i * i, -i, None if i % 3 else 2**40 + i) for i in range(20_000)]
    _write(
        path, rows, page_bytes, "DELETE FROM t WHERE a % 5 = 0; UPDATE t SET rowid = rowid + 1000000 WHERE a > 9000;"
    )
    assert _read(path, (0, 1, 2, 3), (0, 0, 0, -1)) == _by_sqlite(path, (0, 1, 2, 3), (0, 0, 0, -1))


def test_an_empty_table_has_no_rows(tmp_path: Path) -> None:
    _write(tmp_path / "t.sqlite", [])
    assert _read(tmp_path / "t.sqlite", (0, 2), (0, 0)) == [[], []]


@pytest.mark.parametrize(
    "more",
    [
        "UPDATE t SET b = 'text' WHERE a = 3",
        "UPDATE t SET b = 1.5 WHERE a = 3",
        "UPDATE t SET b = zeroblob(9000) WHERE a = 3",
        "ALTER TABLE t ADD COLUMN e INTEGER",
    ],
)
def test_a_table_with_other_values_is_left_to_sqlite(tmp_path: Path, more: str) -> None:
    path = tmp_path / "t.sqlite"
    _write(path, [(i, i, i, i) for i in range(100)], more=more)
    columns = (4,) if "ALTER" in more else (1, 2)
    with pytest.raises(NotPlain):
        _read(path, columns, [0] * len(columns))


def test_text_behind_the_wanted_columns_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    _write(path, [(i, i, i, i) for i in range(100)], more="UPDATE t SET d = 'text' WHERE a = 3")
    assert _read(path, (0, 2), (0, 0)) == [list(range(100))] * 2


def test_damaged_pages_are_declined_or_read_without_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    _write(path, [(i, 10**9 + i, -i, i % 2) for i in range(3000)])
    good = path.read_bytes()
    random = np.random.default_rng(7)
    declined = 0
    for _ in range(300):
        data = bytearray(good)
        for at in random.integers(4096, len(data), size=20):
            data[at] = random.integers(0, 256)
        descriptor = os.memfd_create("t")
        os.write(descriptor, data)
        try:
            PageReader(descriptor, bytes(data[:100])).read(2, (0, 1, 2, 3), (0, 0, 0, 0))
        except NotPlain:
            declined += 1
        finally:
            os.close(descriptor)
    assert declined
