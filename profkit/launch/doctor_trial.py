"""A real check of nsys: record a second of a Python process with ranges, export it, and count the ranges."""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import IO

from profkit.errors import ToolError
from profkit.launch.doctor import Finding
from profkit.launch.export import export_to
from profkit.launch.importer import import_raw
from profkit.launch.nsys import Nsys, build_nsys_argv
from profkit.launch.processes import run_child

_CHECK = "trial"
_RANGE = "profkit doctor"
_COUNT = 10
_PROGRAM = f"""
import time
import nvtx
for _ in range({_COUNT}):
    with nvtx.annotate({_RANGE!r}):
        time.sleep(0.1)
"""

# ENUM_NSYS_EVENT_TYPE 59: a push/pop range.
_QUERY = """
    SELECT count(*) FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId
    WHERE n.eventType = 59 AND n.end IS NOT NULL AND coalesce(n.text, s.value) = ?
"""


def try_nsys(nsys: Nsys) -> Finding:
    """Return whether ranges come through from this Python's nvtx to an export of this nsys; leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="profkit-", ignore_cleanup_errors=True) as folder, _log(folder) as log:
        try:
            count = _record(nsys, Path(folder), log)
        except ToolError as error:
            return Finding(_CHECK, "failed", _last_line(str(error), log), "follow what it says, then try again")
    if count == _COUNT:
        return Finding(_CHECK, "ok", f"recorded and exported: all {_COUNT} ranges came through")
    cure = "pip install 'nvtx<0.2.12', or use another nsys ($NSYS)"
    return Finding(_CHECK, "failed", f"recorded and exported, but {count} of {_COUNT} ranges came through", cure)


def _record(nsys: Nsys, folder: Path, log: IO[bytes]) -> int:
    report, export = folder / "trial.nsys-rep", folder / "trial.sqlite"
    target = [sys.executable, "-P", "-c", _PROGRAM]
    argv = build_nsys_argv(nsys, report.with_suffix(""), target, cuda=False, temporary=tempfile.gettempdir())
    status = run_child(argv, {**os.environ, "TMPDIR": str(folder)}, log)
    raw = report.with_suffix(".qdstrm")
    if raw.exists() and not report.exists():
        import_raw(raw, report, nsys.path, log)
    if status != 0 or not report.exists():
        raise ToolError(f"{nsys.path} left no report (exit status {status})")
    export_to(nsys, report, export, log)
    with closing(sqlite3.connect(f"{export.as_uri()}?mode=ro", uri=True)) as connection:
        try:
            return int(connection.execute(_QUERY, (_RANGE,)).fetchone()[0])
        except sqlite3.OperationalError as error:
            # nsys writes no table for what it did not see.
            if "no such table" in str(error):
                return 0
            raise ToolError(f"{nsys.path} wrote an export that SQLite cannot read: {error}") from None


def _log(folder: str) -> IO[bytes]:
    return (Path(folder) / "log").open("w+b")


def _last_line(said: str, log: IO[bytes]) -> str:
    """Return the error with the last line of the log, which goes away with the folder."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return f"{said}; its last line: {lines[-1]}" if lines and lines[-1] not in said else said
