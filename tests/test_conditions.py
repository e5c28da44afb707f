"""The conditions of a run: the state of the GPUs, what a process tells of itself, and what is doubted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profkit.launch.gpu_state import Gpu, read_gpus, warn_of_gpus
from profkit.launch.manifest import HARMLESS, harmless_variables, warn_of_counted, warn_of_gain, warn_of_run
from profkit.run import manifest
from profkit.run.manifest import Manifest, Process, Samples
from tests.forked_scripts import Forks
from tests.golden import check_text

FIRST, SECOND = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77", "GPU-7a1be2f5-9fd3-1a2e-0000-9e3d8d2b8a77"

H200: dict[str, Any] = {
    "UUID": FIRST.encode(),  # older versions of the library return bytes
    "CurrentClocksEventReasons": 0x4,
    "field 74": 91_403_239_999,
    "ComputeRunningProcesses": [SimpleNamespace(usedGpuMemory=2048), SimpleNamespace(usedGpuMemory=514)],
}
BARE: dict[str, Any] = {
    "UUID": SECOND,
    "ComputeRunningProcesses": [SimpleNamespace(usedGpuMemory=None)],
}


class FakeNvml:
    """NVML over dictionaries of what each GPU tells; it raises for what is not in them."""

    class NVMLError(Exception):
        pass

    NVML_FI_DEV_PERF_POLICY_POWER = 74

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = gpus
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.gpus[index]

    def nvmlDeviceGetFieldValues(self, gpu: dict[str, Any], fields: list[Any]) -> list[Any]:
        found = [gpu.get(f"field {field}") for field in fields]
        return [SimpleNamespace(nvmlReturn=one is None, value=SimpleNamespace(ullVal=one, uiVal=one)) for one in found]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return lambda gpu: self._tell(gpu, name.removeprefix("nvmlDeviceGet"))

    def _tell(self, gpu: dict[str, Any], what: str) -> Any:
        if what not in gpu:
            raise self.NVMLError("not supported")
        return gpu[what]


def test_a_gpu_that_tells_everything_is_described_in_full() -> None:
    nvml = FakeNvml(H200)
    (gpu,) = read_gpus(nvml)
    assert gpu == Gpu(
        index=0,
        uuid=FIRST,
        throttle_reasons=("sw_power_cap",),
        throttled_us={"sw_power_cap": 91_403_239},
        process_count=2,
        process_bytes=2048 + 514,
    )
    assert not nvml.is_open


def test_a_figure_that_a_gpu_does_not_report_is_none() -> None:
    (gpu,) = read_gpus(FakeNvml(BARE))
    assert (gpu.throttle_reasons, gpu.throttled_us) == (None, {})
    assert (gpu.process_count, gpu.process_bytes) == (1, None)


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        (0x0, ()),
        (0x1, ("gpu_idle",)),
        (0xE8, ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")),
        (0x8000000000000000, ()),  # a reason that is not known yet
    ],
)
def test_each_bit_of_the_mask_is_a_reason(mask: int, reasons: tuple[str, ...]) -> None:
    (gpu,) = read_gpus(FakeNvml({**H200, "CurrentClocksEventReasons": mask}))
    assert gpu.throttle_reasons == reasons


def test_without_a_driver_or_the_library_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("Driver Not Loaded")

    assert read_gpus(NoDriver()) == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus() == ()


IDLE = Gpu(0, "GPU-1", (), {}, 0, 0)
OTHER = replace(IDLE, index=1, uuid="GPU-2", process_count=1)


def test_only_harmless_variables_are_kept() -> None:
    environment = {"WORLD_SIZE": "2", "NCCL_DEBUG_FILE": "/home/me", "AWS_SECRET": "x", "TORCH_HOME": "/home/me"}
    assert harmless_variables(environment) == {"WORLD_SIZE": "2"}
    assert list(HARMLESS) == sorted(set(HARMLESS))
    assert not [name for name in HARMLESS if any(word in name for word in ("KEY", "TOKEN", "SECRET", "DIR", "PATH"))]


MS = 1_000_000
QUIET = Gpu(0, "GPU-1", ("gpu_idle",), {"sw_power_cap": 700}, 0, 0)
UNKNOWN = replace(QUIET, process_count=None, process_bytes=None, throttle_reasons=None, throttled_us={})
STATE, ON_CUDA = (IDLE, OTHER), Process(device="cuda")


def _steps(*times_ms: float, **more: int) -> list[dict[str, int]]:
    return [{**more, "forward_ns": 2 * MS, "step_ns": round(time_ms * MS)} for time_ms in times_ms]


def _on(number: int) -> Process:
    return replace(ON_CUDA, conditions=manifest.Conditions(gpu_uuid=f"GPU-{number}"))


def _of_gpu(before: dict[str, Any], **after: Any) -> list[str]:
    return warn_of_gpus([replace(QUIET, **before)], [replace(QUIET, **after)], [ON_CUDA])


CONTEXTS = _steps(10, context=128) + _steps(50, context=1024)
DOUBTS: dict[str, list[str]] = {
    "the GPU that was used is idle": warn_of_gpus(STATE, STATE, [_on(1)]),
    "one of the two that were used is shared": warn_of_gpus(STATE, STATE, [_on(1), _on(2)]),
    "no GPU was used": warn_of_gpus(STATE, STATE, [Process(device="cpu")]),
    "which was used is unknown": warn_of_gpus(STATE, STATE, [ON_CUDA]),
    "a graph compiled while recorded": warn_of_run(Manifest(profiled=Samples((), {"compiled_graphs": 1}))),
    "a graph compiled before, in a process of its own": warn_of_run(
        Manifest(clean=Samples((), {"compiled_graphs": 1}))
    ),
    "a graph compiled before, in the same process": warn_of_run(Manifest(attached=Samples((), {"compiled_graphs": 1}))),
    "nothing": warn_of_run(Manifest()),
    "nothing counted": warn_of_counted({"compiled_graphs": 0}, "unprofiled"),
    "graphs compiled": warn_of_counted({"compiled_graphs": 3}, "unprofiled"),
    "retries": warn_of_counted({"allocator_retries": 2}, "unprofiled"),
    "out of memory": warn_of_counted({"out_of_memory_errors": 1}, "unprofiled"),
    "faster while recorded": warn_of_gain(_steps(26, 54), _steps(27, 26, 28)),
    "a tenth faster, by chance": warn_of_gain(_steps(10, 10), _steps(9.1, 9.1)),
    "nothing recorded": warn_of_gain(_steps(10, 10), []),
    "faster in one context": warn_of_gain(CONTEXTS, _steps(11, context=128) + _steps(40, context=1024)),
    "faster without its wait": warn_of_gain([{"step_ns": 30 * MS, "data_ns": 10 * MS}], _steps(10)),
    "a quiet GPU": _of_gpu({}),
    "a GPU that tells nothing": warn_of_gpus([UNKNOWN], [UNKNOWN], [ON_CUDA]),
    "a GPU unknown before": warn_of_gpus([], [replace(QUIET, process_count=3)], [ON_CUDA]),
    "other processes": _of_gpu({}, process_count=2, process_bytes=3 * 1024**3),
    "another process before": _of_gpu({"process_count": 1, "process_bytes": None}),
    "clocks held down": _of_gpu({}, throttled_us={"sw_power_cap": 1_500_700}),
    "clocks held down at the end": _of_gpu({}, throttle_reasons=("hw_thermal_slowdown", "sync_boost")),
}


def test_what_is_doubted() -> None:
    check_text("doubts", "".join(f"{name}\n" + "".join(f"  {one}\n" for one in said) for name, said in DOUBTS.items()))


PRINTED: dict[str, tuple[str, list[str]]] = {
    "compilations are counted and named": (
        """
print(read_counters()["compiled_graphs"], read_conditions().compiled)
layer = torch.compile(torch.nn.Linear(2, 2), backend="eager", dynamic=False)
layer(torch.ones(1, 2))
before = read_counters()
layer(torch.ones(1, 2))
print(read_counters()["compiled_graphs"] - before["compiled_graphs"])
layer(torch.ones(3, 2))
print(read_counters()["compiled_graphs"] - before["compiled_graphs"])
print(read_conditions().compiled)
""",
        ["0 None", "0", "1", "Compiled(graphs=2, backends=({'backend': 'eager', 'options': {}},))"],
    ),
    "full collections blocking launches and deterministic algorithms are known": (
        """
import gc, os
gc.disable()
before = read_counters()
gc.collect(1)
print(read_counters()["full_collections"] - before["full_collections"], read_conditions().launch_blocking)
gc.collect()
os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
print(read_counters()["full_collections"] - before["full_collections"], read_conditions().launch_blocking)
torch.use_deterministic_algorithms(True)
for fills in (True, False):
    torch.utils.deterministic.fill_uninitialized_memory = fills
    print(read_conditions().deterministic_algorithms, read_conditions().fills_uninitialized_memory)
""",
        ["0 False", "1 True", "True True", "True False"],
    ),
    "precision and autocast are read through both of torchs interfaces": (
        """
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
""",
        ["[]", "['bfloat16']", "high True", "None tf32", "False"],
    ),
    "an optimizer is described by its class its flags and its bytes": (
        """
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
""",
        [
            "AdamW True None None 64 132",
            "AdamW False None True 64 132",
            "SGD True False None 64 0",
            "None",
        ],
    ),
    # The fifth has no gradient; a rate may depend on the name of a group.
    "groups of parameters are those that step and those that are unlike": (
        """
weights = [torch.ones(2, requires_grad=True) for _ in range(5)]
for weight in weights[:4]:
    weight.grad = torch.ones(2)
for options in ({}, {"lr": 0.1, "betas": (0.9, 0.99)}), ({}, {"lr": 0.2}), ({"name": "a"}, {"name": "b"}):
    groups = [{"params": [weight], **options[number % 2]} for number, weight in enumerate(weights)]
    one = describe_optimizer(torch.optim.Adam(groups, lr=0.1, betas=(0.9, 0.99)))
    print(one.parameters, one.groups, one.unlike_groups)
""",
        ["4 4 1", "4 4 2", "4 4 2"],
    ),
}
"""What code prints in a process of its own."""


@pytest.mark.parametrize("what", PRINTED)
def test_what_a_process_tells_of_itself(what: str, forks: Forks, tmp_path: Path) -> None:
    code, expected = PRINTED[what]
    script = tmp_path / "script.py"
    script.write_text("import torch\nfrom profkit.capture.steps.conditions import *\n" + code)
    assert forks.check([sys.executable, str(script)], tmp_path).stdout.splitlines() == expected
