"""The command line of the analyzers of time: contracts of the JSON, golden tables, exit codes, hostile files."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from profkit.analysis.opened import read_trace
from tests.nsys_builder import NsysBuilder

Run = Callable[..., "subprocess.CompletedProcess[str]"]

GOLDEN_RANGE = """\
range 'backward', 2 instances: 6 kernels
kernel time 12.50 µs   busy 12.50 µs   wall 160.0 µs

share     total  count  per inst.  category     kernel
─────  ────────  ─────  ─────────  ───────────  ────────────────────────────────
80.0%  10.00 µs      4   5.000 µs  gemm         sm80_xmma_gemm_…f32_nt_n_64x64x8
20.0%  2.500 µs      2   1.250 µs  elementwise  vectorized_elem…nctor_add,float>

share is of the kernel time under 'backward': 12,500 ns
evidence  direct 2,500 + inferred 10,000 = 12,500 ns
capture   direct 8,500 + inferred 10,000 + outside 0 = 18,500 ns
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
        for time in (70_000, 80_000):
            builder.kernel(base + time, 2500, name=gemm, tid=101, start=base + time + 1000)
    return builder.write(tmp_path_factory.mktemp("trace") / "t.sqlite")


def test_the_table_is_as_it_was(profkit: Run, trace: Path) -> None:
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
        "trace": str(trace),
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
    }
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
    assert text.index("forward") < text.index("backward") < text.index("whole capture: 8 kernels")


def test_csv_is_exact_and_complete(profkit: Run, trace: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(profkit("kernels", trace, "--format", "csv").stdout)))
    assert [int(row["total_ns"]) for row in rows] == [16_000, 2500]
    assert rows[1]["name"].startswith("void at::native::vectorized_elementwise_kernel<(int)4")


def test_markdown_and_latex(profkit: Run, trace: Path) -> None:
    markdown = profkit("kernels", trace, "--range", "backward", "--format", "markdown").stdout
    assert "| 80.0% | 10.00 µs | 4 | 5.000 µs | gemm | sm80_xmma_gemm" in markdown
    latex = profkit("kernels", trace, "--range", "backward", "--format", "latex").stdout
    assert r"80.0\% & 10.00 µs & 4 & 5.000 µs & gemm & sm80\_xmma\_gemm" in latex
    assert latex.rstrip().endswith(r"\end{tabular}")


def test_top_leaves_a_line_for_the_rest_and_sort_orders(profkit: Run, trace: Path) -> None:
    text = profkit("kernels", trace, "--range", "backward", "--top", "1").stdout
    assert "(1 more)" in text
    by_mean = profkit("kernels", trace, "--range", "backward", "--sort", "mean", "--format", "csv").stdout.splitlines()
    assert by_mean[1].startswith("sm80")
    by_name = profkit("kernels", trace, "--range", "backward", "--sort", "name", "--format", "csv").stdout.splitlines()
    assert by_name[2].startswith('"void')


def test_explain_names_the_rule(profkit: Run, trace: Path) -> None:
    assert "why each has its category" in profkit("kernels", trace, "--explain").stdout


def test_by_category_and_by_range(profkit: Run, trace: Path) -> None:
    data = json.loads(profkit("kernels", trace, "--by", "category", "--format", "json").stdout)
    assert [(row["name"], row["total_ns"]) for row in data["kernels"]] == [("gemm", 16_000), ("elementwise", 2500)]
    data = json.loads(profkit("kernels", trace, "--by", "range", "--format", "json").stdout)
    assert [(row["name"], row["total_ns"]) for row in data["kernels"]] == [
        ("step */backward", 12_500),
        ("step */forward", 6000),
    ]


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
    assert data["kernels"] == [dict(row) for row in result["kernels"]]


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
        (("--instance", "1"), 2, "--instance needs --range"),
        (("--range", "forward", "--instance", "9"), 2, "2 instances"),
        (("--per-instance",), 2, "--per-instance needs --range"),
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


def test_a_closed_pipe_is_no_error(trace: Path) -> None:
    command = f"{sys.executable} -m profkit kernels {trace} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_debug_shows_the_traceback(profkit: Run, tmp_path: Path) -> None:
    assert "Traceback" in profkit("--debug", "kernels", tmp_path / "none").stderr
