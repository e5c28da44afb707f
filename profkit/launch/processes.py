"""Running a child process: signals reach it as they would without profkit, and nothing that it starts outlives us."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from profkit.errors import ToolError
from profkit.launch import family
from profkit.launch.family import DONE, GRACE_S, MARK, Family

PATIENCE_S = 30.0
"""How long a script that was interrupted may take to end, before it is ended as by SIGTERM."""

_POLL_S = 0.02
_SILENCE_S = 1.0
"""A script that ends within this time after Ctrl-C needs no word about it."""

_LOOKS = 10
"""How often to look for a child whose start was interrupted: right after exec, Linux shows an empty environment."""

_ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_FOR_PROGRAMS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which a cluster has a program save its state; they would end a launcher, and with it the program."""


class Stopped(SystemExit):
    """A signal that ends a program came, and the child has ended.

    ``number`` is the signal's; ``code`` is the status that somebody's program left with by itself, else 128 + number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def run_child(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None = None,
    *,
    reads_input: bool = False,
) -> int:
    """Run ``argv`` to its end and return its exit status; 128 + n if signal n ended it.

    Standard output and error go to ``output``, or where ours go; standard input is empty, or ours if it
    ``reads_input``. To a child that does, somebody's own program, Ctrl-C is passed on: it has `PATIENCE_S` to save what
    it wants and end, then it is ended; a second Ctrl-C ends it at once. SIGUSR1 and SIGUSR2 are passed on to it too.
    Ctrl-C in other cases, SIGTERM, SIGHUP, SIGQUIT and any other exception end it with SIGTERM, then SIGKILL.
    So ends all that it started, daemons of a profiler included, also if a signal ends the child, and if we are killed.

    Raises:
        KeyboardInterrupt: Ctrl-C came; the child has ended.
        Stopped: another signal that ends a program came; the child has ended.
    """
    status = _run(argv, environment, output, (), reads_input=reads_input)
    return status if status >= 0 else 128 - status


def run_tool(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    *,
    reads_input: bool = False,
) -> int:
    """Do as `run_child`, for a tool around the target. Ctrl-C reaches the target alone: the tool then ends by itself.

    Raises:
        ToolError: a signal ended it.
        KeyboardInterrupt, Stopped: as `run_child`.
    """
    status = _run(argv, environment, output, pass_fds, reads_input=reads_input, tool=Path(argv[0]).resolve().parent)
    if status < 0:
        name, where = signal.Signals(-status).name, "" if output is None else where_said(output)
        lost = "its child processes were ended, and the capture is lost"
        raise ToolError(f"{argv[0]} was killed ({name}): {lost}{where}")
    return status


def where_said(log: IO[bytes]) -> str:
    """Return where a tool's output can be read, to follow an error; "" if its file has no name."""
    return f"; its output is in {log.name}" if isinstance(log.name, str) else ""


def _run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None,
    pass_fds: Sequence[int],
    *,
    reads_input: bool,
    tool: Path | None = None,
) -> int:
    """Run ``argv`` and return its exit status; -n if signal n ended it. Executables in ``tool`` get no Ctrl-C."""
    mark = uuid.uuid4().hex
    child = None
    with _first_signal_raises() as signals, _passed_on(tool) as pass_on_to:
        try:
            child = subprocess.Popen(
                argv,
                env={**environment, MARK: mark},
                stdin=None if reads_input else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            started = Family(mark, child.pid)
            if reads_input:
                pass_on_to(started)
            with _guarded(started):
                try:
                    status = child.wait()
                except KeyboardInterrupt:
                    if not reads_input:
                        raise
                    _let_end(child, started, tool, signals)
                    raise
            if status < 0:
                _end_all(child, mark)
        except BaseException as error:
            # Also of a child that was being started: it may run already.
            _end_all(child, mark)
            left = None if child is None or tool is not None or not reads_input else child.returncode
            if isinstance(error, Stopped) and left is not None and left >= 0:
                error.code = left  # it saved its state, perhaps, and says so
            raise
    return status


def _let_end(child: subprocess.Popen[bytes], started: Family, tool: Path | None, signals: list[int]) -> None:
    started.send(signal.SIGINT, but=tool)
    began = time.monotonic()
    is_said = False
    while child.poll() is None and len(signals) == 1 and time.monotonic() < began + PATIENCE_S:
        time.sleep(_POLL_S)
        if not is_said and time.monotonic() > began + _SILENCE_S:
            is_said = True
            with suppress(OSError, AttributeError):  # a closed terminal must not cost the script its time
                sys.stderr.write(
                    f"profkit: passed Ctrl-C to the script, which has {PATIENCE_S:.0f} s to end; then SIGTERM and, "
                    f"{GRACE_S:.0f} s later, SIGKILL follow (Ctrl-C again: SIGTERM now)\n"
                )


def _end_all(child: subprocess.Popen[bytes] | None, mark: str) -> None:
    """End all that is left; no signal that comes meanwhile leaves half of it alive."""
    with uninterrupted():
        if child is None:
            Family(mark, None).end(looks=_LOOKS)
        else:
            Family(mark, child.pid).end(look=child.poll)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)


@contextmanager
def _guarded(started: Family) -> Iterator[None]:
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", family.__file__, started.mark, str(started.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            guard.stdin.write(DONE)
            guard.stdin.close()
        guard.wait()


@contextmanager
def _passed_on(tool: Path | None) -> Iterator[Callable[[Family], None]]:
    """Within the block signals for somebody's program do not end us; they reach the one that the block names, if any.

    One that came before the program was named reaches it then. Where every process of a job gets such a signal, the
    program gets it twice.
    """
    programs: list[Family] = []
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if programs:
            programs[0].send_to_first(number, but=tool)
        else:
            early.append(number)

    def pass_on_to(program: Family) -> None:
        programs.append(program)
        for number in early:
            program.send_to_first(number, but=tool)

    ours = [number for number in _FOR_PROGRAMS if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, pass_on)
    try:
        yield pass_on_to
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and the signals that end a program within the block."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_ENDINGS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _first_signal_raises() -> Iterator[list[int]]:
    """Turn the first signal that ends a program into an exception, so that a child is ended before we are.

    Yields the numbers of the signals that have come; later ones are only noted. A signal that was ignored before stays
    ignored, as `nohup` wants it.
    """
    signals: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) == 1:
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)

    before = {}
    for number in (signal.SIGINT, *_ENDINGS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, note)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
