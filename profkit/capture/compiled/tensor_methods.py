"""Launches that a generated file makes by a tensor's own methods, which no global name leads to.

A kernel that reduces in two directions leaves parts of its result in a workspace, and ``workspace_0[…].sum(dim=0)``
adds them up; ``buf0.copy_(…)`` copies to another device. The loaded functions that hold such a line get code in which
the method is called through a function, at the same line. The file is not touched.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from profkit.capture.compiled.launch_sites import is_copy, workspace_of
from profkit.capture.compiled.proxies import Around, Switch

_CALL = "_profkit_call_method"


def stand_in_for_methods(module: ModuleType, text: str, switch: Switch, around: Around) -> None:
    """Have ``around`` make these calls of a loaded file while ``switch.is_recording``."""
    tree = ast.parse(text)
    through = _Through()
    changed = ast.fix_missing_locations(through.visit(tree))
    functions = {function.__code__.co_firstlineno: function for function in _functions(module)}
    file = next((function.__code__.co_filename for function in functions.values()), None)
    if file is None or not through.lines:
        return
    vars(module)[_CALL] = _method(switch, around)
    for code in _codes(compile(changed, file, "exec", dont_inherit=True)):
        function = functions.get(code.co_firstlineno)
        if function is not None and function.__name__ == code.co_name and _CALL in code.co_names:
            function.__code__ = code


class _Through(ast.NodeTransformer):
    """Has methods that launch called through `_CALL`."""

    def __init__(self) -> None:
        self.lines: set[int] = set()

    def visit_Call(self, node: ast.Call) -> ast.expr:
        launches = bool(workspace_of(node)) or is_copy(node)
        self.generic_visit(node)
        if not launches or not isinstance(node.func, ast.Attribute):
            return node
        self.lines.add(node.lineno)
        arguments = [node.func.value, ast.Constant(node.func.attr), *node.args]
        return ast.copy_location(ast.Call(ast.Name(_CALL, ast.Load()), arguments, node.keywords), node)


def _method(switch: Switch, around: Around) -> Any:
    frame = sys._getframe

    def call(tensor: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if not switch.is_recording:
            return getattr(tensor, method)(*args, **kwargs)
        return around(getattr(tensor, method), frame(1), args, kwargs)

    return call


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    runner = vars(module).get("Runner")
    for one in (*vars(module).values(), *(() if runner is None else vars(runner).values())):
        if isinstance(one, FunctionType) and one.__module__ == module.__name__:
            yield one


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
