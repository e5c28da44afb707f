"""The state of the GPUs before and after a run, as NVML reports it: clocks, temperature, other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from profkit.run.manifest import THROTTLE_REASONS, Gpu

# How long each of them has held the clocks down, in ns; older versions of the library lack some of the names.
_COUNTERS = {
    "sw_power_cap": "NVML_FI_DEV_PERF_POLICY_POWER",
    "sw_thermal_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "hw_thermal_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "hw_power_brake_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
}


@dataclass(frozen=True)
class GpuState:
    """All GPUs of this machine, and the GPU of each MIG device by UUID; ``reason`` says why there are none."""

    gpus: tuple[Gpu, ...] = ()
    mig_parents: Mapping[str, str] | None = None
    reason: str | None = None


def read_gpu_state(nvml: Any = None) -> GpuState:
    """Return the state of the GPUs now.

    Args:
        nvml: the module that reads it; by default nvidia-ml-py's.
    """
    if nvml is None:
        try:
            import pynvml
        except ModuleNotFoundError:
            return GpuState(reason="nvidia-ml-py is not installed")
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuState(reason=f"NVML cannot be loaded: {error}")
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_Device(nvml, handle).describe(index) for index, handle in enumerate(handles))
        parents = {mig: gpu for handle in handles for mig, gpu in _Device(nvml, handle).mig_devices().items()}
    except nvml.NVMLError as error:
        return GpuState(reason=f"NVML failed: {error}")
    finally:
        nvml.nvmlShutdown()
    return GpuState(gpus, parents)


class _Device:
    """One GPU; a figure that it, its driver or the container does not report is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def describe(self, index: int) -> Gpu:
        nvml, ask = self._nvml, self._ask
        power_state = ask(nvml.nvmlDeviceGetPowerState)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo)
        processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses)
        return Gpu(
            index=index,
            uuid=_text(ask(nvml.nvmlDeviceGetUUID)),
            name=_text(ask(nvml.nvmlDeviceGetName)),
            power_state=None if power_state is None else f"P{power_state}",
            sm_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            temperature_c=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            memory_used_bytes=None if memory is None else memory.used,
            throttle_reasons=self._throttle_reasons(),
            throttled_us=self._throttled_us(),
            process_count=None if processes is None else len(processes),
            process_bytes=None if processes is None else _sum_if_known(one.usedGpuMemory for one in processes),
        )

    def mig_devices(self) -> dict[str, str]:
        """Return MIG device → this GPU, by UUID."""
        nvml = self._nvml
        own = _text(self._ask(nvml.nvmlDeviceGetUUID))
        found = {}
        for index in range(self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            handle = self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, index)
            uuid = None if handle is None else _text(_Device(nvml, handle)._ask(nvml.nvmlDeviceGetUUID))
            if uuid is not None and own is not None:
                found[uuid] = own
        return found

    def _ask(self, function: Callable[..., Any], *more: Any) -> Any:
        try:
            return function(self._handle, *more)
        except self._nvml.NVMLError:
            return None

    def _throttle_reasons(self) -> tuple[str, ...] | None:
        nvml = self._nvml
        newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        mask = self._ask(newer or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return None if mask is None else tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit)

    def _throttled_us(self) -> dict[str, int]:
        known = {name: getattr(self._nvml, field, None) for name, field in _COUNTERS.items()}
        fields = {name: field for name, field in known.items() if field is not None}
        values = self._ask(self._nvml.nvmlDeviceGetFieldValues, list(fields.values())) or []
        counted = zip(fields, values, strict=False)
        return {name: value.value.ullVal // 1000 for name, value in counted if value.nvmlReturn == 0}


def used_gpus(state: GpuState, uuids: Iterable[str | None], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that a run used: those whose UUIDs its processes reported, else CUDA_VISIBLE_DEVICES, else all.

    Numbers in CUDA_VISIBLE_DEVICES are NVML's only under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; a UUID may be cut short
    there, and a MIG device stands for the GPU that it is a part of.
    """
    parents = state.mig_parents or {}
    # CUDA reports a MIG device's own UUID, without what kind of device it is.
    reported = {parents.get(f"MIG-{uuid.removeprefix('GPU-')}", uuid) for uuid in uuids if uuid is not None}
    found = tuple(gpu for gpu in state.gpus if gpu.uuid in reported)
    if found:
        return found
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    wanted = [word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    wanted = [parents.get(word, word) for word in wanted]
    named = tuple(
        gpu
        for gpu in state.gpus
        if any(_names(word, gpu.uuid) or (by_bus and word == str(gpu.index)) for word in wanted)
    )
    return named or state.gpus


def _names(word: str, uuid: str | None) -> bool:
    return word.startswith("GPU-") and uuid is not None and uuid.startswith(word)


def _text(value: Any) -> str | None:
    """Return a text; older versions of the library return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _sum_if_known(values: Iterable[int | None]) -> int | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None
