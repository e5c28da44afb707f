"""The runs of a job's machines, copied from where each lies into the directory of one job."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profkit.errors import RunError, UsageError
from profkit.run.directory import Run, runs_of_job
from profkit.run.job import Job, claim
from profkit.run.light_columns import read_light_columns


@dataclass(frozen=True)
class Gathered:
    """What was put together: the run of each machine, its ranks, and how many machines the job has, if it says so."""

    output: Path
    runs: tuple[tuple[str, tuple[int, ...]], ...]
    expected: int | None


def gather(sources: Sequence[Path], output: Path) -> Gathered:
    """Copy the runs into ``output``, which is new, as ``node0``, ``node1``, … in the order of their ranks.

    Args:
        sources: runs of one machine each, or directories that hold such runs.
        output: the directory to make; it appears whole or not at all.

    Raises:
        RunError: a source is no run, or cannot be read.
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
    around = next((run.path for run in runs if output.resolve().is_relative_to(run.path.resolve())), None)
    if around is not None:
        raise UsageError(
            f"{output}: lies within {around}, which is to be copied; name a directory outside of it with -o"
        )
    ordered = sorted(runs, key=lambda run: ranks[run.path])
    partial = output.with_name(f".profkit-{os.getpid()}-{output.name}")
    try:
        made = []
        for number, run in enumerate(ordered):
            place = claim(partial, Job(ids[0] if ids else None, expected, number))
            shutil.copytree(run.path, place, dirs_exist_ok=True)
            made.append((place.name, ranks[run.path]))
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Gathered(output, tuple(made), expected)


def _ranks_of(run: Run) -> tuple[int, ...]:
    """Return the ranks of a run by its manifest, else by its light records."""
    noted = {process.rank for process in run.manifest.processes if process.rank is not None}
    return tuple(sorted(noted or {read_light_columns(path).record.rank for path in run.light_records.values()}))
