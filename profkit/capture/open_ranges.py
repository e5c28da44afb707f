"""Which ranges profkit has open on each thread: one stack, so that they nest and close whatever the workload does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from profkit.annotation import Range
from profkit.names import BACKWARD, PHASES, RECOMPUTE


class Call:
    """One call of a module or of a function that the script annotated.

    ``name`` is that of its range (None: it has none), ``owner`` the module's dotted name where one is called, and
    ``around`` the call around it.
    """

    __slots__ = ("around", "name", "owner")

    def __init__(self, name: str | None, around: Call | None, owner: str | None = None) -> None:
        self.name = name
        self.around = around
        self.owner = owner


@dataclass(slots=True, eq=False)
class _Entry:
    """An open range: ``key`` says who opened it; ``call`` is set where it belongs to a call's forward or backward.

    ``interrupted`` is the call whose backward work goes on where this entry closes.
    """

    key: object
    name: str | None
    range: Range | None = None
    call: Call | None = None
    interrupted: Call | None = None


_BACKWARD_OF_CALL = object()
_SCRIPTS = object()

_PURPOSES = frozenset({*PHASES, RECOMPUTE, "data", "inference"})

RunsFor = Callable[[str | None, str | None], None]
"""Is called with a phase and a module's dotted name, None for what does not apply."""


class OpenRanges(threading.local):
    """This thread's open ranges, innermost last, the script's own among them.

    What profkit opens above an entry is closed before it; the script opens and closes its own.

    Args:
        runs_for: is called on a thread whenever the phase or the module that the thread works for changes, on entering
            and on leaving. Nothing is worked out where it is None.
    """

    def __init__(self, runs_for: RunsFor | None = None) -> None:
        self._entries: list[_Entry] = []
        self._is_ours = False
        self._runs_for = runs_for
        self._purpose: tuple[str | None, str | None] = None, None
        self.graph_task = -1
        self.root: object = None
        """The module whose call is the outermost now."""

    def open(self, key: object, name: str | None, call: Call | None = None) -> None:
        """Open the range ``name`` (None: only remember ``key``)."""
        entry = _Entry(key, name, None if name is None else _range(name), call)
        if entry.range is not None:
            self._is_ours = True
            entry.range.__enter__()
            self._is_ours = False
        self._entries.append(entry)
        self._changed()

    def note_opening(self, name: str) -> bool:
        """Note a range that opens on this thread; return whether it is the script's own."""
        if not self._is_ours:
            self._entries.append(_Entry(_SCRIPTS, name))
            self._changed()
        return not self._is_ours

    def note_closed(self) -> str | None:
        """Note that a range has closed on this thread; return its name if it is the script's own."""
        if self._is_ours:
            return None
        for index in range(len(self._entries) - 1, -1, -1):
            if self._entries[index].key is _SCRIPTS:
                name = self._entries.pop(index).name
                self._changed()
                return name
        return None

    def note_call(self) -> Call | None:
        """Make the script's innermost range that of a call, and return the call."""
        around = self.innermost_call()
        if not self._entries or self._entries[-1].key is not _SCRIPTS:  # it opened before anybody took note
            return None
        entry = self._entries[-1]
        entry.call = Call(entry.name, around)
        return entry.call

    def has_range(self, name: str) -> bool:
        """Return whether a range of this name is open on this thread."""
        return any(entry.name == name for entry in self._entries)

    def close(self, key: object) -> bool:
        """Close the innermost entry of ``key`` and all above it; return False if there is none."""
        for index in range(len(self._entries) - 1, -1, -1):
            if self._entries[index].key is key:
                self._close_down_to(index)
                return True
        return False

    def close_all(self) -> None:
        """Close whatever is open on this thread."""
        self._close_down_to(0)

    def has(self, key: object) -> bool:
        """Return whether an entry of ``key`` is open."""
        return any(entry.key is key for entry in self._entries)

    def innermost_call(self) -> Call | None:
        """Return the call whose forward runs on this thread now, or None."""
        for entry in reversed(self._entries):
            if entry.key is _BACKWARD_OF_CALL:
                return None
            if entry.call is not None:
                return entry.call
        return None

    def enter_backward_of(self, call: Call | None) -> None:
        """Open exactly the backward ranges of ``call`` and the calls around it, above everything else that is open."""
        wanted: list[Call] = []
        while call is not None:
            wanted.append(call)
            call = call.around
        wanted.reverse()
        base = self._base()
        kept = 0
        for entry, one in zip(self._entries[base:], wanted, strict=False):
            if entry.call is not one:
                break
            kept += 1
        self._close_down_to(base + kept)
        for one in wanted[kept:]:
            self.open(_BACKWARD_OF_CALL, one.name, one)
        if self._runs_for is not None and not wanted:
            self._tell(BACKWARD, None)

    def interrupt_backward(self, key: object, name: str | None, call: Call | None = None) -> None:
        """Open ``name`` as `open` does, but not within the backward ranges of a call: these close before."""
        running = self._entries[-1].call if self._base() < len(self._entries) else None
        self.leave_backward()
        self.open(key, name, call)
        self._entries[-1].interrupted = running

    def resume_backward(self, key: object) -> None:
        """Close ``key`` and all above it, and open the backward ranges that were interrupted there."""
        entry = next((entry for entry in reversed(self._entries) if entry.key is key), None)
        if entry is not None:
            self.close(key)
            self.enter_backward_of(entry.interrupted)

    def leave_backward(self) -> None:
        """Close the backward ranges above everything else that is open here: the backward pass has ended."""
        self._close_down_to(self._base())
        self._changed()

    def _base(self) -> int:
        base = len(self._entries)
        while base and self._entries[base - 1].key is _BACKWARD_OF_CALL:
            base -= 1
        return base

    def _close_down_to(self, index: int) -> None:
        above = self._entries[index:]
        self._entries[index:] = [entry for entry in above if entry.key is _SCRIPTS]
        for entry in reversed(above):
            if entry.range is not None:
                self._is_ours = True
                entry.range.__exit__(None, None, None)
                self._is_ours = False
        if above:
            self._changed()

    def _changed(self) -> None:
        """Tell what this thread works for now: the innermost phase, and the innermost module in it."""
        if self._runs_for is None:
            return
        phase: str | None = None
        call: Call | None = None
        for entry in reversed(self._entries):
            call = call or entry.call
            if entry.key is _BACKWARD_OF_CALL:
                phase = BACKWARD
                break
            if entry.name in _PURPOSES:
                phase = entry.name
                break
        while call is not None and call.owner is None:
            call = call.around
        self._tell(phase, None if call is None else call.owner)

    def _tell(self, phase: str | None, module: str | None) -> None:
        if self._runs_for is not None and (phase, module) != self._purpose:
            self._purpose = phase, module
            self._runs_for(phase, module)


@cache
def _range(name: str) -> Range:
    return Range(name, None)
