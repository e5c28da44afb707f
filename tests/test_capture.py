"""The worker's room: the step's phases and ranges, what is measured, and how Kineto's trace comes to be."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profkit import annotation as ranges
from profkit.errors import UsageError
from profkit.models.flops import backward_flops, forward_flops
from profkit.models.presets import PRESETS
from profkit.models.workload import Order, Passes, Workload

torch = pytest.importorskip("torch")

from profkit.capture.kineto import recorded_by_kineto  # noqa: E402
from profkit.capture.step import TrainingStep, choose_device  # noqa: E402
from profkit.capture.worker import measure  # noqa: E402

CPU = torch.device("cpu")
SMALL = {"batch": 2, "context": 16, "device": "cpu"}


def _workload(**options: Any) -> Workload:
    return Workload("tiny", **{**SMALL, "warmup_steps": 1, "steps": 2, **options})


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """The paths of the ranges as they open, with their payloads, those inside the model left out."""
    stack: list[str] = []
    paths: list[tuple[str, int | None]] = []

    class Marker:
        def __init__(self, message: str, payload: int | None = None) -> None:
            self.message, self.payload = message, payload

        def __enter__(self) -> None:
            stack.append(self.message)
            if len(stack) <= 2:
                paths.append(("/".join(stack), self.payload))

        def __exit__(self, *exc: object) -> None:
            assert stack.pop() == self.message

    monkeypatch.setattr(ranges.nvtx, "annotate", Marker)
    return paths


def test_ranges_of_a_training_run(opened: list[tuple[str, int | None]]) -> None:
    step = TrainingStep(_workload(), CPU)
    step.run_warmup()
    step.run_measured()
    forward = forward_flops(PRESETS["tiny"], 2, 16)
    backward = backward_flops(PRESETS["tiny"], 2, 16)
    assert opened == [
        (path, flops)
        for around in ("warmup", "step 0", "step 1")
        for path, flops in (
            (around, None),
            (f"{around}/forward", forward),
            (f"{around}/loss", None),
            (f"{around}/backward", backward),
            (f"{around}/optimizer", None),
        )
    ]


@pytest.mark.parametrize(
    ("passes", "phases"),
    [
        ("forward", ["forward"]),
        ("forward-backward", ["forward", "loss", "backward"]),
        ("train", ["forward", "loss", "backward", "optimizer"]),
    ],
)
def test_passes_have_their_phases_and_times(passes: Passes, phases: list[str]) -> None:
    step = TrainingStep(_workload(passes=passes), CPU)
    times = step.run_measured()
    assert [list(one) for one in times] == [[*(f"{phase}_ns" for phase in phases), "step_ns"]] * 2
    for one in times:
        inside = sum(one[f"{phase}_ns"] for phase in phases)
        assert 0 < inside <= one["step_ns"]


def test_training_lowers_the_loss_and_a_seed_repeats_it() -> None:
    def losses(seed: int) -> list[float]:
        step = TrainingStep(_workload(seed=seed, steps=4), CPU)
        step.run_measured()
        return step.losses

    first = losses(0)
    assert first == sorted(first, reverse=True)
    assert first[0] > first[-1] + 0.1
    assert losses(0) == first
    assert losses(1) != first


def test_without_an_optimizer_weights_stay_and_gradients_go() -> None:
    step = TrainingStep(_workload(passes="forward-backward"), CPU)
    before = [parameter.detach().clone() for parameter in step.module.parameters()]
    step.run_measured()
    assert len(set(step.losses)) == 1
    assert all(parameter.grad is None for parameter in step.module.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, step.module.parameters(), strict=True))


def test_forward_alone_has_no_loss_and_keeps_no_graph() -> None:
    step = TrainingStep(_workload(passes="forward"), CPU)
    outputs = []
    step.module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    step.run_measured()
    assert step.losses == []
    assert not any(output.requires_grad for output in outputs)


def test_bf16_is_autocast_over_fp32_weights() -> None:
    step = TrainingStep(_workload(dtype="bf16"), CPU)
    outputs = []
    step.module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.dtype))
    step.run_measured()
    assert set(outputs) == {torch.bfloat16}
    assert {parameter.dtype for parameter in step.module.parameters()} == {torch.float32}


def test_tf32_is_fp32_with_its_products_in_tf32() -> None:
    with pytest.raises(UsageError, match="only CUDA GPUs have TF32"):
        choose_device(_workload(dtype="tf32"))
    before = torch.get_float32_matmul_precision()
    try:
        step = TrainingStep(_workload(dtype="tf32"), CPU)
        assert torch.get_float32_matmul_precision() == "high"
        assert {parameter.dtype for parameter in step.module.parameters()} == {torch.float32}
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="sees no CUDA GPU"):
        choose_device(_workload(device="cuda"))
    assert choose_device(_workload(device="auto")) == CPU


def test_what_is_measured(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    result = measure(Order(_workload(), "kineto", str(tmp_path / "worker.json"), str(trace)))
    assert {key: result[key] for key in ("device", "gpu", "torch", "parameter_count")} == {
        "device": "cpu",
        "gpu": None,
        "torch": torch.__version__,
        "parameter_count": PRESETS["tiny"].parameter_count,
    }
    assert (len(result["steps"]), len(result["losses"])) == (2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("forward") == names.count("backward") == names.count("optimizer") == 2
    assert names.count("layer 1") == 2
    assert {"step 0", "step 1"} <= set(names)
    assert "warmup" not in names


def test_a_failed_block_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), recorded_by_kineto(tmp_path / "trace.json.gz", CPU):
        raise ValueError("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("written", ["", '{"traceEvents": [{"na'])
def test_a_trace_that_was_cut_off_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    """Kineto itself says nothing of a full disk."""

    def export(_profiler: object, path: str) -> None:
        Path(path).write_text(written)
        Path(f"{path}.tmp").touch()

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    with pytest.raises(OSError, match="No space left on device"), recorded_by_kineto(tmp_path / "trace.json.gz", CPU):
        torch.ones(2).sum()
    assert list(tmp_path.iterdir()) == []


def _work(order: Order, code: str = "") -> subprocess.CompletedProcess[str]:
    start = f"{code}\nfrom profkit.capture.worker import main; main()"
    return subprocess.run(
        [sys.executable, "-c", start, order.to_json()], capture_output=True, text=True, check=False, cwd="/"
    )


def test_the_worker_writes_its_result_and_prints_nothing(tmp_path: Path) -> None:
    done = _work(Order(_workload(steps=1), "none", str(tmp_path / "worker.json")))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(json.loads((tmp_path / "worker.json").read_text())["losses"]) == 1


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        ('RuntimeError("[enforce fail] DefaultCPUAllocator: can\'t allocate memory: you tried")', 1, "memory is full"),
        (
            "torch.cuda.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB.\\nmore')",
            1,
            "(2 GiB more did not fit); try a smaller",
        ),
        (
            "RuntimeError('CUDA error: unspecified launch failure\\nCUDA kernel errors might be')",
            1,
            "the GPU failed: CUDA error: unspecified launch failure; nvidia-smi says",
        ),
        ("RuntimeError('NCCL: GPU is lost')", 1, "the GPU failed: GPU is lost; nvidia-smi says"),
        ("torch._dynamo.exc.TorchDynamoException('no compiler\\nmore')", 1, "--compile none: no compiler; leave"),
        ("profkit.errors.UsageError('not so')", 2, "profkit: not so"),
    ],
)
def test_known_failures_are_one_line(tmp_path: Path, error: str, status: int, line: str) -> None:
    code = (
        "import torch, torch._dynamo, profkit.errors, profkit.capture.worker as worker\n"
        f"def fail(*_): raise {error}\nworker.TrainingStep = fail"
    )
    done = _work(Order(_workload(), "none", str(tmp_path / "worker.json")), code)
    assert done.returncode == status
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    # The launcher puts the same line into the manifest.
    assert list(tmp_path.iterdir()) == [tmp_path / "worker.json"]
    assert done.stderr == f"profkit: {json.loads((tmp_path / 'worker.json').read_text())['error']}\n"
