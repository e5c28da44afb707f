"""A grid resumes where it was interrupted, each cell in a process of its own, and what is on disk is whole."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.common import grid
from recipes.common.recipe import Together
from tests.conftest import ROOT
from tests.recipes.counting import COUNTS

Run = Callable[..., subprocess.CompletedProcess[str]]


def _command(directory: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "tests.recipes.counting", "--device", "cpu", "-o", str(directory), *arguments]
    return command, {**os.environ, COUNTS: str(directory.parent / "log"), "PYTHONPATH": str(ROOT)}


@pytest.fixture
def recipe(tmp_path: Path) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command, environment = _command(tmp_path / "out", *arguments)
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
        )

    return run


def _rows(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "out" / "counting.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _measured(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


def test_interrupted_in_a_cell_it_keeps_the_others_and_goes_on_from_there(recipe: Run, tmp_path: Path) -> None:
    command, environment = _command(tmp_path / "out", "--how", "well,slow")
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as running:  # fmt: skip
        while not (tmp_path / "log").exists() or len(_measured(tmp_path)) < 3:
            assert running.poll() is None
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)
        said = running.communicate(timeout=60)[1]
        assert running.returncode == 130
    assert (
        said.splitlines()[-1] == "recipes: interrupted; what was measured is kept, the same command goes on from there"
    )
    assert "Traceback" not in said
    assert [(row["square"], row["status"]) for row in _rows(tmp_path)] == [("1", "ok"), ("4", "ok"), ("", "not run")]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [run["state"] for run in manifest["runs"]] == ["interrupted"]

    done = recipe("--how", "well,slow", "--budget-s", "8")
    assert done.returncode == 0
    assert "2 of 3 cells are there already" in done.stderr
    assert [row["status"] for row in _rows(tmp_path)] == ["ok", "ok", "not run"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [run["state"] for run in manifest["runs"]] == ["interrupted", "time over"]
    # In the cell's process torch is there, and nothing measured twice but what was not there.
    assert _measured(tmp_path)[:3] == ["1 well True", "2 well True", "3 slow True"]
    assert set(_measured(tmp_path)[3:]) <= {"3 slow True"}
    raw = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    assert len({row["process"] for row in raw if row["status"] == "ok"}) == 2
    assert "| 3 | slow | — | not run |" in (tmp_path / "out" / "counting.md").read_text()


@pytest.mark.parametrize(
    ("how", "status", "code"),
    [
        ("broken", "failed(ValueError: two)", 1),
        ("killed", "failed(killed: perhaps the memory of the host was full)", 1),
        ("endless", "failed(ValueError: Out of range float values are not JSON compliant", 1),
        ("large", "not run", 0),
    ],
)
def test_a_cell_that_goes_wrong_is_shown_as_such(recipe: Run, tmp_path: Path, how: str, status: str, code: int) -> None:
    done = recipe("--how", f"well,{how}", "--numbers", "2,3")
    assert done.returncode == code
    well, other = _rows(tmp_path)
    assert (well["square"], well["status"], other["square"]) == ("4", "ok", "")
    assert other["status"].startswith(status)  # what Python says of infinity ends differently in its versions
    if how == "large":
        assert "predicted 1.000 TiB" not in done.stderr
        assert "--force tries it" in done.stderr
        # No time would make it fit.
        assert json.loads((tmp_path / "out" / "manifest.json").read_text())["runs"][-1]["state"] == "complete"
        assert _measured(tmp_path) == ["2 well True"]


def test_cells_measured_together_share_a_process_and_one_refused_or_broken_is_told_apart(
    recipe: Run, tmp_path: Path
) -> None:
    """The cells of a group that are there are not measured again; a group that broke is shown in each of its cells."""
    done = recipe("--together", "--how", "well,broken", "--numbers", "1,2,3")
    assert done.returncode == 1
    assert [row["status"] for row in _rows(tmp_path)] == ["ok", "ok", "failed(ValueError: two)"]
    more = recipe("--together", "--how", "well,large", "--numbers", "1,2,3,4,5")
    assert more.returncode == 1  # what broke before is still there
    raw = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    process = {(row["number"], row["how"]): row.get("process") for row in raw}
    assert process[1, "well"] == process[2, "well"] != process[3, "well"] == process[4, "well"]
    assert process[5, "large"] is None
    assert _measured(tmp_path) == [f"{cell} True" for cell in ("1 well", "2 well", "3 broken", "3 well", "4 well")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--numbers", "3,2"), "list each value once, in rising order: 2,3"),
        (("--numbers", "2,2"), "list each value once, in rising order: 2"),
        (("--numbers", "0"), "not whole numbers above 0"),
        (("--how", "well,well"), "list each value once: well"),
        (("--how", "good"), "there are well, slow"),
    ],
)
def test_a_grid_that_is_off_is_refused(recipe: Run, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = recipe(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_device_that_is_not_there_is_one_line(recipe: Run, tmp_path: Path) -> None:
    done = recipe("--device", "mps")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("recipes: --device mps: torch ")
    assert not (tmp_path / "out").exists()


def test_a_file_where_the_results_should_go_is_one_line(recipe: Run, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    done = recipe()
    assert done.returncode == 2
    assert "is a file" in done.stderr


@pytest.mark.parametrize("is_together", [True, False])
def test_where_programs_are_started_the_free_memory_is_asked_for_in_another_process(
    monkeypatch: pytest.MonkeyPatch, is_together: bool
) -> None:
    """A process that asks holds a CUDA context from then on."""
    elsewhere: list[object] = []
    monkeypatch.setattr(grid, "run_isolated", lambda function, device: elsewhere.append((function, device)) or 10)
    monkeypatch.setattr(grid, "free_bytes", ask := lambda _device: 10)
    measure = Together(("number",), lambda _cells, _device: []) if is_together else lambda _cell, _device: {}
    (row,) = grid.measure_cells(measure, lambda _cell, _device: 20, [{"number": 1}], "cuda", force=False)
    assert row["reason"] == "predicted 20 B, free 10 B; --force tries it"
    assert elsewhere == [(ask, "cuda")] * is_together
