"""A capture that is not named: commands that show one take the newest complete run, those that judge or copy do not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from profkit.run.directory import KINETO_TRACE, MANIFEST, SNAPSHOT, find_newest_run
from tests.conftest import ROOT
from tests.in_process import run_command
from tests.memory_captures import Training
from tests.test_provenance import make_run

READING = (
    ("summary",),
    ("kernels",),
    ("ranges",),
    ("efficiency",),
    ("ranks",),
    ("memory",),
    ("report",),
    ("whatif", "--fit", "1GiB"),
    ("export", "-o", "step.json.gz"),
)


def _make(folder: Path, written_s: int, **changes: object) -> Path:
    made = make_run(folder, dict(changes))
    os.utime(made / MANIFEST, (written_s, written_s))
    return made


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a directory with runs of which ``runs/new`` is the newest complete one."""
    (tmp_path / "runs").mkdir()
    _make(tmp_path / "beside", 100)
    Training().write(_make(tmp_path / "runs" / "new", 200), SNAPSHOT)
    _make(tmp_path / "runs" / "cut off", 300, status="incomplete")
    (tmp_path / "another program").mkdir()
    (tmp_path / "another program" / MANIFEST).write_text("[]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_the_newest_complete_run_is_read_and_named(place: Path, command: tuple[str, ...]) -> None:
    left_out = run_command(*command)
    named = run_command(command[0], place / "runs" / "new", *command[1:])
    line, *rest = left_out.stderr.splitlines(keepends=True)
    assert line.endswith("was left out: runs/new is the newest complete run here\n")
    assert left_out.returncode == named.returncode
    assert "".join(rest) == named.stderr.replace(f"{place}/", "")


def test_a_run_beside_the_others_counts_too(place: Path) -> None:
    os.utime(place / "beside" / MANIFEST, (400, 400))
    assert find_newest_run(Path()) == Path("beside")
    assert run_command("ranges").stdout == run_command("ranges", "beside").stdout


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_without_a_complete_run_the_request_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_command(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "was left out, and there is no complete run here or in runs/" in done.stderr


@pytest.mark.parametrize("command", ["check", "scrub", "gather", "compare"])
def test_what_judges_or_copies_a_run_is_given_one(place: Path, command: str) -> None:
    done = run_command(command)
    assert done.returncode == 2
    assert "Missing argument" in done.stderr


def test_a_folder_without_a_manifest_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    shutil.copy(ROOT / "traces" / "tiny-train-cpu.kineto.json.gz", tmp_path / "folder" / KINETO_TRACE)
    assert find_newest_run(tmp_path) is None
