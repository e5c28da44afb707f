"""Recording with Nsight Systems, from inside the process that it watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def recorded_by_nsys(device: torch.device) -> Iterator[None]:
    """Have nsys capture the block alone, through CUDA's profiler API (``--capture-range=cudaProfilerApi``).

    Without CUDA there is no such API, and nsys captures the process from start to end.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()
