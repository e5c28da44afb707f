"""The tutorial: each of its commands runs on a CPU, and each of its changes fits the program."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.forked_scripts import Forks
from tests.in_process import run_command
from tests.tutorial import change, read_parts

PARTS = list(read_parts())
_NOT_MET = 3


def test_the_program_has_sixty_lines_and_three_changes() -> None:
    (program,) = [part.text for part in PARTS if part.kind == "program"]
    assert len(program.splitlines()) <= 60
    assert sum(part.kind == "change" for part in PARTS) == 3


@pytest.mark.slow
def test_every_command_of_the_tutorial_runs(forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script, runs = tmp_path / "train.py", []
    for part in PARTS:
        if part.kind != "command":
            script.write_text(part.text if part.kind == "program" else change(script.read_text(), part.text))
            continue
        words = shlex.split(part.text)
        if words[0] == "run":
            done = forks.run_profkit(*words, cwd=tmp_path)
            runs.append(words[2])
            assert "step 80: loss" in done.stdout
            assert (tmp_path / words[2] / "lines.jsonl").exists()
        else:
            done = run_command(*words)
        # Whether a step is short enough is no matter of a test's.
        assert done.returncode in ((0, _NOT_MET) if words[0] == "check" else (0,)), done.stderr
        assert done.stdout
    assert runs == ["before", "data", "sync", "after"]
    assert "fused=True" in script.read_text()
