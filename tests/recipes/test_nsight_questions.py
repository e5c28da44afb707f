"""The answers against what the commands in them print, of a real GPU capture; failing captures; all of it on a CPU."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.errors import RunError, ToolError, UsageError
from recipes import nsight_questions
from recipes.nsight import capture, measure
from recipes.nsight.answers import change_shares, compare_shares, find_answers, name_top, pair_rows, summarize
from recipes.nsight.cells import GRIDS, INFERENCE, KINETO, NSYS, TRAIN, build_cells
from recipes.nsight.pictures import choose_context, rank_categories
from recipes.nsight.read import read_kernels, read_row
from recipes.nsight.report import report
from tests.conftest import ROOT
from tests.efficiency_runs import make_small_run

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


def _commands(sentence: str) -> list[list[str]]:
    return [shlex.split(each)[1:] for each in re.findall(r"`(profkit [^`]+)`", sentence)]


@pytest.fixture
def ask(small_run: Path) -> Callable[[Sequence[str]], dict[str, Any]]:
    """Return what a command of a sentence says, run in the directory of results, as it is meant."""

    def run(words: Sequence[str]) -> dict[str, Any]:
        command = [sys.executable, "-m", "profkit", *words, "--format", "json"]
        done = subprocess.run(
            command, cwd=small_run.parent.parent, capture_output=True, text=True, check=True, env=_environment()
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_kernels_of_a_gpu_are_those_that_the_commands_print(small_row: dict[str, Any], ask: Callable) -> None:
    (sentence,) = find_answers([small_row])["b"]
    forward, both = (ask(words) for words in _commands(sentence))
    first, first_of_both = forward["kernels"][0], both["kernels"][0]
    assert forward["kernel_time_ns"] == 17_849_383  # as traces/README.md has it
    assert both["kernel_time_ns"] == 59_325_701 - 5_662_929  # all of the capture but the optimizer
    assert (small_row["top_share"], small_row["top_calls"]) == (first["share"], first["count"] / 2)
    assert small_row["both_top_calls"] == first_of_both["count"] / 2
    assert small_row["same_kernel"] is (first["name"] == first_of_both["name"])
    assert f"5.092 ms of 8.925 ms a forward ({first['share']:.1%} of the kernel time" in sentence
    assert "84 calls a forward" in sentence
    assert first["count"] == 168
    others = [each for each in forward["kernels"] if each["category"] != "gemm" and each["share"] >= 0.01]
    (named,) = find_answers([small_row])["c"]
    assert f"with 1% or more of it there are {len(others)} kernels: `elementwise_kernel<" in named
    assert "(elementwise, 146 calls)" in named
    rest = sum(each["total_ns"] for each in forward["kernels"] if each["category"] != "gemm") / 17_849_383
    assert f"have {rest:.1%} of the kernel time under `step */forward`" in named
    categories, kernels = (ask(words) for words in _commands(named))
    assert 1 - next(each["share"] for each in categories["kernels"] if each["name"] == "gemm") == pytest.approx(rest)
    assert [each["name"] for each in kernels["kernels"] if each["category"] != "gemm"] == [
        each["name"] for each in others
    ]


@pytest.mark.parametrize(
    ("name", "total_ns"), [("small.nsys2023.sqlite", 17_272_595), ("small.nsys2025.sqlite", 17_223_554)]
)
def test_forward_of_other_captures_is_what_is_known_of_them(captures: Path, name: str, total_ns: int) -> None:
    found: dict[str, Any] = read_kernels(read_trace(captures / name), None)
    assert (found["forward"]["total_ns"], found["forward"]["count"]) == (total_ns, 980)
    assert found["forward_kernel_ms"] == total_ns / 2e6


def test_attention_and_times_are_those_that_the_commands_print(small_row: dict[str, Any], ask: Callable) -> None:
    answers = find_answers([small_row])
    (words,) = _commands(answers["e"][0])
    scores, softmax, values = ask(words)["parts"][:3]
    for column, part in (("scores", scores), ("softmax", softmax), ("values", values)):
        assert small_row[f"{column}_us"] == part["kernel_time_ns"] / 24 / 1e3
        assert small_row[f"{column}_flops"] == part["operations"] / 24
    assert "`computing softmax` takes 48.69 µs of kernel time" in answers["e"][0]
    assert "2.13 times the time of the scores, for 1/25.8 of their FLOPs" in answers["e"][0]
    (words,) = _commands(answers["a"][0])
    walls = {row["path"]: row["wall_ns"] for row in ask(words)["ranges"]}
    recorded = (walls["step 0/forward"] + walls["step 1/forward"]) / 2e6
    assert small_row["forward_recorded_ms"] == recorded
    assert (small_row["forward_python_ms"], small_row["forward_clean_ms"]) == (37.0, 25.0)
    assert small_row["forward_ratio"] == pytest.approx(recorded / 25)
    assert "37.48 ms by Nsight Systems (wall time of the range, median of 2 steps), 37.00 ms" in answers["a"][0]
    assert "25.00 ms by Python's clock without a profiler (median of 3 steps" in answers["a"][0]


def test_the_times_of_pythons_clock_are_those_that_the_command_prints(
    small_run: Path, small_row: dict[str, Any]
) -> None:
    (command,) = re.findall(r"`python -c \"(.+)\"`", find_answers([small_row])["a"][0])
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=small_run.parent.parent, capture_output=True, text=True, check=True, env=_environment(),
    )  # fmt: skip
    assert done.stdout.split() == [
        *("context", "phase", "clean_median", "profiled_median"),
        *("0", "None", "forward", "25000000.0", "37000000.0"),
        *("1", "None", "backward", "50000000.0", "62000000.0"),
        *("2", "None", "step", "90000000.0", "105000000.0"),
    ]


def test_a_forward_kernel_that_is_overtaken_is_told_with_its_place(small_row: dict[str, Any]) -> None:
    other = {**small_row["forward_backward"]["rows"][1], "name": "wgrad_kernel", "share": 0.3}
    both = {**small_row["forward_backward"], "rows": [other], "forwards_top": {"place": 2, "share": 0.198}, "tied": 2}
    said = name_top({**small_row, "same_kernel": False, "forward_backward": both})
    assert "it is another: `wgrad_kernel`" in said
    assert _commands(said)[1][-2:] == ["--top", "2"]
    assert "30.0% of the kernel time under `step *` without `optimizer`" in said
    assert "has 19.8% there, place 2" in said
    assert "(with as much time: 1 more)" in said


def test_kernels_that_read_alike_are_told_in_full(small_row: dict[str, Any]) -> None:
    first, second = (f"sm80_xmma_gemm_stage{number}_execute" for number in (3, 4))
    line = small_row["forward"]["rows"][0]
    forward = {**small_row["forward"], "rows": [{**line, "name": first}]}
    both = {**small_row["forward_backward"], "rows": [{**line, "name": second}]}
    said = name_top({**small_row, "same_kernel": False, "forward": forward, "forward_backward": both})
    assert f"`{first}` has the most kernel time of forward" in said
    assert f"it is another: `{second}`" in said


def _inference(row: dict[str, Any], **shares: float) -> dict[str, Any]:
    step = {**row["step"], "rows": [{"name": name, "share": share} for name, share in shares.items()]}
    return {**row, "passes": INFERENCE, "step": step, "gemm_step_share": shares["gemm"]}


def test_shares_are_compared_in_percentage_points(small_row: dict[str, Any]) -> None:
    training = _inference(small_row, gemm=0.6, optimizer=0.2, elementwise=0.15, reduction=0.05) | {"passes": TRAIN}
    inference = _inference(small_row, gemm=0.7, elementwise=0.2, softmax=0.0602, reduction=0.0498)
    assert pair_rows([training, inference, {**inference, "context": 128}]) == [(inference, training)]
    expected = {"optimizer": 20, "elementwise": -5, "softmax": -6.02, "gemm": -10, "reduction": 0.02}
    assert dict(change_shares(inference, training)) == pytest.approx(expected)
    said = compare_shares(inference, training)
    assert "have 70.0% of the kernel time of an inference" in said
    assert "and 60.0% of that of a training step" in said
    assert "-10.0 percentage points. Grew: optimizer +20.0; shrank: softmax -6.0, elementwise -5.0. `" in said
    assert rank_categories([(inference, training)]) == ["gemm", "softmax", "elementwise", "reduction", "optimizer"]
    (told,) = [line for line in summarize([inference, training]) if line.startswith("(d)")]
    assert "less in 1 of 1 cells; what grows most is optimizer" in told


def test_in_training_the_categories_are_those_that_the_command_prints(small_row: dict[str, Any], ask: Callable) -> None:
    inference = _inference(small_row, gemm=1.0)
    words = _commands(compare_shares(inference, small_row))[1]
    table = ask(words)
    assert table["by"] == "category"
    assert {row["name"]: row["share"] for row in small_row["step"]["rows"]} == {
        row["name"]: row["share"] for row in table["kernels"]
    }
    assert small_row["gemm_step_share"] == table["kernels"][0]["share"]


def test_a_capture_that_fails_its_self_check_answers_nothing(small_run: Path, tmp_path: Path) -> None:
    run = make_small_run(tmp_path)
    _write_times(run)
    (run / "log.txt").write_text("Errors occurred while processing the raw events\n")
    row = {**CELL, "made_by": "profkit run", **read_row(read_trace(run), run, None)}
    assert str(row["status"]).startswith("failed(self-check: the profiler's log says")
    assert not {"forward", "forward_ratio", "softmax_us"} & row.keys()
    assert "- small" not in report([row], {}).markdown


def test_ranges_alone_answer_for_times_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "trace.sqlite").write_bytes(TINY_NSYS.read_bytes())
    _write_times(tmp_path)
    row = {**CELL, "status": "ok", "made_by": "profkit run", **read_row(read_trace(tmp_path), tmp_path, None)}
    assert row["forward_recorded_ms"] > 0
    assert row["reason"] == "the profiler saw no GPU work: there are times of ranges alone"
    answers = find_answers([row])
    assert len(answers.pop("a")) == 1
    assert not any(answers.values())
    report([row], {})


def test_what_does_not_fit_after_all_is_left_out_and_the_rest_recorded(
    monkeypatch: pytest.MonkeyPatch, small_run: Path
) -> None:
    tried: list[tuple[int, ...]] = []

    def record(_cell: object, contexts: Sequence[int], *_rest: object) -> Path:
        tried.append(tuple(contexts))
        if 512 in contexts:
            raise capture.MemoryFull("the GPU's memory is full (2.00 GiB more did not fit)")
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
    ("reason", "error"), [("the memory is full; try", capture.MemoryFull), ("nsys left no report", RunError)]
)
def test_a_failed_run_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, error: type[Exception]
) -> None:
    def fail(argv: Sequence[str], *_rest: object) -> int:
        run = Path(argv[argv.index("-o") + 1])
        run.mkdir(parents=True)
        (run / "manifest.json").write_text(json.dumps({"status": "failed", "reason": reason}))
        return 1

    monkeypatch.setattr(capture, "run_child", fail)
    for _ in range(2):  # the second time in the place of what the first one left
        with pytest.raises(error, match=reason):
            capture.record(CELL, [256], "cuda", tmp_path)


def test_the_most_telling_cells_come_first() -> None:
    sizes, contexts = GRIDS["reports"]
    cells = build_cells(sizes, contexts, 4, 3, NSYS)
    assert len(cells) == 5 * 4 * 2
    captures = list(dict.fromkeys((cell["size"], cell["passes"]) for cell in cells))
    assert captures[:3] == [("small", TRAIN), ("small", INFERENCE), ("medium", TRAIN)]
    assert captures[-1] == ("2.7B", INFERENCE)


def test_the_profiler_is_the_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose = nsight_questions.choose_profiler
    monkeypatch.setattr(nsight_questions, "find_nsys", lambda _environment: None)
    assert (choose(None, "cuda"), choose(None, "cpu")) == (KINETO, KINETO)
    assert "nsys is not here: torch.profiler records instead" in capsys.readouterr().err
    with pytest.raises(ToolError, match="--profiler nsys: nsys is not here"):
        choose(NSYS, "cuda")
    with pytest.raises(UsageError, match="--device mps: neither"):
        choose(None, "mps")
    monkeypatch.setattr(nsight_questions, "find_nsys", lambda _environment: object())
    assert (choose(None, "cuda"), choose(NSYS, "cpu"), choose(KINETO, "cuda")) == (NSYS, NSYS, KINETO)


def test_pictures_are_of_the_context_that_most_have() -> None:
    assert choose_context([128, 256, 512, 128, 256, 512, 128, 256]) == 256
    assert choose_context([]) is None


def test_a_report_of_nothing_measured() -> None:
    cells = build_cells(["small"], [128], 4, 3, NSYS)
    said = report([{**cell, "status": "not run"} for cell in cells], {})
    assert said.markdown.count("Not measured.") == 6
    assert "| 128 |" not in said.markdown
    assert said.pictures.keys() == {"ratios.png", "shares.png"}


def test_what_a_capture_warns_of_is_told_once_with_its_name(small_row: dict[str, Any]) -> None:
    assert report([small_row], {}).markdown.endswith("## What the captures warn of\n\nNothing.")
    doubted = {**small_row, "recorder_warnings": ["the times vary widely"], "self_check_warnings": ["2 late kernels"]}
    text = report([doubted, {**doubted, "context": 512}], {}).markdown
    assert text.endswith("- `captures/small`: the times vary widely\n- `captures/small`: 2 late kernels")


def test_the_tables_show_what_a_cell_without_an_answer_is(small_row: dict[str, Any]) -> None:
    failed = {**CELL, "context": 512, "status": "failed(self-check: events are missing)"}
    other = {**small_row, "batch": 8, "top_calls": 99.0}
    text = report([small_row, failed, other], {}).markdown
    assert "## In short: batch 4, 2 steps recorded by Nsight Systems" in text
    assert "| 256 | 84 |\n| 512 | failed(self-check: events are missing) |" in text
    assert "(a) `forward` in training took 1.5 (small, context 256) times as long under Nsight Systems" in text
    assert "99" not in re.findall(r"Calls a forward.*?\n\n.*?\n\n", text, re.DOTALL)[0]


def _run(directory: Path, *arguments: str) -> list[dict[str, str]]:
    command = [sys.executable, "-m", "recipes.nsight_questions", "--device", "cpu", "-o", str(directory)]
    done = subprocess.run(
        [*command, "--batch", "2", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    with (directory / "nsight_questions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_recipe_on_a_cpu(tmp_path: Path) -> None:
    first = _run(tmp_path / "out", "--context", "8,16")
    assert [(row["context"], row["passes"], row["status"]) for row in first] == [
        (context, passes, "ok") for context in ("8", "16") for passes in ("train", "forward")
    ]
    assert {row["profiler"] for row in first} == {"kineto"}
    assert {row["top_calls"] for row in first} == {"15.0"}  # by hand: seven products a layer, two layers, the head
    assert {row["softmax_flops"] for row in first} == {"2560", "10240"}
    text = (tmp_path / "out" / "nsight_questions.md").read_text()
    assert "`aten::mm` has the most operator time of forward" in text
    assert "kernel time" not in text
    assert text.count("\n- tiny, context 8: ") == 4
    captures = sorted(path.name for path in (tmp_path / "out" / "captures").iterdir())
    assert captures == ["tiny-forward-kineto-2x8-16-2steps", "tiny-train-kineto-2x8-16-2steps"]

    again = _run(tmp_path / "out", "--context", "8,12,16")
    assert [row for row in again if row["context"] != "12"] == first
    assert len(list((tmp_path / "out" / "captures").iterdir())) == 4
    raw = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    assert {row["forward"]["range"] for row in raw if row["context"] == 12} == {"step */forward"}
    assert {row["forward"]["range"] for row in raw if row["context"] == 8} == {"context 8/step */forward"}
    assert {row["softmax_instances"] for row in raw} == {2 * 2}  # layers and steps of its own context


@pytest.mark.nsys
def test_the_recipe_under_nsys_on_a_cpu(tmp_path: Path) -> None:
    rows = _run(tmp_path / "out", "--context", "8,16", "--profiler", "nsys")
    assert {(row["profiler"], row["status"]) for row in rows} == {("nsys", "ok")}
    assert all(float(row["forward_recorded_ms"]) > 0 for row in rows)
    assert {row["top_kernel"] for row in rows} == {""}
    assert (
        "by Nsight Systems (wall time of the range, median of 2 steps)"
        in (tmp_path / "out" / "nsight_questions.md").read_text()
    )
    assert not list((tmp_path / "out").rglob("*.nsys-rep"))
