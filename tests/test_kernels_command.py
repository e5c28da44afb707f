"""`profkit kernels`: its table, its filters and groupings, and what each format holds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from profkit import read_trace
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
    builder = NsysBuilder()
    builder.range("step 0", 0, 900)
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
    builder.range("step", epoch, epoch + 900)
    builder.range("forward", epoch + 500, epoch + 800)
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
