"""The text of a file that Inductor generated: what it launches where, and which memory it holds.

Inductor writes straight-line Python: ``buf0 = empty_strided_cuda(…)`` allocates, a call that is given ``buf0`` writes
it, ``buf5 = buf0; del buf0  # reuse`` hands the memory on, ``del buf5`` frees it. A buffer that a call returns was
allocated on the call's own line. Code for CUDA graphs is cut into partitions, functions which stand before the one that
calls them. Nothing here needs torch, and nothing runs the code.

A call gets a range only if it surely launches (`LaunchSite`). For memory any call counts that is not known to launch
nothing (`WritingCall`): what is given a buffer may write it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from profkit.run.compiled_code import Allocation, CompiledGraph, Holder

_NAMESPACES = ("extern_kernels", "aten", "torch.ops", "inductor_ops", "_quantized")
# They give a tensor another shape, or memory: nothing is launched.
_NO_LIBRARY_CALL = re.compile(r".*\b(_reinterpret_tensor|_alloc_from_pool|set_source_tensor|as_strided)(\.\w+)?")
_ALLOCATES = ("empty_strided", "tracked_empty_strided", "empty(", "torch.empty")
_VIEWS = ("reinterpret_tensor", "alloc_from_pool", "torch.ops.inductor._alloc_from_pool")
_PARTS = ("partition_", "subgraph_")
_WRITES_NOTHING = (
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
_WORKSPACE = "workspace_"
_REDUCTIONS = frozenset({"sum", "amin", "amax", "prod", "any", "max", "min", "mean", "to"})


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
class WritingCall:
    """A call that may write memory: the buffers and inputs that it is ``given``, and those that it returns."""

    line: int
    function: str
    given: tuple[str, ...]
    made: tuple[str, ...]


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
class GeneratedFile:
    """What a generated file does when it is called, each list in the order in which it runs.

    ``values`` are the dotted names that occur other than as what is called: they may not be replaced. ``outputs`` are
    the names in what it returns, "" for anything else than memory; ``spans`` the first and last lines of its parts.
    """

    sites: tuple[LaunchSite, ...] = ()
    values: frozenset[str] = frozenset()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    calls: tuple[WritingCall, ...] = ()
    memory: tuple[HeldMemory, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


def read_generated_file(text: str) -> GeneratedFile:
    """Return what a generated file does, nothing of one that is no graph's code; SyntaxError if it is no Python."""
    walker = _Walker(ast.parse(text), text.splitlines())
    return walker.walk() if "call" in walker.functions else GeneratedFile()


def describe_memory(
    graph: CompiledGraph, file: GeneratedFile, owners: Mapping[str, tuple[str | None, str | None]]
) -> CompiledGraph:
    """Return the record of a graph with the memory that its generated code holds.

    Args:
        owners: module (by `named_modules` of the compiled one) and line whose result each buffer is, by its name. A
            buffer that is not in it belongs to the module and the line of the launch that writes it, if those are one.
    """
    launches = {launch.line: launch for launch in graph.launches}
    used: dict[str, int] = {}
    for call in file.calls:
        for name in (*call.given, *call.made):
            used.setdefault(name, call.line)
    own_lines = {call.line for call in file.calls}

    def describe(held: HeldMemory) -> Iterator[Holder]:
        # Nothing uses memory under a name before it is written: the first call that uses a name is its writer. Where
        # none does, that is the next name's: one fused kernel computes both.
        writer = None
        for number, (line, name) in reversed(list(enumerate(held.holders))):
            writer = used.get(name, writer)
            if number == 0 and held.line is not None and held.line in own_lines:
                writer = held.line
            launch = launches.get(writer) if writer is not None else None
            modules, lines = (launch.modules, launch.lines) if launch is not None else ((), ())
            module, source = owners.get(name, (None, None))
            yield Holder(
                line,
                writer,
                module if module is not None or len(modules) != 1 else modules[0],
                source if source is not None or len(lines) != 1 else lines[0],
                name,
            )
        if held.given:
            yield Holder(0, name=held.given)

    allocations = [Allocation(held.line, tuple(describe(held))[::-1], held.freed) for held in file.memory]
    return replace(graph, allocations=tuple(allocations), spans=file.spans, inputs=file.inputs, outputs=file.outputs)


def workspace_of(node: ast.expr) -> str:
    """Return the workspace whose parts an expression adds up by a tensor's methods; "" if it does not."""
    is_reduced = False
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_reduced |= node.func.attr in _REDUCTIONS
        node = node.func.value
    name = _dotted(node.value) if isinstance(node, ast.Subscript) else ""
    return name if is_reduced and name.startswith(_WORKSPACE) else ""


def is_copy(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "copy_" and _dotted(node.func) != "aten.copy_"


class _Walker(ast.NodeVisitor):
    """Walks the statements in the order in which they run, with the memory that each name holds."""

    def __init__(self, tree: ast.Module, lines: list[str]) -> None:
        self.functions = _find_functions(tree)
        self._kernels = set(_find_kernels(tree))
        self._lines = lines
        self._seen: set[str] = set()
        self._depth = 0
        self._sites: list[LaunchSite] = []
        self._values: set[str] = set()
        self._by_name: dict[str, HeldMemory] = {}
        self._alive: dict[int, set[str]] = {}
        self._results: dict[str, int] = {}
        self._span: tuple[int, int] | None = None
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._calls: list[WritingCall] = []
        self._memory: list[HeldMemory] = []
        self._spans: list[tuple[int, int]] = []

    def walk(self) -> GeneratedFile:
        self._read("call")
        self._end_span()
        result = GeneratedFile(
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            calls=tuple(self._calls),
            memory=tuple(held for held in self._memory if held.holders),
            spans=tuple(self._spans),
        )
        for name in self.functions:  # what no call reaches launches too: control flow has functions of its own
            self._read(name)
        return replace(result, sites=tuple(self._sites), values=frozenset(self._values))

    def _read(self, function: str) -> None:
        if function not in self._seen:
            self._seen.add(function)
            self._depth += 1
            self._read_body(self.functions[function].body)
            self._depth -= 1

    def _read_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            line = statement.lineno
            self._span = (self._span[0] if self._span else line, line)
            nested = [inner for name in ("body", "orelse", "finalbody") if (inner := getattr(statement, name, None))]
            for part in ast.iter_child_nodes(statement) if nested else [statement]:
                if not isinstance(part, ast.stmt) or not nested:
                    self.visit(part)
            for inner in nested:
                self._read_body(inner)
            if isinstance(statement, ast.Delete):
                for name in _names(statement):
                    self._delete(name, line)
            elif isinstance(statement, ast.Return):
                self._return(statement)
            elif isinstance(statement, ast.Assign):
                self._assign(statement)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._call(statement.value, ())

    def _enter(self, function: str) -> None:
        after = self._span
        self._end_span()
        self._read(function)
        self._end_span()
        self._span = after and (after[1] + 1, after[1] + 1)

    def _end_span(self) -> None:
        if self._span is not None:
            self._spans.append(self._span)
        self._span = None

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        workspace = workspace_of(node.value)
        if workspace:
            result = _dotted(node.targets[0])
            self._sites.append(LaunchSite(node.lineno, "aten.sum", "", True, workspace, result))

    def visit_Call(self, node: ast.Call) -> None:
        for part in (*node.args, *node.keywords):
            self.visit(part)
        called = _dotted(node.func)
        if not called:
            self.visit(node.func)
        if is_copy(node):
            self._sites.append(LaunchSite(node.lineno, "aten.copy_", "", is_extern=True))
            return
        site = self._site(node.lineno, called)
        if site is not None and not site.is_extern:
            given = (_dotted(argument) for argument in node.args)
            site = replace(site, workspace=next((name for name in given if name.startswith(_WORKSPACE)), ""))
        function = _partition_of(node.func) or called
        if site is not None:
            self._sites.append(site)
        elif function in self.functions and function not in self._seen:
            self._enter(function)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = _dotted(node)
        if name:
            self._values.add(name)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._values.add(node.id)

    def _site(self, line: int, called: str) -> LaunchSite | None:
        first, _, rest = called.partition(".")
        if first in self._kernels and rest in ("", "run", first):
            return LaunchSite(line, first, called, is_extern=False)
        is_library = any(called.startswith(f"{name}.") for name in _NAMESPACES)
        if is_library and not _NO_LIBRARY_CALL.fullmatch(called):
            return LaunchSite(line, called, called, is_extern=True)
        return None

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
            if ast.unparse(_without_as_strided(value).func).startswith(_ALLOCATES) and made:
                self._hold(made[0], HeldMemory(line), line)
            else:
                self._call(value, made)

    def _call(self, call: ast.Call, made: tuple[str, ...]) -> None:
        function = ast.unparse(call.func)
        is_part = _partition_of(call.func) is not None or (function.startswith(_PARTS) and function in self.functions)
        if is_part or function.startswith(_WRITES_NOTHING):
            return
        given = dict.fromkeys(name for part in (*call.args, *call.keywords) for name in _names(part))
        known = tuple(name for name in given if name in self._by_name)
        self._calls.append(WritingCall(call.lineno, function, known, made))
        for name in made:
            self._results[name] = call.lineno
            self._hold(name, HeldMemory(call.lineno), call.lineno)

    def _hold(self, name: str, held: HeldMemory, line: int) -> None:
        held.holders.append((line, name))
        self._memory.append(held)
        self._by_name[name] = held
        self._alive[id(held)] = {name}

    def _give(self, name: str) -> None:
        if name in self._by_name:  # a partition is given what another made, in a list that it empties
            self._alive[id(self._by_name[name])] = {name}
            return
        self._inputs.append(name)
        held = self._by_name[name] = HeldMemory(None, given=name)
        self._alive[id(held)] = {name}
        self._memory.append(held)

    def _delete(self, name: str, line: int) -> None:
        held = self._by_name.get(name)
        if held is not None:
            alive = self._alive[id(held)]
            alive.discard(name)
            if not alive:
                held.freed = line

    def _return(self, statement: ast.Return) -> None:
        value = statement.value
        if self._depth > 1 or value is None:
            return
        returned = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
        self._outputs = [self._held_by(_viewed(part)) for part in returned]
        for held in self._memory:  # what it neither deletes nor returns ends with the call
            if held.freed is None and held.holders and held.holders[-1][1] not in self._outputs:
                held.freed = statement.lineno

    def _held_by(self, name: str) -> str:
        held = self._by_name.get(name)
        if held is None:
            return ""
        return held.holders[-1][1] if held.holders else held.given or name


def _find_kernels(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and _dotted(getattr(node.value, "func", None)).startswith("async_compile."):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _find_functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    functions = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in ("get_args", "benchmark_compiled_module"):
            functions[node.name] = node
        elif isinstance(node, ast.ClassDef) and node.name == "Runner":
            methods = (method for method in node.body if isinstance(method, ast.FunctionDef))
            functions.update({method.name: method for method in methods if method.name == "call"})
    return functions


def _partition_of(called: ast.expr) -> str | None:
    if isinstance(called, ast.Subscript) and _dotted(called.value) == "self.partitions":
        index = called.slice
        return f"partition_{index.value!r}" if isinstance(index, ast.Constant) else None
    return None


def _viewed(value: ast.expr) -> str:
    if isinstance(value, ast.Name):
        return value.id
    is_view = isinstance(value, ast.Call) and ast.unparse(value.func) in _VIEWS
    first = value.args[0] if is_view and isinstance(value, ast.Call) and value.args else None
    return first.id if isinstance(first, ast.Name) else ""


def _without_as_strided(call: ast.Call) -> ast.Call:
    inner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "as_strided" else None
    return inner if isinstance(inner, ast.Call) else call


def _names(node: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def _dotted(node: ast.AST | None) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        around = _dotted(node.value)
        return f"{around}.{node.attr}" if around else ""
    return ""
