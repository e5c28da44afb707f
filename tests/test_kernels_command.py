"""`profkit kernels`: its table, its filters and groupings, what each format holds, and its picture."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.report.plots import MOST_BARS, plot_kernels
from tests.conftest import ROOT
from tests.golden import check_transcript
from tests.nsys_builder import NsysBuilder

Run = Callable[..., "subprocess.CompletedProcess[str]"]

BACKWARD = ("--range", "backward")
CALLS: tuple[tuple[str, ...], ...] = (
    (),  # the phases come first, then the whole capture
    ("--totals",),
    BACKWARD,
    (*BACKWARD, "--totals"),
    (*BACKWARD, "--format", "json"),
    # The first line, and the others added up in one; a CSV that is cut says so.
    (*BACKWARD, "--top", "1"),
    ("--top", "1", "--format", "json"),
    ("--top", "1", "--format", "csv"),
    ("--top", "2", "--format", "csv"),
    *((*BACKWARD, "--sort", key, "--format", "csv") for key in ("mean", "name")),
    # The rule behind each category; rules follow the order of the table.
    *(("--explain", "--format", style) for style in ("table", "markdown", "latex", "csv")),
    ("--explain", "--sort", "max", "--top", "1", "--format", "markdown"),
    ("--explain", "--sort", "mean", "--top", "1"),
    *(("--by", by, "--format", "csv") for by in ("category", "range", "module")),
    *(("--explain", "--by", by) for by in ("category", "range", "operator")),
    ("--by", "operator"),
    *((*BACKWARD, "--per-instance", "--format", style) for style in ("table", "markdown", "latex", "csv")),
    ("--csv-safe",),
)
OF_TWO_GPUS: tuple[tuple[str, ...], ...] = (
    (),  # phases leave out the warm-up, in any letter case
    # A part of the capture does not call itself the whole.
    *(("--device", "1"), ("--process", "100"), ("--exclude", "Warmup")),
    ("--range", "forward", "--device", "0", "--exclude", "Warmup"),
    ("--range", "forward", "--device", "0", "--exclude", "Warmup", "--format", "json"),
)


def test_each_way_of_asking_prints_what_it_did(trace: Path, two_devices: Path) -> None:
    check_transcript("kernels", [("kernels", trace, *words) for words in CALLS])
    check_transcript("kernels-of-two-gpus", [("kernels", two_devices, *words) for words in OF_TWO_GPUS])


def test_work_outside_the_steps_leaves_no_average_per_step(profkit: Run, tmp_path: Path) -> None:
    builder = NsysBuilder(("step 0", 0, 900))
    builder.kernel(200, 50)
    builder.kernel(1000, 30)
    path = builder.write(tmp_path / "t.sqlite")
    assert "whole capture: 2 kernels\nkernel time 80 ns" in profkit("kernels", path).stdout
    assert json.loads(profkit("kernels", path, "--format", "json").stdout)["steps"] is None
    assert json.loads(profkit("kernels", path, "--range", "step 0", "--format", "json").stdout)["steps"] == 1


def test_lines_can_be_the_operators_that_launched(profkit: Run) -> None:
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


def test_instances_start_from_the_beginning_of_the_capture(tmp_path: Path, profkit: Run) -> None:
    builder, epoch = NsysBuilder(), 1_700_000_000_000_000_000
    builder.ranges(("step", epoch, epoch + 900), ("forward", epoch + 500, epoch + 800))
    builder.kernel(epoch + 600, 50)
    path = builder.write(tmp_path / "t.sqlite")
    arguments = ("kernels", path, "--range", "forward", "--per-instance")
    assert "       0  500 ns       300 ns" in profkit(*arguments).stdout
    data = json.loads(profkit(*arguments, "--format", "json").stdout)
    assert data["per_instance"][0]["start_ns"] - data["first_ns"] == 500


def test_safe_csv_holds_no_formula(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for name in ("=1+1", "@SUM(1)", "-2", "+3", "plain"):
        builder.kernel(10, 5, name=name)
    path = builder.write(tmp_path / "t.sqlite")
    check_transcript(
        "kernels-formulas", [("kernels", path, "--format", "csv", *more) for more in ((), ("--csv-safe",))]
    )


# -- the picture -----------------------------------------------------------------------------------------------------


def test_a_plot_follows_the_order_of_the_table(trace: Path, tmp_path: Path, drawn: list[Any]) -> None:
    opened = read_trace(trace)
    plot_kernels(opened, opened.kernels(), tmp_path / "p.png", top=60, sort="name")
    assert [label.get_text()[:4] for label in drawn[-1].axes[0].get_yticklabels()] == ["sm80", "vect"]


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
