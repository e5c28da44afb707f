"""Compiled code that a run without profkit left in a cache: a second run with profkit's own cache has its modules."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from profkit import read_trace
from profkit.launch.another_try import find_another_try, own_cache_folder, why_not_twice
from profkit.launch.passes import Outcome, Pass, Target, command_passes
from profkit.launch.record import record_run
from profkit.run.compiled_code import KNOWN_CODE
from profkit.run.manifest import Process, Workload, read_manifest
from profkit.run.recording import NOT_REACHED, MemoryOptions, Order, Recorder, leave_process
from tests.in_process import run_command

if TYPE_CHECKING:
    from tests.forked_scripts import Forks

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
called = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    called(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SHOWN = "2 compiled graphs came from Inductor's cache without modules, because a run without profkit filled it"
CACHED = Process(process="python", steps_seen=8, step="optimizer", cached_graphs=2)


def _outcome(
    process: Process, recorder: Recorder = "kineto", status: int = 0, reason: str | None = None, **order: Any
) -> Outcome:
    ordered = Order("run", recorder, **{"warmup_steps": 5, "steps": 3, "flops": "any", **order})
    return Outcome(ordered, status, (process,), (), (), reason)


@pytest.mark.parametrize(
    "order", [{}, {"own_steps": True}, {"step_on": "whole"}, {"recorder": "nsys"}, {"recorder": "memory"}]
)
def test_a_second_run_with_another_cache_records_what_the_first_did(order: dict[str, Any], tmp_path: Path) -> None:
    outcome = _outcome(CACHED, **order)
    again = find_another_try(outcome, tmp_path, 12.3)
    assert again is not None
    assert again.why.startswith(f"{SHOWN}; it runs again with a cache of profkit's own, which takes about 12 s")
    assert again.why_not("it wrote out").endswith(
        f"because it wrote out: run it with TORCHINDUCTOR_CACHE_DIR={tmp_path}"
    )
    one = again.adjust(Pass(("python",), outcome.order))
    assert (one.order, one.environment) == (outcome.order, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    asked = Workload(steps=3, warmup_steps=5)
    assert again.describe(asked) == replace(asked, own_caches=True)


def test_a_cache_of_tritons_own_place_is_left_alone_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    again = find_another_try(_outcome(CACHED), tmp_path)
    assert again is not None
    assert again.caches["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_too_few_steps_and_cached_code_are_cured_by_one_run(tmp_path: Path) -> None:
    short = replace(CACHED, steps_seen=3, state=NOT_REACHED)
    again = find_another_try(_outcome(short, reason="nothing was recorded"), tmp_path, 1)
    assert again is not None
    assert again.order is not None
    assert (again.order.warmup_steps, again.order.steps) == (2, 1)
    assert again.why.startswith(f"it made 3 steps, too few for --warmup 5, and {SHOWN}; it runs again with --warmup 2")
    assert again.options == f"--warmup 2 --steps 1 and TORCHINDUCTOR_CACHE_DIR={tmp_path}"
    assert again.describe(Workload()).own_caches


@pytest.mark.parametrize(
    "outcome",
    [
        _outcome(replace(CACHED, cached_graphs=0)),
        _outcome(replace(CACHED, is_recorded=False)),
        _outcome(replace(CACHED, failure="the disk is full")),
        _outcome(CACHED, status=1),
        _outcome(CACHED, recorder="oom"),
        _outcome(CACHED, recorder="memory", reason="no memory was recorded"),
        _outcome(CACHED, reason="nothing was recorded"),
    ],
)
def test_no_second_run_where_another_cache_would_show_no_more(outcome: Outcome, tmp_path: Path) -> None:
    assert find_another_try(outcome, tmp_path) is None


def test_no_second_run_where_its_cache_has_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert find_another_try(_outcome(CACHED), own_cache_folder()) is None
    assert list(tmp_path.iterdir()) == []


def test_the_second_run_is_not_followed_by_a_third() -> None:
    assert find_another_try(_outcome(CACHED), None) is None


@pytest.mark.parametrize("folder", ["cache", "torchinductor_me"])
def test_the_programs_own_compiler_cache_is_no_file_that_it_wrote(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    since = tmp_path / "run" / "manifest.json"
    since.write_text("")
    os.utime(since, (1, 1))
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "code.py").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "cache")
    assert why_not_twice(["python"], since, tmp_path / "run") is None


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_allocators_pass_is_made_anew_with_the_trace_and_both_use_the_other_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "users")
    made, said = [], list[str]()

    def run(_: Sequence[str], environment: Mapping[str, str], **__: object) -> int:
        order, cache = Order.from_environment(environment), environment["TORCHINDUCTOR_CACHE_DIR"]
        made.append((order.recorder, order.flops, cache))
        folder = Path(order.run)
        for name in ("snapshot.pickle", "ledger.jsonl") if order.recorder == "memory" else ("trace.json.gz",):
            (folder / name).open("x").close()  # what the first run recorded has been removed
        with (folder / "compiled.jsonl").open("a") as records:
            records.write(f"{order.recorder} {cache}\n")
        leave_process(folder, replace(CACHED, cached_graphs=2 if cache == "users" else 0))
        return 0

    monkeypatch.setattr("profkit.launch.record.run_child", run)
    traced = Order("", "kineto", 5, 3, flops="any")
    passes = command_passes(["true"], traced, MemoryOptions(), with_memory=True, with_trace=True)
    target = Target("true", "true", "command", tuple(passes), Workload(), argv=("true",))
    done = record_run(target, None, tmp_path / "run", command=[], progress=lambda _: nullcontext(), say=said.append)
    own = str(tmp_path / "home" / "profkit" / KNOWN_CODE / "inductor")
    assert made == [("memory", "no", "users"), ("memory", "no", own), ("kineto", "any", own)]
    assert len(said) == 1
    assert SHOWN in said[0]
    assert done.reason is None
    assert (tmp_path / "run" / "compiled.jsonl").read_text() == f"memory {own}\nkineto {own}\n"
    assert read_manifest(tmp_path / "run" / "manifest.json").workload.own_caches


@pytest.mark.parametrize(
    ("most_bytes", "age_s", "is_kept"), [(15, 90_000, False), (16, 90_000, True), (15, 80_000, True)]
)
def test_profkits_own_cache_is_begun_anew_once_it_is_too_large_and_was_not_used_for_a_day(
    most_bytes: int, age_s: int, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profkit.launch.another_try._MOST_CACHED_BYTES", most_bytes)
    files = [tmp_path / "own" / "ab" / name for name in ("kernel.so", "code.py")]
    files[0].parent.mkdir(parents=True)
    for number, path in enumerate(files):
        path.write_bytes(b"8 bytes.")
        os.utime(path, (time() - age_s - 1_000 * number,) * 2)
    again = find_another_try(_outcome(CACHED), tmp_path / "own")
    assert again is not None
    assert again.caches["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")
    assert [path.exists() for path in files] == [is_kept] * 2
    assert (tmp_path / "own").is_dir()


@pytest.mark.slow
def test_a_program_whose_code_is_in_the_users_cache_gets_its_modules(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    users, command = tmp_path / "users", (sys.executable, "train.py")
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(users), "XDG_CACHE_HOME": str(tmp_path / "home")}
    with patch.dict(os.environ, variables):
        plain = forks.run(command, tmp_path)
    assert plain.returncode == 0, plain.stderr
    before = _content(users)
    for run, is_known in (("first", False), ("second", True)):
        words = ("run", "--kineto", "--warmup", "2", "--steps", "2", "-o", run, "--", *command)
        done = forks.run_profkit(*words, cwd=tmp_path, **variables)
        assert done.returncode == 0, done.stderr
        again = f"{SHOWN}; it runs again with a cache of profkit's own, which takes about"
        assert (again in done.stderr) == (not is_known)
        assert _content(users) == before
        manifest = read_manifest(tmp_path / run / "manifest.json")
        assert manifest.workload.own_caches == (None if is_known else True)
        assert [one.cached_graphs for one in manifest.processes] == [0]
        shown = run_command("ranges", tmp_path / run)
        assert "not all kernels of compiled code" not in shown.stderr
        paths = [one.path for one in read_trace(tmp_path / run).ranges().ranges]
        for phase in ("forward", "backward"):
            assert any(f"{phase}/model/" in path for path in paths), paths
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "train.py").write_text(SCRIPT + "\nopen('out', 'w')")
    done = forks.run_profkit(*words[:-4], "third", "--", *command, cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    own = tmp_path / "home" / "profkit" / KNOWN_CODE / "inductor"
    assert f"because it wrote out: run it with TORCHINDUCTOR_CACHE_DIR={own}" in done.stderr
    assert read_manifest(tmp_path / "third" / "manifest.json").processes[0].cached_graphs == 2
