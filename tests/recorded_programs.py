"""Recordings of the programs in ``tests/programs``, and what the tests read off them."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from profkit import read_trace
from profkit.analysis.opened import OpenedTrace
from profkit.names import BACKWARD
from profkit.trace.nesting import ancestors
from tests.forked_scripts import Forks
from tests.in_process import check_profkit
from tests.operator_links import ENGINE
from tests.programs_counted import Program

STEPS = 2
OPTIONS = ("-o", "run", "--warmup", "2", "--steps", str(STEPS))


@dataclass(frozen=True)
class Recording:
    """A program run twice: what it printed plainly and under ``profkit run``, and the run."""

    plain: str
    said: str
    run: Path

    @property
    def trace(self) -> OpenedTrace:
        """The recorded steps; of several ranks the first one's."""
        return read_trace(self.run, rank=0 if (self.run / "trace.rank1.json.gz").exists() else None)


def record(program: Program, forks: Forks, place: Path) -> Recording:
    """Run the program in the folder ``place`` plainly and under ``profkit run``; both must end well."""
    words = [sys.executable, *program.words]
    plain = forks.check(words, place)
    done = forks.check_profkit("run", *OPTIONS, "--", *words, cwd=place)
    return Recording(plain.stdout, done.stdout, place / "run")


def record_with_nsys(program: Program, place: Path) -> OpenedTrace:
    """Return what ``profkit run --nsys`` records of the program in the folder ``place``; it must end well."""
    done = check_profkit("run", *OPTIONS, "--nsys", "--", sys.executable, *program.words, cwd=place)
    assert "Generating" not in done.stdout + done.stderr, "what nsys says is in its log"
    return read_trace(place / "run")


def times_by_step(opened: OpenedTrace) -> list[dict[str, int]]:
    """Return, of each step, how often each path below it was opened; the step itself has the path ``""``."""
    return _by_step(opened, "instances")


def kernels_by_step(opened: OpenedTrace) -> list[dict[str, int]]:
    """Return, of each step, how many kernels lie under each path below it."""
    return _by_step(opened, "kernel_count")


def _by_step(opened: OpenedTrace, column: str) -> list[dict[str, int]]:
    steps: dict[str, Counter[str]] = {}
    for row in opened.ranges().ranges:
        step, *path = [part for part in row.path.split("/") if not _is_torchs(part)]
        if step.startswith("step ") and not _is_torchs(row.name):
            steps.setdefault(step, Counter())["/".join(path)] += getattr(row, column)
    return [dict(found) for found in steps.values()]


def _is_torchs(name: str) -> bool:
    """Return whether torch or NCCL opens a range of this name, for one of the two profilers alone."""
    return "#" in name or name.endswith("DataParallel.forward") or name.startswith("nccl")


def assert_the_tree_is_whole(opened: OpenedTrace) -> None:
    """Every nanosecond of work lies in one line of the tree, not counting the lines around it, or in no range."""
    rows = opened.ranges().ranges
    inside = {row.path: 0 for row in rows}
    for row in rows:
        around = row.path.rpartition("/")[0]
        if around in inside:
            inside[around] += row.kernel_time_ns
    own = {row.path: row.kernel_time_ns - inside[row.path] for row in rows}
    assert min(own.values()) >= 0
    ledger = opened.attribution.ledger
    assert sum(own.values()) + ledger.outside_ns + ledger.ambiguous_ns + ledger.no_launch_ns == ledger.total_ns
    assert ledger.total_ns == int(opened.trace.work.duration_ns.sum()) > 0


def backward_ns_by_path(opened: OpenedTrace) -> dict[str, int]:
    """Return the time of the work directly in each path below ``backward``, without the autograd engine's own."""
    work, names = opened.trace.work, opened.trace.names
    innermost = opened.attribution.work.innermost.tolist()
    paths = {index: _path_below_backward(opened, index) for index in set(innermost)}
    found: Counter[str] = Counter()
    for row, index in enumerate(innermost):
        path = paths[index]
        if path is not None and not names[int(work.name[row])].startswith(ENGINE):
            found[path] += int(work.duration_ns[row])
    return {path: ns for path, ns in found.items() if ns}


def _path_below_backward(opened: OpenedTrace, index: int) -> str | None:
    """Return the names of the ranges around one and its own, below ``backward``; None if it lies in none."""
    ranges, names = opened.trace.ranges, opened.trace.names
    around = [names[int(ranges.name[one])] for one in ancestors(opened.attribution.parent, index)[::-1]]
    return "/".join(around[around.index(BACKWARD) + 1 :]) if BACKWARD in around else None
