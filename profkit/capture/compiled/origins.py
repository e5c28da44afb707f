"""What a launch in generated code comes from: taken while Inductor generates it, and kept for later processes.

Inductor reports every launch that it writes to a function for its own debugging. That function is wrapped: it returns
what it did before, and no setting of Inductor's is changed, so that the code and the keys of its caches stay as they
are. What it does not report is taken where it writes the call of a library.

What is known of a generated file lies next to it, for all who share that cache. One generated file may serve graphs of
several modules: those of another graph than the first are found by the operators' places, which stand in the same order
in both.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from profkit.capture.compilations import program_line
from profkit.capture.compiled.node_work import called, work_of_launches
from profkit.capture.patches import Function, call_first, outside_dynamo, patch
from profkit.capture.work import Products
from profkit.files import whole_file
from profkit.names import OPTIMIZER
from profkit.run import decode
from profkit.run.compiled_code import KNOWN_CODE, says_origins

Operator = tuple[tuple[str, ...], str]
"""The modules around an operator, as `Origin.modules` has them, and its line."""


@dataclass(frozen=True)
class Origin:
    """Where an operator of a graph was called.

    ``modules`` are those that were being called, outermost first, as Dynamo writes down where it found them
    (``L['self'].h.0``); the module that was compiled is not among them. ``line`` is ``file:line function``, "" where
    it is not known.
    """

    modules: tuple[str, ...]
    line: str
    operator: str


@dataclass(frozen=True)
class Record:
    """One launch that Inductor wrote: its kernel's name as in the code, and the operators it computes, in order.

    ``buffers`` says of each buffer that it writes which one operator's result that is.
    """

    kernel: str
    is_extern: bool
    origins: tuple[Origin, ...]
    buffers: dict[str, Origin] = field(default_factory=dict)
    work: Products | None = None
    """Its matrix products; None where they are not known."""


@dataclass
class _Written:
    """What Inductor has written of a graph until now: each launch's record, and its operators."""

    records: list[Record] = field(default_factory=list)
    nodes: list[set[Any]] = field(default_factory=list)
    are_calls: list[bool] = field(default_factory=list)
    defined: dict[str, list[Any]] = field(default_factory=dict)
    reported: str | None = None
    """The kernel that Inductor reported last, until its call is written."""


class CodeGeneration:
    """Records the launches of every graph that Inductor generates code for; `take` gives them.

    Args:
        failed: is called with an error of the recording's own, which never reaches Inductor.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._written: WeakKeyDictionary[Any, _Written] = WeakKeyDictionary()
        self.is_possible = False
        """Whether this torch says what a launch computes, whatever its settings: since 2.10."""

    def watch_debug(self, module: Any) -> None:
        before = getattr(module, _REPORT, None)

        def note(schedule: Any, kernel_name: str, is_extern: bool = False, *_: Any, **__: Any) -> None:
            outside_dynamo(self._note, _ir_nodes(schedule), kernel_name, is_extern=is_extern)

        if patch(f"torch._inductor.debug.{_REPORT}", call_first(note), stays=True):
            # Earlier versions have the function, and call it if a setting says so.
            self.is_possible = says_origins(torch.__version__)
            for importer in ("torch._inductor.codegen.cpp", "torch._inductor.codegen.triton"):
                if getattr(sys.modules.get(importer), _REPORT, None) is before is not None:
                    patch(f"{importer}.{_REPORT}", call_first(note), stays=True)

    def watch_scheduler(self, _: Any) -> None:
        """Watch ``torch._inductor.scheduler``: the calls of libraries that Inductor does not report."""

        def wrap(plain: Function) -> Function:
            def watched(scheduler: Any, scheduler_node: Any, *args: Any, **kwargs: Any) -> Any:
                before = self._count()
                result = plain(scheduler, scheduler_node, *args, **kwargs)
                if self._count() == before:
                    node = getattr(scheduler_node, "node", None)
                    name = getattr(node, "python_kernel_name", None)
                    if name or type(node).__name__ in _COPIES:
                        outside_dynamo(self._note, [node], str(name or "aten.copy_"), is_extern=True)
                return result

            return watched

        patch("torch._inductor.scheduler.Scheduler.codegen_extern_call", wrap, stays=True)

    def watch_triton(self, _: Any) -> None:
        """Watch ``torch._inductor.codegen.triton``: of which operators a kernel is made."""

        def wrap(plain: Function) -> Function:
            def watched(scheduling: Any, src_code: Any, node_schedule: Any, *args: Any, **kwargs: Any) -> Any:
                name = plain(scheduling, src_code, node_schedule, *args, **kwargs)
                graph = _current_graph()
                if graph is not None:
                    self._written.setdefault(graph, _Written()).defined[name] = _ir_nodes(node_schedule)
                return name

            return watched

        patch("torch._inductor.codegen.triton.TritonScheduling.define_kernel", wrap, stays=True)

    def watch_wrapper(self, _: Any) -> None:
        """Watch ``torch._inductor.codegen.wrapper``: the call of a kernel that Inductor did not report."""

        def note(_code: Any, kernel_name: str, *_: Any, **__: Any) -> None:
            graph = _current_graph()
            written = self._written.get(graph) if graph is not None else None
            if written is not None:
                if written.reported != kernel_name and kernel_name in written.defined:
                    outside_dynamo(self._note, written.defined[kernel_name], kernel_name, is_extern=False)
                written.reported = None

        target = "torch._inductor.codegen.wrapper.PythonWrapperCodegen.generate_kernel_call"
        patch(target, call_first(note), stays=True)

    def take(self) -> tuple[tuple[Record, ...], bool] | None:
        """Return the records of the graph that Inductor compiles now, and whether it is a backward pass.

        None: no graph was compiled here, its code was found in a cache.
        """
        graph = _current_graph()
        written = None if graph is None else self._written.pop(graph, None)
        if written is None:
            return None
        is_backward = bool(getattr(graph, "is_backward", False))
        works = work_of_launches(written.nodes, written.are_calls, is_backward=is_backward)
        records = zip(written.records, works, strict=True)
        return tuple(replace(record, work=work) for record, work in records), is_backward

    def _count(self) -> int:
        graph = _current_graph()
        return len(self._written[graph].records) if graph in self._written else 0

    def _note(self, ir_nodes: list[Any], kernel: str, *, is_extern: bool) -> None:
        try:
            graph = _current_graph()
            if graph is not None:
                _write_down(self._written.setdefault(graph, _Written()), ir_nodes, kernel, is_extern=is_extern)
        except Exception as error:
            self._failed(error)


def _write_down(written: _Written, ir_nodes: list[Any], kernel: str, *, is_extern: bool) -> None:
    owners = [(node, owner) for node in ir_nodes if (owner := _owner(node)) is not None]
    owning = [owner for _, owner in owners]
    computed = owning if is_extern else [operator for node in ir_nodes for operator in _computed(node)]
    origins = tuple(map(origin_of, _in_order(_without_constants(computed))))
    # A Triton kernel of the program's own writes into its arguments, and is no buffer.
    buffers = {node.get_name(): origin_of(owner) for node, owner in owners if getattr(node, "name", "") is not None}
    written.reported = kernel
    written.records.append(Record(kernel, is_extern, origins, buffers))
    written.nodes.append({*owning, *(operator for node in ir_nodes for operator in getattr(node, "origins", ()))})
    written.are_calls.append(is_extern or any("Template" in type(node).__name__ for node in ir_nodes))


def origin_of(node: Any) -> Origin:
    """Return what an operator of a graph comes from: in a backward pass, the operator whose gradient it computes.

    A sum of gradients comes from no operator. What torch writes down for it is that of the operator before.
    """
    target, args, _, meta = called(node)
    if meta.get("is_gradient_acc"):
        meta = {}
    modules, line = modules_of(meta), line_of(meta.get("stack_trace"))
    if not modules and _operator(target) in _PRODUCTS:
        # Inductor made one of a product and a sum, and kept what the sum came from: the product's input tells.
        for given in args[-2:]:
            if not modules and hasattr(given, "meta") and _is_view(given) and modules_of(given.meta):
                modules, line = modules_of(given.meta), line_of(given.meta.get("stack_trace"))
    return Origin(modules, line, _operator(target))


def modules_of(meta: dict[str, Any]) -> tuple[str, ...]:
    """Return the modules that were being called where a node was made, outermost first; an optimizer's are one."""
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    if not stack and _OPTIMIZERS in (meta.get("stack_trace") or ""):
        return (OPTIMIZER,)
    if not stack and not meta.get("stack_trace") and ("source_fn_stack" in meta or "fwd_source_fn_stack" in meta):
        return ("",)  # of the compiled function itself, whose source nobody can read
    return tuple(entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values())


def line_of(stack_trace: str | None) -> str:
    """Return the innermost line of a stack that is not PyTorch's or profkit's own, as ``file:line function``.

    It is "" if there is none. Dynamo reads profkit's wrapper of a module's call where it was loaded before profkit.
    """
    frames = []
    for line in (stack_trace or "").splitlines():
        parts = line.strip().split('"')
        if len(parts) == 3 and parts[0] == "File " and parts[2].startswith(", line "):
            number, _, function = parts[2].removeprefix(", line ").partition(", in ")
            frames.append((parts[1], number, function))
    own = [frame for frame in frames if not frame[0].startswith((_TORCH, _CAPTURE))] or frames
    if not own:
        return ""
    file, number, function = own[-1]
    return program_line(file, number, function)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIMIZERS = f"{_TORCH}optim{os.sep}"
_CAPTURE = os.path.dirname(os.path.dirname(__file__)) + os.sep

_REPORT = "set_kernel_post_grad_provenance_tracing"
"""With this Inductor reports, for its own debugging, each launch that it writes."""

_COPIES = frozenset({"DeviceCopy", "InplaceCopyFallback"})

_PRODUCTS = frozenset({"aten.addmm", "aten.baddbmm"})

# They compute nothing: they make no kernel by themselves, and are drawn into that of whoever reads their result.
_VIEWS = frozenset(
    {"_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand", "permute", "reshape", "select", "slice"}
    | {"split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"}
    | {"view_as_complex", "view_as_real"}
)


def _is_view(node: Any) -> bool:
    operator = getattr(node.target, "overloadpacket", None)
    return getattr(operator, "__name__", "") in _VIEWS


def _is_constant(node: Any, inputs: int = 4) -> bool:
    if node.op != "call_function":
        return node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor)
    if "rand" in str(node.target) or "seed" in str(node.target):
        return False
    return inputs > 0 and all(_is_constant(given, inputs - 1) for given in node.all_input_nodes)


def _without_constants(operators: list[Any]) -> list[Any]:
    """A constant that many operators share says where the first of them is, not what a launch computes."""
    return [operator for operator in operators if not _is_constant(operator)] or operators


def _computed(ir_node: Any) -> Iterable[Any]:
    origins = [node for node in getattr(ir_node, "origins", ()) if node.op == "call_function" and not _is_view(node)]
    owner = _owner(ir_node)
    return origins or ([] if owner is None else [owner])


def _owner(ir_node: Any) -> Any | None:
    owner = getattr(ir_node, "origin_node", None)
    if owner is not None:
        return owner
    origins = [node for node in getattr(ir_node, "origins", ()) if node.op == "call_function"]
    computed = _in_order(_without_constants(origins))
    return computed[-1] if computed else None


def _in_order(nodes: Iterable[Any]) -> list[Any]:
    distinct = set(nodes)
    if len(distinct) < 2 or hasattr(next(iter(distinct)), "_sort_key"):
        return sorted(distinct)  # nodes of one graph compare by their place in it
    return [node for node in next(iter(distinct)).graph.nodes if node in distinct]


def _operator(target: Any) -> str:
    return str(getattr(target, "overloadpacket", None) or getattr(target, "__name__", target))


def _ir_nodes(schedule: Any) -> list[Any]:
    if not isinstance(schedule, Sequence):
        return [schedule]
    return [node for scheduled in schedule for node in _of_scheduled(scheduled)]


def _of_scheduled(scheduled: Any) -> list[Any]:
    parts = getattr(scheduled, "snodes", None)
    if parts:
        return [node for part in parts for node in _of_scheduled(part)]
    node = getattr(scheduled, "node", None)
    return [] if node is None else [node]


def _current_graph() -> Any | None:
    virtualized = sys.modules.get("torch._inductor.virtualized")
    graph: Any = getattr(getattr(virtualized, "V", None), "graph", None)
    if not hasattr(graph, "wrapper_code"):
        return None
    while getattr(graph, "parent", None) is not None:
        graph = graph.parent
    return graph


@dataclass(frozen=True)
class Known:
    """What was recorded when a file was generated, and the operators of the graph that it was generated for."""

    records: tuple[Record, ...]
    is_backward: bool
    operators: tuple[Operator, ...]


class Sidecars:
    """What is known of generated files, in this process and in others."""

    def __init__(self) -> None:
        self._here: dict[Path, list[Known]] = {}

    def keep(self, code: Path, known: Known) -> None:
        """Keep what is known of the file ``code``; where nothing can be written, for this process."""
        self._here.setdefault(code, []).insert(0, known)
        content = json.dumps({"version": KNOWN_CODE, **asdict(known)}).encode()
        with suppress(OSError):
            code.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(_sidecar(code, known.operators)) as partial:
                partial.write_bytes(content)

    def find(self, code: Path, operators: tuple[Operator, ...]) -> Known | None:
        translated = (translate(known, operators) for known in self._all(code, operators))
        return next((known for known in translated if known is not None), None)

    def _all(self, code: Path, operators: tuple[Operator, ...]) -> Iterator[Known]:
        yield from sorted(self._here.get(code, ()), key=lambda known: known.operators != operators)
        for path in (_sidecar(code, operators), *sorted(code.parent.glob(f"{code.stem}.profkit-*.json"))):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                content = json.loads(path.read_text())
                if content["version"] == KNOWN_CODE:
                    yield decode(Known, content)


def translate(known: Known, operators: tuple[Operator, ...]) -> Known | None:
    """Return ``known`` with the modules and lines of a graph of other operators; None if the two do not match."""
    if known.operators == operators:
        return known
    if len(known.operators) != len(operators):
        return None
    meaning: dict[Operator, Operator | None] = {}
    for before, now in zip(known.operators, operators, strict=True):
        meaning[before] = now if meaning.get(before, now) == now else None
    if None in meaning.values():
        return None
    modules = {before[0]: now[0] for before, now in meaning.items() if now is not None}
    if any(now is not None and modules[before[0]] != now[0] for before, now in meaning.items()):
        return None

    def translate_origin(origin: Origin) -> Origin:
        now = meaning.get((origin.modules, origin.line))
        if now is not None:
            return replace(origin, modules=now[0], line=now[1])
        return replace(origin, modules=modules.get(origin.modules, ()), line="")

    return replace(
        known,
        operators=operators,
        records=tuple(
            replace(
                record,
                origins=tuple(map(translate_origin, record.origins)),
                buffers={name: translate_origin(origin) for name, origin in record.buffers.items()},
            )
            for record in known.records
        ),
    )


def _sidecar(code: Path, operators: tuple[Operator, ...]) -> Path:
    which = sha256(json.dumps(operators).encode()).hexdigest()[:10]
    return code.with_name(f"{code.stem}.profkit-{which}.json")
