"""Which line of the user's own code a thread is in, and what that line calls."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import profkit.capture
import profkit.models
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.steps.times import wait_for_device
from profkit.run.lines import Line

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_NOTEBOOKS = ("<ipython-input-", "<stdin>")


class Place(NamedTuple):
    """An instruction of the user's own code, and the function of a library that it has called and that runs now.

    Code stands by its number in `_codes`: two functions may be equal, and hashing one by its content takes long.
    ``called`` is None where the line runs itself, or calls something that is not written in Python.
    """

    code: int
    instruction: int
    called: int | None


def is_profkits(frame: FrameType | None) -> bool:
    """Return whether a hook of profkit's works, or waits for the device at a step's end: no time of the program's."""
    while frame is not None and not is_own(frame.f_code):
        if id(frame.f_code) in _HOOKS:
            return True
        frame = frame.f_back
    return False


# All that ends steps and phases shares the code of the guard around it; none of it calls the program.
_HOOKS = {id(hook.__code__) for hook in (Hooks.optimizer_ends, Hooks.enter, Hooks.leave, wait_for_device)}


def find_place(frame: FrameType | None, outermost: CodeType | None = None) -> Place | None:
    """Return the innermost place of the user's own code on a stack; None if there is none.

    The user's own code is what lies in no installed package, is not generated and is not profkit's, but for the
    built-in models, which are the program where they run. With ``outermost``, only what that function has called
    counts.
    """
    called: CodeType | None = None
    while frame is not None and frame.f_code is not outermost:
        code = frame.f_code
        if is_own(code):
            return Place(_number(code), frame.f_lasti, None if called is None else _number(called))
        if not _is_profkits(code.co_filename):
            called = code
        frame = frame.f_back
    return None


def is_own(code: CodeType) -> bool:
    """Return whether this is the user's own code."""
    file = code.co_filename
    known = _is_own.get(file)
    if known is None:
        known = _is_own[file] = _is_own_file(file)
    return known


_is_own: dict[str, bool] = {}

_codes: dict[int, CodeType] = {}
"""Each code by its id, which stays its own as long as the code is kept here."""


def _number(code: CodeType) -> int:
    _codes[id(code)] = code
    return id(code)


def _is_own_file(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith(_NOTEBOOKS)
    path = Path(file).absolute()
    if _is_below(path, _PROFKIT):
        return not _is_profkits(file)
    if file == getattr(sys.modules.get("__main__"), "__file__", None):
        return True
    if any(part.startswith("torchinductor_") or part in ("site-packages", "dist-packages") for part in path.parts):
        return False
    generated = [Path(os.environ[name]).absolute() for name in _CACHES if os.environ.get(name)]
    return not any(_is_below(path, folder) for folder in (*_LIBRARIES, *generated))


@functools.cache
def _is_profkits(file: str) -> bool:
    path = Path(file).absolute()
    return _is_below(path, _PROFKIT) and not _is_below(path, _MODELS)


def _is_below(path: Path, folder: Path) -> bool:
    return folder in path.parents


_MODELS = Path(profkit.models.__path__[0])
_PROFKIT = Path(profkit.capture.__path__[0]).parent
_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def describe(place: Place) -> Line:
    """Return where a place stands in its source, and what it calls there."""
    code = _codes[place.code]
    line, called = _call_at(code, place.instruction)
    if called is None and place.called is not None:
        called = _codes[place.called].co_qualname
    function = "<module>" if code.co_name.startswith("<cell line") else code.co_qualname.replace(".<locals>", "")
    return Line(_file_or_cell(code.co_filename), line, function, called)


def _file_or_cell(file: str) -> str:
    """Return the file; of a notebook's cell, whose file nobody knows, what stands beside the cell: ``In[3]``."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_code = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = None if name_code is None else name_code(file)
    return file if cell is None else str(cell[1])


def _call_at(code: CodeType, instruction: int) -> tuple[int, str | None]:
    """Return the line of an instruction, and the source of the function that it calls if it is a call."""
    positions = list(code.co_positions())
    index = instruction // 2
    if not 0 <= index < len(positions):
        return code.co_firstlineno, None
    line, last, column, end = positions[index]
    if line is None or last is None or column is None or end is None:
        return line or code.co_firstlineno, None
    rows = [linecache.getline(code.co_filename, row).encode() for row in range(line, last + 1)]
    rows[-1] = rows[-1][:end]
    source = b"".join([rows[0][column:], *rows[1:]]).decode(errors="replace")
    try:
        expression = ast.parse(source.strip(), mode="eval").body
    except SyntaxError:
        return line, None
    return line, _shortened(ast.unparse(expression.func)) if isinstance(expression, ast.Call) else None


def _shortened(function: str) -> str:
    """Return the end of a function's name: ``x.sum().item`` is ``….item``."""
    name, dot, last = function.rpartition(".")
    return function if name.replace(".", "").isidentifier() or not dot else f"….{last}"
