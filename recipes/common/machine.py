"""What the cells run on: the device, its memory, torch and its precision flags; for a cell's own process."""

from __future__ import annotations

from pathlib import Path

from recipes.common.recipe import Device


def describe_machine(device: Device) -> dict[str, object]:
    """Return the facts that times and bytes depend on; ``missing`` says why the device cannot be used, or is None."""
    import torch

    from profkit.capture.conditions import read_conditions

    missing = _missing(device)
    # Results are shared: which of many equal GPUs it was is nobody's business.
    precision = {name: value for name, value in read_conditions().items() if name != "gpu_uuid"}
    return {
        "device": device,
        "missing": missing,
        "gpu": torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else None,
        "memory_bytes": None if missing else _total_bytes(device),
        "free_bytes": None if missing else free_bytes(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **precision,
    }


def _total_bytes(device: Device) -> int | None:
    import torch

    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return _host_bytes("MemTotal") if device == "cpu" else None


def free_bytes(device: Device) -> int | None:
    """Return how much of the device's memory is free now; None where nothing says so."""
    import torch

    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return _host_bytes("MemAvailable") if device == "cpu" else None


def _missing(device: Device) -> str | None:
    import torch

    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return None if here[device] else f"torch {torch.__version__} finds no {device} device here"


def _host_bytes(name: str) -> int | None:
    """Return a line of Linux's /proc/meminfo in bytes."""
    try:
        text = Path("/proc/meminfo").read_text()
    except FileNotFoundError:
        return None
    lines = dict(line.split(":", 1) for line in text.splitlines())
    return int(lines[name].split()[0]) * 1024
