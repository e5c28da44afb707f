"""Measuring what a device can do at most, the links between GPUs and the network, in processes of their own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from profkit.errors import ToolError
from profkit.launch.gpu_state import read_gpu_state
from profkit.launch.manifest import driver_version
from profkit.launch.processes import run_child
from profkit.models.options import Device
from profkit.run.ceilings import VERSION, Ceilings
from profkit.run.links import MeasuredLinks
from profkit.run.records import decode

_PORT = "29500"
"""torchrun's default too."""


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


def measure_links(ranks: int | None, device: Device) -> MeasuredLinks | None:
    """Return how long collectives between this many GPUs of the machine take; `profkit.capture.link_times` says how.

    ``ranks`` None means all GPUs that a process here sees; the result is None if these are fewer than two.

    Raises:
        ToolError: there are fewer GPUs, or they could not be measured.
    """
    return next(iter(_measure_collectives(device, "all" if ranks is None else str(ranks), {})), None)


def measure_job(device: Device, rank: Mapping[str, str]) -> Ceilings | None:
    """Measure with all ranks of a job, each of which calls this; return what rank 0 found, and None on the others.

    Rank 0 measures its own device too, once the others are done.

    Args:
        device: what to measure.
        rank: RANK, WORLD_SIZE and LOCAL_RANK of this process.

    Raises:
        ToolError: nobody says where rank 0 is, or the devices could not be measured.
    """
    if not os.environ.get("MASTER_ADDR"):
        raise ToolError(
            f"rank {rank['RANK']} of {rank['WORLD_SIZE']}: MASTER_ADDR is not set; export MASTER_ADDR (the machine of"
            " rank 0) and MASTER_PORT, as for a training program, or start it with torchrun"
        )
    measured = _measure_collectives(device, "0", {"MASTER_PORT": os.environ.get("MASTER_PORT", _PORT), **rank})
    if rank["RANK"] != "0":
        return None
    return replace(
        measure_ceilings(device, 1),
        links=next((one for one in measured if one.machines == 1), None),
        network=tuple(one for one in measured if one.machines > 1),
    )


def _measure_collectives(device: Device, ranks: str, more: Mapping[str, str]) -> list[MeasuredLinks]:
    """Return what was measured; of GPUs on one machine, with what the links between those that were used are."""
    content = _measure("profkit.capture.link_times", device, ranks, more=more)
    found: list[MeasuredLinks] = [decode(MeasuredLinks, one) for one in content["measured"]]
    state = read_gpu_state()
    numbers = {gpu.index for gpu in state.gpus if gpu.uuid in content["uuids"]}
    links = tuple(link for link in state.links if numbers.issuperset(link.gpus))
    return [replace(one, links=links) if one.machines == 1 else one for one in found]


def _measure(module: str, *arguments: str, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Return what a module of the recording wing measures in a process of its own.

    ``more`` are environment variables for it.
    """
    with tempfile.TemporaryDirectory(prefix="profkit-") as scratch:
        result = Path(scratch) / "measured.json"
        argv = [sys.executable, "-P", "-m", module, *arguments, str(result)]
        status = run_child(argv, {**os.environ, "KINETO_LOG_LEVEL": "99", **more})
        if status != 0 or not result.exists():
            raise ToolError(f"measuring the device failed with exit status {status}")
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "error" in measured:
        raise ToolError(f"{measured['error']}; nothing was measured")
    return measured
