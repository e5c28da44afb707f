"""Processes of their own that tests start: launchers to send signals to, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")

LAUNCHER = """
import os, signal, subprocess, sys
from pathlib import Path
from profkit.launch import processes
plain_wait = subprocess.Popen.wait
def wait(child, timeout=None):
    if 'SAYS_THAT_IT_WAITS' in os.environ: Path(os.environ['SAYS_THAT_IT_WAITS']).touch()
    return plain_wait(child, timeout)
subprocess.Popen.wait = wait
processes.PATIENCE_S, processes._SILENCE_S = {patience_s}, 0.05
processes.family.GRACE_S = processes.GRACE_S = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)
try: sys.exit(processes.{run}([sys.executable, '-c', *sys.argv[1:]], os.environ, reads_input=True))
except KeyboardInterrupt: os._exit(1)
"""


def start_launcher(
    code: str, *arguments: str, patience_s: float = 60, run: str = "run_child", waits: Path | None = None
) -> subprocess.Popen[str]:
    """Start a process that runs ``code`` as `profkit.launch.processes` runs somebody's program.

    It makes the file ``waits`` when it waits for the program: before, a signal finds it starting the program.
    """
    launcher = LAUNCHER.format(patience_s=patience_s, run=run)
    words = [sys.executable, "-c", launcher, code, *arguments]
    environment = os.environ | ({} if waits is None else {"SAYS_THAT_IT_WAITS": str(waits)})
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)


@contextmanager
def started(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process whose output the test reads, and kill it at the end: a test that fails must not wait for it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(words, text=True, **{"stdout": pipe, "stderr": pipe, **options}) as process:
        try:
            yield process
        finally:
            process.kill()


def is_alive(process: int) -> bool:
    """Return whether a process runs: one that only waits to be reaped does not."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_in(folder: Path) -> list[str]:
    """Return the processes that run in the folder, as all that a run starts there do."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if Path(os.readlink(process / "cwd")) == folder and is_alive(int(process.name)):
                found.append(process.name)
    return found


def wait_until(is_so: Callable[[], object]) -> None:
    """Return as soon as ``is_so`` holds; fail after five minutes."""
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run_threads(function: Callable[[int], object], count: int) -> None:
    """Call it with each number in a thread of its own, all at once, and wait for them."""
    threads = [threading.Thread(target=function, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
