"""Measuring what this machine's device can do at most, in a process of its own."""

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
from profkit.run.ceilings import VERSION, Ceilings
from profkit.run.records import decode


def measure_ceilings(device: Device) -> Ceilings:
    """Return the ceilings, measured now; `profkit.capture.ceilings` says how.

    Raises:
        ToolError: there is no such device, or it could not be measured.
    """
    with tempfile.TemporaryDirectory(prefix="profkit-") as scratch:
        result = Path(scratch) / "ceilings.json"
        argv = [sys.executable, "-P", "-m", "profkit.capture.ceilings", device, str(result)]
        status = run_child(argv, {**os.environ, "KINETO_LOG_LEVEL": "99"})
        if status != 0 or not result.exists():
            raise ToolError(f"measuring the device failed with exit status {status}")
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "error" in measured:
        raise ToolError(f"{measured['error']}; nothing was measured")
    is_gpu = measured["device"]["uuid"] is not None or measured["device"]["name"].startswith(("NVIDIA", "Tesla"))
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
    return ceilings
