"""What a run's manifest says: before the run begins what is run, with what, on what; after each pass what it found."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

from profkit.launch.nsys import Nsys
from profkit.launch.passes import Outcome, Target
from profkit.launch.versions import driver_in
from profkit.run.manifest import Manifest, MemoryPass, Samples
from profkit.version import __version__

_DRIVER = Path("/proc/driver/nvidia/version")


SECRET_NAMES = ("*token", "*key", "*secret", "*password", "*passwd", "*credential*")
"""Names of options and variables whose values the manifest leaves out."""

REDACTED = "(redacted)"


def redact(words: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """Return a command line without the values of options and variables whose names match one of ``names``.

    ``--api-key V``, ``--api-key=V``, ``api_key=V`` and ``API_KEY=V`` are all found by ``*key``: case, leading ``-`` and
    the difference of ``-`` and ``_`` do not matter.
    """
    patterns = [_plain(name) for name in names]
    found: list[str] = []
    takes_next = False
    for word in words:
        name, equals, _value = word.partition("=")
        is_secret = any(fnmatchcase(_plain(name), pattern) for pattern in patterns)
        if takes_next and not word.startswith("-"):
            found.append(REDACTED)
        elif is_secret and equals:
            found.append(f"{name}={REDACTED}")
        else:
            found.append(word)
        takes_next = is_secret and not equals and word.startswith("-")
    return tuple(found)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def begin_manifest(target: Target, nsys: Nsys | None, command: list[str], secret_names: Iterable[str]) -> Manifest:
    """Return the manifest of a run that is about to begin; its status is ``incomplete``.

    Values of options whose names match ``secret_names`` are left out of the command lines.
    """
    names = (*SECRET_NAMES, *secret_names)
    argv = redact(target.argv, names)
    records_trace = target.passes[-1].order.recorder not in ("memory", "oom")
    return Manifest(
        command=redact(command, names),
        target=" ".join(argv) or target.title,
        kind=target.kind,
        argv=argv,
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


def with_outcome(manifest: Manifest, outcome: Outcome) -> Manifest:
    """Return the manifest with what a pass found; of several ranks the first one that was recorded counts."""
    manifest = replace(manifest, exit_status=outcome.exit_status, finished_utc=utc_now())
    order = outcome.order
    first = min(outcome.processes, key=lambda one: not one.is_recorded, default=None)
    recorded = Samples()
    if first is not None:
        recorded = Samples(first.profiled, first.during.get("profiled", {}), outcome.losses)
        manifest = replace(
            manifest,
            versions={**manifest.versions, "torch": first.torch, "cuda": first.cuda},
            device=first.device,
            gpu=first.gpu,
            conditions=first.conditions,
            float32_matmul_precision=first.conditions.float32_matmul_precision if first.conditions else None,
        )
    if order.memory is not None:
        processes = tuple(replace(one, attached=(), profiled=(), during={}) for one in outcome.processes)
        remembered = MemoryPass(processes=processes, **asdict(order.memory))
        if order.recorder in ("memory", "oom"):
            return replace(manifest, memory=replace(remembered, steps=recorded.steps, losses=outcome.losses))
        # Its steps are those of the trace, which the recorder slowed too.
        manifest = replace(manifest, memory=remembered)
    if order.recorder == "none":
        return replace(manifest, clean=recorded)
    manifest = replace(manifest, processes=outcome.processes)
    if first is None:
        return manifest
    attached = None if order.own_steps else Samples(first.attached, first.during.get("attached", {}))
    return replace(manifest, attached=attached, profiled=recorded)
