"""The variables of running functions, read so that nothing stays alive for it.

``frame.f_locals`` would do before Python 3.13 what this is for: it makes a copy of a function's variables that lives as
long as the function runs, with every tensor in it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any


def variables_at_hand() -> Iterator[Any]:
    """Yield the values of the variables of the functions that run on this thread, the caller's first.

    Before Python 3.12 only those of modules.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield from _values(frame)
        frame = frame.f_back


def variable_of(frame: FrameType, name: str) -> Any:
    """Return the value of a function's variable now, None if it has none.

    Before Python 3.12 what its variables hold lives until the function returns, once this was asked.
    """
    if _get_variable is None:
        return frame.f_locals.get(name)
    try:
        return _get_variable(frame, name)
    except NameError:
        return None


def _values(frame: FrameType) -> list[Any]:
    code = frame.f_code
    if not code.co_flags & CO_OPTIMIZED:  # a module's or a class's: no copy is made
        return list(frame.f_locals.values())
    if _get_variable is None:
        return []
    found = []
    for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        try:
            found.append(_get_variable(frame, name))
        except NameError:  # it has no value now
            continue
    return found


def _find_get_variable() -> Callable[[FrameType, str], Any] | None:
    function = getattr(ctypes.pythonapi, "PyFrame_GetVar", None)
    if function is not None:
        function.argtypes = [ctypes.py_object, ctypes.py_object]
        function.restype = ctypes.py_object
    return function


_get_variable = _find_get_variable()
