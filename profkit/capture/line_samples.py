"""Which lines of the user's own code threads are in, seen each millisecond; and which of them wait for the GPU.

pyinstrument and py-spy know neither profkit's phases nor its steps, and sum whole call trees; py-spy would need the
right to read another process's memory.
"""

from __future__ import annotations

import ast
import functools
import gc
import os
import re
import sys
import sysconfig
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns, sleep
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import profkit.capture
import profkit.models
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.patches import patch, restore
from profkit.capture.steps.times import wait_for_device
from profkit.capture.steps.variable_names import call_at, file_or_cell
from profkit.run.lines import Line, Thread

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_NOTEBOOKS = ("<ipython-input-", "<stdin>")


class Place(NamedTuple):
    """An instruction of the user's own code, and the function of a library that it has called and that runs now.

    Code stands by its number in `_codes`: two functions may be equal, and hashing one by its content takes long.
    ``called`` is None where the line runs itself, or calls something that is not written in Python.
    """

    code: int
    instruction: int
    called: int | None


Stack = tuple[Place, ...]
"""A line that runs, and the lines of the user's own that have called it; empty where nothing is the user's own."""


def is_profkits(frame: FrameType | None) -> bool:
    """Return whether a hook of profkit's works, or waits for the device at a step's end: no time of the program's."""
    while frame is not None and not is_own(frame.f_code):
        if id(frame.f_code) in _HOOKS:
            return True
        frame = frame.f_back
    return False


# All that ends steps and phases shares the code of the guard around it; none of it calls the program.
_HOOKS = {id(hook.__code__) for hook in (Hooks.optimizer_ends, Hooks.enter, Hooks.leave, wait_for_device)}


def find_place(frame: FrameType | None) -> Place | None:
    return next(_walk(frame), None)


def find_stack(frame: FrameType | None, outermost: CodeType | None = None) -> Stack:
    """Return the places of the user's own code on a stack, the innermost first.

    The user's own code is what lies in no installed package, is not generated and is not profkit's, but for the
    built-in models, which are the program where they run. With ``outermost``, only what that function has called
    counts.
    """
    return tuple(_walk(frame, outermost))


def _walk(frame: FrameType | None, outermost: CodeType | None = None) -> Iterator[Place]:
    called: CodeType | None = None
    while frame is not None and frame.f_code is not outermost:
        code = frame.f_code
        if is_own(code):
            yield Place(_number(code), frame.f_lasti, None if called is None else _number(called))
        if not _is_profkits(code.co_filename):
            called = code
        frame = frame.f_back


def is_own(code: CodeType) -> bool:
    return _is_own_file(code.co_filename)


_codes: dict[int, CodeType] = {}
"""Each code by its id, which stays its own as long as the code is kept here."""


def _number(code: CodeType) -> int:
    _codes[id(code)] = code
    return id(code)


@functools.cache
def _is_own_file(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith(_NOTEBOOKS)
    path = Path(file).absolute()
    if _PROFKIT in path.parents:
        return not _is_profkits(file)
    if file == getattr(sys.modules.get("__main__"), "__file__", None):
        return True
    if any(part.startswith("torchinductor_") or part in ("site-packages", "dist-packages") for part in path.parts):
        return False
    generated = [Path(os.environ[name]).absolute() for name in _CACHES if os.environ.get(name)]
    return not any(folder in path.parents for folder in (*_LIBRARIES, *generated))


@functools.cache
def _is_profkits(file: str) -> bool:
    folders = Path(file).absolute().parents
    return _PROFKIT in folders and _MODELS not in folders


_MODELS = Path(profkit.models.__path__[0])
_PROFKIT = Path(profkit.capture.__path__[0]).parent
_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


@functools.cache
def describe(place: Place) -> Line:
    code = _codes[place.code]
    line, call = call_at(code, place.instruction)
    called = None if call is None else _shortened(ast.unparse(call.func))
    if called is None and place.called is not None:
        called = _codes[place.called].co_qualname
        if "<locals>" in called:  # what wraps an operator of tensors, say: its name is none of the operator's
            called = None
    function = "<module>" if code.co_name.startswith("<cell line") else code.co_qualname.replace(".<locals>", "")
    return Line(file_or_cell(code.co_filename), line, function, called)


@functools.cache
def name_inside(code: int) -> str | None:
    """Return the name of a library's function by the number of its code; None for the user's own, and profkit's."""
    known = _codes[code]
    if is_own(known) or _is_profkits(known.co_filename):
        return None
    return f"{Path(known.co_filename).stem}.{known.co_qualname.replace('.<locals>', '')}"


def _shortened(function: str) -> str:
    name, dot, last = function.rpartition(".")
    return function if name.replace(".", "").isidentifier() or not dot else f"….{last}"


PERIOD_NS = 1_000_000

_SWITCH_INTERVAL_S = 0.0005
"""How long a thread of Python's may run on while the sampler waits; by default ten times as long as it should."""

_PROMPT_NS = 100_000
"""A sampler that waited for nothing looks at most this late: the system's timer is no better."""

_LOCKED = 2
"""A thread that runs Python lets the lock go after one switch interval: a sampler that is kept from it for more than
so many waits for a call."""

Key = tuple[Stack, str | None, Thread]

Spot = tuple[int, int]
"""The code, by its number in `_codes`, and the instruction at which a thread stands: a library's or the user's own."""


def _spot_of(frame: FrameType) -> Spot:
    return _number(frame.f_code), frame.f_lasti


class StackSampler:
    """Adds up, by stack, phase and thread, the time between samples, each step for itself.

    Of a sample that came late, but before Python's switch interval was over, the time belongs to the stack of the
    sample before: the thread held Python's lock until now, and let it go for the call in which it is seen. For as long
    as one that came later was kept from the lock, the thread did not wait for the GPU: whoever waits lets the lock go,
    and ``torch.tensor`` on a GPU reads Python's numbers before it does.

    Args:
        phase: what phase of the step runs now.
        outermost: what a thread must be in to be at work; a worker that waits for its next batch is not.
    """

    def __init__(self, phase: Callable[[], str | None], outermost: Sequence[CodeType] = ()) -> None:
        self.times: dict[Key, list[int]] = {}
        """Nanoseconds of each step, in order."""
        self.samples: defaultdict[Key, int] = defaultdict(int)
        self.unlocked_at: defaultdict[tuple[Key, Spot], int] = defaultdict(int)
        """Nanoseconds of all steps by where the thread stood and may have waited: no one call held Python's lock."""
        self.inside: defaultdict[tuple[Key, int], int] = defaultdict(int)
        """Nanoseconds by the code in which the thread stood: the line's own, or a library's."""
        self._phase = phase
        self._outermost = outermost
        self._watched: dict[int, Thread] = {}
        self._last: dict[int, tuple[Key, Spot]] = {}
        self._step: dict[Key, int] = {}
        self._step_at: dict[tuple[Key, Spot], int] = {}
        self._steps = 0
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._interval = 0.0

    def watch(self, thread: int, kind: Thread) -> None:
        self._watched.setdefault(thread, kind)

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="profkit-lines", daemon=True)
        thread.start()
        self._thread = thread
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._interval, _SWITCH_INTERVAL_S))

    def step_ended(self) -> None:
        with self._lock:
            step, self._step = self._step, {}
            step_at, self._step_at = self._step_at, {}
        for at, time_ns in step_at.items():
            self.unlocked_at[at] += time_ns
        for key, time_ns in step.items():
            times = self.times.setdefault(key, [])
            times += [0] * (self._steps - len(times))
            times.append(time_ns)
        self._steps += 1

    def leave_out(self, steps: int) -> None:
        """Forget the times of the first steps."""
        kept = {key: times[steps:] for key, times in self.times.items()}
        self.times = {key: times for key, times in kept.items() if any(times)}

    def copy_counts(self, counts: tuple[dict[Any, int], ...]) -> tuple[dict[Any, int], ...]:
        """Return copies while no sample is added."""
        with self._lock:
            return tuple(map(dict, counts))

    def stop(self) -> None:
        """End; what was seen since the last step's end is dropped."""
        if self._thread is None:
            return
        self._ends.set()
        self._thread.join()
        self.forget()

    def forget(self) -> None:
        """Set the switch interval back, unless the script has set one; a forked copy has no thread to end."""
        if self._thread is not None and sys.getswitchinterval() == min(self._interval, _SWITCH_INTERVAL_S):
            sys.setswitchinterval(self._interval)
        self._thread = None
        self._step, self._step_at = {}, {}

    def _run(self) -> None:
        before_ns = perf_counter_ns()
        while not self._ends.is_set():
            sleeps_ns = perf_counter_ns()
            sleep(PERIOD_NS / 1e9)
            now_ns = perf_counter_ns()
            self._look(now_ns - before_ns, now_ns - sleeps_ns - PERIOD_NS)
            before_ns = now_ns

    def _look(self, time_ns: int, late_ns: int = 0) -> None:
        phase = self._phase()
        with self._lock, _no_collection():
            self._add(sys._current_frames(), phase, time_ns, late_ns)

    def _add(self, frames: dict[int, FrameType], phase: str | None, time_ns: int, late_ns: int = 0) -> None:
        switch_ns = sys.getswitchinterval() * 1e9
        locked_ns = late_ns if late_ns > _LOCKED * switch_ns else 0
        for thread, kind in list(self._watched.items()):
            frame = frames.get(thread)
            working = _find(frame, self._outermost) if self._outermost else None
            if frame is None or (self._outermost and working is None) or is_profkits(frame):
                continue
            key: Key = find_stack(frame, working), None if kind == "backward" else phase, kind
            at = key, _spot_of(frame)
            before, self._last[thread] = self._last.get(thread, at), at
            if _PROMPT_NS < late_ns < switch_ns:
                key, _ = at = before
            self._step[key] = self._step.get(key, 0) + time_ns
            self._step_at[at] = self._step_at.get(at, 0) + time_ns - locked_ns
            self.inside[key, at[1][0]] += time_ns
            self.samples[key] += 1


_COLLECTS_ANYWHERE = sys.version_info < (3, 12)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Before 3.12 Python may look for garbage while it makes the object of another thread's frame. What it finds may
    let that thread go on and leave the frame, which Python then reads from memory that is no frame's any more, and
    crashes.
    """
    if not (_COLLECTS_ANYWHERE and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _find(frame: FrameType | None, codes: Sequence[CodeType]) -> CodeType | None:
    while frame is not None:
        for code in codes:
            if frame.f_code is code:
                return code
        frame = frame.f_back
    return None


_SYNCHRONIZES = "called a synchronizing CUDA operation"
_FILTER: tuple[Any, ...] = (
    "always",
    re.compile(f"{_SYNCHRONIZES}|Synchronization debug mode is a prototype"),
    Warning,
    None,
    0,
)
_WARN, _ERROR = 1, 2
_SHOWN = "warnings._showwarnmsg"
_MUTATED = ("warnings._filters_mutated", "warnings._filters_mutated_lock_held")  # Python 3.14 has the second


class Waits:
    """Counts calls that wait for the GPU by stack, and by the phase and thread that ``phase`` returns.

    torch names each in a warning, which is collected unprinted: ``.item()``, ``.cpu()``, ``nonzero`` and what else
    copies to pageable memory or asks for a value. It does not see ``torch.cuda.synchronize()``, copies from pageable
    memory with ``non_blocking``, or NCCL. Python's own state stays as it was: the filters keep their order and version,
    so that no registry of warnings shown once is cleared.
    """

    def __init__(self, phase: Callable[[], tuple[str | None, Thread]]) -> None:
        self.counts: Counter[Key] = Counter()
        self.spots: set[Spot] = set()
        """Where they are: a line that calls a library's model does much else besides."""
        self.inside: Counter[tuple[Key, int]] = Counter()
        """How many of them are in which code."""
        self.unknown: str | None = None
        """Why the calls are not known; None if they are."""
        self._phase = phase
        self._mode = 0
        self._passes_on = False
        self._lists: dict[int, list[Any]] = {}
        """The lists of filters that have the one that collects, by their ids."""

    def start(self) -> None:
        if not torch.cuda.is_initialized():
            self.unknown = "no GPU was used"
            return
        self._mode = torch.cuda.get_sync_debug_mode()
        if self._mode == _ERROR:
            self.unknown = "the script has torch.cuda.set_sync_debug_mode('error')"
            return
        self._passes_on = self._mode == _WARN
        self._collect()
        torch.cuda.set_sync_debug_mode(_WARN)

    def stop(self) -> None:
        """End; filters, functions and torch's mode are again as they were."""
        if not self._lists:
            return
        try:
            # A script that has set another mode meanwhile keeps it.
            if torch.cuda.get_sync_debug_mode() == _WARN:
                torch.cuda.set_sync_debug_mode(self._mode)
        finally:
            self.forget()

    def forget(self) -> None:
        """Leave Python's state as it was, and torch's mode alone: a forked copy cannot use CUDA."""
        restore(_SHOWN, *_MUTATED)
        _leave_out(*self._lists.values())
        self._lists.clear()

    def note(self, frame: FrameType) -> None:
        key, spot = (find_stack(frame), *self._phase()), _spot_of(frame)
        self.counts[key] += 1
        self.inside[key, spot[0]] += 1
        self.spots.add(spot)

    def _collect(self) -> None:
        _put_first(self._lists)
        for target in _MUTATED:
            patch(target, lambda original: _keeps_first(original, self._lists))
        patch(_SHOWN, self._takes)

    def _takes(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def take(message: Any) -> None:
            if not _FILTER[1].match(str(message.message)):
                original(message)
                return
            if str(message.message).startswith(_SYNCHRONIZES):
                self.note(sys._getframe(1))
                if self._passes_on:
                    original(message)

        return take


def _keeps_first(mutated: Callable[[], None], lists: dict[int, list[Any]]) -> Callable[[], None]:
    """Return what is called wherever filters change: at both ends of ``catch_warnings`` too, where the list is another.

    Without it a script's wait would raise after ``simplefilter("error")``, or after the end of a ``catch_warnings``
    that was open when the collecting began.
    """

    def filters_mutated() -> None:
        mutated()
        _put_first(lists)

    return filters_mutated


def _put_first(lists: dict[int, list[Any]]) -> None:
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    _leave_out(filters)
    filters.insert(0, _FILTER)
    lists[id(filters)] = filters


def _leave_out(*lists: Any) -> None:
    for filters in lists:
        while _FILTER in filters:
            filters.remove(_FILTER)
