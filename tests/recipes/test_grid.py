"""A grid continues after an interruption, runs each cell in a process of its own, and writes complete files."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from profkit.errors import RunError, UsageError
from recipes.common import grid
from recipes.common import store as stores
from recipes.common.command import exit_with
from recipes.common.recipe import Together
from recipes.common.store import Store, open_store
from tests.conftest import ROOT
from tests.in_process import csv_rows, manifest_of
from tests.launched import started, wait_until
from tests.recipes.counting import main

Run = Callable[..., Result]


@pytest.fixture
def recipe(tmp_path: Path) -> Run:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*_arguments(tmp_path), *arguments], standalone_mode=False)

    return run


def _arguments(tmp_path: Path) -> list[str]:
    return ["--device", "cpu", "-o", str(tmp_path / "out"), "--log", str(tmp_path / "log")]


def _rows(tmp_path: Path) -> list[dict[str, str]]:
    return csv_rows(tmp_path / "out" / "counting.csv")


def _measured(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


def test_a_run_interrupted_in_a_cell_keeps_the_others_and_goes_on_from_there(recipe: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.recipes.counting", *_arguments(tmp_path), "--how", "well,slow"]
    with started(command, cwd=ROOT, start_new_session=True) as running:
        wait_until(lambda: (tmp_path / "log").exists() and len(_measured(tmp_path)) == 3)
        os.killpg(running.pid, signal.SIGINT)
        said = running.communicate()[1]
        assert running.returncode == 130
    assert (
        said.splitlines()[-1]
        == "recipes: interrupted; finished cells are kept, and the same command goes on from there"
    )
    assert "Traceback" not in said
    assert [(row["square"], row["status"]) for row in _rows(tmp_path)] == [("1", "ok"), ("4", "ok"), ("", "not run")]
    manifest = manifest_of(tmp_path / "out")
    assert [run["state"] for run in manifest["runs"]] == ["interrupted"]

    done = recipe("--how", "well,slow", "--budget-s", "1")
    assert done.return_value == 0
    assert "2 of 3 cells were measured before" in done.stderr
    assert [row["status"] for row in _rows(tmp_path)] == ["ok", "ok", "not run"]
    manifest = manifest_of(tmp_path / "out")
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
def test_a_cell_that_fails_shows_why(recipe: Run, tmp_path: Path, how: str, status: str, code: int) -> None:
    done = recipe("--how", how, "--numbers", "3")
    assert done.return_value == code
    (row,) = _rows(tmp_path)
    assert row["square"] == ""
    assert row["status"].startswith(status)  # what Python says of infinity ends differently in its versions
    if how == "large":
        assert "predicted 1.000 TiB" not in done.stderr
        assert "predicted 1,048,576 TiB, free " in done.stderr
        # No time would make it fit.
        assert manifest_of(tmp_path / "out")["runs"][-1]["state"] == "complete"
        assert not (tmp_path / "log").exists()


def test_cells_measured_together_share_a_process_and_fail_together(recipe: Run, tmp_path: Path) -> None:
    """The cells of a group that are there are not measured again; a group that broke is shown in each of its cells."""
    done = recipe("--together", "--how", "well,broken", "--numbers", "1,2,3")
    assert done.return_value == 1
    assert [row["status"] for row in _rows(tmp_path)] == ["ok", "ok", "failed(ValueError: two)"]
    more = recipe("--together", "--how", "well,large", "--numbers", "1,2,3,4,5")
    assert more.return_value == 1  # what broke before is still there
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
        (("--how", "good"), "choose from well, slow"),
    ],
)
def test_a_grid_that_is_off_is_refused(recipe: Run, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = recipe(*arguments)
    assert isinstance(done.exception, click.UsageError)
    assert message in done.exception.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (UsageError("--device mps: none"), "recipes: --device mps: none", 2),
        (OSError(28, "No space left on device", "out"), "recipes: out: No space left on device", 1),
        (KeyboardInterrupt(), "recipes: interrupted; finished cells are kept", 130),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, line: str, code: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe"])

    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as left:
        exit_with(click.Command("recipe", callback=fail))
    assert left.value.code == code
    assert capsys.readouterr().err.strip().startswith(line)


def test_a_missing_device_and_a_file_in_place_of_the_results_are_refused(recipe: Run, tmp_path: Path) -> None:
    done = recipe("--device", "mps")
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith("--device mps: torch ")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").write_text("")
    assert "is a file" in str(recipe().exception)


@pytest.mark.parametrize("is_together", [True, False])
def test_cells_measured_together_ask_for_free_memory_in_another_process(
    monkeypatch: pytest.MonkeyPatch, is_together: bool
) -> None:
    """A process that asks holds a CUDA context from then on."""
    elsewhere: list[object] = []
    monkeypatch.setattr(grid, "run_isolated", lambda function, device: elsewhere.append((function, device)) or 10)
    monkeypatch.setattr(grid, "free_bytes", ask := lambda _device: 10)
    measure = Together(("number",), lambda _cells, _device: []) if is_together else lambda _cell, _device: {}
    (row,) = grid.measure_cells(measure, lambda _cell, _device: 20, [{"number": 1}], "cuda")
    assert row["reason"] == "predicted 20 B, free 10 B"
    assert elsewhere == [(ask, "cuda")] * is_together


# -- the directory of results --------------------------------------------------------------------------------------


MACHINE = {
    "device": "cpu",
    "gpu": None,
    "torch": "2.13.0",
    "cuda": None,
    "float32_matmul_precision": "highest",
    "cuda_matmul_allow_tf32": False,
    "cudnn_allow_tf32": True,
}


def _open(directory: Path, machine: dict[str, object] = MACHINE, *, recipe: str = "r", restart: bool = False) -> Store:
    return open_store(directory, recipe, ["a"], machine, restart=restart)


def test_rows_are_found_again_and_replaced(tmp_path: Path) -> None:
    store = _open(tmp_path)
    store.add({"a": 1, "status": "not run"})
    store.add({"a": 2, "status": "ok", "b": 0.1})
    store.add({"a": 1, "status": "ok"})
    again = _open(tmp_path)
    assert again.rows == [{"a": 1, "status": "ok"}, {"a": 2, "status": "ok", "b": 0.1}]
    assert again.find({"a": 2, "more": 3}) == {"a": 2, "status": "ok", "b": 0.1}
    assert again.find({"a": 3}) is None
    assert [len(json.loads((tmp_path / "manifest.json").read_text())["runs"])] == [2]


def test_another_machines_results_are_not_added_to(tmp_path: Path) -> None:
    _open(tmp_path).add({"a": 1, "status": "ok"})
    with pytest.raises(UsageError, match=r"results with torch 2\.13\.0, here it is 2\.14\.0; .*--restart"):
        _open(tmp_path, {**MACHINE, "torch": "2.14.0"})
    with pytest.raises(UsageError, match="holds results of r;"):
        _open(tmp_path, recipe="s")
    assert _open(tmp_path, {**MACHINE, "torch": "2.14.0"}, restart=True).rows == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("manifest.json", content) for content in ("[]", "{", "{}")),
        *(("cells.jsonl", content) for content in ('{"a": 1, "stat', "1", '{"status": "ok"}', '{"a": 1}')),
    ],
)
def test_a_file_of_another_program_is_refused(tmp_path: Path, name: str, content: str) -> None:
    _open(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(RunError, match=rf"{name}: not written by a recipe"):
        _open(tmp_path)


def _runs(tmp_path: Path) -> list[dict[str, Any]]:
    manifest: dict[str, Any] = json.loads((tmp_path / "manifest.json").read_text())
    assert "git_revision" not in manifest
    runs: list[dict[str, Any]] = manifest["runs"]
    return runs


def test_each_run_keeps_its_own_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for revision in ("aaa", "bbb+", None):
        monkeypatch.setattr(stores, "git_revision", lambda revision=revision: revision)
        _open(tmp_path).finish("complete")
    assert [run["git_revision"] for run in _runs(tmp_path)] == ["aaa", "bbb+", None]
    monkeypatch.setattr(stores, "git_revision", lambda: "ccc")
    _open(tmp_path, restart=True)
    assert [run["git_revision"] for run in _runs(tmp_path)] == ["ccc"]


def test_a_run_notes_cpus_load_if_it_is_known_and_visible_gpus_without_their_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([(45.126, 44.0, 40.0), (3.5, 20.0, 30.0)])
    monkeypatch.setattr(os, "getloadavg", lambda: next(loads))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5, 7}, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-0a1b2c3d-aa11-bb22,MIG-GPU-0a1b-2c/3/4")
    _open(tmp_path).finish("complete")
    run = _runs(tmp_path)[-1]
    assert (run["cpus"], run["load_average_at_start"]) == (3, [45.13, 44.0, 40.0])
    assert run["load_average_at_end"] == [3.5, 20.0, 30.0]
    assert run["cuda_visible_devices"] == "2,GPU-…,MIG-GPU-…/3/4"

    def unknown() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _open(tmp_path)
    run = _runs(tmp_path)[-1]
    assert run["load_average_at_start"] is None
    assert "cuda_visible_devices" not in run
