"""`profkit ranges`: the tree, its notes and its formats."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nsys_builder import NsysBuilder

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_json_holds_every_range_and_the_table_one_line_a_kind(profkit: Run, trace: Path) -> None:
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


def test_every_format_says_what_100_percent_is_and_names_domains(profkit: Run, two_devices: Path) -> None:
    whole = "100 % = 150 ns of kernels in this capture"
    for style in ("table", "markdown", "latex"):
        assert whole in profkit("ranges", two_devices, "--format", style).stdout
    rows = list(csv.DictReader(io.StringIO(profkit("ranges", two_devices, "--format", "csv").stdout)))
    assert [(row["path"], row["domain"]) for row in rows if row["domain"]] == [("forward/all_reduce", "NCCL")]
    assert "| forward/all_reduce | NCCL | 1 |" in profkit("ranges", two_devices, "--format", "markdown").stdout
    assert "all_reduce [NCCL]" in profkit("ranges", two_devices).stdout
    assert {row["path"]: float(row["share_of_capture"]) for row in rows}["forward"] == pytest.approx(100 / 150)


def test_an_asterisk_is_explained_only_where_there_is_one(profkit: Run, trace: Path, two_devices: Path) -> None:
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


def test_a_capture_without_kernels_shows_python_times_and_one_warning(profkit: Run, tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("forward", 0, 10_000)
    path = builder.write(tmp_path / "t.sqlite")
    done = profkit("ranges", path)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "10.00 µs" in done.stdout
    assert profkit("kernels", path).returncode == 1


def test_operators_are_not_called_kernels_and_sums_are_called_so(profkit: Run) -> None:
    trace = Path(__file__).parent.parent / "traces" / "tiny-train-cpu.kineto.json.gz"
    table, totals = profkit("ranges", str(trace)).stdout, profkit("ranges", str(trace), "--totals").stdout
    head = table.splitlines()[0]
    assert [word in head for word in ("self time", "operators", "kernel", "GPU")] == [True, True, False, False]
    assert "averages per step" in table
    assert "sums over the recording" not in table
    assert "sums over the recording" in totals
