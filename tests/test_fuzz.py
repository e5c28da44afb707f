"""Mutants of every class, and valid but extreme files: each is read within limits, or refused in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from profkit.allocator import recorded_heap
from profkit.allocator.replay import replay_history
from profkit.analysis.memory import find_timeline, match_owners, places, stacks
from profkit.analysis.placing import attribution, other_threads
from profkit.analysis.self_check import _in_stream_capture
from profkit.analysis.statistics import interval_of_step_times
from profkit.analysis.tree import range_tree
from profkit.reading import open_trace
from profkit.run import WrongRecord, decode
from profkit.run.owners import Owned, Owners, Step
from profkit.snapshot.reader import build_snapshot
from profkit.trace import columns
from profkit.trace.kineto import OperatorForest
from profkit.trace.nsys import read_nsys
from tests.child import run_in_child
from tests.conftest import call_main
from tests.fuzz import worst_exports, worst_snapshots, worst_traces
from tests.fuzz.judge import judge, judge_all
from tests.fuzz.mutants import CLASSES
from tests.nsys_builder import NsysBuilder

pytestmark = pytest.mark.usefixtures("rehearsal")

SEEDS = 2
"""Of each class; `.ci/run` reads a thousand others."""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("kind", CLASSES)
def test_no_mutant_stops_a_reader(kind: str, scratch: Path) -> None:
    verdicts = judge_all([(kind, seed) for seed in range(SEEDS)], scratch)
    assert [verdict for verdict in verdicts if verdict[1].is_failure] == []


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param("export bytes", 3749, id="a table's name is bytes"),
        pytest.param("snapshot order", 6634, id="a rest merges with free memory in front of it"),
        pytest.param("chrome names", 3075, id="a step's number has thousands of digits"),
        pytest.param("snapshot objects", 1528, id="the frames of an allocation are no list"),
        pytest.param("snapshot values", 3282, id="a mark is neither a start nor an end"),
        pytest.param("export bytes", 3234, id="two queries find different rows"),
        pytest.param("run directory", 6658, id="the allocator's own peak is negative"),
        pytest.param("export values", 701118, id="a time is a text of spaces"),
        pytest.param("export bytes", 801223, id="ranges are found in another number by rows and by all"),
        pytest.param("snapshot objects", 900778, id="the history of a block is no list of records"),
        pytest.param("run ranks", 800514, id="names of modules are missing in a light record"),
    ],
)
def test_a_mutant_that_once_failed_is_read_or_refused(kind: str, seed: int, scratch: Path) -> None:
    verdict = judge(kind, seed, scratch)
    assert not verdict.is_failure, verdict


def test_the_judge_sees_what_must_not_happen(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by hand")

    assert not judge("export names", 0, scratch).is_failure
    monkeypatch.setattr("profkit.reading.open_trace", broken)
    monkeypatch.setattr("profkit.cli.kernels.open_trace", broken, raising=False)
    assert judge("export names", 0, scratch).outcome == "internal error"


COUNT = 150
CPU_SECONDS = 20
MEMORY_BYTES = 2**31

TIME = (
    "efficiency FILE --numbered --format json",
    "ranges FILE",
    "kernels FILE --by range",
    "check FILE --max-idle 1%",
)
MEMORY = ("memory FILE --leaks --format json", "memory FILE --by stack", "memory FILE --by module")


def codes(path: Path, commands: tuple[str, ...]) -> list[int]:
    """Return the exit code of each command; a refusal must be one line."""
    found = []
    for command in commands:
        done = call_main([part.replace("FILE", str(path)) for part in command.split()])
        assert "internal error" not in done.stderr, (command, done.stderr)
        assert done.returncode != 1 or done.stderr.count("\n") == 1, (command, done.stderr)
        found.append(done.returncode)
    return found


def in_limits(path: Path, commands: tuple[str, ...]) -> list[int]:
    return run_in_child(lambda: codes(path, commands), cpu_seconds=CPU_SECONDS, memory_bytes=MEMORY_BYTES)


@pytest.mark.parametrize("name", worst_exports.EXPORTS)
def test_an_extreme_export_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = worst_exports.EXPORTS[name](COUNT).write(tmp_path / "worst.sqlite")
    assert set(in_limits(path, TIME)) <= {0, 1, 3}


@pytest.mark.parametrize("name", worst_traces.CHROME)
def test_an_extreme_torch_profiler_trace_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = worst_traces.write_chrome(worst_traces.CHROME[name](COUNT), tmp_path / "worst.json")
    assert set(in_limits(path, TIME)) <= {0, 1, 3}


@pytest.mark.parametrize("name", worst_snapshots.SNAPSHOTS)
def test_an_extreme_snapshot_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = worst_snapshots.write_snapshot(worst_snapshots.SNAPSHOTS[name](COUNT), tmp_path / "worst.pickle")
    assert set(in_limits(path, MEMORY)) <= {0, 1}


def _nested(path: Path) -> None:
    builder = NsysBuilder()
    worst_exports.nest(builder, 70, kernels=50)
    builder.write(path)


def _many_places(path: Path) -> None:
    builder = NsysBuilder()
    for number in range(20):
        builder.kernel(100 * number, 10, device=number, pid=100 + number, tid=100 + number)
    builder.write(path)


def _modules_or_lines(family: str) -> Callable[[Path], Path]:
    return lambda path: worst_snapshots.write_snapshot(worst_snapshots.SNAPSHOTS[family](COUNT), path)


def _linked(path: Path) -> None:
    worst_traces.write_chrome(worst_traces.linked_backward(COUNT), path)


@pytest.mark.parametrize(
    ("command", "write", "bound", "most", "says"),
    [
        ("ranges d.sqlite", _nested, "_MOST_PLACES", 1_000, "50 kernels or copies lie under more than 64 ranges each"),
        *(
            (
                "kernels d.sqlite",
                _many_places,
                f"MOST_{what.upper()}",
                19,
                f"holds 20 {what}; captures with more than 19",
            )
            for what in ("GPUs", "processes", "threads")
        ),
        (
            "memory d.pickle --by module",
            _modules_or_lines("module texts"),
            "_MOST_MODULES",
            100,
            "more than 100 modules",
        ),
        (
            "memory d.pickle",
            _modules_or_lines("long fx frames"),
            "_MOST_MADE_LINES",
            1_000,
            "made from over 1,000 lines",
        ),
        ("ranges d.json", _linked, "_MOST_MIRRORS", -10_000, "more in the backward pass; captures with that many are"),
    ],
)
def test_more_than_any_capture_holds_is_refused(
    command: str,
    write: Callable[[Path], object],
    bound: str,
    most: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, path, *options = command.split()
    write(tmp_path / path)
    assert call_main([name, str(tmp_path / path), *options]).returncode == 0
    homes = (attribution, columns, places, stacks, other_threads)
    (home,) = [module for module in homes if hasattr(module, bound)]
    monkeypatch.setattr(home, bound, most)
    done = call_main([name, str(tmp_path / path), *options])
    assert (done.returncode, done.stderr.count("\n"), says in done.stderr) == (1, 1, True), done.stderr


def test_as_many_places_as_a_machine_may_have_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _many_places(tmp_path / "d.sqlite")
    for bound in ("MOST_GPUS", "MOST_PROCESSES", "MOST_THREADS"):
        monkeypatch.setattr(columns, bound, 20)
    assert call_main(["kernels", str(tmp_path / "d.sqlite")]).returncode == 0


def test_a_history_that_needs_too_many_searches_for_blocks_is_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = 2**21
    traces = [
        worst_snapshots.event("segment_map", 2**30, 2 * half, 1),
        worst_snapshots.event("segment_unmap", 2**30 + half, half, 2),
    ]
    segment = worst_snapshots.segment(2**30, [worst_snapshots.block(half, "inactive")], is_expandable=True)
    path = worst_snapshots.write_snapshot(worst_snapshots.snapshot([segment], traces), tmp_path / "unmapped.pickle")
    what = "blocks not searched for, after too many searches"
    assert what not in " ".join(call_main(["memory", str(path)]).stdout.split())
    monkeypatch.setattr(recorded_heap, "_MOST_LOOKS", 0)
    assert what in " ".join(call_main(["memory", str(path)]).stdout.split())


def test_ranges_with_very_long_paths_are_refused(tmp_path: Path) -> None:
    path = worst_exports.long_repeated(4_000).write(tmp_path / "long.sqlite")
    done = call_main(["ranges", str(path), "--format", "json"])
    assert done.returncode == 1
    assert "characters long on average; captures with more than 400 are not read" in done.stderr


def test_the_tree_is_the_same_if_it_is_summed_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = open_trace(worst_exports.steps(500).write(tmp_path / "steps.sqlite"))
    whole = trace.ranges()
    portions = Counter[int]()
    monkeypatch.setattr(range_tree, "_PLACES_AT_A_TIME", 7)
    under = attribution.PlacedRows.under

    def counted(self: attribution.PlacedRows, *arguments: object) -> object:
        found = under(self, *arguments)  # type: ignore[arg-type]
        portions[len(found.rows)] += 1
        return found

    monkeypatch.setattr(attribution.PlacedRows, "under", counted)
    assert trace.ranges() == whole
    assert max(portions) <= 7
    assert sum(portions.values()) > 15


def test_the_operator_open_at_a_moment_is_found_without_looking_at_each() -> None:
    count = 100_000
    start, end = np.arange(count), 4 * count - np.arange(count)
    forest = OperatorForest(start, end, np.zeros(count, dtype=np.int64))

    def innermost() -> list[int]:
        moments = np.concatenate([np.full(count, 5 * count), [count // 2, 3 * count]])
        found = forest.innermost_at(moments, np.zeros(len(moments), dtype=np.int64))
        return [int(found[0]), int(found[-2]), int(found[-1])]

    assert run_in_child(innermost, cpu_seconds=5) == [-1, count // 2, count - 1]


def test_an_address_used_by_thousands_of_tensors_is_searched_by_time(tmp_path: Path) -> None:
    """20,000 tensors and 20,000 allocations share one address; comparing each tensor with each would take a minute."""
    count = 20_000
    traces = [worst_snapshots.event("segment_alloc", 0, 2**21, 0)]
    for one in range(count):
        traces.append(worst_snapshots.event("alloc", 0, 512, 10_000 * one + 1))
        for action in ("free_requested", "free_completed"):
            traces.append(worst_snapshots.event(action, 0, 512, 10_000 * one + 5_000))
    data = worst_snapshots.snapshot([worst_snapshots.segment(0, [worst_snapshots.block(2**21, "inactive")])], traces)
    snapshot = build_snapshot(tmp_path / "one.pickle", data)
    memory = replay_history(snapshot.devices[0], snapshot.settings)
    timeline = find_timeline(snapshot.devices[0])
    owned = tuple(Owned(10_000 * one + 2_000, 0, 0, 512, "saved", f"m{one}", 0) for one in range(count))
    found, missed = run_in_child(
        lambda: match_owners(Owners(owned), 0, memory.replay, timeline), cpu_seconds=CPU_SECONDS
    )
    assert missed == 0
    assert [found[row].name for row in (0, 1, count - 1)] == ["m0", "m1", f"m{count - 1}"]


def test_of_many_samples_fewer_resamples_are_drawn() -> None:
    def intervals() -> list[float]:
        samples = np.stack([np.arange(60_000.0) % 1_000, np.zeros(60_000)], axis=1)
        found = interval_of_step_times(samples, samples + np.array([100, 0]))
        assert found is not None
        return list(found)

    low, high = run_in_child(intervals, cpu_seconds=CPU_SECONDS, memory_bytes=MEMORY_BYTES)
    assert 80 < low < 100 < high < 120


def test_a_list_of_a_record_is_read_and_the_first_wrong_one_is_named() -> None:
    assert decode(tuple[float, ...], [1, 2.5], "losses") == (1.0, 2.5)
    for values, wrong in (([1.0, "x"], 1), ([1.0, True], 1), ([2**63], 0)):
        with pytest.raises(WrongRecord, match=rf"losses\[{wrong}\]"):
            decode(tuple[float, ...], values, "losses")
    with pytest.raises(WrongRecord, match="steps holds 100,000 records; more than 65,536 are not read"):
        decode(tuple[Step, ...], [{}] * 100_000, "steps")


def test_launches_in_nested_stream_captures_are_found_in_one_pass(tmp_path: Path) -> None:
    trace = read_nsys(worst_exports.stream_captures(150_000).write(tmp_path / "captures.sqlite"))
    launches = np.flatnonzero(~trace.calls.has_work)
    captured = run_in_child(lambda: int(_in_stream_capture(trace, launches).sum()), cpu_seconds=4)
    assert captured >= 30_000
