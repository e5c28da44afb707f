"""The nsys reader: matching, names, absent tables and columns, and files that are not what they should be."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.errors import TraceError
from profkit.reading import open_trace
from profkit.trace import sqlite
from profkit.trace.columns import MOST_OPEN_RANGES
from profkit.trace.nsys import read_nsys
from profkit.trace.sqlite import ColumnRequest, NotPlain, PageReader, SqliteFile
from tests.child import run_in_child
from tests.nsys_builder import NsysBuilder, process_of

# Calls (start, id, process), kernels (id, start, process), when each kernel was launched, and which calls have work.
MATCHES: dict[str, tuple[list[Any], list[Any], list[int | None], list[bool]]] = {
    "both processes count from one number": (
        [(10, 7, 100), (20, 7, 200)], [(7, 1000, 100), (7, 1000, 200)], [10, 20], [True, True]
    ),
    "a launch that was not recorded": ([(10, 2)], [(1, 5), (2, 20)], [None, 10], [True]),
    "nested calls that share an id": ([(10, 1), (12, 1)], [(1, 20)], [12], [True, True]),
    "an id that is used again": ([(10, 7), (210, 7)], [(7, 15), (7, 215)], [10, 210], [True, True]),
    "sparse ids": (
        [(11, 1), (12, 1 << 20), (13, (1 << 31) + 5)],
        [(1, 100), (1 << 20, 100), ((1 << 31) + 5, 100), (77, 100)],
        [11, 12, 13, None],
        [True, True, True],
    ),
    "any 64 bits": (
        [(10, -(1 << 63)), (11, -1), (12, (1 << 63) - 1)],
        [(-(1 << 63), 100), (-1, 100), ((1 << 63) - 1, 100)],
        [10, 11, 12],
        [True, True, True],
    ),
    "NULL and 0 are no ids": ([(1, 0), (2, None)], [(0, 5), (None, 6)], [None, None], [False, False]),
}  # fmt: skip


@pytest.mark.parametrize("name", MATCHES)
def test_launch_and_kernel_match_by_correlation_and_process(name: str, tmp_path: Path) -> None:
    calls, kernels, launches, has_work = MATCHES[name]
    builder = NsysBuilder()
    for start, number, *pid in calls:
        builder.call(start, correlation=-5, pid=(pid or [100])[0], tid=(pid or [100])[0])
        builder.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["correlationId"] = number
    for number, start, *pid in kernels:
        builder.kernel(None, 50, correlation=-5, start=start, pid=(pid or [100])[0])
        builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1]["correlationId"] = number
    trace = read_nsys(builder.write(tmp_path / "t.sqlite"))
    known = zip(trace.work.launch_ns.tolist(), trace.work.launch_thread.tolist(), strict=True)
    assert [None if thread == -1 else moment for moment, thread in known] == launches
    assert trace.calls.has_work.tolist() == has_work
    assert {pid for process, pid in trace.process_ids.items() if process_of(pid) >> 24 == process} <= {100, 200}
    assert [note.split(" have")[0] for note in trace.notes] == (
        ["1 kernels or copies"] if name == "an id that is used again" else []
    )


def test_a_global_id_with_its_highest_bit_set_is_a_thread_as_any_other(tmp_path: Path) -> None:
    builder = NsysBuilder(("forward", 0, 50))
    builder.kernel(10, 5)
    for rows in builder.rows.values():
        for row in rows:
            row.update({key: row[key] - (1 << 63) for key in ("globalTid", "globalPid") if row.get(key)})
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    assert opened.kernels("forward").kernel_time_ns == 5
    assert not opened.self_check.failed


def test_each_process_counts_the_gpus_that_it_sees_and_the_report_tells_which_they_are(tmp_path: Path) -> None:
    """Two ranks see one GPU each, both as 0: busy is 20 + 30 ns, though they run at the same time."""
    builder = NsysBuilder()
    for pid, gpu, duration in ((200, 1, 20), (201, 3, 30)):
        builder.add("TARGET_INFO_CUDA_DEVICE", gpuId=gpu, cudaId=0, pid=pid)
        builder.kernel(10, duration, pid=pid, tid=pid, start=100)
        builder.add(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            **{"start": 300, "end": 310, "deviceId": 0, "streamId": 7, "correlationId": 0, "bytes": 8},
            globalPid=process_of(pid),
        )
        builder.add(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
            **{"globalPid": process_of(pid), "deviceId": 0, "streamId": 7, "eventId": 0xFFFF_FFFF},
            correlationId=builder.call(400, pid=pid, tid=pid, name="cudaStreamSynchronize"),
        )
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    assert sorted(opened.trace.syncs.device.tolist()) == [1, 3]
    assert opened.kernels().busy_ns == 50
    assert opened.trace.work.device.tolist() == opened.trace.copies.device.tolist() == [1, 3]
    assert [(row.rank, row.device) for row in opened.kernels().ranks] == [(0, 1), (1, 3)]


def test_optional_and_late_columns_may_be_missing_and_strings_in_any_encoding(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("forward", 0, 100, registered=True)
    builder.kernel(10, 50, name="kern")
    builder.add("TARGET_INFO_GPU", name="NVIDIA H200")
    builder.add("DIAGNOSTIC_EVENT", severity=4, text="Verbose: loaded")
    late = {"uint64Value", "int64Value", "doubleValue", "endGlobalTid", "domainId"}
    path = builder.write(
        tmp_path / "t.sqlite",
        drop_columns={
            "TARGET_INFO_GPU": {"id"},
            "DIAGNOSTIC_EVENT": {"timestamp"},
            "NVTX_EVENTS": {"text", *late},
            "CUPTI_ACTIVITY_KIND_KERNEL": {"graphNodeId"},
            "CUPTI_ACTIVITY_KIND_RUNTIME": {"returnValue"},
        },
    )
    _change(path, "UPDATE StringIds SET value = CAST(x'6b80' AS TEXT) WHERE value = 'kern'")
    trace = read_nsys(path)
    assert trace.gpus == ("NVIDIA H200",)
    assert [d.severity for d in trace.diagnostics] == ["info"]
    assert trace.names[int(trace.work.name[0])] == "k\ufffd"
    assert trace.names[int(trace.ranges.name[0])] == "forward"
    assert trace.ranges.payload == {}
    assert trace.work.launch_ns.tolist() == [10]


def test_a_path_with_odd_characters_is_read(tmp_path: Path) -> None:
    for name in ("a b%20?#.sqlite", os.fsdecode(b"\xff.sqlite")):
        builder = NsysBuilder()
        builder.kernel(10, 50)
        assert len(read_nsys(builder.write(tmp_path / name)).work) == 1


def test_graph_kernels_share_their_launch_and_whole_graphs_are_work(tmp_path: Path) -> None:
    builder = NsysBuilder()
    correlation = builder.call(10, name="cudaGraphLaunch_v10000")
    builder.kernel(None, 5, correlation=correlation, start=20)
    builder.kernel(None, 6, correlation=correlation, start=30)
    builder.graph(50, 60, 90, number=3)
    trace = read_nsys(builder.write(tmp_path / "t.sqlite"))
    assert trace.work.launch_ns.tolist() == [10, 10, 50]
    assert trace.work.is_graph.tolist() == [False, False, True]
    assert trace.work.duration_ns.tolist() == [5, 6, 30]
    assert trace.names[int(trace.work.name[2])] == "CUDA graph 3"


def test_names_come_from_text_and_from_registered_strings(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.domain(2, "NCCL")
    builder.range("forward", 0, 10, int64Value=123456789012)
    builder.range("ncclAllReduce", 2, 4, registered=True, domain=2)
    builder.range("backward", 20, 30, doubleValue=2.5e12)
    builder.kernel(1, 1)
    trace = read_nsys(builder.write(tmp_path / "t.sqlite"))
    ranges = trace.ranges
    assert [trace.names[i] for i in ranges.name] == ["forward", "ncclAllReduce", "backward"]
    assert [trace.names[i] for i in ranges.domain] == ["", "NCCL", ""]
    assert ranges.payload == {0: 123456789012, 2: 2.5e12}


def test_an_open_range_ends_with_the_capture(tmp_path: Path) -> None:
    builder = NsysBuilder(("step 0", 5, None))
    builder.kernel(10, 100)
    trace = read_nsys(builder.write(tmp_path / "t.sqlite"))
    assert trace.ranges.end_ns.tolist() == [120]
    assert trace.ranges.is_open.tolist() == [True]


def test_a_capture_of_nvtx_only_is_read_and_domains_without_ranges_show_that_nsys_saw_none(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.domain(1, "profkit")
    assert read_nsys(builder.write(tmp_path / "t.sqlite")).has_invisible_ranges
    builder.range("forward", 0, 10)
    trace = read_nsys(builder.write(tmp_path / "u.sqlite"))
    assert (trace.has_invisible_ranges, trace.has_kernel_table, len(trace.ranges)) == (False, False, 1)
    assert len(trace.work) == len(trace.calls) == len(trace.copies) == 0


def test_a_missing_column_that_is_needed_is_named(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.kernel(10, 50)
    path = builder.write(tmp_path / "t.sqlite", drop_columns={"CUPTI_ACTIVITY_KIND_KERNEL": {"globalPid"}})
    with pytest.raises(TraceError, match=r"CUPTI_ACTIVITY_KIND_KERNEL has no column globalPid.*schema 3\.7\.2"):
        read_nsys(path)


def _change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.executescript(statement)


def _truncated(path: Path) -> None:
    _good(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 4096])


def _good(path: Path) -> None:
    builder = NsysBuilder()
    for i in range(200):
        builder.kernel(10 * i, 5)
    builder.write(path)


def _malformed(path: Path) -> None:
    _good(path)
    data = bytearray(path.read_bytes())
    for page in range(1, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(bytes(data))


def _unfinished(path: Path) -> None:
    real = path.with_name("real.sqlite")
    _good(real)
    path.symlink_to(real)
    real.with_name(real.name + "-wal").write_bytes(b"x")


def _rolled_back(path: Path) -> None:
    _good(path)
    path.with_name(path.name + "-journal").write_bytes(b"x")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_text("QDSTRM nothing to see"), "not a SQLite database"),
        (lambda path: _change(path, "CREATE TABLE moz_places (id INTEGER, url TEXT)"), "no Nsight Systems export"),
        (_truncated, "cut short"),
        (_malformed, "damaged"),
        (_unfinished, "-wal lies next to it"),
        (_rolled_back, "-journal lies next to it"),
    ],
)
def test_unfit_files_are_refused_in_one_line(tmp_path: Path, make: object, says: str) -> None:
    path = tmp_path / "t.sqlite"
    make(path)  # type: ignore[operator]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TraceError, match=says) as caught:
        read_nsys(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_an_export_being_written_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    _good(path)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(TraceError, match="another process is writing"):
            read_nsys(path)
    finally:
        writer.close()


def test_reading_leaves_file_and_folder_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    _good(path)
    _change(path, "PRAGMA journal_mode=WAL")
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    os.chmod(path, stat.S_IRUSR)
    assert len(read_nsys(path).work) == 200
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert list(tmp_path.iterdir()) == [path]


def test_rows_with_numbers_far_apart_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profkit.trace.sqlite._ROWS_AT_ONCE", 7)
    path = tmp_path / "t.sqlite"
    _good(path)
    _change(path, "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid % 3 = 0")
    _change(path, f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET rowid = {1 << 61} WHERE rowid = 200")
    trace = read_nsys(path)
    assert trace.work.start_ns.tolist() == [10 * i + 10 for i in range(200) if (i + 1) % 3]


def test_times_near_the_limits_of_64_bits_are_exact(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.kernel(None, 5, start=-1167841969)
    builder.kernel(None, 5, start=(1 << 62) - 10)
    trace = read_nsys(builder.write(tmp_path / "t.sqlite"))
    assert trace.work.start_ns.tolist() == [-1167841969, (1 << 62) - 10]
    assert trace.work.start_ns.dtype == np.int64


# -- the SQLite file: columns decoded from pages ---------------------------------------------------------------------


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


@pytest.mark.parametrize("value", ["'" + "a" * 58 + "'", "zeroblob(58)", "zeroblob(62)", "'" + "a" * 62 + "'"])
@pytest.mark.parametrize("wanted", ["c", "NULL", "0"])
def test_a_longer_text_before_a_wanted_column_is_left_to_sqlite(tmp_path: Path, value: str, wanted: str) -> None:
    # The second byte of a longer value's type is like the type of an integer without bytes: NULL, 0 or 1.
    path = tmp_path / "t.sqlite"
    _write(path, [(i, i, i, i) for i in range(100)], more=f"UPDATE t SET b = {value}, c = {wanted}")
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
    _change(path, sql)
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
