"""Which program a compiled graph is of, for which module its code runs, and where its launches stand among ranges.

Inductor knows modules only by where Dynamo found them: ``L['self'].h.0``. Dynamo has the objects at hand; by them a
module gets its dotted name within the compiled module, or its place in another model. Operators in order tell two
graphs apart that are compiled to the same code.

A function that is compiled by itself may call a model, or be given a module, and nobody sees a call of either: the
phase of these calls is opened around the code. One graph serves all modules of one shape. Which of them runs stands in
the variables of the function's frame, and a backward pass is known by the parameters that the forward pass was given.

A launch's range names its modules (`profkit.run.compiled_code`).
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from profkit.annotation import method_range
from profkit.capture.compiled.origins import Operator, line_of, modules_of
from profkit.capture.hooks import Call
from profkit.capture.hooks.backward_nodes import running_graph
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.hooks.module_names import plain_name, unwrap
from profkit.capture.hooks.open_ranges import OpenRanges
from profkit.capture.patches import call_first, outside_dynamo, patch
from profkit.capture.steps.variable_names import variable_of
from profkit.names import OPTIMIZER, LaunchPlace

_GETATTR = re.compile(r"getattr\(([^()]*), '([^'.]+)'\)")
# A module's name may hold anything but a dot.
_STEP = re.compile(r"\.([^.\[\]]+)|\['([^']+)'\]|\[(\d+)\]")
_STEPS = re.compile(f"(?:{_STEP.pattern})+")
_VARIABLE = re.compile(r"L\['(\w+)'\]")


@dataclass(frozen=True)
class TracedModule:
    """A module in a graph.

    ``name`` is its dotted name within the module on whose behalf the graph runs, else within the model it is called in.
    ``path`` is its path within the former as it was compiled; None if it is no part of it.
    """

    name: str
    path: str | None
    module: ref[nn.Module]


@dataclass(frozen=True)
class TracedGraph:
    """What Dynamo knew of one graph.

    ``root`` is the module whose method was compiled, or that a function was given, None for another function;
    ``variable`` is what the function calls it, ``shape`` the names and classes of its modules: the same graph serves
    all modules of that shape. ``code`` is the function's file and name.
    """

    name: str
    code: tuple[str, str]
    root: ref[nn.Module] | None
    variable: str
    shape: int
    operators: tuple[Operator, ...]
    modules: dict[str, TracedModule]


class TracedGraphs:
    """Notes every graph that Dynamo hands to its backend; `current` is the one that is compiled now."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        # A graph's backward is compiled or loaded later, in the same context.
        self._by_context: WeakKeyDictionary[Any, TracedGraph] = WeakKeyDictionary()

    def watch_output_graph(self, _: Any) -> None:
        patch("torch._dynamo.output_graph.OutputGraph.call_user_compiler", call_first(self._note), stays=True)

    def current(self) -> TracedGraph | None:
        from torch._guards import TracingContext

        context = TracingContext.try_get()
        return None if context is None else self._by_context.get(context)

    def _note(self, output: Any, gm: Any, *_: Any, **__: Any) -> None:
        try:
            self._by_context[output.tracing_context] = _traced(output, gm)
        except Exception as error:
            self._failed(error)


def _traced(output: Any, gm: Any) -> TracedGraph:
    graphs = [
        part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)
    ]  # a checkpoint's body has its own
    calls = [node for graph in graphs for node in graph.nodes if node.op.startswith("call_")]
    operators = tuple((modules_of(node.meta), line_of(node.meta.get("stack_trace"))) for node in calls)
    local, global_ = output.local_scope, output.global_scope
    code = output.root_tx.f_code
    sources = dict.fromkeys(source for modules, _ in operators for source in modules)
    variable = _root(local, code.co_varnames[:1], sources)
    root: nn.Module | None = local.get(variable)
    modules: dict[str, TracedModule] = {}
    paths = {} if root is None else {id(module): path for path, module in root.named_modules()}
    for source in sources:
        module = _find(source, {"L": local, "G": global_})
        if isinstance(module, nn.Module):
            path = paths.get(id(module))
            modules[source] = TracedModule(source if path is None else plain_name(path), path, ref(module))
    if root is None:
        _name_in_their_models(modules)
    name = f"{code.co_qualname} {code.co_filename}:{code.co_firstlineno}"
    return TracedGraph(
        name=name,
        code=(code.co_filename, code.co_name),
        root=None if root is None else ref(root),
        variable=variable,
        shape=_no_shape if root is None else shape_of(root),
        operators=operators,
        modules=modules,
    )


_no_shape = 0


def shape_of(module: nn.Module) -> int:
    """Return a number that modules have in common whose parts have the same names and classes."""
    return hash(tuple((path, type(part)) for path, part in module.named_modules()))


def _find(source: str, scopes: dict[str, dict[str, Any]]) -> Any:
    while "getattr(" in source and (flat := _GETATTR.sub(r"\1.\2", source)) != source:
        source = flat
    scope, rest = scopes.get(source[:1]), source[1:]
    if scope is None or not _STEPS.fullmatch(rest):
        return None
    value: Any = scope
    try:
        for attribute, key, index in _STEP.findall(rest):
            if key or index:
                value = value[key or int(index)]
            elif isinstance(value, nn.Module) and attribute in value._modules:
                value = value._modules[attribute]
            else:
                value = getattr(value, attribute)
    except Exception:
        return None
    return value


def _root(local: dict[str, Any], first: tuple[str, ...], sources: dict[str, None]) -> str:
    variables = [match[1] for source in sources if (match := _VARIABLE.match(source))]
    modules = (name for name in (*first, *dict.fromkeys(variables)) if isinstance(local.get(name), nn.Module))
    return next(modules, "")


def _name_in_their_models(modules: dict[str, TracedModule]) -> None:
    outer = next(iter(modules.values()), None)
    model = None if outer is None else outer.module()
    if model is None:
        return
    paths = {id(module): path for path, module in model.named_modules()}
    for source, traced in modules.items():
        path = paths.get(id(traced.module()))
        if path is not None:
            modules[source] = TracedModule(plain_name(path), None, traced.module)


Modules = tuple[str, ...]
"""The modules around an operator as `Origin.modules` has them."""


@dataclass(frozen=True)
class LoadedGraph:
    """A graph's code that a process has loaded: what its launches compute for, by their lines in the file."""

    id: str
    traced: TracedGraph | None
    owners: dict[int, tuple[Modules, ...]]


def places_in(graph: LoadedGraph, opened: OpenRanges, hooks: Hooks, given: nn.Module | None) -> dict[int, LaunchPlace]:
    call = opened.call or opened.backward_call
    around = _names_around(call, hooks)
    if call is None and opened.has_range(OPTIMIZER):
        around = (OPTIMIZER,)
    running = _running_module(graph.traced, call, given)
    if running is not None and call is None and graph.traced is not None:
        hooks.name_model(running)
        part = hooks.names.part(running)
        is_called_within = any(module.path == "" for module in graph.traced.modules.values())
        if part is not None and part.range is not None and not is_called_within:
            around = (part.range,)  # nobody saw its call: backward work of what ran before anything was recorded
    called = set(_called_modules(call))

    def find(source: str) -> Iterator[str]:
        module = _module(source, running, graph.traced, hooks)
        part = None if module is None or module in called else hooks.names.part(module)
        if part is not None and part.path_range is not None:
            yield part.path_range
        annotated = None if module is None else method_range(module, "forward")
        if annotated is not None and not (module in called and annotated in around):
            yield annotated

    paths: dict[Modules, tuple[str, ...]] = {(): around}
    for modules in {modules for owners in graph.owners.values() for modules in owners}:
        paths[modules] = _path(modules, around, find)
    return {
        line: _place(graph.id, line, [paths[modules] for modules in owners]) for line, owners in graph.owners.items()
    }


def _place(graph: str, line: int, paths: Sequence[tuple[str, ...]]) -> LaunchPlace:
    several = list(dict.fromkeys(path for path in paths if path))
    if len(several) < 2:
        return LaunchPlace(graph, line, several[0] if several else ())
    common = several[0]
    for path in several[1:]:
        same = [a == b for a, b in zip(common, path, strict=False)]
        common = common[: same.index(False) if False in same else len(same)]
    names = [path[-1] for path in several]
    if len(set(names)) < len(names):  # two blocks' parts of one name
        names = [".".join(path[len(common) :] or path[-1:]) for path in several]
    return LaunchPlace(graph, line, common, tuple(names))


def _names_around(call: Call | None, hooks: Hooks) -> tuple[str, ...]:
    names: list[str] = []
    while call is not None:
        name = call.name
        module = None if name is not None or call.module is None else call.module()
        if module is not None:  # the call began before anything was recorded
            if call.around is None:
                hooks.name_model(module)
            part = hooks.names.part(module)
            name = None if part is None else part.range
        if name is not None:
            names.append(name)
        call = call.around
    return tuple(reversed(names))


def _called_modules(call: Call | None) -> Iterator[nn.Module]:
    while call is not None:
        module = None if call.module is None else call.module()
        if module is not None:
            yield from dict.fromkeys((module, unwrap(module)))
        call = call.around


def _running_module(traced: TracedGraph | None, call: Call | None, given: nn.Module | None) -> nn.Module | None:
    if traced is None or traced.root is None:
        return None
    if given is not None and shape_of(given) == traced.shape:
        return given
    root = traced.root()
    if call is None and root is not None:  # a function was compiled that calls no module, but uses one
        return root
    candidates = (module for module in _called_modules(call) if module is root or shape_of(module) == traced.shape)
    return next(candidates, None)


def _path(modules: Modules, around: tuple[str, ...], find: Callable[[str], Iterable[str]]) -> tuple[str, ...]:
    """A call of a module may open two ranges: that of the module, and within it that of a decorated ``forward``."""
    if modules == (OPTIMIZER,):
        return around if OPTIMIZER in around else (*around, OPTIMIZER)
    return (*around, *(name for source in modules for name in find(source)))


def _module(source: str, running: nn.Module | None, traced: TracedGraph | None, hooks: Hooks) -> nn.Module | None:
    known = None if traced is None else traced.modules.get(source)
    if known is None:
        return None
    if known.path is not None:
        return None if running is None else running.get_submodule(known.path)
    module = known.module()
    if module is not None and known.name == "":
        hooks.name_model(module)
    return module


_FRAMES = 40
"""The most frames between a compiled function and its generated code."""
_AUTOGRAD = os.path.join("_aot_autograd", "runtime_wrappers.py")


class Entries:
    """Sees each time that one graph's code is entered.

    Args:
        failed: is called with an error of what is done here, which never reaches the program.
    """

    def __init__(
        self, traced: TracedGraph | None, hooks: Hooks, failed: Callable[[Exception], None], *, is_backward: bool
    ) -> None:
        self._traced = traced
        self._hooks = hooks
        self._failed = failed
        self._is_backward = is_backward
        self._on_thread = _OnThread()

    @property
    def module(self) -> ref[nn.Module] | None:
        """The module that the function was called with which runs on this thread; None if it is not known."""
        return self._on_thread.module

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        if self._traced is None:
            return call

        @functools.wraps(call)
        def watched(inputs: Sequence[Any]) -> Any:
            begun = outside_dynamo(self._begin, inputs)
            try:
                return call(inputs)
            finally:
                if begun is not None:
                    outside_dynamo(self._hooks.calls_end, begun)

        return watched

    def _begin(self, inputs: Sequence[Any]) -> list[nn.Module] | None:
        traced, hooks = self._traced, self._hooks
        if traced is None or hooks.is_over:
            return None
        try:
            is_within_call = self._is_backward or hooks.on_thread.ranges.root is not None or running_graph() != -1
            if not hooks.is_recording and is_within_call:
                return None
            function, has_grad = (None, False) if self._is_backward else _function(traced)
            root = None if traced.root is None else traced.root()
            if self._is_backward:
                self._on_thread.module = _given_before(inputs) if _by_parameter else None
            elif root is not None:
                is_called = any(type(module) is type(root) for module in _called_modules(hooks.on_thread.ranges.call))
                self._on_thread.module = None if is_called else _given_to(function, traced)
            if is_within_call:
                return None
            models = _outermost(traced, self.module)
        except Exception as error:
            self._failed(error)
            return None
        if models:
            hooks.calls_begin(models, has_grad=has_grad)
        return models or None


class _OnThread(threading.local):
    module: ref[nn.Module] | None = None


_by_parameter: MutableMapping[Tensor, ref[nn.Module]] = WeakIdKeyDictionary()
"""The module that a compiled function was called with, by each of its parameters."""
_with_known_parameters: WeakSet[nn.Module] = WeakSet()


def _function(traced: TracedGraph) -> tuple[FrameType | None, bool]:
    """Return the frame of the function that runs this code, and whether its results get a graph for a backward pass.

    Then autograd calls the code, with gradients switched off.
    """
    frame: FrameType | None = sys._getframe(4)
    has_grad = torch.is_grad_enabled()
    for _ in range(_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if (code.co_filename, code.co_name) == traced.code:
            return frame, has_grad
        has_grad = has_grad or (code.co_name == "forward" and code.co_filename.endswith(_AUTOGRAD))
        frame = frame.f_back
    return None, has_grad


def _given_to(function: FrameType | None, traced: TracedGraph) -> ref[nn.Module] | None:
    module = None if function is None else variable_of(function, traced.variable)
    if not isinstance(module, nn.Module):
        return None
    if module not in _with_known_parameters:
        _with_known_parameters.add(module)
        _by_parameter.update(dict.fromkeys(module.parameters(), ref(module)))
    return ref(module)


def _given_before(inputs: Sequence[Any]) -> ref[nn.Module] | None:
    known = (_by_parameter.get(given) for given in inputs if isinstance(given, nn.Parameter))
    return next((module for module in known if module is not None), None)


def _outermost(traced: TracedGraph, given_with: ref[nn.Module] | None) -> list[nn.Module]:
    given = None if given_with is None else given_with()
    sources = dict.fromkeys(modules[0] for modules, _ in traced.operators if modules)
    called = (traced.modules.get(source) for source in sources)
    root = None if traced.root is None else traced.root()
    models = [module for known in called if known is not None and (module := known.module()) is not None]
    return list(dict.fromkeys(given if given is not None and model is root else model for model in models))
