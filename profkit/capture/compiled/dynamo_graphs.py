"""Which program a compiled graph is of: the function that Dynamo traced, its modules, and its operators in order.

Inductor knows modules only by where Dynamo found them: ``L['self'].h.0``. Dynamo has the objects at hand; by them a
module gets its dotted name within the compiled module, or its place in another model. Operators in order tell two
graphs apart that are compiled to the same code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import fx, nn

from profkit.capture.compiled.origins import Operator, line_of, modules_of
from profkit.capture.hooks.module_names import plain_name
from profkit.capture.patches import Function, patch

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
        def wrap(plain: Function) -> Function:
            def watched(output: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
                self._note(output, gm)
                return plain(output, gm, *args, **kwargs)

            return watched

        patch("torch._dynamo.output_graph.OutputGraph.call_user_compiler", wrap, stays=True)

    def current(self) -> TracedGraph | None:
        """Return the graph that is compiled or loaded on this thread; None if Dynamo traced none."""
        from torch._guards import TracingContext

        context = TracingContext.try_get()
        return None if context is None else self._by_context.get(context)

    def _note(self, output: Any, gm: Any) -> None:
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
    name = f"{getattr(code, 'co_qualname', code.co_name)} {code.co_filename}:{code.co_firstlineno}"
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
    """Return what Dynamo found at ``source``: ``L['self'].h.0``, ``getattr(G['m'].h, '0')``; None if nothing is."""
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
    """Return the variable with the module on whose behalf a function runs: its ``self``, whatever it is called."""
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
