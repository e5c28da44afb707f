"""What runs in a cell's own process: facts of the machine, running out of memory, statistics of samples."""

from __future__ import annotations

import gc
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from recipes.common.recipe import Device, Row

MIB, GIB = 2**20, 2**30

_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(\w+)")
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory", re.IGNORECASE)


def describe_machine(device: Device) -> dict[str, object]:
    """Return the facts that times and bytes depend on; ``missing`` says why the device cannot be used, or is None."""
    import torch

    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    missing = None if here[device] else f"torch {torch.__version__} finds no {device} device here"
    return {
        "device": device,
        "missing": missing,
        "gpu": torch.cuda.get_device_name() if device == "cuda" and not missing else None,
        "memory_bytes": None if missing else _total_bytes(device),
        "free_bytes": None if missing else free_bytes(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda_matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cpu_threads": torch.get_num_threads(),
    }


def free_bytes(device: Device) -> int | None:
    """Return how much of the device's memory is free now; None where nothing says so."""
    import torch

    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return _host_bytes("MemAvailable") if device == "cpu" else None


def synchronize(device: Device) -> None:
    """Wait until the device has done its work."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


def run_short(work: Callable[[], object], device: Device) -> Row | None:
    """Do ``work``. If it runs out of memory return how much was asked for and how much was free, otherwise None."""
    import torch

    try:
        work()
        return None
    except (RuntimeError, MemoryError) as error:
        message = str(error)
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(message):
            raise
        free = free_bytes(device)
    # Here the error is gone, and with it the frames that hold tensors.
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    tried = _TRIED.search(message)
    asked = None if tried is None else round(float(tried[1]) * _UNITS[tried[2]])
    return {"requested_bytes": asked, "free_bytes": free}


def summarize_parts(samples: Mapping[str, Sequence[float]]) -> Row:
    """Return median, mean, standard deviation and minimum of each part's samples, in milliseconds, and the samples."""
    found: Row = {}
    for part, values in samples.items():
        found |= {
            f"{part}_ms": statistics.median(values),
            f"{part}_mean_ms": statistics.fmean(values),
            f"{part}_std_ms": statistics.stdev(values) if len(values) > 1 else None,
            f"{part}_min_ms": min(values),
            f"{part}_samples_ms": list(values),
        }
    return found


def _total_bytes(device: Device) -> int | None:
    import torch

    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return _host_bytes("MemTotal") if device == "cpu" else None


def _host_bytes(name: str) -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except FileNotFoundError:
        return None
    lines = dict(line.split(":", 1) for line in text.splitlines())
    return int(lines[name].split()[0]) * 1024
