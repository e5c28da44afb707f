"""The work counted while a built-in model runs: the figures of each range, some of them by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from profkit.annotation import annotate
from profkit.models import PRESETS, TrainingOptions, backward_flops, forward_flops
from profkit.names import context_range
from profkit.run.work import RunWork
from tests.golden import check_text

torch = pytest.importorskip("torch")

from profkit.capture.work.counter import WorkCounter  # noqa: E402
from profkit.models import __main__ as training  # noqa: E402
from profkit.models import transformer  # noqa: E402
from profkit.models.__main__ import Training  # noqa: E402


def _counted(device: str = "cpu", context: int = 16, **options: Any) -> RunWork:
    torch._dynamo.utils.counters.clear()  # other tests in this process compile
    how = TrainingOptions("tiny", **{"batch": 2, "contexts": (context,), "device": device, **options})
    one = Training(how, context, torch.device(device))
    one.step()
    counter = WorkCounter()
    counter.start()
    one.step()
    counter.stop()
    return counter.content()


def _lines(work: RunWork) -> Iterator[str]:
    yield f"dtype {work.dtype}, model FLOPs {work.model_flops:,}, missing {work.missing}"
    yield "path | FLOPs by dtype | other FLOPs | least bytes | times"
    for row in work.ranges:
        flops = ", ".join(f"{dtype} {count:,}" for dtype, count in row.flops_by_dtype.items())
        figures = f"{row.other_flops:,} | {row.least_bytes:,} | {row.instances}"
        yield f"{'/'.join(row.path)} | {flops} | {figures}{' varies' if row.varies else ''}"


@pytest.fixture
def casts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast on a CPU, have exp and the loss computed in fp32 as on a GPU."""

    def exp(scores: Any) -> Any:
        return _exp(scores.float())

    def cross_entropy(logits: Any, targets: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.nll_loss(torch.log_softmax(logits, -1).float(), targets)

    _exp = torch.exp
    monkeypatch.setattr(transformer.torch, "exp", exp)
    monkeypatch.setattr(training, "cross_entropy", cross_entropy)


@pytest.mark.parametrize(
    ("batch", "context", "dtype"), [(1, 8, "fp32"), (2, 16, "fp32"), (3, 33, "fp32"), (1, 16, "bf16"), (2, 16, "bf16")]
)
def test_the_work_of_each_range_of_a_step(batch: int, context: int, dtype: str, request: pytest.FixtureRequest) -> None:
    """These figures were also worked out from the model's sizes, operation by operation and tensor by tensor."""
    if dtype == "bf16":
        request.getfixturevalue("casts_of_a_gpu")
    work = _counted(batch=batch, context=context, dtype=dtype)
    check_text(f"work-of-{batch}x{context}-{dtype}", "\n".join(_lines(work)) + "\n")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [1, 2])
def test_on_a_gpu_the_same_is_counted(batch: int, dtype: str, request: pytest.FixtureRequest) -> None:
    on_gpu = _counted("cuda", batch=batch, dtype=dtype)
    if dtype == "bf16":
        request.getfixturevalue("casts_of_a_gpu")
    on_cpu = _counted(batch=batch, dtype=dtype)
    for one, other in zip(on_gpu.ranges, on_cpu.ranges, strict=True):
        assert (one.path, one.flops_by_dtype, one.other_flops) == (other.path, other.flops_by_dtype, other.other_flops)
        # One number for all step counts, that the optimizer makes on the host.
        most = 16 if one.path in ((), ("optimizer",)) else 0
        assert 0 <= one.least_bytes - other.least_bytes <= most


@pytest.mark.parametrize("passes", ["forward", "forward-backward", "train"])
def test_the_phases_are_those_of_the_step_and_make_it_up(passes: Any) -> None:
    """Forward alone, by hand: tokens, embedded rows, weights, gains, tables and mask move; nobody keeps the logits."""
    rows = {row.path: row for row in _counted(passes=passes).ranges}
    phases = {path[0]: row for path, row in rows.items() if len(path) == 1}
    expected = {"forward": ["forward"], "forward-backward": ["forward", "loss", "backward"]}
    assert list(phases) == expected.get(passes, ["forward", "loss", "backward", "optimizer"])
    for field in ("flops", "other_flops"):
        assert getattr(rows[()], field) == sum(getattr(row, field) for row in phases.values())
    assert rows[()].least_bytes <= sum(row.least_bytes for row in phases.values())
    if passes == "forward":
        weights = (PRESETS["tiny"].parameter_count - 10_000 * 128) * 4
        read = 2 * 16 * 8 + 2 * 16 * 128 * 4 + weights + 2 * 16 * 16 * 4 + 16 * 16
        assert phases["forward"].least_bytes == rows[()].least_bytes == read


def test_each_context_is_a_step_and_the_model_flops_are_the_first_ones() -> None:
    options = TrainingOptions("tiny", batch=2, contexts=(8, 16), device="cpu")
    trainings = [Training(options, context, torch.device("cpu")) for context in options.contexts]
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
    assert step.flops == forward_flops(PRESETS["tiny"], 2, 16) + backward_flops(PRESETS["tiny"], 2, 16)
    assert work.model_flops == 3 * forward.flops
