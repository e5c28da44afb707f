"""nsys exports as SQLite files: columns decoded from pages, and files made to hang or to be misread."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit.errors import TraceError
from profkit.reading import open_trace
from profkit.trace import sqlite
from profkit.trace.columns import MOST_OPEN_RANGES
from profkit.trace.sqlite import ColumnRequest, NotPlain, PageReader, SqliteFile
from tests.child import run_in_child
from tests.nsys_builder import NsysBuilder

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


@pytest.mark.parametrize("value", ["'text'", "''", "1.5", "x'00ff'", f"'{'a' * 57}'"])
def test_what_else_stands_around_the_wanted_columns_does_not_matter(tmp_path: Path, value: str) -> None:
    path = tmp_path / "t.sqlite"
    _write(path, [(i, i, i, i) for i in range(100)], more=f"UPDATE t SET b = {value}, d = {value} WHERE a = 3")
    assert _read(path, (0, 2), (0, 0)) == [list(range(100))] * 2


def test_a_longer_text_before_a_wanted_column_is_left_to_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    _write(path, [(i, i, i, i) for i in range(100)], more=f"UPDATE t SET b = '{'a' * 58}' WHERE a = 3")
    with pytest.raises(NotPlain):
        _read(path, (0, 2), (0, 0))


@pytest.mark.parametrize("text", ["short", "a" * 58])
def test_some_rows_are_the_same_from_pages_and_from_sqlite(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.sqlite"
    rows = [(None if i % 7 == 0 else i % 5, text, i, None) for i in range(300)]
    _write(path, rows)
    with SqliteFile(path) as file:
        file.tables()
        (columns,) = file.columns([ColumnRequest("t", {"d": -1, "a": 0, "c": 0}, only=("a", (2, 4)))])
    wanted = [(-1, a, c) for a, _, c, _ in rows if a in (2, 4)]
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == wanted


KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
DAMAGED = [
    ("CREATE VIEW v AS SELECT 1", "v is a view"),
    ("CREATE TRIGGER t AFTER DELETE ON StringIds BEGIN SELECT 1; END", "holds triggers"),
    ("CREATE VIRTUAL TABLE f USING fts5(a)", "f is virtual"),
    ("CREATE TABLE g (a INTEGER, b INTEGER AS (a * 2))", "g has a computed column"),
    ("CREATE TABLE g (a INTEGER, b INTEGER AS (a * 2) STORED)", "g has a computed column"),
    (f"UPDATE {KERNELS} SET end = 4611686018427387904", "impossible times of kernels"),
    (f"UPDATE {KERNELS} SET start = -9223372036854775808", "impossible times of kernels"),
    (f"UPDATE {KERNELS} SET end = 1e300", "values that are not integers"),
    (f"UPDATE {KERNELS} SET start = 'soon'", "values that are not integers"),
    (f"UPDATE {KERNELS} SET start = ' ' WHERE rowid = 1", "not integers"),
    (f"UPDATE {KERNELS} SET correlationId = x'ff00'", "not integers"),
    ("UPDATE NVTX_EVENTS SET end = 9223372036854775807", "impossible times of ranges"),
    ("UPDATE NVTX_EVENTS SET globalTid = 'x'", "not integers"),
    (
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '');"
        f"PRAGMA writable_schema = RESET; UPDATE {KERNELS} SET start = NULL WHERE rowid = 1",
        "impossible times of kernels",
    ),
]
HARMLESS = [
    "INSERT INTO ThreadNames VALUES (1, 1, 'x'), (NULL, 1, 5), (1.5, NULL, 2), ('x', 1, 3), (77, 1, 4)",
    "INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (1, 0, 'x'), ('a', 0, 100), (NULL, 0, 100)",
    "UPDATE NVTX_EVENTS SET doubleValue = 9e999",
    "UPDATE NVTX_EVENTS SET int64Value = 'many'",
    "UPDATE NVTX_EVENTS SET text = x'ff00fe'",
    "INSERT INTO NVTX_EVENTS (start, eventType, globalTid) VALUES (1, 'x', 1), (1, 75.5, 1), (1, 75, 1)",
    "INSERT INTO META_DATA_EXPORT VALUES (NULL, NULL), (x'ff', x'fe')",
    "INSERT INTO TARGET_INFO_GPU VALUES (1, NULL), (2, x'ff')",
]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    builder = NsysBuilder()
    builder.name_thread("main", 100)
    builder.add("TARGET_INFO_GPU", id=0, name="NVIDIA H200")
    builder.add("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=100)
    builder.range("forward", 0, 100)
    builder.kernel(10, 50)
    return builder.write(tmp_path / "t.sqlite")


def change(path: Path, sql: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(sql)
        connection.commit()
    return path


@pytest.mark.parametrize(("sql", "expected"), DAMAGED)
def test_what_nsys_does_not_write_is_refused_in_one_line(export: Path, sql: str, expected: str) -> None:
    with pytest.raises(TraceError, match=expected) as caught:
        open_trace(change(export, sql))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sql", HARMLESS)
def test_an_odd_value_that_nothing_is_counted_by_is_passed_over(export: Path, sql: str) -> None:
    opened = open_trace(change(export, sql))
    assert opened.kernels("forward" if "forward" in opened.trace.names else None).total_ns == 50


def test_a_name_that_is_no_utf8_in_the_schema_is_a_damaged_file(export: Path) -> None:
    content = export.read_bytes()
    assert content.count(b"CREATE TABLE StringIds") == 1
    export.write_bytes(content.replace(b"CREATE TABLE StringIds", b"CREATE TABLE \xff\xfe\xfdingIds"))
    with pytest.raises(TraceError, match=r"t\.sqlite: "):
        open_trace(export)


def test_a_query_that_takes_more_steps_than_the_file_can_need_is_stopped(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_LEAST_STEPS", 2_000_000)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with sqlite.SqliteFile(export) as file, pytest.raises(TraceError, match="more steps to read"):
        file.rows(endless)


def test_a_value_that_is_too_long_is_refused(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_LONGEST_VALUE_BYTES", 2**16)
    change(export, "UPDATE NVTX_EVENTS SET text = printf('%.100000c', 'x')")
    with pytest.raises(TraceError, match="holds a value of over"):
        open_trace(export)


def test_a_tree_of_pages_that_leads_to_itself_is_not_followed_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "tree.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA page_size = 512")
        connection.execute("CREATE TABLE StringIds (a INTEGER, b INTEGER)")
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", ((i, i) for i in range(20_000)))
        connection.commit()
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master").fetchone()
    content = bytearray(path.read_bytes())
    page = memoryview(content)[(root - 1) * 512 : root * 512]
    assert page[0] == 5
    count = page[3] << 8 | page[4]
    for cell in range(count):
        place = page[12 + 2 * cell] << 8 | page[13 + 2 * cell]
        page[place : place + 4] = root.to_bytes(4, "big")
    page[8:12] = root.to_bytes(4, "big")
    path.write_bytes(content)

    def read() -> str:
        with path.open("rb") as file:
            try:
                return str(sqlite.PageReader(file.fileno(), bytes(content[:100])).read(root, [0], [0]))
            except sqlite.NotPlain:
                return "not plain"

    assert run_in_child(read, cpu_seconds=20, memory_bytes=2**30) == "not plain"


def test_ranges_without_end_on_one_thread_are_refused(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for n in range(MOST_OPEN_RANGES + 1):
        builder.range(f"r{n}", n, 10**6 - n)
    with pytest.raises(TraceError, match="2,501 ranges are open on one thread at once"):
        open_trace(builder.write(tmp_path / "deep.sqlite"))
    builder.rows["NVTX_EVENTS"].pop()
    builder.range("after", 10**6, 10**6 + 1)
    assert len(open_trace(builder.write(tmp_path / "less.sqlite")).trace.ranges) == MOST_OPEN_RANGES + 1


def test_calls_and_kernels_that_all_have_one_id_are_matched_at_once(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for n in range(8_000):
        builder.call(10 * n, correlation=1, tid=100 + n % 7)
        builder.kernel(None, 5, correlation=1, start=10 * n + 5)
    path = builder.write(tmp_path / "t.sqlite")

    def read() -> tuple[list[int], str]:
        trace = open_trace(path).trace
        return trace.work.launch_ns.tolist(), trace.notes[0]

    launches, note = run_in_child(read, cpu_seconds=20)
    assert launches == [10 * n for n in range(8_000)]
    assert note.startswith("8,000 kernels or copies have several launches")


def test_numbers_of_gpus_may_lie_far_apart(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for pid in (100, 200):
        for device in (0, 0, 2**53):
            builder.kernel(10, 5, pid=pid, tid=pid, device=device)
    assert open_trace(builder.write(tmp_path / "t.sqlite")).kernels().total_ns == 30


def test_memory_that_a_damaged_page_asks_for_is_said_with_the_file(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(sqlite.SqliteFile, "columns", ask)
    with pytest.raises(TraceError, match=f"{export}: damaged, or too large"):
        open_trace(export)
