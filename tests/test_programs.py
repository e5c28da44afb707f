"""Programs as people write them, unedited: the losses stay equal to the bit, and what is recorded is what they do."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

from profkit import read_trace
from profkit.analysis.nesting import ancestors
from profkit.analysis.opened_trace import OpenedTrace
from tests.forked_scripts import Forks
from tests.operator_links import ENGINE, backward_ns_by_forward_path
from tests.programs_counted import PROGRAMS

STEPS = 2
_IS_TORCHS = re.compile(r".*#|DistributedDataParallel\.forward$").match
"""Matches the names of ranges that torch itself opens, for torch.profiler alone."""


@dataclass(frozen=True)
class Recording:
    """A program run twice, plainly and under ``profkit run``."""

    plain: str
    said: str
    errors: str
    run: Path

    @property
    def trace(self) -> OpenedTrace:
        """The recorded steps; of several ranks the first one's."""
        return read_trace(self.run, rank=0 if (self.run / "trace.rank1.json.gz").exists() else None)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    return {}


@pytest.fixture(params=PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


@pytest.fixture
def recording(
    name: str, forks: Forks, recordings: dict[str, Recording], tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    """Record the program, once for all tests."""
    if name not in recordings:
        place = tmp_path_factory.mktemp("program")
        words = [sys.executable, *PROGRAMS[name].words]
        plain = forks.run(words, place)
        assert plain.returncode == 0, plain.stderr
        options = ("-o", "run", "--warmup", "2", "--steps", str(STEPS))
        done = forks.run_profkit("run", *options, "--", *words, cwd=place)
        assert done.returncode == 0, done.stderr
        recordings[name] = Recording(plain.stdout, done.stdout, done.stderr, place / "run")
    return recordings[name]


def _counts_by_step(opened: OpenedTrace) -> list[dict[str, int]]:
    """Return, of each step, how often each path below it was opened."""
    steps: dict[str, Counter[str]] = {}
    for row in opened.ranges().ranges:
        step, *path = [part for part in row.path.split("/") if not _IS_TORCHS(part)]
        if step.startswith("step ") and not _IS_TORCHS(row.name):
            steps.setdefault(step, Counter())["/".join(path)] += row.instances
    return [dict(found) for found in steps.values()]


def test_losses_are_equal_to_the_bit(recording: Recording) -> None:
    assert recording.plain.count("\n") >= STEPS + 2
    assert recording.said.startswith(recording.plain)


def test_steps_and_phases_are_as_counted_by_hand(name: str, recording: Recording) -> None:
    found = _counts_by_step(recording.trace)
    assert [counts.pop("") for counts in found] == [1] * STEPS
    phases = [{path: count for path, count in counts.items() if "/" not in path} for counts in found]
    assert phases == [PROGRAMS[name].phases] * STEPS


def test_modules_are_where_they_ran_as_often_as_they_ran(name: str, recording: Recording) -> None:
    wanted = PROGRAMS[name].paths
    for counts in _counts_by_step(recording.trace):
        assert {path: counts.get(path, 0) for path in wanted} == wanted


def test_every_operator_lies_in_one_line_of_the_tree(recording: Recording) -> None:
    opened = recording.trace
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


def test_the_self_check_finds_nothing(recording: Recording) -> None:
    assert [finding.message for finding in recording.trace.self_check.findings] == []


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.linked], indirect=True)
def test_backward_of_each_module_equals_what_operator_links_give(recording: Recording) -> None:
    opened = recording.trace
    work, names = opened.trace.work, opened.trace.names
    paths = {index: _path_below_backward(opened, index) for index in set(opened.attribution.work.innermost.tolist())}
    found: Counter[str] = Counter()
    for row, index in enumerate(opened.attribution.work.innermost.tolist()):
        path = paths[index]
        if path is not None and not names[int(work.name[row])].startswith(ENGINE):
            found[path] += int(work.duration_ns[row])
    assert found == backward_ns_by_forward_path(recording.run / "trace.json.gz")


def _path_below_backward(opened: OpenedTrace, index: int) -> str | None:
    """Return the names of the ranges around one and its own, below ``backward``; None if it lies in none."""
    ranges, names = opened.trace.ranges, opened.trace.names
    around = [names[int(ranges.name[one])] for one in ancestors(opened.attribution.parent, index)[::-1]]
    return "/".join(around[around.index("backward") + 1 :]) if "backward" in around else None
