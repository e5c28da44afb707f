"""What a run's manifest says before the run begins: what is run, with what, on what."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from profkit.launch.nsys import Nsys
from profkit.launch.passes import Target
from profkit.launch.versions import driver_in
from profkit.run.manifest import Manifest
from profkit.version import __version__

_DRIVER = Path("/proc/driver/nvidia/version")


def begin_manifest(target: Target, nsys: Nsys | None, command: list[str]) -> Manifest:
    """Return the manifest of a run that is about to begin; its status is ``incomplete``."""
    records_trace = target.passes[-1].order.recorder != "memory"
    return Manifest(
        command=tuple(command),
        target=target.title,
        kind=target.kind,
        argv=target.argv,
        workload=target.workload,
        preset=target.preset,
        parameter_count=target.parameter_count,
        profiler=None if not records_trace else "torch.profiler" if nsys is None else "nsys",
        started_utc=utc_now(),
        versions={
            "profkit": __version__,
            "python": platform.python_version(),
            "nvtx": version("nvtx"),
            "nsys": None if nsys is None else nsys.version,
        },
        driver=driver_version(),
        git_revision=git_revision(),
    )


def utc_now() -> str:
    """Return the current time as the manifest writes it: ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def driver_version() -> str | None:
    """Return the NVIDIA driver's version as its kernel module reports it, None if there is no driver."""
    try:
        text = _DRIVER.read_text()
    except FileNotFoundError:
        return None
    return driver_in(text)


def git_revision() -> str | None:
    """Return the revision checked out in the working directory, ``+`` after it if files differ; None without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
