"""The one door to a capture: opens a trace, a memory snapshot or a run directory, as commands and Python both name it.

A file is known by its content, not by its name, and is never written to.
"""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from profkit.errors import SnapshotError, TraceError, UsageError
from profkit.names import step_range
from profkit.run.directory import Run, choose_run, find_run, owners_of

# Imported where they are needed: a command that reads a trace should not wait for the readers of memory, nor the other
# way round.
if TYPE_CHECKING:
    from profkit.analysis.compare.comparison import CaptureComparison
    from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
    from profkit.analysis.opened import OpenedCapture, OpenedTrace
    from profkit.run.compiled_code import CompiledGraph
    from profkit.trace.columns import Trace

Kind = Literal["export", "chrome", "snapshot"]
"""An export of nsys, a torch.profiler trace (zipped or not), or a memory snapshot."""

Part = Literal["trace", "snapshot"]
"""What a capture may hold: time, memory, or both in a run."""

_REPORT = ".nsys-rep"
_SQLITE = b"SQLite format 3\x00"
_GZIP = b"\x1f\x8b"
_PICKLE = b"\x80"
_UTF8_MARK = b"\xef\xbb\xbf"


def open_trace(path: str | Path, *, rank: int | None = None, thread_only: bool = False) -> OpenedTrace:
    """Open a trace: an nsys export or report, a torch.profiler trace (``.json``, ``.json.gz``) or a run directory.

    A report (``.nsys-rep``) is read through its export: the ``.sqlite`` next to it if that is not older, else one that
    nsys makes in the user's cache. If each rank of a run left a torch.profiler trace, all are opened as one.

    Args:
        path: the capture.
        rank: only what this rank of a distributed run did.
        thread_only: place work by the launching thread's own ranges alone, as per-thread tools do.

    Raises:
        TraceError: the file cannot be read or is none of these.
        RunError: the directory is no run.
        ToolError: a report needs an export, and nsys is not here or failed.
        UsageError: there is no such rank.
    """
    path = choose_run(Path(path), rank)
    return _open_trace(path, find_run(path), rank=rank, thread_only=thread_only)


def _open_trace(path: Path, run: Run | None, *, rank: int | None, thread_only: bool = False) -> OpenedTrace:
    from profkit.analysis.opened import OpenedTrace
    from profkit.analysis.placing.expanded_ranges import explain_no_modules, nest_compiled_launches, place_graph_nodes
    from profkit.analysis.ranks import find_ranks
    from profkit.analysis.self_check import UNKNOWN_RUN, know_run
    from profkit.trace.parts import begin_at, separate_gpus

    if run is not None and path.is_dir():
        trace = _read_run(run, rank)
        known, rank_of_pid = know_run(run.manifest), run.manifest.rank_of_pid
    else:
        trace, known, rank_of_pid = read_trace_file(path), UNKNOWN_RUN, {}
    trace = nest_compiled_launches(place_graph_nodes(trace, () if run is None else run.captured_graphs))
    if run is not None:
        from profkit.analysis.kernels.compiled_code import name_compiled_kernels

        trace = name_compiled_kernels(trace, run)
        why = explain_no_modules(run, trace)
        trace = trace if why is None else replace(trace, notes=(*trace.notes, why))
    if run is not None and run.manifest.first_step is not None:
        trace = begin_at(trace, step_range(run.manifest.first_step))
    ranks = find_ranks(trace, rank_of_pid)
    trace = separate_gpus(trace, {process: number for number, process in ranks.members})
    opened = OpenedTrace(trace, thread_only=thread_only, run=run, known=known, ranks=ranks)
    return opened if rank is None else opened.of_rank(rank)


def open_snapshot(
    path: str | Path, *, phases: Mapping[str, str] | None = None, rank: int | None = None
) -> OpenedSnapshot:
    """Open a memory snapshot (``.pickle``, ``.pickle.gz``) or a run directory, and replay its history.

    Nothing in the file is executed: it may hold data only.

    Args:
        path: the snapshot; in a run directory, what the run recorded next to it is read too.
        phases: phase name → glob on the names of ``record_function`` annotations.
        rank: of a distributed run, this rank's; by default the one with the highest peak.

    Raises:
        SnapshotError: the file cannot be read or is no snapshot.
        RunError: the directory is no run, or a file of it is damaged.
        UsageError: the run has no snapshot of this rank, or ``path`` is no run.
    """
    path = choose_run(Path(path), rank)
    return _open_snapshot(path, Run(path) if path.is_dir() else None, phases=phases, rank=rank)


def _open_snapshot(
    path: Path, run: Run | None, *, phases: Mapping[str, str] | None = None, rank: int | None
) -> OpenedSnapshot:
    from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
    from profkit.run.owners import read_owners
    from profkit.snapshot.reader import read_snapshot

    recorded = None
    compiled: tuple[CompiledGraph, ...] = ()
    if run is not None and path.is_dir():
        path = run.find_snapshot(rank)
        compiled = tuple(run.compiled_code.values())
        recorded = read_owners(owners_of(path)) if owners_of(path).exists() else None
    elif rank is not None:
        raise UsageError(f"rank {rank}: {path} is one snapshot; name the run's directory")
    elif path.is_file() and _is_trace(path):
        raise SnapshotError(f"{path}: this is a trace: profkit kernels {path}")
    return OpenedSnapshot(read_snapshot(path), recorded, phases, compiled)


def open_capture(
    path: str | Path, *, rank: int | None = None, parts: Collection[Part] = ("trace", "snapshot")
) -> OpenedCapture:
    """Open a trace, a snapshot, or a run directory with all that it holds of these ``parts``.

    A file in a run directory keeps the run's manifest, and a trace there the profiler's log. ``rank`` is the one to
    take of a distributed run, as for `open_trace` and `open_snapshot`.

    Raises:
        CaptureError: a file cannot be read or is none of these.
        RunError: the directory is no run.
        ToolError: as for `open_trace`.
    """
    from profkit.analysis.opened import OpenedCapture

    path = choose_run(Path(path), rank)
    run, wanted = find_run(path), held_parts(path) & set(parts)
    trace = _open_trace(_place_of_trace(path, run), run, rank=rank) if "trace" in wanted else None
    return OpenedCapture(path, run, trace, _open_snapshot(path, run, rank=rank) if "snapshot" in wanted else None)


def held_parts(path: Path) -> set[Part]:
    """Return what a capture holds; one that is nothing that profkit knows counts as a trace, whose reader says so."""
    run = find_run(path)
    if run is not None and path.is_dir():
        held: list[tuple[Part, bool]] = [("trace", bool(run.traces)), ("snapshot", bool(run.snapshots))]
        return {part for part, is_there in held if is_there}
    return {"snapshot"} if path.is_file() and _is_pickle(path) else {"trace"}


def is_time_alone(path: Path) -> bool:
    """Return whether a trace file, or a run without any snapshot."""
    if path.is_dir():
        return find_run(path) is not None and held_parts(path) == {"trace"}
    return path.suffix == _REPORT or _is_trace(path)


def _place_of_trace(path: Path, run: Run | None) -> Path:
    is_the_runs = run is not None and path.is_file() and run.find_trace() == path and not run.rank_traces
    return path.parent if is_the_runs else path


def compare(
    before: str | PathLike[str], after: str | PathLike[str], *, range: str | None = None, force: bool = False
) -> CaptureComparison:
    """Return what changed between two traces, snapshots or run directories; the same as ``profkit compare``.

    Args:
        before: a trace, a snapshot or a run directory.
        after: another one, of the same kind.
        range: compare the kernel time under this range alone.
        force: compare captures of different provenance too; the differences stand in ``provenance``.

    Raises:
        CaptureError: one cannot be read.
        RunError: a directory is no run.
        UsageError: they hold nothing that both could be compared by, their provenance differs, or an unknown range.
    """
    from profkit.analysis.compare.comparison import compare_captures, reduce_capture

    # One after the other, so that no two traces are in memory at once.
    first, second = (reduce_capture(open_capture(Path(path)), range) for path in (before, after))
    return compare_captures(first, second, force=force)


def _read_run(run: Run, rank: int | None) -> Trace:
    """Return the trace of a run; if its ranks left one each, that of the wanted rank, or all as one."""
    from profkit.analysis.ranks import explain_no_rank
    from profkit.trace.parts import combine_traces

    files = run.rank_traces
    if not files:
        return read_trace_file(run.find_trace())
    if rank is not None and rank not in files:
        raise UsageError(explain_no_rank(rank, tuple(files)))
    wanted = {rank: files[rank]} if rank is not None else files
    # One file after the other: while it is parsed, each takes many times the memory of its columns.
    traces = {}
    for number, path in wanted.items():
        try:
            trace = read_trace_file(path)
            # Which rank its one process is stands in the file's name.
            traces[number] = replace(trace, ranks=trace.ranks or dict.fromkeys(list(trace.process_ids)[:1], number))
        except TraceError as error:
            if rank is not None:
                raise
            others = f"; --rank N reads another rank by itself, and profkit ranks {run.path} compares the others"
            raise TraceError(f"{error}{others}") from None
    for number, trace in traces.items() if rank is not None else ():
        if number not in trace.ranks.values():
            held = ", ".join(map(str, sorted(trace.ranks.values())))
            raise TraceError(f"{wanted[number]}: holds rank {held}, not {number}: a copy, or renamed")
    return combine_traces(list(traces.values()), str(run.path))


def read_trace_file(path: Path) -> Trace:
    """Return the columns of one file, by the reader that its content calls for."""
    if path.suffix == _REPORT and path.is_file():
        path = _find_export(path)
    from profkit.trace.columns import refuse_impossible

    trace = _read_columns(path)
    refuse_impossible(trace)
    return trace


def _read_columns(path: Path) -> Trace:
    kind = kind_of(path)
    if kind == "export":
        from profkit.trace.nsys import read_nsys

        return read_nsys(path)
    if kind == "snapshot":
        raise TraceError(f"{path}: this is a memory snapshot: profkit memory {path}")
    if kind == "chrome":
        from profkit.trace.kineto import read_kineto

        return read_kineto(path)
    if not path.stat().st_size:
        raise TraceError(f"{path}: the file is empty")
    raise TraceError(
        f"{path}: no capture: neither SQLite (an nsys export), JSON or gzip (a torch.profiler trace), nor a pickle (a"
        " memory snapshot)"
    )


def kind_of(path: Path) -> Kind | None:
    """Return what a file is, as far as its beginning shows; None: no capture.

    Raises:
        TraceError: it is not there, cannot be read, or is no regular file.
    """
    head = _read_head(path)
    if head.startswith(_SQLITE):
        return "export"
    if _is_pickle(path):
        return "snapshot"
    return "chrome" if head.startswith(_GZIP) or _is_json(head) else None


def _find_export(report: Path) -> Path:
    export = report.with_suffix(".sqlite")
    if export.is_file() and export.stat().st_mtime_ns >= report.stat().st_mtime_ns:
        return export
    from profkit.launch.nsys import export_report

    return export_report(report)


def _read_head(path: Path) -> bytes:
    try:
        # To open a pipe means to wait for its writer, and what is read from it cannot be read again.
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceError(f"{path}: not a regular file; write the trace to a file and give that")
        with path.open("rb") as file:
            return file.read(64)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None


def _is_json(head: bytes) -> bool:
    return head.removeprefix(_UTF8_MARK).lstrip()[:1] in (b"{", b"[")


def _is_trace(path: Path) -> bool:
    head = _unzipped_head(path, len(_SQLITE))
    return head == _SQLITE or _is_json(head)


def _is_pickle(path: Path) -> bool:
    return _unzipped_head(path, 1) == _PICKLE


def _unzipped_head(path: Path, length: int) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(length if length > 1 else 2)
        if head[:2] != _GZIP:
            return head[:length]
        with gzip.open(path) as content:
            return content.read(length)
    except (OSError, EOFError, zlib.error):
        return b""
