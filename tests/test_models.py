"""The built-in model and its training script: sizes, arithmetic, FLOPs, ranges, steps, options, failures."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import Any

import pytest

from profkit import annotation
from profkit.errors import UsageError
from profkit.models import (
    PRESETS,
    Passes,
    Preset,
    TrainingOptions,
    backward_flops,
    forward_flops,
    parse_options,
)

pytest.importorskip("torch")

import torch

from profkit.models.__main__ import Training, choose_device, explain, main, train
from profkit.models.transformer import (
    Attention,
    RMSNorm,
    RotaryEmbedding,
    TransformerLM,
    masked_softmax,
)
from tests.observed_ranges import NvtxEvent, ObservedRanges, observed_ranges, payloads_by_path

TINY = PRESETS["tiny"]


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
    with torch.device("meta"):
        model = TransformerLM(PRESETS[name], 8)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert PRESETS[name].parameter_count == count


def test_payloads_of_ranges_are_the_flops_of_their_products(nvtx_events: list[NvtxEvent]) -> None:
    """By hand, of 2 × 16 tokens: four projections, two products with the scores, three of the inner width."""
    model = TransformerLM(TINY, 16)
    with annotation.annotate("forward"):
        model(torch.zeros(2, 16, dtype=torch.long))
    seen = payloads_by_path(nvtx_events)
    del seen["forward"], seen["forward/embedding"]  # the look-up has no product
    tokens, width = 2 * 16, TINY.d_model
    scores, projections, wide = 2 * tokens * 16 * width, 8 * tokens * width**2, 6 * tokens * width * TINY.d_ff
    attention = "/attention/scaled dot product attention"
    inside = {"": projections + 2 * scores + wide, "/attention": projections + 2 * scores, "/ffn": wide}
    inside |= {attention: 2 * scores}
    inside |= {f"{attention}/{part}": scores for part in ("computing attention scores", "final matmul")}
    expected = {f"forward/layer {number}{path}": flops for number in range(2) for path, flops in inside.items()}
    assert seen == {**expected, "forward/head": 2 * tokens * width * TINY.vocab_size}


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


def test_no_position_sees_a_later_one_and_a_shorter_input_than_the_context_is_fine() -> None:
    torch.manual_seed(0)
    model = TransformerLM(TINY, 12)
    tokens = torch.randint(TINY.vocab_size, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % TINY.vocab_size
    with torch.no_grad():
        before, after, short = model(tokens), model(changed), model(tokens[:, :5])
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
    torch.testing.assert_close(short, before[:, :5])


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


CPU = torch.device("cpu")


def _options(**options: Any) -> TrainingOptions:
    return TrainingOptions("tiny", **{"batch": 2, "contexts": (16,), "device": "cpu", "warmup_steps": 1, **options})


def _training(**options: Any) -> Training:
    return Training(_options(**options), 16, CPU)


@pytest.fixture
def observed() -> Iterator[ObservedRanges]:
    with observed_ranges() as observer:
        yield observer


def _paths(observed: ObservedRanges) -> list[str]:
    """Return the paths of the ranges in their order, those inside the model left out."""
    return ["/".join(stack) for stack in observed.stacks if "forward" not in stack[:-1]]


PHASES = ["forward", "loss", "backward", "optimizer"]


def _step(path: str) -> list[str]:
    return [path, *(f"{path}/{phase}" for phase in PHASES)]


def test_a_run_has_a_range_for_each_warmup_step_and_each_step_with_its_phases(observed: ObservedRanges) -> None:
    train(_options(steps=2, warmup_steps=2))
    assert _paths(observed) == [path for around in ("warmup", "warmup", "step 0", "step 1") for path in _step(around)]


def test_several_contexts_stand_around_their_steps_and_the_counted_step_comes_last(observed: ObservedRanges) -> None:
    train(_options(steps=1, warmup_steps=0, contexts=(8, 16), count=True))
    contexts = [path for context in (8, 16) for path in (f"context {context}", *_step(f"context {context}/step 0"))]
    counted = [path for context in (8, 16) for path in _step(f"counted step/context {context}")]
    assert _paths(observed) == [*contexts, "counted step", *counted]


def test_phases_carry_the_flops_of_their_matrix_products(nvtx_events: list[NvtxEvent]) -> None:
    _training().step()
    payloads = payloads_by_path(nvtx_events)
    assert payloads["forward"] == forward_flops(PRESETS["tiny"], 2, 16)
    assert payloads["backward"] == backward_flops(PRESETS["tiny"], 2, 16)
    assert payloads["loss"] is payloads["optimizer"] is None


def test_training_lowers_the_loss_and_a_seed_repeats_it() -> None:
    def losses(seed: int) -> list[float | None]:
        training = _training(seed=seed)
        return [training.step() for _ in range(4)]

    first = losses(0)
    assert first == sorted(first, reverse=True)  # type: ignore[type-var]
    assert first[0] > first[-1] + 0.1  # type: ignore[operator]
    assert losses(0) == first
    assert losses(1) != first


def test_without_an_optimizer_weights_stay_and_gradients_go() -> None:
    training = _training(passes="forward-backward")
    before = [parameter.detach().clone() for parameter in training.module.parameters()]
    assert training.step() == training.step()
    assert all(parameter.grad is None for parameter in training.module.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, training.module.parameters(), strict=True))


def test_forward_alone_keeps_no_graph_and_bf16_is_autocast_over_fp32_weights() -> None:
    training, outputs = _training(passes="forward", dtype="bf16"), []
    training.module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    assert training.step() is None
    assert [(output.requires_grad, output.dtype) for output in outputs] == [(False, torch.bfloat16)]
    assert {parameter.dtype for parameter in training.module.parameters()} == {torch.float32}


def test_tf32_needs_a_gpu_and_sets_the_precision_of_products() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="only CUDA GPUs have TF32"):
            choose_device(_options(dtype="tf32", device="auto"))
    before = torch.get_float32_matmul_precision()
    try:
        _training(dtype="tf32")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_ranks_train_the_same_parameters_on_batches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profkit.models.__main__.DistributedDataParallel", lambda module: module)
    first, second = (Training(_options(), 16, CPU, rank=rank, ranks=2) for rank in (0, 1))
    for mine, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert not torch.equal(first.inputs, second.inputs)


def test_contexts_share_parameters_and_optimizer_and_keep_their_own_batch_and_mask() -> None:
    short = Training(_options(), 8, CPU)
    long = Training(_options(), 16, CPU, shared=short)
    assert short.optimizer is long.optimizer
    for mine, other in zip(short.module.parameters(), long.module.parameters(), strict=True):
        assert mine is other
    assert (short.module.causal.shape, long.module.causal.shape) == ((8, 8), (16, 16))
    alone = Training(_options(), 8, CPU)
    assert torch.equal(short.inputs, alone.inputs)
    assert [short.step(), short.step()] == [alone.step(), alone.step()]


@pytest.mark.parametrize(("longest_s", "times"), [(inf, 3), (0.0, 1)])
def test_quick_steps_are_repeated_and_slow_ones_are_not(
    longest_s: float, times: int, observed: ObservedRanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profkit.models.__main__._LONGEST_S", longest_s)
    train(_options(steps=2, rounds=3))
    assert observed.events.count("step 0") == observed.events.count("step 1") == times


@pytest.mark.parametrize("passes", ["forward", "forward-backward", "train"])
def test_options_survive_the_command_line(passes: Passes) -> None:
    options = TrainingOptions("2.7B", 2, (8, 16), passes, "bf16", "default", 3, "cpu", 1, 4, 2, 5, True)
    assert parse_options(options.to_argv()) == options
    assert parse_options(["tiny"]) == TrainingOptions("tiny")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 1, "memory is full"),
        (
            torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
            1,
            "(2 GiB more did not fit); try a smaller",
        ),
        (UsageError("not so"), 2, "not so"),
    ],
)
def test_a_known_failure_is_one_line_with_its_status(error: Exception, status: int, line: str) -> None:
    known = explain(error, _options())
    assert known is not None
    assert known.exit_code == status
    assert line in str(known)
    assert "\n" not in str(known)


def test_a_compiler_that_fails_names_the_mode_and_an_unknown_failure_is_not_explained_away() -> None:
    error = torch._dynamo.exc.TorchDynamoException("no compiler\nmore")
    said = str(explain(error, _options(compile_mode="default")))
    assert said == "--compile default: no compiler; leave --compile out"
    assert explain(KeyError("x"), _options()) is None


@pytest.mark.parametrize(
    ("failure", "status"),
    [(UsageError("not so"), 2), (torch.cuda.OutOfMemoryError("full"), 1)],
    ids=["usage", "memory"],
)
def test_a_failure_ends_the_script_with_one_line(
    failure: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: TrainingOptions) -> None:
        raise failure

    monkeypatch.setattr("profkit.models.__main__.train", fail)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["tiny"])
    assert ended.value.code == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("profkit: ")
