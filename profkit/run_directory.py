"""The layout of a run directory: the one place where the capture wing and the analysis wing meet.

``profkit run`` writes it (`profkit.launch`), every analyzer reads it through the functions here. A directory is a run
when it holds ``manifest.json``; the manifest's ``status`` is ``complete``, ``incomplete`` or ``failed``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from profkit.errors import RunError, SnapshotError, TraceError, UsageError

MANIFEST = "manifest.json"
NSYS_REPORT = "trace.nsys-rep"
NSYS_EXPORT = "trace.sqlite"
KINETO_TRACE = "trace.json.gz"
SNAPSHOT = "snapshot.pickle"
LEDGER = "ledger.jsonl"
WORK = "work.json"
CEILINGS = "ceilings.json"
PREDICTED = "predicted.json"
LOG = "log.txt"

RANK_FILES = "*.rank*.*"
"""What `name_of_rank` gives ranks other than 0."""

_RANK_TRACE = re.compile(r"trace\.rank(\d+)\.json\.gz")
_TRACES = (NSYS_EXPORT, NSYS_REPORT, KINETO_TRACE)
_NO_MANIFEST = "not a JSON manifest"
_RANK_SNAPSHOT = re.compile(r"snapshot(?:\.rank(\d+))?\.pickle")


def read_json(path: Path, malformed: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        FileNotFoundError: there is none.
        RunError: it cannot be read, or is not JSON, which ``malformed`` says.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise RunError(f"{path}: {malformed}") from None


def read_manifest(run: Path) -> dict[str, Any]:
    """Return the manifest of a run directory.

    Raises:
        RunError: ``run`` holds no manifest, or one that is not a JSON object.
    """
    path = run / MANIFEST
    try:
        manifest = read_json(path, _NO_MANIFEST)
    except FileNotFoundError:
        raise RunError(f"{run}: a directory, but no profkit run (it has no {MANIFEST})") from None
    if not isinstance(manifest, dict):
        raise RunError(f"{path}: {_NO_MANIFEST}")
    return manifest


def name_of_rank(name: str, rank: int) -> str:
    """Return the name of a file that each rank leaves: ``trace.rank1.json.gz``; the plain one for rank 0."""
    stem, _, suffix = name.partition(".")
    return f"{stem}.rank{rank}.{suffix}" if rank else name


def find_manifest(file: Path) -> dict[str, Any] | None:
    """Return the manifest of the run that a file belongs to, None if it is no trace or snapshot of a run directory."""
    is_named_so = file.name in (*_TRACES, SNAPSHOT) or _RANK_TRACE.fullmatch(file.name)
    return read_manifest(file.parent) if is_named_so and (file.parent / MANIFEST).exists() else None


def holds_trace(run: Path) -> bool:
    """Return whether a run directory holds a trace of any kind."""
    return bool(_list_traces(run))


def holds_snapshot(run: Path) -> bool:
    """Return whether a run directory holds a memory snapshot, of whichever rank."""
    return bool(find_snapshots(run))


def find_trace(run: Path) -> Path:
    """Return the trace of a run directory: the nsys export if there is one, else the report, else Kineto's trace.

    Of several ranks' traces it is the first; `rank_traces` has them all.
    """
    manifest = read_manifest(run)
    found = _list_traces(run)
    if found:
        return found[0]
    if manifest.get("status") != "complete":
        raise TraceError(f"{run}: this run holds no trace: {_ending(manifest)}")
    raise TraceError(f"{run}: this run holds no trace (none of {', '.join(_TRACES)})")


def rank_traces(run: Path) -> dict[int, Path]:
    """Return the torch.profiler traces of a run's ranks by rank; none for a run of one process or under nsys."""
    named = {path: _RANK_TRACE.fullmatch(path.name) for path in run.iterdir()}
    others = {int(match[1]): path for path, match in named.items() if match}
    if not others or find_trace(run).name in (NSYS_EXPORT, NSYS_REPORT):
        return {}
    first = {0: run / KINETO_TRACE} if (run / KINETO_TRACE).exists() else {}
    return dict(sorted({**first, **others}.items()))


def read_ranks(run: Path) -> dict[int, int]:
    """Return pid → rank of the processes that the run recorded, as they themselves told profkit."""
    processes = read_manifest(run).get("processes")
    told = processes if isinstance(processes, list) else []
    pairs = [(one.get("pid"), one.get("rank")) for one in told if isinstance(one, dict)]
    return {pid: rank for pid, rank in pairs if isinstance(pid, int) and isinstance(rank, int)}


def is_of_run(trace: Path) -> bool:
    """Return whether a file is the trace, in whatever form, of the run directory that it lies in."""
    return trace.name in (NSYS_EXPORT, NSYS_REPORT, KINETO_TRACE) and (trace.parent / MANIFEST).exists()


def find_snapshots(run: Path) -> dict[int, Path]:
    """Return the memory snapshots of a run by rank; a run without ranks has rank 0 alone."""
    named = {path: _RANK_SNAPSHOT.fullmatch(path.name) for path in run.iterdir()}
    return dict(sorted((int(match[1] or 0), path) for path, match in named.items() if match))


def find_snapshot(run: Path, rank: int | None = None) -> Path:
    """Return the memory snapshot of a run directory: that of ``rank``, else of the rank with the highest peak.

    Raises:
        SnapshotError: there is none.
        UsageError: there is none of that rank.
    """
    manifest = read_manifest(run)
    found = find_snapshots(run)
    if not found:
        if manifest.get("status") != "complete":
            raise SnapshotError(f"{run}: this run holds no snapshot: {_ending(manifest)}")
        raise SnapshotError(f"{run}: this run holds no {SNAPSHOT}; record one with `profkit run --memory`")
    if rank is None:
        peaks = _recorded_peaks(manifest)
        return max(found.items(), key=lambda item: (peaks.get(item[1].name, 0), -item[0]))[1]
    if rank not in found:
        raise UsageError(f"--rank {rank}: this run holds no snapshot of it; there is {', '.join(map(str, found))}")
    return found[rank]


def ledger_of(snapshot: Path) -> Path:
    """Return where the ledger of a run's snapshot lies, if it has one."""
    return snapshot.with_name(snapshot.name.replace("snapshot", "ledger").replace(".pickle", ".jsonl"))


def _recorded_peaks(manifest: dict[str, Any]) -> dict[str, int]:
    """Return each snapshot's allocated peak, as the processes that left them noted it."""
    memory = manifest.get("memory")
    processes = memory.get("processes", []) if isinstance(memory, dict) else []
    told = [one["memory"] for one in processes if isinstance(one, dict) and isinstance(one.get("memory"), dict)]
    return {str(one.get("snapshot")): int(one.get("allocated_peak_bytes") or 0) for one in told}


def _list_traces(run: Path) -> list[Path]:
    """Return the traces of a run directory in the order in which `find_trace` prefers them."""
    of_ranks = sorted(path.name for path in run.iterdir() if _RANK_TRACE.fullmatch(path.name))
    return [run / name for name in (*_TRACES, *of_ranks) if (run / name).exists()]


def _ending(manifest: dict[str, Any]) -> str:
    """Return how a run that is not complete came to its end."""
    if manifest.get("status") == "failed":
        return f"it failed ({manifest.get('reason') or 'exit status ' + str(manifest.get('exit_status'))})"
    return "it did not come to its end"
