"""Nsight Systems from outside: where it and its importer are, how it is called, started and stopped; its exports."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from profkit.errors import ToolError, TraceError
from profkit.files import user_cache
from profkit.launch.processes import run_tool, where_said
from profkit.run.directory import LOG, NSYS_EXPORT, NSYS_REPORT

GraphTrace = Literal["node", "graph"]

CUPTI = "libcupti.so"


# From the root; of several matches the newest version is taken. Nsight Compute brings an nsys of its own.
_PLACES = (
    "opt/nvidia/nsight-systems*/*/bin/nsys",
    "opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "usr/local/cuda*/bin/nsys",
    "usr/lib/nsight-systems/bin/nsys",
    "usr/lib/nsight-systems/target-linux-*/nsys",
    "usr/lib/*/nsight-systems/target-linux-*/nsys",
    "opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "usr/local/cuda*/nsight-compute*/host/target-linux-*/nsys",
)


@dataclass(frozen=True)
class Nsys:
    """An nsys that starts: where it is, its version in its own words (``2023.4.4.54-234433681190v0``), how it records.

    ``cuda_graph_trace`` says whether a CUDA graph's kernels are traced one by one or the graph as one; ``keep_report``
    False deletes the report once it has been exported.
    """

    path: Path
    version: str
    cuda_graph_trace: GraphTrace = "node"
    keep_report: bool = True


def find_nsys(environment: Mapping[str, str], root: Path = Path("/")) -> Nsys | None:
    """Return the nsys to use: ``$NSYS``, the one on PATH, or the newest in the usual places under ``root``; or None.

    Raises:
        ToolError: ``$NSYS`` is no program, or the nsys that was found does not start.
    """
    named = environment.get("NSYS")
    if named is not None:
        program = shutil.which(named, path=environment.get("PATH"))
        if program is None:
            raise ToolError(f"$NSYS is {named}, which cannot be run; correct it or unset it")
        return _started(Path(program))
    on_path = shutil.which("nsys", path=environment.get("PATH", os.defpath))
    if on_path is not None:
        return _started(Path(on_path))
    installed = list_installed(root)
    return _started(installed[0]) if installed else None


def list_installed(root: Path) -> list[Path]:
    """Return every nsys in the usual places under ``root``, the one to use first."""
    installed: list[Path] = []
    for place in _PLACES:
        candidates = [path for path in root.glob(place) if os.access(path, os.X_OK)]
        # The newest version first.
        installed += sorted(
            candidates, key=lambda path: list(map(int, re.findall(r"\d+", str(path.parent)))), reverse=True
        )
    return installed


def build_nsys_argv(
    nsys: Nsys,
    report: Path,
    target: Sequence[str],
    *,
    cuda: bool,
    temporary: str = "/tmp",
) -> list[str]:
    """Return the command that profiles ``target`` into ``report`` (a path without suffix).

    With CUDA the capture runs from cudaProfilerStart to cudaProfilerStop; without it CUDA's APIs are not traced, and
    the NVTX ranges are those of the whole process. The CPU is not sampled: it would slow the steps.

    Args:
        temporary: the target's own TMPDIR, for nsys is to be given one that can be thrown away.
    """
    flags = [f"--trace={'cuda,nvtx' if cuda else 'nvtx'}", "--sample=none", "--cpuctxsw=none"]
    if cuda:
        flags.append(f"--cuda-graph-trace={nsys.cuda_graph_trace}")
        flags += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    # In the name of a report % begins a placeholder, for example for the host or the process.
    output = str(report).replace("%", "%%")
    return [str(nsys.path), "profile", *flags, f"--env-var=TMPDIR={temporary}", f"--output={output}", *target]


def _started(path: Path) -> Nsys:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{path}: nsys does not start: {error}") from None
    version = re.search(r"version (\d[\w.\-]*)", done.stdout)
    if done.returncode != 0 or version is None:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ToolError(f"{path}: nsys does not start: {said[-1] if said else f'exit status {done.returncode}'}")
    return Nsys(path, version[1])


def cupti_of(nsys: Path) -> str | None:
    """Return the version of the newest CUPTI in an nsys' own folder, or None if there is none.

    Behind a wrapper (``bin/nsys``) the folder is ``target-linux-*`` next to it.
    """
    folder = nsys.resolve().parent
    files = [*folder.glob(f"{CUPTI}.*"), *folder.parent.glob(f"target-linux-*/{CUPTI}.*")]
    versions = [file.name.removeprefix(f"{CUPTI}.") for file in files]
    return max((version for version in versions if re.fullmatch(r"\d+\.\d+", version)), key=numbers, default=None)


def numbers(version: str) -> list[int]:
    """Return the leading numbers of a version: ``2023.4.4.54-23v0`` is [2023, 4, 4, 54]."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return [int(number) for number in leading[0].split(".")] if leading else [0]


def is_before(version: str, other: str) -> bool:
    return numbers(version) < numbers(other)


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


def find_importer(nsys: Path, root: Path = Path("/")) -> Path | None:
    installation = nsys.resolve().parent.parent
    near = sorted(installation.glob("*/QdstrmImporter"))
    far = [path for place in _HOST_FOLDERS for path in sorted(root.glob(f"{place}/QdstrmImporter"), reverse=True)]
    return next((path for path in near + far if os.access(path, os.X_OK)), None)


def lacking_libraries(program: Path) -> list[str]:
    """Return the libraries that the dynamic loader does not find for a program; what these need it cannot say."""
    environment = {**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False, timeout=60)
    return list(dict.fromkeys(re.findall(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE)))


def how_to_install(missing: Sequence[str]) -> str:
    packages = [_PACKAGES[library] for library in missing if library in _PACKAGES]
    return f"install {' '.join(packages)}" if packages else "install them"


NO_ROOM_BYTES = 100 * 1024**2
"""With less than this nothing is recorded: where its TMPDIR is full, nsys 2023.4.4 waits for ever."""

_FULL_BYTES = 1024**2
_RAW_SUFFIX = ".qdstrm"
_PRIVATE = 0o600
"""nsys writes the environment and the command line into its files, secrets included: they are their owner's alone."""
_IMPORTS = 3
"""How often a raw file is imported: where six ran at once, that of nsys 2023.4.4 failed in 1 of 300 cases."""

_STARTS = 3
"""How often nsys is started around a program that has not begun.

Where others start at the same time, nsys 2023.4.4 ends before its program has begun in up to 3 of 100 cases.
"""

_TARGET = (
    "import os, sys; os.dup2({0}, 1); os.dup2({1}, 2); "
    "open({2!r}, 'w').write(str(os.getpid())); os.umask({3}); os.execvp(sys.argv[1], sys.argv[1:])"
)

# nsys says this and exits 0: seen when its CUPTI is older than the driver.
_LOSSY = b"Errors occurred while processing the raw events"
# nsys says this when it does not understand its own command line; the target has not been started then.
_REFUSED = re.compile(rb"\A\s*([^\n]+)\n.*^usage: nsys", re.MULTILINE | re.DOTALL)


@contextmanager
def open_session(nsys: Nsys, report: Path, log: IO[bytes], *, uses_cuda: bool = False) -> Iterator[NsysSession]:
    """Yield a session that leaves ``report``; nsys's temporary files are gone after the block.

    Interrupted, nsys leaves its raw data behind, which can be gigabytes.
    """
    places = ((report.parent, "name another with -o"), (Path(tempfile.gettempdir()), "point TMPDIR to another disk"))
    for folder, cure in places:
        free = shutil.disk_usage(folder).free
        if free < NO_ROOM_BYTES:
            left = f"{free / 1024**2:.1f} MiB are free, and nsys needs {NO_ROOM_BYTES // 1024**2}"
            raise ToolError(f"{folder}: the disk is full: {left}; free some space, or {cure}")
    with tempfile.TemporaryDirectory(prefix="profkit-", ignore_cleanup_errors=True) as scratch:
        yield NsysSession(nsys, report, log, scratch, uses_cuda=uses_cuda)


@dataclass(frozen=True)
class NsysSession:
    """One use of nsys; what it says goes to ``log``, its temporary files to ``scratch``."""

    nsys: Nsys
    report: Path
    log: IO[bytes]
    scratch: str
    uses_cuda: bool

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        reads_input: bool = False,
    ) -> int:
        """Run a program under nsys to its end and return its exit status.

        nsys is started up to `_STARTS` times, until the program has begun. A program that ``reads_input`` gets our
        standard input, which nsys hands on to it; else that is empty.

        Raises:
            ToolError: nsys was killed, did not understand how it was called, or did not start the program.
        """
        began = Path(self.scratch, "began")
        variables = {**environment, "TMPDIR": self.scratch}
        with _copies_of_outputs() as copies:
            argv = build_nsys_argv(
                self.nsys,
                self.report.with_suffix(""),
                behind_nsys(words, copies, began),
                cuda=self.uses_cuda,
                temporary=tempfile.gettempdir(),
            )
            for _ in range(_STARTS):
                said_from = self.log.tell()
                status = run_tool(argv, variables, self.log, copies, reads_input=reads_input)
                if began.exists():
                    return status
                self._raise_if_refused(said_from)
        said = _last_line(self.log, said_from) or f"exit status {status}"
        raise ToolError(f"{self.nsys.path} did not start the target: {said}{where_said(self.log)}")

    def collect(self) -> None:
        """Import what nsys left, and export it to a file beside `report`; then delete that unless it is to be kept.

        Raises:
            ToolError: nsys left nothing, or it could not be imported or exported.
        """
        report = self.report
        raw = report.with_suffix(_RAW_SUFFIX)
        if raw.exists():
            # Where its importer fails, as that of 2023.4.4 did while another ran, nsys leaves a report beside it.
            report.unlink(missing_ok=True)
            import_raw(raw, report, self.nsys.path, self.log)
        if not report.exists():
            if _is_full(report.parent):
                cure = "free some space, or name another with -o"
                raise ToolError(f"{report.parent}: the disk is full, and nsys left no report; {cure}")
            raise ToolError(f"{self.nsys.path} left no report: {_last_line(self.log)}{where_said(self.log)}")
        export = report.with_suffix(Path(NSYS_EXPORT).suffix)
        report.chmod(_PRIVATE)
        export_to(self.nsys, report, export, self.log)
        export.chmod(_PRIVATE)
        if not self.nsys.keep_report:
            report.unlink()

    def _raise_if_refused(self, said_from: int) -> None:
        self.log.seek(said_from)
        refused = _REFUSED.match(self.log.read())
        if refused:
            said = refused[1].decode(errors="replace").strip()
            raise ToolError(f"{self.nsys.path} did not start the target: {said}")


def behind_nsys(words: Sequence[str], outputs: tuple[int, int], began: Path) -> list[str]:
    """Return the command that nsys is to run: a process that leaves its number in ``began`` and becomes ``words``.

    nsys writes its own lines to the standard streams and lets its program's files be written by anyone. The program
    gets the streams ``outputs``, which it must inherit, and this process's umask.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    return [sys.executable, "-I", "-S", "-c", _TARGET.format(*outputs, str(began), mask), *words]


def open_log(run: Path) -> IO[bytes]:
    """Open the log of a run, which only its owner may read and several write: a profiler may print the command line."""
    return open(run / LOG, "w+b", opener=lambda path, flags: os.open(path, flags | os.O_APPEND, _PRIVATE))


def import_raw(raw: Path, report: Path, nsys: Path, log: IO[bytes]) -> None:
    """Turn ``raw`` (``.qdstrm``) into ``report`` (``.nsys-rep``) and remove it.

    nsys leaves a raw file where it does not find its host part, as Nsight Compute's and Debian's do not.

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
    argv = [str(importer), f"--input-file={raw}", f"--output-file={report}"]
    for _ in range(_IMPORTS):
        status = run_tool(argv, os.environ, log)
        if status == 0 and report.exists():
            raw.unlink()
            return
        report.unlink(missing_ok=True)
    raise ToolError(f"{importer} could not import {raw} (exit status {status}){where_said(log)}")


def export_to(nsys: Nsys, report: Path, export: Path, log: IO[bytes]) -> None:
    """Export ``report`` to ``export``, which appears whole or not at all; what nsys says goes to ``log``.

    Raises:
        ToolError: nsys failed; its last line is quoted. Or the disk is full.
    """
    said_from = log.tell()
    partial = export.with_name(f"partial-{os.getpid()}.{export.name}")
    try:
        argv = [str(nsys.path), "export", "--type=sqlite", "--quiet=true", f"--output={partial}", str(report)]
        status = run_tool(argv, os.environ, log)
        # nsys 2023.4.4 leaves an empty file on a full disk, and exits 0.
        if _is_full(export.parent):
            raise ToolError(f"{export.parent}: the disk is full; free some space, then export {report} again")
        if status != 0 or not partial.exists() or not partial.stat().st_size:
            said = _last_line(log, said_from) or f"exit status {status}"
            raise ToolError(f"{nsys.path} could not export {report}: {said}")
        os.replace(partial, export)
    finally:
        partial.unlink(missing_ok=True)


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


def lost_events(run: Path) -> list[str]:
    log = run / LOG
    if not log.exists() or _LOSSY not in log.read_bytes():
        return []
    return [f"nsys lost events ({log}); its version may be too old for the driver: the capture is lossy"]


def clear_unexported(run: Path) -> None:
    """Remove files that nsys was still writing: how much of the capture they hold is unknown."""
    if not (run / NSYS_EXPORT).exists():
        for left in (run / NSYS_REPORT, (run / NSYS_REPORT).with_suffix(_RAW_SUFFIX)):
            left.unlink(missing_ok=True)


@contextmanager
def _copies_of_outputs() -> Iterator[tuple[int, int]]:
    copies = os.dup(1), os.dup(2)
    try:
        yield copies
    finally:
        for copy in copies:
            os.close(copy)


def _is_full(folder: Path) -> bool:
    return shutil.disk_usage(folder).free < _FULL_BYTES


def _last_line(log: IO[bytes], position: int = 0) -> str:
    log.seek(position)
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
