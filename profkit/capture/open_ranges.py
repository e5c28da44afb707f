"""Which ranges profkit has open on each thread: one stack, so that they nest and close whatever the workload does."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

from profkit.annotation import Range


class Call:
    """One call of a module, the name of its range (None: it has none), and the module call around it."""

    __slots__ = ("around", "name")

    def __init__(self, name: str | None, around: Call | None) -> None:
        self.name = name
        self.around = around


@dataclass(slots=True, eq=False)
class _Entry:
    """An open range: ``key`` says whose; ``call`` is set where it belongs to a module's forward or backward."""

    key: object
    range: Range | None
    call: Call | None = None


_BACKWARD_OF_CALL = object()


class OpenRanges(threading.local):
    """This thread's open ranges, innermost last. Whatever is opened above an entry is closed before it."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.graph_task = -1

    def open(self, key: object, name: str | None, call: Call | None = None) -> None:
        """Open the range ``name`` (None: only remember ``key``)."""
        entry = _Entry(key, None if name is None else _range(name), call)
        if entry.range is not None:
            entry.range.__enter__()
        self._entries.append(entry)

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
        """Return the module call whose forward runs on this thread now, or None."""
        for entry in reversed(self._entries):
            if entry.key is _BACKWARD_OF_CALL:
                return None
            if entry.call is not None:
                return entry.call
        return None

    def enter_backward_of(self, call: Call | None) -> None:
        """Have exactly the backward ranges of ``call`` and the calls around it open above what else is open here."""
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

    def leave_backward(self) -> None:
        """Close the backward ranges above what else is open here: a graph has been run through."""
        self._close_down_to(self._base())

    def _base(self) -> int:
        base = len(self._entries)
        while base and self._entries[base - 1].key is _BACKWARD_OF_CALL:
            base -= 1
        return base

    def _close_down_to(self, index: int) -> None:
        while len(self._entries) > index:
            entry: Any = self._entries.pop()
            if entry.range is not None:
                entry.range.__exit__(None, None, None)


@cache
def _range(name: str) -> Range:
    return Range(name, None)
