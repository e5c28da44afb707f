"""Reads a file that Inductor generated: in which order its lines run, what they launch, and which memory they hold.

Inductor writes straight-line Python: ``buf0 = empty_strided_cuda(…)`` allocates, a call that is given ``buf0`` writes
it, ``buf5 = buf0; del buf0  # reuse`` hands the memory on, ``del buf5`` frees it. A buffer that a call returns was
allocated on the call's own line. Code for CUDA graphs is cut into partitions, functions which stand before the one that
calls them.

Nothing here needs torch, and nothing runs the code. A call counts as a launch here unless it is known to be none: what
is given a buffer may write it. Which calls get a range is decided more strictly, in
`profkit.capture.compiled.launch_sites`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from profkit.capture.compiled.launch_sites import find_functions, partition_of
from profkit.run.compiled_code import Allocation, CompiledGraph, Holder

_ALLOCATES = ("empty_strided", "tracked_empty_strided", "empty(", "torch.empty")
_VIEWS = ("reinterpret_tensor", "alloc_from_pool", "torch.ops.inductor._alloc_from_pool")
_PARTS = ("partition_", "subgraph_")
# Calls that neither launch nor allocate.
_NO_LAUNCH = (
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
    reader = _Reader(text.splitlines(), functions)
    reader.read_function("call")
    reader.end_span()
    return GeneratedCode(
        tuple(reader.inputs),
        tuple(reader.outputs),
        tuple(reader.launches),
        tuple(one for one in reader.memory if one.holders),
        tuple(reader.spans),
    )


class _Reader:
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
        if function.startswith(_NO_LAUNCH):
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
