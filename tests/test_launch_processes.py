"""A child and all its own: their status, and that none outlives an interruption."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from profkit.errors import ToolError
from profkit.launch import processes
from profkit.launch.family import Family
from profkit.launch.processes import run_child, run_tool
from tests.launched import LAUNCHER, NEEDS_PROC, is_alive, start_launcher, wait_until

pytestmark = NEEDS_PROC

LEAVES_A_DAEMON = """
import subprocess, sys, time, signal
for number in {ignored}: signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True, env={{}})
open({pids!r}, 'w').write(str(child.pid))
try:
    time.sleep(60)
except KeyboardInterrupt:
    open({pids!r} + '.saved', 'w').write('saved')
"""


@pytest.mark.parametrize(("code", "status"), [("exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_status_of_a_child_that_a_signal_ended_is_128_and_its_number(code: str, status: int) -> None:
    assert run_child([sys.executable, "-c", code], os.environ) == status


def test_environment_output_and_descriptors(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['WORD']); sys.stderr.write('err'); os.write(int(sys.argv[1]), b'direct')"
    with (tmp_path / "log").open("w+b") as log, (tmp_path / "direct").open("wb") as direct:
        status = run_tool([sys.executable, "-c", code, str(direct.fileno())], {"WORD": "word"}, log, [direct.fileno()])
    assert status == 0
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "word"]
    assert (tmp_path / "direct").read_text() == "direct"


def _launch(tmp_path: Path, ignored: str = "()", patience_s: float = 60, run: str = "run_child") -> Any:
    """Start a launcher; return it and its child's daemon once that runs and the launcher waits."""
    pids, waits = tmp_path / "pids", tmp_path / "waits"
    code = LEAVES_A_DAEMON.format(pids=str(pids), ignored=ignored)
    process = start_launcher(code, patience_s=patience_s, run=run, waits=waits)
    wait_until(lambda: waits.exists() and pids.exists() and pids.read_text())
    return process, int(pids.read_text())


STUBBORN = "(signal.SIGINT, signal.SIGTERM)"


@pytest.mark.parametrize(
    ("number", "status", "ignored", "patience_s"),
    [
        (signal.SIGINT, 1, "()", 60),
        (signal.SIGINT, 1, STUBBORN, 0.1),
        (signal.SIGTERM, 143, "()", 60),
        (signal.SIGTERM, 143, STUBBORN, 60),
        (signal.SIGHUP, 129, "()", 60),
        (signal.SIGQUIT, 131, "()", 60),
    ],
    ids=["Ctrl-C", "Ctrl-C and a stubborn child", "SIGTERM", "SIGTERM and a stubborn child", "SIGHUP", "SIGQUIT"],
)
def test_a_signal_ends_the_child_and_what_it_put_into_a_session_of_its_own(
    tmp_path: Path, number: signal.Signals, status: int, ignored: str, patience_s: float
) -> None:
    process, daemon = _launch(tmp_path, ignored, patience_s)
    assert is_alive(daemon)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == status
    assert not is_alive(daemon)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_patience_and_leaves_no_child(tmp_path: Path, second: signal.Signals) -> None:
    process, daemon = _launch(tmp_path, STUBBORN)
    process.send_signal(signal.SIGINT)
    assert "passed Ctrl-C to the script" in process.stderr.readline()
    process.send_signal(second)
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert not is_alive(daemon)


def test_a_second_sigterm_leaves_no_child_that_ignores_it(tmp_path: Path) -> None:
    process, daemon = _launch(tmp_path, STUBBORN)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    process.communicate()
    # One that comes after the child has ended may end the launcher itself.
    assert process.returncode in (143, -signal.SIGTERM)
    assert not is_alive(daemon)


def test_a_program_that_saves_when_it_is_asked_to_end_leaves_with_its_own_status(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(85))\n"
        "open(sys.argv[1], 'w')\nwhile True: signal.pause()"
    )
    process = start_launcher(code, str(ready))
    wait_until(ready.exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 85


SAVES = """
import os, signal, subprocess, sys, time
def save(number, frame):
    open(sys.argv[1], "a").write(signal.Signals(number).name)
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, save)
started = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(sys.argv[1] + ".ready", "w")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
status = started.poll() or 3
started.kill()
sys.exit(status)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_for_the_program_reaches_it_alone_and_ends_nobody(tmp_path: Path, number: signal.Signals) -> None:
    process = start_launcher(SAVES, str(tmp_path / "saved"))
    wait_until((tmp_path / "saved.ready").exists)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 3, "the child that has no handler lives on"
    assert (tmp_path / "saved").read_text() == number.name


class Program:
    """Notes the signals that it is sent."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_to_first(self, number: int, *, but: Path | None) -> None:
        self.signals.append(number)


def test_a_signal_that_comes_while_the_program_is_being_started_reaches_it_then() -> None:
    program = Program()
    with processes._passed_on(None) as pass_on_to:
        signal.raise_signal(signal.SIGUSR2)
        assert program.signals == []
        pass_on_to(program)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGUSR1)
    assert program.signals == [signal.SIGUSR2, signal.SIGUSR1]


def test_under_a_tool_the_signal_reaches_what_the_tool_started(tmp_path: Path) -> None:
    """A copy of the shell plays the tool: what it starts lies elsewhere, and it would die of the signal."""
    tool = tmp_path / "tool" / "sh"
    tool.parent.mkdir()
    shutil.copy(os.path.realpath("/bin/sh"), tool)
    code = shlex.join([sys.executable, "-c", SAVES, str(tmp_path / "saved")])
    words = [str(tool), "-c", f"{code}; exit $?"]
    launcher = LAUNCHER.format(patience_s=60, run="run_tool").replace(
        "[sys.executable, '-c', *sys.argv[1:]]", repr(words)
    )
    process = subprocess.Popen([sys.executable, "-c", launcher])
    wait_until((tmp_path / "saved.ready").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 3
    assert (tmp_path / "saved").read_text() == "SIGUSR1"


def test_ctrl_c_does_not_reach_a_tool_that_ends_when_its_target_has(tmp_path: Path) -> None:
    """The launcher's Python plays the tool here, so that no process of the child gets the signal."""
    process, daemon = _launch(tmp_path, patience_s=0.5, run="run_tool")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert not (tmp_path / "pids.saved").exists()
    assert not is_alive(daemon)


def test_the_children_of_a_killed_tool_are_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = LEAVES_A_DAEMON.format(pids=str(pids), ignored="()")
    # Once its parent is dead, only the environment still shows whose it is.
    dies = code.replace(", env={}", "").partition("try:")[0] + "import os; os.kill(os.getpid(), 9)"
    with (tmp_path / "log").open("w+b") as log, pytest.raises(ToolError) as error:
        run_tool([sys.executable, "-c", dies], os.environ, log)
    said = "was killed (SIGKILL): its child processes were ended, and the capture is lost; its output is in"
    assert str(error.value) == f"{sys.executable} {said} {tmp_path / 'log'}"
    assert not is_alive(int(pids.read_text()))


def test_parents_are_asked_to_end_before_what_they_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader's worker that ends first is a failure to the script, which then goes on as after one."""
    sent: list[int] = []
    there = [{12345, 12346, 12360}, set[int]()]
    monkeypatch.setattr(Family, "members", lambda _: there.pop(0))
    monkeypatch.setattr("profkit.launch.family.os.kill", lambda process, _: sent.append(process))
    Family("mark", 12345).end()
    assert sent == [12345, 12346, 12360]
    assert list({12345, 12346, 12360}) != sent, "the order of a set is another one"


def test_a_child_is_ended_that_was_only_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come when the program runs already and Popen has not returned yet."""
    real, started = subprocess.Popen, []

    def interrupted(*arguments: Any, **options: Any) -> NoReturn:
        started.append(real(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_child([sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
    assert started[0].wait(10) == -signal.SIGTERM
