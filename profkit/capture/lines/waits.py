"""The lines that wait for the GPU: torch names each synchronizing call in a warning, which is collected unprinted.

torch sees ``.item()``, ``.cpu()``, ``nonzero`` and what else copies to pageable memory or asks for a value; it does
not see ``torch.cuda.synchronize()``, copies from pageable memory with ``non_blocking``, or NCCL. Python's own state
stays as it was: the filters keep their order and version, so that no registry of warnings shown once is cleared.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from profkit.capture.lines.own_code import Place, find_place
from profkit.run.lines import Thread

_SYNCHRONIZES = "called a synchronizing CUDA operation"
_FILTER: tuple[Any, ...] = (
    "always",
    re.compile(f"{_SYNCHRONIZES}|Synchronization debug mode is a prototype"),
    Warning,
    None,
    0,
)
_WARN, _ERROR = 1, 2


class Waits:
    """Counts synchronizing calls by place, and by the phase and thread that ``phase`` returns."""

    def __init__(self, phase: Callable[[], tuple[str | None, Thread]]) -> None:
        self.counts: Counter[tuple[Place | None, str | None, Thread]] = Counter()
        self.unknown: str | None = None
        """Why the calls are not known; None if they are."""
        self._phase = phase
        self._mode = 0
        self._passes_on = False
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to collect; on a machine without CUDA there is nothing that waits."""
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
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
        if not self._restore:
            return
        try:
            # A script that has set another mode meanwhile keeps it.
            if torch.cuda.get_sync_debug_mode() == _WARN:
                torch.cuda.set_sync_debug_mode(self._mode)
        finally:
            self.forget()

    def forget(self) -> None:
        """Leave Python's state as it was, and torch's mode alone: a forked copy cannot use CUDA."""
        while self._restore:
            self._restore.pop()()

    def _collect(self) -> None:
        """Put a filter before all others, keep it there, and take what it lets through."""
        lists: dict[int, list[Any]] = {}
        _put_first(lists)
        self._restore.append(lambda: _leave_out(*lists.values()))
        for name in ("_filters_mutated", "_filters_mutated_lock_held"):  # Python 3.14 has the second
            self._wrap(name, lambda original: _keeps_first(original, lists))
        self._wrap("_showwarnmsg", self._takes)

    def _wrap(self, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(warnings, name, None)
        if original is None:
            return
        replaced = wrapped(original)
        setattr(warnings, name, replaced)

        def restore() -> None:
            if getattr(warnings, name) is replaced:
                setattr(warnings, name, original)

        self._restore.append(restore)

    def _takes(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def take(message: Any) -> None:
            if not _FILTER[1].match(str(message.message)):
                original(message)
                return
            if str(message.message).startswith(_SYNCHRONIZES):
                self.counts[find_place(sys._getframe(1)), *self._phase()] += 1
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
    """Put the filter before all others of the list in force, which joins ``lists``."""
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    _leave_out(filters)
    filters.insert(0, _FILTER)
    lists[id(filters)] = filters


def _leave_out(*lists: Any) -> None:
    for filters in lists:
        while _FILTER in filters:
            filters.remove(_FILTER)
