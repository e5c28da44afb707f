"""The ranges of this process that its hooks do not open, and the log of all of them.

While torch.profiler records CUDA's activities alone, entering or leaving a range appends its name or None and the time
to a list that one thread alone writes to: no string is made, and no profiler is called. Which ranges a backward pass
enters and leaves from one call's work to the next one's is worked out after the recording. The launcher joins the log
and the trace (`profkit.run.range_log`) once the program has ended.

The script's own ranges are those of NVTX and of ``record_function``. A thread's ranges close in the opposite order of
their opening, whoever opened them: what profkit opens in between would otherwise close in the place of the script's.
NVTX keeps such a stack for each thread and domain. Full collections of garbage are ranges too.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import sleep, time_ns
from typing import Any, NamedTuple

import nvtx
import torch
from torch.autograd.profiler import record_function

from profkit.annotation import Range, own_kind
from profkit.capture.hooks import Call, change_between
from profkit.capture.patches import Function, call_between, call_first, patch
from profkit.names import COLLECTING
from profkit.run.range_log import LEFT, ClockReading, LoggedCollective, RangeLog, ThreadEntries

Opening = Callable[[Callable[[], str]], None]
"""Is called before a range of the script's opens, with what returns its name."""


def watch_script_ranges(opening: Opening, closing: Callable[[], None], closed: Callable[[], None]) -> None:
    """Call these around each range of the script's, on the thread on which it opens and closes."""
    for kind in (nvtx.annotate, record_function):
        own_kind(kind)
    closes = call_between(closing, closed)
    patch("nvtx.annotate.__enter__", _opens(opening, _name_of_marker))
    patch("nvtx.annotate.__exit__", closes)
    patch("nvtx.annotate.__call__", partial(_decorates, opening, closing, closed))
    patch("nvtx.push_range", _opens(opening, _name_given))
    patch("nvtx.pop_range", closes)
    patch("torch.cuda.nvtx.range_push", _opens(opening, _name_given))
    patch("torch.cuda.nvtx.range_pop", closes)
    opens_record = _opens(opening, lambda record, *_: str(record.name))
    patch("torch.autograd.profiler.record_function.__enter__", partial(_unless_torchs, opens_record))
    patch("torch.autograd.profiler.record_function.__exit__", partial(_unless_torchs, closes))


def _opens(opening: Opening, name: Callable[..., str]) -> Callable[[Function], Function]:
    return call_first(lambda *args, **kwargs: opening(partial(name, *args, **kwargs)))


def _name_given(message: object = "", *_more: Any, msg: object = None, **_named: Any) -> str:
    """The name among the arguments of NVTX's ``push_range`` (``message``) or torch's ``range_push`` (``msg``)."""
    return str(message if msg is None else msg)


def _name_of_marker(marker: Any, *_more: Any) -> str:
    message = getattr(getattr(marker, "attributes", None), "message", "")
    return str(getattr(message, "string", message))


_TORCHS = ("Optimizer.step#", "Optimizer.zero_grad#", "DistributedDataParallel.forward", "enumerate(DataLoader)#")
"""How the names of ranges begin that torch itself opens in each step. The hooks need not see them: no step begins in
them, or the hooks learn of it in another way."""


def _unless_torchs(wrap: Callable[[Function], Function], plain: Function) -> Function:
    watched = wrap(plain)

    def called(record: Any, *args: Any, **kwargs: Any) -> Any:
        return (plain if str(record.name).startswith(_TORCHS) else watched)(record, *args, **kwargs)

    return called


def _decorates(
    opening: Opening, closing: Callable[[], None], closed: Callable[[], None], decorate: Function
) -> Function:
    def decorated(marker: Any, function: Any) -> Any:
        annotated = decorate(marker, function)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            opening(partial(_name_of_marker, marker))
            try:
                return annotated(*args, **kwargs)
            finally:
                closing()
                closed()

        return watched

    return decorated


MOST_ENTRIES = 4_000_000
"""More are not kept: they would take some 300 MB of the program's memory, and a trace that nobody can open."""

_PAUSES_S = (0.0, 0.0005, 0.001)
"""The pauses before the waits for the GPU at one moment: unequal, so that no other waits look like these."""


BACKWARD_OF_CALLS = object()
"""In the place of a range's name: the thread begins to run backward work of calls."""


class LiveLog:
    """What the threads of this process enter and leave while the log ``is_on``."""

    def __init__(self, most_entries: int = MOST_ENTRIES) -> None:
        self.is_on = False
        self.saw_cuda_graphs = False
        """Whether the program had captured a CUDA graph when the recording ended."""
        self.collectives: list[LoggedCollective] = []
        """What was called of other ranks while it was recorded, if somebody knows."""
        self._threads: list[_Thread] = []
        self._readings: list[list[ClockReading]] = []
        self._most_entries = most_entries

    def begin_thread(self) -> list[Any]:
        """Return the list that this thread appends to: what it enters, None where it leaves that, and the time.

        It enters a range, of which it notes the name, or `BACKWARD_OF_CALLS`, within which it notes each call whose
        backward begins or goes on.
        """
        number = threading.get_native_id()
        entries: list[Any] = []
        self._threads.append(_Thread(threading.get_ident(), number, _name_of_thread(number), entries))
        return entries

    @property
    def is_full(self) -> bool:
        """Whether as much is logged as may be: asked between calls of models, because asking takes time."""
        return sum(len(thread.entries) for thread in self._threads) >= self._most_entries

    def read_clock(self) -> None:
        """Read the clock around waits for the GPU, which has nothing to do: the trace holds these calls too.

        Within a capture into a CUDA graph, which a wait would break, it is not read.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        handle, readings = threading.get_ident(), []
        if all(thread.handle != handle for thread in self._threads):
            self.begin_thread()
        for pause_s in _PAUSES_S:
            sleep(pause_s)
            before_ns = time_ns()
            torch.cuda.synchronize()
            readings.append(ClockReading(handle, before_ns, time_ns()))
        self._readings.append(readings)

    def content(self) -> RangeLog:
        ended_ns, numbers = time_ns(), _Numbers()
        threads = [thread.content(numbers) for thread in self._threads]
        return RangeLog(os.getpid(), list(numbers), threads, self._readings, ended_ns, self.collectives)

    @property
    def began_ns(self) -> int:
        """When the clock was read first, in ns since the epoch."""
        return self._readings[0][0].before_ns if self._readings else time_ns()


class _Numbers(dict[str, int]):
    """The number of each name, in the order in which they were asked for."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


class _Thread(NamedTuple):
    handle: int
    number: int
    name: str
    entries: list[Any]

    def content(self, numbers: _Numbers) -> ThreadEntries:
        logged, entries, last_ns = self.entries.copy(), list[int](), 0
        entered: list[str | Call | None] = []
        for what, noted_ns in zip(logged[::2], logged[1::2], strict=True):
            closing, opening = 0, list[str]()
            if what is BACKWARD_OF_CALLS:
                entered.append(None)
            elif isinstance(what, str):
                entered.append(what)
                opening = [what]
            else:
                last = entered.pop() if entered else None
                if isinstance(last, str):
                    closing, last = 1, None
                others, opening = change_between(last, what)
                closing += others
                if what is not None:
                    entered.append(what)
            # Each a nanosecond after the one before, so that of two that open and close together one lies within.
            for number in (*[LEFT] * closing, *(numbers[name] for name in reversed(opening))):
                last_ns = max(last_ns + 1, noted_ns)
                entries += (number, last_ns)
        return ThreadEntries(self.handle, self.number, self.name, entries)


def _name_of_thread(number: int) -> str:
    try:
        return Path(f"/proc/self/task/{number}/comm").read_text().strip()
    except OSError:
        return threading.current_thread().name


_FULL = 2
"""The generation of Python's objects that a full collection looks at, and all younger ones with it."""


@contextmanager
def collections_as_ranges(log: LiveLog | None) -> Iterator[None]:
    """Record a range around each full collection of garbage: in the log, or without one in what records ranges.

    The hooks are not shown it: a collection may begin in the middle of their work.
    """
    marker, opened = Range(COLLECTING, None), {}
    entries: dict[int, list[Any]] = {}

    def note(phase: str, collection: dict[str, Any]) -> None:
        if collection["generation"] < _FULL:
            return
        thread = threading.get_ident()
        if log is not None:
            if thread not in entries:
                entries[thread] = log.begin_thread()
            entries[thread] += (COLLECTING if phase == "start" else None, time_ns())
        elif phase == "start":
            opened[thread] = marker.open(())
        elif thread in opened:
            marker.close(opened.pop(thread), ())

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)
