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
from torch.autograd.profiler import record_function

from profkit.annotation import own_kind
from profkit.capture.patches import Function, call_between, patch


class RangeListener(Protocol):
    """Sees the script's ranges on the thread on which they open and close."""

    def script_opening(self, name: Callable[[], str]) -> None:
        """A range of the script's, called what ``name`` returns, is about to open."""

    def closing(self) -> None:
        """The script's innermost range is about to close."""

    def script_closed(self) -> None:
        """It has closed."""


def watch_script_ranges(listener: RangeListener) -> None:
    """Begin to watch; the ranges that profkit itself opens keep the methods of now."""
    for kind in (nvtx.annotate, record_function):
        own_kind(kind)
    closes = call_between(listener.closing, listener.script_closed)
    patch("nvtx.annotate.__enter__", partial(_opens, listener, _name_of_marker))
    patch("nvtx.annotate.__exit__", closes)
    patch("nvtx.annotate.__call__", partial(_decorates, listener))
    patch("nvtx.push_range", partial(_opens, listener, _name_given))
    patch("nvtx.pop_range", closes)
    patch("torch.cuda.nvtx.range_push", partial(_opens, listener, _name_given))
    patch("torch.cuda.nvtx.range_pop", closes)
    opens_record = partial(_opens, listener, _name_of_record)
    patch("torch.autograd.profiler.record_function.__enter__", partial(_unless_torchs, opens_record))
    patch("torch.autograd.profiler.record_function.__exit__", partial(_unless_torchs, closes))


def _opens(listener: RangeListener, name: Callable[..., str], plain: Function) -> Function:
    def watched(*args: Any, **kwargs: Any) -> Any:
        listener.script_opening(partial(name, *args, **kwargs))
        return plain(*args, **kwargs)

    return watched


def _name_given(message: object = "", *_more: Any, msg: object = None, **_named: Any) -> str:
    """The name among the arguments of NVTX's ``push_range`` (``message``) or torch's ``range_push`` (``msg``)."""
    return str(message if msg is None else msg)


def _name_of_marker(marker: Any, *_more: Any) -> str:
    message = getattr(getattr(marker, "attributes", None), "message", "")
    return str(getattr(message, "string", message))


def _name_of_record(record: Any, *_more: Any) -> str:
    return str(record.name)


_TORCHS = ("Optimizer.step#", "Optimizer.zero_grad#", "DistributedDataParallel.forward", "enumerate(DataLoader)#")
"""How the names of ranges begin that torch itself opens in each step. The hooks need not see them: no step begins in
them, or the hooks learn of it in another way."""


def _unless_torchs(wrap: Callable[[Function], Function], plain: Function) -> Function:
    watched = wrap(plain)

    def called(record: Any, *args: Any, **kwargs: Any) -> Any:
        return (plain if str(record.name).startswith(_TORCHS) else watched)(record, *args, **kwargs)

    return called


def _decorates(listener: RangeListener, decorate: Function) -> Function:
    def decorated(marker: Any, function: Any) -> Any:
        annotated = decorate(marker, function)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            listener.script_opening(partial(_name_of_marker, marker))
            try:
                return annotated(*args, **kwargs)
            finally:
                listener.closing()
                listener.script_closed()

        return watched

    return decorated
