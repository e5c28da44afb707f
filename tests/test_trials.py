"""Trials without a program: the table of edits and what makes them, the file, the intervals, losses and words."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from profkit.analysis.causes.advice import Advice, AdviceResult, add_trials
from profkit.analysis.causes.evidence import Interval
from profkit.analysis.summary import Summary
from profkit.analysis.trials import Trial, find_best, latest_trials, summarize_trials
from profkit.errors import RunError
from profkit.launch.trials import _combine
from profkit.reading import open_capture
from profkit.report.commands.edits import _prediction, describe_trial, write_change, write_code
from profkit.report.commands.summary import build_summary_document
from profkit.report.document import render
from profkit.report.page.page import render_report
from profkit.run.edits import (
    EDITS,
    VERSION,
    Evidence,
    Measured,
    TrialPlan,
    TrialPrediction,
    TrialProcess,
    Trials,
    parse_edits,
    read_trials,
    write_trials,
)
from tests.efficiency_runs import SMALL
from tests.golden import check_transcript
from tests.run_builder import start_run

PLAN = TrialPlan(VERSION, "2026-01-01T00:00:00+00:00", 10, 20)
MS = 1e6
LOSSES = (1.0, 0.5, 0.25)


def process(edits: str, turn: int, step_ms: float, losses: tuple[float | None, ...] = LOSSES) -> TrialProcess:
    names = tuple(edits.split())
    evidence = tuple(Evidence(name, True, "it ran", "/a/train.py:7 main") for name in names)
    return TrialProcess(names, turn, 9.0, Measured(20, step_ms * MS, int(50 * MS), 30, losses, evidence, 2**30))


def trials_of(*processes: TrialProcess, predictions: tuple[TrialPrediction, ...] = ()) -> dict[tuple[str, ...], Trial]:
    return {trial.edits: trial for trial in summarize_trials(Trials(PLAN, predictions, processes))}


FUSED = [process("", 1, 10.0), process("optimizer:fused", 1, 9.0)]
FUSED += [process("", 2, 11.0), process("optimizer:fused", 2, 10.1), process("", 3, 12.0)]
FUSED += [process("optimizer:fused", 3, 10.9)]
REFUSED = TrialProcess(("tf32",), 1, 3.0, Measured(evidence=(Evidence("tf32", False, "no GPU"),)), "tf32: no GPU")
PREDICTION = TrialPrediction(("optimizer:fused",), 10_000_000, 8_500_000, 9_000_000, 9_500_000)


def test_every_edit_that_can_be_tried_has_a_maker_and_code_and_no_other_has() -> None:
    pytest.importorskip("torch")
    from profkit.capture.changes.trial import MAKERS

    assert set(MAKERS) == {spec.name for spec in EDITS if spec.can_be_tried}
    assert all(spec.code for spec in EDITS if spec.can_be_tried)


def test_a_change_is_the_mean_of_the_differences_in_each_turn_with_students_interval() -> None:
    fused = trials_of(*FUSED)["optimizer:fused",]
    assert fused.change_ns == pytest.approx(-1.0 * MS)
    # Differences of -1.0, -0.9 and -1.1 ms: a standard deviation of 0.1, and t of 4.303 at two degrees of freedom.
    half_ns = 4.303 * 0.1 / math.sqrt(3) * MS
    assert fused.change_low_ns == pytest.approx(-1.0 * MS - half_ns, rel=1e-3)
    assert fused.change_high_ns == pytest.approx(-1.0 * MS + half_ns, rel=1e-3)
    assert fused.is_shorter
    assert find_best(list(trials_of(*FUSED).values())) == fused


def test_one_process_has_no_interval_and_is_never_the_best() -> None:
    trials = trials_of(*FUSED[:2])
    assert trials["optimizer:fused",].change_low_ns is None
    assert find_best(list(trials.values())) is None


@pytest.mark.parametrize(
    ("edit", "losses", "departs", "share"),
    [
        ("zero-grad:none", LOSSES, False, 0.0),
        ("zero-grad:none", (1.0, 0.5, 0.2500001), True, 4e-7),
        ("optimizer:fused", (1.0, 0.5, 0.2500001), False, 4e-7),
        ("autocast:bf16", (1.0, 0.5, 0.252), False, 0.00794),
        ("autocast:bf16", (1.0, 0.5, 0.3), True, 0.1667),
        ("autocast:bf16", (1.0, 0.5, None), True, 1.0),
        ("batch:×2", (9.0, 9.0, 9.0), False, 0.972),
    ],
)
def test_losses_depart_where_an_edits_precision_does_not_explain_it(
    edit: str, losses: tuple[float | None, ...], departs: bool, share: float
) -> None:
    loss = trials_of(process("", 1, 10.0), process(edit, 1, 9.0, losses))[edit,].loss
    assert (loss.departs, loss.steps) == (departs, 3)
    assert loss.share == pytest.approx(share, rel=1e-2)


def test_what_was_not_measured_says_why() -> None:
    trial = trials_of(*FUSED, REFUSED)["tf32",]
    assert (trial.processes, trial.step_ns, trial.reason) == (0, None, "tf32: no GPU")
    assert describe_trial(trial) == "tried: no GPU"


def test_a_prediction_holds_if_its_interval_has_the_measured_step() -> None:
    trials = trials_of(*FUSED, predictions=(PREDICTION,))
    fused = trials["optimizer:fused",]
    assert fused.is_as_predicted
    assert not replace(fused, change_ns=-2e6).is_as_predicted
    assert replace(fused, prediction=replace(PREDICTION, high_ns=None), change_ns=5e6).is_as_predicted
    assert trials[()].is_as_predicted is None


def test_a_prediction_outside_of_which_the_mean_alone_lies_is_left_to_more_processes() -> None:
    fused = replace(trials_of(*FUSED, predictions=(PREDICTION,))["optimizer:fused",], change_ns=-2e6)
    for high_ns, said in ((-1.8e6, "DID NOT HOLD"), (0.5e6, "DID NOT HOLD by the mean; more --processes decide")):
        trial = replace(fused, change_low_ns=-2.2e6, change_high_ns=high_ns)
        assert not trial.is_as_predicted
        assert _prediction(trial).endswith(f": {said}")


def test_edits_that_helped_are_combined_the_best_of_a_kind() -> None:
    done = [process("", 1, 10.0), process("tf32", 1, 9.0), process("optimizer:fused", 1, 9.5)]
    done += [process("optimizer:foreach", 1, 9.6), process("compile", 1, 9.95), process("pin-memory", 1, 11.0)]
    assert _combine(done) == ("optimizer:fused", "tf32")
    assert _combine(done[:2]) is None
    assert _combine([replace(done[0], measured=None), *done[1:]]) is None


def test_the_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    prediction = TrialPrediction(("tf32",), 1, 2, 3, None)
    trials = (Trials(PLAN, (prediction,), tuple(FUSED)), Trials(PLAN))
    write_trials(tmp_path / "trials.jsonl", trials)
    assert read_trials(tmp_path / "trials.jsonl") == trials
    assert set(latest_trials(trials)) == {("optimizer:fused",)}
    (tmp_path / "trials.jsonl").write_text(
        '{"plan": {"version": 9, "started_utc": "", "warmup_steps": 1, "steps": 1}}\n\n'
    )
    with pytest.raises(RunError, match="version 9"):
        read_trials(tmp_path / "trials.jsonl")


def test_what_try_shows_of_runs(tmp_path: Path) -> None:
    """Edits tried together too have numbers; losses that depart, and those of a program without a seed."""
    both = [process("optimizer:fused tf32", turn, 8.0 + turn / 10) for turn in (1, 2)]
    edits = (("autocast:bf16", 0.252), ("zero-grad:none", 0.3), ("threads:4", 0.25))
    losses = [process(edit, 1, 9.5, (*LOSSES[:2], last)) for edit, last in edits]
    calls = {
        "fused": Trials(PLAN, (PREDICTION,), tuple(FUSED)),
        "refused": Trials(PLAN, (), (*FUSED, REFUSED)),
        "together": Trials(PLAN, (), (*FUSED, process("tf32", 1, 9.5), *both)),
        "losses": Trials(PLAN, (), (process("", 1, 10.0), *losses)),
        "unseeded": Trials(
            PLAN, (), (process("", 1, 10.0), process("tf32", 1, 9.0, (7.0,)), process("", 2, 10.0, (5.0,)))
        ),
    }
    runs = [tmp_path / name for name in calls]
    for run in runs:
        write_trials(start_run(run) / "trials.jsonl", (calls[run.name],))
    shown = [*([run] for run in runs), *([runs[0], "--format", style] for style in ("json", "csv")), runs]
    check_transcript("try", [("try", "--report", *words) for words in shown])


def test_code_to_write_holds_the_argument() -> None:
    assert write_code("compile") == "model = torch.compile(model)"
    assert write_code("compile:reduce-overhead") == 'model = torch.compile(model, mode="reduce-overhead")'
    assert write_code("threads:4") == "torch.set_num_threads(4)"


def test_a_summary_shows_what_a_try_measured_and_ranks_by_it() -> None:
    advice = {"cause": "c", "line": None, "module": None, "change": "x", "after_ns": None, "saves_bytes": None}
    advice |= {"costs": None, "evidence": {}, "proof": "profkit compare RUN NEW"}
    first = Advice(code="a", edit="tf32", saves_ns=Interval(5e5, 6e5, 7e5), **advice)  # type: ignore[arg-type]
    second = Advice(code="b", edit="optimizer:fused", saves_ns=Interval(1e5, 2e5, 3e5), **advice)  # type: ignore[arg-type]
    graphs = Advice(code="launches", edit="compile:reduce-overhead", saves_ns=Interval(1e6, 3e6, 4e6), **advice)  # type: ignore[arg-type]
    trials = (Trials(PLAN, (), (*FUSED, process("compile", 1, 9.5), process("compile", 2, 10.4))),)
    result = add_trials(AdviceResult((graphs, first, second)), trials)
    # What compiling is expected to save, and nobody measured, counts for a quarter.
    assert [each.code for each in result.tries] == ["b", "launches", "a"]
    text = " ".join(render(build_summary_document(Summary("run"), result), "table").split())
    assert "1 c · x · measured -1.000 ms a step (-1.248 … -0.752 ms)" in text
    assert "Tried compile: measured -550.0 µs a step" in text
    (trial,) = result.to_dict()["trials"]
    assert trial["edits"] == ["compile"]
    assert result.to_dict()["advice"][0]["measured"]["change_ns"]["mean"] == pytest.approx(-1e6)
    assert add_trials(AdviceResult((first,)), ()) == AdviceResult((first,))


def test_the_page_shows_a_bar_for_each_edit_with_its_interval(tmp_path: Path) -> None:
    write_trials(start_run(tmp_path) / "trials.jsonl", (Trials(PLAN, (), tuple(FUSED)),))
    shutil.copy(SMALL, tmp_path / "trace.sqlite")
    page = render_report(open_capture(tmp_path))
    assert 'id="trials"' in page
    assert "9.999 ms, measured -1.000 ms a step (-1.248 … -0.752 ms)" in page or "10.00 ms, measured -1.000 ms" in page
    assert page.count('class="dot-unprofiled"') >= 2


@pytest.mark.parametrize(
    ("line", "edit", "after"),
    [
        (
            "optimizer = AdamW(model.parameters(), lr=1e-3)",
            "optimizer:fused",
            "AdamW(model.parameters(), lr=1e-3, fused=True)",
        ),
        (
            "optimizer = AdamW(p(), foreach=False, fused=False)",
            "optimizer:fused",
            "AdamW(p(), foreach=False, fused=True)",
        ),
        ("optimizer.zero_grad(set_to_none=False)", "zero-grad:none", "optimizer.zero_grad(set_to_none=True)"),
        ("loader = DataLoader(data)", "workers:4", "DataLoader(data, num_workers=4, persistent_workers=True)"),
        ("optimizer = AdamW(", "optimizer:fused", None),
        ("loss = model(x)", "compile", None),
        ("loader = DataLoader(data)  # now", "pin-memory", None),
    ],
)
def test_the_change_of_a_line_adds_or_replaces_keywords_of_its_call(
    tmp_path: Path, line: str, edit: str, after: str | None
) -> None:
    (tmp_path / "train.py").write_text(f"\n    {line}\n")
    changed = write_change(f"{tmp_path}/train.py:2 main", parse_edits([edit])[0])
    assert changed == (
        None if after is None else (line, line.partition(" = ")[0] + " = " + after if " = " in line else after)
    )
