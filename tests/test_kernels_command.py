"""`profkit kernels`: its table, its filters and groupings, what each format holds, and its picture."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.report.plots import MOST_BARS, plot_kernels
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


def test_the_table_of_a_range_is_per_step_and_fits_80_columns(profkit: Run, trace: Path) -> None:
    done = profkit("kernels", trace, "--range", "backward")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == GOLDEN_RANGE
    assert max(map(len, done.stdout.splitlines())) <= 80


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
        "waiting_ns": None,
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


def test_without_a_range_it_is_the_whole_capture_and_the_phases_come_first(profkit: Run, trace: Path) -> None:
    data = json.loads(profkit("kernels", trace, "--format", "json").stdout)
    assert (data["range"], data["range_evidence"], data["kernel_time_ns"]) == (None, None, 18_500)
    assert data["wall_ns"] == 390_000
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


def test_top_adds_up_the_other_lines_and_sort_orders_them(profkit: Run, trace: Path) -> None:
    assert "(1 more)" in profkit("kernels", trace, "--range", "backward", "--top", "1").stdout
    data = json.loads(profkit("kernels", trace, "--top", "1", "--format", "json").stdout)
    assert data["kernels"][0]["total_ns"] + data["rest"]["total_ns"] == data["kernel_time_ns"]
    assert data["kernels"][0]["count"] + data["rest"]["count"] == data["kernel_count"]
    assert data["rest"]["name"] == "(1 more)"
    assert json.loads(profkit("kernels", trace, "--format", "json").stdout)["rest"] is None
    assert profkit("kernels", trace, "--format", "csv", "--top", "2").stderr == ""
    cut = profkit("kernels", trace, "--format", "csv", "--top", "1")
    assert cut.stderr == "warning: --top 1: the CSV holds 1 of 2 lines\n"
    ordered = ("kernels", trace, "--range", "backward", "--format", "csv", "--sort")
    assert profkit(*ordered, "mean").stdout.splitlines()[1].startswith("sm80")
    assert profkit(*ordered, "name").stdout.splitlines()[2].startswith('"void')


def test_every_format_holds_the_rules_that_are_asked_for(profkit: Run, trace: Path) -> None:
    asked = ("kernels", trace, "--explain", "--format")
    rules = [row["rule"] for row in json.loads(profkit(*asked, "json").stdout)["kernels"]]
    assert rules == [row["rule"] for row in csv.DictReader(io.StringIO(profkit(*asked, "csv").stdout))]
    assert rules[0].startswith("cublas")
    for style in ("table", "markdown", "latex"):
        assert rules[0][:6] in profkit(*asked, style).stdout


@pytest.mark.parametrize("by", ["category", "range", "operator"])
def test_explain_is_refused_for_lines_that_are_no_kernels(profkit: Run, trace: Path, by: str) -> None:
    assert profkit("kernels", trace, "--explain", "--by", by).returncode == 2


def test_rules_and_plot_follow_the_order_of_the_table(
    profkit: Run, trace: Path, tmp_path: Path, drawn: list[Any]
) -> None:
    text = profkit("kernels", trace, "--explain", "--sort", "max", "--top", "1", "--format", "markdown").stdout
    assert "| gemm |" in text.partition("Why each")[2]
    text = profkit("kernels", trace, "--explain", "--sort", "mean", "--top", "1").stdout
    assert "elementwise" not in text.partition("Why each")[2]
    opened = read_trace(trace)
    plot_kernels(opened, opened.kernels(), tmp_path / "p.png", top=60, sort="name")
    assert [label.get_text()[:4] for label in drawn[-1].axes[0].get_yticklabels()] == ["sm80", "vect"]


def test_lines_can_be_categories_or_ranges(profkit: Run, trace: Path) -> None:
    data = json.loads(profkit("kernels", trace, "--by", "category", "--format", "json").stdout)
    assert [(row["name"], row["total_ns"]) for row in data["kernels"]] == [("gemm", 16_000), ("elementwise", 2500)]
    data = json.loads(profkit("kernels", trace, "--by", "range", "--format", "json").stdout)
    assert [(row["name"], row["total_ns"]) for row in data["kernels"]] == [
        ("step */backward", 12_500),
        ("step */forward", 6000),
    ]


def test_lines_can_be_the_operators_that_launched(profkit: Run, trace: Path) -> None:
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
    assert "does not say which operators launched its kernels; record CPU operators too" in done.stderr


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


def test_the_phases_leave_out_warmup_in_any_letter_case(profkit: Run, two_devices: Path) -> None:
    text = profkit("kernels", two_devices).stdout
    assert text.startswith("Phases, sums over the capture, without warmup; 100 % = ")
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("forward")] == [["forward", "1"]]


def test_every_format_holds_the_instances(profkit: Run, trace: Path) -> None:
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


def test_safe_csv_holds_no_formula(profkit: Run, tmp_path: Path) -> None:
    builder = NsysBuilder()
    names = ["=1+1", "@SUM(1)", "-2", "+3", "plain"]
    for name in names:
        builder.kernel(10, 5, name=name)
    path = builder.write(tmp_path / "t.sqlite")
    plain, safe = (
        {row["name"] for row in csv.DictReader(io.StringIO(profkit("kernels", path, "--format", "csv", *more).stdout))}
        for more in ([], ["--csv-safe"])
    )
    assert plain == set(names)
    assert safe == {"'=1+1", "'@SUM(1)", "'-2", "'+3", "plain"}
    assert profkit("kernels", path, "--csv-safe").returncode == 2


# -- the picture -----------------------------------------------------------------------------------------------------


def test_a_plot_is_a_picture_and_only_a_png(profkit: Run, trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "k.png"
    assert profkit("kernels", trace, "--plot", picture).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]
    done = profkit("kernels", trace, "--plot", tmp_path / "k.jpg")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_plot_of_odd_names_gives_no_warning(profkit: Run, oddly_named: Path, tmp_path: Path) -> None:
    done = profkit("kernels", oddly_named, "--range", "forward*", "--plot", tmp_path / "p.png")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plot_of_a_lossy_capture_shows_the_verdict(captures: Path, tmp_path: Path, drawn: list[Any]) -> None:
    opened = read_trace(captures / "lossy.nsys2023.sqlite")
    plot_kernels(opened, opened.kernels(), tmp_path / "p.png", top=5, totals=True)
    figure = drawn[-1]
    assert figure.get_suptitle().startswith("SELF-CHECK FAILED: do not trust this capture's totals\n")


def test_a_plot_has_60_bars_at_most_and_one_for_the_rest(tmp_path: Path, drawn: list[Any]) -> None:
    builder = NsysBuilder()
    for number in range(200):
        builder.kernel(10 * number, 5 + number, name=f"k{number}", device=0)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    plot_kernels(opened, opened.kernels(device=0), tmp_path / "p.png", top=3000)
    figure = drawn[-1]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert (len(labels), labels[-1]) == (MOST_BARS + 1, "(140 more)")
    assert figure.get_suptitle().startswith("t.sqlite\npart of the capture, device 0 only")
    header = (tmp_path / "p.png").read_bytes()[16:24]
    assert int.from_bytes(header[4:], "big") < 4000


def test_bars_are_averages_per_step_under_a_title_of_run_and_gpu(trace: Path, tmp_path: Path, drawn: list[Any]) -> None:
    opened = read_trace(trace)
    result = opened.kernels()
    assert result.steps == 2
    plot_kernels(opened, result, tmp_path / "p.png", top=5)
    figure = drawn[-1]
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert sum(widths) * 1e6 == pytest.approx(result.total_ns / 2)
    assert figure.axes[0].get_xlabel() == "kernel time, ms per step"
    assert figure.get_suptitle().startswith("t.sqlite\nwhole capture: 4 kernels per step (2 steps), 9.250 µs")
    plot_kernels(opened, result, tmp_path / "p.png", top=5, totals=True)
    figure = drawn[-1]
    assert sum(bar.get_width() for bar in figure.axes[0].patches) * 1e6 == pytest.approx(result.total_ns)


def test_waiting_in_a_collective_is_drawn_apart(tmp_path: Path, drawn: list[Any]) -> None:
    builder = NsysBuilder()
    for device, start in ((0, 1000), (1, 1600)):
        builder.kernel(100, 2000 - start, name="ncclDevKernel_AllReduce", pid=100 + device, device=device, start=start)
        builder.kernel(50, 300, name="gemm", pid=100 + device, device=device, start=200)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    result = opened.kernels()
    assert {row.name: row.waiting_ns for row in result.kernels} == {"ncclDevKernel_AllReduce": 600, "gemm": None}
    plot_kernels(opened, result, tmp_path / "p.png", top=5, totals=True)
    figure = drawn[-1]
    assert [round(bar.get_width() * 1e6) for bar in figure.axes[0].patches] == [800, 600, 600, 0]
    assert "1.400 µs (600 ns waiting)" in figure.axes[0].texts[0].get_text()
    assert "waiting for another rank" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_no_text_leaves_the_axes(tmp_path: Path, drawn: list[Any]) -> None:
    builder = NsysBuilder()
    for number in range(3):
        builder.kernel(10_000 * number, 9_999, name=f"k{number}" + "x" * 90)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    plot_kernels(opened, opened.kernels(), tmp_path / "p.png", top=5, totals=True)
    figure = drawn[-1]
    figure.draw_without_rendering()
    (axes,) = figure.axes
    right = axes.get_window_extent().x1
    assert axes.texts
    assert all(text.get_window_extent().x1 <= right for text in axes.texts)
