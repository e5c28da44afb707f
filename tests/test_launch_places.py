"""Under which modules a launch of compiled code stands: the ranges that the eager program would have open."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import fx, nn
from torch._inductor.virtualized import V

from profkit.capture.compiled.origins import CodeGeneration, origin_of
from profkit.capture.compiled.places import LoadedGraph, Modules, TracedGraph, TracedModule, places_in, shape_of
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.hooks.open_ranges import OpenRanges
from profkit.names import FORWARD, INFERENCE, OPTIMIZER, LaunchPlace
from tests.hooked_workloads import Always


class Part(nn.Module):
    def __init__(self, look: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.look = look

    def forward(self, x: Any) -> Any:
        if self.look is not None:
            self.look()
        return x


class Root(nn.Module):
    """Has a part that is called as a model is."""

    def __init__(self, look: Callable[[], None] | None = None, within: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.model = Part(within)
        self.look = look

    def forward(self, x: Any) -> Any:
        if self.look is not None:
            self.look()
        return self.model(x)


@pytest.fixture
def hooks() -> Hooks:
    return Hooks(Always(lambda _number: None), 9)


def _traced(root: nn.Module, *, is_self: bool = True) -> TracedGraph:
    modules = {f"L['self'].{path}": TracedModule(path, path, ref(one)) for path, one in root.named_modules() if path}
    if not is_self:
        modules["L['self']"] = TracedModule("", "", ref(root))
    return TracedGraph("forward", ("model.py", "forward"), ref(root), "self", shape_of(root), (), modules)


def _places(hooks: Hooks, root: nn.Module, *owners: tuple[Modules, ...], is_self: bool = True) -> list[LaunchPlace]:
    graph = LoadedGraph("1", _traced(root, is_self=is_self), dict(enumerate(owners)))
    return list(places_in(graph, hooks.on_thread.ranges, hooks, None).values())


A = ("L['self'].model", "L['self'].model.a")
B = ("L['self'].model", "L['self'].model.b")


def _call(hooks: Hooks, root: nn.Module) -> None:
    """Call a module as the wrapper around all calls does."""
    opened: OpenRanges = hooks.on_thread.ranges
    call = hooks.enter(opened, root, (torch.ones(1),), {})
    root.forward(torch.ones(1))
    if call is not None:
        hooks.leave(opened, call, root, None, {})


def test_a_part_called_model_stands_below_the_model(hooks: Hooks) -> None:
    found: list[LaunchPlace] = []
    root = Root(lambda: found.extend(_places(hooks, root, (A,), (A, B), ((), A), ())))
    hooks.start()
    _call(hooks, root)
    below = ("model", "model")
    assert found == [
        LaunchPlace("1", 0, (*below, "model.a")),
        LaunchPlace("1", 1, below, ("model.a", "model.b")),
        LaunchPlace("1", 2, ("model",), ("model", "model.a")),
        LaunchPlace("1", 3),
    ]


def test_code_that_several_parts_share_stands_under_the_one_that_runs(hooks: Hooks) -> None:
    found: list[LaunchPlace] = []
    compiled, running = Part(), Part(lambda: found.extend(_places(hooks, compiled, (("L['self'].a",),))))
    root = nn.Sequential(compiled, running)
    hooks.start()
    opened = hooks.on_thread.ranges
    call = hooks.enter(opened, root, (torch.ones(1),), {})
    assert call is not None
    _call(hooks, running)
    hooks.leave(opened, call, root, None, {})
    assert found == [LaunchPlace("1", 0, ("model", "1", "1.a"))]


def test_a_graph_whose_call_nobody_saw_stands_under_its_model(hooks: Hooks) -> None:
    root = Root()
    below = ("model", "model", "model.a")
    assert _places(hooks, root, (A,)) == [LaunchPlace("1", 0, below)]
    as_function = tuple(("L['self']", *modules) for modules in (A,))
    assert _places(hooks, root, as_function, is_self=False) == [LaunchPlace("1", 0, below)]


def test_what_an_optimizer_computes_stands_under_it(hooks: Hooks) -> None:
    hooks.start()
    opened = hooks.on_thread.ranges
    assert places_in(LoadedGraph("1", None, {3: ((OPTIMIZER,),)}), opened, hooks, None)[3].path == (OPTIMIZER,)
    opened.open(OPTIMIZER, OPTIMIZER)
    assert places_in(LoadedGraph("1", None, {3: ((OPTIMIZER,),)}), opened, hooks, None)[3].path == (OPTIMIZER,)


class _Graph:
    wrapper_code = None
    is_backward = False


def test_a_constant_that_many_operators_share_owns_nothing() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    zero = graph.call_function(torch.ops.aten.full.default, ([], 0.0))
    cast = graph.call_function(torch.ops.prims.convert_element_type.default, (zero, torch.float32))
    kept = graph.call_function(torch.ops.aten.where.self, (x, cast, x))
    for node, module in ((zero, "first"), (cast, "first"), (kept, "own")):
        node.meta = {"nn_module_stack": {"0": (module, nn.Module)}, "stack_trace": ""}
    generation = CodeGeneration(pytest.fail)

    def ir_node(owner: Any, *origins: Any) -> Any:
        return type("Node", (), {"origin_node": owner, "origins": set(origins), "get_name": lambda _: "buf0"})()

    with V.set_graph_handler(_Graph()):
        generation._note([ir_node(None, zero, cast, kept)], "fused", is_extern=False)
        generation._note([ir_node(zero, zero)], "fill", is_extern=False)
        taken = generation.take()
    assert taken is not None
    fused, fill = taken[0]
    assert fused.origins == (origin_of(kept),)
    assert fused.buffers == {"buf0": origin_of(kept)}
    assert fill.origins == (origin_of(zero),)


def test_a_kernel_of_the_programs_own_is_of_the_operator_that_launches_it() -> None:
    graph = fx.Graph()
    launched = graph.call_function(torch.ops.aten.mul, (graph.placeholder("x"), 2))
    launched.meta["nn_module_stack"] = {"scale": ("L['self'].scale", "Scale")}
    # As Inductor has it: its name is None, and `get_name` says that there should be one.
    kernel = SimpleNamespace(name=None, origin_node=None, origins={launched}, get_name=lambda: pytest.fail("no name"))
    failures: list[Exception] = []
    generation = CodeGeneration(failures.append)
    with V.set_graph_handler(_Graph()):
        generation._note([kernel], "scale_kernel_0", is_extern=True)
        taken = generation.take()
    assert (failures, taken is None) == ([], False)
    assert taken is not None
    ((record,), _) = taken
    assert (record.kernel, record.buffers) == ("scale_kernel_0", {})
    assert record.origins[0].modules == ("L['self'].scale",)


def test_calls_that_nobody_saw_have_a_phase_and_make_steps() -> None:
    hooks, seen = Hooks(Always(lambda _number: None), 9, "call"), []
    hooks.start()
    for has_grad in (False, True, True):
        models = [Root()]
        hooks.calls_begin(models, has_grad=has_grad)
        seen.append([hooks.on_thread.ranges.has_range(phase) for phase in (INFERENCE, FORWARD)])
        hooks.calls_end(models)
    assert seen == [[True, False], [False, True], [False, True]]
    assert hooks.begun == 3
    assert not any(map(hooks.on_thread.ranges.has_range, (INFERENCE, FORWARD)))
