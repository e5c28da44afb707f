"""Measuring what this machine's device can do at most, and the links between its GPUs, in processes of their own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from profkit.errors import ToolError
from profkit.launch.gpu_state import read_gpu_state
from profkit.launch.manifest import driver_version
from profkit.launch.processes import run_child
from profkit.models.options import Device
from profkit.run.ceilings import VERSION, Ceilings
from profkit.run.links import MeasuredLinks
from profkit.run.records import decode


def measure_ceilings(device: Device, ranks: int | None = None) -> Ceilings:
    """Return the ceilings, measured now; `profkit.capture.ceilings` says how.

    Args:
        device: what to measure.
        ranks: how many processes measure the links between them; by default one on each GPU. Below 2 none do.

    Raises:
        ToolError: there is no such device, there are fewer GPUs, or they could not be measured.
    """
    measured = _measure("profkit.capture.ceilings", device)
    is_gpu = measured["device"]["uuid"] is not None or measured["device"]["name"].startswith(("NVIDIA", "Tesla"))
    ranks = measured["gpu_count"] if ranks is None else ranks
    links = None if ranks < 2 else measure_links(ranks, "cuda" if is_gpu else "cpu")
    content = {
        "version": VERSION,
        "device": measured["device"],
        "torch": measured["torch"],
        "driver": driver_version() if is_gpu else None,
        "measured_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemm": measured["gemm"],
        "copy": measured["copy"],
    }
    ceilings: Ceilings = decode(Ceilings, content)
    return replace(ceilings, links=links)


def measure_links(ranks: int, device: Device) -> MeasuredLinks:
    """Return how long collectives between so many GPUs of this machine take; `profkit.capture.link_times` says how.

    Raises:
        ToolError: there are fewer GPUs, or they could not be measured.
    """
    measured = _measure("profkit.capture.link_times", device, str(ranks))
    used = measured.pop("uuids")
    state = read_gpu_state()
    numbers = {gpu.index for gpu in state.gpus if gpu.uuid in used}
    links: MeasuredLinks = decode(MeasuredLinks, measured)
    return replace(links, links=tuple(link for link in state.links if numbers.issuperset(link.gpus)))


def _measure(module: str, *arguments: str) -> dict[str, Any]:
    """Return what a module of the recording wing measures in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="profkit-") as scratch:
        result = Path(scratch) / "measured.json"
        argv = [sys.executable, "-P", "-m", module, *arguments, str(result)]
        status = run_child(argv, {**os.environ, "KINETO_LOG_LEVEL": "99"})
        if status != 0 or not result.exists():
            raise ToolError(f"measuring the device failed with exit status {status}")
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "error" in measured:
        raise ToolError(f"{measured['error']}; nothing was measured")
    return measured
