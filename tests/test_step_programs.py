"""Unedited scripts of every style under ``profkit run``: what their steps are; something is always recorded."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from textwrap import indent
from typing import Any

import pytest

pytest.importorskip("torch")

from profkit import read_trace
from profkit.analysis.time_account.steps import measured_ranges
from profkit.launch.another_try import find_another_try
from profkit.launch.passes import Outcome, why_no_step
from profkit.run.manifest import Process
from profkit.run.recording import COMPLETE, CUT_SHORT, NOT_REACHED, Order, describe_step
from tests.forked_scripts import Forks
from tests.in_process import check_profkit, manifest_of
from tests.training_scripts import training

ROOT = Path(__file__).parent.parent


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
        return run(*words, cwd=tmp_path, PYTHONPATH=str(ROOT))

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


@pytest.mark.parametrize(
    ("word", "names", "said"),
    [
        ("optimizer", (), "one step of an optimizer"),
        ("optimizer", ("Muon", "AdamW"), "one step each of the optimizers Muon and AdamW"),
        ("optimizer", ("a", "b", "c", "d"), "one step each of 4 optimizers"),
        ("call", ("encoder", "decoder", "head"), "one call each of encoder, decoder and head"),
        ("generate", ("Llama",), "one call of Llama.generate"),
    ],
)
def test_what_a_step_is_reads_as_plain_english(word: str, names: tuple[str, ...], said: str) -> None:
    assert describe_step(word, names) == said


def _outcome(process: Process | None, status: int = 0, **order: Any) -> Outcome:
    processes = () if process is None else (process,)
    return Outcome(Order("run", "kineto", **{"warmup_steps": 5, "steps": 3, **order}), status, processes, (), None)


def _made(steps: int, step: str | None = "optimizer", **seen: int) -> Process:
    return Process(state=NOT_REACHED, steps_seen=steps, step=step, seen=seen)


@pytest.mark.parametrize(
    ("process", "wanted"),
    [
        (_made(4), (2, 2, None)),
        (_made(2), (1, 1, None)),
        (_made(1), (0, 1, None)),
        (_made(11), (5, 3, None)),
        (replace(_made(5), state=CUT_SHORT), (2, 3, None)),
        (_made(0, None, backward=7, **{"call:Net": 7}), (2, 3, "backward")),
        (_made(0, None, **{"call:Net": 2}), (1, 1, "call:Net")),
        (_made(-1, None), (0, 1, "whole")),
        (Process(state=COMPLETE, steps_seen=8, step="call", step_changed_to="optimizer"), (5, 3, "optimizer")),
    ],
)
def test_what_a_second_run_records(process: Process, wanted: tuple[int, int, str | None]) -> None:
    again = find_another_try(_outcome(process))
    assert again is not None
    assert again.order is not None
    assert (again.order.warmup_steps, again.order.steps, again.order.step_on) == wanted


@pytest.mark.parametrize(
    "outcome",
    [
        _outcome(_made(2), status=1),
        _outcome(None),
        _outcome(Process(state=COMPLETE, steps_seen=8, step="optimizer")),
        _outcome(_made(0, None, **{"optimizer:SGD": 9}), step_on="AdamW"),
        _outcome(_made(0, None), step_on="whole"),
        _outcome(replace(_made(2), step=None), own_steps=True),
    ],
)
def test_no_second_run_where_it_would_show_no_more(outcome: Outcome) -> None:
    assert find_another_try(outcome) is None


def test_without_a_second_run_the_reason_says_what_to_change() -> None:
    order = Order("run", "kineto", 5, 3)
    assert "the script made 2 steps, and recording begins after 5; lower --warmup" in str(
        why_no_step([_made(2)], order)
    )
    assert "--step-on whole records all of it" in str(why_no_step([_made(-1, None)], order))
    chosen = replace(order, step_on="optimizer:Muon")
    assert "no optimizer of class Muon made a step; --step-on takes what was there: optimizer:SGD" in str(
        why_no_step([_made(0, None, **{"optimizer:SGD": 9})], chosen)
    )


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
