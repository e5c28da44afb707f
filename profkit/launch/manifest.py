"""What a run's manifest says: what was run, with what, on what, and how long it took unprofiled and profiled.

The environment is left out on purpose: it holds people's secrets.
"""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from profkit.launch.nsys import Nsys
from profkit.launch.versions import driver_in
from profkit.models.attachment import NOT_REACHED, Attachment
from profkit.models.workload import CallableWorkload, Workload
from profkit.version import __version__

_DRIVER = Path("/proc/driver/nvidia/version")


def first_manifest(
    workload: Workload | CallableWorkload | Attachment, target: str, nsys: Nsys | None, command: list[str]
) -> dict[str, Any]:
    """Return the manifest of a run that is about to begin; its status is ``incomplete``."""
    return {
        "status": "incomplete",
        "command": command,
        "target": target,
        "workload": asdict(workload),
        **({"preset": asdict(workload.preset)} if isinstance(workload, Workload) else {}),
        "profiler": "torch.profiler" if nsys is None else "nsys",
        "started_utc": _now(),
        "versions": {
            "profkit": __version__,
            "python": platform.python_version(),
            "nvtx": version("nvtx"),
            "nsys": None if nsys is None else nsys.version,
        },
        "driver": driver_version(),
        "git_revision": git_revision(),
    }


def last_manifest(first: dict[str, Any], clean: dict[str, Any], profiled: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a run that went well.

    ``clean`` and ``profiled`` hold each step's times and loss from the two processes; they are never mixed. Further
    clean steps, which wait for the device at their end alone, are ``unbroken``. Of several ranks all are the first's,
    and each rank's own stand under ``processes``.
    """
    versions = {**first["versions"], "torch": profiled["torch"], "cuda": profiled["cuda"]}
    facts = ("device", "gpu", "parameter_count", "conditions")
    samples = ("steps", "losses", "during")
    return {
        **first,
        "status": "complete",
        "exit_status": 0,
        "finished_utc": _now(),
        "versions": versions,
        **{fact: profiled[fact] for fact in facts},
        "float32_matmul_precision": profiled["conditions"]["float32_matmul_precision"],
        "clean": {part: clean[part] for part in (*samples, "unbroken", "processes") if part in clean},
        "profiled": {part: profiled[part] for part in samples},
        **({"processes": profiled["processes"]} if "processes" in profiled else {}),
    }


def script_manifest(first: dict[str, Any], processes: list[dict[str, Any]], exit_status: int) -> dict[str, Any]:
    """Return the manifest of a script's run that came to its end.

    ``processes`` is what each process of the script that made a step left, the one that counts first. Its steps before
    the recording were timed in the same process, so they are no clean twin's and stand under a name of their own.
    """
    manifest = {**first, "exit_status": exit_status, "finished_utc": _now(), "processes": processes}
    if not processes:
        return {**manifest, "status": "failed"}
    one = processes[0]
    return {
        **manifest,
        "status": "complete" if exit_status == 0 and one["state"] != NOT_REACHED else "failed",
        "versions": {**first["versions"], "torch": one["torch"], "cuda": one["cuda"]},
        **{fact: one[fact] for fact in ("device", "gpu", "conditions")},
        "float32_matmul_precision": one["conditions"]["float32_matmul_precision"],
        "attached": {
            "label": "attached, not recording",
            "steps": one["attached"],
            "during": one["during"].get("attached", {}),
        },
        "profiled": {"steps": one["profiled"], "during": one["during"].get("profiled", {})},
    }


def failed_manifest(first: dict[str, Any], reason: str | None) -> dict[str, Any]:
    """Return the manifest of a run that failed; ``reason`` is one line, or None where nobody gave one."""
    return {**first, "status": "failed", "reason": reason, "finished_utc": _now()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def driver_version() -> str | None:
    """Return the NVIDIA driver's version as its kernel module tells it, None where there is none."""
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
