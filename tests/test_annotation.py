"""annotate: what it opens and closes, for whom, and that Dynamo sees nothing of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from profkit.annotation import annotate, method_range, record_in_torch
from profkit.names import layer_range


def test_a_block_is_a_range_with_its_flops_as_payload(nvtx_events: list[Any]) -> None:
    with annotate("matmul", flops=2 * 10**13):
        nvtx_events.append("inside")
    assert nvtx_events == [("push", "matmul", 2 * 10**13), "inside", ("pop", "matmul")]


def test_a_decorated_function_keeps_its_name_result_and_arguments(nvtx_events: list[Any]) -> None:
    @annotate("work")
    def work(a: int, *, b: int) -> int:
        """Add."""
        return a + b

    assert (work(1, b=2), work.__name__, work.__doc__) == (3, "work", "Add.")
    assert nvtx_events == [("push", "work", None), ("pop", "work")]


def test_flops_of_a_decorated_call_come_from_its_arguments(nvtx_events: list[Any]) -> None:
    @annotate("work", flops=lambda rows, columns: 2 * rows * columns)
    def work(rows: int, columns: int) -> None: ...

    work(3, 5)
    work(rows=7, columns=1)
    assert [event[2] for event in nvtx_events if event[0] == "push"] == [30, 14]


def test_flops_as_a_function_are_refused_around_a_block(nvtx_events: list[Any]) -> None:
    with pytest.raises(TypeError, match="give `with` a value"), annotate("work", flops=lambda: 1):
        pass
    assert nvtx_events == []


def test_ranges_close_when_the_code_raises(nvtx_events: list[Any]) -> None:
    @annotate("function")
    def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"), annotate("block"):
        fail()
    assert nvtx_events[-2:] == [("pop", "function"), ("pop", "block")]


def test_one_object_may_be_nested_in_itself_and_used_again(nvtx_events: list[Any]) -> None:
    again = annotate("again")
    with again, again:
        pass
    with again:
        pass
    assert [event[0] for event in nvtx_events] == ["push", "push", "pop", "pop", "push", "pop"]


def test_ranges_alone_never_import_torch() -> None:
    code = "import sys; from profkit import annotate\nwith annotate('x'): pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _names_seen_by_torch(run: Any) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return sorted(event.name for event in profiler.events() if event.name.startswith("profkit test"))


def test_torch_profiler_sees_the_ranges() -> None:
    pytest.importorskip("torch")

    def run() -> None:
        outer = annotate("profkit test outer")
        with outer, annotate("profkit test inner", flops=3), outer:
            pass

    assert _names_seen_by_torch(run) == ["profkit test inner", "profkit test outer", "profkit test outer"]


def test_record_functions_open_only_under_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    opened: list[str] = []

    class Record:
        def __init__(self, name: str) -> None:
            opened.append(name)

        def __enter__(self) -> Record:
            return self

        def __exit__(self, *exc: object) -> None:
            opened.append("closed")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Record)
    with annotate("nobody"):
        pass
    assert opened == []
    record_in_torch(True)
    try:
        half = annotate("half")
        with half:
            record_in_torch(False)
            with half:  # opened with nobody listening: must not close the outer one's
                pass
            assert opened == ["half"]
    finally:
        record_in_torch(False)
    assert opened == ["half", "closed"]


def test_dynamo_captures_one_full_graph_of_what_is_computed_alone() -> None:
    torch = pytest.importorskip("torch")

    @annotate("part", flops=lambda x: x.shape[0])
    def double(x: Any) -> Any:
        with annotate(layer_range(0), flops=3 * x.shape[0]):
            return x * 2

    graphs = []

    def backend(graph: Any, _examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(double, fullgraph=True, backend=backend)
    assert compiled(torch.ones(3)).tolist() == [2.0] * 3
    (captured,) = graphs
    assert sum(node.op == "call_function" for node in captured.graph.nodes) == 1


class Layer:
    def __init__(self, number: int) -> None:
        self.number = number

    @annotate(lambda layer, *_: f"layer {layer.number}")
    def forward(self, x: int) -> int:
        return x

    @annotate("loss")
    def loss(self) -> None: ...

    @annotate(lambda _layer, x: f"of {x}")
    def told_by_its_argument(self, x: int) -> None: ...

    def plain(self) -> None: ...


@pytest.mark.parametrize(
    ("method", "name"),
    [("forward", "layer 3"), ("loss", "loss"), ("told_by_its_argument", None), ("plain", None), ("missing", None)],
)
def test_the_range_of_a_method_is_known_without_a_call(method: str, name: str | None) -> None:
    assert method_range(Layer(3), method) == name
