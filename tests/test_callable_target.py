"""``profkit run package.module:make_step`` by real processes, on modules that know nothing of profkit."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.errors import UsageError
from profkit.run.work import read_work
from tests.child import run_in_child
from tests.doubts import without_doubts
from tests.forked_scripts import Forks

pytest.importorskip("torch")

from profkit.capture.steps.call_steps import call_steps

ROOT = Path(__file__).parent.parent

STEPS = """
import sys
import torch
from torch import nn

sys.stderr.write("importing\\n")

def make_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        return loss
    return step

class Maker:
    @staticmethod
    def infer():
        model = nn.Linear(4, 4).eval()
        def step():
            with torch.no_grad():
                return model(torch.ones(2, 4))
        return step

number = 3
def wants(argument): ...
def returns_none(): ...
def returns_one_that_wants(): return wants
def fails(): raise ValueError("the data are bad")
def leaves(): sys.exit(7)
def fails_later():
    def step(): raise RuntimeError("CUDA error: not a GPU's at all")
    return step
"""


@pytest.fixture
def run(tmp_path: Path, forks: Forks) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "steps.py").write_text(STEPS)
    (tmp_path / "pkg" / "needy.py").write_text("import no_such_module\n")

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return forks.run_profkit("run", "-o", "run", *arguments, cwd=tmp_path)

    return call


def _manifest(place: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((place / "run" / "manifest.json").read_text())
    return manifest


def _ranges(place: Path) -> list[str]:
    events = json.loads(gzip.decompress((place / "run" / "trace.json.gz").read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_a_callables_steps_are_timed_and_recorded_apart(tmp_path: Path, run: Callable[..., Any]) -> None:
    done = run("--warmup", "1", "--steps", "2", "pkg.steps:make_step")
    assert done.returncode == 0, done.stderr
    assert without_doubts(done.stderr) == "importing\nimporting\n", "once in each of the two processes"
    ranges = _ranges(tmp_path)
    assert [name for name in ranges if name.startswith("step ")] == ["step 0", "step 1"]
    for name, count in {"forward": 2, "backward": 2, "optimizer": 2, "model": 4, "0": 4, "2": 4}.items():
        assert ranges.count(name) == count, name
    manifest = _manifest(tmp_path)
    assert (manifest["status"], manifest["target"], manifest["device"]) == ("complete", "pkg.steps:make_step", "cpu")
    assert manifest["clean"]["losses"] == manifest["profiled"]["losses"], "ranges change no loss"
    assert len(manifest["clean"]["losses"]) == 2
    assert [list(step) for step in manifest["clean"]["steps"]] == [
        ["forward_ns", "loss_ns", "backward_ns", "optimizer_ns", "step_ns"]
    ] * 2
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["manifest.json", "trace.json.gz"]
    assert "unprofiled (2 steps" in done.stdout


def test_a_warmup_step_of_the_recorded_process_is_counted(tmp_path: Path, run: Callable[..., Any]) -> None:
    done = run("--steps", "1", "pkg.steps:make_step")
    assert done.returncode == 0, done.stderr
    manifest = _manifest(tmp_path)
    assert manifest["clean"]["losses"] == manifest["profiled"]["losses"]
    work = read_work(tmp_path / "run" / "work.json")
    assert work.source == "counted"
    first, last = 2 * 4 * 8 * 8, 2 * 4 * 8
    assert work.model_flops == 2 * first + 3 * last
    forward = work.find(("forward", "model", "0"))
    assert forward is not None
    assert forward.flops == first


def test_no_annotate_leaves_the_steps_ranges_alone(tmp_path: Path, run: Callable[..., Any]) -> None:
    done = run("--no-annotate", "--warmup", "0", "--steps", "1", "pkg.steps:Maker.infer")
    assert done.returncode == 0, done.stderr
    assert _ranges(tmp_path) == ["step 0"]
    assert _manifest(tmp_path)["profiled"]["losses"] == [], "eight numbers are no loss"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing:x", "nothing:x: no module nothing in "),
        ("pkg.nothing:x", "pkg.nothing:x: no module pkg.nothing in "),
        ("pkg.steps:make_stp", "no make_stp in pkg.steps; did you mean pkg.steps:make_step?"),
        ("pkg.steps:zzz", "no zzz in pkg.steps; it is looked for in "),
        ("pkg.steps:number", "pkg.steps:number is of type int, not callable; name a callable without arguments"),
        ("pkg.steps:wants", "pkg.steps:wants wants arguments; name a callable without arguments"),
        ("pkg.steps:returns_none", "returned NoneType, not a callable; it must return the step"),
        ("pkg.steps:returns_one_that_wants", "returned a callable that needs arguments; it must return the step"),
    ],
)
@pytest.mark.usefixtures("run")
def test_a_target_that_makes_no_step_is_refused(tmp_path: Path, target: str, said: str) -> None:
    def refused() -> str:
        os.chdir(tmp_path)
        with pytest.raises(UsageError) as error:
            call_steps(target, 0, 1, count=False)
        return str(error.value)

    assert said in run_in_child(refused, cpu_seconds=30)


def test_a_run_without_steps_ends_with_the_line_that_says_why(tmp_path: Path, run: Callable[..., Any]) -> None:
    done = run("pkg.steps:wants")
    assert done.returncode == 2
    first, last = done.stderr.removeprefix("importing\n").splitlines()
    assert last == "profkit: pkg.steps:wants failed with exit status 2; nothing was recorded; see run/manifest.json"
    assert first == f"profkit: {_manifest(tmp_path)['reason']}"
    assert "pkg.steps:wants wants arguments" in first


@pytest.mark.parametrize(
    ("target", "reason", "where"),
    [
        ("pkg.steps:fails", "ValueError: the data are bad", "steps.py"),
        ("pkg.steps:fails_later", "RuntimeError: CUDA error: not a GPU's at all", "steps.py"),
        ("pkg.needy:x", "ModuleNotFoundError: No module named 'no_such_module'", "needy.py"),
    ],
)
def test_an_exception_of_the_callable_shows_only_its_own_frames(
    tmp_path: Path, run: Callable[..., Any], target: str, reason: str, where: str
) -> None:
    done = run(target)
    assert done.returncode == 1
    assert reason in done.stderr
    assert done.stderr.count("Traceback") == 1
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert all(where in frame for frame in frames)
    assert _manifest(tmp_path)["reason"] == reason


def test_the_exit_status_of_the_callable_passes_through(tmp_path: Path, run: Callable[..., Any]) -> None:
    assert run("pkg.steps:leaves").returncode == 7
    assert _manifest(tmp_path)["exit_status"] == 7


@pytest.mark.nsys
def test_under_nsys(tmp_path: Path, run: Callable[..., Any]) -> None:
    done = run("--nsys", "--no-keep-report", "pkg.steps:make_step")
    assert done.returncode == 0, done.stderr
    assert without_doubts(done.stderr) == "importing\nimporting\n"
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["log.txt", "manifest.json", "trace.sqlite", "work.json"]
    ranges = {row.name for row in read_trace(tmp_path / "run").ranges(numbered=False).ranges}
    assert {"step *", "forward", "backward", "optimizer", "model"} <= ranges
