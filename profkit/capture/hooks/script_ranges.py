"""Where a script opens and closes ranges that are not ``annotate``'s: those of NVTX and of ``record_function``.

A thread's ranges close in the opposite order of their opening, whoever opened them: what profkit opens in between
would otherwise close in the place of the script's. NVTX keeps such a stack for each thread and domain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import nvtx
from torch.autograd.profiler import record_function

from profkit.annotation import own_kind
from profkit.capture.patches import Function, call_between, patch

Opening = Callable[[Callable[[], str]], None]
"""Is called before a range of the script's opens, with what returns its name."""


def watch_script_ranges(opening: Opening, closing: Callable[[], None], closed: Callable[[], None]) -> None:
    """Call these around each range of the script's, on the thread on which it opens and closes.

    The ranges that profkit itself opens keep the methods of now.
    """
    for kind in (nvtx.annotate, record_function):
        own_kind(kind)
    closes = call_between(closing, closed)
    patch("nvtx.annotate.__enter__", partial(_opens, opening, _name_of_marker))
    patch("nvtx.annotate.__exit__", closes)
    patch("nvtx.annotate.__call__", partial(_decorates, opening, closing, closed))
    patch("nvtx.push_range", partial(_opens, opening, _name_given))
    patch("nvtx.pop_range", closes)
    patch("torch.cuda.nvtx.range_push", partial(_opens, opening, _name_given))
    patch("torch.cuda.nvtx.range_pop", closes)
    opens_record = partial(_opens, opening, _name_of_record)
    patch("torch.autograd.profiler.record_function.__enter__", partial(_unless_torchs, opens_record))
    patch("torch.autograd.profiler.record_function.__exit__", partial(_unless_torchs, closes))


def _opens(opening: Opening, name: Callable[..., str], plain: Function) -> Function:
    def watched(*args: Any, **kwargs: Any) -> Any:
        opening(partial(name, *args, **kwargs))
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
