"""The nsys reader: matching, names, absent tables and columns, and files that are not what they should be."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profkit import read_trace
from profkit.errors import TraceError
from profkit.trace.nsys import read_nsys
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
    builder = NsysBuilder()
    builder.range("forward", 0, 50)
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
    connection = sqlite3.connect(path)
    connection.execute("UPDATE StringIds SET value = CAST(x'6b80' AS TEXT) WHERE value = 'kern'")
    connection.commit()
    connection.close()
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
    builder = NsysBuilder()
    builder.range("step 0", 5, None)
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


def _not_sqlite(path: Path) -> None:
    path.write_text("QDSTRM nothing to see")


def _foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE moz_places (id INTEGER, url TEXT)")
    connection.close()


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
        (_not_sqlite, "not a SQLite database"),
        (_foreign, "no Nsight Systems export"),
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
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    os.chmod(path, stat.S_IRUSR)
    assert len(read_nsys(path).work) == 200
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert list(tmp_path.iterdir()) == [path]


def test_rows_with_numbers_far_apart_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profkit.trace.sqlite._ROWS_AT_ONCE", 7)
    path = tmp_path / "t.sqlite"
    _good(path)
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid % 3 = 0")
    connection.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET rowid = {1 << 61} WHERE rowid = 200")
    connection.commit()
    connection.close()
    trace = read_nsys(path)
    assert trace.work.start_ns.tolist() == [10 * i + 10 for i in range(200) if (i + 1) % 3]


def test_times_near_the_limits_of_64_bits_are_exact(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.kernel(None, 5, start=-1167841969)
    builder.kernel(None, 5, start=(1 << 62) - 10)
    trace = read_nsys(builder.write(tmp_path / "t.sqlite"))
    assert trace.work.start_ns.tolist() == [-1167841969, (1 << 62) - 10]
    assert trace.work.start_ns.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "kernels", "total_ns"),
    [
        ("small.nsys2023", 3008, 57_478_638),
        ("small.nsys2025", 3008, 57_404_338),
        ("ddp.nsys2025", 16_760, 451_781_566),
        ("graph_nodes.nsys2023", 2308, 56_363_264),
        ("graph_whole.nsys2023", 1220, 17_384_144),
        ("lossy.nsys2023", 22_326, 125_672_334),
        ("hooks.nsys2025", 60, 188_895),
    ],
)
def test_real_captures_give_their_known_totals(captures: Path, name: str, kernels: int, total_ns: int) -> None:
    path = captures / f"{name}.sqlite"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    trace = read_nsys(path)
    assert (len(trace.work), int(trace.work.duration_ns.sum())) == (kernels, total_ns)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
