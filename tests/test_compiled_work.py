"""Matrix products of compiled code: of FX nodes, and in a counted step of each launch once, under its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import reset
from torch._inductor import config
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from profkit.capture.compiled.node_work import work_of_launches, work_of_node
from profkit.capture.compiled.origins import origin_of
from profkit.capture.work import Products
from profkit.capture.work.operators import torch_flops
from tests.empty_kernels import empty_kernels

pytest.importorskip("torch")

from profkit.annotation import annotate
from profkit.capture.compiled.watch import loaded
from profkit.capture.work.counter import WorkCounter
from profkit.capture.work.operator_work import GraphPart, GraphWork, replay_observers
from profkit.names import LaunchPlace, graph_range, launch_range
from profkit.run.compiled_code import Launch
from profkit.run.work import FUSED, RangeWork, RunWork


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32, bias=False)
        self.ffn = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (query @ key.transpose(-1, -2)).relu()
        x = x + self.out(scores @ value)
        return x + self.ffn(x)


def _transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Block(), Block(), nn.Linear(32, 7)), torch.randn(2, 8, 32)


def _convolutions() -> tuple[nn.Module, Tensor]:
    layers = (
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.ConvTranspose2d(8, 4, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    return nn.Sequential(*layers), torch.randn(2, 3, 16, 16)


def _thin_products() -> tuple[nn.Module, Tensor]:
    """Products that Inductor makes elementwise: one row, one column."""
    return nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 1), nn.Linear(1, 1, bias=False)), torch.randn(1, 16)


def _train(called: Callable[[Tensor], Tensor], x: Tensor) -> None:
    called(x).square().sum().backward()


def _compiled_nodes(model: nn.Module, x: Tensor, **options: Any) -> list[list[fx.Node]]:
    """Return the nodes of each graph that Inductor makes code of, forward and backward."""
    graphs: list[list[fx.Node]] = []
    reset()
    changes = {"post_grad_custom_post_pass": lambda graph: graphs.append(list(graph.nodes)), "fx_graph_cache": False}
    with config.patch(changes), empty_kernels():
        _train(torch.compile(model, **options), x)
    return graphs


def _sum(nodes: list[fx.Node], *, is_backward: bool = False) -> Products:
    work = [work_of_node(node, is_backward=is_backward) for node in nodes]
    assert None not in work
    return sum((one for one in work if one is not None), Products())


def _eager_flops(model: nn.Module, x: Tensor) -> int:
    counter = WorkCounter()
    counter.start()
    _train(model, x)
    counter.stop()
    return next(one.flops for one in counter.content().ranges if not one.path)


@pytest.mark.parametrize("make", [pytest.param(_transformer, marks=pytest.mark.slow), _convolutions])
def test_a_compiled_step_does_the_products_that_are_counted_of_the_eager_one(make: Any) -> None:
    model, x = make()
    x.requires_grad_()
    graphs = _compiled_nodes(model, x)
    found = [_sum(graphs[0]), _sum(graphs[1], is_backward=True)]
    assert sum(one.flops for one in found) == _eager_flops(model, x) > 0
    assert {one.dtype for one in found} == {"fp32"}
    assert [one.recomputed_flops for one in found] == [0, 0]


def test_products_that_inductor_makes_elementwise_count_and_those_that_it_repeats_are_told_apart() -> None:
    model, x = _thin_products()
    x.requires_grad_()
    graphs = _compiled_nodes(model, x)
    assert any(node.target is torch.ops.aten.mul.Tensor and work_of_node(node) != Products() for node in graphs[0])
    forward, backward = _sum(graphs[0]), _sum(graphs[1], is_backward=True)
    assert forward.flops + backward.flops - backward.recomputed_flops == _eager_flops(model, x)


def test_what_a_checkpoint_computes_again_is_told_apart() -> None:
    inner, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Sigmoid()), torch.randn(8, 16)

    class Checkpointed(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result

    plain = _compiled_nodes(inner, x)
    again = _compiled_nodes(Checkpointed(), x)
    without, with_it = (_sum(graphs[1], is_backward=True) for graphs in (plain, again))
    assert without.recomputed_flops == 0
    assert with_it.recomputed_flops == with_it.flops - without.flops > 0


def test_a_size_that_is_a_symbol_is_not_known() -> None:
    graphs = _compiled_nodes(nn.Linear(16, 4), torch.randn(3, 16), dynamic=True)
    products = [work_of_node(node) for nodes in graphs for node in nodes if work_of_node(node) != Products()]
    assert products
    assert set(products) == {None}


def test_a_product_counts_for_the_library_call_and_not_for_the_copy_before_it() -> None:
    nodes = _compiled_nodes(nn.Linear(16, 4), torch.randn(3, 16))[0]
    product = next(node for node in nodes if work_of_node(node) != Products())
    work = work_of_launches([[product], [product, *nodes], []], [False, True, False])
    assert work == [Products(), Products(2 * 3 * 16 * 4, "fp32"), Products()]


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_attention_counts_a_head_of_key_and_value_for_each_of_the_query(name: str) -> None:
    packet = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    query, key = (torch.empty(2, heads, 8, 16, device="meta") for heads in (12, 4))
    product = 2 * 2 * 12 * 8 * 8 * 16
    assert torch_flops(packet.default, (query, key, key), {}, (query,)) == 2 * product
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward")
    assert torch_flops(backward.default, (query, query, key, key), {}, (query, key, key)) == 5 * product


def test_causal_attention_says_what_its_mask_hides() -> None:
    graph = fx.Graph()
    with torch.device("meta"):
        shape = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16)
    places = [graph.placeholder(name) for name in ("query", "key", "value")]
    target = torch.ops.aten._scaled_dot_product_flash_attention.default
    node = graph.call_function(target, (*places, 0.0, True))
    for place in places:
        place.meta["val"] = shape
    node.meta["val"] = (shape,)
    seen = sum(query + 1 for query in range(8))
    whole = 2 * 2 * 2 * 8 * 8 * 16
    assert work_of_node(node) == Products(whole, "bf16", whole - whole * seen // 64)


def _wrapped(wrapper: str) -> tuple[fx.Node, fx.Node]:
    """Return attention as a node of a graph, and the same as torch wraps it within a checkpoint, its results taken."""
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in "qkv"]
    for one in operands:
        one.meta["val"] = torch.empty(2, 4, 16, 8, device="meta")
    state, target = graph.placeholder("state"), torch.ops.aten._scaled_dot_product_efficient_attention.default
    origin = {"nn_module_stack": {"": ("L['self'].attn", nn.Module)}, "stack_trace": 'File "m.py", line 3, in forward'}
    value = target(*(one.meta["val"] for one in operands), None, True)
    plain = graph.call_function(target, (*operands, None, True))
    plain.meta = {**origin, "val": value}
    outer = getattr(torch._prims.rng_prims, wrapper)
    first = (state,) if wrapper == "run_with_rng_state" else ()
    kwargs = {"rng_state": state} if wrapper.startswith("graphsafe") else {}
    node = result = graph.call_function(outer, (*first, target, *operands, None, True), kwargs)
    node.meta["val"] = value
    if wrapper == "run_and_save_rng_state":
        node.meta["val"] = (torch.empty(16, device="meta"), value)
        result = graph.call_function(getitem, (node, 1))
    graph.call_function(getitem, (result, 0)).meta = {**origin, "val": value[0]}
    return plain, node


@pytest.mark.parametrize("wrapper", ["graphsafe_run_with_rng_state", "run_and_save_rng_state", "run_with_rng_state"])
def test_attention_within_a_checkpoint_has_its_work_and_its_module(wrapper: str) -> None:
    plain, node = _wrapped(wrapper)
    for is_backward in (False, True):
        expected = work_of_node(plain, is_backward=is_backward)
        assert expected is not None
        assert expected.flops == 2 * 2 * (2 * 4 * 16 * 16 * 8)
        assert work_of_node(node, is_backward=is_backward) == expected
    assert origin_of(node) == origin_of(plain)
    assert origin_of(node).modules == ("L['self'].attn",)


def test_flex_attention_counts_as_all_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    monkeypatch.delitem(flop_registry, flex_attention, raising=False)  # torch 2.12 and before have no formula
    monkeypatch.delitem(flop_registry, flex_attention_backward, raising=False)
    q, k, v = (torch.empty(2, 4, length, 8, device="meta") for length in (16, 32, 32))
    mask, scale = (torch.empty(1), None), 0.5
    forward = 2 * 2 * (2 * 4 * 16 * 32 * 8)
    assert torch_flops(flex_attention, (q, k, v, mask, scale), {}, None) == forward
    assert torch_flops(flex_attention_backward, (q, k, v, q, None, q, mask, scale), {}, None) == 5 * forward // 2


PRODUCT = 2 * 3 * 4 * 5


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    torch._dynamo.utils.counters.clear()
    loaded["f000000000"] = {
        1: Launch(1, "extern_kernels.mm", True, flops=PRODUCT, dtype="bf16", masked_flops=7, recomputed_flops=20),
        2: Launch(2, "triton_poi_fused_gelu_0", False, flops=0),
        3: Launch(3, "extern_kernels.mm", True),
        4: Launch(4, "triton_tem_fused_mm_1", False),
        5: Launch(5, "extern_kernels.copy", True, flops=0),
    }
    yield
    del loaded["f000000000"]


def _launch(line: int, *path: str, shared: tuple[str, ...] = (), multiplies: bool = True) -> None:
    with annotate(launch_range(LaunchPlace("f000000000", line, path, shared))):
        if multiplies:
            torch.mm(torch.ones(3, 4), torch.ones(4, 5))


class _Counted:
    """Counts what runs within it."""

    def __enter__(self) -> _Counted:
        self._counter = WorkCounter()
        self._counter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._counter.stop()
        self.content: RunWork = self._counter.content()

    def __getitem__(self, path: str) -> RangeWork:
        found = self.content.find(tuple(path.split("/")) if path else ())
        assert found is not None
        return found


def test_a_launch_counts_once_by_its_record_under_its_modules() -> None:
    with _Counted() as counted, annotate("forward"), annotate("model"):
        _launch(1, "model", "h.0", "h.0.mlp")
    for path in ("", "forward", "forward/model", "forward/model/h.0", "forward/model/h.0/h.0.mlp"):
        one = counted[path]
        assert (one.flops_by_dtype, one.needed_flops, one.recomputed_flops) == ({"bf16": PRODUCT}, PRODUCT - 7, 20)
    assert counted.content.model_flops == PRODUCT - 20
    assert counted.content.missing == ()


def test_a_module_named_as_the_one_around_it_has_its_own_place_and_unknown_products_count_as_they_run() -> None:
    with _Counted() as counted, annotate("forward"), annotate("model"):
        _launch(1, "model", "model", "model.layers.0")
    assert counted["forward/model/model/model.layers.0"].flops == PRODUCT
    with _Counted() as counted:
        _launch(3, "h.0")
    assert counted["h.0"].flops_by_dtype == {"fp32": PRODUCT}
    assert counted.content.missing == ()


def test_launches_in_a_row_share_instances_until_another_range_comes_between() -> None:
    with _Counted() as counted, annotate("forward"):
        _launch(1, "h.0", "h.0.a")
        _launch(5, "h.0", "h.0.b", multiplies=False)
        _launch(1, "h.0", "h.0.b")
        _launch(1, shared=("h.0", "h.1"))
        with annotate("aside"):
            pass
        _launch(1, shared=("h.0", "h.1"))
    assert (counted["forward/h.0"].instances, counted["forward/h.0"].flops) == (1, 2 * PRODUCT)
    assert (counted["forward/h.0/h.0.b"].instances, counted["forward/h.0/h.0.b"].flops) == (1, PRODUCT)
    assert counted["forward/shared: h.0 + h.1"].instances == 2
    assert counted["forward"].flops == 4 * PRODUCT


def test_the_flops_of_unequal_instances_are_kept_exactly() -> None:
    with _Counted() as counted, annotate("forward"):
        _launch(1, "h.0")
        _launch(5, "h.1", multiplies=False)
        _launch(1, "h.0")
        _launch(5, "h.1", multiplies=False)
        _launch(5, "h.0", multiplies=False)
    one = counted["forward/h.0"]
    assert (one.instances, one.varies, one.flops_in_step) == (3, True, {"bf16": 2 * PRODUCT})
    assert one.flops_of(6) == {"bf16": 4 * PRODUCT}


def test_what_was_not_counted_of_compiled_code_is_said() -> None:
    with _Counted() as counted:
        _launch(2, "h.0", multiplies=False)
    assert counted.content.missing == (FUSED,)
    with _Counted() as counted:
        _launch(4, "h.0", multiplies=False)
    assert "compiled code" in counted.content.missing
    torch._dynamo.utils.counters["stats"]["unique_graphs"] = 1
    with _Counted() as counted:
        pass
    assert counted.content.missing == (), "its launches are known, and none ran"
    known = dict(loaded)
    loaded.clear()
    with _Counted() as counted:
        pass
    loaded.update(known)
    assert counted.content.missing == ("compiled code",)


def _replay(work: GraphWork | None) -> None:
    with annotate(graph_range("0123456789")):
        for observer in replay_observers:
            observer(work)


def test_a_replay_does_the_launches_that_were_captured_under_their_modules_if_anybody_saw_it() -> None:
    first, second = (launch_range(LaunchPlace("f000000000", 1, ("model", name))) for name in ("h.0", "h.1"))
    copy = launch_range(LaunchPlace("f000000000", 5, ("model", "h.1")))
    with _Counted() as counted, annotate("forward"), annotate("model"):
        for _ in range(2):
            _replay(GraphWork((GraphPart(2, (first,)), GraphPart(2, (second,)), GraphPart(1, (copy,))), {}))
    assert (counted["forward/model/h.0"].flops, counted["forward/model/h.0"].instances) == (PRODUCT, 2)
    assert (counted["forward/model/h.1"].flops, counted["forward/model/h.1"].instances) == (PRODUCT, 2)
    assert counted["forward/model"].flops == 4 * PRODUCT
    assert counted["forward/model"].recomputed_flops == 80
    assert counted.content.missing == ()
    with _Counted() as counted:
        _replay(None)
    assert counted.content.missing == ("replayed CUDA graphs",)
