"""The GPUs of this machine: what NVML reports, what disturbed them in a run, which CUDA they know, what they can do."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from profkit.errors import ToolError
from profkit.launch.nsys import numbers
from profkit.launch.processes import run_child
from profkit.run import decode
from profkit.run.manifest import THROTTLE_REASONS, Process
from profkit.run.work import VERSION, Ceilings

# How long each of them has held the clocks down, in ns; older versions of the library lack some of the names.
_COUNTERS = {
    "sw_power_cap": "NVML_FI_DEV_PERF_POLICY_POWER",
    "sw_thermal_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "hw_thermal_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "hw_power_brake_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
}

_SLOWDOWNS = frozenset(
    {"sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment; None for what this GPU, driver or container does not tell.

    ``throttle_reasons`` hold at that moment; ``throttled_us`` is, per reason, how long the clocks have been held down
    since the driver was loaded. ``process_count`` and ``process_bytes`` are of the compute processes on it.
    """

    index: int
    uuid: str | None = None
    throttle_reasons: tuple[str, ...] | None = None
    throttled_us: dict[str, int] = field(default_factory=dict)
    process_count: int | None = None
    process_bytes: int | None = None


def read_gpus(nvml: Any = None) -> tuple[Gpu, ...]:
    """Return this machine's GPUs now, as ``nvml`` reads them, by default nvidia-ml-py; none where it cannot."""
    if nvml is None:
        try:
            import pynvml
        except ModuleNotFoundError:
            return ()
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(_Device(nvml, handle).describe(index) for index, handle in enumerate(handles))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


class _Device:
    """One GPU; a figure that it, its driver or the container does not report is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def describe(self, index: int) -> Gpu:
        nvml, ask = self._nvml, self._ask
        processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses)
        return Gpu(
            index=index,
            uuid=_text(ask(nvml.nvmlDeviceGetUUID)),
            throttle_reasons=self._throttle_reasons(),
            throttled_us=self._throttled_us(),
            process_count=None if processes is None else len(processes),
            process_bytes=None if processes is None else _sum_if_known(process.usedGpuMemory for process in processes),
        )

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


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _sum_if_known(values: Iterable[int | None]) -> int | None:
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) if len(known) == len(listed) else None


def warn_of_gpus(before: Sequence[Gpu], after: Sequence[Gpu], processes: Iterable[Process]) -> list[str]:
    """Return what disturbed the GPUs that the processes used meanwhile; of all, where none of them says which."""
    on_gpu = [process for process in processes if process.device == "cuda"]
    uuids = {process.conditions.gpu_uuid for process in on_gpu if process.conditions is not None} - {None}
    earlier = {gpu.uuid: gpu for gpu in before}
    used = [gpu for gpu in after if gpu.uuid in earlier and (not uuids or gpu.uuid in uuids)] if on_gpu else []
    pairs = [(earlier[gpu.uuid], gpu) for gpu in used]
    return [text for pair in pairs for text in (_warn_of_others(*pair), _warn_of_clocks(*pair)) if text]


def _warn_of_others(first: Gpu, last: Gpu) -> str | None:
    count = max(first.process_count or 0, last.process_count or 0)
    held = max(first.process_bytes or 0, last.process_bytes or 0)
    if not count:
        return None
    others = f"{count:,} other {'process' if count == 1 else 'processes'} used it"
    size = f", with {held / 1024**3:.1f} GiB" if held else ""
    return f"GPU {last.index} was shared during the run: {others}{size}; the times may include waiting for them"


def _warn_of_clocks(first: Gpu, last: Gpu) -> str | None:
    """Say for how long the clocks were held down, where the driver counts that; else that they were at the end."""
    slowed = {reason: us - first.throttled_us.get(reason, us) for reason, us in last.throttled_us.items()}
    if any(us > 0 for us in slowed.values()):
        reasons = ", ".join(f"{reason} {us / 1e6:.3g} s" for reason, us in slowed.items() if us > 0)
        return f"GPU {last.index}'s clocks were held down during the run ({reasons}): the times are longer than usual"
    bad = sorted(set(last.throttle_reasons or ()) & _SLOWDOWNS)
    return f"GPU {last.index}'s clocks were held down when the run ended ({', '.join(bad)})" if bad else None


# The driver branch that came with each CUDA version, newest first: "CUDA Toolkit and Corresponding Driver Versions" in
# NVIDIA's CUDA Toolkit Release Notes. A driver knows the newest CUDA whose branch it reaches.
_BRANCHES = (
    (590, "13.1"),
    (580, "13.0"),
    (575, "12.9"),
    (570, "12.8"),
    (560, "12.6"),
    (555, "12.5"),
    (550, "12.4"),
    (545, "12.3"),
    (535, "12.2"),
    (530, "12.1"),
    (525, "12.0"),
    (520, "11.8"),
)


def cuda_of_driver(driver: str) -> str | None:
    """Return the newest CUDA version that a driver (``580.159.03``) knows, or None for one before CUDA 11.8."""
    branch = numbers(driver)[0]
    return next((cuda for first, cuda in _BRANCHES if branch >= first), None)


def driver_version(root: Path = Path("/")) -> str | None:
    """Return the NVIDIA driver's version as its kernel module reports it, None if there is no driver."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    version = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return version[0] if version else None


def measure_ceilings() -> Ceilings:
    """Return the ceilings of this machine's GPU, measured now; `profkit.capture.ceilings` says how.

    Raises:
        ToolError: there is no GPU, or it could not be measured.
    """
    ceilings: Ceilings = decode(
        Ceilings,
        {
            "version": VERSION,
            "driver": driver_version(),
            "measured_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            **_measure_in_a_process(),
        },
    )
    return ceilings


def _measure_in_a_process() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="profkit-") as scratch:
        result = Path(scratch) / "measured.json"
        argv = [sys.executable, "-P", "-m", "profkit.capture.ceilings", str(result)]
        status = run_child(argv, {**os.environ, "KINETO_LOG_LEVEL": "99"})
        if status != 0 or not result.exists():
            raise ToolError(f"measuring the GPU failed with exit status {status}")
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "error" in measured:
        raise ToolError(f"{measured['error']}; nothing was measured")
    return measured
