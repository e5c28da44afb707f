"""The state of the GPUs, from a stand-in for NVML: with values that a GPU does not have, and other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from profkit.launch.gpu_state import GpuState, read_gpu_state, used_gpus
from profkit.report.commands.machine import describe_link
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
    NVML_FI_DEV_NVLINK_GET_SPEED, NVML_NVLINK_MAX_LINKS = 164, 36

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

    def nvmlDeviceGetTopologyCommonAncestor(self, gpu: dict[str, Any], other: dict[str, Any]) -> int:
        return int(self._tell(gpu, "levels")[other["UUID"]])

    def nvmlDeviceGetNvLinkState(self, gpu: dict[str, Any], link: int) -> int:
        return int(self._link(gpu, link)["state"])

    def nvmlDeviceGetNvLinkVersion(self, gpu: dict[str, Any], link: int) -> int:
        return int(self._link(gpu, link)["version"])

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: dict[str, Any], link: int) -> int:
        return int(self._link(gpu, link)["remote"])

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: dict[str, Any], link: int) -> Any:
        return SimpleNamespace(busId=self._link(gpu, link)["bus"])

    def _link(self, gpu: dict[str, Any], link: int) -> dict[str, Any]:
        links = self._tell(gpu, "NvLinks")
        if link >= len(links):
            raise self.NVMLError("invalid argument")
        found: dict[str, Any] = links[link]
        return found

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


def _linked(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [describe_link(link) for link in read_gpu_state(FakeNvml(H200 | first, BARE | second)).links]


NOWHERE = b"FFFFFFFF:FF:FF.0"
SWITCHED = {"state": 1, "version": 6, "remote": 2, "bus": NOWHERE}
SPEED = {f"field {(164, link)}": 26_562 for link in range(18)}


def test_gpus_at_one_nvlink_switch_have_the_links_that_are_active_on_both() -> None:
    """As an H200 in a virtual machine tells: version 6 is NVLink 4, and the other end's address is hidden."""
    first = {"NvLinks": [SWITCHED] * 18, "levels": {SECOND: 30}} | SPEED
    second = {"NvLinks": [SWITCHED] * 17 + [SWITCHED | {"state": 0}]}
    assert _linked(first, second) == ["17 × NVLink 4 (452 GB/s each way)"]


def test_gpus_that_are_linked_straight_have_the_links_that_lead_to_each_other() -> None:
    def to(bus: str) -> dict[str, Any]:
        return {"state": 1, "version": 2, "remote": 0, "bus": bus}

    first = {"NvLinks": [to("0:B"), to("0:C"), to("0:B")], "PciInfo": SimpleNamespace(busId="0:A")}
    second = {"NvLinks": [to("0:C"), to("0:A"), to("0:A")], "PciInfo": SimpleNamespace(busId=b"0:B")}
    assert _linked(first, second) == ["2 × NVLink 2"]


def test_links_to_elsewhere_do_not_link_two_gpus() -> None:
    first = {"NvLinks": [SWITCHED], "levels": {SECOND: 50}}
    assert _linked(first, {}) == ["PCIe and the link between two CPUs"]


def test_gpus_without_nvlink_meet_where_their_pcie_paths_do() -> None:
    slow = {"MaxPcieLinkGeneration": 4, "CurrPcieLinkWidth": 8}
    first = {"levels": {SECOND: 50}, "MaxPcieLinkGeneration": 5, "CurrPcieLinkWidth": 16}
    said = "PCIe and the link between two CPUs, PCIe 4.0 x8 (16 GB/s each way)"
    assert _linked(first, slow) == [said]
    assert _linked({"levels": {SECOND: 10}}, {}) == ["one PCIe switch"]


def test_links_of_which_nvml_says_nothing_are_not_said() -> None:
    assert _linked({}, {}) == []
