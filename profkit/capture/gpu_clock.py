"""The clock of this process's GPU and what holds it down, as NVML says."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from profkit.run.manifest import THROTTLE_REASONS

_IDLE = "gpu_idle"


class GpuClock:
    """Asks NVML, if it is here and knows the GPU; a question takes some 3 to 50 µs."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._is_tried = False

    def look(self) -> tuple[int | None, tuple[str, ...]]:
        """Return the clock of the multiprocessors in MHz, None if unknown, and why it is not higher."""
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return None, ()
        if not self._is_tried:
            self._is_tried = True
            with suppress(Exception):  # NVML is an extra: whatever it lacks is not said
                self._open()
        if self._handle is not None:
            try:
                return self._ask()
            except Exception:
                self._handle = None
        return None, ()

    def _open(self) -> None:
        import pynvml

        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid  # since torch 2.5
        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())

    def _ask(self) -> tuple[int, tuple[str, ...]]:
        nvml = self._nvml
        clock = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
        ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        mask = (ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(self._handle)
        reasons = (name for bit, name in THROTTLE_REASONS.items() if mask & bit and name != _IDLE)
        return int(clock), tuple(reasons)
