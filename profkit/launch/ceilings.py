"""Measuring what a device can do at most, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from profkit.errors import ToolError
from profkit.launch.manifest import driver_version
from profkit.launch.processes import run_child
from profkit.models.options import Device
from profkit.run.records import decode
from profkit.run.work import VERSION, Ceilings


def measure_ceilings(device: Device) -> Ceilings:
    """Return the ceilings of a device, measured now; `profkit.capture.ceilings` says how.

    Raises:
        ToolError: there is no such device, or it could not be measured.
    """
    measured = _measure_in_a_process(device)
    name, uuid = measured["device"]["name"], measured["device"]["uuid"]
    is_gpu = uuid is not None or name.startswith(("NVIDIA", "Tesla"))
    ceilings: Ceilings = decode(
        Ceilings,
        {
            "version": VERSION,
            "driver": driver_version() if is_gpu else None,
            "measured_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            **measured,
        },
    )
    return ceilings


def _measure_in_a_process(device: Device) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="profkit-") as scratch:
        result = Path(scratch) / "measured.json"
        argv = [sys.executable, "-P", "-m", "profkit.capture.ceilings", device, str(result)]
        status = run_child(argv, {**os.environ, "KINETO_LOG_LEVEL": "99"})
        if status != 0 or not result.exists():
            raise ToolError(f"measuring the device failed with exit status {status}")
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "error" in measured:
        raise ToolError(f"{measured['error']}; nothing was measured")
    return measured
