"""Recording with Nsight Systems: around a program or each chosen rank; raw data imported, reports exported."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from profkit.errors import ToolError, TraceError
from profkit.files import user_cache
from profkit.launch.family import Family
from profkit.launch.nsys import Nsys, build_export_argv, build_nsys_argv, find_nsys, read_abilities
from profkit.launch.processes import PATIENCE_S, folder_of, run_child, run_tool, uninterrupted
from profkit.run.directory import LOG, NSYS_REPORT, name_of_rank
from profkit.run.recording import (
    NSYS_STARTS,
    RANK_NSYS,
    VARIABLE,
    Order,
    RankNsys,
    RankReport,
    behind_nsys,
    find_rank_reports,
    has_recorded,
)

# Beside nsys' own folder first, then wherever an Nsight tool has a host folder.
_HOST_FOLDERS = (
    "opt/nvidia/nsight-systems*/*/host-linux-*",
    "opt/nvidia/nsight-compute/*/host/*linux*",
    "usr/lib/nsight-systems/host-linux-*",
    "usr/lib/*/nsight-systems/host-linux-*",
    "usr/local/cuda*/nsight-*/host*/*linux*",
)

# Debian's names of the packages with the libraries that a bare machine lacks.
_PACKAGES = {"libdw.so.1": "libdw1", "libelf.so.1": "libelf1", "libssh.so.4": "libssh-4", "libpfm.so.4": "libpfm4"}
_NEEDED_BY = {"libdw.so.1": ("libelf.so.1",)}

_TRIES = 3
"""How often a raw file is imported: where six ran at once, that of nsys 2023.4.4 failed in 1 of 300 cases."""


def find_importer(nsys: Path, root: Path = Path("/")) -> Path | None:
    """Return the QdstrmImporter nearest to ``nsys``, or None."""
    installation = nsys.resolve().parent.parent
    near = sorted(installation.glob("*/QdstrmImporter"))
    far = [path for place in _HOST_FOLDERS for path in sorted(root.glob(f"{place}/QdstrmImporter"), reverse=True)]
    return next((path for path in near + far if os.access(path, os.X_OK)), None)


def import_raw(raw: Path, report: Path, nsys: Path, log: IO[bytes]) -> None:
    """Turn ``raw`` (``.qdstrm``) into ``report`` (``.nsys-rep``) and remove it.

    Raises:
        ToolError: there is no importer, libraries that it needs are missing (they and their packages are named), or it
            failed.
    """
    importer = find_importer(nsys)
    if importer is None:
        raise ToolError(f"{nsys} left {raw} and there is no QdstrmImporter to import it; install all of Nsight Systems")
    missing = lacking_libraries(importer)
    if missing:
        cure = how_to_install(missing)
        raise ToolError(f"{importer} lacks {', '.join(missing)}: {cure} and run again; the raw capture is {raw}")
    for _ in range(_TRIES):
        status = run_tool(build_import_argv(importer, raw, report), os.environ, log)
        if status == 0 and report.exists():
            raw.unlink()
            return
        report.unlink(missing_ok=True)
    raise ToolError(f"{importer} could not import {raw} (exit status {status}); its output is in {log.name}")


def build_import_argv(importer: Path, raw: Path, report: Path) -> list[str]:
    """Return the command that imports ``raw`` as ``report``."""
    return [str(importer), f"--input-file={raw}", f"--output-file={report}"]


def lacking_libraries(importer: Path) -> list[str]:
    """Return the libraries that the importer needs and the dynamic loader does not find."""
    return missing_libraries(_loader_listing(importer), _is_here)


def how_to_install(missing: Sequence[str]) -> str:
    """Return which packages to install for missing libraries, as far as their names are known."""
    packages = [_PACKAGES[library] for library in missing if library in _PACKAGES]
    return f"install {' '.join(packages)}" if packages else "install them"


def missing_libraries(listing: str, is_here: Callable[[str], bool]) -> list[str]:
    """Return the libraries that the dynamic loader's listing (what ldd prints) says it did not find.

    The loader cannot look into a library that is missing; what that one needs and lacks is added.
    """
    missing = list(dict.fromkeys(re.findall(r"^\s*(\S+) => not found", listing, re.MULTILINE)))
    needed = [inner for library in missing for inner in _NEEDED_BY.get(library, ()) if inner not in missing]
    return missing + [inner for inner in needed if not is_here(inner)]


def _is_here(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _loader_listing(program: Path) -> str:
    environment = {**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}
    command: Sequence[str] = [str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout


_FULL_BYTES = 1024**2
RECORDING, EXPORTING = "recording the steps with Nsight Systems", "exporting what Nsight Systems recorded"
EXPORT_SUFFIX, RAW_SUFFIX = ".sqlite", ".qdstrm"
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


def record_in_nsys(
    run: Path,
    words: Sequence[str],
    environment: Mapping[str, str],
    nsys: Nsys,
    *,
    uses_cuda: bool,
    reads_input: bool,
    progress: Callable[[str], AbstractContextManager[object]],
) -> int:
    """Run a target in nsys, export what nsys recorded, and return the target's exit status.

    Args:
        run: the run directory.
        words: the target's command.
        environment: its environment, with profkit's order.
        nsys: which one, and what it is to record.
        uses_cuda: whether the target will use CUDA.
        reads_input: whether it reads our standard input; nothing is shown then while it runs.
        progress: shows what is being done.

    Raises:
        ToolError: there is no room for nsys, it failed, or its report could not be collected.
    """
    require_room(run)
    with (
        open(run / LOG, "w+b", opener=private) as log,
        _own_outputs() as outputs,
        # Interrupted, nsys leaves its raw data behind, which can be gigabytes.
        tempfile.TemporaryDirectory(prefix="profkit-", ignore_cleanup_errors=True) as scratch,
    ):
        began = Path(scratch, "began")
        argv = build_nsys_argv(
            nsys,
            (run / NSYS_REPORT).with_suffix(""),
            behind_nsys(words, outputs, began),
            cuda=uses_cuda,
            temporary=tempfile.gettempdir(),
        )
        variables = {**environment, "TMPDIR": scratch}
        with nullcontext() if reads_input else progress(RECORDING):
            try:
                status = run_in_nsys(argv, variables, log, outputs, began, reads_input=reads_input)
            except KeyboardInterrupt:
                # The target has ended, and nsys with it: it may have been through its recorded steps for hours.
                with uninterrupted(), suppress(ToolError):
                    _collect_recorded(run, nsys, log, progress)
                raise
        _collect_recorded(run, nsys, log, progress)
    return status


def _collect_recorded(
    run: Path, nsys: Nsys, log: IO[bytes], progress: Callable[[str], AbstractContextManager[object]]
) -> None:
    """Export nsys's report, if the target recorded any step."""
    if has_recorded(run):
        with progress(EXPORTING):
            collect_report(run / NSYS_REPORT, nsys, log)


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
    pass_fds: Sequence[int],
    began: Path,
    *,
    reads_input: bool = False,
) -> int:
    """Run nsys around its target to the end and return the target's exit status.

    nsys hands its standard input on to the target: an empty one, or ours if the target ``reads_input``. The target
    leaves the file ``began``; until it has, nsys is started up to `NSYS_STARTS` times.

    Raises:
        ToolError: nsys was killed, did not understand how it was called, or did not start the target.
    """
    for _ in range(NSYS_STARTS):
        said_from = log.tell()
        status = run_tool(argv, environment, log, pass_fds, reads_input=reads_input)
        if began.exists():
            return status
        log.seek(said_from)
        refused = _REFUSED.match(log.read())
        if refused:
            raise ToolError(f"{argv[0]} did not start the target: {refused[1].decode(errors='replace').strip()}")
    raise ToolError(
        f"{argv[0]} did not start the target: {_last_line(log, said_from, status)}; its output is in {log.name}"
    )


def private(path: str, flags: int) -> int:
    """Open a log that only its owner may read and several write: what a profiler prints may hold the command line."""
    return os.open(path, flags | os.O_APPEND, 0o600)


@contextmanager
def _own_outputs() -> Iterator[tuple[int, int]]:
    """Yield copies of our standard output and error, for a child whose own two belong to a profiler."""
    copies = os.dup(1), os.dup(2)
    try:
        yield copies
    finally:
        for copy in copies:
            os.close(copy)


def collect_report(report: Path, nsys: Nsys, log: IO[bytes]) -> None:
    """Export the ``report`` that nsys left in a run to a file beside it; then delete it, unless it is to be kept.

    If nsys left its raw data, with or without a report, these are imported first.

    Raises:
        ToolError: there is none, or it could not be imported or exported.
    """
    run, export = report.parent, report.with_suffix(EXPORT_SUFFIX)
    _import_left(report, nsys, log)
    if not report.exists():
        if is_full(run):
            raise ToolError(
                f"{run}: the disk is full, and nsys left no report; free some space, or name another with -o"
            )
        raise ToolError(f"{nsys.path} left no report; its output is in {log.name}")
    report.chmod(_PRIVATE)
    export_to(nsys, report, export, log)
    export.chmod(_PRIVATE)
    if not nsys.options.keep_report:
        report.unlink()


def _import_left(report: Path, nsys: Nsys, log: IO[bytes]) -> None:
    """Make ``report`` of the raw file that nsys may have left in its place."""
    raw = report.with_suffix(RAW_SUFFIX)
    if raw.exists():
        # It keeps both where its importer says that it failed, as that of 2023.4.4 did while another ran.
        report.unlink(missing_ok=True)
        import_raw(raw, report, nsys.path, log)


def record_program(
    nsys: Nsys, words: Sequence[str], environment: Mapping[str, str], report: Path, log: IO[bytes]
) -> None:
    """Record all of a short program without CUDA into ``report``; what it prints goes to ``log``, as nsys's words do.

    Raises:
        ToolError: nsys left no report, `NSYS_STARTS` times; the program failed; or the report could not be imported.
    """
    argv = build_nsys_argv(nsys, report.with_suffix(""), words, cuda=False, temporary=tempfile.gettempdir())
    for _ in range(NSYS_STARTS):
        status = run_tool(argv, {**environment, "TMPDIR": str(report.parent)}, log)
        if report.exists() or report.with_suffix(RAW_SUFFIX).exists():
            break
    _import_left(report, nsys, log)
    if status != 0 or not report.exists():
        raise ToolError(f"{nsys.path} left no report (exit status {status})")


def lost_events(run: Path) -> list[str]:
    """Return a warning if nsys lost events, by its own log."""
    log = run / LOG
    if not log.exists() or _LOSSY not in log.read_bytes():
        return []
    return [f"nsys lost events ({log}); its version may be too old for the driver: the capture is lossy"]


_POLL_S = 0.02
_UNREAD = "unread.nsys-rep"


def run_ranks_in_nsys(
    words: Sequence[str],
    environment: Mapping[str, str],
    nsys: Nsys,
    *,
    uses_cuda: bool,
    progress: Callable[[str], AbstractContextManager[object]],
) -> tuple[int, list[str]]:
    """Run a target whose chosen ranks start an Nsight Systems each.

    Return its exit status, and a line for each rank that recorded but whose report could not be collected.

    Args:
        words: the target's command.
        environment: its environment, with profkit's order.
        nsys: which one, and what it is to record.
        uses_cuda: whether the ranks will use CUDA.
        progress: shows what is done while nothing else is seen.

    Raises:
        ToolError: there is no room for nsys, or no rank's report could be collected.
    """
    order = Order.from_environment(environment)
    run = Path(order.run)
    require_room(run)
    with (
        open(run / LOG, "w+b", opener=private) as log,
        tempfile.TemporaryDirectory(prefix="profkit-", ignore_cleanup_errors=True) as scratch,
    ):
        argv = build_nsys_argv(nsys, Path("{report}"), [], cuda=uses_cuda, temporary=tempfile.gettempdir())
        ordered = replace(order, rank_nsys=RankNsys(tuple(argv), scratch, os.getpid()))
        try:
            status = run_child(
                words, {**environment, VARIABLE: ordered.to_json()}, reads_input=True, tool=folder_of(nsys.path)
            )
        except KeyboardInterrupt:
            # The ranks have ended, and their nsys with them: they may have been through their recorded steps for hours.
            with uninterrupted(), suppress(ToolError), progress(EXPORTING):
                _collect(run, nsys, log)
            raise
        with progress(EXPORTING):
            return status, _collect(run, nsys, log)


def _collect(run: Path, nsys: Nsys, log: IO[bytes]) -> list[str]:
    """Export the reports of ranks that recorded, and remove what the others left; of a restarted rank the last counts.

    Return a line for each rank whose report could not be collected.

    Raises:
        ToolError: that is so for all ranks that recorded.
    """
    found = find_rank_reports(run)
    recorded = {report.rank: report for report in found if report.recorded.exists()}
    errors: dict[int, ToolError] = {}
    for rank, report in sorted(recorded.items()):
        try:
            _await_end(report, folder_of(nsys.path))
            final = run / name_of_rank(NSYS_REPORT, rank)
            for left in (report.path, report.path.with_suffix(RAW_SUFFIX)):
                if left.exists():
                    left.replace(final.with_suffix(left.suffix))
            collect_report(final, nsys, log)
        except ToolError as error:
            errors[rank] = error
    for path in [path for report in found for path in run.glob(f"{report.path.stem}.*")]:
        path.unlink()
    if errors and len(errors) == len(recorded):
        raise next(iter(errors.values()))
    return [f"rank {rank}: {error}{_put_aside(run, rank)}" for rank, error in errors.items()]


def _put_aside(run: Path, rank: int) -> str:
    """Rename a report that could not be exported, so that the others are read without it; return what to say of it."""
    report = run / name_of_rank(NSYS_REPORT, rank)
    if not report.exists():
        return ""
    kept = report.replace(run / name_of_rank(_UNREAD, rank))
    return f"; the report is kept as {kept.name}, and the other ranks' are read without it"


def _await_end(report: RankReport, tool: Path) -> None:
    """Wait until a rank's nsys has written its report.

    A launcher that ends a rank's first process by SIGKILL wants its program to end, which lives on under nsys.

    Raises:
        ToolError: the rank was left running, as by a script that does not wait for what it starts.
    """
    under_nsys = Family(report.path.stem, None, RANK_NSYS)
    if _runs(report.starter, VARIABLE):
        raise ToolError("it ran on when the command had ended, so nothing of it was kept")
    under_nsys.send(signal.SIGKILL, but=tool)
    deadline = time.monotonic() + PATIENCE_S
    while under_nsys.members() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    under_nsys.end()


def _runs(pid: int, variable: str) -> bool:
    """Return whether a process runs, and has this variable: the number may be another's by now."""
    try:
        return f"{variable}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
