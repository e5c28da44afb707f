"""Counting while a workload runs: torch's own total to the operation, equal results to the bit, ranges on threads."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count  # noqa: E402

from profkit.annotation import annotate  # noqa: E402
from profkit.capture.hooks.backward_nodes import watch_backward_calls  # noqa: E402
from profkit.capture.hooks.hooks import Hooks  # noqa: E402
from profkit.capture.patches import restore  # noqa: E402
from profkit.capture.steps.after import CountedStep  # noqa: E402
from profkit.capture.work import (  # noqa: E402
    Access,
    Instance,
    Work,
    WorkAccount,
    needless,
    operators,
)
from profkit.capture.work.counter import WorkCounter  # noqa: E402
from profkit.models import (  # noqa: E402
    PRESETS,
    backward_flops,
    forward_flops,
)
from profkit.models.transformer import TransformerLM  # noqa: E402
from profkit.run.recording import Order  # noqa: E402
from profkit.run.work import (  # noqa: E402
    DenseTable,
    GivenMask,
    IndependentCalls,
    Padding,
    RepeatedCalls,
    ScoredPositions,
    UnreadGradients,
    read_work,
)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.utils.counters.clear()


def _plain(counter: WorkCounter) -> dict[str, Any]:
    """Return the content of ``work.json`` as JSON has it."""
    content: dict[str, Any] = json.loads(json.dumps(asdict(counter.content())))
    return content


@contextmanager
def counting(*given: Any) -> Iterator[WorkCounter]:
    """Count what runs in the block; nothing fails in that."""
    counter = WorkCounter(*given)
    counter.start()
    try:
        yield counter
    finally:
        counter.stop()
    assert counter.failure is None


def _count(run: Callable[[], Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the rows by path, and all else as the row of the path ``("",)``."""
    with counting() as counter:
        run()
    content = _plain(counter)
    return {("",): content, **{tuple(row["path"]): row for row in content["ranges"]}}


def _convolution() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.ConvTranspose2d(8, 4, 3))
    net(torch.randn(2, 3, 10, 10)).sum().backward()


def _attention() -> None:
    query = torch.randn(2, 4, 16, 8, requires_grad=True)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    functional.scaled_dot_product_attention(query, query, query, attn_mask=torch.zeros(16, 16)).sum().backward()
    layer(torch.randn(2, 5, 32)).sum().backward()


def _inference() -> None:
    with torch.inference_mode():
        nn.Linear(8, 4)(torch.randn(3, 8)) @ torch.randn(4, 2)


def _checkpointed() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    checkpoint(net, torch.randn(3, 8, requires_grad=True), use_reentrant=False).sum().backward()


def _embedding_and_optimizer() -> None:
    embedding, head = nn.Embedding(50, 8), nn.Linear(8, 50)
    optimizer = torch.optim.SGD([*embedding.parameters(), *head.parameters()], 0.1, momentum=0.9, foreach=True)
    tokens = torch.randint(50, (4, 6))
    functional.cross_entropy(head(embedding(tokens)).flatten(0, 1), tokens.flatten()).backward()
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    optimizer.step()


WORKLOADS = [_convolution, _attention, _inference, _checkpointed, _embedding_and_optimizer]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_flops_equal_torchs_counter(workload: Callable[[], None]) -> None:
    with FlopCounterMode(display=False) as torchs:
        workload()
    content = _count(workload)
    row = content[()]
    assert content[("",)]["missing"] == []
    assert row["flops"] == torchs.get_total_flops() > 0
    assert row["flops_by_dtype"] == {"fp32": row["flops"]}
    assert row["other_flops"] > 0 or workload is _inference


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_gradients_of_a_convolution_in_groups_have_the_flops_of_its_forward_pass_each(layer: Any) -> None:
    depthwise, x = layer(8, 8, 3, groups=8), torch.randn(2, 8, 9, 9, requires_grad=True)
    forward = _count(lambda: depthwise(x))[()]["flops"]
    assert forward
    assert _count(lambda: depthwise(x).sum().backward())[()]["flops"] == 3 * forward
    assert _count(lambda: depthwise(x.detach()).sum().backward())[()]["flops"] == 2 * forward


@pytest.mark.parametrize("function", [functional.elu, functional.hardswish, functional.mish])
def test_activations_that_change_their_input_have_a_formula(function: Any) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    content = _count(lambda: function(x * 2, inplace=True).sum().backward())
    assert content[("",)]["missing"] == []


@pytest.mark.parametrize("is_smooth", [False, True])
def test_images_that_are_resized_and_weights_that_are_normalized_have_a_formula(is_smooth: bool) -> None:
    layer, x = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), torch.randn(1, 1, 4, 4, requires_grad=True)

    def run() -> None:
        functional.interpolate(layer(x), (8, 8), mode="bicubic", antialias=is_smooth).sum().backward()

    assert _count(run)[("",)]["missing"] == []


def test_a_recurrent_cell_of_one_kernel_has_a_formula_of_its_gates() -> None:
    cell = torch.ops.aten._thnn_fused_gru_cell.default
    gates = {"input_gates": torch.ones(2, 12), "hidden_gates": torch.ones(2, 12), "hx": torch.ones(2, 4)}
    assert operators.other_flops(cell, gates, [torch.ones(2, 4)]) == 5 * 24


FUNCTIONS = {
    **{one.__name__: one for one in (functional.silu, functional.mish, functional.gelu, functional.softplus)},
    **{one.__name__: one for one in (functional.elu, functional.hardswish, functional.selu, functional.logsigmoid)},
    "glu": functional.glu,
    "softmax": lambda x: x.softmax(-1),
    "rms_norm": lambda x: functional.rms_norm(x, (16,)),
    "group_norm": lambda x: functional.group_norm(x, 4),
    "norm": lambda x: x.norm(dim=-1),
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "shuffle": lambda x: functional.channel_shuffle(x[..., None], 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_the_same_to_the_bit(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 16, dtype=getattr(torch, dtype))

    def gradient() -> Any:
        leaf = x.clone().requires_grad_()
        FUNCTIONS[name](leaf).square().sum().backward()
        return leaf.grad

    plain, found = gradient(), []
    _count(lambda: found.append(gradient()))
    assert torch.equal(found[0], plain)


def test_compiled_code_runs_as_compiled_and_is_named() -> None:
    torch._dynamo.reset()
    before = dict(torch._dynamo.utils.counters["stats"])
    linear = nn.Linear(8, 4)
    compiled = torch.compile(lambda x: functional.gelu(linear(x)).sum(), backend="aot_eager")
    x = torch.randn(3, 8)
    compiled(x).backward()
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before.get("unique_graphs", 0)
    content = _count(lambda: compiled(x).backward())[("",)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before.get("unique_graphs", 0) == frames == 1
    assert content["missing"] == ["compiled code"]
    assert content["model_flops"] == 2 * (2 * 3 * 8 * 4)  # forward, and the weight's gradient


def test_recomputed_work_is_counted_but_not_as_model_flops() -> None:
    content = _count(_checkpointed)
    product = 2 * 3 * 8 * 8
    # Two forward, four backward; again only the first: nothing is wanted of the second's result.
    assert content[()]["flops"] == 7 * product
    assert content[("",)]["model_flops"] == 6 * product


@pytest.mark.parametrize("layers", [1, 2])
def test_a_checkpointed_transformer_equals_the_formula_by_hand(layers: int) -> None:
    preset, batch, context = PRESETS["tiny"], 2, 16
    torch.manual_seed(0)
    tokens = torch.randint(preset.vocab_size, (batch, context))

    def step(checkpoint_layers: int) -> Callable[[], None]:
        model = TransformerLM(preset, context, checkpoint_layers)
        return lambda: model(tokens).sum().backward()

    plain, checkpointed = _count(step(0)), _count(step(layers))
    model_flops = forward_flops(preset, batch, context) + backward_flops(preset, batch, context)
    assert plain[("",)]["model_flops"] == checkpointed[("",)]["model_flops"] == model_flops
    # Each group of layers runs again up to its last product, the result of which nobody wants.
    head, down = (2 * batch * context * preset.d_model * one for one in (preset.vocab_size, preset.d_ff))
    again = forward_flops(preset, batch, context) - head - preset.num_layers // layers * down
    assert checkpointed[()]["recomputed_flops"] == again
    with FlopCounterMode(display=False) as torchs:
        step(layers)()
    assert checkpointed[()]["flops"] == torchs.get_total_flops() == model_flops + again
    assert plain[()]["recomputed_flops"] == 0


@pytest.fixture
def unpatched() -> Iterator[None]:
    yield
    restore()


@pytest.mark.usefixtures("unpatched")
def test_a_second_derivative_is_the_models_work() -> None:
    watch_backward_calls(lambda *_: None, lambda *_: None)
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)

    def step() -> None:
        (gradient,) = torch.autograd.grad((x @ weight).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    content = _count(step)
    assert content[()]["recomputed_flops"] == 0
    assert content[("",)]["model_flops"] == content[()]["flops"] > 0


@pytest.mark.parametrize(("channels", "value_channels"), [(16, 16), (24, 16)])
def test_fused_attention_computes_its_scores_again_in_backward(channels: int, value_channels: int) -> None:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    query, key, value = (
        torch.randn(2, 4, 8, channels),
        torch.randn(2, 4, 6, channels),
        torch.randn(2, 4, 6, value_channels),
    )
    flops = sdpa_backward_flop_count((2, 4, 8, value_channels), query.shape, key.shape, value.shape)
    scores = 2 * 2 * 4 * 8 * 6 * channels
    given = {"query": query, "key": key, "value": value}
    assert operators.recomputed_flops(backward, given, flops) == scores
    assert operators.recomputed_flops(torch.ops.aten._scaled_dot_product_flash_attention, given, flops) == 0


def test_ranges_nest_and_instances_that_differ_say_so() -> None:
    def run() -> None:
        x = torch.ones(4, 4)
        for size in (4, 2):
            with annotate("outer"), annotate("inner"):
                x[:size] @ x
        with annotate("optimizer"):
            x @ x

    rows = _count(run)
    inner = rows[("outer", "inner")]
    assert (inner["flops"], inner["instances"], inner["varies"]) == ((128 + 64) // 2, 2, True)
    assert rows[("outer",)]["flops"] == 96
    assert rows[("optimizer",)]["flops"] == 128
    assert not rows[("optimizer",)]["varies"]
    assert rows[("",)]["model_flops"] == 128 + 64


def test_a_line_has_the_operators_that_it_calls_by_kind_of_range() -> None:
    """But for those of backward and of the optimizer; views do nothing."""
    softmax = nn.Softmax(-1)

    def run() -> None:
        x = torch.ones(4, 4)
        for layer in range(3):
            with annotate("forward"), annotate(f"layer {layer}"):
                y = softmax(x @ x.T)
        with annotate("backward"):
            y @ y
        with annotate("optimizer"):
            y @ y
        y.double()

    found = {(line["operator"], line["dtype"], tuple(line["path"])): line for line in _count(run)["",]["lines"]}
    inside = ("forward", "layer *")
    assert [*found] == [
        ("ones", "float32", ()),
        ("mm", "float32", inside),
        ("_softmax", "float32", inside),
        ("_to_copy", "float64", ()),
    ]
    product = found["mm", "float32", inside]
    assert (product["count"], product["flops"], product["bytes"]) == (3, 3 * 128, 3 * 3 * 64)
    assert product["line"] == found["_softmax", "float32", inside]["line"] == found["ones", "float32", ()]["line"] + 3
    assert {(line["file"], line["function"].rpartition(".")[2]) for line in found.values()} == {(__file__, "run")}


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ((3, 5), (20, 16, 14)),  # with what may be the longer sample's own end
        ((0, 4), (20, 20, 17)),
        ((1, 1), (20, 20, 20)),  # all end with one token, as the end of a text
        ((10, 10), (20, 20, 20)),
    ],
)
def test_without_a_mask_padding_is_what_all_samples_end_with(ends: tuple[int, int], found: tuple[int, ...]) -> None:
    words, kinds = nn.Embedding(40, 4), nn.Embedding(2, 4)
    tokens = torch.arange(1, 21).reshape(2, 10)
    for row, count in enumerate(ends):
        tokens[row, 10 - count :] = 0
    with counting() as counter, annotate("forward"), annotate("model"):
        words(tokens) + kinds(torch.zeros_like(tokens))
        words(tokens[0])
    assert counter.content().padding == Padding(*found)
    with counting() as counter:
        counter.model_called({"attention_mask": torch.ones(2, 10, dtype=torch.bool)})
        with annotate("forward"), annotate("model"):
            words(tokens)
    assert counter.content().padding == Padding(20, 20, 20), "a mask says so itself"


def test_padding_is_what_no_sample_of_a_batch_reaches() -> None:
    """Seen where a module is called, with masks of any side and type; looking does no work that counts."""
    with counting() as counter:
        for mask in (torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([[False] * 3 + [True] * 3])):
            counter.model_called({"attention_mask": mask})
        for other in (None, torch.ones(2, 2), torch.ones(2, 2, 2, dtype=torch.bool)):
            counter.model_called({"attention_mask": other})
        counter.model_called({})
    content = _plain(counter)
    assert content["padding"] == {"positions": 8 + 6, "in_longest": 4 + 3, "used": 3 + 3}
    assert {"any", "ne", "sum", "stack"}.isdisjoint(line["operator"] for line in content["lines"])
    assert _count(lambda: None)["",]["padding"] is None


def test_convolutions_of_signals_and_volumes_and_norms_of_each_image_are_told_by_their_shapes() -> None:
    images, volumes = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8, 8)
    with counting() as counter:
        functional.conv1d(torch.randn(2, 3, 8), torch.randn(3, 3, 3))
        for dimensions, batch in ((2, images), (3, volumes)):
            convolve = getattr(functional, f"conv{dimensions}d")
            norm = functional.instance_norm(convolve(batch, torch.randn(3, 3, *[3] * dimensions)))
            functional.batch_norm(norm, torch.zeros(3), torch.ones(3), training=True)
    called = Counter(line.operator for line in counter.content().lines)
    names = ("convolution", "convolution1d", "convolution3d", "instance_norm", "native_batch_norm")
    assert [called[name] for name in names] == [1, 1, 1, 1, 1]


def test_masks_of_attention_are_causal_or_empty_or_needed() -> None:
    """As what is seen, or as numbers that are added, of one batch or all; looking does no work that counts."""
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    least = torch.finfo(torch.float32).min
    padded = causal.expand(2, 1, 6, 6).clone()
    padded[1, ..., 4:] = False
    cases = {
        "causal": [causal, causal.expand(2, 3, 6, 6), torch.zeros(6, 6).masked_fill(~causal, least)],
        "empty": [torch.zeros(6, 6), torch.ones(2, 1, 6, 6, dtype=torch.bool)],
        "needed": [padded, torch.zeros(6, 6).masked_fill(~causal, -1.0), torch.ones(6, 6).masked_fill(~causal, least)],
        "none": [None],
    }
    query = torch.randn(2, 3, 6, 8, requires_grad=True)
    with counting() as counter:
        for name, given_masks in cases.items():
            with annotate(name):
                for mask in given_masks:
                    functional.scaled_dot_product_attention(query, query, query, mask).sum().backward()
    assert counter.content().given_masks == (
        GivenMask("causal", calls=3, causal=3, empty=0),
        GivenMask("empty", calls=2, causal=0, empty=2),
        GivenMask("needed", calls=3, causal=0, empty=0),
    )
    assert {"tril", "le", "all"}.isdisjoint(line.operator for line in counter.content().lines)


def test_positions_that_the_loss_ignores_are_those_of_the_module_that_scored_them() -> None:
    """By torch's own number for it or another; a loss of pictures has no such module, nor has one of other classes."""
    states, weight = torch.randn(2, 10, 8), torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (2, 10))
    targets[:, :4] = -100
    with counting() as counter:
        for head, ignored in (("lm_head", -100), ("padded", 0)):
            with annotate(head):
                scores = states @ weight.t()
            given = targets.where(targets != -100, ignored).clamp(min=ignored)
            functional.cross_entropy(scores.flatten(0, 1), given.flatten(), ignore_index=ignored).backward()
        functional.cross_entropy(torch.randn(2, 50, 4), torch.zeros(2, 4, dtype=torch.long))
        functional.cross_entropy(torch.randn(4, 7), torch.zeros(4, dtype=torch.long))
    counted = int((targets > 0).sum())
    assert counter.content().scored_positions == (
        ScoredPositions("lm_head", positions=20, counted=12),
        ScoredPositions("padded", positions=20, counted=counted),
    )


def test_a_mask_that_is_too_large_to_look_at_counts_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needless, "_LARGEST", 16)
    looked = needless.Masks()
    for size in (4, 6):
        looked.add_attention("attn", torch.ones(size, size, dtype=torch.bool).expand(2, 3, size, size))
    assert [*looked.given()] == [GivenMask("attn", calls=2, causal=0, empty=1)]


def test_a_range_that_was_open_before_counting_closes_without_harm() -> None:
    counter = WorkCounter()
    with annotate("before"):
        counter.start()
        torch.ones(2, 2) @ torch.ones(2, 2)
    with annotate("after"):
        torch.ones(2, 2) @ torch.ones(2, 2)
        counter.stop()
    rows = {tuple(row["path"]): row["flops"] for row in _plain(counter)["ranges"]}
    assert rows == {(): 32, ("after",): 16}


def test_a_range_of_another_thread_lies_in_those_of_the_thread_that_counts() -> None:
    """As a backward pass on an autograd thread has it: the mode is taken along, the open ranges are another's."""

    def backward() -> None:
        with annotate("layer"):
            counter.__torch_dispatch__(torch.ops.aten.mm.default, (), (torch.ones(2, 2), torch.ones(2, 2)))

    with counting() as counter, annotate("backward"):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert [tuple(row["path"]) for row in _plain(counter)["ranges"]] == [(), ("backward",), ("backward", "layer")]


@pytest.mark.gpu
def test_the_autograd_thread_of_a_gpu_is_counted() -> None:
    threads = set()

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            threads.add(threading.get_ident())
            with annotate("marked"):
                return gradient @ gradient

    x = torch.ones(4, 4, device="cuda", requires_grad=True)

    def run() -> None:
        with annotate("backward"):
            Marked.apply(x @ x).sum().backward()

    rows = _count(run)
    assert threads
    assert threading.get_ident() not in threads
    assert rows[("backward", "marked")]["flops"] == 128
    assert rows[("backward",)]["flops"] == 4 * 128


def test_causal_attention_as_needed() -> None:
    query = torch.randn(2, 4, 8, 16)
    packet = torch.ops.aten._scaled_dot_product_flash_attention
    given = {"query": query, "key": query[:, :, :6], "is_causal": True}
    flops = 2 * 2 * 2 * 4 * 8 * 6 * 16
    seen = 1 + 2 + 3 + 4 + 5 + 6 + 6 + 6
    assert operators.masked_flops(packet, given, flops) == flops - 2 * 2 * 2 * 4 * seen * 16
    assert operators.masked_flops(packet, {**given, "is_causal": False}, flops) == 0


def test_bytes_of_views_and_of_rows_that_are_looked_up() -> None:
    table, index = torch.randn(1000, 4), torch.tensor([3, 5])

    def run() -> None:
        wide = torch.randn(6, 4)  # made inside
        first, second = wide.split(3)
        kept.append(first + second)
        kept.append(functional.embedding(index, table))
        kept.append(table.t()[:, :2] * 1)

    kept: list[Any] = []
    results = 3 * 4 * 4 + 2 * 4 * 4 + 4 * 2 * 4
    assert _count(run)[()]["least_bytes"] == 2 * 4 * 4 + 2 * 8 + 2 * 4 * 4 + results


@pytest.mark.parametrize(("is_scaled", "passes"), [(False, 5), (True, 6)])
def test_a_fused_step_writes_gradients_only_where_it_scales_them(is_scaled: bool, passes: int) -> None:
    """Parameters, gradients and momenta are read, parameters and momenta written; the schema says all three are."""
    tensors = [[torch.ones(1000)] for _ in range(3)]
    one = torch.ones(())
    settings = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
    flags = dict.fromkeys(("nesterov", "maximize", "is_first_step"), False)
    scale = {"grad_scale": one, "found_inf": one * 0} if is_scaled else {}
    counted = _count(lambda: torch.ops.aten._fused_sgd_(*tensors, **settings, **flags, **scale))
    assert counted[()]["least_bytes"] == 4 * (passes * 1000 + (2 if is_scaled else 0))


def test_an_operator_without_a_formula_or_whose_formula_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _count(lambda: torch.linalg.qr(torch.randn(4, 4)))[("",)]["missing"] == ["aten::linalg_qr"]

    def fails(*_: Any, **__: Any) -> int:
        raise AssertionError

    monkeypatch.setitem(operators.torch_flops.__globals__["flop_registry"], torch.ops.aten.mm, fails)
    content = _count(lambda: torch.ones(2, 2) @ torch.ones(2, 2))[("",)]
    assert content["missing"] == ["aten::mm (AssertionError in torch's formula)"]


def test_communication_counts_as_bytes_and_not_as_flops() -> None:
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        gradient = torch.ones(4, 4)
        rows = _count(lambda: distributed.all_reduce(gradient))
    finally:
        distributed.destroy_process_group()
    assert rows[("",)]["missing"] == []
    assert (rows[()]["other_flops"], rows[()]["least_bytes"]) == (0, 2 * 4 * 4 * 4)


def test_a_gradient_that_counting_would_change_is_left_alone_and_nothing_counts() -> None:
    counter = WorkCounter()
    plain, x = (torch.rand(7, 64, generator=torch.manual_seed(0)).requires_grad_() for _ in range(2))
    plain.prod(-1).sum().backward()
    counter.start()
    counter.backward_begins()  # nothing has run that forbids it
    y = x.prod(-1).sum()
    counter.backward_begins()
    y.backward()
    counter.stop()
    assert counter.failure == "counting changes the gradient of prod"
    assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_ctc_loss_is_that_of_numbers_as_without_counting(*, by_name: bool) -> None:
    """Its kernels on a GPU refuse lengths that are tensors on the host, which torch makes numbers of without a mode."""
    scores = torch.randn(20, 3, 5, generator=torch.manual_seed(0)).log_softmax(-1).requires_grad_()
    targets, lengths = torch.ones(3, 6, dtype=torch.long), (torch.full((3,), 20), torch.full((3,), 6))
    given = dict(zip(("input_lengths", "target_lengths"), lengths, strict=True)) if by_name else {}
    seen: list[str] = []

    class Counter(WorkCounter):
        def ended(self, begun: None, func: Any, *more: Any) -> None:
            seen.append(str(func))
            super().ended(begun, func, *more)

    counter, torchs = Counter(), torch.ctc_loss
    counter.start()
    loss = functional.ctc_loss(scores, targets, *(() if by_name else lengths), **given)
    (counted,) = torch.autograd.grad(loss, scores)
    counter.stop()
    (plain,) = torch.autograd.grad(functional.ctc_loss(scores, targets, *lengths), scores)
    assert counter.failure is None
    assert counter.content().padding == Padding(positions=3 * 20, in_longest=3 * 20, used=3 * 20)
    assert torch.ctc_loss is torchs
    assert {"aten._ctc_loss.default", "aten._ctc_loss_backward.default"} <= set(seen)
    assert torch.equal(counted, plain)


@pytest.mark.gpu
def test_a_ctc_loss_with_lengths_on_the_host_is_counted_on_a_gpu() -> None:
    scores = torch.randn(20, 3, 5, device="cuda").log_softmax(-1).requires_grad_()
    targets, lengths = torch.ones(3, 6, dtype=torch.long, device="cuda"), (torch.full((3,), 20), torch.full((3,), 6))
    with counting():
        loss = functional.ctc_loss(scores, targets, *lengths)
        loss.backward()
    assert torch.equal(loss, functional.ctc_loss(scores, targets, *lengths))


@pytest.mark.parametrize("as_numbers", [False, True])
def test_the_lengths_of_a_ctc_loss_say_what_is_padding(*, as_numbers: bool) -> None:
    scores, targets = torch.randn(20, 2, 5).log_softmax(-1), torch.ones(2, 3, dtype=torch.long)
    lengths = torch.tensor([16, 8]), torch.tensor([3, 2])
    with counting() as counter:
        functional.ctc_loss(scores, targets, *([one.tolist() for one in lengths] if as_numbers else lengths))
        functional.ctc_loss(scores[:, 0], targets[0], torch.tensor(20), torch.tensor(3))  # of one sample
    assert counter.content().padding == Padding(positions=40, in_longest=32, used=24)


def test_an_error_while_counting_is_noted_and_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profkit.capture.work.counter.describe_call", lambda *_: 1 // 0)
    counter = WorkCounter()
    counter.start()
    ones = torch.ones(3)
    counter.stop()
    assert ones.sum() == 3
    assert counter.failure == "counting ones failed (ZeroDivisionError: integer division or modulo by zero)"


def _hooks(*, has_captured: bool = False) -> Hooks:
    hooks = Hooks(None, None)  # type: ignore[arg-type]  # nobody is told of steps here
    hooks.steps.has_captured = has_captured
    return hooks


@pytest.mark.parametrize(
    ("forbids", "reason"),
    [
        ("several_ranks", "several ranks need --flops"),
        ("count_compiled_graphs", "compiled code needs --flops"),
        ("graphs", "CUDA graphs need --flops"),
    ],
)
def test_what_forbids_counting_is_said_and_an_option_counts_all_the_same(
    forbids: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks = _hooks(has_captured=forbids == "graphs")
    if forbids != "graphs":
        monkeypatch.setattr(f"profkit.capture.steps.after.{forbids}", lambda: True)
    plain = CountedStep(Order(str(tmp_path), "kineto", 2, 2, flops="plain"), hooks)
    plain.begin(None)
    assert (plain.is_on, plain.why_not) == (False, reason)
    asked = CountedStep(Order(str(tmp_path), "kineto", 2, 2, flops="any"), hooks)
    asked.begin(None)
    assert asked.is_on
    torch.ones(2, 3) @ torch.ones(3, 4)
    asked.end()
    assert asked.why_not is None
    assert read_work(tmp_path / "work.json").model_flops == 2 * 2 * 3 * 4


def test_a_step_that_never_came_or_did_not_end_is_not_counted(tmp_path: Path) -> None:
    step = CountedStep(Order(str(tmp_path), "kineto", 2, 2, flops="plain"), _hooks())
    assert step.why_not == "the program ended too soon"
    step.begin(None)
    torch.ones(2, 3) @ torch.ones(3, 4)
    step.drop()
    step.end()
    assert not list(tmp_path.iterdir())
    assert step.why_not is not None


@pytest.mark.parametrize("steps_table", [True, False])
def test_gradients_that_no_optimizer_reads_are_counted_with_what_nobody_needs_before_them(*, steps_table: bool) -> None:
    table, tied = nn.Embedding(100, 8), nn.Embedding(50, 8)
    blocks, head = [nn.Linear(8, 8) for _ in range(2)], nn.Linear(8, 50, bias=False)
    head.weight = tied.weight
    modules = {"table": table, "blocks.0": blocks[0], "blocks.1": blocks[1], "head": head, "tied": tied}
    model = nn.ModuleDict({name.replace(".", "_"): module for name, module in modules.items()})
    names = {module: name for name, module in modules.items()}
    stepped = [one for module in (blocks[1], *[table] * steps_table) for one in module.parameters()]
    with counting({0: stepped}, model.parameters()) as counter:
        x = torch.tensor([[1, 2, 2]])
        with annotate("forward"):
            with annotate("tied"):
                looked_up = tied(x)
            for name in list(modules)[:-1]:
                with annotate(name):
                    x = modules[name](x)
        with annotate("backward"), annotate("table"):
            (x.sum() + looked_up.sum()).backward()
        counter.optimizer_stepped(0, [model], names.get, set(map(id, stepped)))
    work = counter.content()
    assert work.tables == (DenseTable("table", rows=100, used=3, bytes=100 * 8 * 4),)
    of_blocks = {"early": 0, "first": 0} if steps_table else {"early": 1, "first": 1}
    first_block = UnreadGradients("blocks.*", 2, 72 * 4, instances=2, unread=1, **of_blocks)
    early_table = UnreadGradients("table", 1, 100 * 8 * 4, instances=1, unread=1, early=1)
    shared = UnreadGradients("tied", 1, 50 * 8 * 4, instances=1, unread=1, early=1)
    of_head = UnreadGradients("head", 1, 50 * 8 * 4, instances=1, unread=1, early=0)
    assert work.unread_gradients == (shared, *[early_table] * (not steps_table), first_block, of_head)


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("gradients", ["new", "zeroed", "summed", "frozen"])
def test_gradients_that_are_thrown_away_before_their_own_optimizers_step_are_counted(
    gradients: str, *, is_detached: bool
) -> None:
    """A generator's and a discriminator's; gradients that are set to zero, or summed up over steps, may be read."""
    makes, judges = nn.Linear(4, 6), nn.Linear(6, 1)
    names = {makes: "layer 0", judges: "layer 0"}
    models = {"makes": nn.Sequential(makes), "judges": nn.Sequential(judges)}
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.1) for name, model in models.items()}
    ranges = {**names, **{model: name for name, model in models.items()}}

    def call(name: str, x: torch.Tensor) -> torch.Tensor:
        with annotate("forward"), annotate(name), annotate("layer 0"):
            return models[name](x)  # type: ignore[no-any-return]

    def step(counter: WorkCounter | None) -> None:
        made = call("makes", torch.ones(2, 4))
        for name in ("judges", "makes"):
            if gradients != "summed":
                optimizers[name].zero_grad(set_to_none=gradients != "zeroed")
            judges.requires_grad_(gradients != "frozen" or name == "judges")
            loss = call("judges", made.detach() if is_detached and name == "judges" else made).sum()
            with annotate("backward"):
                loss.backward(retain_graph=True)
            optimizers[name].step()
            if counter is not None:
                counter.optimizer_stepped(id(optimizers[name]), [*models.values()], ranges.get, set())

    step(None)
    every = {id(optimizer): optimizer.param_groups[0]["params"] for optimizer in optimizers.values()}
    with counting(every, [one for model in models.values() for one in model.parameters()]) as counter:
        step(counter)
    work = counter.content()
    assert work.optimizer_steps == 2
    found = {(one.before, one.model, one.module): one for one in work.unread_gradients}
    is_known = gradients in ("new", "frozen")
    of_maker = {(0, "makes", "makes"), (0, "makes", "layer *"), (0, "judges", "judges"), (0, "judges", "layer *")}
    of_judge = {(1, "judges", "layer *")} if gradients == "new" else set()
    assert set(found) == ((of_judge | (set() if is_detached else of_maker)) if is_known else set())
    if (0, "makes", "layer *") in found:
        layer = {"instances": 1, "unread": 1, "before": 0, "model": "makes"}
        assert found[0, "makes", "layer *"] == UnreadGradients("layer *", 2, 30 * 4, early=1, **layer)
        assert found[0, "judges", "layer *"].first == 1


@pytest.mark.parametrize("calls", [10, 2])
@pytest.mark.parametrize("needs", ["nothing", "the last", "backward between"])
def test_calls_of_a_module_that_need_no_other_are_found(needs: str, calls: int) -> None:
    module = nn.Linear(4, 4)
    x, kept = torch.randn(10, 4), torch.zeros(10, 4)
    with counting() as counter:
        hidden = x[0]
        for at in range(calls):
            with annotate("forward"), annotate("model"), annotate("encoder 0"):
                hidden = module(hidden if needs == "the last" else x[at].relu())
                kept[at] = hidden
            if needs == "backward between":
                with annotate("backward"):
                    hidden.sum().backward()
    found = counter.content().independent_calls
    assert found == ((IndependentCalls("model", calls),) if needs == "nothing" else ())


@pytest.mark.parametrize("needs", ["nothing", "the last"])
def test_calls_of_a_lists_modules_that_need_no_other_are_found(needs: str) -> None:
    """Each expert of two layers is called once, and the second layer needs the first."""
    layers = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(10)) for _ in range(2))
    x = torch.randn(10, 4)
    with counting(None, layers.parameters()) as counter, annotate("forward"), annotate("model"):
        for at, experts in enumerate(layers):
            with annotate(f"layers.{at}"):
                given, made = x, []
                for number, expert in enumerate(experts):
                    with annotate(f"layers.{at}.experts.{number}"):
                        made.append(expert(given))
                    given = made[-1] if needs == "the last" else x
                x = torch.stack(made).sum(0)
    expected = (IndependentCalls("layers.*.experts.*", 10),)
    assert counter.content().independent_calls == (expected if needs == "nothing" else ())


class Turns(nn.Module):  # type: ignore[misc]
    """Computes in a loop, with one weight a turn."""

    def __init__(self, needs: str, turns: int) -> None:
        super().__init__()
        self.needs = needs
        self.weights = nn.Parameter(torch.randn(turns, 4, 4))
        self.act = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        total, last = torch.zeros(()), torch.zeros(2, 4)
        for at, weight in enumerate(self.weights):
            given = x[:, at] + last if self.needs == "the last" else x[:, at] * 2
            y = given * 3 if self.needs == "no product" else given @ weight
            y = self.act(y)
            if self.needs == "the last":
                last = y
            made.append(y.relu())
            total = total + y.sum()
        return torch.stack(made).sum() + total


@pytest.mark.parametrize(
    ("needs", "turns", "found"),
    [("nothing", 9, 9), ("nothing", 7, 0), ("the last", 9, 0), ("no product", 23, 0), ("no product", 24, 24)],
)
def test_loops_of_which_no_turn_needs_another_are_found(needs: str, turns: int, found: int) -> None:
    """What adds up over the turns needs the one before, and the loop does not."""
    module = Turns(needs, turns)
    with counting(None, module.parameters()) as counter:
        for _ in range(2):
            with annotate("forward"), annotate("model"), annotate("layers.0"):
                loss = module(torch.randn(2, turns, 4, requires_grad=True))
            with annotate("backward"):
                loss.backward()
    loops = counter.content().independent_turns
    assert [(loop.module, loop.turns, loop.function) for loop in loops] == (
        [("layers.*", found, "Turns.forward")] if found else []
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [("the same", True), ("halves", False), ("changed", False), ("another pass", False), ("with dropout", False)],
)
def test_calls_of_a_module_on_the_same_input_are_found(given: str, found: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5 if given == "with dropout" else 0.0))
    x, losses = torch.randn(8, 4), []
    with counting(None, module.parameters()) as counter:
        for at in range(2):
            with annotate("forward"), annotate("model"), annotate("trunk"):
                losses.append(module(x[4 * at : 4 * at + 4] if given == "halves" else x).sum())
            if given == "changed":
                x.add_(1)
            if given == "another pass":
                with annotate("backward"):
                    losses[-1].backward()
    assert counter.content().repeated_calls == ((RepeatedCalls("model", 2),) if found else ())


@pytest.mark.parametrize(("sizes", "found"), [((8, 8), 1), ((8, 6), None), ((8, 8, 6, 6, 6), 2)])
def test_images_of_several_sizes_are_not_stacked(sizes: tuple[int, ...], found: int | None) -> None:
    module = nn.Conv2d(3, 4, 2)
    with counting() as counter:
        for size in sizes:
            with annotate("forward"), annotate("model"), annotate("embedding"):
                module(torch.randn(2, 3, size, size))
    calls = () if found is None else (IndependentCalls("model", len(sizes), found),)
    assert counter.content().independent_calls == calls


def test_parameters_that_nobody_can_follow_are_a_reason_to_count_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no storage")

    hooks, optimizer = _hooks(), torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    hooks.optimizers.note_step(optimizer)
    monkeypatch.setattr("profkit.capture.work.needless.storage_of", fail)
    step = CountedStep(Order(str(tmp_path), "kineto", 2, 2, flops="plain", annotate=True), hooks)
    step.begin(None)
    assert (step.is_on, step.why_not) == (False, "RuntimeError: no storage")
    assert not hooks.is_recording
    step.end()
    assert not list(tmp_path.iterdir())


def test_modes_of_the_program_stay_as_it_puts_them_on_and_takes_them_off(tmp_path: Path) -> None:
    step = CountedStep(Order(str(tmp_path), "kineto", 2, 2, flops="plain"), _hooks())
    with FlopCounterMode(display=False):
        step.begin(None)
        assert (step.is_on, step.why_not) == (False, "the program has a TorchDispatchMode on")
    step.begin(None)
    with FlopCounterMode(display=False) as torchs:
        torch.ones(2, 3) @ torch.ones(3, 4)
        step.end()
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert torchs.get_total_flops() == 2 * (2 * 2 * 3 * 4)
    assert step.why_not is None
    assert read_work(tmp_path / "work.json").model_flops == 2 * 2 * 3 * 4
    assert not _get_current_dispatch_mode_stack()


def test_products_of_groups_count_as_one_product_of_all_their_rows() -> None:
    rows, experts = torch.randn(10, 16, dtype=torch.bfloat16), torch.randn(3, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([3, 5, 10], dtype=torch.int32)
    grouped = torch.ops.aten._grouped_mm.default
    assert operators.torch_flops(grouped, (rows, experts), {"offs": ends}, None) == 2 * 10 * 16 * 8
    assert operators.torch_flops(grouped, (rows.T, torch.randn(10, 8)), {"offs": ends}, None) == 2 * 16 * 10 * 8
    assert operators.torch_flops(grouped, (torch.randn(3, 4, 16), experts), {}, None) == 3 * 2 * 4 * 16 * 8


# -- what ranges do and must move ------------------------------------------------------------------------------------


def _bytes(work: dict[tuple[str, ...], list[Work]], *path: str) -> int:
    (one,) = work[path]
    return one.least_bytes


def _whole(buffer: str, size: int = 100) -> Access:
    return Access(buffer, "whole", size, size)


def test_a_result_that_nobody_reads_and_that_is_gone_is_not_needed() -> None:
    account = WorkAccount()
    account.move(account.step, [_whole("x")], [_whole("y")])
    assert _bytes(account.by_path(lambda _key: False)) == 100


def test_a_tensor_overwritten_as_a_whole_is_not_read() -> None:
    account = WorkAccount()
    first, second = account.open("first", account.step), account.open("second", account.step)
    account.move(first, [], [_whole("x")])
    account.move(second, [], [_whole("x")])
    work = account.by_path(lambda _key: True)
    assert (_bytes(work, "first"), _bytes(work, "second"), _bytes(work)) == (0, 100, 100)


ACCESS = st.tuples(st.integers(0, 5), st.integers(0, 3))
EVENT = st.one_of(
    st.sampled_from(["open", "close"]), st.tuples(st.lists(ACCESS, max_size=3), st.lists(ACCESS, max_size=2))
)
# Part 0 is the whole buffer, the others lie within it.
PART_BYTES = (100, 30, 50, 70)


def _access(pair: tuple[int, int]) -> Access:
    return Access(pair[0], pair[1], PART_BYTES[pair[1]], 100)


def _play(events: list[Any]) -> tuple[WorkAccount, dict[Instance, list[Instance]]]:
    """Run the events; every operator gets an instance of its own, so that it can be told from its range."""
    account = WorkAccount()
    inside: dict[Instance, list[Instance]] = {}
    stack = [account.step]
    for event in events:
        if event == "close":
            stack[1:] = stack[1:-1]
        else:
            child = account.open(f"{len(account.instances)}", stack[-1])
            inside.setdefault(stack[-1], []).append(child)
            if event == "open":
                stack.append(child)
            else:
                account.move(child, map(_access, event[0]), map(_access, event[1]))
    return account, inside


@given(st.lists(EVENT, max_size=30), st.sets(st.integers(0, 5)))
def test_a_range_moves_no_more_than_the_ranges_and_operators_inside_it(events: list[Any], alive: set[int]) -> None:
    account, inside = _play(events)
    is_alive: Callable[[Any], bool] = alive.__contains__
    account.by_path(is_alive)
    for around, children in inside.items():
        assert around.work.least_bytes <= sum(child.work.least_bytes for child in children)


@given(st.lists(EVENT, max_size=30), st.sets(st.integers(0, 5)))
def test_a_buffer_moves_in_and_out_at_most_once(events: list[Any], alive: set[int]) -> None:
    account, _ = _play(events)
    account.by_path(alive.__contains__)
    assert all(0 <= one.work.least_bytes <= 6 * 2 * 100 for one in account.instances)
