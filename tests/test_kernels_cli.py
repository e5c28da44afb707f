"""The command line of the analyzers of time: contracts of the JSON, golden tables, exit codes, hostile files."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from profkit import read_trace
from profkit.cli import main, progress
from profkit.report.kernel_plot import MOST_BARS, _draw, plot_kernels
from tests.conftest import ROOT
from tests.nsys_builder import NsysBuilder

Run = Callable[..., "subprocess.CompletedProcess[str]"]

GOLDEN_RANGE = """\
range 'backward', open 2 times: 3 kernels per step (2 steps)
kernel time 6.250 µs   GPU busy 6.250 µs   Python time 80.00 µs

share  per step  times      mean  category     kernel
─────  ────────  ─────  ────────  ───────────  ─────────────────────────────────
80.0%  5.000 µs      2  2.500 µs  gemm         sm80_xmma_gemm_f…f32_nt_n_64x64x8
20.0%  1.250 µs      1  1.250 µs  elementwise  vectorized_eleme…nctor_add,float>

100 % = 12.50 µs of kernels under 'backward' in 2 steps
Under 'backward' 12,500 ns = placed by launching thread 2,500 + by waiting
  thread 10,000
All kernel time 18,500 ns = placed by launching thread 8,500 + by waiting thread
  (backward) 10,000 + in no range 0
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two steps of forward and backward, the latter on an autograd thread."""
    gemm = "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_stage3_ffma_execute_kernel__5x_cublas"
    add = (
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>,"
        " std::array<char *, (unsigned long)3>>(int, T2, T3)"
    )
    builder = NsysBuilder()
    builder.name_thread("pt_autograd_0", 101)
    for step in range(2):
        base = 200_000 * step
        builder.range(f"step {step}", base, base + 190_000)
        builder.range("forward", base + 1000, base + 50_000)
        builder.kernel(base + 2000, 3000, name=gemm, start=base + 3000)
        builder.range("backward", base + 60_000, base + 140_000)
        builder.kernel(base + 61_000, 1250, name=add, start=base + 62_000)
        for launch in (70_000, 80_000):
            builder.kernel(base + launch, 2500, name=gemm, tid=101, start=base + launch + 1000)
    return builder.write(tmp_path_factory.mktemp("trace") / "t.sqlite")


def test_the_table_of_a_range_is_per_step_and_fits_80_columns(profkit: Run, trace: Path) -> None:
    done = profkit("kernels", trace, "--range", "backward")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == GOLDEN_RANGE
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_full_names_are_not_shortened(profkit: Run, trace: Path) -> None:
    done = profkit("kernels", trace, "--range", "backward", "--full-names")
    assert "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_stage3_ffma_execute_kernel__5x_cublas" in done.stdout


def test_json_keeps_its_contract(profkit: Run, trace: Path) -> None:
    data = json.loads(profkit("kernels", trace, "--range", "backward", "--format", "json").stdout)
    assert {key: data[key] for key in ("trace", "measure", "range", "instances", "kernel_count", "graph_count")} == {
        "trace": "t.sqlite",
        "measure": "gpu-kernel",
        "range": "backward",
        "instances": 2,
        "kernel_count": 6,
        "graph_count": 0,
    }
    assert {key: data[key] for key in ("kernel_time_ns", "graph_time_ns", "busy_ns", "wall_ns")} == {
        "kernel_time_ns": 12500,
        "graph_time_ns": 0,
        "busy_ns": 12500,
        "wall_ns": 160_000,
    }
    assert data["copies"] == {"memcpy_count": 0, "memcpy_ns": 0, "memset_count": 0, "memset_ns": 0}
    assert data["kernels"][0] == {
        "name": "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_stage3_ffma_execute_kernel__5x_cublas",
        "category": "gemm",
        "count": 4,
        "per_instance_count": 2.0,
        "total_ns": 10_000,
        "share": 0.8,
        "mean_ns": 2500,
        "min_ns": 2500,
        "max_ns": 2500,
        "per_rank_ns": [],
    }
    assert (data["ranks"], data["rank_evidence"], data["slowest_rank"]) == ([], None, None)
    assert data["range_evidence"] == {"direct_ns": 2500, "inferred_ns": 10_000, "sequence_ns": 0}
    assert data["ledger"] == {
        "direct_ns": 8500,
        "inferred_ns": 10_000,
        "ambiguous_ns": 0,
        "outside_ns": 0,
        "no_launch_ns": 0,
        "total_ns": 18_500,
    }
    assert data["warnings"] == []
    assert data["self_check"]["passed"] is True


def test_without_a_range_json_is_the_whole_capture(profkit: Run, trace: Path) -> None:
    data = json.loads(profkit("kernels", trace, "--format", "json").stdout)
    assert (data["range"], data["range_evidence"], data["kernel_time_ns"]) == (None, None, 18_500)
    assert data["wall_ns"] == 390_000


def test_without_a_range_the_phases_come_first(profkit: Run, trace: Path) -> None:
    text = profkit("kernels", trace).stdout
    assert text.startswith("Phases, per step (2 steps); 100 % = all 18.50 µs of the capture\n")
    assert text.index("forward") < text.index("backward") < text.index("whole capture: 4 kernels per step (2 steps)")


def test_totals_are_sums_over_the_recorded_steps(profkit: Run, trace: Path) -> None:
    text = profkit("kernels", trace, "--range", "backward", "--totals").stdout
    assert text.startswith("range 'backward', open 2 times: 6 kernels\nkernel time 12.50 µs   GPU busy 12.50 µs")
    assert "80.0%  10.00 µs      4   5.000 µs  gemm" in text
    assert profkit("kernels", trace, "--totals").stdout.startswith("Phases, sums over the capture;")


def test_work_outside_the_steps_leaves_no_average_per_step(profkit: Run, tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("step 0", 0, 900)
    builder.kernel(200, 50)
    builder.kernel(1000, 30)
    path = builder.write(tmp_path / "t.sqlite")
    assert "whole capture: 2 kernels\nkernel time 80 ns" in profkit("kernels", path).stdout
    assert json.loads(profkit("kernels", path, "--format", "json").stdout)["steps"] is None
    assert json.loads(profkit("kernels", path, "--range", "step 0", "--format", "json").stdout)["steps"] == 1


def test_json_holds_the_folders_of_this_machine_only_on_request(profkit: Run, trace: Path) -> None:
    for command in ("kernels", "ranges"):
        full = json.loads(profkit(command, trace, "--format", "json", "--full-names").stdout)
        assert full["trace"] == str(trace)
        assert str(trace.parent) not in profkit(command, trace, "--format", "json").stdout


def test_csv_is_exact_and_complete(profkit: Run, trace: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(profkit("kernels", trace, "--format", "csv").stdout)))
    assert [int(row["total_ns"]) for row in rows] == [16_000, 2500]
    assert rows[1]["name"].startswith("void at::native::vectorized_elementwise_kernel<(int)4")


def test_markdown_and_latex(profkit: Run, trace: Path) -> None:
    markdown = profkit("kernels", trace, "--range", "backward", "--format", "markdown").stdout
    assert "| 80.0% | 5.000 µs | 2 | 2.500 µs | gemm | sm80_xmma_gemm" in markdown
    latex = profkit("kernels", trace, "--range", "backward", "--format", "latex").stdout
    assert r"80.0\% & 5.000 µs & 2 & 2.500 µs & gemm & sm80\_xmma\_gemm" in latex
    assert latex.count(r"\end{tabular}") == 1


def test_top_leaves_a_line_for_the_rest_and_sort_orders(profkit: Run, trace: Path) -> None:
    text = profkit("kernels", trace, "--range", "backward", "--top", "1").stdout
    assert "(1 more)" in text
    by_mean = profkit("kernels", trace, "--range", "backward", "--sort", "mean", "--format", "csv").stdout.splitlines()
    assert by_mean[1].startswith("sm80")
    by_name = profkit("kernels", trace, "--range", "backward", "--sort", "name", "--format", "csv").stdout.splitlines()
    assert by_name[2].startswith('"void')


def test_explain_names_the_rule(profkit: Run, trace: Path) -> None:
    assert "Why each kernel has its category" in profkit("kernels", trace, "--explain").stdout


def test_by_category_and_by_range(profkit: Run, trace: Path) -> None:
    data = json.loads(profkit("kernels", trace, "--by", "category", "--format", "json").stdout)
    assert [(row["name"], row["total_ns"]) for row in data["kernels"]] == [("gemm", 16_000), ("elementwise", 2500)]
    data = json.loads(profkit("kernels", trace, "--by", "range", "--format", "json").stdout)
    assert [(row["name"], row["total_ns"]) for row in data["kernels"]] == [
        ("step */backward", 12_500),
        ("step */forward", 6000),
    ]


def test_by_the_operator_that_launched(profkit: Run, trace: Path) -> None:
    recorded = ROOT / "traces" / "small-train.kineto.json.gz"
    data = json.loads(profkit("kernels", recorded, "--range", "forward", "--by", "operator", "--format", "json").stdout)
    rows = {row["name"]: row for row in data["kernels"]}
    assert sum(row["total_ns"] for row in rows.values()) == data["kernel_time_ns"] == 17_835_338
    # Two steps: seven projections in each of 12 layers and the head; twelve were split in two kernels.
    assert rows["aten::mm"]["count"] == 2 * (12 * 7 + 1 + 12)
    assert (rows["aten::bmm"]["count"], rows["aten::rsqrt"]["count"]) == (2 * 12 * 2, 2 * 25)
    opened = read_trace(ROOT / "traces" / "tiny-train-cpu.kineto.json.gz")
    by_name, by_operator = (opened.kernels(by=by).kernels for by in ("kernel", "operator"))
    assert [(row.name, row.count, row.total_ns) for row in by_name] == [
        (row.name, row.count, row.total_ns) for row in by_operator
    ]
    done = profkit("kernels", trace, "--by", "operator")
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not say which operators launched its kernels; record with torch.profiler" in done.stderr


def test_thread_only_shows_what_other_tools_say(profkit: Run, trace: Path) -> None:
    data = json.loads(profkit("kernels", trace, "--range", "backward", "--thread-only", "--format", "json").stdout)
    assert data["kernel_time_ns"] == 2500
    assert data["ledger"]["outside_ns"] == 10_000


def test_the_tree_of_ranges(profkit: Run, trace: Path) -> None:
    data = json.loads(profkit("ranges", trace, "--format", "json").stdout)
    assert data["ranges"][2] == {
        "path": "step 0/backward",
        "name": "backward",
        "domain": "",
        "instances": 1,
        "wall_ns": 80_000,
        "kernel_time_ns": 6250,
        "busy_ns": 6250,
        "kernel_count": 3,
    }
    table = profkit("ranges", trace).stdout
    assert " backward" in table
    assert "step *" in table
    assert max(map(len, table.splitlines()[:-2])) <= 80


def test_python_and_the_command_line_say_the_same(profkit: Run, trace: Path) -> None:
    data = json.loads(profkit("kernels", trace, "--range", "backward", "--format", "json").stdout)
    result = read_trace(trace).kernels("backward").to_dict()
    for key in ("kernel_time_ns", "ledger", "range_evidence", "busy_ns"):
        assert data[key] == result[key]
    assert data["kernels"] == json.loads(json.dumps(result["kernels"]))


def test_a_plot_is_a_picture_and_only_a_png(profkit: Run, trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "k.png"
    assert profkit("kernels", trace, "--plot", picture).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]
    done = profkit("kernels", trace, "--plot", tmp_path / "k.jpg")
    assert (done.returncode, done.stdout) == (2, "")


def test_output_goes_to_a_file_whole_or_not_at_all(profkit: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    done = profkit("kernels", trace, "--format", "json", "-o", out)
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads(out.read_text())["kernel_count"] == 8
    done = profkit("kernels", trace, "-o", tmp_path / "no" / "t.txt")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No such file" in done.stderr


def test_a_device_is_written_to_and_not_replaced(profkit: Run, trace: Path) -> None:
    assert profkit("kernels", trace, "-o", "/dev/null").returncode == 0
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--range", "forwrad"), 2, "nearest: 'forward'"),
        (("--instance", "1"), 2, "one instance needs a range"),
        (("--range", "forward", "--instance", "9"), 2, "2 instances"),
        (("--per-instance",), 2, "one line per instance needs a range"),
        (("--device", "4"), 2, "device 0"),
        (("--process", "4"), 2, "pid 100"),
        (("--by", "colour"), 2, "colour"),
        (("--top", "0"), 2, "0"),
    ],
)
def test_wrong_requests_get_one_line_and_the_usage_code(
    profkit: Run, trace: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    done = profkit("kernels", trace, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def _make_bad(kind: str, folder: Path, good: Path) -> Path:
    path = folder / "t.sqlite"
    if kind == "missing":
        return path
    if kind == "directory":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("hello")
    elif kind == "report":
        path = folder / "t.nsys-rep"
        path.write_bytes(b"\x00\x01report")
    elif kind == "cut":
        path.write_bytes(good.read_bytes()[:-5000])
    elif kind == "wal":
        shutil.copy(good, path)
        (folder / "t.sqlite-wal").write_bytes(b"xyz")
    elif kind == "json":
        path.write_text('{"name": "not a trace"}')
    elif kind == "gzip":
        path.write_bytes(b"\x1f\x8b\x08garbage")
    return path


@pytest.mark.parametrize("kind", ["missing", "directory", "empty", "text", "report", "cut", "wal", "json", "gzip"])
@pytest.mark.parametrize("command", ["kernels", "ranges"])
def test_bad_files_get_one_line_and_leave_nothing(
    profkit: Run, trace: Path, tmp_path: Path, command: str, kind: str
) -> None:
    path = _make_bad(kind, tmp_path, trace)
    before = sorted(tmp_path.rglob("*"))
    environment = {**os.environ, "PATH": "/nonexistent", "NSYS": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("NSYS")
    done = profkit(command, path, env=environment)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_no_permission_gets_one_line(profkit: Run, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    shutil.copy(trace, path)
    path.chmod(0)
    done = profkit("kernels", path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "Permission denied" in done.stderr


def test_a_lossy_capture_is_read_and_its_verdict_heads_the_output(profkit: Run, captures: Path) -> None:
    path = captures / "lossy.nsys2023.sqlite"
    done = profkit("kernels", path, "--range", "backward")
    assert done.returncode == 0
    assert done.stdout.startswith("SELF-CHECK FAILED")
    assert profkit("kernels", path, "--strict").returncode == 3
    assert profkit("ranges", path, "--strict").returncode == 3
    data = json.loads(profkit("kernels", path, "--format", "json").stdout)
    assert data["self_check"]["passed"] is False
    assert "self-check-launch-without-kernel" in {warning["code"] for warning in data["warnings"]}


def test_nvtx_alone_shows_wall_times_and_one_warning(profkit: Run, tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("forward", 0, 10_000)
    path = builder.write(tmp_path / "t.sqlite")
    done = profkit("ranges", path)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "10.00 µs" in done.stdout
    assert profkit("kernels", path).returncode == 1


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a capture with two GPUs, a warm-up, and a range in a domain of its own."""
    builder = NsysBuilder()
    builder.domain(3, "NCCL")
    builder.range("Warmup", 0, 900)
    builder.range("forward", 100, 500)
    builder.kernel(200, 50, device=0)
    builder.range("forward", 1000, 1500)
    builder.kernel(1100, 70, device=0)
    builder.kernel(1200, 30, device=1, name="all_reduce")
    builder.range("all_reduce", 1190, 1300, domain=3)
    return builder.write(tmp_path_factory.mktemp("two") / "t.sqlite")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "1"), "device 1 only"),
        (("--process", "100"), "process 100 only"),
        (("--exclude", "Warmup"), "without 'Warmup'"),
    ],
)
def test_a_part_of_the_capture_does_not_call_itself_the_whole(
    profkit: Run, two_devices: Path, arguments: tuple[str, str], words: str
) -> None:
    text = profkit("kernels", two_devices, *arguments).stdout
    assert text.startswith(f"part of the capture, {words}: ")
    assert f"of kernels in this part of the capture ({words})" in text
    assert "whole capture" not in text
    assert "Phases" not in text


def test_the_filters_of_a_range_are_named_and_in_the_json(profkit: Run, two_devices: Path) -> None:
    arguments = ("--range", "forward", "--device", "0", "--exclude", "Warmup")
    text = profkit("kernels", two_devices, *arguments).stdout
    assert text.startswith("range 'forward', open 1 time, device 0 only, without 'Warmup': 1 kernel\n")
    assert "100 % = 70 ns of kernels under 'forward', device 0 only, without 'Warmup'" in text
    data = json.loads(profkit("kernels", two_devices, *arguments, "--format", "json").stdout)
    assert data["filters"] == {
        "range": "forward",
        "exclude": "Warmup",
        "instance": None,
        "process": None,
        "device": 0,
        "rank": None,
    }


def test_the_phases_leave_out_warmup_however_it_is_written(profkit: Run, two_devices: Path) -> None:
    text = profkit("kernels", two_devices).stdout
    assert text.startswith("Phases, sums over the capture, without warmup; 100 % = ")
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("forward")] == [["forward", "1"]]


def _copy(trace: Path, folder: Path, name: str) -> Path:
    return Path(shutil.copy(trace, folder / name))


@pytest.mark.parametrize("link", ["itself", "symlink", "hardlink", "other spelling"])
@pytest.mark.parametrize("command", ["kernels", "ranges", "memory"])
def test_a_result_never_replaces_what_is_read(
    profkit: Run, trace: Path, tmp_path: Path, command: str, link: str
) -> None:
    capture = _copy(trace, tmp_path, "s.sqlite")
    before = capture.read_bytes()
    output = tmp_path / "s.sqlite"
    if link == "other spelling":
        output = tmp_path / "." / ".." / tmp_path.name / "s.sqlite"
    elif link == "symlink":
        output = tmp_path / "l"
        output.symlink_to(capture)
    elif link == "hardlink":
        output = tmp_path / "l"
        output.hardlink_to(capture)
    done = profkit(command, capture, "-o", output)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "this file is being read" in done.stderr
    assert capture.read_bytes() == before


def test_neither_a_plot_nor_a_timeline_replaces_what_is_read(profkit: Run, trace: Path, tmp_path: Path) -> None:
    for command, option, name in (("kernels", "--plot", "c.png"), ("memory", "--timeline", "c.html")):
        capture = _copy(trace, tmp_path, name)
        assert profkit(command, capture, option, capture).returncode == 2
        assert capture.read_bytes() == trace.read_bytes()
    other = _copy(trace, tmp_path, "after.pickle")
    assert profkit("memory", tmp_path / "c.png", "--against", other, "-o", other).returncode == 2


@pytest.mark.parametrize("name", ["manifest.json", "trace.sqlite", "snapshot.pickle", "ledger.jsonl", "log.txt"])
@pytest.mark.parametrize("named", ["run", "trace"])
def test_a_result_never_replaces_a_part_of_the_run(
    profkit: Run, trace: Path, tmp_path: Path, name: str, named: str
) -> None:
    (tmp_path / "manifest.json").write_text('{"status": "complete"}')
    (tmp_path / "log.txt").touch()
    _copy(trace, tmp_path, "trace.sqlite")
    before = sorted((path, path.read_bytes()) for path in tmp_path.iterdir())
    capture = tmp_path if named == "run" else tmp_path / "trace.sqlite"
    assert profkit("kernels", capture, "-o", tmp_path / name).returncode == 2
    assert sorted((path, path.read_bytes()) for path in tmp_path.iterdir()) == before
    assert profkit("kernels", capture, "-o", tmp_path / "kernels.txt").returncode == 0


def test_two_results_do_not_go_to_one_file(profkit: Run, trace: Path, tmp_path: Path) -> None:
    done = profkit("kernels", trace, "-o", tmp_path / "a.png", "--plot", tmp_path / "a.png")
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])


@pytest.mark.parametrize("name", ["p.sqlite", "p.json", "p.nsys-rep", "p.pickle"])
def test_a_pipe_is_refused_and_not_waited_for(profkit: Run, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for command in ("kernels", "ranges", "memory"):
        done = profkit(command, tmp_path / name)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "not a regular file" in done.stderr


@pytest.fixture
def oddly_named(tmp_path: Path) -> Path:
    """Return a capture whose names hold a formula, an escape sequence, line breaks and Chinese."""
    builder = NsysBuilder()
    builder.range("forward\x1b[2J\nx", 0, 100)
    for name in ("$x$ \\frac{", "k\x1b[31m<float>\nrm -rf", "注意力", "_private"):
        builder.kernel(10, 5, name=name)
    return builder.write(tmp_path / "odd.sqlite")


@pytest.mark.parametrize("style", ["table", "markdown", "latex", "json"])
@pytest.mark.parametrize("command", ["kernels", "ranges"])
def test_names_are_text_and_nothing_else(profkit: Run, oddly_named: Path, command: str, style: str) -> None:
    done = profkit(command, oddly_named, "--format", style)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert not any(line.startswith(("x", "rm")) for line in done.stdout.splitlines())


def test_csv_keeps_names_as_they_are(profkit: Run, oddly_named: Path) -> None:
    text = profkit("kernels", oddly_named, "--format", "csv").stdout
    assert "k\x1b[31m<float>\nrm -rf" in {row["name"] for row in csv.DictReader(io.StringIO(text, newline=""))}


def test_a_plot_takes_any_name_and_says_nothing(profkit: Run, oddly_named: Path, tmp_path: Path) -> None:
    done = profkit("kernels", oddly_named, "--range", "forward*", "--plot", tmp_path / "p.png")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_whose_name_is_not_utf8_is_read(profkit: Run, trace: Path, tmp_path: Path) -> None:
    path = _copy(trace, tmp_path, "a\udcff#?%.sqlite")
    for style in ("table", "json"):
        done = profkit("kernels", path, "--format", style)
        assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["trace"] == "a\ufffd#?%.sqlite"
    assert profkit("kernels", path, "--format", "json", "-o", tmp_path / "o.json").returncode == 0


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_any_encoding_of_the_output_will_do(profkit: Run, trace: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    for command in ("kernels", "ranges"):
        done = profkit(command, trace, env=environment, encoding=encoding, errors="strict")
        assert (done.returncode, done.stderr) == (0, "")


def _in_bash(command: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m profkit"
    return subprocess.run(
        ["bash", "-c", command.replace("profkit", program)], capture_output=True, text=True, check=False
    )


def test_a_closed_or_full_output_gets_one_line(trace: Path, tmp_path: Path) -> None:
    done = _in_bash(f"profkit kernels {trace} >&-")
    assert (done.returncode, done.stderr) == (1, "profkit: standard output is closed; name a file with -o\n")
    assert _in_bash(f"profkit kernels {trace} -o {tmp_path}/o.txt >&-").returncode == 0
    assert (tmp_path / "o.txt").stat().st_size
    done = _in_bash(f"profkit kernels {trace} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "profkit: No space left on device\n")
    done = _in_bash(f"profkit kernels {trace} --range none 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_warnings_do_not_enter_a_result_when_the_error_stream_is_closed(two_devices: Path) -> None:
    with_warning = f"profkit kernels {two_devices} --range forward --format json"
    assert "warning: " in _in_bash(with_warning).stderr
    json.loads(_in_bash(f"{with_warning} 2>&-").stdout)


def test_an_error_that_nobody_foresaw_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("index 7\nof 3")

    monkeypatch.setattr("profkit.cli.kernels.open_trace", fail)
    with pytest.raises(SystemExit) as caught:
        main(["kernels", "x"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == (
        "profkit: internal error, IndexError: index 7␊of 3; `profkit --debug …` shows where\n"
    )
    with pytest.raises(IndexError):
        main(["--debug", "kernels", "x"])


def test_a_result_is_printed_before_strict_fails(profkit: Run, captures: Path) -> None:
    done = profkit("ranges", captures / "lossy.nsys2023.sqlite", "--strict")
    assert "100 % = " in done.stdout
    assert done.stderr.endswith("the capture failed its self-check\n")


def test_every_format_holds_the_rules_that_are_asked_for(profkit: Run, trace: Path) -> None:
    asked = ("kernels", trace, "--explain", "--format")
    rules = [row["rule"] for row in json.loads(profkit(*asked, "json").stdout)["kernels"]]
    assert rules == [row["rule"] for row in csv.DictReader(io.StringIO(profkit(*asked, "csv").stdout))]
    assert rules[0].startswith("cublas")
    for style in ("table", "markdown", "latex"):
        assert rules[0][:6] in profkit(*asked, style).stdout


@pytest.mark.parametrize("by", ["category", "range", "operator"])
def test_rules_are_for_kernels(profkit: Run, trace: Path, by: str) -> None:
    assert profkit("kernels", trace, "--explain", "--by", by).returncode == 2


def test_rules_and_plot_follow_the_order_of_the_table(profkit: Run, trace: Path) -> None:
    text = profkit("kernels", trace, "--explain", "--sort", "max", "--top", "1", "--format", "markdown").stdout
    assert "| gemm |" in text.partition("Why each")[2]
    text = profkit("kernels", trace, "--explain", "--sort", "mean", "--top", "1").stdout
    assert "elementwise" not in text.partition("Why each")[2]
    opened = read_trace(trace)
    figure = _draw(opened.kernels(), opened.self_check, 60, "name")
    assert [label.get_text()[:4] for label in figure.axes[0].get_yticklabels()] == ["sm80", "vect"]


def test_the_other_lines_of_json_are_in_its_rest(profkit: Run, trace: Path) -> None:
    data = json.loads(profkit("kernels", trace, "--top", "1", "--format", "json").stdout)
    assert data["kernels"][0]["total_ns"] + data["rest"]["total_ns"] == data["kernel_time_ns"]
    assert data["kernels"][0]["count"] + data["rest"]["count"] == data["kernel_count"]
    assert data["rest"]["name"] == "(1 more)"
    assert json.loads(profkit("kernels", trace, "--format", "json").stdout)["rest"] is None


def test_a_csv_that_was_cut_says_so(profkit: Run, trace: Path) -> None:
    assert profkit("kernels", trace, "--format", "csv", "--top", "2").stderr == ""
    done = profkit("kernels", trace, "--format", "csv", "--top", "1")
    assert done.stderr == "warning: --top 1: the CSV holds 1 of 2 lines\n"


def test_instances_are_in_every_format(profkit: Run, trace: Path) -> None:
    arguments = ("kernels", trace, "--range", "backward", "--per-instance", "--format")
    rows = list(csv.DictReader(io.StringIO(profkit(*arguments, "csv").stdout)))
    assert [(row["instance"], row["start_ns"], row["kernel_time_ns"]) for row in rows] == [
        ("0", "60000", "6250"),
        ("1", "260000", "6250"),
    ]
    assert profkit(*arguments, "latex").stdout.count(r"\begin{tabular}") == 2
    assert "| 1 | 260.0 µs | 80.00 µs | 6.250 µs | 6.250 µs | 3 |" in profkit(*arguments, "markdown").stdout
    assert "       1  260.0 µs     80.00 µs" in profkit(*arguments, "table").stdout


def test_instances_start_from_the_beginning_of_the_capture(tmp_path: Path, profkit: Run) -> None:
    builder, epoch = NsysBuilder(), 1_700_000_000_000_000_000
    builder.range("step", epoch, epoch + 900)
    builder.range("forward", epoch + 500, epoch + 800)
    builder.kernel(epoch + 600, 50)
    path = builder.write(tmp_path / "t.sqlite")
    arguments = ("kernels", path, "--range", "forward", "--per-instance")
    assert "       0  500 ns       300 ns" in profkit(*arguments).stdout
    data = json.loads(profkit(*arguments, "--format", "json").stdout)
    assert data["per_instance"][0]["start_ns"] - data["first_ns"] == 500


def test_ranges_name_the_whole_of_their_shares_and_their_domains(profkit: Run, two_devices: Path) -> None:
    whole = "100 % = 150 ns of kernels in this capture"
    for style in ("table", "markdown", "latex"):
        assert whole in profkit("ranges", two_devices, "--format", style).stdout
    rows = list(csv.DictReader(io.StringIO(profkit("ranges", two_devices, "--format", "csv").stdout)))
    assert [(row["path"], row["domain"]) for row in rows if row["domain"]] == [("forward/all_reduce", "NCCL")]
    assert "| forward/all_reduce | NCCL | 1 |" in profkit("ranges", two_devices, "--format", "markdown").stdout
    assert "all_reduce [NCCL]" in profkit("ranges", two_devices).stdout
    assert {row["path"]: float(row["share_of_capture"]) for row in rows}["forward"] == pytest.approx(100 / 150)


def test_a_line_with_an_asterisk_is_explained_where_there_is_one(profkit: Run, trace: Path, two_devices: Path) -> None:
    for style in ("table", "markdown", "latex"):
        assert "stands for a number" in profkit("ranges", trace, "--format", style).stdout
    for arguments in ((trace, "--numbered"), (two_devices,)):
        assert "stands for a number" not in profkit("ranges", *arguments).stdout


def test_the_tree_is_per_step_where_every_range_lies_in_a_step(profkit: Run, trace: Path, two_devices: Path) -> None:
    line = " backward      1     80.00 µs     6.250 µs  6.250 µs   67.6%        3"
    assert line in profkit("ranges", trace).stdout
    assert "all other figures are averages per step (2 steps); --totals shows sums" in profkit("ranges", trace).stdout
    assert line.replace("1   ", "2   ").replace("80.00", "160.0").replace("6.250", "12.50").replace("3", "6") in (
        profkit("ranges", trace, "--totals").stdout
    )
    assert "averages per step" not in profkit("ranges", two_devices).stdout


def test_a_command_that_does_not_exist_gets_the_nearest_one(profkit: Run) -> None:
    done = profkit("kernel", "t.sqlite")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "Error: no command 'kernel'; did you mean 'kernels'?")


def test_a_plot_of_a_lossy_capture_bears_the_verdict(captures: Path) -> None:
    opened = read_trace(captures / "lossy.nsys2023.sqlite")
    figure = _draw(opened.kernels(), opened.self_check, 5, "total")
    assert figure.get_suptitle() == "SELF-CHECK FAILED: do not trust this capture's totals"


def test_a_plot_holds_as_many_bars_as_can_be_read(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for number in range(200):
        builder.kernel(10 * number, 5 + number, name=f"k{number}", device=0)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    plot_kernels(opened.kernels(device=0), opened.self_check, tmp_path / "p.png", top=3000)
    figure = _draw(opened.kernels(device=0), opened.self_check, MOST_BARS, "total")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert (len(labels), labels[-1]) == (MOST_BARS + 1, "(140 more)")
    assert figure.axes[0].get_title(loc="left").startswith("part of the capture, device 0 only")
    header = (tmp_path / "p.png").read_bytes()[16:24]
    assert int.from_bytes(header[4:], "big") < 4000


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_after_a_second_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.05)
    monkeypatch.setenv("TERM", "xterm")
    for seconds, shown in ((0.0, False), (0.8, True)):
        terminal = _Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress.shown_after_a_second("reading [t].sqlite"):
            time.sleep(seconds)
        assert ("reading [t].sqlite …" in terminal.getvalue()) is shown


@pytest.mark.parametrize("command", ["kernels", "ranges"])
def test_reading_shows_progress(
    command: str, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []

    @contextmanager
    def record(doing: str) -> Iterator[None]:
        shown.append(doing)
        yield

    monkeypatch.setattr(f"profkit.cli.{command}.shown_after_a_second", record)
    with pytest.raises(SystemExit):
        main([command, str(trace)])
    assert shown == ["reading t.sqlite"]


def test_nothing_is_loaded_that_is_not_needed(trace: Path) -> None:
    unwanted = {"pandas", "torch", "rich", "matplotlib", "platformdirs", "statistics", "importlib.metadata", "numpy.ma"}
    code = "import sys; from profkit.cli import main\ntry: main(['kernels', sys.argv[1]])\nexcept SystemExit: pass\n"
    code += f"sys.exit(' '.join({unwanted} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code, str(trace)], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_a_closed_pipe_is_no_error(trace: Path) -> None:
    command = f"{sys.executable} -m profkit kernels {trace} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_debug_shows_the_traceback(profkit: Run, tmp_path: Path) -> None:
    assert "Traceback" in profkit("--debug", "kernels", tmp_path / "none").stderr
