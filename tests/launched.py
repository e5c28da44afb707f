"""Processes of their own that tests start: launchers to send signals to, what is left of them, scripts that print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAUNCHER = """
import os, signal, sys
from profkit.launch import processes
processes.PATIENCE_S = {patience_s}
processes.family.GRACE_S = processes.GRACE_S = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)
try: sys.exit(processes.{run}([sys.executable, '-c', *sys.argv[1:]], os.environ, reads_input=True))
except KeyboardInterrupt: os._exit(1)
"""


def start_launcher(code: str, *arguments: str, patience_s: float = 60, run: str = "run_child") -> subprocess.Popen[str]:
    """Start a process that runs ``code`` as `profkit.launch.processes` runs somebody's program."""
    launcher = LAUNCHER.format(patience_s=patience_s, run=run)
    words = [sys.executable, "-c", launcher, code, *arguments]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def is_alive(process: int) -> bool:
    """Return whether a process runs: one that only waits to be reaped does not."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(is_so: Callable[[], object]) -> None:
    """Return as soon as ``is_so`` holds; fail after a minute."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def printed_json(script: Path, *arguments: str, warnings: str = "default") -> dict[str, Any]:
    """Return the JSON that a script of the tests prints, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", warnings, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(script.parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result
