"""Compiled code that a run without profkit left in a cache has its modules: recording uses a cache of profkit's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import time
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from profkit import read_trace
from profkit.launch.another_try import why_not_twice
from profkit.launch.record import own_compiler_cache
from profkit.run.compiled_code import KNOWN_CODE
from profkit.run.manifest import read_manifest
from tests.in_process import run_command
from tests.training_scripts import training

if TYPE_CHECKING:
    from tests.forked_scripts import Forks

MODEL = "nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))"
SCRIPT = training(6, model=f"torch.compile({MODEL})", batch="torch.ones(2, 8)")


def test_a_cache_that_a_person_chose_is_used() -> None:
    assert own_compiler_cache({"TORCHINDUCTOR_CACHE_DIR": "mine"}) == {}


def test_without_a_place_for_it_there_is_no_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert own_compiler_cache({}) == {}


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


@pytest.mark.parametrize(
    ("most_bytes", "age_s", "is_kept"), [(15, 90_000, False), (16, 90_000, True), (15, 80_000, True)]
)
def test_profkits_own_cache_is_begun_anew_once_it_is_too_large_and_was_not_used_for_a_day(
    most_bytes: int, age_s: int, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profkit.launch.record._MOST_CACHED_BYTES", most_bytes)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = tmp_path / "profkit" / KNOWN_CODE / "inductor"
    files = [own / "ab" / name for name in ("kernel.so", "code.py")]
    files[0].parent.mkdir(parents=True)
    for number, path in enumerate(files):
        path.write_bytes(b"8 bytes.")
        os.utime(path, (time() - age_s - 1_000 * number,) * 2)
    assert own_compiler_cache({}) == {"TORCHINDUCTOR_CACHE_DIR": str(own)}
    assert [path.exists() for path in files] == [is_kept] * 2
    assert own.is_dir()


@pytest.mark.slow
def test_a_program_whose_code_is_in_the_users_cache_gets_its_modules(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    users, command = tmp_path / "users", (sys.executable, "train.py")
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(users)}):
        plain = forks.run(command, tmp_path)
    assert plain.returncode == 0, plain.stderr
    before = _content(users)
    words = ("run", "--kineto", "--warmup", "2", "--steps", "2", "-o")
    forks.check_profkit(*words, "own", "--", *command, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "home"))
    assert (tmp_path / "home" / "profkit" / KNOWN_CODE / "inductor").is_dir()
    assert _content(users) == before
    shown = run_command("ranges", tmp_path / "own")
    assert "not all kernels of compiled code" not in shown.stderr
    paths = [row.path for row in read_trace(tmp_path / "own").ranges().ranges]
    for phase in ("forward", "backward"):
        assert any(f"{phase}/model/" in path for path in paths), paths
    chosen = {"TORCHINDUCTOR_CACHE_DIR": str(users), "XDG_CACHE_HOME": str(tmp_path / "other home")}
    forks.check_profkit(*words, "chosen", "--", *command, cwd=tmp_path, **chosen)
    (process,) = read_manifest(tmp_path / "chosen" / "manifest.json").processes
    assert process.compiled_failure is not None
    assert "2 of 2 compiled graphs came from Inductor's cache" in process.compiled_failure
