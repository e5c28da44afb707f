"""A worker that ends amid a test costs that test alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.launched import is_alive

TESTS = """
import os, subprocess, sys
from pathlib import Path

def test_before(): pass

def test_ends_the_worker():
    words = [sys.executable, "-c", "import signal; signal.pause()"]
    Path("left").write_text(str(subprocess.Popen(words, start_new_session=True).pid))
    os._exit(1)

def test_after(): pass
"""


def test_the_test_fails_once_its_processes_end_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    words = ["-m", "pytest", "-p", "tests.workers", "-p", "no:cacheprovider", "-n", "1", "--dist", "loadfile"]
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "worker 'gw0' crashed while running 'test_file.py::test_ends_the_worker'" in done.stdout
    assert "1 failed, 2 passed" in done.stdout
    assert not is_alive(int((tmp_path / "left").read_text()))
