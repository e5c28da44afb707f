"""Causes of steps on the CPU: what has one is advised with the step without it, what nearly has it is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import profkit
from profkit.analysis.causes.advice import AdviceResult, find_advice
from profkit.analysis.lines import find_lines
from profkit.analysis.step_replay.limits import OUTSIDE
from profkit.analysis.summarize import summarize_capture
from profkit.reading import open_capture
from profkit.report.commands.answer import describe_answer, draw_tree
from profkit.report.commands.summary import describe_step
from profkit.run.directory import LINES, Run, name_of_rank
from profkit.run.lines import LineSteps, LineTime, split_lines, write_lines
from tests.in_process import check_command, run_command
from tests.kineto_builder import row, written
from tests.rank_builder import write_two_hosts
from tests.run_builder import start_run

MS = 1_000_000
NODE = "autograd::engine::evaluate_function: "
PHASES = {"forward": 30, "backward": 40, "optimizer": 10}
"""Of a step of 100 ms, in ms; 20 ms lie outside of them."""

Operators = Sequence[tuple[str, float]]
"""Their names, and how long they take in µs."""


def line(number: int, time_ms: float, phase: str | None = None, called: str | None = None, **more: Any) -> LineTime:
    fields: dict[str, Any] = {"file": "train.py", "function": "prepare", "thread": "main", "samples": 50, "waits": 0.0}
    time_ns = round(time_ms * MS)
    return LineTime(
        **{**fields, "line": number, "called": called, "phase": phase, "time_ns": time_ns, "error_ns": MS // 5, **more}
    )


def advise(
    folder: Path,
    *lines: LineTime,
    phases: dict[str, float] | None = None,
    operators: dict[str, Operators] | None = None,
    steps_ms: Sequence[float] = (100.0,) * 5,
    outside: Operators = (),
    conditions: dict[str, Any] | None = None,
    dtype: str | None = None,
    loader: dict[str, Any] | None = None,
    **facts: Any,
) -> AdviceResult:
    """Write a run of two recorded steps, and return what is advised; ``operators`` are those of a path of ranges."""
    events, phases = [], PHASES if phases is None else phases
    for step in range(2):
        now = 1_000 + 110_000 * step
        events.append(row("user_annotation", f"step {step}", now, 100_000))
        for name, time_us in outside:
            events.append(row("cpu_op", name, now, time_us))
            now += time_us
        for phase, time_ms in phases.items():
            events.append(row("user_annotation", phase, now, time_ms * 1_000))
            within = now
            for path, called in (operators or {phase: [("aten::mm", 900 * time_ms)]}).items():
                if path.split("/")[0] != phase:
                    continue
                whole = sum(time_us + 0.1 for _, time_us in called)
                for name in path.split("/")[1:]:
                    events.append(row("user_annotation", name, within, whole))
                for name, time_us in called:
                    events.append(row("cpu_op", name, within, time_us))
                    within += time_us + 0.1
            now += time_ms * 1_000
    folder.mkdir(exist_ok=True)
    written(folder, events, "trace.json.gz")
    of_phases = {f"{phase}_ns": round(time_ms * MS) for phase, time_ms in phases.items()}
    steps = tuple({**of_phases, "step_ns": round(time_ms * MS)} for time_ms in steps_ms)
    all_conditions = {"cpu_count": 4, "cpu_threads": 1, **(conditions or {})}
    start_run(folder, **{"device": "cpu", "attached": {"steps": steps}, "conditions": all_conditions, **facts})
    write_lines(folder / "lines.jsonl", split_lines(LineSteps(steps, **(loader or {})), lines))
    if dtype is not None:
        work = {"version": 1, "source": "counted", "dtype": dtype, "model_flops": 10, "missing": [], "ranges": []}
        (folder / "work.json").write_text(json.dumps(work))
    opened = open_capture(folder)
    return find_advice(opened, summarize_capture(opened))


def codes(result: AdviceResult) -> list[str]:
    return [advice.code for advice in result.tries]


def expected_ms(result: AdviceResult) -> float:
    (advice,) = result.tries
    assert advice.after_ns is not None
    assert advice.after_ns.low < advice.after_ns.expected < advice.after_ns.high
    return advice.after_ns.expected / MS


def test_an_evaluation_in_few_steps_is_no_part_of_the_step_that_is_shown(tmp_path: Path) -> None:
    """Of ten steps of 100 ms one validates for 290: the phases keep their times, and the sentence names the longest."""
    advise(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    usual = manifest["attached"]["steps"][0]
    validating = {**usual, "inference_ns": 290 * MS, "step_ns": 390 * MS}
    manifest["attached"]["steps"] = [*[usual] * 9, validating]
    path.write_text(json.dumps(manifest))
    opened = open_capture(tmp_path)
    summary = summarize_capture(opened)
    assert summary.tree is not None
    parts = {next(iter(part.phases)): part.time_ns / MS for part in summary.tree.parts}
    assert (summary.tree.step_ns, parts) == (100 * MS, {"backward": 40, "forward": 30, OUTSIDE: 20, "optimizer": 10})
    assert describe_answer(summary, find_advice(opened, summary)).startswith("A step takes 100.0 ms: 40.00 ms of it in")
    assert next(describe_step(summary)) == "100.0 ms unprofiled (10 steps, 1 rare one left out)"
    assert not any("vary widely" in finding.message for finding in summary.findings)


def _write_two_ranks(folder: Path) -> Path:
    """Write a run of two ranks, of which rank 0 waits in backward for rank 1, which sleeps: steps of 100 ms."""

    def events_of(step: int, _: int) -> list[dict[str, Any]]:
        start = 1_000 + 110_000 * step
        return [
            row("user_annotation", f"step {step}", start, 100_000),
            row("user_annotation", "backward", start, 40_000),
            row("cpu_op", "aten::mm", start, 30_000),
        ]

    write_two_hosts(folder, 3, events_of)
    processes = []
    for rank, backward_ms in enumerate((60, 40)):
        step = {"backward_ns": backward_ms * MS, "step_ns": (100 - rank) * MS}
        processes.append(
            {"process": f"rank{rank}", "pid": 7, "rank": rank, "attached": [step] * 11, "profiled": [step] * 3}
        )
        looked = (({**step, "backward_ns": 50 * MS}),) * 5
        lines = split_lines(LineSteps(looked), [line(9, 50, "backward", "loss.backward", samples=99)])
        write_lines(folder / name_of_rank(LINES, rank), lines)
    first: dict[str, Any] = processes[0]
    times = {part: {"steps": first[part]} for part in ("attached", "profiled")}
    return start_run(folder, device="cpu", processes=processes, **times)


def test_each_rank_is_shown_with_the_steps_that_it_timed(tmp_path: Path) -> None:
    run = _write_two_ranks(tmp_path)
    for rank, (backward, step, lines) in enumerate((("60.00", "100.0", 60), ("40.00", "99.00", 40))):
        said = run_command("kernels", run, "--rank", str(rank)).stdout
        times = {
            words[0]: words[1] for text in said.splitlines() if (words := text.split()) and words[-1].startswith("+")
        }
        assert (times["backward"], times["step"]) == (backward, step)
        found = find_lines(Run(run), rank)
        assert (found.step_ns, [line.time_ns for line in found.lines]) == ((100 - rank) * MS, [lines * MS])
        asked = profkit.open(run, rank=rank).step_times()
        assert asked is not None
        assert [times.clean_ns for times in asked.phases] == [lines * MS, (100 - rank) * MS]
    manifest = Run(run).manifest
    assert manifest.first_rank == 0
    assert manifest.of_rank(2).unprofiled is None


def test_the_step_of_ranks_on_the_cpu_is_said_to_be_the_first_ones_and_why_nothing_is_predicted(tmp_path: Path) -> None:
    opened = open_capture(_write_two_ranks(tmp_path))
    summary = summarize_capture(opened)
    assert summary.tree is not None
    assert (summary.tree.step_ns, summary.tree.rank) == (100 * MS, 0)
    assert next(draw_tree(summary.tree)) == "on rank 0, whose steps these are:"
    nothing = find_advice(opened, summary).nothing
    assert nothing == "Nothing is predicted: 2 ranks compute on the CPU, and each of them waits for the others."


NOTHING = "Nothing found that surely saves more than 2 %: the step is 40 % backward and 30 % forward and "
FORWARD, BACKWARD = ("forward/net/net.attention", "backward/net/net.attention")
LOOP: dict[str, Operators] = {FORWARD: [("aten::copy_", 5.0)] * 2_000, "backward": [("aten::mm", 36_000)]}


def test_lines_outside_of_the_passes_are_one_cause_with_what_is_written_in_their_function(tmp_path: Path) -> None:
    result = advise(tmp_path, line(10, 8), line(11, 4, function="prepare.<listcomp>", called="df.iloc"))
    (advice,) = result.tries
    assert (advice.code, advice.line and advice.line.line, advice.evidence["lines"]) == ("python", 10, "10, 11")
    assert expected_ms(result) == 88
    assert advice.change.startswith("do it for all elements at once")
    average = advise(tmp_path / "average", line(10, 8, called="torch._foreach_lerp_"))
    assert average.tries[0].change == "do it less often"


def test_a_line_that_multiplies_matrices_is_a_part_of_the_model_called_by_name(tmp_path: Path) -> None:
    assert codes(advise(tmp_path, line(10, 8), line(11, 4), dtype="fp32")) == ["python"]
    product = {"path": [], "operator": "mm", "dtype": "float32", "file": "train.py", "line": 10, "function": "prepare"}
    work = json.loads((tmp_path / "work.json").read_text())
    work["lines"] = [{**product, "count": 1, "flops": 1_000, "bytes": 10}]
    (tmp_path / "work.json").write_text(json.dumps(work))
    opened = open_capture(tmp_path)
    assert not find_advice(opened, summarize_capture(opened)).tries


def test_what_large_operators_compute_outside_of_the_passes_may_have_to_stay(tmp_path: Path) -> None:
    highs = []
    for name, outside in {"large": [("aten::histogram", 5_000.0)] * 2, "small": [("aten::copy_", 10.0)] * 900}.items():
        result = advise(tmp_path / name, line(10, 12), outside=outside)
        assert expected_ms(result) == 88
        (advice,) = result.tries
        assert advice.after_ns is not None
        highs.append(advice.after_ns.high / MS)
    assert highs[0] > 94 + 4 > highs[1]


def test_steps_in_which_nothing_was_computed_have_no_share_of_it(tmp_path: Path) -> None:
    advise(tmp_path, operators={"elsewhere": []})
    steps = [row("user_annotation", f"step {step}", 1_000 * step, 900) for step in range(1, 3)]
    written(tmp_path, [*steps, row("cpu_op", "aten::mm", 5_000, 100)], "trace.json.gz")
    said = " ".join(check_command("summary", tmp_path).stdout.split())
    assert "WORK no operator time in the recorded steps" in said


def test_of_several_causes_it_is_said_what_they_buy_together(tmp_path: Path) -> None:
    result = advise(tmp_path, line(10, 8), line(70, 6, function="log"), conditions={"anomaly_detection": True})
    assert codes(result) == ["python", "python"]
    assert result.together_ns is not None
    assert result.together_ns.expected == 86 * MS


NO_CAUSE: dict[str, list[LineTime]] = {
    "short": [line(10, 1.5)],
    "optimizer": [line(10, 8, called="opt.step")],
    "calls a trainer": [line(10, 8), line(10, 30, "backward"), line(10, 10, "optimizer")],
    "the loss": [
        line(7, 30, "forward", "model"),
        line(8, 8, called="F.cross_entropy"),
        line(9, 40, "backward", "x.backward"),
    ],
    "called for the loss": [
        line(7, 30, "forward", "model", function="train"),
        line(8, 8, function="train", called="prepare", is_caller=True),
        line(9, 40, "backward", "loss.backward", function="train"),
        line(40, 8),
    ],
    "a worker": [line(10, 8, thread="worker")],
    "not in each step": [line(10, 16, error_ns=6 * MS)],
    "uneven steps": [line(10, 15)],
}


@pytest.mark.parametrize("name", NO_CAUSE)
def test_a_line_that_is_short_or_trains_is_no_cause(tmp_path: Path, name: str) -> None:
    given: dict[str, Any] = {"steps_ms": (80, 90, 100, 120, 130)} if name == "uneven steps" else {}
    result = advise(tmp_path, *NO_CAUSE[name], **given)
    assert not result.tries
    assert result.nothing == f"{NOTHING}20 % outside of phases and 10 % optimizer."


def test_without_a_forward_pass_lines_outside_of_phases_may_be_the_training_itself(tmp_path: Path) -> None:
    assert not advise(tmp_path, line(10, 30), phases={"optimizer": 10}).tries


def test_a_loop_of_small_operators_is_named_with_its_module_and_backward_pass(tmp_path: Path) -> None:
    result = advise(tmp_path / "mask", line(10, 20, "forward"), operators=LOOP)
    (advice,) = result.tries
    assert (advice.code, advice.module, advice.line and advice.line.line) == ("loop", "net.attention", 10)
    assert expected_ms(result) == 80
    of_loop: Operators = [("aten::copy_", 5.0)] * 1_000 + [("aten::index_put_", 25.0)] * 200
    operators = LOOP | {BACKWARD: of_loop, "backward": [("aten::mm", 10_000.0)]}
    result = advise(tmp_path / "sums", line(10, 20, "forward"), operators=operators)
    assert expected_ms(result) == pytest.approx(60)
    (advice,) = result.tries
    assert advice.after_ns is not None
    assert advice.after_ns.high > 70 * MS


@pytest.mark.parametrize(
    ("which", "operators"),
    [
        (line(10, 20, "forward"), {FORWARD: [("aten::copy_", 5.0)] * 200}),
        (line(10, 20, "forward"), {FORWARD: [("aten::mm", 50.0)] * 400}),
        (line(10, 20, "forward"), {f"forward/net.{at}": [("aten::copy_", 5.0)] * 200 for at in range(9)}),
        (line(10, 20, "forward", "self.mlp"), LOOP),
        (line(10, 20, "backward"), LOOP),
    ],
    ids=["few", "large", "in many modules", "a module", "backward"],
)
def test_operators_that_are_few_or_large_are_no_loop(
    tmp_path: Path, which: LineTime, operators: dict[str, Operators]
) -> None:
    assert not advise(tmp_path, which, operators={"backward": [("aten::mm", 36_000)], **operators}).tries


@pytest.mark.parametrize(("cpus", "after_ms"), [(8, 70.25), (1, None)])
def test_a_loader_without_workers_waits_less_with_some_where_there_are_cpus(
    tmp_path: Path, cpus: int, after_ms: float | None
) -> None:
    phases = {"data": 30, "forward": 30, "backward": 40}
    result = advise(tmp_path, line(10, 30, "data"), phases=phases, conditions={"cpu_count": cpus})
    assert codes(result) == (["loader"] if after_ms else [])
    if after_ms:
        assert result.tries[0].edit == "workers:2"
        assert "pin_memory" not in result.tries[0].change
        assert expected_ms(result) == pytest.approx(after_ms, rel=0.06)


@pytest.mark.parametrize(("line_ms", "after_ms"), [(90, 70.6), (20, None)])
def test_a_line_of_the_dataset_is_the_cause_where_no_cpu_is_free_for_more_workers(
    tmp_path: Path, line_ms: int, after_ms: float | None
) -> None:
    """Two workers take 120 ms each for a batch, of the program's 60 ms."""
    parse = line(12, line_ms, thread="worker", called="json.loads", function="__getitem__")
    result = advise(
        tmp_path,
        parse,
        phases={"data": 30, "forward": 30, "backward": 40},
        conditions={"cpu_count": 2},
        loader={"batches": 50, "batch_ns": 120 * MS, "batch_cpu_ns": 120 * MS},
        processes=[{"pid": 7, "loading": {"workers": 2, "batches_per_step": 1.0}}],
    )
    assert codes(result) == (["loader"] if after_ms else [])
    if after_ms:
        assert result.tries[0].change == "do json.loads once, or beforehand, not for every sample"
        assert expected_ms(result) == pytest.approx(after_ms, rel=0.02)


def test_anomaly_detection_costs_its_checks_and_a_stack_for_each_operation(tmp_path: Path) -> None:
    of_backward = [(f"{NODE}MulBackward0", 100.0)] * 4 + [(f"{NODE}torch::autograd::AccumulateGrad", 100.0)] * 4
    of_backward += [("aten::mm", 9_200.0), ("aten::ne", 6_000.0), ("aten::any", 4_000.0)]
    operators: dict[str, Operators] = {"forward": [("aten::mm", 20_000)], "backward": of_backward}
    result = advise(tmp_path / "on", operators=operators, conditions={"anomaly_detection": True})
    assert codes(result) == ["anomaly"]
    assert expected_ms(result) == 100 - 20 - 4 * 0.45
    assert not advise(tmp_path / "off", operators=operators, conditions={"anomaly_detection": False}).tries


def test_double_precision_is_named_where_products_were_counted_in_it(tmp_path: Path) -> None:
    result = advise(tmp_path / "double", dtype="float64")
    assert codes(result) == ["float64"]
    assert expected_ms(result) == 65
    called: dict[str, Operators] = {"forward": [("aten::mul", 3.0)] * 2_000, "backward": [("aten::mm", 9_000.0)]}
    assert expected_ms(advise(tmp_path / "small", dtype="float64", operators=called)) == 80
    assert not advise(tmp_path / "single", dtype="fp32").tries


def test_what_is_computed_again_is_saved_without_checkpoints(tmp_path: Path) -> None:
    block: Operators = [("aten::mm", 9_000)]
    operators = {"backward/net/recompute": block, "backward": [("aten::mm", 27_000.0)]}
    result = advise(tmp_path, operators=operators)
    assert codes(result) == ["recompute"]
    assert expected_ms(result) == 90


def test_more_threads_than_cpus_are_a_note(tmp_path: Path) -> None:
    crowded = advise(tmp_path / "crowded", conditions={"cpu_count": 2, "cpu_threads": 8})
    assert crowded.notes == ("torch computes with 8 threads on 2 CPUs: torch.set_num_threads(2)",)
    assert not advise(tmp_path / "fitting", conditions={"cpu_count": 2, "cpu_threads": 2}).notes


@pytest.mark.parametrize(
    ("called", "passed", "phase", "note"),
    [
        (("model", "model"), ("model",), "forward", "model is called with gradients 2 times a step, and backward"),
        (("model", "model"), ("model", "model"), "forward", None),
        (("model", "model"), ("model",), "inference", None),
        (("model", "teacher"), ("model",), "forward", None),
        (("model/identity", "model/identity"), ("model", "model"), "forward", None),
    ],
)
def test_a_model_that_is_evaluated_with_gradients_keeps_graphs_that_nobody_reads(
    called: Sequence[str], passed: Sequence[str], phase: str, note: str | None, tmp_path: Path
) -> None:
    """``phase`` is that of the calls after the first. A frozen teacher has no graph, an identity none of its own."""
    events = []
    for step in range(3):
        now = 1_000.0 + 10_000 * step
        events.append(row("user_annotation", f"step {step}", now, 9_000))
        phases = ["forward", *[phase] * (len(called) - 1), *["backward"] * len(passed)]
        for around, path in zip(phases, (*called, *passed), strict=True):
            for name in (around, *path.split("/")):
                events.append(row("user_annotation", name, now, 500))
            events.append(row("cpu_op", "aten::mm", now + 1, 400))
            now += 1_000
    written(tmp_path, events, "trace.json.gz")
    opened = open_capture(tmp_path / "trace.json.gz")
    notes = find_advice(opened, summarize_capture(opened)).notes
    assert [text.startswith(note or "") for text in notes] == ([] if note is None else [True])
