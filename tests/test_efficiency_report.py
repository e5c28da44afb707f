"""How `profkit efficiency` prints its result: in every format, explained, with attention's parts, with host waits."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest

from profkit import read_trace
from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.report.commands.efficiency import build_efficiency_document
from profkit.report.document import FORMATS, Lines
from tests.efficiency_runs import SMALL, make_small_run
from tests.in_process import run_command
from tests.nsys_builder import NsysBuilder

pytestmark = pytest.mark.usefixtures("read_once")


def test_json_holds_everything_and_csv_the_ranges() -> None:
    data = json.loads(run_command("efficiency", SMALL, "--format", "json").stdout)
    forward = next(row for row in data["ranges"] if row["path"] == "step */forward")
    gpu = forward["gpu"]
    assert gpu["idle_ns"] == gpu["launching_ns"] + gpu["synchronising_ns"] + gpu["outside_cuda_ns"]
    assert forward["least_bytes"] is None
    assert data["self_check"]["passed"]
    assert [step["name"] for step in data["steps"]] == ["step 0", "step 1"]
    lines = list(csv.DictReader(io.StringIO(run_command("efficiency", SMALL, "--format", "csv").stdout)))
    assert [line["path"] for line in lines] == [row["path"] for row in data["ranges"]]
    assert lines[1]["launching_ns"] == str(gpu["launching_ns"])
    assert lines[1]["least_bytes"] == ""


def test_the_table_fits_a_screen_and_a_failed_capture_says_so_first(captures: Path) -> None:
    for path in (SMALL, captures / "ddp.nsys2025.sqlite"):
        lines = run_command("efficiency", path, "--range", "step *").stdout.splitlines()
        tables = [line for line in lines if line.startswith(("─", "step", " "))]
        assert len(tables) > 10
        assert max(map(len, tables)) <= 80
    done = run_command("efficiency", captures / "lossy.nsys2023.sqlite", "--strict")
    assert done.returncode == 3
    assert done.stdout.startswith("SELF-CHECK FAILED")


def test_people_read_averages_per_step_and_totals_on_request() -> None:
    averages = run_command("efficiency", SMALL).stdout
    assert re.search(r"^ forward +1 +8.925 ms ", averages, re.M)
    assert "Times and counts are averages over 2 steps." in averages
    totals = run_command("efficiency", SMALL, "--totals").stdout
    assert re.search(r"^ forward +2 +17.85 ms ", totals, re.M)
    assert "Times and counts are sums over the recording." in totals


def test_range_shows_a_part_of_the_tree() -> None:
    done = run_command("efficiency", SMALL, "--range", "attention", "--format", "csv")
    paths = [line["path"] for line in csv.DictReader(io.StringIO(done.stdout))]
    assert paths[0] == "step */forward/layer */attention"
    assert len(paths) == 5
    assert run_command("efficiency", SMALL, "--range", "atention").returncode == 2


def test_every_range_is_explained_with_numbers_that_add_up() -> None:
    document = build_efficiency_document(read_trace(SMALL).efficiency(dtype="fp32"), (), explain=True)
    blocks = {part.title: list(part.lines) for part in document.parts if isinstance(part, Lines) and part.title}
    assert len(blocks) == 12
    forward = blocks["step */forward: limited by kernel launches"]
    assert "514,641,100,800 FLOPs / 17,849,383 = 28.83 TFLOP/s; at the peak they take 7,681,210" in forward
    sums = [line for lines in blocks.values() for line in lines if re.match(r"(on the GPU|idle) [\d,]+ = ", line)]
    assert len(sums) == 2 * 12
    for line in sums:
        whole, parts = line.split(" = ")
        assert _number(whole.split()[-1]) == sum(_number(part.split()[-1]) for part in parts.split(" + "))


@pytest.mark.parametrize("style", FORMATS)
def test_every_format_but_csv_explains(style: str) -> None:
    done = run_command("efficiency", SMALL, "--range", "forward", "--explain", "--format", style)
    if style == "csv":
        assert done.returncode == 2
    elif style == "json":
        assert "idle while Python prepares kernels" in json.loads(done.stdout)["ranges"][0]["rule"]
    else:
        assert "168 launches, GPU busy for 9,403,897" in done.stdout
        assert "limited by kernel launches" in done.stdout


def _measure(folder: Path, range: str | None = None, *, numbered: bool = False) -> EfficiencyResult:
    """Two steps of 10 ms: in layer 0 the GPU is idle while the host launches, in the optimizer outside CUDA."""
    builder = NsysBuilder()
    for step in (0, 1):
        at = 100_000_000 * step
        builder.range(f"step {step}", at, at + 10_000_000)
        builder.range("forward", at, at + 6_000_000)
        builder.range("layer 0", at, at + 3_000_000)
        builder.call(at, name="cudaMalloc_v3020", duration=1_150_000 + 50_000 * step)
        builder.kernel(at + 1_210_000 + 50_000 * step, 1_700_000, start=at + 1_300_000)
        builder.range("layer 1", at + 3_000_000, at + 6_000_000)
        builder.kernel(at + 3_010_000, 2_950_000, start=at + 3_020_000)
        builder.range("optimizer", at + 6_000_000, at + 10_000_000)
        builder.kernel(at + 6_010_000, 2_200_000, start=at + 6_020_000)
        builder.kernel(at + 9_900_000, 90_000, start=at + 9_910_000)
    trace = builder.write(folder / f"{range}.sqlite")
    return read_trace(trace).efficiency(range, numbered=numbered)


def test_the_longest_wait_is_named_first_and_ranges_within_a_named_one_are_left_out(tmp_path: Path) -> None:
    result = _measure(tmp_path)
    shares = {row.name: row.launching_share for row in result.ranges}
    assert shares["layer *"] == pytest.approx(0.206, abs=0.001), "forward, which lies around it, is named"
    assert _also_idle(result) == ["optimizer 42.7% (Python), forward 20.6% (kernel launches)"]


def test_ranges_of_one_name_are_named_by_the_shortest_path_that_no_other_has(tmp_path: Path) -> None:
    assert _also_idle(_measure(tmp_path, "layer 0", numbered=True)) == [
        "step 1/forward/layer 0 42.0% (kernel launches), step 0/forward/layer 0 40.3% (kernel launches)"
    ]
    assert _also_idle(_measure(tmp_path, "step 1", numbered=True)) == [
        "optimizer 42.7% (Python), forward 21.0% (kernel launches)"
    ]


def test_nothing_is_named_if_nothing_waits(tmp_path: Path) -> None:
    assert _also_idle(_measure(tmp_path, "layer 1")) == []


def _also_idle(result: EfficiencyResult) -> list[str]:
    """Return the line on host waits, if there is one, without its first words."""
    notes = build_efficiency_document(result, ()).parts[-1]
    assert isinstance(notes, Lines)
    start = "Also idle for more than 20 % for one reason: "
    return [line.removeprefix(start) for line in notes.lines if line.startswith(start)]


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def test_where_no_step_was_counted_the_table_and_the_summary_say_why(tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    for name in ("work.json", "trace.sqlite"):
        (run / name).unlink()
    shutil.copyfile(
        SMALL.with_name("small-train.kineto.json.gz"), run / "trace.json.gz"
    )  # whose ranges have no payload
    reason = "compiled code needs --flops"
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"processes": [{"uncounted": reason}]}))
    assert f"FLOPs and % of peak are unknown: {reason}." in " ".join(run_command("efficiency", run).stdout.split())
    assert f"of kernel time (% of peak: {reason})" in " ".join(run_command("summary", run).stdout.split())
    (run / "manifest.json").write_text(json.dumps(manifest))
    shown = " ".join(run_command("efficiency", run).stdout.split())
    assert "this run counted none; `profkit run` does so unless --no-flops is given." in shown
    assert "% of peak" not in run_command("summary", run).stdout, "of an older run the summary says nothing"
