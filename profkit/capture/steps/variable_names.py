"""What the script calls an object: the text of the expression by which a line of it calls the object or passes it on.

And where it writes an argument: the line to change.

The text comes from the source of the calling line. Where the variables of running functions are read, nothing stays
alive for it: ``frame.f_locals`` would, before Python 3.13, make a copy of a function's variables that lives as long as
the function runs, with every tensor in it.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_PROFKIT = str(Path(__file__).parents[2]) + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_CALLS = {"_wrapped_call_impl", "_call_impl", "__call__", "generate"}
"""The functions of torch through which a module is called."""
_FRAMES = 40
_MOST_NUMBERED = 8


class VariableNames:
    """Remembers the name of each object from the first time that it was asked for; it holds none alive."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()

    def known(self, thing: Any) -> str | None:
        return self._names.get(thing)

    def of_model(self, model: Any) -> str | None:
        """Return how the line that calls ``model`` or its ``generate`` right now names it; None if it does not."""
        if model not in self._names:
            self._names[model] = _name_of_called()
        return self._names[model]

    def of_optimizer(self, optimizer: Any) -> str | None:
        """Return how the script's line that makes ``optimizer``'s step right now names it; None if it does not."""
        if optimizer not in self._names:
            self._names[optimizer] = _name_of_stepping()
        return self._names[optimizer]


def tell_apart(thing: Any, things: Sequence[Any], variable: Callable[[Any], str | None]) -> str | None:
    """Return what tells ``thing`` from the others of ``things``: its class, its variable's name, or a number.

    None if there are no others. Many of one class have no numbers: as where every parameter has its optimizer.
    """
    others = [other for other in things if other is not thing]
    if not others:
        return None
    kind, name = type(thing), variable(thing)
    if not any(type(other) is kind for other in others) and not (name and kind.__module__.startswith("torch.nn.")):
        return kind.__name__
    if name is not None and not any(variable(other) == name for other in others):
        return name
    alike = [other for other in things if type(other) is kind]
    if len(alike) > _MOST_NUMBERED or not any(other is thing for other in alike):
        return kind.__name__
    return f"{kind.__name__} {next(at for at, other in enumerate(alike) if other is thing)}"


def frames_around() -> Iterator[FrameType]:
    """Yield the frames around the caller's, the innermost first, without profkit's."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return
        if not frame.f_code.co_filename.startswith(_PROFKIT):
            yield frame
        frame = frame.f_back


def _name_of_called() -> str | None:
    within = ""
    for frame in frames_around():
        if frame.f_code.co_filename.startswith(_TORCH):
            within = frame.f_code.co_name
            continue
        _, call = call_at(frame.f_code, frame.f_lasti)
        if call is None or (within and within not in _CALLS):
            return None
        called = call.func
        if isinstance(called, ast.Attribute) and called.attr == "generate":
            called = called.value
        return _name_passed(frame, called) or _last_name(called)
    return None


def _name_passed(frame: FrameType, expression: ast.expr) -> str | None:
    """Return the variable that a function's callers pass for the parameter of this name; None if it is none."""
    name = None
    while isinstance(expression, ast.Name):
        code, caller = frame.f_code, frame.f_back
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if caller is None or expression.id not in parameters:
            break
        _, call = call_at(caller.f_code, caller.f_lasti)
        is_it = call is not None and _last_name(call.func) == code.co_name
        if call is None or not is_it or any(isinstance(one, ast.Starred) for one in call.args):
            break
        at = parameters.index(expression.id) - (isinstance(call.func, ast.Attribute) and parameters[0] == "self")
        named = [keyword.value for keyword in call.keywords if keyword.arg == expression.id]
        given = named or call.args[at : at + 1]
        if not given or _last_name(given[0]) is None:
            break
        frame, expression, name = caller, given[0], _last_name(given[0])
    return name


def _name_of_stepping() -> str | None:
    for frame in frames_around():
        file = frame.f_code.co_filename
        if is_installed(file):
            continue
        _, call = call_at(frame.f_code, frame.f_lasti)
        if call is None or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
            return None
        passed = _last_name(call.args[0]) if call.args else None  # as to GradScaler.step
        is_closure = passed is not None and "closure" in passed
        return passed if passed is not None and not is_closure else _last_name(call.func.value)
    return None


def call_at(code: CodeType, instruction: int) -> tuple[int, ast.Call | None]:
    """Return the line of an instruction, and the call that it makes; None if it makes none or the source is unknown."""
    positions, index = list(code.co_positions()), instruction // 2
    line, last, column, end = positions[index] if 0 <= index < len(positions) else (None, None, None, None)
    if line is None or last is None or column is None or end is None:
        return line or code.co_firstlineno, None
    rows = [linecache.getline(code.co_filename, number).encode() for number in range(line, last + 1)]
    rows[-1] = rows[-1][:end]
    rows[0] = rows[0][column:]
    try:
        expression = ast.parse(b"(" + b"".join(rows) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return line, None
    return line, expression if isinstance(expression, ast.Call) else None


def is_installed(file: str) -> bool:
    """Return whether a file is torch's or an installed package's."""
    return file.startswith(_TORCH) or any(part in file for part in _PACKAGES)


def file_or_cell(file: str) -> str:
    """Return the file; of a notebook's cell, whose file nobody knows, what stands beside the cell: ``In[3]``."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_code = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = None if name_code is None else name_code(file)
    return file if cell is None else str(cell[1])


@functools.lru_cache
def find_arguments(
    file: str, given: tuple[tuple[str, Any], ...], *, at: int = 0, of: str = ""
) -> tuple[tuple[int, str], ...]:
    """Return the line in which a file gives each of some arguments its value, and the function around that.

    That is the argument's own line in the call that spans the line ``at``, or in that of a class whose name ends with
    ``of``, else the call's; where a variable stands for it, the last line before that assigns the value to it, in the
    same function or outside of all. Empty where no such call has any of the arguments, or several have. A program may
    make a loader in every step: each place is looked up once.
    """
    tree = _parse(file)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if at:
        calls = [call for call in calls if call.lineno <= at <= (call.end_lineno or call.lineno)]
        calls = [call for call in calls if {keyword.arg for keyword in call.keywords}.intersection(dict(given))]
    else:
        calls = [call for call in calls if (_last_name(call.func) or "").endswith(of)]
    if len(calls) != 1:
        return ()
    values = {keyword.arg: keyword.value for keyword in calls[0].keywords}
    lines = [_find_assigned(tree, values[name], value) if name in values else calls[0].lineno for name, value in given]
    return tuple((line, ".".join(_functions_around(tree, line)) or "<module>") for line in lines)


def _find_assigned(tree: ast.Module, written: ast.expr, value: Any) -> int:
    around = _functions_around(tree, written.lineno)
    assigned = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(written, ast.Name)
        and [getattr(target, "id", None) for target in node.targets] == [written.id]
        and isinstance(node.value, ast.Constant)
        and node.value.value == value
        and node.lineno < written.lineno
        and _functions_around(tree, node.lineno) in (around, [])
    ]
    return max(assigned, default=written.lineno)


def _functions_around(tree: ast.Module, line: int) -> list[str]:
    """Return the names of the classes and functions around a line, the outermost first."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    around = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    around = [node for node in around if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return [node.name for node in sorted(around, key=lambda node: node.lineno)]


@functools.lru_cache(maxsize=8)
def _parse(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):  # a notebook's magic commands
        return ast.Module([], [])


def _last_name(expression: ast.expr) -> str | None:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else None


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
    values = []
    for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        with suppress(NameError):  # it has no value now
            values.append(_get_variable(frame, name))
    return values


_get_variable: Callable[[FrameType, str], Any] | None = None
if hasattr(ctypes.pythonapi, "PyFrame_GetVar"):
    _get_variable = ctypes.pythonapi.PyFrame_GetVar
    _get_variable.argtypes, _get_variable.restype = [ctypes.py_object, ctypes.py_object], ctypes.py_object
