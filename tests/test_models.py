"""The built-in model: sizes, arithmetic against torch's own, FLOPs against torch's counter, ranges, compiling."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from profkit.models.options import PRESETS, Preset, backward_flops, forward_flops

torch = pytest.importorskip("torch")

from profkit.models.transformer import (  # noqa: E402
    Attention,
    RMSNorm,
    RotaryEmbedding,
    TransformerLM,
    masked_softmax,
    scaled_dot_product_attention,
)
from tests.step_work import flops_by_path  # noqa: E402

TINY = PRESETS["tiny"]


def _on_meta(preset: Preset, context: int) -> Any:
    with torch.device("meta"):
        return TransformerLM(preset, context)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tiny", 3_084_928),
        ("small", 128_625_408),
        ("medium", 423_183_360),
        ("large", 969_411_840),
        ("xl", 1_998_235_200),
        ("2.7B", 3_406_809_600),
    ],
)
def test_parameter_counts(name: str, count: int) -> None:
    model = _on_meta(PRESETS[name], 8)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert PRESETS[name].parameter_count == count


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_flops_equal_torchs_counter(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    preset = PRESETS[name]
    model = _on_meta(preset, 64)
    tokens = torch.zeros(3, 64, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward_flops(preset, 3, 64) == forward.get_total_flops()
    assert backward_flops(preset, 3, 64) == backward.get_total_flops()


def test_payloads_of_ranges_are_the_flops_of_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from profkit import annotation as ranges

    stack: list[str] = []
    seen: dict[str, int | None] = {}

    class Marker:
        def __init__(self, message: str, payload: int | None = None) -> None:
            self.message, self.payload = message, payload

        def __enter__(self) -> None:
            stack.append(self.message)
            seen["/".join(stack)] = self.payload

        def __exit__(self, *exc: object) -> None:
            stack.pop()

    # Decorators made their markers when the module was imported: replace the class that makes them anew per call.
    monkeypatch.setattr(ranges.nvtx, "annotate", Marker)
    model = TransformerLM(TINY, 16)
    with ranges.annotate("forward"):
        model(torch.zeros(2, 16, dtype=torch.long))
    del seen["forward"], seen["forward/embedding"]  # the look-up has no product
    paths = flops_by_path(TINY, 2, 16)
    assert seen == {path: flops for path, flops in paths.items() if path in seen}
    assert len(seen) == 2 * 6 + 1


def test_attention_equals_torchs_own() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 10, 8)
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value, mask), expected)


def test_softmax_survives_large_scores_and_has_torchs_gradient() -> None:
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    scores = torch.tensor([[1000.0, 5.0, 5.0], [999.0, 1000.0, 5.0], [-1000.0, 0.0, 1.0]], dtype=torch.float64)
    ours = scores.clone().requires_grad_()
    theirs = scores.clone().requires_grad_()
    weights = torch.randn(3, 3, dtype=torch.float64)
    (masked_softmax(ours, mask) * weights).sum().backward()
    (theirs.masked_fill(~mask, -torch.inf).softmax(-1) * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_rms_norm_equals_torchs_own_and_works_in_fp32() -> None:
    hidden = torch.randn(2, 5, 16, dtype=torch.bfloat16) * 100
    norm = RMSNorm(16)
    expected = torch.nn.functional.rms_norm(hidden.float(), (16,), eps=1e-5).bfloat16()
    assert norm(hidden).dtype == torch.bfloat16
    torch.testing.assert_close(norm(hidden), expected, rtol=0, atol=0)


def test_rotation_by_its_definition() -> None:
    rotate = RotaryEmbedding(4, 8)
    heads = torch.randn(1, 1, 8, 4)
    pairs = torch.view_as_complex(heads.unflatten(-1, (2, 2)).contiguous())
    turns = torch.outer(torch.arange(8.0), torch.tensor([1.0, 10_000.0**-0.5]))
    expected = torch.view_as_real(pairs * torch.polar(torch.ones(8, 2), turns)).flatten(-2)
    torch.testing.assert_close(rotate(heads), expected)


def test_no_position_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = TransformerLM(TINY, 12)
    tokens = torch.randint(TINY.vocab_size, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % TINY.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_a_shorter_input_than_the_context_is_fine() -> None:
    assert TransformerLM(TINY, 12)(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, TINY.vocab_size)


def test_heads_are_split_and_joined_in_order() -> None:
    torch.manual_seed(0)
    attention = Attention(8, 2, RotaryEmbedding(4, 6))
    hidden = torch.randn(1, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    one_by_one = []
    for head in (slice(0, 4), slice(4, 8)):
        query, key, value = (p(hidden)[..., head] for p in (attention.query, attention.key, attention.value))
        turned = attention.rotate(query[:, None])[:, 0], attention.rotate(key[:, None])[:, 0]
        one_by_one.append(torch.nn.functional.scaled_dot_product_attention(*turned, value, is_causal=True))
    torch.testing.assert_close(attention(hidden, mask), attention.output(torch.cat(one_by_one, -1)))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_checkpoints_change_no_gradient_and_run_layers_again(layers: int) -> None:
    preset = Preset("three", 32, 64, 3, 2, 50)
    models = [TransformerLM(preset, 8), TransformerLM(preset, 8, layers)]
    models[1].load_state_dict(models[0].state_dict())
    tokens, runs = torch.randint(50, (2, 8)), Counter[int]()
    for number, layer in enumerate(models[1].layers):
        layer.register_forward_pre_hook(lambda *_, number=number: runs.update([number]))
    for model in models:
        model(tokens).square().sum().backward()
    for plain, checkpointed in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(plain.grad, checkpointed.grad)
    assert runs == {0: 2, 1: 2, 2: 2}


def test_the_model_compiles_to_one_full_graph() -> None:
    graphs = []

    def backend(graph: Any, _examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = TransformerLM(TINY, 8)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(tokens), model(tokens))
    assert len(graphs) == 1
    assert sum("linear" in str(node.target) for node in graphs[0].graph.nodes) == 2 * 7 + 1


def test_presets_and_flops_need_no_torch() -> None:
    code = "import sys, profkit.models, profkit.models.options, profkit.models.options, profkit.models.options\n"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
