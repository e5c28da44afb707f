"""The summary: its sentence, the step as a tree, and its lines; it fits a screen, and says what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from profkit.analysis.causes.advice import Advice, AdviceResult, find_advice
from profkit.analysis.causes.evidence import Interval, SourceLine
from profkit.analysis.step_replay.calibrate import AS_RECORDED
from profkit.analysis.step_replay.limits import OUTSIDE, Limit, LimitPart, LineLimit, StepLimits
from profkit.analysis.summarize import summarize_capture, why_left_out
from profkit.analysis.summary import StepPart, StepTree, StepUse, Summary, divide_step
from profkit.analysis.time_account.account import IdleCauses, IdleTime
from profkit.analysis.tree.modules import ModuleTime, find_costliest
from profkit.analysis.trials import Trial
from profkit.errors import Finding
from profkit.joining import read_ranks
from profkit.names import DATA
from profkit.reading import open_capture
from profkit.report import document as document_module
from profkit.report.commands.answer import (
    describe_after,
    describe_answer,
    describe_effects,
    describe_interval,
    describe_together,
    draw_tree,
)
from profkit.report.commands.ranks import describe_verdict
from profkit.report.commands.summary import build_summary_document, describe_step
from profkit.report.document import render
from profkit.report.page.page import render_report
from profkit.report.units import format_share
from profkit.run.lines import LineSteps, LineTime, RunLines, write_lines
from profkit.run.manifest import Manifest, Workload
from profkit.run.recording import COMMAND_WARMUP
from profkit.text_kinds import LEFT_OUT
from tests.captures import CAPTURES, capture
from tests.conftest import ROOT
from tests.efficiency_runs import SMALL, change_manifest, make_small_run, make_timed_run, write_run
from tests.golden import check_transcript
from tests.in_process import printed, run_command
from tests.memory_captures import Training
from tests.nsys_builder import NsysBuilder

pytestmark = pytest.mark.usefixtures("read_once")

STORED = [
    *sorted(path for path in (ROOT / "traces").iterdir() if not path.name.endswith((".md", ".jsonl.gz", "blocks"))),
    *sorted((ROOT / "traces" / "blocks").iterdir()),
]
SNAPSHOT = ROOT / "traces" / "small-train.snapshot.pickle.gz"
LIGHT = sorted((ROOT / "tests" / "light_records").iterdir())
SHARED = sorted(path for path in CAPTURES.glob("*") if path.name.endswith((".sqlite", ".json.gz", ".pickle")))
MS = 1_000_000
TREE = StepTree(
    10 * MS,
    "replay",
    (
        StepPart(Limit.PYTHON, 6 * MS, {OUTSIDE: 6 * MS}),
        StepPart(Limit.COMPUTING, 3 * MS, {"forward": MS, "backward": 2 * MS}),
        StepPart("rest", MS),
    ),
)
SUMMARY = Summary("run", steps=(StepUse(None, 10 * MS, 5, 9 * MS, 11 * MS, 12 * MS),), tree=TREE, has_trace=True)
NOTHING = AdviceResult()
RANDN = LineLimit(Limit.PYTHON, OUTSIDE, "/me/train.py", 30, "main", "torch.randn", 5 * MS)


def _summary(path: Path) -> Summary:
    return summarize_capture(open_capture(path))


_stored_summary = cache(_summary)


def _limits(step_ns: int, calibrated_ns: int) -> StepLimits:
    parts = (
        LimitPart(Limit.COMPUTING, "gemm", "forward", None, step_ns // 2),
        LimitPart(Limit.PREPARING, "call", "forward", None, step_ns // 4),
        LimitPart(Limit.PYTHON, "python", OUTSIDE, None, step_ns // 8),
        LimitPart(Limit.PYTHON, "python", DATA, None, step_ns // 8),
    )
    lines = (replace(RANDN, time_ns=step_ns // 16),)
    return StepLimits(step_ns, None, None, AS_RECORDED, parts=parts, lines=lines, calibrated_ns=calibrated_ns)


def _count_lines(summary: Summary, advice: AdviceResult, width: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many lines are not empty, the failed checks above the answer left aside; none is too wide."""
    monkeypatch.setattr(document_module, "screen_width", lambda: width)
    document = build_summary_document(summary, advice)
    lines = render(document, "table").splitlines()
    assert max(map(len, lines)) <= width
    first = next(at for at, line in enumerate(lines) if line and describe_answer(summary, advice).startswith(line))
    return sum(map(bool, lines[first:]))


@pytest.mark.parametrize("path", [*STORED, *LIGHT[::6], *SHARED], ids=lambda path: path.name)
def test_the_summary_of_a_capture_fits_its_screen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = _stored_summary(path)
    advice = find_advice(open_capture(path), summary)
    assert _count_lines(summary, advice, 100, monkeypatch) <= 12
    assert _count_lines(summary, advice, 80, monkeypatch) <= 20


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return _summary(make_small_run(tmp_path_factory.mktemp("small")))


def test_a_short_try_has_whole_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many lines the last two Tries are short: the call's method alone, and the first way to make the change."""
    monkeypatch.setattr(document_module, "screen_width", lambda: 80)
    (advice,) = _advise(
        Interval(32_000_000, 32_500_000, 34_000_000), 700_000, SourceLine("/me/points.py", 53, "main")
    ).tries
    waits = replace(
        advice,
        cause="all.errors.item() waits for the GPU, once a step",
        detail=", once a step",
        change="keep the value on the GPU, and read it every 50 steps or so",
    )
    fills = replace(
        advice,
        cause="deterministic algorithms fill all memory that torch allocates",
        detail="",
        line=None,
        change="torch.utils.deterministic.fill_uninitialized_memory = False, or use_deterministic_algorithms(False)",
    )
    summary = replace(SUMMARY, findings=(Finding("late", "a warning that says much of what was recorded " * 4),) * 2)
    summary = replace(summary, memory=_stored_summary(ROOT / "traces" / "resnet50-adamw.snapshot.pickle.gz").memory)
    many = AdviceResult(
        (advice, waits, fills), trials=(Trial(("compile",), processes=3, step_ns=9e6, change_ns=-1e6),) * 3
    )
    said = " ".join(render(build_summary_document(summary, many), "table").split())
    assert "2 .item() waits for the GPU · points.py:53 · keep the value on the GPU · → 32.5 ms (32.0 to 34.0)" in said
    assert "3 deterministic algorithms fill all memory that torch allocates · torch.utils.deterministic." in said
    assert "fill_uninitialized_memory = False · →" in said


@pytest.mark.parametrize(
    ("options", "workload", "why"),
    [
        ([], {"step_on": "whole", "warmup_steps": 0}, "the program shows no step; `profkit help scripts` says what"),
        (["--step-on", "whole"], {"step_on": "whole", "warmup_steps": 0}, None),
        ([], {"warmup_steps": 2}, "the program makes too few steps for that"),
        (["--warmup", "2"], {"warmup_steps": 2}, None),
        (["--no-lines"], {"warmup_steps": COMMAND_WARMUP}, None),
    ],
)
def test_the_command_that_was_just_run_is_recommended_only_if_it_could_record_more(
    options: list[str], workload: dict[str, Any], why: str | None, small: Summary
) -> None:
    target = ("python", "train.py", "--warmup", "9")
    command = ("profkit", "run", *options, "--", *target)
    manifest = Manifest(kind="command", command=command, argv=target, workload=Workload(**workload))
    summary = replace(small, missing=("lines of source",), why_missing=why_left_out(manifest))
    said = " ".join(render(build_summary_document(summary, AdviceResult()), "table").split())
    assert f"Lacks lines of source: {why or '`profkit run -- '}" in said
    copied = replace(summary, why_missing=None, head=replace(small.head, command=[f"{LEFT_OUT} 7"]))
    said = " ".join(render(build_summary_document(copied, AdviceResult()), "table").split())
    assert "Lacks lines of source: `profkit run` records them" in said
    script = Manifest(kind="command", command=("profkit", "run", *options, *target[1:]), argv=target)
    assert why_left_out(replace(script, workload=manifest.workload)) == summary.why_missing


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("with_others", [False, True])
def test_a_run_with_long_tries_fits_its_screen(
    count: int, with_others: bool, small: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = _stored_summary(ROOT / "traces" / "resnet50-adamw.snapshot.pickle.gz").memory
    warning = Finding("late", "a warning that says much of what was recorded " * 4)
    summary = replace(small, memory=memory, findings=(warning, warning), missing=("lines of source", "FLOPs"))
    line = SourceLine("/me/folder/prepare_the_batches.py", 1042, "PreparedBatches.__getitem__")
    (advice,) = _advise(Interval(90_000_000, 93_300_000, 97_100_000), 12_500_000, line).tries
    advice = replace(
        advice,
        cause="Python in PreparedBatches.__getitem__ keeps the GPU waiting, and nobody knows why",
        detail=", and nobody knows why",
        change="do it in a DataLoader's worker or on the GPU, or once before the loop",
        costs="objects that refer to each other are kept, and host memory",
        proof="profkit try RUN --edit no-host:prepare_the_batches.py:1042",
    )
    if with_others:
        compared = read_ranks(ROOT / "tests" / "light_records" / "one-gpu-ddp-none")
        summary = replace(summary, compared=compared)
    trial = Trial(("compile",), processes=3, step_ns=99e6, change_ns=-6e6)
    tried = AdviceResult((advice,) * count, advice.after_ns if count > 1 else None, trials=(trial,) * 3)
    assert _count_lines(summary, tried, 100, monkeypatch) <= 12
    assert _count_lines(summary, tried, 80, monkeypatch) <= 20
    said = " ".join(render(build_summary_document(summary, tried), "table").split())
    if count:
        assert "1 Python in PreparedBatches.__getitem__ keeps the GPU waiting" in said
        for needed in ("prepare_the_batches.py:1042", "once before the loop", "→ 93 ms (90 to 97)"):
            assert needed in said.partition(" Try ")[2].partition(" 2 Python")[0]


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_the_tree_sums_up_to_the_step(path: Path) -> None:
    summary = _stored_summary(path)
    if summary.tree is None:
        assert summary.step_ns is None or not summary.work or summary.work.measure != "gpu-kernel"
        return
    assert sum(part.time_ns for part in summary.tree.parts) == summary.tree.step_ns == round(summary.step_ns or 0)
    for part in summary.tree.parts:
        assert not part.phases or sum(part.phases.values()) == part.time_ns


def test_the_parts_come_from_the_replay_if_it_takes_as_long_as_the_measured_step(tmp_path: Path) -> None:
    account = open_capture(make_timed_run(tmp_path)).trace.account  # type: ignore[union-attr]
    near = divide_step(account, _limits(800, 750), (), 800)
    assert near.basis == "replay"
    assert [(part.kind, part.time_ns) for part in near.parts] == [
        (Limit.COMPUTING, 400),
        (Limit.PREPARING, 200),
        (Limit.PYTHON, 100),
        ("data", 100),
    ]
    assert [part.line and part.line.line for part in near.parts] == [None, None, 30, None]
    far = divide_step(account, _limits(800, 400), (), 800)
    assert far.basis == "gpu"
    assert sum(part.time_ns for part in far.parts) == 800


def test_the_sentence_names_what_sets_the_pace_and_its_line() -> None:
    assert describe_answer(SUMMARY, NOTHING) == "A step takes 10.00 ms: for 6.000 ms Python keeps the GPU waiting."
    iterates = replace(SUMMARY, head=replace(SUMMARY.head, iteration="4 steps of the optimizer Adam"))
    assert describe_answer(iterates, NOTHING).startswith("A step (4 steps of the optimizer Adam) takes 10.00 ms: for")
    tree = replace(TREE, parts=(replace(TREE.parts[0], line=RANDN), *TREE.parts[1:]))
    said = describe_answer(replace(SUMMARY, tree=tree), NOTHING)
    assert said == "A step takes 10.00 ms: for 5.000 ms train.py:30 main: torch.randn keeps the GPU waiting."
    assert list(draw_tree(tree)) == [
        "├─ Python without the GPU  6.000 ms   60.0%  ◀ train.py:30 main: torch.randn",
        "├─ GPU computing           3.000 ms   30.0%  backward 20% · forward 10%",
        "└─ the rest                1.000 ms   10.0%",
    ]


def test_a_line_stands_for_what_it_mostly_prepares_else_the_phases_do(tmp_path: Path) -> None:
    """Python in a phase is shared out by its lines' times, though the GPU may wait for some of them alone."""
    account = open_capture(make_timed_run(tmp_path)).trace.account  # type: ignore[union-attr]
    for time_ns, line in ((100, 30), (99, None)):
        limits = replace(_limits(800, 800), lines=(replace(RANDN, limit=Limit.PREPARING, time_ns=time_ns),))
        tree = divide_step(account, limits, (), 800)
        (part,) = (part for part in tree.parts if part.kind == Limit.PREPARING)
        assert (part.line and part.line.line) == line
    assert any("Python preparing kernels" in row and row.endswith("  forward 25%") for row in draw_tree(tree))


def test_the_spread_of_steps_is_said_where_the_step_time_lies_in_it() -> None:
    waits = StepUse(None, 62_390_000, 10, 62_150_000, 62_280_000, None, 9_023_000)
    assert next(describe_step(replace(SUMMARY, steps=(waits,)))) == "62.39 ms unprofiled (10 steps)"
    said = "62.20 ms unprofiled (10 steps, most take 62.15 ms to 62.28 ms)"
    assert next(describe_step(replace(SUMMARY, steps=(replace(waits, unprofiled_ns=62_200_000),)))) == said


def test_what_is_computed_outside_of_all_phases_is_said_where_it_is_much() -> None:
    for outside_ns, said in ((4 * MS, "outside phases 40% · forward 10%"), (MS // 4, "forward 10%")):
        part = StepPart(Limit.COMPUTING, MS + outside_ns, {OUTSIDE: outside_ns, "forward": MS})
        (row,) = draw_tree(StepTree(10 * MS, "replay", (part,)))
        assert row.endswith(f"%  {said}")


def test_why_a_gpu_is_idle_is_said_where_it_is_idle_for_long(small: Summary) -> None:
    """Of 62 ms a GPU is idle for 1.2 in the gaps of 1,000 kernels, and does not wait for the data that it hides."""
    assert small.gpu is not None
    for idle_ns, has_cause in ((5, True), (4, False)):
        idle = IdleTime(100, idle_ns, IdleCauses(idle_ns, 0, 0, 0), is_unprofiled=True)
        said = render(
            build_summary_document(replace(small, gpu=replace(small.gpu, idle=idle)), NOTHING, with_all=True), "table"
        )
        assert ("waiting for data" in said) == has_cause
        assert f"idle {idle_ns}.0%" in said


def test_phases_stand_in_one_line_of_a_screen() -> None:
    phases = {
        "forward": MS,
        "backward": 3 * MS,
        "optimizer": MS // 2,
        "a long evaluation": 2 * MS,
        OUTSIDE: MS,
    }
    (row,) = draw_tree(StepTree(10 * MS, "replay", (StepPart(Limit.COMPUTING, 10 * MS, phases),)))
    assert row.endswith("  backward 30% · a long evaluation 20% · forward 10%")


def _advise(after: Interval, saves: int, line: SourceLine | None = None) -> AdviceResult:
    one = Advice(
        code="waits",
        cause="loss.item waits for the GPU",
        line=line,
        module="h.*",
        change="read it every 50 steps",
        edit=None,
        after_ns=after,
        saves_ns=Interval(saves, saves, saves),
        saves_bytes=None,
        costs=None,
        evidence={},
        proof="profkit compare RUN NEW",
    )
    return AdviceResult((one,))


def test_a_change_that_saves_much_is_the_answer_and_a_smaller_one_stands_behind_the_pace() -> None:
    line = SourceLine("/me/train.py", 30, "main")
    large = _advise(Interval(4_900_000, 5_100_000, 5_400_000), 5 * MS, line)
    assert describe_answer(SUMMARY, large) == (
        "A step takes 10.00 ms; 5.000 ms of it is lost: loss.item waits for the GPU (train.py:30 main). "
        "Without that: about 5.1 ms (4.9 to 5.4)."
    )
    batch = replace(large.tries[0], code="batch", cause="the GPU waits for Python", line=None, edit="batch:×2")
    assert describe_answer(SUMMARY, AdviceResult((batch,))).endswith(
        "Python keeps the GPU waiting. The GPU waits for Python (h.*); with a larger batch: about 5.1 ms (4.9 to 5.4) "
        "for as many samples."
    ), "a change of training is no loss"
    assert describe_answer(SUMMARY, AdviceResult((replace(batch, edit=None),))) == (
        "A step takes 10.00 ms; 5.000 ms of it is lost: the GPU waits for Python (h.*). "
        "With fewer and larger passes: about 5.1 ms (4.9 to 5.4)."
    )
    small = _advise(Interval(9 * MS, 9 * MS, 9 * MS), MS)
    assert describe_answer(SUMMARY, small) == (
        "A step takes 10.00 ms: for 6.000 ms Python keeps the GPU waiting. "
        "loss.item waits for the GPU (h.*); without that: about 9.000 ms."
    )


def test_the_time_of_a_larger_batch_is_said_to_be_of_as_many_samples() -> None:
    (advice,) = _advise(Interval(4_900_000, 6_500_000, 8_300_000), 5_000_000).tries
    larger = replace(advice, edit="batch:×2")
    assert describe_after(larger) == "about 6.5 ms (4.9 to 8.3) for as many samples"
    assert list(describe_effects(larger)) == ["→ 6.5 ms (4.9 to 8.3) for as many samples"]
    both = AdviceResult((advice, larger), Interval(3_400_000, 4_000_000, 4_500_000))
    assert describe_together(SUMMARY, both) == "Both: 10.00 ms → 4.0 ms (3.4 to 4.5) for as many samples"
    assert list(describe_effects(advice)) == ["→ 6.5 ms (4.9 to 8.3)"]


def test_what_was_measured_of_a_change_is_said_in_place_of_what_was_predicted() -> None:
    (advice,) = _advise(Interval(9 * MS, 9 * MS, 9 * MS), MS).tries
    trial = Trial(
        ("optimizer:fused",),
        processes=3,
        step_ns=6.5 * MS,
        change_ns=-4 * MS,
        change_low_ns=-4.1 * MS,
        change_high_ns=-3.9 * MS,
    )
    assert describe_answer(SUMMARY, AdviceResult((replace(advice, measured=trial),))) == (
        "A step takes 10.00 ms; 4.000 ms of it is lost: loss.item waits for the GPU (h.*). "
        "Without that: 6.500 ms (measured ± 100.0 µs; 10.50 ms with it)."
    )
    in_vain = replace(trial, step_ns=10.6 * MS, change_ns=0.1 * MS, change_low_ns=None, change_high_ns=None)
    assert describe_answer(SUMMARY, AdviceResult((replace(advice, measured=in_vain),))).endswith(
        "loss.item waits for the GPU (h.*); without that: 10.60 ms (measured; 10.50 ms with it)."
    )


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (Interval(90 * MS, 93 * MS, 97 * MS), "93 ms (90 to 97)"),
        (Interval(92_400_000, 93 * MS, 93_900_000), "93.0 ms (92.4 to 93.9)"),
        (Interval(900, 950, 999), "950 ns (900 to 999)"),
    ],
)
def test_a_prediction_has_as_many_digits_as_its_ends_are_apart(after: Interval, said: str) -> None:
    assert describe_interval(after) == said


def test_without_a_gpu_the_parts_are_phases_with_their_lines(tmp_path: Path) -> None:
    steps = [{"step_ns": 1_000, "forward_ns": 300, "backward_ns": 500}] * 3
    builder = NsysBuilder(("step 0", 0, 1_500))
    account = open_capture(write_run(tmp_path, builder, clean={"steps": steps})).trace.account  # type: ignore[union-attr]
    line = LineTime("/me/train.py", 30, "main", "torch.randn", None, "main", 90, 150, 0, 0.0)
    tree = divide_step(account, None, (line,), 1_000)
    assert [(*part.phases, part.time_ns, part.line and part.line.line) for part in tree.parts] == [
        ("backward", 500, None),
        ("forward", 300, None),
        (OUTSIDE, 200, 30),
    ]
    said = describe_answer(replace(SUMMARY, tree=tree), NOTHING)
    assert said == "A step takes 10.00 ms: 500 ns of it in backward."


def test_every_command_says_the_same_sentence_of_a_run(tmp_path: Path) -> None:
    run = make_timed_run(tmp_path)
    data = printed("summary", run)
    assert sum(part["time_ns"] for part in data["step_tree"]["parts"]) == data["step_tree"]["step_ns"]
    answer = data["answer"]
    assert answer in " ".join(run_command("efficiency", run).stdout.split())
    assert printed("check", run, "--max-idle", "99%")["answer"] == answer
    assert answer in " ".join(unescape(render_report(open_capture(run))).split())


def test_a_late_rank_is_the_answer_in_the_words_of_profkit_ranks() -> None:
    ranks = read_ranks(ROOT / "tests" / "light_records" / "ddp-data-hidden-later")
    verdict = describe_verdict(ranks)[0]
    said = describe_answer(replace(SUMMARY, compared=ranks), NOTHING)
    assert said == f"A step takes 10.00 ms: {verdict[0].lower()}{verdict[1:]}."
    assert verdict.startswith("Rank ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("graph_whole.nsys2023.sqlite", "No answer: the capture failed its self-check"),
        ("hooks.nsys2025.sqlite", "No step is known: times are of the whole recording."),
        ("oom.pickle", "Memory peaks at 6.812 GiB: 99.1% are of unknown purpose."),
        ("small.nsys2025.sqlite", "A step takes 49.40 ms as recorded (its unprofiled time is unknown): for "),
    ],
)
def test_what_is_not_known_is_said(name: str, said: str) -> None:
    assert describe_answer(_summary(capture(name)), NOTHING).startswith(said)


# -- its lines -------------------------------------------------------------------------------------------------------


FP32 = {"float32_matmul_precision": "highest"}


def _run_of(folder: Path, **facts: object) -> Path:
    """Make a run of two steps, whose manifest also holds these."""
    run = make_timed_run(folder)
    change_manifest(run, **facts)
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
        "tf32-in-convolutions": {"conditions": {**FP32, "cudnn_allow_tf32": True}, "workload": {"dtype": "fp32"}},
    }
    named = [make_small_run(tmp_path / "small"), *(_run_of(tmp_path / name, **facts) for name, facts in runs.items())]
    # In bf16 products nothing was counted; a run with lines lacks none; of a failed one nothing may be left.
    work = json.loads((named[-1] / "work.json").read_text())
    (named[-1] / "work.json").write_text(json.dumps({**work, "dtype": "tf32"}))
    looked = ({"step_ns": 1_000_000},) * 3
    with_lines = _run_of(tmp_path / "with-lines", clean={"steps": list(looked)}, argv=["python", "train.py"])
    write_lines(with_lines / "lines.jsonl", RunLines(LineSteps(looked), ()))
    nothing = _run_of(tmp_path / "failed-early", **runs["failed"])
    (nothing / "trace.sqlite").unlink()
    memory = Training().write_run(tmp_path / "memory")
    traces = [ROOT / "traces" / f"tiny-train-cpu.{kind}" for kind in ("kineto.json.gz", "nsys2023.sqlite")]
    shown = [(path, "--all") for path in (*named, with_lines, nothing, memory, *traces, SNAPSHOT)]
    calls = [*shown, (named[0],), *((named[1], "--format", style) for style in ("markdown", "csv", "json"))]
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
    run = _run_of(tmp_path, conditions={**FP32, **conditions}, workload={"dtype": "fp32"})
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


def test_its_memory_is_that_of_the_memory_command() -> None:
    said, memory = printed("summary", SNAPSHOT)["memory"], printed("memory", SNAPSHOT)
    assert said["peak_bytes"] == memory["allocated"]["peak_bytes"]
    assert said["reserved_peak_bytes"] == memory["reserved"]["peak_bytes"]
    assert said["by_category"] == {row["category"]: row["bytes"] for row in memory["peak"]["by_category"]}
    assert (said["exact"], said["phase"]) == (memory["exact"], memory["peak"]["phase"])


def test_a_try_names_its_cause_the_place_the_change_and_the_step_after() -> None:
    after = Interval(14_000_000, 15_000_000, 16_000_000)
    (one,) = _advise(after, 5 * MS, SourceLine("/code/train.py", 30, "main")).tries
    other = replace(one, line=None, module="h.*.attn", saves_bytes=Interval(0, 1024, 2048), costs="time to compile")
    summary = replace(SUMMARY, steps=(StepUse(None, 20e6, 4, 20e6, 20e6, None),), tree=None)
    text = render(build_summary_document(summary, AdviceResult((one, other), after), with_all=True), "table")
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
    path = ROOT / "traces" / "small-train.nsys2025.sqlite"
    said = printed("summary", path)
    advice = find_advice(open_capture(path), _summary(path))
    assert said["schema"] == 2
    assert [one["code"] for one in said["advice"]] == [one.code for one in advice.tries]
    assert set(said["advice"][0]) == {
        *("code", "cause", "line", "module", "change", "edit", "after_ns", "saves_ns", "saves_bytes"),
        *("costs", "evidence", "proof", "measured", "detail"),
    }
    assert advice.together_ns is not None
    assert said["advice_together"] == {"after_ns": vars(advice.together_ns)}
