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
from profkit.run.manifest import Process
from profkit.run.work import VERSION, Ceilings

# How long each of them has held the clocks down, in ns; older versions of the library lack some of the names.
_COUNTERS = {
    "sw_power_cap": "NVML_FI_DEV_PERF_POLICY_POWER",
    "sw_thermal_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "hw_thermal_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "hw_power_brake_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment; None for what this GPU, driver or container does not tell.

    ``throttled_us`` is, by reason, how long the clocks have been held down since the driver was loaded;
    ``process_count`` is of the compute processes on it.
    """

    index: int
    uuid: str | None = None
    throttled_us: dict[str, int] = field(default_factory=dict)
    process_count: int | None = None


def read_gpus(nvml: Any = None) -> tuple[Gpu, ...]:
    """Return the state of this machine's GPUs now, as ``nvml`` reads it, by default nvidia-ml-py; none without NVML."""
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
            throttled_us=self._throttled_us(),
            process_count=None if processes is None else len(processes),
        )

    def _ask(self, function: Callable[..., Any], *more: Any) -> Any:
        try:
            return function(self._handle, *more)
        except self._nvml.NVMLError:
            return None

    def _throttled_us(self) -> dict[str, int]:
        known = {name: getattr(self._nvml, field, None) for name, field in _COUNTERS.items()}
        fields = {name: field for name, field in known.items() if field is not None}
        values = self._ask(self._nvml.nvmlDeviceGetFieldValues, list(fields.values())) or []
        counted = zip(fields, values, strict=False)
        return {name: value.value.ullVal // 1000 for name, value in counted if value.nvmlReturn == 0}


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def warn_of_gpus(before: Sequence[Gpu], after: Sequence[Gpu]) -> list[str]:
    earlier = {gpu.uuid: gpu for gpu in before}
    pairs = [(earlier[gpu.uuid], gpu) for gpu in after if gpu.uuid in earlier]
    return [
        text for first, last in pairs for text in (_warn_of_others(first, last), _warn_of_clocks(first, last)) if text
    ]


def _warn_of_others(first: Gpu, last: Gpu) -> str | None:
    count = max(first.process_count or 0, last.process_count or 0)
    if not count:
        return None
    others = f"{count:,} other {'process' if count == 1 else 'processes'} used it"
    return f"GPU {last.index} was shared during the run: {others}; the times may include waiting for them"


def _warn_of_clocks(first: Gpu, last: Gpu) -> str | None:
    slowed = {reason: us - first.throttled_us.get(reason, us) for reason, us in last.throttled_us.items()}
    reasons = ", ".join(f"{reason} {us / 1e6:.3g} s" for reason, us in slowed.items() if us > 0)
    if not reasons:
        return None
    return f"GPU {last.index}'s clocks were held down during the run ({reasons}): the times are longer than usual"


def warn_of_used_gpus(before: Sequence[Gpu], after: Sequence[Gpu], processes: Iterable[Process]) -> list[str]:
    """Warn of what disturbed the GPUs that these processes used: of all that there are, where they do not say which."""
    on_gpu = [process for process in processes if process.device == "cuda"]
    uuids = {process.conditions.gpu_uuid for process in on_gpu if process.conditions is not None} - {None}
    used = [gpu for gpu in after if not uuids or gpu.uuid in uuids]
    return warn_of_gpus(before, used) if on_gpu else []


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
