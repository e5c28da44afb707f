"""Where a script opens and closes ranges that are not ``annotate``'s: those of NVTX and of ``record_function``.

A thread's ranges close in the opposite order of their opening, whoever opened them: what profkit opens in between
would otherwise close in the place of the script's. NVTX keeps such a stack for each thread and domain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import nvtx
import torch
from torch.autograd.profiler import record_function

from profkit.annotation import own_kind


class RangeListener(Protocol):
    """Sees the script's ranges on the thread on which they open and close."""

    def script_opening(self) -> None:
        """A range of the script's is about to open."""

    def closing(self) -> None:
        """The script's innermost range is about to close."""

    def script_closed(self) -> None:
        """It has closed."""


def watch_script_ranges(listener: RangeListener) -> None:
    """Begin to watch; what NVTX or torch does not have under these names is not watched."""
    for kind in (nvtx.annotate, record_function):
        own_kind(kind)  # profkit's own ranges keep the methods of now
    for owner, opens, closes in (
        (nvtx.annotate, "__enter__", "__exit__"),
        (nvtx, "push_range", "pop_range"),
        (torch.cuda.nvtx, "range_push", "range_pop"),
        (record_function, "__enter__", "__exit__"),
    ):
        around = _around if owner is not record_function else _around_scripts_own
        _replace(owner, opens, partial(around, before=listener.script_opening, after=_nothing))
        _replace(owner, closes, partial(around, before=listener.closing, after=listener.script_closed))
    _replace(nvtx.annotate, "__call__", lambda method: _decorating(method, listener))


def _replace(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
    method = getattr(owner, name, None)
    if method is None:
        return
    try:
        setattr(owner, name, made(method))
    except TypeError:  # a class that is written in C
        return


def _around(method: Any, before: Callable[[], None], after: Callable[[], None]) -> Any:
    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return method(*args, **kwargs)
        finally:
            after()

    return watched


_TORCHS = ("Optimizer.step#", "Optimizer.zero_grad#", "DistributedDataParallel.forward", "enumerate(DataLoader)#")
"""How the names of ranges begin that torch itself opens in each step. The hooks need not see them: no step begins in
them, or the hooks learn of it in another way."""


def _around_scripts_own(method: Any, before: Callable[[], None], after: Callable[[], None]) -> Any:
    watched = _around(method, before, after)

    @functools.wraps(method)
    def called(one: Any, *args: Any, **kwargs: Any) -> Any:
        return (method if str(one.name).startswith(_TORCHS) else watched)(one, *args, **kwargs)

    return called


def _decorating(decorate: Any, listener: RangeListener) -> Any:
    @functools.wraps(decorate)
    def decorated(marker: Any, function: Any) -> Any:
        annotated = decorate(marker, function)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            listener.script_opening()
            try:
                return annotated(*args, **kwargs)
            finally:
                listener.closing()
                listener.script_closed()

        return watched

    return decorated


def _nothing() -> None:
    """After a range has opened nothing is to be done."""
