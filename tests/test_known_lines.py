"""Programs of which it is known which line takes the time, or waits for the GPU: that line is the largest."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from profkit.analysis.lines import find_lines  # noqa: E402
from profkit.run.directory import Run  # noqa: E402
from profkit.run.lines import LineTime  # noqa: E402
from tests.forked_scripts import Forks  # noqa: E402

PROGRAM = Path(__file__).parent / "programs" / "known_lines.py"


def _marked(kind: str) -> int:
    """The line of the program that carries the mark of this kind."""
    marks = [line.rpartition("  # ")[2].split(", ") for line in PROGRAM.read_text().splitlines()]
    (number,) = (number for number, kinds in enumerate(marks, start=1) if kind in kinds)
    return number


def _lines(forks: Forks, place: Path, *words: str) -> tuple[LineTime, ...]:
    options = ("--warmup", "3", "--steps", "1", "-o", "run")
    forks.check_profkit("run", *options, "--", sys.executable, *words, cwd=place)
    return find_lines(Run(place / "run")).lines


@pytest.mark.parametrize("kind", ["loop", "dataset", "optimizer"])
def test_the_line_that_takes_the_time_is_the_largest(kind: str, forks: Forks, tmp_path: Path) -> None:
    longest = _lines(forks, tmp_path, str(PROGRAM), kind)[0]
    near = range(_marked(kind) - (kind != "optimizer"), _marked(kind) + 1)  # a loop's head takes a part of its time
    assert (Path(longest.file or "").name, longest.line in near) == (PROGRAM.name, True)
    assert longest.function == ("step" if kind == "optimizer" else "count_slowly")


def test_a_program_that_runs_as_a_module_of_a_package_has_its_lines(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    shutil.copy(PROGRAM, tmp_path / "package" / "train.py")
    longest = _lines(forks, tmp_path, "-m", "package.train", "loop")[0]
    assert (longest.file, longest.function) == (str(tmp_path / "package" / "train.py"), "count_slowly")


def test_a_line_of_a_notebooks_cell_is_the_users(forks: Forks, tmp_path: Path) -> None:
    longest = _lines(forks, tmp_path, str(PROGRAM), "cells")[0]
    assert (longest.file, longest.function) == ("<ipython-input-3-0123456789ab>", "waste")
    assert longest.line in (3, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "waits"), [("item", 4), ("clipping", 8), ("copy", 1)])
def test_the_line_that_waits_for_the_gpu_is_named_with_its_waits_a_step(
    kind: str, waits: int, forks: Forks, tmp_path: Path
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    waiting = {
        (Path(line.file or "").name, line.line): line.waits for line in _lines(forks, tmp_path, str(PROGRAM), kind)
    }
    assert waiting[PROGRAM.name, _marked(kind)] == waits
