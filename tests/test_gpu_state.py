"""The state of the GPUs, from a stand-in for NVML: with values that a GPU does not have, and other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from profkit.launch.gpu_state import GpuState, read_gpu_state, used_gpus
from profkit.run.manifest import Gpu

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


def test_without_a_driver_the_reason_is_one_line() -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("Driver Not Loaded")

    assert read_gpu_state(NoDriver()) == GpuState(reason="NVML cannot be loaded: Driver Not Loaded")


def test_without_the_library_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert read_gpu_state().reason == "nvidia-ml-py is not installed"


BOTH = read_gpu_state(FakeNvml(H200, BARE))


@pytest.mark.parametrize(
    ("reported", "indices"), [([SECOND], [1]), ([FIRST, SECOND, None], [0, 1]), ([], [0, 1]), (["GPU-unheard-of"], [])]
)
def test_the_gpus_of_a_run_are_those_that_its_processes_name(reported: list[str | None], indices: list[int]) -> None:
    assert [gpu.index for gpu in used_gpus(BOTH, reported)] == indices
