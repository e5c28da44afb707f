"""A function in a process of its own: what one cell left behind cannot reach the next.

The processes are forked from a server that has imported torch and what the recipes share, and has done nothing with
it: no CUDA context, no thread, no allocation. So each begins as a fresh one would, without the seconds that the import
takes.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

Result = TypeVar("Result")

_GRACE_S = 5.0
_PRELOADED = ["torch", "recipes.common.command"]


class CellFailed(Exception):
    """The function raised, or its process died; ``str(error)`` is one line, ``details`` where it happened."""

    def __init__(self, reason: str, details: str | None = None) -> None:
        super().__init__(reason)
        self.details = details


class OutOfTime(Exception):
    """The function was still running when its time was over; its process was ended."""


def run_isolated(function: Callable[..., Result], *arguments: object, limit_s: float | None = None) -> Result:
    """Return what ``function(*arguments)`` returns, run in a process of its own.

    The function is one of a module, and what goes in and comes out can be pickled. Whatever happens here, the process
    is gone afterwards.

    Raises:
        CellFailed: the function raised, or the process was killed.
        OutOfTime: it took longer than ``limit_s``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise OutOfTime
        succeeded, value, details = ours.recv()
        process.join(_GRACE_S)
    except EOFError:
        process.join()
        raise CellFailed(_describe_end(process.exitcode)) from None
    finally:
        ours.close()
        _end(process)
    if not succeeded:
        raise CellFailed(value, details)
    result: Result = value
    return result


def _serve(pipe: Connection, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    # Ctrl-C goes to every process of the terminal's group. The parent ends this one, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pipe.send((True, function(*arguments), None))
    except Exception as error:
        message = next(iter(str(error).strip().splitlines()), "")
        pipe.send((False, f"{type(error).__name__}: {message}" if message else type(error).__name__, _trace()))


def _trace() -> str:
    return traceback.format_exc()


def _describe_end(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return "killed: perhaps the memory of the host was full"
    if exit_code is not None and exit_code < 0:
        return f"ended by signal {-exit_code}"
    return f"its process exited with status {exit_code}"


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Ask, then force. A process that waits for children of its own ends them when it is asked."""
    for ask in (process.terminate, process.kill):
        if not process.is_alive():
            break
        ask()
        process.join(_GRACE_S)
    process.close()
