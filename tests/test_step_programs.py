"""Unedited scripts of every style under ``profkit run``: what their steps are, what is recorded, and a second run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from textwrap import indent
from typing import Any

import pytest

from profkit.run.manifest import Process
from profkit.run.recording import (
    COMMAND_WARMUP,
    COMPLETE,
    CUT_SHORT,
    NOT_REACHED,
    VARIABLE,
    Failure,
    MemoryOptions,
    Order,
    has_recorded,
    leave_failure,
    leave_process,
    take_failures,
    take_processes,
)

pytest.importorskip("torch")

from profkit import read_trace
from profkit.analysis.time_account import measured_ranges
from profkit.capture.session import Session
from profkit.launch import passes
from profkit.launch.passes import Outcome, find_another_try, why_no_step, why_not_twice
from profkit.run.recording import describe_step
from tests.forked_scripts import Forks
from tests.golden import check_text
from tests.in_process import check_profkit, ended, manifest_of
from tests.test_steps import TRAIN, Script
from tests.training_scripts import training, training_of_ranks

PLAIN = """
import torch

x = torch.ones(4, 4)
for _ in range(6):
    x = torch.tanh(x @ x)
"""

EVALUATES = "with torch.no_grad():\n    model(torch.ones(2, 4))"
EVALUATED_FIRST = training(5, EVALUATES, model=f"nn.Linear(4, 4)\nfor _ in range(8):\n{indent(EVALUATES, ' ' * 4)}")


Record = Callable[..., CompletedProcess[str]]


@pytest.fixture
def record(tmp_path: Path, forks: Forks) -> Record:
    def call(script: str, *options: str) -> CompletedProcess[str]:
        (tmp_path / "script.py").write_text(script)
        words = ["run", "-o", "run", *options, "--", sys.executable, "script.py"]
        run = check_profkit if "--nsys" in options else forks.check_profkit
        return run(*words, cwd=tmp_path)

    return call


def _paths(place: Path) -> dict[str, int]:
    """Return how often each range of profkit's was open in the recorded steps, by path."""
    opened = read_trace(place / "run")
    assert not opened.self_check.findings, opened.self_check.findings
    rows = opened.ranges(numbered=False).ranges
    return {re.sub(r"^step \d+", "step *", row.path): row.instances for row in rows if "Optimizer." not in row.path}


def test_a_program_without_any_step_is_recorded_as_a_whole(tmp_path: Path, record: Record) -> None:
    done = record(PLAIN)
    assert "it runs again and is recorded as a whole" in done.stderr
    assert "A step is the whole program" in done.stdout
    opened = read_trace(tmp_path / "run")
    assert {row.name: row.count for row in opened.kernels("step *").kernels}["aten::mm"] == 6
    workload = manifest_of(tmp_path / "run")["workload"]
    assert (workload["step_on"], workload["warmup_steps"], workload["steps"]) == ("whole", 0, 1)


def test_a_program_that_is_chosen_as_a_whole_runs_once(tmp_path: Path, record: Record) -> None:
    done = record(PLAIN, "--step-on", "whole")
    assert "again" not in done.stderr
    assert _paths(tmp_path) == {"step *": 1}


def test_a_model_that_is_evaluated_first_is_recorded_while_it_is_trained(tmp_path: Path, record: Record) -> None:
    done = record(EVALUATED_FIRST, "--warmup", "2", "--steps", "2")
    assert "it runs again" in done.stderr
    paths = _paths(tmp_path)
    assert paths["step */optimizer"] == paths["step */forward"] == paths["step */inference"] == 2
    assert manifest_of(tmp_path / "run")["processes"][0]["step"] == "optimizer"


def _outcome(process: Process | None, status: int = 0, **order: Any) -> Outcome:
    processes = () if process is None else (process,)
    return Outcome(Order("run", "kineto", **{"warmup_steps": 5, "steps": 3, **order}), status, processes, (), None)


def _made(steps: int, step: str | None = "optimizer", **seen: int) -> Process:
    return Process(state=NOT_REACHED, steps_seen=steps, step=step, seen=seen)


OUTCOMES = {
    "4 steps": _outcome(_made(4)),
    "2 steps": _outcome(_made(2)),
    "1 step": _outcome(_made(1)),
    "11 steps": _outcome(_made(11)),
    "5 iterations": _outcome(replace(_made(5), step_times=4)),
    "5 iterations of one rank alone": Outcome(
        Order("run", "kineto", 5, 3),
        0,
        tuple(replace(_made(9), rank=rank, state=COMPLETE, step_times=4 - 3 * rank) for rank in range(2)),
        (),
        None,
    ),
    "9 iterations, and a process of a rank without steps": Outcome(
        Order("run", "kineto", 5, 3),
        0,
        (Process(rank=0, state=COMPLETE, step="optimizer", step_times=4), Process(rank=0, state=NOT_REACHED)),
        (),
        None,
    ),
    "5 steps, cut short": _outcome(replace(_made(5), state=CUT_SHORT)),
    "7 backward passes": _outcome(_made(0, None, backward=7, **{"call:Net": 7})),
    "2 calls": _outcome(_made(0, None, **{"call:Net": 2})),
    "nothing": _outcome(_made(-1, None)),
    "calls, then an optimizer": _outcome(
        Process(state=COMPLETE, steps_seen=8, step="call", step_changed_to="optimizer")
    ),
    # No second run would show more.
    "2 steps, failed": _outcome(_made(2), status=1),
    "no process": _outcome(None),
    "complete": _outcome(Process(state=COMPLETE, steps_seen=8, step="optimizer")),
    "no step of the chosen optimizer": _outcome(_made(0, None, **{"optimizer:SGD": 9}), step_on="AdamW"),
    "no step as a whole": _outcome(_made(0, None), step_on="whole"),
    "steps of its own": _outcome(replace(_made(2), step=None), own_steps=True),
}
STEPS = (("optimizer",), ("optimizer", "Muon", "AdamW"), ("optimizer", *"abcd"), ("call", "encoder", "decoder", "head"))


def test_what_a_second_run_records_and_what_is_said_without_one() -> None:
    """A second run is recorded after its warm-up steps, its steps and what ends one; a step reads as plain English."""
    text = ""
    for name, outcome in OUTCOMES.items():
        again = find_another_try(outcome)
        order = again and again.order
        wanted = "no second run" if again is None else order and (order.warmup_steps, order.steps, order.step_on)
        text += f"{name}: {wanted}\n"
    order = Order("run", "kineto", 5, 3)
    for process, how in ((_made(2), order), (_made(-1, None), order)):
        text += f"{why_no_step([process], how)}\n"
    chosen = replace(order, step_on="optimizer:Muon")
    text += f"{why_no_step([_made(0, None, **{'optimizer:SGD': 9})], chosen)}\n"
    for word, *names in (*STEPS, ("generate", "Llama")):
        text += f"{describe_step(word, tuple(names))}\n"
    check_text("another-try", text)


def test_what_a_second_run_would_choose_stands_among_the_options_that_are_named() -> None:
    iterations, backwards = (find_another_try(OUTCOMES[name]) for name in ("5 iterations", "7 backward passes"))
    assert iterations is not None
    assert backwards is not None
    assert iterations.options == "--warmup 2 --steps 3 --step-on 'optimizer*4'"
    assert backwards.options == "--warmup 2 --steps 3 --step-on backward"
    chosen = find_another_try(_outcome(replace(_made(5), step_times=4), step_on="optimizer:Adam*4"))
    assert chosen is not None
    assert (chosen.options, chosen.order.step_on) == ("--warmup 2 --steps 3", "optimizer:Adam*4")


ROLLOUT = """if number % 4 == 0:
    with torch.no_grad():
        {asks}
"""
GENERATES = """class Model(nn.Linear):
    @torch.no_grad()
    def generate(self, x):
        return self(self(x))

model = Model(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"""
METRIC = "class Metric(nn.Module):\n    def forward(self, x):\n        return x.mean()"


def _rolls_out(steps: int, asks: str = "model(torch.ones(2, 4))", before: str = "") -> str:
    script = training(steps, ROLLOUT.format(asks=asks))
    return script.replace("for number", f"{before}\nfor number")


@pytest.mark.parametrize(
    ("script", "times"),
    [
        (_rolls_out(60), 4),
        (_rolls_out(60, "model.generate(torch.ones(2, 4))", GENERATES), 4),
        (_rolls_out(60, "torch.ones(2, 4)"), 1),
        (_rolls_out(60, "model.eval()(torch.ones(2, 4)), model.train()"), 1),
        (_rolls_out(60, "Metric()(loss)", METRIC), 1),
    ],
    ids=["rollout", "generate", "nothing", "evaluation", "metric"],
)
def test_an_iteration_that_begins_with_a_rollout_is_one_step(
    tmp_path: Path, record: Record, script: str, times: int
) -> None:
    done = record(script, "--no-lines")
    (process,) = manifest_of(tmp_path / "run")["processes"]
    assert (process["step"], process["step_times"]) == ("optimizer", times)
    assert ("A step (4 steps of the optimizer SGD) takes" in done.stdout) == (times == 4)
    assert ("A step is 4 steps of the optimizer SGD (--step-on" in done.stdout) == (times == 4)
    paths = _paths(tmp_path)
    assert (paths["step *"], paths["step */optimizer"], paths["step */backward"]) == (3, 3 * times, 3 * times)


def test_a_program_with_few_iterations_runs_again_and_counts_them_from_the_start(
    tmp_path: Path, record: Record
) -> None:
    done = record(_rolls_out(32), "--no-lines")
    assert "it runs again with --warmup 2 --steps 3 --step-on 'optimizer*4'" in done.stderr
    manifest = manifest_of(tmp_path / "run")
    (process,) = manifest["processes"]
    assert (process["step_times"], process["steps_seen"]) == (4, 5)
    assert manifest["workload"]["step_on"] == "optimizer*4"
    assert _paths(tmp_path)["step */inference"] == 3


def test_ranks_of_which_one_alone_is_asked_count_alike_in_a_second_run(tmp_path: Path, forks: Forks) -> None:
    asks = ROLLOUT.format(asks="model.module(torch.ones(2, 4))")
    alone = f"if distributed.get_rank() == 0:\n{indent(asks, ' ' * 4)}"
    (tmp_path / "script.py").write_text(training_of_ranks(60, alone))
    words = ["run", "-o", "run", "--no-lines", "--nproc-per-node", "2", "--", sys.executable, "script.py"]
    done = forks.check_profkit(*words, cwd=tmp_path)
    assert "its ranks disagree on how many steps make an iteration; it runs again and counts each" in done.stderr
    manifest = manifest_of(tmp_path / "run")
    assert [process["step_times"] for process in manifest["processes"]] == [1, 1]
    assert manifest["workload"]["step_on"] == "optimizer"


def _session(place: Path, lengths: list[int], calls: int = 2, **order: Any) -> Process:
    """Return what a session leaves of a program whose rollouts have these distances, and so many calls each."""
    session = Session(Order(str(place), "none", **{"warmup_steps": COMMAND_WARMUP, "steps": 3, **order}))
    script = Script(session.hooks.steps)
    script.thing("SGD")  # a program makes its optimizer before its first rollout
    for length in lengths:
        for at in range(length):
            if at == 0:
                script.roll_out(calls)
            script.play(TRAIN)
            for number in script.made:
                session.boundary(number)
            script.made.clear()
    session.end()
    (process,) = take_processes(place)
    return process


@pytest.mark.parametrize(
    ("lengths", "order", "times", "seen", "timed"),
    [
        # One iteration passes, five are timed, and one passes before those that are recorded.
        ([4] * 30, {}, 4, 10, 6),
        ([4] * 30, {"step_on": "optimizer*4"}, 4, 10, 6),
        ([12] * 30, {}, 12, 10, 6),  # its third rollout comes later than the usual recording
        ([16] * 30, {"calls": 8}, 16, 10, 6),  # and here its second, which a long first one promises
        ([16] * 30, {}, 1, 17, 11),
        ([9, 50], {}, 1, 23, 17),  # the recording waits for a third rollout, and begins without
        ([5, 5, 50], {}, 5, 10, 6),
        ([5, 50], {}, 1, 17, 11),
        ([4] * 30, {"warmup_steps": 5}, 1, 8, 4),
        ([4] * 60, {"warmup_steps": 20}, 4, 23, 17),  # so many of them pass as were asked for
        ([4] * 30, {"warmup_steps": 5, "step_on": "optimizer*4"}, 4, 8, 4),
        ([4] * 30, {"within": True}, 1, 17, 11),
        ([4] * 30, {"within": True, "step_on": "optimizer*4"}, 4, 17, 11),
    ],
)
def test_of_iterations_fewer_are_timed_before_the_recorded_ones(
    tmp_path: Path, lengths: list[int], order: dict[str, Any], times: int, seen: int, timed: int
) -> None:
    process = _session(tmp_path, lengths, **order)
    assert (process.state, process.step_times, process.steps_seen) == (COMPLETE, times, seen)
    assert (len(process.attached), len(process.profiled)) == (timed, 3)


def test_a_recording_of_memory_looks_for_no_iterations(tmp_path: Path) -> None:
    assert not Session(Order(str(tmp_path), "memory", COMMAND_WARMUP, 3)).hooks.steps.finds_iterations


def test_what_runs_after_the_last_complete_step_is_no_step(tmp_path: Path, record: Record) -> None:
    script = EVALUATED_FIRST.replace("range(8)", "range(0)").replace("range(5)", "range(3)")
    done = record(script, "--warmup", "2", "--steps", "2")
    assert "1 of the 2 steps requested are complete" in done.stderr
    opened = read_trace(tmp_path / "run")
    assert [len(steps) for label, steps in measured_ranges(opened.attribution).items() if label == "step"] == [1]
    assert not opened.self_check.findings, opened.self_check.findings


OWN_RANGES = """
import nvtx
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    with torch.profiler.record_function("iteration"), nvtx.annotate("iteration"):
        with torch.profiler.record_function("own forward"), nvtx.annotate("own forward"):
            loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        with torch.profiler.record_function("own update"), nvtx.annotate("own update"):
            optimizer.step()
        optimizer.zero_grad()
"""

OWN_TREE = {
    "step *": 2,
    "step */iteration": 2,
    "step */iteration/own forward": 2,
    "step */iteration/own forward/forward": 2,
    "step */iteration/own forward/forward/model": 2,
    "step */iteration/backward": 2,
    "step */iteration/backward/model": 2,
    "step */iteration/own update": 2,
    "step */iteration/own update/optimizer": 2,
}


def test_a_step_holds_the_scripts_own_ranges_around_it(tmp_path: Path, record: Record) -> None:
    record(OWN_RANGES, "--warmup", "3", "--steps", "2")
    assert _paths(tmp_path) == OWN_TREE


@pytest.mark.nsys
def test_nvtx_closes_the_scripts_ranges_and_the_steps_in_their_order(tmp_path: Path, record: Record) -> None:
    record(OWN_RANGES, "--nsys", "--warmup", "3", "--steps", "2")
    paths = _paths(tmp_path)
    assert {path: count for path, count in paths.items() if path.startswith("step ")} == OWN_TREE
    # Without CUDA nsys records the process from its start to its end, with the step whose work is counted.
    assert paths["iteration"] == paths["iteration/own update"] == 3
    assert paths["warmup/step 5/iteration"] == paths["warmup/step 5/iteration/own update"] == 1


SHORT = training(3)
WRITES = "\nimport sys\nopen(sys.argv[1], 'a').write('a line')"


def _record(forks: Forks, place: Path, script: str, *words: str, status: int = 0) -> CompletedProcess[str]:
    (place / "script.py").write_text(script)
    options = ["-o", "run", "--warmup", "4", "--steps", "2"]
    return ended(forks.run_profkit("run", *options, "--", sys.executable, "script.py", *words, cwd=place), status)


@pytest.mark.parametrize("folder", ["here", "elsewhere"])
def test_a_short_script_that_wrote_a_file_is_not_run_again_by_itself(forks: Forks, tmp_path: Path, folder: str) -> None:
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    written = tmp_path / folder / "out.csv"
    done = _record(forks, tmp_path / "here", SHORT + WRITES, str(written))
    assert written.read_text() == "a line"
    (line,) = done.stderr.splitlines()
    assert line == (
        "profkit: nothing was recorded: it made 3 steps, too few for --warmup 4; it was not run again by itself, "
        f"because it wrote {os.path.relpath(written, tmp_path / 'here')}: run it with --warmup 2 --steps 1"
    )
    manifest = manifest_of(tmp_path / "here" / "run")
    assert f"profkit: {manifest['reason']}" == line


def test_a_recording_is_kept_where_another_would_be_better_and_might_do_harm(forks: Forks, tmp_path: Path) -> None:
    done = _record(forks, tmp_path, EVALUATED_FIRST + WRITES, "out.csv")
    assert "because it wrote out.csv: run it with --step-on optimizer" in done.stderr
    assert (tmp_path / "out.csv").read_text() == "a line"
    manifest = manifest_of(tmp_path / "run")
    assert manifest["processes"][0]["step"] == "call"


def test_a_second_run_that_fails_says_that_the_first_did_not(forks: Forks, tmp_path: Path) -> None:
    done = _record(forks, tmp_path, "import os\nos.makedirs('.hidden/lock')\n" + SHORT, status=1)
    assert "its first run ended well and its second failed: run it with --warmup 2 --steps 1" in done.stderr
    assert "FileExistsError" in done.stderr


@pytest.fixture
def since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file in a run directory that is older than all that is written from now on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "manifest.json"
    path.write_text("")
    os.utime(path, (1, 1))
    return path


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("out", "it wrote out"),
        ("a/b/out", "it wrote a/b/out"),
        ("run/trace.json", None),
        (".venv/out", None),
        ("a/__pycache__/out", None),
    ],
)
def test_what_speaks_against_a_second_run(since: Path, tmp_path: Path, file: str, said: str | None) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    assert why_not_twice(["python", "x" * 300, "--lr=0.1"], since, tmp_path / "run") == said


def test_too_many_files_to_look_at_speak_against_a_second_run(
    since: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(passes, "_MOST_ENTRIES", 0)
    assert why_not_twice(["python"], since, tmp_path / "run") == (
        "its folders hold too many files to see whether it wrote one (over 0)"
    )


@pytest.mark.parametrize("memory", [None, MemoryOptions("all", 5)])
def test_an_order_survives_the_environment(memory: MemoryOptions | None) -> None:
    order = Order("/a b", "memory", 1, None, depth=None, flops="any", memory=memory, own_steps=True)
    assert Order.from_environment({VARIABLE: order.to_json()}) == order


def test_the_first_rank_comes_first_and_the_files_go(tmp_path: Path) -> None:
    for rank in (10, 0, 1):
        leave_process(tmp_path, Process(f"rank{rank}", rank=rank, profiled=({"step_ns": rank},)))
    assert has_recorded(tmp_path)
    assert [one.profiled[0]["step_ns"] for one in take_processes(tmp_path)] == [0, 1, 10]
    assert list(tmp_path.iterdir()) == []
    assert not has_recorded(tmp_path)


def test_without_ranks_the_process_that_recorded_most_comes_first(tmp_path: Path) -> None:
    for name, state in (("1", NOT_REACHED), ("2", CUT_SHORT), ("3", COMPLETE)):
        leave_process(tmp_path, Process(name, state=state))
    assert [one.process for one in take_processes(tmp_path)] == ["3", "2", "1"]


def test_failures_are_taken_once_and_in_their_order_with_the_files_by_which_ranks_met(tmp_path: Path) -> None:
    for second, rank in enumerate((10, 2)):
        leave_failure(tmp_path, f"rank{rank}", Failure(f"ValueError: {rank}", rank))
        os.utime(tmp_path / f"failed-rank{rank}.json", (second, second))
    (tmp_path / "partial.meeting-arrived-0").touch()
    assert take_failures(tmp_path) == (Failure("ValueError: 10", 10), Failure("ValueError: 2", 2))
    assert list(tmp_path.iterdir()) == []
