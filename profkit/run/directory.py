"""The layout of a run directory, and `Run`, through which everything in it is found and read.

``profkit run`` makes it, every analyzer reads it. A directory is a run when it holds ``manifest.json``; the manifest's
``status`` is ``complete``, ``incomplete`` or ``failed``. Of several ranks rank 0 leaves the plain names, every other
its own: ``trace.rank1.json.gz``.
"""

from __future__ import annotations

import itertools
import os
import re
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from profkit.errors import RunError, SnapshotError, TraceError, UsageError
from profkit.files import HALF_WRITTEN, PARTIAL
from profkit.run import read_text

# Each reader is imported with its first file: most commands are given a trace that lies in no run directory.
if TYPE_CHECKING:
    from profkit.run.compiled_code import CapturedGraph, Compilation, CompiledCode, CompiledGraph, GraphBreak
    from profkit.run.edits import Trials
    from profkit.run.job import Job
    from profkit.run.lines import RunLines
    from profkit.run.manifest import Manifest
    from profkit.run.work import Ceilings, RunWork

MANIFEST = "manifest.json"
NSYS_REPORT = "trace.nsys-rep"
NSYS_EXPORT = "trace.sqlite"
KINETO_TRACE = "trace.json.gz"
SNAPSHOT = "snapshot.pickle"
OWNERS = "ledger.jsonl"
COMPILED = "compiled.jsonl"
LIGHT = "light.jsonl"
LINES = "lines.jsonl"
TRIALS = "trials.jsonl"
WORK = "work.json"
LOG = "log.txt"

DEFAULT_PARENT = Path("runs")

CEILINGS = "ceilings.json"
_RECORDED = (NSYS_REPORT, NSYS_EXPORT, KINETO_TRACE, SNAPSHOT)
FILES = (MANIFEST, *_RECORDED, OWNERS, LIGHT, LINES, COMPILED, WORK, CEILINGS, TRIALS, LOG)
_TRACES = (NSYS_EXPORT, NSYS_REPORT, KINETO_TRACE)
_KINDS = [name.partition(".")[2] for name in _TRACES]
_RANK_TRACE = re.compile(r"trace(?:\.rank(\d+))?\.(sqlite|nsys-rep|json\.gz)")
_RANK_SNAPSHOT = re.compile(r"snapshot(?:\.rank(\d+))?\.pickle")
_RANK_COMPILED = re.compile(r"compiled(?:\.rank(\d+))?\.jsonl")
RANK_LIGHT = re.compile(r"light(?:\.rank(\d+))?\.jsonl")


class Run:
    """A run directory; each file is read when it is first asked for, and once.

    What reads a file raises `RunError` if that cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        """Open ``path``, or the only run in the directory of a job.

        Raises:
            RunError: it holds no manifest.
            UsageError: it holds the runs of several machines.
        """
        self.path = choose_run(Path(path))
        if not (self.path / MANIFEST).exists():
            if not self.path.exists():
                raise RunError(f"{self.path}: no such directory")
            what = "a directory, but no profkit run" if self.path.is_dir() else "a file; name the directory of a run"
            raise RunError(f"{self.path}: {what} (it has no {MANIFEST})")

    @cached_property
    def manifest(self) -> Manifest:
        from profkit.run.manifest import read_manifest

        return read_manifest(self.path / MANIFEST)

    @cached_property
    def work(self) -> RunWork | None:
        from profkit.run.work import read_work

        return read_work(self.path / WORK) if (self.path / WORK).exists() else None

    def lines(self, rank: int = 0) -> RunLines | None:
        """The lines of source behind the steps' time in one rank, if they were looked for."""
        from profkit.run.lines import read_run_lines

        path = self.path / name_of_rank(LINES, rank)
        return read_run_lines(path) if path.exists() else None

    @cached_property
    def compiled_code(self) -> dict[str, CompiledGraph]:
        """What is known of the compiled code that ran, by the graphs' ids: those of all ranks."""
        return {graph.id: graph for code in self._compiled for graph in code.graphs}

    @cached_property
    def ceilings(self) -> Ceilings | None:
        from profkit.run.work import read_ceilings

        return read_ceilings(self.path / CEILINGS) if (self.path / CEILINGS).exists() else None

    @cached_property
    def trials(self) -> tuple[Trials, ...]:
        from profkit.run.edits import read_trials

        return read_trials(self.path / TRIALS) if (self.path / TRIALS).exists() else ()

    @cached_property
    def compilations(self) -> tuple[tuple[tuple[Compilation, ...], tuple[GraphBreak, ...]], ...]:
        """What torch.compile did while the run was recorded, and where graphs broke: a pair for each rank's file."""
        return tuple((code.compilations, code.breaks) for code in self._compiled)

    @cached_property
    def captured_graphs(self) -> tuple[CapturedGraph, ...]:
        return tuple({graph.id: graph for code in self._compiled for graph in code.captured}.values())

    @cached_property
    def _compiled(self) -> list[CompiledCode]:
        from profkit.run.compiled_code import read_compiled_code

        return list(map(read_compiled_code, self.compiled_files))

    @property
    def compiled_files(self) -> list[Path]:
        return sorted(path for path in self.path.iterdir() if _RANK_COMPILED.fullmatch(path.name))

    @cached_property
    def log(self) -> str:
        file = self.path / LOG
        return read_text(file, errors="replace") if file.exists() else ""

    @property
    def traces(self) -> list[Path]:
        """Return the traces, the preferred one first: the nsys exports, the nsys reports, then torch.profiler's."""
        matches = [(path, _RANK_TRACE.fullmatch(path.name)) for path in self.path.iterdir()]
        ranked = [(_KINDS.index(match[2]), int(match[1] or 0), path) for path, match in matches if match]
        return [path for _, _, path in sorted(ranked)]

    @property
    def rank_traces(self) -> dict[int, Path]:
        """Return the traces by rank where ranks left one each; none for one process, or one nsys around all."""
        by_rank: dict[int, Path] = {}
        for path in self.traces:
            match = _RANK_TRACE.fullmatch(path.name)
            assert match is not None
            by_rank.setdefault(int(match[1] or 0), path)
        return {} if list(by_rank) == [0] else dict(sorted(by_rank.items()))

    @property
    def snapshots(self) -> dict[int, Path]:
        """Return the memory snapshots by rank; a run without ranks has rank 0 alone."""
        return self._by_rank(_RANK_SNAPSHOT)

    @property
    def light_records(self) -> dict[int, Path]:
        return self._by_rank(RANK_LIGHT)

    @property
    def ending(self) -> str:
        """Return how a run that is not complete came to its end, and how to remove what it left half written."""
        patterns = [pattern for pattern in (f"{PARTIAL}*", f"{HALF_WRITTEN}*") if any(self.path.glob(pattern))]
        if self.manifest.status != "incomplete" or not patterns:
            return self.manifest.ending
        files = " ".join(str(self.path / pattern) for pattern in patterns)
        return f"{self.manifest.ending}; once it has ended, `rm {files}` removes what it left half written"

    @property
    def files(self) -> list[Path]:
        """Return every file that belongs to a run by its name, whether or not it is there."""
        return [*(self.path / name for name in FILES), *self.path.glob("*.rank*.*")]

    def _by_rank(self, name: re.Pattern[str]) -> dict[int, Path]:
        named = {path: name.fullmatch(path.name) for path in self.path.iterdir()}
        return dict(sorted((int(match[1] or 0), path) for path, match in named.items() if match))

    def find_trace(self) -> Path:
        """Return the preferred trace, of several ranks' the first (`rank_traces` has all); TraceError says how the run
        ended.
        """
        if self.traces:
            return self.traces[0]
        if self.manifest.status != "complete":
            raise TraceError(f"{self.path}: this run holds no trace: {self.ending}")
        raise TraceError(f"{self.path}: this run holds no trace (none of {', '.join(_TRACES)})")

    def find_snapshot(self, rank: int | None) -> Path:
        """Return the memory snapshot of ``rank``, else of the rank with the highest peak.

        Raises:
            SnapshotError: there is none.
            UsageError: there is none of that rank.
        """
        snapshots = self.snapshots
        if not snapshots:
            if self.manifest.status != "complete":
                raise SnapshotError(f"{self.path}: this run holds no snapshot: {self.ending}")
            raise SnapshotError(f"{self.path}: this run holds no {SNAPSHOT}; record one with `profkit run --memory`")
        if rank is None:
            peaks = self.manifest.recorded_peaks
            return max(snapshots.items(), key=lambda item: (peaks.get(item[1].name, 0), -item[0]))[1]
        if rank not in snapshots:
            raise UsageError(f"no snapshot of rank {rank}: this run holds rank {', '.join(map(str, snapshots))}")
        return snapshots[rank]


def find_run(path: Path) -> Run | None:
    """Return the run that a path is, or that the trace or snapshot at that path belongs to; None if there is none."""
    if path.is_dir():
        return Run(path)
    named_so = path.name == SNAPSHOT or _RANK_TRACE.fullmatch(path.name)
    named_so = named_so or _RANK_SNAPSHOT.fullmatch(path.name)
    return Run(path.parent) if named_so and (path.parent / MANIFEST).exists() else None


def find_newest_run(place: Path) -> Path | None:
    """Return the complete run in ``place`` or its ``runs`` whose manifest was written last; None if there is none."""
    manifests = [*place.glob(f"*/{MANIFEST}"), *place.glob(f"{DEFAULT_PARENT}/*/{MANIFEST}")]
    newest_first = sorted(manifests, key=lambda path: (path.stat().st_mtime_ns, str(path)), reverse=True)
    return next((path.parent for path in newest_first if _is_complete(path.parent)), None)


def _is_complete(folder: Path) -> bool:
    try:
        return Run(folder).manifest.status == "complete"
    except RunError:  # a manifest of another program's, or a damaged one
        return False


def name_of_rank(name: str, rank: int) -> str:
    """Return the name of a file that each rank leaves: ``trace.rank1.json.gz``; the plain one for rank 0."""
    stem, _, suffix = name.partition(".")
    return f"{stem}.rank{rank}.{suffix}" if rank else name


def owners_of(snapshot: Path) -> Path:
    """Return where the file of owners of a run's snapshot lies, if it has one."""
    return snapshot.with_name(snapshot.name.replace("snapshot", "ledger").replace(".pickle", ".jsonl"))


def make_run_directory(output: Path | None, target: str, job: Job | None = None) -> Path:
    """Make the directory of a new run and return it: ``output``, or ``runs/<UTC time>-<target>``.

    The runs of a job lie within ``output``, or within ``runs/<job>-<target>``: see `profkit.run.job`. An existing
    ``output`` is otherwise taken only if it is an empty directory; a run is never overwritten.

    Raises:
        RunError: ``output`` is taken, or the directory cannot be made.
    """
    try:
        if output is None and (job is None or job.id is None):
            return _make_default(target if job is None or job.number is None else f"{target}-{job.unit}{job.number}")
        if job is not None:
            from profkit.run.job import claim

            name = re.sub(r"[^\w.-]+", "-", job.id or "")
            return claim(output or DEFAULT_PARENT / f"{name}-{target}", job)
        assert output is not None
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise RunError(f"{output}: exists and is not empty; name a new directory with -o, or remove this one")
        if not os.access(output, os.W_OK):
            raise RunError(f"{output}: no permission to write; name another directory with -o")
    except FileExistsError:
        raise RunError(f"{output}: exists and is not a directory; name a new directory with -o") from None
    except OSError as error:
        raise RunError(f"{error.filename or output}: {error.strerror}; name another directory with -o") from None
    return output


def runs_of_job(path: Path) -> list[Path]:
    """Return the runs within the directory of a job, by their numbers; none if it is no such directory."""
    if not path.is_dir() or (path / MANIFEST).exists():
        return []
    from profkit.run.job import is_of_job

    runs = [folder for folder in path.iterdir() if is_of_job(folder) and (folder / MANIFEST).exists()]
    return sorted(runs, key=lambda folder: (folder.name[:4], int(folder.name[4:])))


def choose_run(path: Path, rank: int | None = None) -> Path:
    """Return the run of a job that holds this rank, or is its only one; what is no directory of a job stays as it is.

    Raises:
        UsageError: it holds several runs and no rank was named, or none of them holds the rank.
    """
    runs = runs_of_job(path)
    if len(runs) <= 1:
        return runs[0] if runs else path
    if rank is not None:
        holding = [run for run in runs if rank in {process.rank for process in Run(run).manifest.processes}]
        if not holding:
            raise UsageError(f"no rank {rank}: none of the {len(runs)} runs in {path} holds it")
        return holding[0]
    whose, theirs = ("ranks", "them") if runs[0].name.startswith("rank") else ("machines", "their ranks")
    raise UsageError(
        f"{path}: holds the runs of {len(runs)} {whose}: profkit ranks {path} compares {theirs}; for one of them "
        f"name {runs[0]} or, where a command has it, --rank N"
    )


def name_run(target: str) -> Path:
    """Return what a run that begins now is called by default: ``runs/<UTC time>-<target>``."""
    return DEFAULT_PARENT / f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{target}"


def _make_default(target: str) -> Path:
    first = name_run(target)
    DEFAULT_PARENT.mkdir(exist_ok=True)
    for attempt in itertools.count(1):
        path = first if attempt == 1 else first.with_name(f"{first.name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")
