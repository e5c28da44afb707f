"""Where a generated file launches: read from its text, which stays as it is.

Only calls that surely launch count, since each gets a range around it. Which memory the file holds is another question,
in which any call may have a part: `profkit.capture.compiled.buffers`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace

_NAMESPACES = ("extern_kernels", "aten", "torch.ops", "inductor_ops", "_quantized")
# They give a tensor another shape, or memory: nothing is launched.
_NO_LAUNCH = re.compile(r".*\b(_reinterpret_tensor|_alloc_from_pool|set_source_tensor|as_strided)(\.\w+)?")


@dataclass(frozen=True)
class LaunchSite:
    """One call in a generated file that launches.

    ``kernel`` is the name under which Inductor recorded it; ``called`` the expression that is called, "" for methods of
    a tensor. ``workspace`` is one that a kernel leaves its results in, and whose parts a later method adds up to
    ``result``.
    """

    line: int
    kernel: str
    called: str
    is_extern: bool
    workspace: str = ""
    result: str = ""


@dataclass(frozen=True)
class GeneratedFile:
    """The launches of a generated file in the order in which they run, and what else its functions need.

    ``values`` are the dotted names that occur other than as what is called: they may not be replaced.
    """

    sites: tuple[LaunchSite, ...]
    values: frozenset[str]


def read_launches(text: str) -> GeneratedFile:
    """Return what a generated file launches.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(text)
    kernels = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and _dotted(getattr(node.value, "func", None)).startswith("async_compile.")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = find_functions(tree)
    call = functions.get("call")
    if call is None:
        return GeneratedFile((), frozenset())
    reader = _Reader(kernels, functions)
    reader.read(call)
    for function in functions.values():  # what no call reaches: control flow has functions of its own
        reader.read(function)
    return GeneratedFile(tuple(reader.sites), frozenset(reader.values))


def find_functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return the functions of a generated file that run the compiled code, by name; it begins with ``call``."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in ("get_args", "benchmark_compiled_module"):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef) and node.name == "Runner":
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "call":
                    found["call"] = method
    return found


class _Reader(ast.NodeVisitor):
    def __init__(self, kernels: set[str], functions: dict[str, ast.FunctionDef]) -> None:
        self._kernels = kernels
        self._functions = functions
        self._seen: set[str] = set()
        self.sites: list[LaunchSite] = []
        self.values: set[str] = set()

    def read(self, function: ast.FunctionDef) -> None:
        if function.name not in self._seen:
            self._seen.add(function.name)
            for statement in function.body:
                self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        workspace = workspace_of(node.value)
        if workspace:
            result = _dotted(node.targets[0])
            self.sites.append(LaunchSite(node.lineno, "aten.sum", "", True, workspace, result))

    def visit_Call(self, node: ast.Call) -> None:
        for part in (*node.args, *node.keywords):
            self.visit(part)
        called = _dotted(node.func)
        if not called:
            self.visit(node.func)
        if is_copy(node):
            self.sites.append(LaunchSite(node.lineno, "aten.copy_", "", is_extern=True))
            return
        site = self._site(node.lineno, called)
        if site is not None and not site.is_extern:
            given = (_dotted(argument) for argument in node.args)
            site = replace(site, workspace=next((name for name in given if name.startswith(_WORKSPACE)), ""))
        if site is not None:
            self.sites.append(site)
            return
        inner = self._functions.get(partition_of(node.func) or called)
        if inner is not None:
            self.read(inner)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = _dotted(node)
        if name:
            self.values.add(name)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.values.add(node.id)

    def _site(self, line: int, called: str) -> LaunchSite | None:
        first, _, rest = called.partition(".")
        if first in self._kernels and rest in ("", "run", first):
            return LaunchSite(line, first, called, is_extern=False)
        is_library = any(called.startswith(f"{name}.") for name in _NAMESPACES)
        if is_library and not _NO_LAUNCH.fullmatch(called):
            return LaunchSite(line, called, called, is_extern=True)
        return None


_WORKSPACE = "workspace_"
_REDUCTIONS = frozenset({"sum", "amin", "amax", "prod", "any", "max", "min", "mean", "to"})


def workspace_of(node: ast.expr) -> str:
    """Return the workspace whose parts an expression adds up by a tensor's methods; "" if it does not."""
    is_reduced = False
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_reduced |= node.func.attr in _REDUCTIONS
        node = node.func.value
    name = _dotted(node.value) if isinstance(node, ast.Subscript) else ""
    return name if is_reduced and name.startswith(_WORKSPACE) else ""


def is_copy(node: ast.Call) -> bool:
    """Return whether a call copies one tensor into another by its method."""
    return isinstance(node.func, ast.Attribute) and node.func.attr == "copy_" and _dotted(node.func) != "aten.copy_"


def partition_of(called: ast.expr) -> str | None:
    """Return the function that ``self.partitions[N]`` calls; None for another expression."""
    if isinstance(called, ast.Subscript) and _dotted(called.value) == "self.partitions":
        index = called.slice
        return f"partition_{index.value!r}" if isinstance(index, ast.Constant) else None
    return None


def _dotted(node: ast.AST | None) -> str:
    """Return ``a.b.c`` of an expression that is nothing but names, "" for another."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        around = _dotted(node.value)
        return f"{around}.{node.attr}" if around else ""
    return ""
