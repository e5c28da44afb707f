"""What a run says first: one sentence, and the step as a tree of parts that sum up to it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from html import unescape
from pathlib import Path

import pytest

from profkit.analysis.causes.advice import Advice, AdviceResult, find_advice
from profkit.analysis.causes.evidence import Interval, SourceLine
from profkit.analysis.step_replay.calibrate import AS_RECORDED
from profkit.analysis.step_replay.limits import OUTSIDE, Limit, LimitPart, LineLimit, StepLimits
from profkit.analysis.summarize import summarize_capture
from profkit.analysis.summary import StepPart, StepTree, StepUse, Summary, divide_step
from profkit.analysis.time_account.account import IdleCauses, IdleTime
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
from profkit.run.lines import LineTime
from tests.captures import CAPTURES, capture
from tests.conftest import ROOT
from tests.efficiency_runs import make_small_run, make_timed_run
from tests.in_process import run_command
from tests.nsys_builder import NsysBuilder

pytestmark = pytest.mark.usefixtures("read_once")

STORED = [
    *sorted(path for path in (ROOT / "traces").iterdir() if not path.name.endswith((".md", ".jsonl.gz", "blocks"))),
    *sorted((ROOT / "traces" / "blocks").iterdir()),
]
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


@pytest.mark.parametrize("path", [*STORED, *LIGHT, *SHARED], ids=lambda path: path.name)
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
        change="do it in a DataLoader's worker, on the GPU, or once before the loop",
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
    small = _advise(Interval(9 * MS, 9 * MS, 9 * MS), MS)
    assert describe_answer(SUMMARY, small) == (
        "A step takes 10.00 ms: for 6.000 ms Python keeps the GPU waiting. "
        "Loss.item waits for the GPU (h.*); without that: about 9.000 ms."
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
        "Loss.item waits for the GPU (h.*); without that: 10.60 ms (measured; 10.50 ms with it)."
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
    (tmp_path / "manifest.json").write_text(json.dumps({"status": "complete", "clean": {"steps": steps}}))
    builder = NsysBuilder()
    builder.range("step 0", 0, 1_500)
    builder.write(tmp_path / "trace.sqlite")
    account = open_capture(tmp_path).trace.account  # type: ignore[union-attr]
    line = LineTime("/me/train.py", 30, "main", "torch.randn", None, "main", 90, 150, 0, 0.0)
    tree = divide_step(account, None, (line, replace(line, phase="backward", called="….backward")), 1_000)
    assert [(*part.phases, part.time_ns, part.line and part.line.line) for part in tree.parts] == [
        ("backward", 500, None),
        ("forward", 300, None),
        (OUTSIDE, 200, 30),
    ]
    said = describe_answer(replace(SUMMARY, tree=tree), NOTHING)
    assert said == "A step takes 10.00 ms: 500 ns of it in backward."


def test_every_command_says_the_same_sentence_of_a_run(tmp_path: Path) -> None:
    run = make_timed_run(tmp_path)
    data = json.loads(run_command("summary", run, "--format", "json").stdout)
    assert sum(part["time_ns"] for part in data["step_tree"]["parts"]) == data["step_tree"]["step_ns"]
    answer = data["answer"]
    assert answer in " ".join(run_command("efficiency", run).stdout.split())
    checked = run_command("check", run, "--max-idle", "99%", "--format", "json")
    assert json.loads(checked.stdout)["answer"] == answer
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
