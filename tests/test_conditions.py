"""The conditions of a run: what the launcher sees from outside, and what a process tells of itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from profkit.launch.gpu_state import GpuState, describe_gpus, warn_of_used_gpus
from profkit.launch.manifest import HARMLESS, harmless_variables, warn_of_run
from profkit.run import manifest
from profkit.run.manifest import Gpu, Gpus, Manifest, Process, Samples
from tests.forked_scripts import Forks

IDLE = Gpu(0, "GPU-1", "NVIDIA H200", "P0", 1980, 3201, 34, 0, (), {}, 0, 0)
OTHER = replace(IDLE, index=1, uuid="GPU-2", process_count=1)


def test_the_gpus_are_kept_as_they_were_before_and_after() -> None:
    gpus = describe_gpus(GpuState((IDLE,)), GpuState((replace(IDLE, temperature_c=61),)))
    assert [state[0].temperature_c for state in (gpus.before, gpus.after)] == [34, 61]
    assert gpus.reason is None
    assert describe_gpus(GpuState(reason="no driver"), GpuState()) == Gpus((), (), "no driver")


def test_only_harmless_variables_are_kept() -> None:
    environment = {"WORLD_SIZE": "2", "NCCL_DEBUG_FILE": "/home/me", "AWS_SECRET": "x", "TORCH_HOME": "/home/me"}
    assert harmless_variables(environment) == {"WORLD_SIZE": "2"}
    assert list(HARMLESS) == sorted(set(HARMLESS))
    assert not [name for name in HARMLESS if any(word in name for word in ("KEY", "TOKEN", "SECRET", "DIR", "PATH"))]


def test_only_the_gpus_that_were_used_are_judged() -> None:
    def warn(*processes: Process) -> list[str]:
        state = GpuState((IDLE, OTHER))
        return warn_of_used_gpus(state, state, processes, {})

    process = Process(device="cuda", conditions=manifest.Conditions(gpu_uuid="GPU-1"))
    assert warn(process) == []
    (warning,) = warn(process, replace(process, conditions=manifest.Conditions(gpu_uuid="GPU-2")))
    assert "GPU 1 was shared during the run" in warning
    assert warn(Process(device="cpu")) == []
    assert len(warn(Process(device="cuda"))) == 1


def test_the_times_of_either_kind_of_run_are_judged() -> None:
    steps = tuple({"step_ns": ns} for ns in (20, 10, 10, 10))
    clean = Manifest(clean=Samples(steps), profiled=Samples((), {"compiled_graphs": 1}))
    assert [text.partition(" steps")[0] for text in warn_of_run(clean)] == [
        "the first of the 4 unprofiled",
        "1 graph was compiled within the recorded",
    ]
    assert "of the 4 unprofiled steps" in warn_of_run(Manifest(attached=Samples(steps)))[0]
    assert warn_of_run(Manifest()) == []


Printed = Callable[[str], list[str]]


@pytest.fixture
def printed(forks: Forks, tmp_path: Path) -> Printed:
    """What code prints in a process of its own."""

    def run(code: str) -> list[str]:
        script = tmp_path / "script.py"
        script.write_text("import torch\nfrom profkit.capture.steps.conditions import *\n" + code)
        done = forks.run([sys.executable, str(script)], tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_compilations_are_counted_and_named(printed: Printed) -> None:
    code = """
print(read_counters()["compiled_graphs"], read_conditions().compiled)
layer = torch.compile(torch.nn.Linear(2, 2), backend="eager", dynamic=False)
layer(torch.ones(1, 2))
before = read_counters()
layer(torch.ones(1, 2))
print(counted_since(before)["compiled_graphs"])
layer(torch.ones(3, 2))
print(counted_since(before)["compiled_graphs"])
print(read_conditions().compiled)
"""
    assert printed(code) == ["0 None", "0", "1", "Compiled(graphs=2, backends=({'backend': 'eager', 'options': {}},))"]


def test_full_collections_are_counted_and_launches_that_wait_are_known(printed: Printed) -> None:
    code = """
import gc, os
gc.disable()
before = read_counters()
gc.collect(1)
print(counted_since(before)["full_collections"], read_conditions().launch_blocking)
gc.collect()
os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
print(counted_since(before)["full_collections"], read_conditions().launch_blocking)
"""
    assert printed(code) == ["0 False", "1 True"]


def test_precision_and_autocast_are_read_through_both_of_torchs_interfaces(printed: Printed) -> None:
    code = """
print(sorted(autocast_dtypes()))
with torch.autocast("cpu", torch.bfloat16):
    print(sorted(autocast_dtypes()))
torch.set_float32_matmul_precision("high")
print(read_conditions().float32_matmul_precision, read_conditions().cuda_matmul_allow_tf32)
torch.set_float32_matmul_precision("highest")
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    told = read_conditions()
    print(told.cuda_matmul_allow_tf32, told.cuda_matmul_fp32_precision)
else:
    print("None tf32")
print(torch.cuda.is_initialized())
"""
    assert printed(code) == ["[]", "['bfloat16']", "high True", "None tf32", "False"]


def test_an_optimizer_is_described_by_its_class_its_flags_and_its_bytes(printed: Printed) -> None:
    code = """
import torch
class AdamW(torch.optim.AdamW):
    pass
layer = torch.nn.Linear(4, 4, bias=False)
frozen = torch.nn.Linear(4, 4)
used = UsedOptimizers()
for kind, flags in ((torch.optim.AdamW, {}), (AdamW, {"foreach": True}), (torch.optim.SGD, {"fused": False})):
    optimizer = kind([*layer.parameters(), *frozen.parameters()], lr=0.1, **flags)
    for _ in range(2):
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        used.note_step(optimizer)
for one in read_conditions((), used.described).optimizers:
    print(one.name, one.is_torchs, one.fused, one.foreach, one.parameter_bytes, one.state_bytes)
print(read_conditions().optimizers)
"""
    assert printed(code) == [
        "AdamW True None None 64 132",
        "AdamW False None True 64 132",
        "SGD True False None 64 0",
        "None",
    ]
