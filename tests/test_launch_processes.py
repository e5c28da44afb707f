"""A child and all its own: their status, and that none outlives an interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from profkit.errors import ToolError
from profkit.launch.processes import run_child, run_tool

LEAVES_A_DAEMON = """
import subprocess, sys, time, signal
if {stubborn}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)
open({pids!r}, 'w').write(str(child.pid))
time.sleep(60)
"""


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("raise SystemExit(7)", 7)])
def test_exit_status(code: str, status: int) -> None:
    assert run_child([sys.executable, "-c", code], os.environ) == status


def test_death_by_signal_is_128_and_its_number() -> None:
    assert run_child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], os.environ) == 137


def test_environment_output_and_descriptors(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['WORD']); sys.stderr.write('err'); os.write(int(sys.argv[1]), b'direct')"
    with (tmp_path / "log").open("w+b") as log, (tmp_path / "direct").open("wb") as direct:
        status = run_child([sys.executable, "-c", code, str(direct.fileno())], {"WORD": "word"}, log, [direct.fileno()])
    assert status == 0
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "word"]
    assert (tmp_path / "direct").read_text() == "direct"


def _alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("number", "status", "stubborn", "again"),
    [
        (signal.SIGINT, 1, False, False),
        (signal.SIGTERM, 143, False, False),
        (signal.SIGINT, 1, True, False),
        (signal.SIGINT, 1, True, True),
    ],
    ids=["Ctrl-C", "SIGTERM", "a stubborn child", "Ctrl-C twice"],
)
def test_an_interruption_ends_the_child_and_what_it_put_into_a_session_of_its_own(
    tmp_path: Path, number: signal.Signals, status: int, stubborn: bool, again: bool
) -> None:
    pids = tmp_path / "pids"
    code = LEAVES_A_DAEMON.format(pids=str(pids), stubborn=stubborn)
    launcher = (
        "import os, signal, sys\nfrom profkit.launch.processes import run_child\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try: sys.exit(run_child([sys.executable, '-c', sys.argv[1]], os.environ))\n"
        "except KeyboardInterrupt: sys.exit(1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher, code])
    deadline = time.monotonic() + 30
    while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    daemon = int(pids.read_text())
    assert _alive(daemon)
    process.send_signal(number)
    if again:
        time.sleep(0.3)
        process.send_signal(number)
    assert process.wait(30) == status
    assert not _alive(daemon)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_the_children_of_a_killed_tool_are_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = LEAVES_A_DAEMON.format(pids=str(pids), stubborn=False)
    dies = code.rpartition("time.sleep(60)")[0] + "import os; os.kill(os.getpid(), 9)"
    with (tmp_path / "log").open("w+b") as log, pytest.raises(ToolError) as error:
        run_tool([sys.executable, "-c", dies], os.environ, log)
    said = "was killed (SIGKILL): its child processes were ended, and the capture is lost; its output is in"
    assert str(error.value) == f"{sys.executable} {said} {tmp_path / 'log'}"
    assert not _alive(int(pids.read_text()))


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_a_child_is_ended_that_was_only_being_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come when the program runs already and Popen has not returned yet."""
    real, started = subprocess.Popen, []

    def interrupted(*arguments: Any, **options: Any) -> NoReturn:
        started.append(real(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_child([sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
    assert started[0].wait(10) == -signal.SIGTERM
