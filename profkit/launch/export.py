"""Exporting an Nsight Systems report to SQLite, the form that profkit reads."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from profkit.errors import ToolError, TraceError
from profkit.launch.nsys import Nsys, build_export_argv, find_nsys
from profkit.launch.processes import run_tool

_FULL_BYTES = 1024**2


def export_report(report: Path) -> Path:
    """Return the SQLite export of a ``.nsys-rep``, made now or found in the user's cache under the report's content.

    Nothing is written beside the report.

    Raises:
        TraceError: the report cannot be read.
        ToolError: there is no nsys, or it could not export.
    """
    from platformdirs import user_cache_path

    try:
        with report.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TraceError(f"{report}: {error.strerror}") from None
    export = user_cache_path("profkit") / "exports" / f"{digest}.sqlite"
    if export.exists():
        return export
    nsys = find_nsys(os.environ)
    if nsys is None:
        raise ToolError(
            f"{report}: there is no Nsight Systems here to export it; put nsys on PATH or name it in $NSYS, or run "
            f"`nsys export --type=sqlite {report}` where it is and read the .sqlite"
        )
    export.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as log:
        export_to(nsys, report, export, log)
    return export


def export_to(nsys: Nsys, report: Path, export: Path, log: IO[bytes]) -> None:
    """Export ``report`` to ``export``, which appears whole or not at all; what nsys says goes to ``log``.

    Raises:
        ToolError: nsys failed; its last line is quoted. Or the disk is full.
    """
    said_from = log.tell()
    partial = export.with_name(f"partial-{os.getpid()}.{export.name}")
    try:
        status = run_tool(build_export_argv(nsys.path, report, partial), os.environ, log)
        # nsys 2023.4.4 leaves an empty file on a full disk, and exits 0.
        if is_full(export.parent):
            raise ToolError(f"{export.parent}: the disk is full; free some space, then export {report} again")
        if status != 0 or not partial.exists() or not partial.stat().st_size:
            raise ToolError(f"{nsys.path} could not export {report}: {_last_line(log, said_from, status)}")
        os.replace(partial, export)
    finally:
        partial.unlink(missing_ok=True)


def is_full(folder: Path) -> bool:
    """Return whether the disk is as good as full: what was written to it last may be cut off."""
    return shutil.disk_usage(folder).free < _FULL_BYTES


def _last_line(log: IO[bytes], position: int, status: int) -> str:
    log.seek(position)
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), f"exit status {status}")
