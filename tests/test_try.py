"""Trials of edits in unedited scripts on a CPU: each edit is made and proven, or refused; the program stays its own."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")

from profkit.analysis.causes.advice import Advice, AdviceResult
from profkit.capture.changes import program
from profkit.capture.changes.trial import _find_evidence
from profkit.cli.edits import _find_tries
from profkit.launch import trials as launched
from profkit.run.directory import TRIALS, Run
from profkit.run.manifest import Workload
from tests.forked_scripts import Forks
from tests.in_process import names_in
from tests.training_scripts import training, training_of_ranks

SCRIPT = """
import json, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3{keywords})
data = TensorDataset(torch.randn(80, 8), torch.randn(80, 1))
losses = []
for epoch in range({epochs}):
    for inputs, targets in DataLoader(data, batch_size=4, shuffle=True):
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(json.dumps(losses))
"""
OWN_STEP = """
import torch
weight = torch.ones(4, 4, requires_grad=True)
for _ in range(300):
    (torch.ones(2, 4) @ weight).sum().backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    weight.grad = None
"""


DIVERGES = """
import torch
from torch import nn
class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Conv2d(3, 3, 1)
    def to(self, *args, **kwargs):
        torch.empty(0).to(*args, **kwargs)
        return super().to(*args, **kwargs)
    def forward(self, images):
        return self.model(images).square().mean()
task = Task()
optimizer = torch.optim.SGD(task.parameters(), lr=1e6)
for _ in range(40):
    optimizer.zero_grad()
    task(torch.ones(2, 3, 4, 4)).backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "_ENOUGH_S", 0.0)


def make_script(place: Path, *, keywords: str = "", before: str = "") -> None:
    (place / "script.py").write_text(before + SCRIPT.format(keywords=keywords, epochs=40))


def try_edits(forks: Forks, place: Path, *edits: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the JSON of a trial of each edit, by the edits' text."""
    words = [word for edit in edits for word in ("--edit", edit)]
    how = ["--processes", "1", "--format", "json", "--run", "run", *options]
    done = forks.check_profkit("try", *how, *words, "--", sys.executable, "script.py", cwd=place)
    return {" + ".join(trial["edits"]): trial for trial in json.loads(done.stdout)["trials"]}


MADE = ("optimizer:foreach", "zero-grad:none", "autocast:bf16", "workers:2", "threads:2", "checkpoint:2", "batch:×2")


def test_edits_are_made_in_an_unedited_script_and_proven_and_without_them_it_computes_the_same_to_the_last_bit(
    forks: Forks, tmp_path: Path
) -> None:
    make_script(tmp_path)
    alone = json.loads(forks.run([sys.executable, "script.py"], tmp_path).stdout)
    trials = try_edits(forks, tmp_path, *MADE)
    said = {edit: trials[edit]["evidence"][0] for edit in MADE}
    assert all(evidence["is_made"] for evidence in said.values()), said
    assert all(trials[edit]["step_ns"] > 0 for edit in ("", *MADE))
    assert "aten._foreach" in said["optimizer:foreach"]["text"]
    assert said["optimizer:foreach"]["place"].endswith("script.py:7 <module>")
    assert said["workers:2"]["text"].endswith(" got 2 workers; processes that run: 2")
    assert said["batch:×2"]["text"] == "batches of 8 for 4"
    assert "(2 … 2)" in said["checkpoint:2"]["text"]
    shares = {edit: trials[edit]["loss"]["share"] for edit in MADE}
    assert {shares[edit] for edit in ("zero-grad:none", "workers:2", "checkpoint:2")} == {0.0}
    assert 1e-5 < shares["autocast:bf16"] < 0.1
    assert trials["batch:×2"]["batch_factor"] == 2
    (call,) = Run(tmp_path / "run").trials
    as_is = next(process for process in call.processes if not process.edits)
    assert as_is.measured is not None
    assert list(as_is.measured.losses) == alone[: call.plan.warmup_steps + call.plan.steps]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
def test_a_model_is_compiled_without_a_word_of_the_script(forks: Forks, tmp_path: Path) -> None:
    make_script(tmp_path)
    trial = try_edits(forks, tmp_path, "compile")["compile"]
    (evidence,) = trial["evidence"]
    assert evidence["is_made"], evidence
    assert "compiled graph" in evidence["text"]
    assert trial["loss"]["share"] < 0.5
    assert trial["first_steps_ns"] > 0


def test_what_a_script_says_itself_stays_and_is_the_reason(forks: Forks, tmp_path: Path) -> None:
    make_script(tmp_path, keywords=", foreach=True")
    edits = (
        "optimizer:fused",
        "optimizer:foreach",
        "workers:0",
        "no-anomaly",
        "no-cudnn-attention",
        "channels-last",
        "checkpoint:none.*",
        "tf32",
    )
    trials = try_edits(forks, tmp_path, *edits)
    reasons = {edit: trials[edit]["reason"] for edit in edits}
    assert all(trials[edit]["step_ns"] is None for edit in edits)
    assert reasons["optimizer:fused"] == "optimizer:fused: the script itself sets foreach=True"
    assert reasons["optimizer:foreach"] == "optimizer:foreach: the script sets foreach=True already"
    assert reasons["workers:0"] == "workers:0: the script has 0 workers already"
    assert reasons["no-anomaly"] == "no-anomaly: the script does not turn anomaly detection on"
    assert reasons["no-cudnn-attention"] == "no-cudnn-attention: the program uses no GPU"
    assert "no convolution" in reasons["channels-last"]
    assert "no module of Sequential matches none.*; it has 0, 1, 2, 3" in reasons["checkpoint:none.*"]
    assert reasons["tf32"] == "tf32: the program uses no GPU"


def test_a_script_that_trains_in_a_way_of_its_own_gets_the_reason(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN_STEP)
    trials = try_edits(forks, tmp_path, "autocast:bf16", "optimizer:fused", "zero-grad:none", "pin-memory")
    assert "no call of a model" in trials["autocast:bf16"]["reason"]
    assert "no step of an optimizer" in trials["optimizer:fused"]["reason"]
    assert "calls no zero_grad" in trials["zero-grad:none"]["reason"]
    assert "makes no DataLoader" in trials["pin-memory"]["reason"]


def test_a_program_that_diverges_and_a_task_that_knows_no_memory_formats_are_tried(
    forks: Forks, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(DIVERGES)
    trial = try_edits(forks, tmp_path, "channels-last")["channels-last"]
    assert trial["evidence"][0]["text"] == "1 convolution and 20 inputs were channels last"
    (call,) = Run(tmp_path / "run").trials
    losses = [process.measured.losses for process in call.processes if process.measured is not None]
    assert losses[0][0] is not None
    assert losses[0][-1] is None


def test_workers_that_ran_are_proven_though_the_script_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "patch", Mock())
    for running, is_made in ((2, True), (1, False)):
        change = program.Workers("2")
        change.begin()
        change.changed = 1
        for children in (0, running, 0):
            monkeypatch.setattr(program, "active_children", lambda children=children: [None] * children)
            change.step_begins()
        evidence = _find_evidence("workers:2", change)
        assert evidence.is_made == is_made
        assert f"{running} worker" in evidence.text or f"run: {running}" in evidence.text


def test_each_edit_alone_is_tried_without_those_that_help_together(forks: Forks, tmp_path: Path) -> None:
    make_script(tmp_path)
    edits = ["--edit", "zero-grad:none", "--edit", "threads:2"]
    words = ["try", "--alone", "--processes", "1", "--run", "run", *edits, "--", sys.executable, "script.py"]
    done = forks.check_profkit(*words, cwd=tmp_path)
    assert "3 processes of about" in done.stderr
    (call,) = Run(tmp_path / "run").trials
    assert {process.edits for process in call.processes} == {(), ("zero-grad:none",), ("threads:2",)}


def test_an_edit_that_fails_is_a_row_with_its_reason(forks: Forks, tmp_path: Path) -> None:
    before = "import torch\nif torch.get_num_threads() == 2: raise ValueError('two')\n"
    after_threads = "threads = torch.set_num_threads\ndef refuse(count): raise ValueError(f'{count} threads')\n"
    make_script(tmp_path, before=before + after_threads + "torch.set_num_threads = refuse\n")
    trials = try_edits(forks, tmp_path, "threads:2", "zero-grad:none")
    assert trials["threads:2"]["reason"] == "the change could not be made: ValueError: 2 threads"
    assert trials["zero-grad:none"]["step_ns"] > 0


def test_an_edit_that_runs_out_of_memory_is_a_row_that_says_how_much_was_asked_for(
    forks: Forks, tmp_path: Path
) -> None:
    make_script(tmp_path)
    script = (tmp_path / "script.py").read_text()
    text = "CUDA out of memory. Tried to allocate 130.83 GiB. GPU 0 has a total capacity of 139.80 GiB of which …"
    fails = f"        if len(inputs) == 8: raise torch.OutOfMemoryError('{text}')\n        optimizer.zero_grad("
    (tmp_path / "script.py").write_text(script.replace("        optimizer.zero_grad(", fails))
    trials = try_edits(forks, tmp_path, "batch:×2", "zero-grad:none")
    said = "the program failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 130.83 GiB"
    assert trials["batch:×2"]["reason"] == said
    assert trials["zero-grad:none"]["step_ns"] > 0


def test_a_script_that_writes_is_not_tried_unless_that_is_wanted(forks: Forks, tmp_path: Path) -> None:
    make_script(tmp_path, before="open('log.csv', 'a').write('a line')\n")
    words = ["try", "--run", "run", "--processes", "1", "--edit", "zero-grad:none", "--", sys.executable, "script.py"]
    refused = forks.run_profkit(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert "it wrote log.csv: each trial would do so again; --anyway tries all the same" in refused.stderr
    assert not (tmp_path / "run").exists()
    assert try_edits(forks, tmp_path, "zero-grad:none", options=("--anyway",))["zero-grad:none"]["step_ns"] > 0


def test_a_short_script_is_timed_over_the_steps_that_it_makes(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(keywords="", epochs=1).replace("(80,", "(32,"))
    try_edits(forks, tmp_path, "zero-grad:none")
    (call,) = Run(tmp_path / "run").trials
    assert (call.plan.warmup_steps, call.plan.steps) == (3, 5)


def test_a_run_is_tried_again_by_its_own_command_and_calls_add_up(forks: Forks, tmp_path: Path) -> None:
    make_script(tmp_path)
    try_edits(forks, tmp_path, "zero-grad:none")
    again = forks.check_profkit("try", "run", "--processes", "1", "--edit", "optimizer:foreach", cwd=tmp_path)
    assert "optimizer:foreach" in again.stdout
    assert [len(call.processes) for call in Run(tmp_path / "run").trials] == [2, 2]
    assert names_in(tmp_path / "run") == ["manifest.json", TRIALS]


def test_trials_take_for_a_step_what_the_recording_did(forks: Forks, tmp_path: Path) -> None:
    asks = "if number % 4 == 0:\n    with torch.no_grad():\n        model(torch.ones(2, 4))"
    (tmp_path / "script.py").write_text(training(240, asks))
    forks.check_profkit("run", "--no-lines", "-o", "run", "--", sys.executable, "script.py", cwd=tmp_path)
    manifest = Run(tmp_path / "run").manifest
    assert (manifest.workload.step_on, manifest.step_on) == (None, "optimizer*4")
    forks.check_profkit("try", "run", "--processes", "1", "--edit", "optimizer:foreach", cwd=tmp_path)
    (call,) = Run(tmp_path / "run").trials
    for process in call.processes:
        assert process.measured is not None
        first, second, *_ = process.measured.losses
        assert first - second == pytest.approx(4 * 8, abs=0.1), "each step of the optimizer lowers the loss by 8"
    assert replace(manifest, workload=Workload(step_on="backward")).step_on == "backward", "a person's word counts more"


def test_after_ctrl_c_what_was_measured_is_kept(forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_script(tmp_path)
    started = []

    def interrupt(runner: Any, folder: Path, edits: tuple[str, ...], turn: int) -> Any:
        started.append(edits)
        if edits == ("threads:2",):
            raise KeyboardInterrupt
        return plain(runner, folder, edits, turn)

    plain = launched.TrialRunner._start
    monkeypatch.setattr(launched.TrialRunner, "_start", interrupt)
    words = ["--run", "run", "--edit", "zero-grad:none", "--edit", "threads:2", "--", sys.executable, "script.py"]
    done = forks.run_profkit("try", *words, cwd=tmp_path)
    assert done.returncode == 130, done.stderr
    assert "zero-grad:none" in done.stdout
    (call,) = Run(tmp_path / "run").trials
    assert [process.edits for process in call.processes] == [(), ("zero-grad:none",)]


def test_a_proof_that_fails_is_a_reason_and_nothing_else_is_lost() -> None:
    change = Mock(refusal=None, place=None, prove=Mock(side_effect=RuntimeError("out of memory")))
    assert _find_evidence("tf32", change).text == "it could not be proven: RuntimeError: out of memory"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--edit", "gpu:×2", "script.py"], "profkit does not make this edit"),
        (["--edit", "nothing", "script.py"], "no edit 'nothing'"),
        (["--report", "."], "no profkit run"),
        (["script.py", "--edit", "compile"], "write profkit try --edit … script.py"),
    ],
)
def test_wrong_use_says_what_to_write(forks: Forks, tmp_path: Path, words: list[str], why: str) -> None:
    make_script(tmp_path)
    done = forks.run_profkit("try", *words, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert why in done.stderr


RANKS = training_of_ranks(300, model="nn.Linear(8, 8)", batch="torch.ones(2, 8)")


def test_the_slowest_of_several_ranks_counts_and_none_is_left(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    words = ["--processes", "1", "--format", "json", "--run", "run", "--edit", "optimizer:foreach"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = forks.check_profkit("try", *words, "--", *launcher, cwd=tmp_path)
    as_is, foreach = json.loads(done.stdout)["trials"]
    assert as_is["step_ns"] > 0
    assert foreach["evidence"][0]["is_made"]
    assert foreach["loss"]["share"] == 0.0
    (call,) = Run(tmp_path / "run").trials
    assert all(process.measured is not None and process.measured.rank in (0, 1) for process in call.processes)
    assert names_in(tmp_path / "run") == ["manifest.json", TRIALS]


def test_without_an_edit_a_script_is_recorded_first_and_its_tries_are_taken(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_script(tmp_path)
    # What a busy machine makes of its steps is another test's.
    monkeypatch.setattr("profkit.analysis.causes.advice.find_advice", lambda *_: AdviceResult())
    done = forks.run_profkit("try", "--run", "run", "--", sys.executable, "script.py", cwd=tmp_path)
    assert "STEP" in done.stdout
    assert done.returncode == 2
    assert "the summary of run proposes nothing that can be tried; --edit takes optimizer:fused|foreach" in done.stderr
    assert Run(tmp_path / "run").traces


@pytest.mark.parametrize(("edit", "is_named"), [("zero-grad:none", True), ("no-wait:script.py:7", False)])
def test_a_recorded_run_with_a_try_that_can_be_made_names_the_command(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: str, is_named: bool
) -> None:
    make_script(tmp_path)
    advice = Advice("code", "a cause", None, None, "a change", edit, None, None, None, None, {}, "a proof")
    monkeypatch.setattr("profkit.analysis.causes.advice.find_advice", lambda *_: AdviceResult((advice,)))
    done = forks.check_profkit(
        "run", "--stop", "--no-lines", "-o", "run", "--", sys.executable, "script.py", cwd=tmp_path
    )
    assert ("Next:\n  profkit try run\n" in done.stdout) == is_named
    assert "  profkit report run\n" in done.stdout


def test_the_tries_of_a_run_are_those_that_can_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tries = [Mock(edit=edit) for edit in ("no-wait:train.py:7", "optimizer:fused", None, "workers:4")]
    monkeypatch.setattr("profkit.analysis.causes.advice.find_advice", lambda *_: Mock(tries=tries))
    monkeypatch.setattr("profkit.analysis.summarize.summarize_capture", lambda _: None)
    monkeypatch.setattr("profkit.cli.edits.open_capture", lambda _: None)
    assert _find_tries(tmp_path) == ("optimizer:fused", "workers:4")
