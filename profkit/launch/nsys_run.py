"""Running nsys: the disk space that it needs, its report, the export to SQLite, and how each may fail."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from profkit.errors import ToolError, TraceError
from profkit.files import user_cache
from profkit.launch.importer import import_raw
from profkit.launch.nsys import Nsys, build_export_argv, find_nsys, read_abilities
from profkit.launch.processes import run_tool
from profkit.run.directory import LOG, NSYS_EXPORT, NSYS_REPORT

_FULL_BYTES = 1024**2
_PRIVATE = 0o600
"""nsys writes the environment and the command line into its files, secrets included: they are their owner's alone."""


def export_report(report: Path) -> Path:
    """Return the SQLite export of a ``.nsys-rep``, made now or found in the user's cache under the report's content.

    Nothing is written next to the report.

    Raises:
        TraceError: the report cannot be read.
        ToolError: there is no nsys, or it could not export.
    """
    try:
        with report.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TraceError(f"{report}: {error.strerror}") from None
    export = user_cache("exports", f"{digest}.sqlite")
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
        options = read_abilities(nsys.path, "export").options
        status = run_tool(build_export_argv(nsys.path, report, partial, options), os.environ, log)
        # nsys 2023.4.4 leaves an empty file on a full disk, and exits 0.
        if is_full(export.parent):
            raise ToolError(f"{export.parent}: the disk is full; free some space, then export {report} again")
        if status != 0 or not partial.exists() or not partial.stat().st_size:
            raise ToolError(f"{nsys.path} could not export {report}: {_last_line(log, said_from, status)}")
        os.replace(partial, export)
    finally:
        partial.unlink(missing_ok=True)


def is_full(folder: Path) -> bool:
    """Return whether the disk is almost full: the file written last may be cut off."""
    return shutil.disk_usage(folder).free < _FULL_BYTES


def _last_line(log: IO[bytes], position: int, status: int) -> str:
    log.seek(position)
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), f"exit status {status}")


NO_ROOM_BYTES = 100 * 1024**2
"""With less than this nothing is recorded: where its TMPDIR is full, nsys 2023.4.4 waits for ever."""

# nsys says this and exits 0: seen when its CUPTI is older than the driver.
_LOSSY = b"Errors occurred while processing the raw events"
# nsys says this when it does not understand its own command line; the target has not been started then.
_REFUSED = re.compile(rb"\A\s*([^\n]+)\n.*^usage: nsys", re.MULTILINE | re.DOTALL)


def require_room(run: Path) -> None:
    """Raise `ToolError` unless there is room for a capture and for nsys's temporary files."""
    places = ((run, "name another with -o"), (Path(tempfile.gettempdir()), "point TMPDIR to another disk"))
    for folder, cure in places:
        free = shutil.disk_usage(folder).free
        if free < NO_ROOM_BYTES:
            left = f"{free / 1024**2:.1f} MiB are free, and nsys needs {NO_ROOM_BYTES // 1024**2}"
            raise ToolError(f"{folder}: the disk is full: {left}; free some space, or {cure}")


def run_in_nsys(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    pass_fds: Sequence[int] = (),
    *,
    reads_input: bool = False,
) -> int:
    """Run nsys around its target to the end and return the target's exit status.

    nsys hands its standard input on to the target: an empty one, or ours if the target ``reads_input``.

    Raises:
        ToolError: nsys was killed, or it did not understand how it was called.
    """
    said_from = log.tell()
    status = run_tool(argv, environment, log, pass_fds, reads_input=reads_input)
    if status != 0:
        log.seek(said_from)
        refused = _REFUSED.match(log.read())
        if refused:
            raise ToolError(f"{argv[0]} did not start the target: {refused[1].decode(errors='replace').strip()}")
    return status


def private(path: str, flags: int) -> int:
    """Open a file that only its owner may read: what a profiler prints may hold the command line."""
    return os.open(path, flags, 0o600)


@contextmanager
def own_outputs() -> Iterator[tuple[int, int]]:
    """Yield copies of our standard output and error, for a child whose own two belong to a profiler."""
    copies = os.dup(1), os.dup(2)
    try:
        yield copies
    finally:
        for copy in copies:
            os.close(copy)


def collect_report(run: Path, nsys: Nsys, log: IO[bytes]) -> None:
    """Export the report that nsys left in ``run``, imported first if it came out raw.

    The report is deleted then if it is not to be kept.

    Raises:
        ToolError: there is none, or it could not be imported or exported.
    """
    report = run / NSYS_REPORT
    raw = report.with_suffix(".qdstrm")
    if raw.exists() and not report.exists():
        import_raw(raw, report, nsys.path, log)
    if not report.exists():
        if is_full(run):
            raise ToolError(
                f"{run}: the disk is full, and nsys left no report; free some space, or name another with -o"
            )
        raise ToolError(f"{nsys.path} left no report; its output is in {log.name}")
    report.chmod(_PRIVATE)
    export_to(nsys, report, run / NSYS_EXPORT, log)
    (run / NSYS_EXPORT).chmod(_PRIVATE)
    if not nsys.options.keep_report:
        report.unlink()


def lost_events(run: Path) -> list[str]:
    """Return a warning if nsys lost events, by its own log."""
    log = run / LOG
    if not log.exists() or _LOSSY not in log.read_bytes():
        return []
    return [f"nsys lost events ({log}); its version may be too old for the driver: the capture is lossy"]
