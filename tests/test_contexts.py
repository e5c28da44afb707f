"""Several contexts in one capture: what they share, in which ranges they stand, and what a run says of each."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profkit import read_trace
from profkit.models.flops import forward_flops
from profkit.models.presets import PRESETS
from profkit.models.workload import Order, Workload
from profkit.run.work import read_work
from tests.doubts import without_doubts

torch = pytest.importorskip("torch")

from profkit.capture.contexts import ContextSteps  # noqa: E402
from profkit.capture.step import TrainingStep  # noqa: E402

CPU = torch.device("cpu")


def _workload(*contexts: int, **options: Any) -> Workload:
    several = contexts if len(contexts) > 1 else ()
    options = {"batch": 2, "warmup_steps": 1, "steps": 2, "device": "cpu", **options}
    return Workload("tiny", context=max(contexts), contexts=several, **options)


def test_an_order_survives_the_command_line() -> None:
    order = Order(_workload(8, 16), "kineto", "/a b/worker.json", output_fds=(3, 4))
    assert Order.from_json(order.to_json()) == order


def test_contexts_share_parameters_and_optimizer_and_keep_their_own_batch_and_mask() -> None:
    short, long = ContextSteps(_workload(8, 16), CPU)._steps
    assert short.optimizer is long.optimizer
    for mine, theirs in zip(short.module.parameters(), long.module.parameters(), strict=True):
        assert mine is theirs
    assert (short.module.causal.shape, long.module.causal.shape) == ((8, 8), (16, 16))
    alone = TrainingStep(_workload(8), CPU)
    assert torch.equal(short.inputs, alone.inputs)
    assert torch.equal(short.targets, alone.targets)


def test_the_first_context_does_what_it_does_alone() -> None:
    alone, several = TrainingStep(_workload(8), CPU), ContextSteps(_workload(8, 16), CPU)._steps[0]
    for step in (alone, several):
        step.run_warmup()
        step.run_measured()
    assert alone.losses == several.losses


def test_times_and_losses_stand_in_the_order_of_the_request() -> None:
    steps = ContextSteps(_workload(16, 8), CPU)
    steps.run_warmup()
    times = steps.run_measured()
    assert [one["context"] for one in times] == [16, 16, 8, 8]
    assert len(steps.losses) == 4
    assert steps.parameter_count == PRESETS["tiny"].parameter_count


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    where = tmp_path_factory.mktemp("contexts")
    arguments = ["model.tiny", "--batch", "2", "--context", "8,32", "--steps", "2", "--warmup", "1", "-o", "run"]
    command = [sys.executable, "-m", "profkit", "run", *arguments, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=where, timeout=300)
    assert (done.returncode, without_doubts(done.stderr)) == (0, "")
    return where / "run", done.stdout


def test_each_context_is_a_range_around_its_steps_and_warmup_is_in_none(run: tuple[Path, str]) -> None:
    events = json.loads(gzip.decompress((run[0] / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("context")] == ["context 8", "context 32"]
    assert [name for name in names if name.startswith("step ")] == ["step 0", "step 1"] * 2
    assert "warmup" not in names


def test_a_path_chooses_the_phases_of_one_context(run: tuple[Path, str]) -> None:
    opened = read_trace(run[0])
    for phase in ("forward", "backward"):
        every, short, long = (
            opened.kernels(request) for request in (phase, f"context 8/step */{phase}", f"context 32/step */{phase}")
        )
        assert (every.instances, short.instances, long.instances) == (4, 2, 2)
        assert every.total_ns == short.total_ns + long.total_ns
    assert opened.kernels("context 32/step 1/forward/layer 0").instances == 1
    assert opened.kernels("context *").instances == 2
    assert opened.self_check.findings == ()


def test_what_the_run_says_of_each(run: tuple[Path, str]) -> None:
    where, said = run
    for context in (8, 32):
        assert said.count(f"\ncontext {context}\n") == 2, "the phases, and the times without a profiler"
    assert "  profkit kernels run --range 'context 32/step */forward'\n" in said
    manifest = json.loads((where / "manifest.json").read_text())
    assert (manifest["workload"]["context"], manifest["workload"]["contexts"]) == (32, [8, 32])
    assert [step["context"] for step in manifest["profiled"]["steps"]] == [8, 8, 32, 32]
    assert [step["context"] for step in manifest["clean"]["steps"][:4]] == [8, 8, 32, 32]
    work = read_work(where)
    assert work is not None
    for context in (8, 32):
        forward = work.find((f"context {context}", "forward"))
        assert forward is not None
        assert forward.flops == forward_flops(PRESETS["tiny"], 2, context)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "8,x"], "'x' is not a valid integer"),
        (["--context", "8,0"], "0 is not in the range x>=1"),
        (["--context", "8,16,8"], "8,16,8: a context twice"),
        (["--context", "8,16", "--memory"], "--memory with several --context: a snapshot is of one"),
        (
            ["--context", "1,2,3,4,5,6,7,8,9", "--compile", "default"],
            "--compile with 9 --context: torch.compile keeps 8 at most",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "profkit", "run", "model.tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []
