"""All ranks of a job: compared, each reduced by itself in a worker; and the runs of its machines put together.

A run is a directory that ``profkit run`` made, or one that holds such directories, one a node. Each trace file is read
by one worker, which hands back light records; what comes out does not depend on how many workers there are.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from profkit.analysis.ranks.comparison import RanksResult, join_ranks
from profkit.analysis.ranks.reduce import ReadRanks, read_and_reduce
from profkit.errors import CaptureError, RunError, UsageError
from profkit.files import collector_off, whole_folder
from profkit.reading import open_trace
from profkit.run.directory import MANIFEST, RANK_LIGHT, Run, runs_of_job
from profkit.run.job import Job, claim
from profkit.run.light_columns import read_light_columns

_LIGHT_PER_TASK = 64
"""One light record takes some milliseconds: a worker gets this many at a time."""


@dataclass(frozen=True)
class RankSource:
    """What one worker reads: a trace of one rank or of several, or light records alone.

    ``rank`` is the one rank to take of a run whose ranks left a trace each. ``light`` are the light records by rank.
    """

    trace: Path | None
    rank: int | None
    light: tuple[tuple[int, Path], ...]

    @property
    def folder(self) -> Path:
        """Return where it lies: the run's directory, or the one trace that was named."""
        return self.trace or self.light[0][1].parent


@collector_off()
def read_ranks(path: str | Path, *, workers: int | None = None) -> RanksResult:
    """Return the comparison of all ranks of a run; the same as ``profkit ranks``.

    Args:
        path: a run directory, a directory of one for each node, or a trace that holds several ranks.
        workers: how many processes read at once; by default as many as there are cores.

    Raises:
        CaptureError: nothing can be read.
        RunError: it is no run.
        UsageError: it holds fewer than two ranks, two nodes that both have a rank of one number, or different jobs.
    """
    path = Path(path)
    sources = find_sources(path)
    reads = _read_by_processes(sources, workers)
    found = [(rank.record, source) for source, read in zip(sources, reads, strict=True) for rank in read.ranks]
    lost = [entry for read in reads for entry in read.lost]
    if not found and lost:
        raise CaptureError(lost[0][1])
    twice = sorted(rank for rank, count in Counter(record.rank for record, _ in found).items() if count > 1)
    if twice:
        holders = list(dict.fromkeys(source.folder for record, source in found if record.rank == twice[0]))[:2]
        raise UsageError(
            f"{path}: {' and '.join(folder.name for folder in holders)} both hold rank {twice[0]}. If they are two"
            f" jobs: profkit compare {' '.join(map(str, holders))}. If they are nodes of one job: record each with"
            " `profkit run`, which notes the ranks"
        )
    if not found:
        raise RunError(f"{path}: no trace and no light record in it; `profkit summary` of a run says how it ended")
    if len(found) < 2:
        ((only, source),) = found
        if only.world_size > 1 or source.trace is None:
            others = "; put the runs of the other machines together with `profkit gather`"
            of = f" of {only.world_size}" if only.world_size > 1 else ""
            raise UsageError(f"{path}: holds rank {only.rank}{of} alone, and nothing to compare it with{others}")
        raise UsageError(f"{path}: holds one rank; profkit kernels {source.folder}")
    runs = _runs_in(path) if path.is_dir() else []
    jobs = dict.fromkeys(run.manifest.job.id for run in runs if run.manifest.job and run.manifest.job.id is not None)
    if len(jobs) > 1:
        names = " ".join(str(run.path) for run in runs)
        raise UsageError(
            f"{path}: holds runs of different jobs: {' and '.join(jobs)}; compare them: profkit compare {names}"
        )
    return join_ranks(reads)


def find_sources(path: Path) -> list[RankSource]:
    if path.is_file() and RANK_LIGHT.fullmatch(path.name):
        raise UsageError(f"{path}: the light record of one rank; all of them: profkit ranks {path.parent}")
    if not path.is_dir():
        return [RankSource(path, None, ())]
    runs = _runs_in(path)
    if not runs:
        raise RunError(f"{path}: a directory, but no profkit run, and none in it (no {MANIFEST})")
    return [source for run in runs for source in _sources_of(run)]


def _runs_in(path: Path) -> list[Run]:
    inner = sorted(run.parent for run in path.glob(f"*/{MANIFEST}"))
    return [Run(run) for run in ([path] if (path / MANIFEST).exists() else []) + inner]


def _sources_of(run: Run) -> list[RankSource]:
    light, traces = run.light_records, run.rank_traces
    if not traces and run.traces:
        return [RankSource(run.path, None, tuple(light.items()))]
    full = [RankSource(run.path, rank, ((rank, light[rank]),) if rank in light else ()) for rank in traces]
    rest = [(rank, path) for rank, path in light.items() if rank not in traces]
    parts = [rest[at : at + _LIGHT_PER_TASK] for at in range(0, len(rest), _LIGHT_PER_TASK)]
    return full + [RankSource(None, None, tuple(part)) for part in parts]


@collector_off()
def reduce_source(source: RankSource) -> ReadRanks:
    """Return the ranks of one source; what cannot be read is said, and a light record stands in for a lost trace."""
    open_it = None if source.trace is None else partial(open_trace, source.trace, rank=source.rank)
    return read_and_reduce(dict(source.light), open_it, source.rank)


def _read_by_processes(sources: Sequence[RankSource], workers: int | None) -> list[ReadRanks]:
    count = min(workers or len(os.sched_getaffinity(0)), len(sources))
    if count < 2:
        return [reduce_source(source) for source in sources]
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(reduce_source, sources))


@dataclass(frozen=True)
class Gathered:
    """What was put together: the run of each machine, its ranks, and how many machines the job has, if it says so."""

    output: Path
    runs: tuple[tuple[str, tuple[int, ...]], ...]
    expected: int | None
    left_out: tuple[str, ...]
    """What lies in the runs and is no file: links, folders, pipes."""


def gather(sources: Sequence[Path], output: Path) -> Gathered:
    """Copy the runs into ``output``, which is new, as ``node0``, ``node1``, … in the order of their ranks.

    ``sources`` are runs of one machine each, or directories that hold such runs; the output appears whole or not at
    all.

    Raises:
        RunError: a source is no run, cannot be read, or is larger than the room on the disk.
        UsageError: two sources hold one rank or are of different jobs, or one does not know its ranks.
        OSError: the copy cannot be written.
    """
    paths = [run for source in sources for run in (runs_of_job(source) or [source])]
    runs = [Run(path) for path in paths]
    ranks = {run.path: _ranks_of(run) for run in runs}
    for run in runs:
        if not ranks[run.path]:
            raise UsageError(f"{run.path}: does not say which ranks it holds; it cannot be put with others")
    twice = [rank for rank, count in Counter(rank for run in runs for rank in ranks[run.path]).items() if count > 1]
    if twice:
        both = [str(run.path) for run in runs if twice[0] in ranks[run.path]]
        raise UsageError(f"rank {twice[0]} is in {' and in '.join(both)}; name each machine's run of one job once")
    jobs = [run.manifest.job or Job() for run in runs]
    ids = list(dict.fromkeys(job.id for job in jobs if job.id is not None))
    if len(ids) > 1:
        raise UsageError(f"the runs are of different jobs: {' and '.join(ids)}")
    counts = {job.count for job in jobs if job.unit == "node"} if len({job.unit for job in jobs}) == 1 else {None}
    expected = counts.pop() if len(counts) == 1 else None
    if output.exists():
        raise RunError(f"{output}: exists; name a new directory with -o")
    target = Path(os.path.realpath(output))
    around = next((run.path for run in runs if target.is_relative_to(os.path.realpath(run.path))), None)
    if around is not None:
        raise UsageError(
            f"{output}: lies within {around}, which is to be copied; name a directory outside of it with -o"
        )
    made, left_out = [], list[str]()
    with whole_folder(output) as partial_folder:
        for number, run in enumerate(sorted(runs, key=lambda run: ranks[run.path])):
            place = claim(partial_folder, Job(ids[0] if ids else None, expected, number))
            left_out += _copy_files(run.path, place)
            made.append((place.name, ranks[run.path]))
    return Gathered(output, tuple(made), expected, tuple(left_out))


def _copy_files(source: Path, place: Path) -> list[str]:
    """Copy the files in a run; return what else lies there and is left out: links, folders, pipes."""
    sizes = {path: path.lstat() for path in sorted(source.iterdir())}
    files = [path for path, status in sizes.items() if stat.S_ISREG(status.st_mode)]
    needed, free = sum(sizes[path].st_size for path in files), shutil.disk_usage(place).free
    if needed > free:
        raise RunError(f"{source}: holds {needed / 2**30:.3g} GiB, and {place.parent} has room for {free / 2**30:.3g}")
    for path in files:
        shutil.copy2(path, place / path.name, follow_symlinks=False)
    return [str(path) for path in sizes if path not in files]


def _ranks_of(run: Run) -> tuple[int, ...]:
    noted = {process.rank for process in run.manifest.processes if process.rank is not None}
    return tuple(sorted(noted or {read_light_columns(path).record.rank for path in run.light_records.values()}))
