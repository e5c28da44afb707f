"""``profkit export``: the Chrome trace, read as JSON."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profkit.reading import open_trace
from tests.kineto_builder import kernel, launch, row, written
from tests.nsys_builder import NsysBuilder, process_of
from tests.run_builder import start_run

TRACES = Path(__file__).parent.parent / "traces"
NSYS, KINETO = TRACES / "small-train.nsys2025.sqlite", TRACES / "small-train.kineto.json.gz"
CPU, NVTX_ALONE = TRACES / "tiny-train-cpu.kineto.json.gz", TRACES / "tiny-train-cpu.nsys2023.sqlite"

Run = Callable[..., subprocess.CompletedProcess[str]]


class Read:
    """The rows of a Chrome trace: slices with the name of their track, and both ends of arrows."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        self.rows = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
        named = [row for row in self.rows if row["ph"] == "M"]
        self.processes = {row["pid"]: row["args"]["name"] for row in named if row["name"] == "process_name"}
        tracks = {(row["pid"], row["tid"]): row["args"]["name"] for row in named if row["name"] == "thread_name"}
        self.tracks = list(tracks.values())
        self.slices = [row for row in self.rows if row["ph"] == "X"]
        for one in self.slices:
            one["start"], one["end"] = nanoseconds(one["ts"]), nanoseconds(one["ts"]) + nanoseconds(one["dur"])
            one["track"] = tracks.get((one["pid"], one["tid"]), "")
            one["process"] = self.processes[one["pid"]]
        self.check_ids()

    def check_ids(self) -> None:
        """Check what Perfetto takes ids to mean: a thread with a process's number is that process's main thread."""
        threads = {(row["pid"], row["tid"]) for row in self.slices}
        assert len({tid for _, tid in threads}) == len(threads)
        assert {pid for pid, _ in threads} <= set(self.processes)
        assert all(pid == tid for pid, tid in threads if tid in self.processes)
        assert all(0 < number < 2**31 for number in (*self.processes, *(tid for _, tid in threads)))

    def of(self, category: str) -> list[dict[str, Any]]:
        return [one for one in self.slices if one["cat"] == category]

    def sums(self, category: str, key: str = "track") -> dict[str, int]:
        totals: dict[str, int] = defaultdict(int)
        for one in self.of(category):
            totals[one[key]] += one["end"] - one["start"]
        return dict(totals)


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def exported(profkit: Run, capture: Path, folder: Path, *more: str) -> Path:
    chrome = folder / "step.json.gz"
    done = profkit("export", capture, "-o", chrome, *more)
    assert done.returncode == 0, done.stderr
    return chrome


@pytest.fixture(scope="module")
def read(profkit: Run, tmp_path_factory: pytest.TempPathFactory) -> Read:
    return Read(exported(profkit, NSYS, tmp_path_factory.mktemp("nsys")))


def test_the_durations_on_each_gpu_stream_sum_to_the_kernel_time(read: Read) -> None:
    result = open_trace(NSYS).kernels()
    assert read.sums("kernel") == {"GPU 0 stream 7": result.kernel_time_ns}
    assert result.kernel_time_ns == 59_325_701
    assert len(read.of("kernel")) == result.kernel_count


def test_each_kernel_names_its_range_and_how_that_is_known(read: Read) -> None:
    under: dict[str, int] = defaultdict(int)
    for one in read.of("kernel"):
        under[one["args"]["placed"]] += one["end"] - one["start"]
        assert one["args"]["range"].split("/")[0] == "step *"
    ledger = open_trace(NSYS).attribution.ledger
    assert under == {
        "placed by its own thread": ledger.direct_ns,
        "placed by the thread that waited for it": ledger.inferred_ns,
    }


def test_arrows_join_a_call_with_every_kernel_that_it_launched(read: Read) -> None:
    begins = {row["id"]: row["ts"] for row in read.rows if row["ph"] == "s" and row["cat"] == "ac2g"}
    ends = {row["id"]: row["ts"] for row in read.rows if row["ph"] == "f" and row["cat"] == "ac2g"}
    trace = open_trace(NSYS).trace
    assert begins.keys() == ends.keys()
    assert len(ends) == len(trace.work) + len(trace.copies)
    assert {nanoseconds(ts) for ts in begins.values()} <= {
        one["start"] for one in (*read.of("cuda_runtime"), *read.of("cuda_driver"))
    }
    assert all(begins[number] <= ts for number, ts in ends.items())


def test_no_path_environment_or_command_line_is_exported(profkit: Run, tmp_path: Path) -> None:
    folder = start_run(tmp_path / "run", command=["python", "/home/somebody/train.py"], argv=[])
    (folder / "trace.sqlite").write_bytes(NSYS.read_bytes())
    content = gzip.decompress(exported(profkit, folder, tmp_path).read_bytes())
    for private in (b"somebody", b"train.py", str(tmp_path).encode(), b"/home", b"PATH="):
        assert private not in content


def test_two_exports_are_equal_to_the_byte(profkit: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    assert exported(profkit, KINETO, first).read_bytes() == exported(profkit, KINETO, second).read_bytes()


def two_ranks(folder: Path, *bases: int) -> Path:
    """Return the run of two ranks whose traces count from different moments, with the same ids of calls."""
    start_run(folder, command=[], argv=[], world_size=2)
    for rank, base in enumerate(bases):
        pid = 100 + rank
        events = [
            row("cpu_op", "aten::mm", 10, 20, pid, pid=pid),
            row("user_annotation", "forward", 5, 40, pid, pid=pid),
            launch(12, 1, pid, pid=pid),
            kernel("gemm", 40, 7, 1),
            row("gpu_memcpy", "Memcpy HtoD", 60, 3, 7, pid=0, device=0, stream=7, correlation=9, bytes=64),
            kernel("ncclDevKernel_AllReduce", 80, 5, 77),  # its launch was not recorded
        ]
        name = "trace.json.gz" if rank == 0 else "trace.rank1.json.gz"
        distributed = {"rank": rank, "world_size": 2}
        written(folder, events, name, baseTimeNanoseconds=base, distributedInfo=distributed)
    return folder


def test_ranks_share_one_clock_and_stay_apart(profkit: Run, tmp_path: Path) -> None:
    folder = two_ranks(tmp_path / "run", 4_000_000, 5_000_000)
    read = Read(exported(profkit, folder, tmp_path))
    starts = {one["process"]: one["start"] for one in read.slices if one["name"] == "forward"}
    assert starts["rank 1"] - starts["rank 0"] == 1_000_000
    assert len(read.processes) == 2
    assert read.sums("kernel", "process") == {"rank 0": 12_000, "rank 1": 12_000}
    gemms = [one for one in Read(exported(profkit, folder, tmp_path, "--rank", "1")).slices if one["name"] == "gemm"]
    assert [(one["track"], one["dur"]) for one in gemms] == [("GPU 0 stream 7", 7)]
    other_first = Read(exported(profkit, two_ranks(tmp_path / "other first", 5_000_000, 4_000_000), tmp_path))
    assert min(row["ts"] for row in other_first.rows if "ts" in row) == 0


def assert_slices_nest(read: Read) -> None:
    """Perfetto drops a slice that begins within another one of its track and ends after it."""
    open_now: dict[tuple[int, int], list[int]] = defaultdict(list)
    for one in sorted(read.slices, key=lambda row: (row["start"], -row["end"])):
        ends = open_now[one["pid"], one["tid"]]
        while ends and ends[-1] <= one["start"]:
            ends.pop()
        assert not ends or one["end"] <= ends[-1], one
        ends.append(one["end"])


def odd_capture(path: Path) -> Path:
    builder = NsysBuilder()
    builder.domain(3, "NCCL")
    builder.name_thread("pt_autograd_0", 101)
    builder.add("DIAGNOSTIC_EVENT", timestamp=0, severity=2, text="No CUDA events.", globalPid=process_of(300))
    builder.range("step", 0, 10_000, uint64Value=12)
    builder.range("all_reduce", 100, 2_000, domain=3)
    builder.range("crosses", 1_500, 3_000, end_tid=102)  # overlaps all_reduce, ends on another thread
    builder.range("unfinished", 4_000, None)
    builder.kernel(200, 500, start=300)
    builder.kernel(250, 500, start=600)  # runs beside the first, on one stream
    builder.kernel(None, 40, start=900)  # its launch was not recorded
    builder.kernel(5_000, 70, tid=101, start=6_000, device=1)
    builder.kernel(5_000, 70, pid=200, tid=200, start=6_500)
    builder.graph(7_000, 7_100, 7_900)
    builder.copy(8_000, 33, start=8_100)
    return builder.write(path)


def test_slices_nest_on_every_track_and_ranges_say_what_else_is_known_of_them(profkit: Run, tmp_path: Path) -> None:
    capture = odd_capture(tmp_path / "odd.sqlite")
    read = Read(exported(profkit, capture, tmp_path))
    said = {one["name"]: one.get("args", {}) for one in read.of("user_annotation")}
    assert said == {
        "step": {"payload": 12},
        "all_reduce": {"domain": "NCCL"},
        "crosses": {},
        "unfinished": {"finished": False},
    }
    assert read.tracks.count("range that crosses others") == 1
    assert_slices_nest(read)
    assert sum(read.sums("kernel").values()) == int(open_trace(capture).trace.work.duration_ns.sum())
    assert read.tracks.count("GPU 0 stream 7") == 3  # two kernels at once, and another process's


def test_a_damaged_trace_of_overlapping_rows_is_exported(profkit: Run, tmp_path: Path) -> None:
    builder = NsysBuilder()
    for number in range(3000):
        builder.kernel(number, 100_000 - number, start=number, tid=100 + number, device=number % 40)
    capture = builder.write(tmp_path / "t.sqlite")
    read = Read(exported(profkit, capture, tmp_path))
    assert sum(read.sums("kernel").values()) == open_trace(capture).kernels().kernel_time_ns
    ends: dict[tuple[int, int], int] = {}
    for one in sorted(read.of("kernel"), key=lambda row: row["start"]):
        assert one["start"] >= ends.get((one["pid"], one["tid"]), 0)
        ends[one["pid"], one["tid"]] = one["end"]


def test_export_says_what_is_missing_or_lists_its_files(profkit: Run, tmp_path: Path) -> None:
    for output, said in (((), "add -o step.json.gz"), (("--chrome", NSYS), "this file is being read")):
        done = profkit("export", NSYS, *output)
        assert done.returncode == 2
        assert said in done.stderr
    data = json.loads(profkit("export", NSYS, "--chrome", tmp_path / "a.json", "--format", "json").stdout)
    assert data["files"][0]["bytes"] == (tmp_path / "a.json").stat().st_size
