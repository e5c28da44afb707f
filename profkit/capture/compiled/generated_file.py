"""The text of a file that Inductor generated: what it launches where, and which memory it holds.

Inductor writes straight-line Python: ``buf0 = empty_strided_cuda(…)`` allocates, a call that is given ``buf0`` writes
it, ``buf5 = buf0; del buf0  # reuse`` hands the memory on, ``del buf5`` frees it. A buffer that a call returns was
allocated on the call's own line. Code for CUDA graphs is cut into partitions, functions which stand before the one that
calls them. Nothing here needs torch, and nothing runs the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from profkit.run.compiled_code import Allocation, CompiledGraph, Holder

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


_ALLOCATES = ("empty_strided", "tracked_empty_strided", "empty(", "torch.empty")
_VIEWS = ("reinterpret_tensor", "alloc_from_pool", "torch.ops.inductor._alloc_from_pool")
_PARTS = ("partition_", "subgraph_")
# Calls that neither launch nor allocate.
_LAUNCHES_NOTHING = (
    "assert_size_stride",
    "assert_alignment",
    "args.clear",
    "get_raw_stream",
    "torch.cuda.set_device",
    "torch.cuda._DeviceGuard",
    "print",
    "len",
    "int",
    "start_graph",
    "end_graph",
)
_REUSE = "# reuse"


@dataclass(frozen=True)
class LaunchLine:
    """One call that launches: a kernel's name with its ``run``, a library's function, an operator of torch."""

    line: int
    function: str
    given: tuple[str, ...]
    """The buffers and inputs in its arguments."""
    made: tuple[str, ...]
    """What it returns: memory that it allocated."""


@dataclass
class HeldMemory:
    """Memory that the code allocates or is given, and the names that hold it one after another."""

    line: int | None
    """The line that allocates; None for memory that the code is given."""
    holders: list[tuple[int, str]] = field(default_factory=list)
    """(line from which on, name)"""
    freed: int | None = None
    """The line that deletes the last name, or the last line; None if the code returns the memory."""
    given: str = ""
    """The input's name, of memory that the code is given."""


@dataclass(frozen=True)
class GeneratedCode:
    """What a generated file does when it is called."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    """The names in what it returns, in order; "" for anything else than memory."""
    launches: tuple[LaunchLine, ...]
    """In the order in which they run."""
    memory: tuple[HeldMemory, ...]
    spans: tuple[tuple[int, int], ...]
    """First and last lines of the parts of the file, in the order in which they run."""


@dataclass(frozen=True)
class BufferOwner:
    """Whose result a buffer is, as Inductor knows it: module (by `named_modules` of the compiled one) and line."""

    module: str | None
    source: str | None


def with_memory(graph: CompiledGraph, code: GeneratedCode, owners: Mapping[str, BufferOwner]) -> CompiledGraph:
    """Return the record of a graph with the memory that its generated code holds.

    Args:
        graph: the record, with its launches.
        code: what `read_generated_code` found in the generated file.
        owners: whose result each buffer is, by its name. A buffer that is not in it belongs to the module and the line
            of the launch that writes it, if those are one.
    """
    launches = {launch.line: launch for launch in graph.launches}
    used: dict[str, int] = {}
    for one in code.launches:
        for name in (*one.given, *one.made):
            used.setdefault(name, one.line)
    own_lines = {one.line for one in code.launches}

    def describe(held: HeldMemory) -> Iterator[Holder]:
        # Nothing uses memory under a name before it is written: the first launch that uses a name is its writer. Where
        # none does, that is the next name's: one fused kernel computes both.
        launch_line = None
        for number, (line, name) in reversed(list(enumerate(held.holders))):
            launch_line = used.get(name, launch_line)
            if number == 0 and held.line is not None and held.line in own_lines:
                launch_line = held.line
            launch = launches.get(launch_line) if launch_line is not None else None
            modules, lines = (launch.modules, launch.lines) if launch is not None else ((), ())
            owner = owners.get(name, BufferOwner(None, None))
            yield Holder(
                line,
                launch_line,
                owner.module if owner.module is not None or len(modules) != 1 else modules[0],
                owner.source if owner.source is not None or len(lines) != 1 else lines[0],
                name,
            )
        if held.given:
            yield Holder(0, name=held.given)

    allocations = [Allocation(held.line, tuple(describe(held))[::-1], held.freed) for held in code.memory]
    return replace(graph, allocations=tuple(allocations), spans=code.spans, inputs=code.inputs, outputs=code.outputs)


def read_generated_code(text: str) -> GeneratedCode | None:
    """Return what a generated file does; None if it is no file of Inductor's that launches from Python.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(text)
    functions = find_functions(tree)
    if "call" not in functions:
        return None
    reader = _MemoryReader(text.splitlines(), functions)
    reader.read_function("call")
    reader.end_span()
    return GeneratedCode(
        tuple(reader.inputs),
        tuple(reader.outputs),
        tuple(reader.launches),
        tuple(one for one in reader.memory if one.holders),
        tuple(reader.spans),
    )


class _MemoryReader:
    """Walks the statements in the order in which they run, with the memory that each name holds."""

    def __init__(self, lines: list[str], functions: dict[str, ast.FunctionDef]) -> None:
        self._lines = lines
        self._functions = functions
        self._by_name: dict[str, HeldMemory] = {}
        self._alive: dict[int, set[str]] = {}
        self._results: dict[str, int] = {}
        self._open: list[str] = []
        self._span: tuple[int, int] | None = None
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.launches: list[LaunchLine] = []
        self.memory: list[HeldMemory] = []
        self.spans: list[tuple[int, int]] = []

    def read_function(self, name: str) -> None:
        self._open.append(name)
        self._read_body(self._functions[name].body)
        self._open.pop()

    def end_span(self) -> None:
        if self._span is not None:
            self.spans.append(self._span)
        self._span = None

    def _read_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            line = statement.lineno
            self._span = (self._span[0] if self._span else line, line)
            nested = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
            if any(nested):
                for inner in filter(None, nested):
                    self._read_body(inner)
            elif isinstance(statement, ast.Delete):
                for name in _names(statement):
                    self._delete(name, line)
            elif isinstance(statement, ast.Return):
                self._return(statement)
            elif isinstance(statement, ast.Assign):
                self._assign(statement)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._call(statement.value, ())

    def _assign(self, statement: ast.Assign) -> None:
        target, value, line = statement.targets[0], statement.value, statement.lineno
        made = tuple(_names(target))
        if isinstance(value, ast.Name) and value.id == "args":
            for name in made:
                self._give(name)
        elif isinstance(value, ast.List) and made:
            for name in filter(self._by_name.__contains__, _names(value)):
                self._alive[id(self._by_name[name])].add(made[0])
        elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id in self._results:
            # One of several results of a call: memory that it allocated. The name of them all holds none itself.
            allocated = self._results[value.value.id]
            self._by_name.get(value.value.id, HeldMemory(0)).holders.clear()
            self._hold(made[0], HeldMemory(allocated), allocated)
        elif (source := _viewed(value)) in self._by_name and made:
            held = self._by_name[source]
            self._by_name[made[0]] = held
            self._alive[id(held)].add(made[0])
            if self._lines[line - 1].rstrip().endswith(_REUSE):
                held.holders.append((line, made[0]))
        elif isinstance(value, ast.Call):
            function = ast.unparse(_outermost(value).func)
            if function.startswith(_ALLOCATES) and made:
                self._hold(made[0], HeldMemory(line), line)
            else:
                self._call(value, made)

    def _call(self, call: ast.Call, made: tuple[str, ...]) -> None:
        function = ast.unparse(call.func)
        partition = partition_of(call.func) or (function if function.startswith(_PARTS) else "")
        if partition in self._functions and partition not in self._open:
            after = self._span
            self.end_span()
            self.read_function(partition)
            self.end_span()
            self._span = after and (after[1] + 1, after[1] + 1)
            return
        if function.startswith(_LAUNCHES_NOTHING):
            return
        given = dict.fromkeys(name for one in (*call.args, *call.keywords) for name in _names(one))
        self.launches.append(LaunchLine(call.lineno, function, tuple(n for n in given if n in self._by_name), made))
        for name in made:
            self._results[name] = call.lineno
            self._hold(name, HeldMemory(call.lineno), call.lineno)

    def _hold(self, name: str, held: HeldMemory, line: int) -> None:
        held.holders.append((line, name))
        self.memory.append(held)
        self._by_name[name] = held
        self._alive[id(held)] = {name}

    def _give(self, name: str) -> None:
        if name in self._by_name:  # a partition is given what another made, in a list that it empties
            self._alive[id(self._by_name[name])] = {name}
            return
        self.inputs.append(name)
        held = self._by_name[name] = HeldMemory(None, given=name)
        self._alive[id(held)] = {name}
        self.memory.append(held)

    def _delete(self, name: str, line: int) -> None:
        held = self._by_name.get(name)
        if held is None:
            return
        alive = self._alive[id(held)]
        alive.discard(name)
        if not alive:
            held.freed = line

    def _return(self, statement: ast.Return) -> None:
        if len(self._open) > 1 or statement.value is None:
            return
        value = statement.value
        found = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
        self.outputs = [self._held_by(_viewed(one)) for one in found]
        for held in self.memory:  # what it neither deletes nor returns ends with the call
            if held.freed is None and held.holders and held.holders[-1][1] not in self.outputs:
                held.freed = statement.lineno

    def _held_by(self, name: str) -> str:
        """Return the name that holds the memory which a name is or views; "" if it is none."""
        held = self._by_name.get(name)
        if held is None:
            return ""
        return held.holders[-1][1] if held.holders else held.given or name


def _viewed(value: ast.expr) -> str:
    """Return the name that an expression is, or a view of; "" if it is neither."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call):
        function = ast.unparse(value.func)
        if function in _VIEWS and value.args and isinstance(value.args[0], ast.Name):
            return value.args[0].id
    return ""


def _outermost(call: ast.Call) -> ast.Call:
    """Return the call that an ``.as_strided(…)`` is applied to."""
    inner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "as_strided" else None
    return inner if isinstance(inner, ast.Call) else call


def _names(node: ast.AST) -> Iterator[str]:
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name))
