"""Run directories in which a file is not what its name says: one line names the file, and the key if there is one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.child import run_in_child
from tests.efficiency_runs import make_small_run
from tests.in_process import run_command

FILES = ("manifest.json", "work.json", "ceilings.json", "log.txt")
PUT: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device without an end": lambda place: place.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_small_run(tmp_path_factory.mktemp("run"))
    (folder / "log.txt").write_text("Generating report\n")
    return folder


def answer(run: Path, *command: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        done = run_command(*(command or ("efficiency", run)))
        return done.returncode, done.stderr

    return run_in_child(ask, cpu_seconds=20, memory_bytes=2**31)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", PUT)
def test_a_file_that_is_no_file_is_refused_by_its_name(run: Path, tmp_path: Path, name: str, what: str) -> None:
    kept = tmp_path / "kept"
    (run / name).rename(kept)
    try:
        PUT[what](run / name)
        code, said = answer(run)
    finally:
        (run / name).rmdir() if (run / name).is_dir() else (run / name).unlink()
        kept.rename(run / name)
    assert code == 1
    assert said.splitlines()[-1] == f"profkit: {run / name}: not a regular file"


def test_a_link_to_itself_is_refused_by_its_name(run: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (run / "manifest.json").rename(kept)
    try:
        (run / "manifest.json").symlink_to("manifest.json")
        code, said = answer(run)
    finally:
        (run / "manifest.json").unlink()
        kept.rename(run / "manifest.json")
    assert code == 1
    assert len(said.strip().splitlines()) == 1
    assert str(run) in said


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("manifest.json", {"exit_status": 10**400}, "exit_status is 1000"),
        ("manifest.json", {"clean": {"losses": [1e400]}}, "clean.losses[0] is Infinity, not a possible number"),
        ("manifest.json", {"clean": {"steps": [{"step_ns": 2**63}]}}, "clean.steps[0].step_ns is 9223372036854775808"),
        ("manifest.json", {"clean": {"steps": [{"step_ns": -5}]}}, "clean: a step took a negative time"),
        ("ceilings.json", {"gemm": [{}]}, "gemm[0].dtype is missing"),
        ("work.json", {"version": "1"}, "version"),
    ],
)
def test_an_impossible_value_is_refused_by_its_key(run: Path, name: str, change: dict[str, Any], expected: str) -> None:
    before = (run / name).read_text()
    try:
        (run / name).write_text(json.dumps({**json.loads(before), **change}).replace("Infinity", "1e400"))
        code, said = answer(run)
    finally:
        (run / name).write_text(before)
    assert code == 1
    assert expected in said.splitlines()[-1]
    assert str(run / name) in said.splitlines()[-1]


def _link_everything(run: Path) -> None:
    (run / "itself").symlink_to(".")
    (run / "loop").symlink_to("loop")
    (run / "zero").symlink_to("/dev/zero")
    (run / "notes.rank1.txt").symlink_to("notes.rank1.txt")


@pytest.mark.parametrize("command", ["report", "export", "scrub", "summary"])
def test_a_run_that_links_to_itself_is_read_without_its_links(tmp_path: Path, command: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    make_small_run(run)
    _link_everything(run)
    output = tmp_path / {"report": "a.html", "export": "a.json.gz", "scrub": "copy", "summary": "a.txt"}[command]
    code, said = answer(run, command, str(run), *([] if command == "summary" else ["-o", str(output)]))
    assert (code, "error" in said) == (0, False), said


@pytest.mark.parametrize("command", ["export", "report"])
def test_nothing_is_written_where_a_log_is_no_file(tmp_path: Path, command: str) -> None:
    run, output = tmp_path / "run", tmp_path / {"export": "a.json", "report": "a.html"}[command]
    run.mkdir()
    make_small_run(run)
    os.mkfifo(run / "log.txt")
    code, said = answer(run, command, str(run), "-o", str(output))
    assert (code, said.splitlines()[-1]) == (1, f"profkit: {run / 'log.txt'}: not a regular file")
    assert not output.exists()


@pytest.mark.parametrize("line", ['{"kind": "owned", "x": "\\x"}', '{"kind": "owned\\'])
@pytest.mark.parametrize("name", ["light.jsonl", "ledger.jsonl", "compiled.jsonl"])
def test_a_bad_escape_is_refused_by_file_and_line(tmp_path: Path, name: str, line: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text('{"status": "complete"}')
    (run / name).write_text(f'{{"kind": "header", "version": 1}}\n{line}\n{{"kind": "last"}}\n')
    code, said = answer(run, "scrub", str(run), "-o", str(tmp_path / "copy"))
    assert code == 1
    assert str(run / name) in said.splitlines()[-1]
    assert not (tmp_path / "copy").exists()
