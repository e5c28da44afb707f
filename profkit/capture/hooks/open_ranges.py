"""Which ranges profkit has open on each thread: one stack, so that they nest and close whatever the workload does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from time import time_ns
from typing import Any, Final

from torch.autograd import profiler

from profkit.annotation import Range, RangeObserver, observers_but
from profkit.capture.hooks import Call, RangeHooks, change_between
from profkit.capture.hooks.backward_nodes import Carrier
from profkit.capture.hooks.range_log import BACKWARD_OF_CALLS, LiveLog
from profkit.names import BACKWARD, PHASES, RECOMPUTE

# Who opened it, its name, what closes its range (both None where there is none), and the call with the forward or
# backward that it is. A plain tuple, because one is made for each call of a module.
_Entry = tuple[object, str | None, Any, Call | None]
_KEY: Final = 0
_NAME: Final = 1
_CALL: Final = 3

_BACKWARD_OF_CALL = object()
"""The key of the one entry that stands for the backward ranges of a call and of all calls around it.

The log notes the call alone, and which ranges close and open there is worked out once the recording has ended.
"""
_SCRIPTS = object()
_LOGGED = object()
"""What closes a range that the log alone has."""

_PURPOSES = frozenset({*PHASES, RECOMPUTE, "data", "inference"})

RunsFor = Callable[[str | None, str | None], None]
"""Is called with a phase and a module's dotted name, None for what does not apply."""


class OpenRanges:
    """One thread's open ranges, innermost last, the script's own among them.

    What profkit opens above an entry is closed before it; the script opens and closes its own.

    Args:
        opener: the observer of ranges that is not shown those which are opened here.
        runs_for: is called whenever the phase or the module that the thread works for changes, on entering and on
            leaving. Nothing is worked out where it is None.
    """

    __slots__ = (
        "_backward",
        "_entries",
        "_interrupted",
        "_log",
        "_logged",
        "_purpose",
        "_runs_for",
        "_shown_to",
        "call",
        "carrier",
        "graph_task",
        "root",
        "scripts",
    )

    def __init__(self, opener: RangeObserver, runs_for: RunsFor | None = None, log: LiveLog | None = None) -> None:
        self._shown_to = observers_but(opener)
        self._log = log or LiveLog()
        self._logged: list[Any] = []
        """What this thread has logged."""
        self._runs_for = runs_for
        self._purpose: tuple[str | None, str | None] = None, None
        self._entries: list[_Entry] = []
        self._backward: list[Any] = []
        """What closes the backward ranges of calls, where not the log alone has them."""
        # By the key of what interrupted it, the call whose backward work goes on where that closes.
        self._interrupted: dict[object, Call | None] = {}
        self.call: Call | None = None
        """The call whose forward runs on this thread now, or None."""
        self.carrier = Carrier()
        """What `mark_nodes` needs on this thread."""
        self.graph_task = -1
        self.root: Call | None = None
        """The outermost call of a module that runs now."""
        self.scripts = 0
        """How many of the script's own ranges are open on this thread."""

    @staticmethod
    def prepare(names: Iterable[str]) -> None:
        """Make the ranges of these names, which takes longer than opening them."""
        for name in names:
            _ = _ranges[name]

    def begin_range(self, name: str, range_: Range | None = None) -> Any:
        """Open the range of this name on this thread: in the log while that is on, else for NVTX and torch.profiler.

        Return what `end_range` needs.
        """
        shown_to = self._shown_to
        if self._log.is_on:
            if shown_to:
                for observer in shown_to:
                    observer.opening(name)
            logged = self._logged
            if not logged:
                logged = self._logged = self._log.begin_thread()
            logged += (name, time_ns())
            return _LOGGED
        range_ = range_ or _ranges[name]
        if shown_to or profiler._is_profiler_enabled:
            return range_, range_.open(shown_to)
        range_.push(range_.attributes, range_.domain)
        return range_, None

    def end_range(self, token: Any) -> None:
        shown_to = self._shown_to
        if token is not _LOGGED:
            range_, record = token
            range_.close(record, shown_to)
            return
        if shown_to:
            for observer in shown_to:
                observer.closing()
        self._logged += (None, time_ns())
        if shown_to:
            for observer in shown_to:
                observer.closed()

    def _enter_in_log(self, what: object) -> Any:
        if not self._logged:
            self._logged = self._log.begin_thread()
        self._logged += (what, time_ns())
        return _LOGGED

    def open(self, key: object, name: str | None, call: Call | None = None) -> None:
        """Open the range ``name`` (None: only remember ``key``)."""
        token: Any = None
        if name is not None and self._logged and self._log.is_on and not self._shown_to:
            self._logged += (name, time_ns())  # as `begin_range` does, but without a further call for each of a module
            token = _LOGGED
        elif name is not None:
            token = self.begin_range(name)
        self._entries.append((key, name, token, call))
        if call is not None:
            self.call = call
        if self._runs_for is not None:
            self._changed()

    def note_opening(self, name: str | None, logged_as: str | None = None) -> None:
        """Note a range of the script's own that opens on this thread.

        Args:
            name: its name, None if that is of no interest here.
            logged_as: what the log calls it; None: the log leaves it out.
        """
        token = None
        if logged_as is not None and self._log.is_on:
            token = self._enter_in_log(logged_as)
        self._entries.append((_SCRIPTS, name, token, None))
        self.scripts += 1
        if self._runs_for is not None:
            self._changed()

    def note_closed(self) -> str | None:
        """Note that the script's innermost range has closed on this thread; return its name, None if it is unknown."""
        for index in range(len(self._entries) - 1, -1, -1):
            if self._entries[index][_KEY] is _SCRIPTS:
                _, name, token, call = self._entries.pop(index)
                if token is _LOGGED:
                    self._logged += (None, time_ns())
                self.scripts -= 1
                if call is not None:
                    self.call = self._innermost_call()
                if self._runs_for is not None:
                    self._changed()
                return name
        return None

    def is_in_scripts(self, key: object) -> bool:
        """Return whether an entry of ``key`` was opened within the script's innermost range."""
        for entry in reversed(self._entries):
            if entry[_KEY] is key or entry[_KEY] is _SCRIPTS:
                return entry[_KEY] is key
        return False

    def note_call(self, hooks: RangeHooks) -> Call | None:
        """Make the script's innermost range that of a call, and return the call."""
        if not self._entries or self._entries[-1][_KEY] is not _SCRIPTS:  # it opened before anybody took note
            return None
        _, name, token, _ = self._entries[-1]
        self.call = Call(name, self.call, hooks)
        self._entries[-1] = (_SCRIPTS, name, token, self.call)
        return self.call

    def has_range(self, name: str) -> bool:
        return any(entry[_NAME] == name for entry in self._entries)

    def close(self, key: object) -> bool:
        """Close the innermost entry of ``key`` and all above it; return False if there is none."""
        entries = self._entries
        if entries and entries[-1][_KEY] is key:
            _, _, token, call = entries.pop()
            if token is _LOGGED and not self._shown_to:
                self._logged += (None, time_ns())
            elif token is not None:
                self.end_range(token)
            if call is not None:
                self.call = call.around if key is call else self._innermost_call()
            if self._runs_for is not None:
                self._changed()
            return True
        for index in range(len(entries) - 1, -1, -1):
            if entries[index][_KEY] is key:
                self._close_down_to(index)
                return True
        return False

    def close_all(self) -> None:
        self._close_down_to(0)

    def has(self, key: object) -> bool:
        for entry in self._entries:  # noqa: SIM110  `any` makes a generator, in each step of a program
            if entry[_KEY] is key:
                return True
        return False

    def enter_backward_of(self, call: Call | None) -> None:
        """Open exactly the backward ranges of ``call`` and the calls around it, above everything else that is open.

        None or a `NoCall`: close those that are open there.
        """
        if call is not None and call.depth < 0:
            call = None
        entries, last, token = self._entries, None, None
        if entries and entries[-1][_KEY] is _BACKWARD_OF_CALL:
            _, _, token, last = entries[-1]
            if last is call:
                return
            entries.pop()
        elif call is not None and self._log.is_on and not self._shown_to:
            token = self._enter_in_log(BACKWARD_OF_CALLS)
        if token is _LOGGED:
            self._logged += (call, time_ns())
        else:
            self._change_backward(last, call)
        if call is None:
            self.call = self._innermost_call()
        else:
            entries.append((_BACKWARD_OF_CALL, None, token, call))
            self.call = None
        if self._runs_for is None:
            return
        if call is None:
            self._tell(BACKWARD, None)
        else:
            self._changed()

    def _change_backward(self, last: Call | None, call: Call | None) -> None:
        closing, opening = change_between(last, call)
        while closing:
            self.end_range(self._backward.pop())
            closing -= 1
        while opening:
            self._backward.append(self.begin_range(opening.pop()))

    @property
    def backward_call(self) -> Call | None:
        top = self._entries[-1] if self._entries else None
        return top[_CALL] if top is not None and top[_KEY] is _BACKWARD_OF_CALL else None

    def interrupt_backward(self, key: object, name: str | None, call: Call | None = None) -> None:
        """Open ``name`` as `open` does, but not within the backward ranges of a call: these close before."""
        self._interrupted[key] = self.backward_call
        self.leave_backward()
        self.open(key, name, call)

    def resume_backward(self, key: object) -> None:
        """Close ``key``, if it is open, and all above it, and open the backward ranges that were interrupted there."""
        interrupted = self._interrupted.pop(key, None)
        if self.close(key):
            self.enter_backward_of(interrupted)

    def leave_backward(self) -> None:
        """Close the backward ranges above everything else that is open here: the backward pass has ended."""
        base = len(self._entries)
        while base and self._entries[base - 1][_KEY] is _BACKWARD_OF_CALL:
            base -= 1
        self._close_down_to(base)
        self._changed()

    def _innermost_call(self) -> Call | None:
        for entry in reversed(self._entries):
            if entry[_KEY] is _BACKWARD_OF_CALL:
                return None
            if entry[_CALL] is not None:
                return entry[_CALL]
        return None

    def _close_down_to(self, index: int) -> None:
        above = self._entries[index:]
        self._entries[index:] = [entry for entry in above if entry[_KEY] is _SCRIPTS]
        for key, _, token, call in reversed(above):
            if key is _BACKWARD_OF_CALL and token is None:
                self._change_backward(call, None)
            elif token is not None and key is not _SCRIPTS:
                self.end_range(token)
        self.call = self._innermost_call()
        if above:
            self._changed()

    def _changed(self) -> None:
        if self._runs_for is None:
            return
        phase: str | None = None
        call: Call | None = None
        for key, name, _, opened in reversed(self._entries):
            call = call or opened
            if key is _BACKWARD_OF_CALL:
                phase = BACKWARD
                break
            if name in _PURPOSES:
                phase = name
                break
        while call is not None and call.owner is None:
            call = call.around
        self._tell(phase, None if call is None else call.owner)

    def _tell(self, phase: str | None, module: str | None) -> None:
        if self._runs_for is not None and (phase, module) != self._purpose:
            self._purpose = phase, module
            self._runs_for(phase, module)


class OpenOnThread(threading.local):
    """The open ranges of the thread that looks."""

    def __init__(self, opener: RangeObserver, runs_for: RunsFor | None, log: LiveLog | None = None) -> None:
        self.ranges = OpenRanges(opener, runs_for, log)


class _Ranges(dict[str, Range]):
    """Ranges by their names: looked up twice for each call of a module."""

    def __missing__(self, name: str) -> Range:
        self[name] = Range(name, None)
        return self[name]


_ranges = _Ranges()
