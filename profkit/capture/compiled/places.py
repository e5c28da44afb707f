"""Where each launch of a loaded graph stands among the ranges of modules, as the eager program would have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from profkit.annotation import method_range
from profkit.capture.compiled.dynamo_graphs import TracedGraph, shape_of
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.hooks.module_names import unwrap
from profkit.capture.hooks.open_ranges import Call, OpenRanges
from profkit.names import OPTIMIZER
from profkit.run.compiled_code import LaunchPlace

Modules = tuple[str, ...]
"""The modules around an operator as `Origin.modules` has them."""


@dataclass(frozen=True)
class LoadedGraph:
    """A graph's code that a process has loaded: what its launches compute for, by their lines in the file."""

    id: str
    traced: TracedGraph | None
    owners: dict[int, tuple[Modules, ...]]


def places_in(graph: LoadedGraph, opened: OpenRanges, hooks: Hooks, given: nn.Module | None) -> dict[int, LaunchPlace]:
    """Return the place of each launch of ``graph``, which runs within what is open on this thread.

    ``given`` is the module that the compiled function was called with, if it is known.
    """
    call = opened.running_call
    around = _names_around(call, hooks)
    if call is None and opened.has_range(OPTIMIZER):
        around = (OPTIMIZER,)
    running = _running_module(graph.traced, call, given)
    if running is not None and call is None and graph.traced is not None:
        hooks.name_model(running)
        part = hooks.names.part(running)
        is_called_within = any(one.path == "" for one in graph.traced.modules.values())
        if part is not None and part.range is not None and not is_called_within:
            around = (part.range,)  # nobody saw its call: backward work of what ran before anything was recorded
    called = _called_modules(call)

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
    return {line: _place(graph.id, line, [paths[one] for one in owners]) for line, owners in graph.owners.items()}


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


def _called_modules(call: Call | None) -> set[nn.Module]:
    """Return the modules that are being called, and those that they wrap."""
    found: set[nn.Module] = set()
    while call is not None:
        module = None if call.module is None else call.module()
        if module is not None:
            found |= {module, unwrap(module)}
        call = call.around
    return found


def _running_module(traced: TracedGraph | None, call: Call | None, given: nn.Module | None) -> nn.Module | None:
    """Return the module on whose behalf a graph runs; None if it is of another function, or cannot be told."""
    if traced is None or traced.root is None:
        return None
    if given is not None and shape_of(given) == traced.shape:
        return given
    root = traced.root()
    if call is None and root is not None:  # a function was compiled that calls no module, but uses one
        return root
    while call is not None:
        module = None if call.module is None else call.module()
        for one in () if module is None else dict.fromkeys((module, unwrap(module))):
            if one is root or shape_of(one) == traced.shape:
                return one
        call = call.around
    return None


def _path(modules: Modules, around: tuple[str, ...], find: Callable[[str], Iterable[str]]) -> tuple[str, ...]:
    """Return the names of the ranges that would be open in the eager program, ``around`` first.

    A call of a module may open two: that of the module, and within it that of a decorated ``forward``.
    """
    if modules == (OPTIMIZER,):
        return around if OPTIMIZER in around else (*around, OPTIMIZER)
    return (*around, *(name for source in modules for name in find(source)))


def _module(source: str, running: nn.Module | None, traced: TracedGraph | None, hooks: Hooks) -> nn.Module | None:
    one = None if traced is None else traced.modules.get(source)
    if one is None:
        return None
    if one.path is not None:
        return None if running is None else running.get_submodule(one.path)
    module = one.module()
    if module is not None and one.name == "":
        hooks.name_model(module)
    return module
