"""Stands in the way of each launch of a generated file, without a change to the file.

What the file's functions launch by a global name is replaced in the loaded module: the functions of ``extern_kernels``,
``torch.ops`` and the kernels themselves. Everything else that is looked up under these names is what it was.

No global name leads to what a tensor's own methods launch. A kernel that reduces in two directions leaves parts of its
result in a workspace, and ``workspace_0[…].sum(dim=0)`` adds them up; ``buf0.copy_(…)`` copies to another device. The
loaded functions that hold such a line get code in which the method is called through a function, at the same line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from profkit.capture.compiled.generated_file import GeneratedFile, is_copy, workspace_of
from profkit.capture.hooks.hooks import Hooks

Around = Callable[[Callable[..., Any], FrameType, tuple[Any, ...], dict[str, Any]], Any]
"""Makes a call of a launch in a frame of the generated file, with what belongs around it.

The frame and not its line: Python finds a line by counting through the function from its beginning.
"""


def stand_in(module: ModuleType, file: GeneratedFile, switch: Hooks, around: Around) -> None:
    """Have ``around`` make all launches of a loaded file while ``switch.is_recording``."""
    names: dict[str, Any] = vars(module)
    if _MARK in names:  # loaded before, and used again
        return
    names[_MARK] = True
    tree: dict[str, Any] = {}
    for called in {site.called for site in file.sites}:
        if called not in file.values:
            branch = tree
            for part in called.split("."):
                branch = branch.setdefault(part, {})
            branch[""] = {}
    for name, branch in tree.items():
        if name in names:
            target, names[name] = names[name], _proxy(names[name], branch, switch, around)
            for first, attribute in (value.split(".")[:2] for value in file.values if "." in value):
                if first == name:  # looked up as fast as before
                    names[name].__dict__.setdefault(attribute, getattr(target, attribute))


_MARK = "_profkit_stands_in"


class _Names:
    """Looks like the object whose place it takes, but for the functions that launch."""

    def __init__(self, target: Any) -> None:
        self.__dict__["_profkit_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_profkit_target"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_profkit_target"], name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_profkit_target"](*args, **kwargs)


class _Launches(_Names):
    """A name that is called and has further names under it: ``aten.copy_`` and ``aten.copy_.default``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_profkit_call"](*args, **kwargs)


def _proxy(target: Any, branch: dict[str, Any], switch: Hooks, around: Around) -> Any:
    parts = {name: below for name, below in branch.items() if name}
    if not parts:
        return _launch(target, switch, around)
    proxy = (_Launches if "" in branch else _Names)(target)
    own = proxy.__dict__
    if "" in branch:
        own["_profkit_call"] = _launch(target, switch, around)
    for name, below in parts.items():
        if name == "run" and len(below) == 1:
            # A kernel may replace its own ``run`` once it has chosen how to run.
            own[name] = _launch(lambda *args, **kwargs: target.run(*args, **kwargs), switch, around)  # noqa: PLW0108
        else:
            own[name] = _proxy(getattr(target, name), below, switch, around)
    return proxy


def _launch(function: Callable[..., Any], switch: Hooks, around: Around) -> Callable[..., Any]:
    frame = sys._getframe

    def launch(*args: Any, **kwargs: Any) -> Any:
        if not switch.is_recording:
            return function(*args, **kwargs)
        return around(function, frame(1), args, kwargs)

    return launch


_CALL = "_profkit_call_method"


def stand_in_for_methods(module: ModuleType, text: str, switch: Hooks, around: Around) -> None:
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


def _method(switch: Hooks, around: Around) -> Any:
    frame = sys._getframe

    def call(tensor: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        function = getattr(tensor, method)
        return around(function, frame(1), args, kwargs) if switch.is_recording else function(*args, **kwargs)

    return call


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    runner = vars(module).get("Runner")
    for value in (*vars(module).values(), *(() if runner is None else vars(runner).values())):
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            yield value


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
