"""What a target's processes leave for the launcher, and the second run of a short program, which may do no harm."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from profkit.run.manifest import Process
from profkit.run.recording import (
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

from profkit.launch import another_try
from profkit.launch.another_try import why_not_twice
from tests.forked_scripts import Forks
from tests.in_process import ended, manifest_of
from tests.training_scripts import training

SHORT = training(3)
EVALUATED_FIRST = training(5, model="nn.Linear(4, 4)\nfor _ in range(8):\n    model(torch.ones(2, 4))")
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
    monkeypatch.setattr(another_try, "_MOST_ENTRIES", 0)
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
