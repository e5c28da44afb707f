"""Running a child process so that no process that it starts outlives us."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from profkit.errors import ToolError

_MARK = "PROFKIT_CHILD"
_GRACE_S = 2.0
_LOOKS = 10
"""How often to look for a child whose start was interrupted: right after exec, Linux shows an empty environment."""


def run_child(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    *,
    reads_input: bool = False,
) -> int:
    """Run ``argv`` to its end and return its exit status; 128 + n if signal n ended it.

    Standard output and error go to ``output``, or where ours go; standard input is empty, or ours if it
    ``reads_input``. On Ctrl-C, on SIGTERM and on any other exception
    every process that the child started is ended too, daemons of a profiler included: nsys puts its agent and the
    target into sessions of their own, so a process group is not enough, and they are known by an environment variable.
    So are they when a signal ended the child itself. A second Ctrl-C changes nothing.
    """
    status = _run(argv, environment, output, pass_fds, reads_input)
    return status if status >= 0 else 128 - status


def run_tool(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    *,
    reads_input: bool = False,
) -> int:
    """Do as `run_child`, for a tool of profkit instead of the target.

    Raises:
        ToolError: a signal ended it.
    """
    status = _run(argv, environment, output, pass_fds, reads_input)
    if status < 0:
        name = signal.Signals(-status).name
        log = f"; its output is in {output.name}" if output is not None and isinstance(output.name, str) else ""
        raise ToolError(f"{argv[0]} was killed ({name}): its child processes were ended, and the capture is lost{log}")
    return status


def _run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None,
    pass_fds: Sequence[int],
    reads_input: bool,
) -> int:
    """Run ``argv`` and return its exit status; -n if signal n ended it."""
    mark = uuid.uuid4().hex
    child = None
    with sigterm_raises():
        try:
            child = subprocess.Popen(
                argv,
                env={**environment, _MARK: mark},
                stdin=None if reads_input else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            status = child.wait()
            if status < 0:
                _end_all(child, mark)
        except BaseException:
            # Also of a child that was being started: it may run already.
            _end_all(child, mark)
            raise
    return status


def _end_all(child: subprocess.Popen[bytes] | None, mark: str) -> None:
    """Ask, then force; a second Ctrl-C meanwhile must not leave half of them alive."""
    looks = 1 if child is not None else _LOOKS
    with uninterrupted():
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline:
                alive = list(_marked(mark))
                for process in alive:
                    _send(os.kill, process, number)
                if child is not None and child.poll() is None:
                    _send(os.killpg, child.pid, number)
                elif not alive:
                    looks -= 1
                    if looks <= 0:
                        return
                time.sleep(0.02)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C within the block."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _marked(mark: str) -> Iterator[int]:
    """Yield the processes with ``mark`` in their environment (on Linux; elsewhere there is no /proc to look into)."""
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            found = wanted in entry.read_bytes().split(b"\0")
        except OSError:  # gone by now, or another user's
            continue
        if found:
            yield int(entry.parent.name)


def _send(kill: Callable[[int, int], None], process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it ended by itself
        kill(process, number)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into an exception while a child runs, so that the child is ended before we are."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
