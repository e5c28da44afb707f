"""Nsight's questions: rows of a real GPU capture against what the commands print, doubtful ratios, a run on a CPU."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from profkit import read_trace
from profkit.errors import RunError, UsageError
from recipes import nsight_questions
from recipes.nsight import measure
from recipes.nsight.cells import KINETO, NSYS, TRAIN, build_cells, compare_times
from recipes.nsight.measure import ATTENTION, read_row
from recipes.nsight.report import report, share_without_optimizer, show_commands
from tests.conftest import ROOT, call_main
from tests.efficiency_runs import make_small_run
from tests.in_process import csv_rows, names_in

if TYPE_CHECKING:
    from tests.forked_scripts import Forks

TINY_NSYS = ROOT / "traces" / "tiny-train-cpu.nsys2023.sqlite"
MS = 1_000_000
CELL = {"size": "small", "context": 256, "passes": TRAIN, "batch": 4, "steps": 2, "profiler": NSYS}


def _write_times(run: Path) -> None:
    """Add to a run's manifest what the recipe reads of it: times of the two recorded steps and of three others."""
    clean = [{"forward_ns": forward * MS, "backward_ns": 50 * MS, "step_ns": 90 * MS} for forward in (20, 25, 40)]
    profiled = [{"forward_ns": 37 * MS, "backward_ns": 62 * MS, "step_ns": 105 * MS}] * 2
    path = run / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {"status": "complete"}
    manifest |= {"clean": {"steps": clean}, "profiled": {"steps": profiled}, "versions": {}, "warnings": []}
    path.write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("results") / "captures" / "small"
    run.mkdir(parents=True)
    _write_times(make_small_run(run))
    return run


@pytest.fixture(scope="module")
def small_row(small_run: Path) -> dict[str, Any]:
    return {**CELL, "status": "ok", "made_by": "profkit run", **read_row(read_trace(small_run), small_run, None)}


@pytest.fixture(scope="module")
def printed(small_run: Path) -> list[dict[str, Any]]:
    """Return what the report's commands print for the capture, as JSON."""
    found = []
    for command in show_commands(str(small_run), ""):
        done = call_main([*shlex.split(command)[1:], "--format", "json"])
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    return found


def section(text: str, letter: str) -> str:
    return text.split(f"## ({letter}) ")[1].split("\n## ", maxsplit=1)[0]


def test_the_kernels_of_a_row_are_those_that_the_commands_print(
    small_row: dict[str, Any], printed: list[dict[str, Any]]
) -> None:
    forward, both, categories, _ = printed
    assert forward["kernel_time_ns"] == 17_849_383  # as in traces/README.md
    assert both["kernel_time_ns"] == 59_325_701 - 5_662_929  # the whole capture but the optimizer
    first = forward["kernels"][0]
    assert (small_row["top_share"], small_row["top_calls"]) == (first["share"], 84)
    assert small_row["both_top_calls"] == both["kernels"][0]["count"] / 2
    assert small_row["same_kernel"] is (first["name"] == both["kernels"][0]["name"])
    shares = {row["name"]: row["share"] for row in categories["kernels"]}
    assert {row["name"]: row["share"] for row in small_row["step"]["rows"]} == shares
    assert small_row["gemm_step_share"] == shares["gemm"]
    optimizer = 5_662_929 / 59_325_701
    assert share_without_optimizer(small_row) == pytest.approx(shares["gemm"] / (1 - optimizer))


def test_the_times_of_a_row_are_those_that_the_command_prints(
    small_row: dict[str, Any], printed: list[dict[str, Any]]
) -> None:
    steps = printed[0]["per_instance"]
    recorded, kernels = (sum(step[key] for step in steps) / 2e6 for key in ("wall_ns", "kernel_time_ns"))
    assert (small_row["forward_recorded_ms"], small_row["forward_kernel_ms"]) == (recorded, kernels)
    ratio = compare_times(small_row, "forward")
    assert (ratio.value, ratio.busy) == (pytest.approx(recorded / 25), pytest.approx(kernels / 25))
    assert (small_row["forward_python_ms"], small_row["forward_clean_samples_ms"]) == (37, [20, 25, 40])
    assert "| training, forward | 256 | 1.50 (36%)\\*† |" in section(report([small_row], {}).markdown, "a")


def test_attention_is_what_the_command_prints(small_row: dict[str, Any], printed: list[dict[str, Any]]) -> None:
    parts = {row["name"]: row for row in printed[3]["ranges"]}
    for column, name in ATTENTION.items():
        part = parts[name]
        assert part["instances"] == 24  # of 12 layers in 2 steps
        assert small_row[f"{column}_us"] == part["kernel_time_ns"] / 24 / 1e3
        assert small_row[f"{column}_flops"] == (part["flops"] + part["other_flops"]) / 24
    assert small_row["softmax_flops"] == 5 * 4 * 12 * 256**2  # 5 per element of the scores, as the text says
    assert small_row["scores_flops"] - small_row["values_flops"] == 4 * 12 * 256**2  # the division
    assert "| small | 256 | 22.9 | 48.7 | 21.3 | 2.13 |" in section(report([small_row], {}).markdown, "e")


def test_a_ratio_of_which_the_kernel_time_is_unknown_has_a_dash(small_row: dict[str, Any]) -> None:
    row = {**small_row, "forward_kernel_ms": None}
    assert "| training, forward | 256 | 1.50 (—)† |" in report([row], {}).markdown


def test_a_capture_that_fails_its_self_check_gives_no_figures(small_run: Path, tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    _write_times(run)
    (run / "log.txt").write_text("Errors occurred while processing the raw events\n")
    row = {**CELL, "made_by": "profkit run", **read_row(read_trace(run), run, None)}
    assert str(row["status"]).startswith("failed(self-check: the profiler's log says")
    assert not {"forward", "forward_ratio", "softmax_us"} & row.keys()
    assert report([row], {}).markdown == "Not measured."


def test_ranges_without_gpu_work_give_only_times(tmp_path: Path) -> None:
    (tmp_path / "trace.sqlite").write_bytes(TINY_NSYS.read_bytes())
    _write_times(tmp_path)
    row = {**CELL, "status": "ok", "made_by": "profkit run", **read_row(read_trace(tmp_path), tmp_path, None)}
    assert row["forward_recorded_ms"] > 0
    assert row["reason"] == "the profiler saw no GPU work: only the times of ranges are known"
    text = report([row], {}).markdown
    assert "| training, forward | 256 | " in section(text, "a")
    assert [section(text, letter).endswith("Not measured.\n") for letter in "bcde"] == [True] * 4


def test_a_context_that_does_not_fit_is_left_out_and_the_others_are_recorded(
    monkeypatch: pytest.MonkeyPatch, small_run: Path
) -> None:
    tried: list[tuple[int, ...]] = []

    def record(_cell: object, contexts: Sequence[int], *_rest: object) -> Path:
        tried.append(tuple(contexts))
        if 512 in contexts:
            raise measure.MemoryFull("the GPU's memory is full (2.00 GiB more did not fit)")
        return small_run

    monkeypatch.setattr(measure, "record", record)
    cells = build_cells(["small"], [256, 512], 4, 2, NSYS)[:2]
    fits, does_not = measure.measure_cells(cells, "cuda", small_run.parent)
    assert tried == [(256, 512), (256,)]
    assert (fits["status"], does_not["status"]) == ("ok", "OOM(step)")
    assert does_not["reason"] == "the GPU's memory is full (2.00 GiB more did not fit)"
    assert fits["top_calls"] == 84
    assert fits["made_by"] == (
        "profkit run --nsys --no-keep-report --context 256 --device cuda --passes train --batch 4 --steps 2 model.small"
        " -o captures/small"
    )


@pytest.mark.parametrize(
    ("reason", "error"), [("the memory is full; try", measure.MemoryFull), ("nsys left no report", RunError)]
)
def test_a_failed_run_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, error: type[Exception]
) -> None:
    def fail(argv: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        run = Path(argv[argv.index("-o") + 1])
        run.mkdir(parents=True)
        (run / "manifest.json").write_text(json.dumps({"status": "failed", "reason": reason}))
        return subprocess.CompletedProcess(argv, 1, "some output")

    monkeypatch.setattr(subprocess, "run", fail)
    for _ in range(2):  # The second run replaces what the first one left.
        with pytest.raises(error, match=reason):
            measure.record(CELL, [256], "cuda", tmp_path)


def test_without_nsys_torch_profiler_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose = nsight_questions.choose_profiler
    monkeypatch.delenv("NSYS", raising=False)
    monkeypatch.setattr(nsight_questions, "which", lambda _name: None)
    assert (choose(None, "cuda"), choose(None, "cpu"), choose(NSYS, "cuda")) == (KINETO, KINETO, NSYS)
    assert "no nsys on PATH nor in $NSYS; torch.profiler records instead" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--device mps: neither"):
        choose(None, "mps")
    monkeypatch.setattr(nsight_questions, "which", lambda _name: "/usr/bin/nsys")
    assert (choose(None, "cuda"), choose(NSYS, "cpu"), choose(KINETO, "cuda")) == (NSYS, NSYS, KINETO)
    monkeypatch.setattr(nsight_questions, "which", lambda _name: None)
    monkeypatch.setenv("NSYS", "/opt/nsys")
    assert choose(None, "cuda") == NSYS


def test_a_warning_about_a_capture_is_shown_once_with_its_name(small_row: dict[str, Any]) -> None:
    assert "## Warnings" not in report([small_row], {}).markdown
    doubted = {**small_row, "recorder_warnings": ["the times vary widely"], "self_check_warnings": ["2 late kernels"]}
    text = report([doubted, {**doubted, "context": 512}], {}).markdown
    assert text.endswith("- `captures/small`: the times vary widely\n- `captures/small`: 2 late kernels")


def test_the_tables_show_why_a_cell_has_no_figure_and_leave_other_settings_out(small_row: dict[str, Any]) -> None:
    failed = {**CELL, "context": 512, "status": "failed(self-check: events are missing)"}
    other = {**small_row, "batch": 8, "top_calls": 99.0}
    text = report([small_row, failed, other], {}).markdown
    assert text.startswith("Batch 4, 2 steps recorded by Nsight Systems.\n\n1 cells of another batch")
    assert "| training, forward | 512 | failed(self-check: events are missing) |" in text
    assert section(text, "b").count("| small |") == 1


def _run(directory: Path, *arguments: str) -> list[dict[str, str]]:
    command = ["--device", "cpu", "-o", str(directory), "--batch", "2", *arguments]
    assert nsight_questions.main.main(command, standalone_mode=False) == 0
    return csv_rows(directory / "nsight_questions.csv")


@pytest.fixture
def in_forks(in_this_process: None, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record by `profkit run` as a fork, whose target is one too unless Nsight Systems starts it."""

    def record(words: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        return forks.run(words, tmp_path)

    monkeypatch.setattr(measure, "subprocess", SimpleNamespace(run=record, PIPE=None, STDOUT=None))


@pytest.mark.slow
@pytest.mark.usefixtures("in_forks")
def test_a_run_on_a_cpu_records_each_group_of_contexts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _run(tmp_path / "out", "--context", "8,16")
    assert [(row["context"], row["passes"], row["status"]) for row in first] == [
        (context, passes, "ok") for context in ("8", "16") for passes in ("train", "forward")
    ]
    assert {row["profiler"] for row in first} == {"kineto"}
    # By hand: seven products per layer, two layers, the head. Which operator takes the most time hangs on the machine.
    assert {row["top_calls"] for row in first if row["top_kernel"] == "aten::mm"} <= {"15.0"}
    forward = read_trace(tmp_path / "out" / "captures" / "tiny-train-kineto-2x8-16-2steps").kernels(
        "context 8/step */forward"
    )
    assert {row.name: row.count for row in forward.kernels}["aten::mm"] == 15 * 2
    assert {row["softmax_flops"] for row in first} == {""}  # counted on a GPU alone
    text = (tmp_path / "out" / "nsight_questions.md").read_text()
    assert "Recorded on a CPU: kernels are operators here" in text
    assert f"| tiny | 8 | {first[0]['top_kernel']} |" in text
    captures = names_in(tmp_path / "out" / "captures")
    assert captures == ["tiny-forward-kineto-2x8-16-2steps", "tiny-train-kineto-2x8-16-2steps"]
    monkeypatch.setattr(measure, "record", lambda *_: pytest.fail("recorded again"))
    assert _run(tmp_path / "out", "--context", "8,16") == first
    raw = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    assert {row["forward"]["range"] for row in raw if row["context"] == 8} == {"context 8/step */forward"}
    assert {row["softmax_instances"] for row in raw} == {2 * 2}  # layers and steps of its own context


@pytest.mark.nsys
@pytest.mark.usefixtures("in_forks")
def test_a_run_under_nsys_on_a_cpu_has_times_and_no_kernels(tmp_path: Path) -> None:
    rows = _run(tmp_path / "out", "--context", "8,16", "--profiler", "nsys")
    assert {(row["profiler"], row["status"]) for row in rows} == {("nsys", "ok")}
    assert all(float(row["forward_recorded_ms"]) > 0 for row in rows)
    assert {row["top_kernel"] for row in rows} == {""}
    assert "recorded by Nsight Systems." in (tmp_path / "out" / "nsight_questions.md").read_text()
    assert not list((tmp_path / "out").rglob("*.nsys-rep"))
