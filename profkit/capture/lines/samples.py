"""Where Python spends its time: a thread looks every millisecond which line the watched threads are in.

pyinstrument and py-spy know neither profkit's phases nor its steps, and sum whole call trees; py-spy would need the
right to read another process's memory.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns, sleep
from types import CodeType, FrameType

from profkit.capture.lines.own_code import Place, find_place, is_profkits
from profkit.run.lines import Thread

PERIOD_NS = 1_000_000

_SWITCH_INTERVAL_S = 0.0005
"""How long a thread of Python's may run on while the sampler waits; by default ten times as long as it should."""

_PROMPT_NS = 100_000
"""A sampler that waited for nothing looks at most this late: the system's timer is no better."""

Key = tuple[Place | None, str | None, Thread]


class StackSampler:
    """Adds up, by place, phase and thread, the time between samples, each step for itself.

    Of a sample that came late, but before Python's switch interval was over, the time belongs to the place of the
    sample before: the thread held Python's lock until now, and let it go for the call in which it is seen.

    Args:
        phase: what phase of the step runs now.
        outermost: what a thread must be in to be at work; a worker that waits for its next batch is not.
    """

    def __init__(self, phase: Callable[[], str | None], outermost: Sequence[CodeType] = ()) -> None:
        self.times: dict[Key, list[int]] = {}
        """Nanoseconds of each step, in order."""
        self.samples: defaultdict[Key, int] = defaultdict(int)
        self._phase = phase
        self._outermost = outermost
        self._watched: dict[int, Thread] = {}
        self._last: dict[int, Key] = {}
        self._step: dict[Key, int] = {}
        self._steps = 0
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._interval = 0.0

    def watch(self, thread: int, kind: Thread) -> None:
        """Look at a thread from now on; one that is watched already keeps its kind."""
        self._watched.setdefault(thread, kind)

    def start(self) -> None:
        """Begin to look."""
        thread = threading.Thread(target=self._run, name="profkit-lines", daemon=True)
        thread.start()
        self._thread = thread
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._interval, _SWITCH_INTERVAL_S))

    def step_ended(self) -> None:
        """Begin the next step."""
        with self._lock:
            step, self._step = self._step, {}
        for key, time_ns in step.items():
            times = self.times.setdefault(key, [])
            times += [0] * (self._steps - len(times))
            times.append(time_ns)
        self._steps += 1

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
        self._step = {}

    def _run(self) -> None:
        before_ns = perf_counter_ns()
        while not self._ends.is_set():
            sleeps_ns = perf_counter_ns()
            sleep(PERIOD_NS / 1e9)
            now_ns = perf_counter_ns()
            late_ns = now_ns - sleeps_ns - PERIOD_NS
            self._look(now_ns - before_ns, is_late=_PROMPT_NS < late_ns < sys.getswitchinterval() * 1e9)
            before_ns = now_ns

    def _look(self, time_ns: int, *, is_late: bool = False) -> None:
        phase = self._phase()
        with self._lock, _no_collection():
            self._add(sys._current_frames(), phase, time_ns, is_late=is_late)

    def _add(self, frames: dict[int, FrameType], phase: str | None, time_ns: int, *, is_late: bool = False) -> None:
        for thread, kind in list(self._watched.items()):
            frame = frames.get(thread)
            working = _find(frame, self._outermost) if self._outermost else None
            if frame is None or (self._outermost and working is None) or is_profkits(frame):
                continue
            key: Key = find_place(frame, working), None if kind == "backward" else phase, kind
            before, self._last[thread] = self._last.get(thread, key), key
            if is_late:
                key = before
            self._step[key] = self._step.get(key, 0) + time_ns
            self.samples[key] += 1


_COLLECTS_ANYWHERE = sys.version_info < (3, 12)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from looking for garbage in the block.

    Before 3.12 it may do so while it makes the object of another thread's frame. What it finds may let that thread go
    on and leave the frame, which Python then reads from memory that is no frame's any more, and crashes.
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
    """Return which of these functions is on a stack, the innermost one."""
    while frame is not None:
        for code in codes:
            if frame.f_code is code:
                return code
        frame = frame.f_back
    return None
