"""What a generated file launches, which record belongs to which launch, and whose names a shared file has."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import fx, nn
from torch._inductor.virtualized import V

from profkit.capture.compiled.generated_file import read_generated_file
from profkit.capture.compiled.origins import CodeGeneration, Known, Origin, Record, Sidecars, origin_of, translate
from profkit.capture.compiled.places import LoadedGraph, Modules, TracedGraph, TracedModule, places_in, shape_of
from profkit.capture.compiled.stand_ins import stand_in, stand_in_for_methods
from profkit.capture.compiled.watch import CompiledCode, match
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.hooks.open_ranges import OpenRanges
from profkit.names import FORWARD, INFERENCE, OPTIMIZER, LaunchPlace
from tests.hooked_workloads import Always

CODE = '''
import torch
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
triton_poi_0 = async_compile.triton('triton_poi_0', """
def triton_poi_0(in_ptr0): extern_kernels.not_a_launch()
""")
cpp_fused_1 = async_compile.cpp_pybinding(['float*'], "")

def partition_0(args):
    extern_kernels.mm(a, reinterpret_tensor(b, (1,), (1,), 0), out=buf0)
    triton_poi_0.run(buf0, 8, stream=stream0)

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def recursively_apply_fns(self, fns):
        self.partitions = [fn(one) for fn, one in zip(fns, self.partitions)]

    def call(self, args):
        buf1 = torch.ops.aten.sort.default(args[0], torch.float32)
        (buf2,) = self.partitions[0](args)
        cpp_fused_1(buf2)
        extern_kernels.mm(a, b, out=buf0)

def benchmark_compiled_module(times=10):
    extern_kernels.mm(a, b)
'''


def test_launches_are_read_in_the_order_in_which_they_run() -> None:
    file = read_generated_file(CODE)
    assert [(site.kernel, site.called, site.is_extern) for site in file.sites] == [
        ("torch.ops.aten.sort.default", "torch.ops.aten.sort.default", True),
        ("extern_kernels.mm", "extern_kernels.mm", True),
        ("triton_poi_0", "triton_poi_0.run", False),
        ("cpp_fused_1", "cpp_fused_1", False),
        ("extern_kernels.mm", "extern_kernels.mm", True),
    ]
    lines = CODE.splitlines()
    assert all(site.called in lines[site.line - 1] for site in file.sites)
    assert "torch.float32" in file.values
    assert not read_generated_file("x = 1\ndef kernel():\n    extern_kernels.mm()\n").sites, "no graph's function"


def _record(kernel: str, module: str = "") -> Record:
    return Record(kernel, is_extern=False, origins=(Origin((module,), "model.py:1 forward", "aten.mm"),))


def test_a_launch_has_the_record_of_its_name_and_turn_if_all_of_its_name_were_recorded() -> None:
    sites = read_generated_file(CODE).sites
    records = [
        _record("aten.sort", "s"),
        _record("extern_kernels.mm", "first"),
        _record("triton_poi_0", "t"),
        _record("extern_kernels.mm", "second"),
    ]
    found = [None if record is None else record.origins[0].modules[0] for _, record in match(sites, records)]
    assert found == ["s", "first", "t", None, "second"]
    found = match(sites, [_record("extern_kernels.mm"), _record("triton_poi_0")])
    assert [site.kernel for site, record in found if record is not None] == ["triton_poi_0"]


FIRST = ((("L['self'].a",), "m.py:1 f"), (("L['self'].a",), "m.py:2 f"), (("L['self'].b",), "m.py:1 f"))
KNOWN = Known((_record("mm", "L['self'].b"),), False, FIRST)


def test_a_file_that_two_models_share_says_of_each_its_own_modules() -> None:
    other = ((("L['self'].x",), "n.py:7 f"), (("L['self'].x",), "n.py:8 f"), (("L['self'].y",), "n.py:7 f"))
    known = Known((_record("mm", "L['self'].b"),), False, (*FIRST[:2], (("L['self'].b",), "model.py:1 forward")))
    now = (*other[:2], (("L['self'].y",), "n.py:9 g"))
    found = translate(known, now)
    assert found is not None
    assert found.records[0].origins == (Origin(("L['self'].y",), "n.py:9 g", "aten.mm"),)
    assert translate(KNOWN, FIRST) is KNOWN


@pytest.mark.parametrize(
    "other",
    [
        FIRST[:2],
        (FIRST[0], FIRST[1], (("L['self'].a",), "m.py:1 f"), FIRST[0]),
        ((("L['self'].x",), "1"), (("L['self'].z",), "2"), (("L['self'].y",), "1")),
    ],
)
def test_operators_that_do_not_correspond_are_not_translated(other: Any) -> None:
    assert translate(KNOWN, other) is None


def test_what_is_known_of_a_file_is_found_by_another_process(tmp_path: Path) -> None:
    code = tmp_path / "cache" / "cxyz.py"
    Sidecars().keep(code, KNOWN)
    assert Sidecars().find(code, FIRST) == KNOWN
    assert Sidecars().find(tmp_path / "cache" / "other.py", FIRST) is None
    next(tmp_path.rglob("*.json")).write_text("{")
    assert Sidecars().find(code, FIRST) is None


def test_where_nothing_can_be_written_this_process_remembers(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    code, here = tmp_path / "cache" / "cxyz.py", Sidecars()
    here.keep(code, KNOWN)
    assert here.find(code, FIRST) == KNOWN
    assert Sidecars().find(code, FIRST) is None


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    Sidecars().keep(tmp_path / "cache" / "cxyz.py", KNOWN)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_another_version_wrote_is_not_read(tmp_path: Path) -> None:
    code = tmp_path / "cache" / "cxyz.py"
    Sidecars().keep(code, KNOWN)
    written = next(code.parent.glob("*.json"))
    written.write_text(json.dumps({**json.loads(written.read_text()), "version": "compiled-1"}))
    assert Sidecars().find(code, FIRST) is None
    Sidecars().keep(code, KNOWN)
    assert Sidecars().find(code, FIRST) == KNOWN


def test_ranks_that_write_at_once_leave_whole_files(tmp_path: Path) -> None:
    code, seen = tmp_path / "cache" / "cxyz.py", []
    writers = [Thread(target=lambda: [Sidecars().keep(code, KNOWN) for _ in range(20)]) for _ in range(4)]
    Sidecars().keep(code, KNOWN)
    for one in writers:
        one.start()
    while any(one.is_alive() for one in writers):
        seen.append(Sidecars().find(code, FIRST))
    assert all(one == KNOWN for one in seen)
    assert [path.suffix for path in code.parent.iterdir()] == [".json"], "no scratch files"


def test_launches_pass_a_proxy_and_everything_else_is_what_it_was() -> None:
    calls: list[tuple[str, int]] = []
    namespace = SimpleNamespace(mm=lambda *_: calls.append(("mm", 0)) or "product", other="other")
    kernel = SimpleNamespace(run=lambda x: x + 1, config="config")
    module = ModuleType("generated")
    text = (
        "async_compile = make = lambda *_: None\n"
        "def call(args):\n    return extern_kernels.mm(), triton_0.run(1), extern_kernels.other, triton_0.config\n"
    )
    exec(compile(text, "generated", "exec"), vars(module))
    vars(module).update(extern_kernels=namespace, triton_0=kernel)
    switch = SimpleNamespace(is_recording=False)
    around: list[int] = []

    def launch(function: Any, frame: FrameType, args: Any, kwargs: Any) -> Any:
        around.append(frame.f_lineno)
        return function(*args, **kwargs)

    file = read_generated_file("triton_0 = async_compile.triton('')\n" + text)
    stand_in(module, file, switch, launch)
    expected = ("product", 2, "other", "config")
    assert vars(module)["call"]([]) == expected
    assert around == []
    switch.is_recording = True
    assert vars(module)["call"]([]) == expected
    assert around == [3, 3]
    kernel.run = lambda x: x + 10  # as a kernel does that has chosen how to run
    assert vars(module)["call"]([])[1] == 11


MIXED = """
def make(*_): return None
async_compile = type("", (), {"triton": make})
triton_per_0 = async_compile.triton("")

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        x, = args
        workspace_0 = x * 2
        buf9 = x.new_empty(3)
        buf9.copy_(x[0])
        triton_per_0.run(x, workspace_0)
        buf3 = workspace_0[0 * 3 : (0 + 1) * 2].view(2, 3).sum(dim=0).to(torch.float64)
        del workspace_0
        return buf3, buf9

runner = Runner(partitions=[])
call = runner.call
"""


def test_a_reduction_in_two_directions_ends_with_methods_of_a_tensor() -> None:
    file = read_generated_file(MIXED)
    assert [(site.kernel, site.workspace, site.result) for site in file.sites] == [
        ("aten.copy_", "", ""),
        ("triton_per_0", "workspace_0", ""),
        ("aten.sum", "workspace_0", "buf3"),
    ]
    gradient = Origin(("ln",), "model.py:3 forward", "aten.sum")
    record = Record(
        "triton_per_0", False, (Origin(("h",), "model.py:1 forward", "aten.mul"), gradient), {"buf3": gradient}
    )
    found = [None if one is None else one.origins for _, one in match(file.sites, [record])]
    assert found == [None, record.origins, (gradient,)]


def test_methods_that_launch_are_called_at_their_line_with_the_same_result() -> None:
    module = ModuleType("generated")
    vars(module)["torch"] = torch
    exec(compile(MIXED, "generated.py", "exec"), vars(module))
    vars(module)["triton_per_0"] = SimpleNamespace(run=lambda *_: None)
    x = torch.arange(6.0).view(2, 3)
    before = vars(module)["call"]([x])
    switch, lines = SimpleNamespace(is_recording=True), []

    def launch(function: Any, frame: FrameType, args: Any, kwargs: Any) -> Any:
        lines.append((frame.f_lineno, function.__name__))
        return function(*args, **kwargs)

    stand_in_for_methods(module, MIXED, switch, launch)
    after = vars(module)["call"]([x])
    assert all(map(torch.equal, before, after))
    at = {site.kernel: site.line for site in read_generated_file(MIXED).sites}
    assert lines == [
        (at["aten.copy_"], "copy_"),
        (at["aten.sum"], "sum"),
        (at["aten.sum"], "to"),
    ]
    switch.is_recording = False
    assert all(map(torch.equal, before, vars(module)["call"]([x])))
    assert len(lines) == 3


class _Graph:
    """Stands for the graph that Inductor compiles."""

    wrapper_code = None

    def __init__(self, *, is_backward: bool = False) -> None:
        self.is_backward = is_backward


def test_a_kernel_of_which_inductors_debugging_is_not_told_is_recorded_at_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TritonScheduling:
        def define_kernel(self, src_code: str, node_schedule: Any, kernel: Any) -> str:
            return src_code

    class PythonWrapperCodegen:
        def generate_kernel_call(self, kernel_name: str, call_args: Any) -> str:
            return f"call of {kernel_name}"

    nodes = fx.Graph()
    node = nodes.call_function(torch.ops.aten.sum.default, (nodes.placeholder("x"),))
    node.meta = {
        "stack_trace": '  File "model.py", line 3, in forward\n    x.sum()\n',
        "nn_module_stack": {"0": ("m", Any)},
    }
    schedule = [SimpleNamespace(node=SimpleNamespace(origin_node=node, origins={node}, get_name=lambda: "buf0"))]
    generation, debug = (
        CodeGeneration(pytest.fail),
        SimpleNamespace(set_kernel_post_grad_provenance_tracing=lambda *_: 5),
    )
    for name, module, watch in (
        ("debug", debug, generation.watch_debug),
        ("codegen.triton", SimpleNamespace(TritonScheduling=TritonScheduling), generation.watch_triton),
        ("codegen.wrapper", SimpleNamespace(PythonWrapperCodegen=PythonWrapperCodegen), generation.watch_wrapper),
    ):
        monkeypatch.setitem(sys.modules, f"torch._inductor.{name}", module)
        watch(module)
    with V.set_graph_handler(_Graph(is_backward=True)):
        TritonScheduling().define_kernel("triton_red", schedule, None)
        assert debug.set_kernel_post_grad_provenance_tracing(schedule, "triton_red") == 5
        assert PythonWrapperCodegen().generate_kernel_call("triton_red", ()) == "call of triton_red"
        TritonScheduling().define_kernel("triton_per", schedule, None)
        PythonWrapperCodegen().generate_kernel_call("triton_per", ())
        taken = generation.take()
        assert generation.take() is None
    assert taken is not None
    records, is_backward = taken
    assert is_backward
    assert [record.kernel for record in records] == ["triton_red", "triton_per"]
    origin = Origin(("m",), "model.py:3 forward", "aten.sum")
    assert [(record.origins, record.buffers) for record in records] == [((origin,), {"buf0": origin})] * 2


def test_generated_code_is_loaded_with_whatever_else_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class PyCodeCache:
        @classmethod
        def load_by_key_path(cls, key: str, path: str, *_: Any, set_sys_modules: bool | None = None) -> Any:
            return SimpleNamespace(said=(key, path, set_sys_modules))

    watched = SimpleNamespace(PyCodeCache=PyCodeCache)
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", watched)
    CompiledCode(Hooks(Always(lambda _: None), depth=9), None)._watch_code_cache(watched)
    # as torch 2.13 loads the templates that max-autotune times
    assert PyCodeCache.load_by_key_path("key", "path", set_sys_modules=False).said == ("key", "path", False)


# -- under which modules a launch stands: the ranges that the eager program would have open --------------------------


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
