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
    """Counts synchronizing calls by place and phase, from `start` to `stop`."""

    def __init__(self, phase: Callable[[], str | None]) -> None:
        self.counts: Counter[tuple[Place | None, str | None]] = Counter()
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
        # A script that has set another mode meanwhile keeps it.
        if torch.cuda.get_sync_debug_mode() == _WARN:
            torch.cuda.set_sync_debug_mode(self._mode)
        while self._restore:
            self._restore.pop()()

    def _collect(self) -> None:
        """Put a filter before all others, keep it there, and take what it lets through."""
        module: Any = warnings
        filters = module.filters
        filters.insert(0, _FILTER)
        self._restore.append(lambda: _leave_out(filters, module.filters))
        for name in ("_add_filter", "resetwarnings"):
            self._wrap(name, self._keeps_first)
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

    @staticmethod
    def _keeps_first(original: Callable[..., Any]) -> Callable[..., Any]:
        """With ``catch_warnings`` and ``simplefilter("error")`` a script's wait would raise."""

        def changed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            _leave_out(warnings.filters)
            warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]
            return result

        return changed

    def _takes(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def take(message: Any) -> None:
            if not _FILTER[1].match(str(message.message)):
                original(message)
                return
            if str(message.message).startswith(_SYNCHRONIZES):
                self.counts[find_place(sys._getframe(1)), self._phase()] += 1
                if self._passes_on:
                    original(message)

        return take


def _leave_out(*lists: Any) -> None:
    for filters in lists:
        while _FILTER in filters:
            filters.remove(_FILTER)
