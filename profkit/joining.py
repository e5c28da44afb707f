"""All ranks of a run, each reduced by itself in a process of its own, then joined: memory stays that of one rank.

A run is a directory that ``profkit run`` made, or one that holds such directories, one a node. Each trace file is read
by one worker, which hands back light records; what comes out does not depend on how many workers there are.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from profkit.analysis.collectives.comparison import PeakDifference, RanksResult, compare_records
from profkit.analysis.collectives.reduce import reduce_ranks
from profkit.errors import CaptureError, ProfkitError, RunError, ToolError, UsageError
from profkit.reading import open_snapshot, open_trace
from profkit.run.directory import MANIFEST, Run
from profkit.run.light_record import LightRecord, read_light_record
from profkit.run.links import GpuLink, MeasuredLinks

_LIGHT_PER_TASK = 64
"""One light record takes some milliseconds: a worker gets this many at a time."""

_WORTH_READING = 0.01
"""Two snapshots take seconds to read: a smaller difference between peaks is not explained."""


@dataclass(frozen=True)
class RankSource:
    """What one worker reads: a trace of one rank or of several, or light records alone.

    ``rank`` is the one rank to take of a run whose ranks left a trace each. ``light`` are the light records by rank.
    """

    trace: Path | None
    rank: int | None
    light: tuple[tuple[int, Path], ...]


@dataclass(frozen=True)
class ReadRanks:
    """What one worker hands back; ``lost`` says of a rank why its trace, or all of it, cannot be read."""

    records: tuple[LightRecord, ...]
    lost: tuple[tuple[int | None, str], ...] = ()


def read_ranks(path: str | Path, *, workers: int | None = None, scheduler: str | None = None) -> RanksResult:
    """Return the comparison of all ranks of a run; the same as ``profkit ranks``.

    Args:
        path: a run directory, a directory of one for each node, or a trace that holds several ranks.
        workers: how many processes read at once; by default as many as there are cores.
        scheduler: the address of a Dask scheduler whose workers see the same files; they read instead.

    Raises:
        CaptureError: nothing can be read.
        RunError: it is no run.
        UsageError: it holds fewer than two ranks, or two nodes that both have a rank of one number.
        ToolError: Dask is not installed, or its scheduler does not answer.
    """
    path = Path(path)
    sources = find_sources(path)
    found = _read_by_cluster(sources, scheduler) if scheduler else _read_by_processes(sources, workers)
    records = [record for one in found for record in one.records]
    lost = [entry for one in found for entry in one.lost]
    if not records and lost:
        raise CaptureError(lost[0][1])
    twice = [rank for rank, count in Counter(record.rank for record in records).items() if count > 1]
    if twice:
        raise UsageError(
            f"{path}: two traces hold rank {min(twice)}; record each node with `profkit run`, which notes the ranks"
        )
    if len(records) < 2:
        raise UsageError(f"{path}: holds one rank; profkit kernels {path}")
    unknown = [reason for rank, reason in lost if rank is None]
    if unknown:
        raise CaptureError(unknown[0])
    measured, links = _read_links(path)
    result = compare_records(records, {rank: reason for rank, reason in lost if rank is not None}, measured, links)
    return result if result.peaks is None else replace(result, peaks=_explain_peaks(path, result.peaks))


def find_sources(path: Path) -> list[RankSource]:
    """Return what there is to read, one source for each trace file.

    Raises:
        RunError: it is a directory, but no run and none that holds runs.
    """
    if not path.is_dir():
        return [RankSource(path, None, ())]
    runs = _runs_in(path)
    if not runs:
        raise RunError(f"{path}: a directory, but no profkit run, and none in it (no {MANIFEST})")
    return [source for run in runs for source in _sources_of(run)]


def _runs_in(path: Path) -> list[Run]:
    inner = sorted(one.parent for one in path.glob(f"*/{MANIFEST}"))
    return [Run(one) for one in ([path] if (path / MANIFEST).exists() else []) + inner]


def _explain_peaks(path: Path, peaks: PeakDifference) -> PeakDifference:
    """Return the difference with its categories, where both ranks left a snapshot that can be read."""
    if peaks.peak_bytes - peaks.median_bytes < _WORTH_READING * peaks.median_bytes or not path.is_dir():
        return peaks
    held = []
    for rank in (peaks.rank, peaks.median_rank):
        run = next((run for run in _runs_in(path) if rank in run.snapshots), None)
        if run is None:
            return peaks
        try:
            composition = open_snapshot(run.path, rank=rank).memory().composition
        except ProfkitError:  # `profkit memory --rank N` says why
            return peaks
        held.append({row.category: row.bytes for row in composition.by_category})
    differences = {name: held[0].get(name, 0) - held[1].get(name, 0) for name in dict.fromkeys([*held[0], *held[1]])}
    return replace(peaks, by_category={name: count for name, count in differences.items() if count})


def _read_links(path: Path) -> tuple[MeasuredLinks | None, tuple[GpuLink, ...]]:
    """Return what was measured of the links in the first run that knows, and what its manifest says they are."""
    runs = _runs_in(path) if path.is_dir() else []
    measured = next((run.ceilings.links for run in runs if run.ceilings is not None and run.ceilings.links), None)
    return measured, next(
        (run.manifest.gpus.links for run in runs if run.manifest.gpus and run.manifest.gpus.links), ()
    )


def _sources_of(run: Run) -> list[RankSource]:
    light, traces = run.light_records, run.rank_traces
    if not traces and run.traces:
        return [RankSource(run.path, None, tuple(light.items()))]
    full = [RankSource(run.path, rank, ((rank, light[rank]),) if rank in light else ()) for rank in traces]
    rest = [(rank, path) for rank, path in light.items() if rank not in traces]
    parts = [rest[at : at + _LIGHT_PER_TASK] for at in range(0, len(rest), _LIGHT_PER_TASK)]
    return full + [RankSource(None, None, tuple(part)) for part in parts]


def reduce_source(source: RankSource) -> ReadRanks:
    """Return the records of one source; what cannot be read is said, and a light record stands in for a lost trace."""
    lost: list[tuple[int | None, str]] = []
    light: dict[int, LightRecord] = {}
    for rank, path in source.light:
        try:
            light[rank] = replace(read_light_record(path), rank=rank)
        except ProfkitError as error:
            lost.append((rank, str(error)))
    if source.trace is None:
        return ReadRanks(tuple(light.values()), tuple(lost))
    records: dict[int, LightRecord] = {}
    try:
        for record in reduce_ranks(open_trace(source.trace, rank=source.rank), light):
            records[record.rank] = record
    except ProfkitError as error:
        known: list[int | None] = [source.rank] if source.rank is not None else [*light]
        lost += [(rank, str(error)) for rank in known or [None]]
    return ReadRanks(tuple((light | records).values()), tuple(lost))


def _read_by_processes(sources: Sequence[RankSource], workers: int | None) -> list[ReadRanks]:
    count = min(workers or len(os.sched_getaffinity(0)), len(sources))
    if count < 2:
        return [reduce_source(source) for source in sources]
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(reduce_source, sources))


def _read_by_cluster(sources: Iterable[RankSource], scheduler: str) -> list[ReadRanks]:
    try:
        from distributed import Client
    except ImportError:
        raise ToolError("--scheduler needs Dask: pip install 'profkit[cluster]'") from None
    try:
        client = Client(scheduler, timeout=10)
    except (OSError, ValueError) as error:
        raise ToolError(f"--scheduler {scheduler}: {error}") from None
    with client:
        found: list[ReadRanks] = client.gather(client.map(reduce_source, list(sources), pure=False))
    return found
