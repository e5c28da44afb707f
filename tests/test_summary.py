"""The summary: its figures are those of the other commands, it fits a screen, and it says what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.analysis.causes.advice import Advice, AdviceResult, find_advice
from profkit.analysis.causes.evidence import Interval, SourceLine
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import StepUse, Summary
from profkit.analysis.time_account.steps import measured_ranges
from profkit.analysis.tree.modules import ModuleTime, find_costliest, time_modules
from profkit.reading import open_capture
from profkit.report import document as document_module
from profkit.report.commands.summary import build_summary_document
from profkit.report.document import render
from profkit.report.units import format_share
from profkit.run.lines import LineSteps, RunLines, write_lines
from tests.captures import capture
from tests.conftest import ROOT
from tests.efficiency_runs import SMALL, make_small_run, make_timed_run
from tests.golden import check_transcript
from tests.in_process import manifest_of, run_command
from tests.memory_captures import Training
from tests.nsys_builder import NsysBuilder

pytestmark = pytest.mark.usefixtures("read_once")

SNAPSHOT = ROOT / "traces" / "small-train.snapshot.pickle.gz"


def _summary(path: Path) -> Summary:
    return summarize_capture(open_capture(path))


def _json(*words: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_command(*words, "--format", "json").stdout)
    return found


def _run_of(folder: Path, **facts: object) -> Path:
    """Make a run of two steps, whose manifest also holds these."""
    folder.mkdir(exist_ok=True)
    run = make_timed_run(folder)
    manifest = manifest_of(run)
    (run / "manifest.json").write_text(json.dumps(manifest | facts))
    return run


def _lines(summary: Summary, monkeypatch: pytest.MonkeyPatch, width: int) -> dict[str, str]:
    """Return label → its whole text with ``--all``, on a screen of this width; the answer and the head under ''."""
    monkeypatch.setattr(document_module, "screen_width", lambda: width)
    advice = find_advice(open_capture(Path(summary.run)), summary)
    text = render(build_summary_document(summary, advice, with_all=True), "table")
    assert max(map(len, text.splitlines())) <= width
    found, label = {"": ""}, ""
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        is_label = line[:1].isupper() and rest.startswith(" ")
        label = word if is_label else label
        found[label] = f"{found.get(label, '')} {(rest if is_label else line).strip()}".strip()
    return found


def test_each_capture_and_way_of_asking_prints_what_it_did(tmp_path: Path) -> None:
    """Of runs, traces and a snapshot: what failed, was warned of or was not recorded, and what is known of TF32."""
    runs = {
        "timed": {},
        "failed": {"status": "failed", "exit_status": 7},
        "warned": {"warnings": ["GPU 0's power cap held its clocks down"]},
        "older": {"argv": ["python", "train.py", "--lr", "1"], "clean": None},
        "tf32-in-convolutions": {"conditions": {"cudnn_allow_tf32": True}, "workload": {"dtype": "fp32"}},
    }
    (tmp_path / "small").mkdir()
    named = [make_small_run(tmp_path / "small"), *(_run_of(tmp_path / name, **facts) for name, facts in runs.items())]
    # In bf16 products nothing was counted; a run with lines lacks none; of a failed one nothing may be left.
    work = json.loads((named[-1] / "work.json").read_text())
    (named[-1] / "work.json").write_text(json.dumps({**work, "dtype": "tf32"}))
    looked = ({"step_ns": 1_000_000},) * 3
    with_lines = _run_of(tmp_path / "with-lines", clean={"steps": list(looked)}, argv=["python", "train.py"])
    write_lines(with_lines / "lines.jsonl", RunLines(LineSteps(1_000_000, looked), ()))
    nothing = _run_of(tmp_path / "failed-early", **runs["failed"])
    (nothing / "trace.sqlite").unlink()
    (tmp_path / "memory").mkdir()
    memory = Training().write_run(tmp_path / "memory")
    traces = [ROOT / "traces" / f"tiny-train-cpu.{kind}" for kind in ("kineto.json.gz", "nsys2023.sqlite")]
    shown = [(path, "--all") for path in (*named, with_lines, nothing, memory, *traces, SNAPSHOT)]
    exact = [(SMALL, "--format", "markdown"), (SMALL, "--format", "csv"), (named[1], "--format", "json")]
    calls = [*shown, (SMALL,), *exact]
    check_transcript("summary", [("summary", *words) for words in calls])
    at_the_end = render(build_summary_document(_summary(tmp_path / "warned"), AdviceResult(), for_run=True), "table")
    assert "power cap" not in at_the_end, "profkit run has just printed it"


@pytest.mark.parametrize(
    ("conditions", "shown"),
    [
        ({"cudnn_conv_fp32_precision": "ieee", "cudnn_allow_tf32": True}, "TF32 off"),
        ({"cudnn_allow_tf32": False}, "TF32 off"),
        ({}, "TF32 off in matrix products"),
    ],
)
def test_tf32_is_said_of_matrix_products_and_of_convolutions(
    tmp_path: Path, conditions: dict[str, object], shown: str
) -> None:
    run = _run_of(tmp_path, conditions=conditions, workload={"dtype": "fp32"})
    (run / "work.json").unlink()
    assert _summary(run).head.precision == f"fp32, {shown}"


def test_the_module_named_is_the_deepest_that_holds_most_of_the_one_around_it() -> None:
    """Of 100 ns the blocks hold 70, of these mlp 45, of these fc1 20 and fc2 20: mlp is named, and what is in it."""
    modules = (
        ModuleTime("model", None, 1, 40, 60, 0),
        ModuleTime("head", "model", 1, 10, 20, 0),
        ModuleTime("h.*", "model", 2, 30, 40, 0),
        ModuleTime("h.*.mlp", "h.*", 2, 15, 30, 0),
        ModuleTime("h.*.mlp.fc1", "h.*.mlp", 2, 10, 10, 0),
        ModuleTime("h.*.mlp.fc2", "h.*.mlp", 2, 5, 15, 0),
        ModuleTime("h.*.attn", "h.*", 2, 15, 10, 0),
    )
    module = find_costliest(modules)
    assert module == modules[3]
    summary = Summary("run", modules=modules, costliest_module=module, work=_summary(SMALL).work)
    text = " ".join(render(build_summary_document(summary, AdviceResult()), "table").split())
    assert "MODULE h.*.mlp ×2 45 ns of 59.33 ms · forward 15 ns, backward 30 ns · in it fc1 20 ns" in text
    assert find_costliest(modules[:3]) == modules[2]
    assert find_costliest([replace(modules[1], parent=None, forward_ns=0, backward_ns=0)]) is None


def test_evaluation_is_no_part_of_a_modules_forward_time(tmp_path: Path) -> None:
    """The same 10 ns of kernels with gradients, then without: a validation pass in the step."""
    builder = NsysBuilder()
    builder.range("step 0", 0, 1_000)
    for name, start in (("forward", 100), ("inference", 500)):
        builder.range(name, start, start + 200)
        builder.range("model", start + 1, start + 199)
        builder.range("head", start + 2, start + 198)
        builder.kernel(start + 10, 10)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    modules = {one.module: one for one in time_modules(opened.attribution)}
    assert {name: (one.forward_ns, one.inference_ns, one.total_ns) for name, one in modules.items()} == {
        "model": (10, 10, 20),
        "head": (10, 10, 20),
    }
    assert opened.kernels("forward").total_ns == modules["model"].forward_ns
    text = render(build_summary_document(_summary(tmp_path / "t.sqlite"), AdviceResult()), "table")
    assert "model/head 20 ns" not in text
    assert "head 20 ns of 20 ns · forward 10 ns, inference 10 ns" in " ".join(text.split())


def test_a_phase_is_one_in_any_letter_case_and_with_a_number(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("step 0", 0, 1_000)
    for number, name in enumerate(("Forward", "forward 1", "BACKWARD")):
        at = 100 + 200 * number
        builder.range(name, at, at + 190)
        builder.range("head", at + 1, at + 189)
        builder.kernel(at + 10, 10)
    opened = read_trace(builder.write(tmp_path / "t.sqlite"))
    (head,) = time_modules(opened.attribution)
    assert (head.module, head.forward_ns, head.backward_ns) == ("head", 20, 10)
    assert {label: len(rows) for label, rows in measured_ranges(opened.attribution).items()} == {
        "step": 1,
        "forward": 2,
        "backward": 1,
    }


def test_a_module_whose_range_lies_in_one_of_nccls_is_counted(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.domain(1, "NCCL")
    builder.range("forward", 0, 400)
    builder.range("outer", 1, 399, domain=1)
    builder.range("inner", 2, 398)
    builder.range("outer", 3, 397)
    builder.kernel(10, 10)
    builder.range("backward", 500, 900)
    builder.range("recompute", 501, 899)
    builder.range("inner", 502, 898)
    builder.kernel(600, 7)
    modules = {one.module: one for one in time_modules(read_trace(builder.write(tmp_path / "t.sqlite")).attribution)}
    assert (modules["inner"].forward_ns, modules["inner"].recompute_ns) == (10, 7)


def test_its_memory_is_that_of_the_memory_command() -> None:
    said, memory = _json("summary", SNAPSHOT)["memory"], _json("memory", SNAPSHOT)
    assert said["peak_bytes"] == memory["allocated"]["peak_bytes"]
    assert said["reserved_peak_bytes"] == memory["reserved"]["peak_bytes"]
    assert said["by_category"] == {row["category"]: row["bytes"] for row in memory["peak"]["by_category"]}
    assert (said["exact"], said["phase"]) == (memory["exact"], memory["peak"]["phase"])


def test_a_try_names_its_cause_the_place_the_change_and_the_step_after() -> None:
    after = Interval(14_000_000, 15_000_000, 16_000_000)
    one = Advice(
        code="waits",
        cause="loss.item waits for the GPU",
        line=SourceLine("/code/train.py", 30, "main"),
        module=None,
        change="read it every 50 steps",
        edit="no-wait:train.py:30",
        after_ns=after,
        saves_ns=None,
        saves_bytes=None,
        costs=None,
        evidence={},
        proof="profkit compare RUN NEW",
    )
    other = replace(one, line=None, module="h.*.attn", saves_bytes=Interval(0, 1024, 2048), costs="time to compile")
    steps = (StepUse(None, 20e6, 4, 20e6, 20e6, None),)
    text = render(
        build_summary_document(Summary("run", steps=steps), AdviceResult((one, other), after), with_all=True), "table"
    )
    said = " ".join(text.split())
    assert "Try Both: 20.00 ms → 15.0 ms (14.0 to 16.0) 1 loss.item waits for the GPU · train.py:30" in said
    assert "train.py:30 main · read it every 50 steps · → 15.0 ms (14.0 to 16.0)" in said
    assert "h.*.attn" in said
    assert "memory −1.000 KiB · costs time to compile proof: profkit compare run NEW" in said


def test_the_largest_share_of_the_work_is_never_left_out_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the verdict of `profkit ranks` in the line of ranks."""
    summary = _summary(capture("ddp.nsys2025.sqlite"))
    share = format_share(summary.work.communication_ns / summary.work.kernel_time_ns)
    said = " ".join(render(build_summary_document(summary, AdviceResult()), "table").split())
    assert f"per GPU · communication {share} ·" in said
    lines = _lines(summary, monkeypatch, 120)
    assert "2 × H200 · 2 ranks" in lines["STEP"]
    assert "cannot be told: rank 1 costs the others most, 10.03 ms in the median step (22.4% of it)" in lines["RANKS"]
    assert "communication not hidden " in lines["GPU"]
    assert "750,239 ns of them are in no range" in lines["Closed"]


def test_out_of_memory_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _lines(_summary(capture("oom.pickle")), monkeypatch, 80)
    assert list(lines)[1] == "FAILED"
    assert lines["FAILED"].startswith("out of memory, asked for ")


def test_of_a_capture_that_failed_its_self_check_nothing_is_concluded(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = _summary(capture("graph_whole.nsys2023.sqlite"))
    assert find_advice(open_capture(Path(summary.run)), summary).tries == ()
    lines = _lines(summary, monkeypatch, 80)
    assert "SELF-CHECK FAILED: do not trust this capture's totals" in lines[""]
    assert "Closed" not in lines


def test_the_tries_are_data_with_what_they_buy_together() -> None:
    path = capture("small.nsys2025.sqlite")
    said = _json("summary", path)
    advice = find_advice(open_capture(path), _summary(path))
    assert said["schema"] == 2
    assert [one["code"] for one in said["advice"]] == [one.code for one in advice.tries]
    assert set(said["advice"][0]) == {
        *("code", "cause", "line", "module", "change", "edit", "after_ns", "saves_ns", "saves_bytes"),
        *("costs", "evidence", "proof", "measured", "detail"),
    }
    assert said["advice_together"] == (None if advice.together_ns is None else {"after_ns": vars(advice.together_ns)})
