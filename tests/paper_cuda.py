"""A CUDA of paper for scripts under test: torch's own lazy initialisation, and what it asks of CUDA's allocator.

A script calls `install` where it would see a GPU, and `torch.cuda.init` where it would first use it. Its tensors stay
on the CPU, and profkit takes them for the GPU's; the allocations are those of `tests.memory_captures.Training`.
``CALLS`` is what torch's allocator was told. While a profiler of torch's records there is none of it: that would look
for a real one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # before there seems to be a CUDA build, whose functions it would look for

from tests.allocator_reference import MIB
from tests.memory_captures import Training

CALLS: list[str] = []


class _Cuda:
    def __init__(self) -> None:
        self.training = Training(scale=1 + int(os.environ.get("RANK", "0")))
        self.observers: list[Callable[..., None]] = []
        self.metadata = ""
        self.is_recording = False
        self.reset_from = 0

    def record(self, enabled: str | None, *_: object) -> None:
        CALLS.append(f"record {enabled}")
        self.is_recording = enabled is not None

    def snapshot(self, _device: object) -> dict[str, Any]:
        CALLS.append("snapshot")
        if os.environ.get("PAPER_FULL_DISK"):
            raise OSError(28, "No space left on device")
        return self.training.snapshot()

    def statistics(self, _device: int) -> dict[str, Any]:
        own = self.training.allocator
        figures = {"allocated": own.allocated, "requested": own.requested, "reserved": own.reserved}
        return {f"{name}_bytes": {"all": {"current": one.current, "peak": one.peak}} for name, one in figures.items()}

    def reset_peaks(self, _device: int) -> None:
        CALLS.append("reset")
        own = self.training.allocator
        for one in (own.allocated, own.requested, own.reserved):
            one.peak = one.current

    def set_metadata(self, text: str) -> None:
        self.metadata = text
        CALLS.append(f"metadata {text}")


class _Runtime:
    @staticmethod
    def cudaMemGetInfo(_device: int) -> tuple[int, int]:
        return 0, 2**34


_TOTAL_BYTES = 2**34


def install() -> None:
    """Have torch find one GPU that nobody has used yet."""
    if '"recorder": "kineto"' in os.environ.get("PROFKIT_ATTACH", ""):
        torch.cuda.init = lambda: None
        return
    cuda = _Cuda()
    functions: dict[str, Callable[..., Any]] = {
        "getDeviceCount": lambda: 1,
        "init": lambda: CALLS.append("init"),
        "getDevice": lambda: 0,
        "exchangeDevice": lambda _device: 0,
        "maybeExchangeDevice": lambda _device: 0,
        "synchronize": lambda: None,
        "record_memory_history": cuda.record,
        "memorySnapshot": cuda.snapshot,
        "memoryStats": cuda.statistics,
        "resetPeakMemoryStats": cuda.reset_peaks,
        "attach_out_of_memory_observer": cuda.observers.append,
        "setMemoryMetadata": cuda.set_metadata,
        "getMemoryMetadata": lambda: cuda.metadata,
    }
    for name, function in functions.items():
        setattr(torch._C, f"_cuda_{name}", function)
    torch.cuda._cudart = _Runtime
    torch.cuda.default_generators = (torch.Generator(),)
    torch.cuda.get_device_name = lambda _device=None: "paper"
    torch.cuda.get_device_properties = lambda _device=None: SimpleNamespace(total_memory=_TOTAL_BYTES)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda._exchange_device = lambda _device: 0
    torch.cuda._maybe_exchange_device = lambda _device: 0
    torch.cuda.exhaust = lambda: _fail(cuda)
    if "profkit.capture.owners" in sys.modules:
        sys.modules["profkit.capture.owners"].OwnerLedger._is_ours = staticmethod(lambda _tensor: True)


def _fail(cuda: _Cuda) -> None:
    own = cuda.training.allocator
    own.clock += 1
    own.events.append({"action": "oom", "device_free": MIB, "size": 99 * MIB, "stream": 0, "time_us": own.clock})
    for observer in cuda.observers:
        observer(0, 99 * MIB, 2**34, MIB)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99.00 MiB.")
