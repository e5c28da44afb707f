"""A built-in model's training script: its steps and ranges, its command line, and what it says of failures."""

from __future__ import annotations

import sys
from math import inf
from typing import Any

import pytest

from profkit import annotation
from profkit.annotation import RangeObserver
from profkit.errors import UsageError
from profkit.models.options import PRESETS, Passes, TrainingOptions, backward_flops, forward_flops, parse_options

torch = pytest.importorskip("torch")

from profkit.models.__main__ import Training, choose_device, explain, main, train  # noqa: E402

CPU = torch.device("cpu")


def _options(**options: Any) -> TrainingOptions:
    return TrainingOptions("tiny", **{"batch": 2, "contexts": (16,), "device": "cpu", "warmup_steps": 1, **options})


def _training(**options: Any) -> Training:
    return Training(_options(**options), 16, CPU)


class Paths(RangeObserver):
    """The paths of the ranges as they open, those inside the model left out."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.paths: list[str] = []

    def opening(self, name: str) -> None:
        self.stack.append(name)
        if "forward" not in self.stack[:-1]:
            self.paths.append("/".join(self.stack))

    def closed(self) -> None:
        self.stack.pop()


@pytest.fixture
def opened() -> Any:
    observer = Paths()
    annotation.observe_ranges(observer)
    yield observer.paths
    annotation.ignore_ranges(observer)


PHASES = ["forward", "loss", "backward", "optimizer"]


def _step(path: str) -> list[str]:
    return [path, *(f"{path}/{phase}" for phase in PHASES)]


def test_a_run_has_a_range_for_each_warmup_step_and_each_step_with_its_phases(opened: list[str]) -> None:
    train(_options(steps=2, warmup_steps=2))
    assert opened == [path for around in ("warmup", "warmup", "step 0", "step 1") for path in _step(around)]


def test_several_contexts_stand_around_their_steps_and_the_counted_step_comes_last(opened: list[str]) -> None:
    train(_options(steps=1, warmup_steps=0, contexts=(8, 16), count=True))
    contexts = [path for context in (8, 16) for path in (f"context {context}", *_step(f"context {context}/step 0"))]
    counted = [path for context in (8, 16) for path in _step(f"counted step/context {context}")]
    assert opened == [*contexts, "counted step", *counted]


def test_phases_carry_the_flops_of_their_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = {}

    class Marker:
        def __init__(self, message: str, payload: int | None = None) -> None:
            payloads[message] = payload

        def __enter__(self) -> None: ...

        def __exit__(self, *exc: object) -> None: ...

    monkeypatch.setattr(annotation.nvtx, "annotate", Marker)
    _training().step()
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


def test_forward_alone_has_no_loss_and_keeps_no_graph() -> None:
    training = _training(passes="forward")
    outputs = []
    training.module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    assert training.step() is None
    assert not any(output.requires_grad for output in outputs)


def test_bf16_is_autocast_over_fp32_weights() -> None:
    training = _training(dtype="bf16")
    outputs = []
    training.module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.dtype))
    training.step()
    assert outputs == [torch.bfloat16]
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


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="sees no CUDA GPU"):
        choose_device(_options(device="cuda"))
    assert choose_device(_options(device="auto")) == CPU


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


def test_quick_steps_are_repeated(opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profkit.models.__main__._LONGEST_S", inf)
    train(_options(steps=2, rounds=3))
    assert opened.count("step 0") == opened.count("step 1") == 3


def test_slow_steps_are_not_repeated(monkeypatch: pytest.MonkeyPatch, opened: list[str]) -> None:
    monkeypatch.setattr("profkit.models.__main__._LONGEST_S", 0.0)
    train(_options(steps=1, rounds=10))
    assert opened.count("step 0") == 1


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


def test_a_compiler_that_fails_names_the_mode() -> None:
    import torch._dynamo

    error = torch._dynamo.exc.TorchDynamoException("no compiler\nmore")
    assert (
        str(explain(error, _options(compile_mode="default"))) == "--compile default: no compiler; leave --compile out"
    )


def test_an_unknown_failure_is_not_explained_away() -> None:
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
