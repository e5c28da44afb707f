"""The conditions of a run: the state of the GPUs, what a process tells of itself, and what is doubted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profkit.launch.gpu_state import GpuState, describe_gpus, read_gpu_state, used_gpus, warn_of_gpus, warn_of_used_gpus
from profkit.launch.manifest import HARMLESS, harmless_variables, warn_of_gain, warn_of_run, warn_of_times
from profkit.run import manifest
from profkit.run.manifest import Gpu, Gpus, Manifest, Process, Samples
from tests.forked_scripts import Forks

FIRST, SECOND = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77", "GPU-7a1be2f5-9fd3-1a2e-0000-9e3d8d2b8a77"

H200: dict[str, Any] = {
    "UUID": FIRST,
    "Name": b"NVIDIA H200",  # older versions of the library return bytes
    "CurrentClocksEventReasons": 0x4,
    "field 74": 91_403_239_999,
    "ComputeRunningProcesses": [SimpleNamespace(usedGpuMemory=2048), SimpleNamespace(usedGpuMemory=514)],
}
BARE: dict[str, Any] = {
    "UUID": SECOND,
    "Name": "NVIDIA GB10",
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
    (gpu,) = read_gpu_state(nvml).gpus
    assert gpu == Gpu(
        index=0,
        uuid=FIRST,
        name="NVIDIA H200",
        throttle_reasons=("sw_power_cap",),
        throttled_us={"sw_power_cap": 91_403_239},
        process_count=2,
        process_bytes=2048 + 514,
    )
    assert not nvml.is_open


def test_a_figure_that_a_gpu_does_not_report_is_none() -> None:
    (gpu,) = read_gpu_state(FakeNvml(BARE)).gpus
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
    (gpu,) = read_gpu_state(FakeNvml({**H200, "CurrentClocksEventReasons": mask})).gpus
    assert gpu.throttle_reasons == reasons


def test_without_a_driver_or_the_library_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("Driver Not Loaded")

    assert read_gpu_state(NoDriver()) == GpuState(reason="NVML cannot be loaded: Driver Not Loaded")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpu_state().reason == "nvidia-ml-py is not installed"


BOTH = read_gpu_state(FakeNvml(H200, BARE))


@pytest.mark.parametrize(
    ("reported", "indices"), [([SECOND], [1]), ([FIRST, SECOND, None], [0, 1]), ([], [0, 1]), (["GPU-unheard-of"], [])]
)
def test_the_gpus_of_a_run_are_those_that_its_processes_name(reported: list[str | None], indices: list[int]) -> None:
    assert [gpu.index for gpu in used_gpus(BOTH, reported)] == indices


IDLE = Gpu(0, "GPU-1", "NVIDIA H200", (), {}, 0, 0)
OTHER = replace(IDLE, index=1, uuid="GPU-2", process_count=1)


def test_the_gpus_are_kept_as_they_were_before_and_after() -> None:
    gpus = describe_gpus(GpuState((IDLE,)), GpuState((replace(IDLE, process_count=3),)))
    assert [state[0].process_count for state in (gpus.before, gpus.after)] == [0, 3]
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
        return warn_of_used_gpus(state, state, processes)

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


MS = 1_000_000
GIB = 1024**3

QUIET = Gpu(0, "GPU-1", "NVIDIA H200", ("gpu_idle",), {"sw_power_cap": 700}, 0, 0)


def _steps(*times_ms: float, **more: int) -> list[dict[str, int]]:
    return [{**more, "forward_ns": 2 * MS, "step_ns": round(time_ms * MS)} for time_ms in times_ms]


def test_even_steps_are_not_doubted() -> None:
    assert warn_of_times(_steps(10, 11, 10.5, 10, 12), {"compiled_graphs": 0}, "unprofiled") == []
    assert warn_of_times([], {}, "unprofiled") == []


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((20, 10, 11, 10, 10.5), "the first of the 5 unprofiled steps took up to 1.9 times"),
        ((30, 15, 10, 10, 10.5, 10.1), "the first 2 of the 6 unprofiled steps took up to 3.0 times"),
        ((10, 20, 10, 10, 10, 10), None),
        ((11, 10, 10, 10), None),
        ((20, 10, 10), None),
        ((20, 16, 20, 16, 20, 16), None),  # the later ones are like it
    ],
)
def test_first_steps_that_stand_out_were_not_warmed_up(times: tuple[float, ...], said: str | None) -> None:
    found = [text for text in warn_of_times(_steps(*times), {}, "unprofiled") if "raise --warmup" in text]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_first_steps_that_found_their_batch_ready_are_no_warm_up() -> None:
    """A wait hides the work of the step before: one of 60 ms leaves 5 of a step's 10 ms, and 80 ms in a queue none."""
    whole, waits = (9.8, 9.8, 70.0, 83.1, 68.2, 60.3, 55.0, 57.2), (0.1, 0.1, 81.5, 78.2, 63.0, 54.5, 49.7, 51.9)
    steps = [{"step_ns": round(ms * MS), "data_ns": round(wait * MS)} for ms, wait in zip(whole, waits, strict=True)]
    assert warn_of_times(steps, {}, "unprofiled") == []
    (said,) = warn_of_times([{"step_ns": 300 * MS, "data_ns": 0}, *steps[2:]], {}, "unprofiled")
    assert "the first of the 7 unprofiled steps" in said


def test_steps_that_were_faster_while_recorded_show_what_the_others_suffered() -> None:
    (warning,) = warn_of_gain(_steps(26, 54), _steps(27, 26, 28))
    assert "faster than unprofiled ones, 27 ms against 40 ms (medians of 3 and 2)" in warning
    assert warn_of_gain(_steps(10, 10), _steps(9.1, 9.1)) == [], "a tenth is chance"
    assert warn_of_gain(_steps(10, 10), []) == []
    steps = _steps(10, context=128) + _steps(50, context=1024)
    (warning,) = warn_of_gain(steps, _steps(11, context=128) + _steps(40, context=1024))
    assert "unprofiled ones (context 1024)" in warning
    waiting = [{"step_ns": 30 * MS, "data_ns": 10 * MS}]
    (warning,) = warn_of_gain(waiting, _steps(10))
    assert "10 ms against 20 ms (medians of 1 and 1 without waits for data)" in warning


def test_contexts_are_judged_apart() -> None:
    steps = _steps(10, 10, 10, 10, context=128) + _steps(100, 50, 50, 50, context=1024)
    found = warn_of_times(steps, {}, "unprofiled")
    assert any("the first of the 4 unprofiled steps (context 1024)" in text for text in found)
    assert not any("128" in text for text in found)


@pytest.mark.parametrize(
    ("during", "said"),
    [
        ({"compiled_graphs": 1}, "1 graph was compiled within the unprofiled steps"),
        ({"compiled_graphs": 3}, "3 graphs were compiled within the unprofiled steps"),
        ({"allocator_retries": 2}, "2 cudaMalloc calls had to be retried within the unprofiled steps"),
        ({"out_of_memory_errors": 1}, "1 out-of-memory error fell within the unprofiled steps"),
    ],
)
def test_events_within_the_steps_are_counted(during: dict[str, int], said: str) -> None:
    (warning,) = warn_of_times(_steps(10, 10, 10), during, "unprofiled")
    assert said in warning


def test_a_quiet_gpu_is_not_doubted() -> None:
    assert warn_of_gpus([QUIET], [QUIET]) == []
    unknown = replace(QUIET, process_count=None, process_bytes=None, throttle_reasons=None, throttled_us={})
    assert warn_of_gpus([unknown], [unknown]) == []
    assert warn_of_gpus([], [replace(QUIET, process_count=3)]) == []


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            {},
            {"process_count": 2, "process_bytes": 3 * GIB},
            "GPU 0 was shared during the run: 2 other processes used it, with 3.0 GiB",
        ),
        ({"process_count": 1, "process_bytes": None}, {}, "1 other process used it;"),
        (
            {},
            {"throttled_us": {"sw_power_cap": 1_500_700}},
            "GPU 0's clocks were held down during the run (sw_power_cap 1.5 s)",
        ),
        ({}, {"throttle_reasons": ("hw_thermal_slowdown", "sync_boost")}, "when the run ended (hw_thermal_slowdown)"),
    ],
)
def test_other_processes_and_clocks_that_were_held_down_are_doubted(
    before: dict[str, Any], after: dict[str, Any], says: str
) -> None:
    (warning,) = warn_of_gpus([replace(QUIET, **before)], [replace(QUIET, **after)])
    assert says in warning


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
}
"""What code prints in a process of its own."""


@pytest.mark.parametrize("what", PRINTED)
def test_what_a_process_tells_of_itself(what: str, forks: Forks, tmp_path: Path) -> None:
    code, expected = PRINTED[what]
    script = tmp_path / "script.py"
    script.write_text("import torch\nfrom profkit.capture.steps.conditions import *\n" + code)
    assert forks.check([sys.executable, str(script)], tmp_path).stdout.splitlines() == expected
