"""The work counted while a built-in model runs: against a formula by hand, and the formula against its own parts."""

from __future__ import annotations

from typing import Any

import pytest

from profkit.annotation import annotate
from profkit.models.options import PRESETS, TrainingOptions
from profkit.names import context_range
from profkit.run.work import RunWork
from tests.step_work import model_work

torch = pytest.importorskip("torch")

from profkit.capture.work.counter import WorkCounter  # noqa: E402
from profkit.models import __main__ as training  # noqa: E402
from profkit.models import transformer  # noqa: E402
from profkit.models.__main__ import Training  # noqa: E402

FIELDS = ("flops", "other_flops", "least_bytes", "flops_by_dtype", "instances", "varies")


def _formula(options: TrainingOptions) -> dict[tuple[str, ...], dict[str, Any]]:
    return _rows(model_work(options))


def _counted(options: TrainingOptions, device: str = "cpu") -> RunWork:
    torch._dynamo.utils.counters.clear()  # other tests in this process compile
    one = Training(options, options.contexts[0], torch.device(device))
    one.step()
    counter = WorkCounter()
    counter.start()
    one.step()
    counter.stop()
    return counter.content()


def _rows(work: RunWork) -> dict[tuple[str, ...], dict[str, Any]]:
    return {row.path: {field: getattr(row, field) for field in FIELDS} for row in work.ranges}


def _workload(context: int = 16, **options: Any) -> TrainingOptions:
    return TrainingOptions("tiny", **{"batch": 2, "contexts": (context,), "device": "cpu", **options})


@pytest.mark.parametrize(("batch", "context"), [(1, 8), (2, 16), (3, 33)])
def test_the_counted_work_of_a_step_equals_the_formula(batch: int, context: int) -> None:
    workload = _workload(batch=batch, context=context)
    counted = _counted(workload)
    assert _rows(counted) == _formula(workload)
    assert counted.model_flops == model_work(workload).model_flops
    assert (counted.missing, counted.dtype) == ((), "fp32")


@pytest.mark.parametrize("batch", [1, 2])
def test_bf16_with_the_casts_that_autocast_does_on_a_gpu(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def exp(scores: Any) -> Any:
        return _exp(scores.float())

    def cross_entropy(logits: Any, targets: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.nll_loss(torch.log_softmax(logits, -1).float(), targets)

    _exp = torch.exp
    monkeypatch.setattr(transformer.torch, "exp", exp)
    monkeypatch.setattr(training, "cross_entropy", cross_entropy)
    workload = _workload(batch=batch, dtype="bf16")
    assert _rows(_counted(workload)) == _formula(workload)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [1, 2])
def test_on_a_gpu_the_same_is_counted(batch: int, dtype: str) -> None:
    workload = _workload(batch=batch, dtype=dtype, device="cuda")
    counted, formula = _rows(_counted(workload, "cuda")), _formula(workload)
    # One number for all step counts, that the optimizer makes on the host.
    for path in ((), ("optimizer",)):
        extra = counted[path]["least_bytes"] - formula[path]["least_bytes"]
        assert 0 <= extra <= 16
        counted[path]["least_bytes"] -= extra
    assert counted == formula


@pytest.mark.parametrize("passes", ["forward", "forward-backward", "train"])
def test_the_phases_are_those_of_the_step_and_make_it_up(passes: Any) -> None:
    rows = _formula(_workload(passes=passes))
    phases = {path: row for path, row in rows.items() if len(path) == 1}
    expected = {"forward": ["forward"], "forward-backward": ["forward", "loss", "backward"]}
    assert [path[0] for path in phases] == expected.get(passes, ["forward", "loss", "backward", "optimizer"])
    for field in ("flops", "other_flops"):
        assert rows[()][field] == sum(row[field] for row in phases.values())
    assert rows[()]["least_bytes"] <= sum(row["least_bytes"] for row in phases.values())


def test_without_a_backward_pass_nothing_is_kept_for_it() -> None:
    """By hand: tokens, embedded rows, weights, gains, tables and mask are read, logits are written."""
    preset, rows = PRESETS["tiny"], _formula(_workload(passes="forward"))
    read = 2 * 16 * 8 + 2 * 16 * 128 * 4 + (preset.parameter_count - 10_000 * 128) * 4 + 2 * 16 * 16 * 4 + 16 * 16
    assert rows[("forward",)]["least_bytes"] == rows[()]["least_bytes"] == read + 2 * 16 * 10_000 * 4


def _needed(options: TrainingOptions, path: tuple[str, ...]) -> int:
    row = model_work(options).find(path)
    assert row is not None
    return row.needed_flops


def test_a_causal_mask_leaves_query_q_its_first_keys() -> None:
    workload = _workload(context=10)
    seen = sum(q + 1 for q in range(10))
    scores = ("forward", "layer 0", "attention", "scaled dot product attention", "computing attention scores")
    product = 2 * 2 * 128 * seen  # 2 b d, for all heads
    assert _needed(workload, scores) == product
    assert _needed(workload, scores[:-1]) == 2 * product
    rows = _formula(workload)
    hidden = rows[scores]["flops"] - product
    assert _needed(workload, ("forward", "layer 1")) == rows[("forward", "layer 1")]["flops"] - 2 * hidden
    assert _needed(workload, ("forward",)) == rows[("forward",)]["flops"] - 4 * hidden
    assert _needed(workload, ("backward",)) == rows[("backward",)]["flops"] - 8 * hidden
    assert _needed(workload, ("forward", "layer 0", "ffn")) == rows[("forward", "layer 0", "ffn")]["flops"]


def test_compiled_code_has_its_phases_and_no_bytes_that_are_the_compilers_choice() -> None:
    eager, compiled = _formula(_workload()), _formula(_workload(compile_mode="default"))
    assert list(compiled) == [path for path in eager if len(path) < 2]
    assert compiled[("forward",)]["flops"] == eager[("forward",)]["flops"]
    assert compiled[("forward",)]["least_bytes"] < eager[("forward",)]["least_bytes"]
    assert compiled[("optimizer",)] == eager[("optimizer",)]


def test_each_context_is_a_step_and_the_model_flops_are_the_first_ones() -> None:
    trainings = [Training(_workload(context), context, torch.device("cpu")) for context in (8, 16)]
    counter = WorkCounter()
    counter.start()
    for one in trainings:
        with annotate(context_range(one.context)):
            one.step()
    counter.stop()
    work = counter.content()
    step, forward = work.find(("context 16",)), work.find(("context 8", "forward"))
    assert step is not None
    assert forward is not None
    assert work.find(()) is None
    assert step.flops == model_work(_workload(16)).model_flops
    assert work.model_flops == 3 * forward.flops
