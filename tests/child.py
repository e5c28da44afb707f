"""Run a function in a forked child that the kernel stops if it takes too much: a guard against hangs, not a clock."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


_MOST_WAITING = 30


class ChildError(AssertionError):
    """The child raised, was stopped, or died; the message says which."""


def run_in_child(work: Callable[[], Result], *, cpu_seconds: int, memory_bytes: int | None = None) -> Result:
    """Return what ``work`` returns, computed in a forked child within limits of CPU time and of memory to grow by.

    Raises:
        ChildError: ``work`` raised (its traceback is the message), or a limit ended the child.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        status = 1
        try:
            _limit(cpu_seconds, memory_bytes)
            try:
                answer = (True, work())
            except BaseException:
                answer = (False, traceback.format_exc())
            with open(write_end, "wb") as pipe:
                pickle.dump(answer, pipe)
            status = 0
        finally:
            # Not a return into the copy of the test run.
            os._exit(status)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        raise ChildError(f"the child ended with status {os.waitstatus_to_exitcode(status)} (limit {cpu_seconds} s)")
    is_good, value = pickle.loads(data)
    if not is_good:
        raise ChildError(value)
    return value  # type: ignore[no-any-return]


def _limit(cpu_seconds: int, memory_bytes: int | None) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    # One that waits, for a pipe's writer say, uses no time of the processor.
    signal.alarm(_MOST_WAITING * cpu_seconds)
    if memory_bytes is not None:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + memory_bytes, in_use + memory_bytes))
