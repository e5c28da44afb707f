"""One rule says what lies under a range: every command, asked for any path of the tree, gives one figure."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from profkit import read_trace
from profkit.analysis.compare.samples import has_measured_steps, sample_steps
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.placing.attribution import attribute_work
from profkit.analysis.tree.selection import select_ranges
from profkit.cli import cli
from tests.captures import CAPTURES
from tests.test_compiled_ranges import whole_run

TRACES = sorted(
    path
    for folder in (Path(__file__).parent.parent / "traces", CAPTURES)
    if folder.is_dir()
    for path in folder.iterdir()
    if path.name.endswith((".sqlite", ".kineto.json.gz"))
)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_path_of_the_tree_gives_one_figure(path: Path) -> None:
    opened = read_trace(path)
    if not len(opened.trace.work):
        pytest.skip("no kernels to place")  # NVTX alone
    for numbered in (True, False):
        tree = opened.ranges(numbered=numbered).ranges
        of_path: Counter[str] = Counter()
        for row in tree:
            of_path[row.path] += row.kernel_time_ns
        same_path = Counter(row.path for row in tree)  # ranges of two domains may share one
        efficiency = {}
        if opened.trace.measure == "gpu-kernel":
            efficiency = {row.path: row for row in opened.efficiency(numbered=numbered).ranges}
        for row in tree:
            asked = opened.kernels(f"/{row.path}")
            assert asked.total_ns == of_path[row.path], row.path
            assert sum(line.total_ns for line in asked.kernels) == asked.total_ns
            if same_path[row.path] == 1:
                assert (asked.kernel_count + asked.graph_count, asked.busy_ns) == (row.kernel_count, row.busy_ns)
                assert asked.wall_ns == row.wall_ns
                assert not efficiency or efficiency[row.path].kernel_time_ns == asked.total_ns
        _check_samples(opened, {row.path for row in tree})


def _check_samples(opened: OpenedTrace, paths: set[str]) -> None:
    """Compare what `check --max-share` and `compare --range` sum with the rows in the steps and under the range."""
    attribution = opened.attribution
    if not has_measured_steps(attribution):
        return
    whole = sample_steps(attribution)
    for path in sorted(paths)[:12]:
        samples = sample_steps(attribution, f"/{path}")
        under = attribution.work.under(select_ranges(attribution, f"/{path}")).rows
        in_steps = samples.total_ns + samples.left_out_ns
        assert in_steps == attribution.ledger.total_ns
        assert samples.total_ns <= int(attribution.trace.work.duration_ns[under].sum())
        assert samples.total_ns <= whole.total_ns or samples.size != whole.size


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_the_rows_under_a_range_equal_those_of_a_slow_account(path: Path) -> None:
    """Row by row in Python: a range holds what was launched while it was open on the row's thread or its host's."""
    opened = read_trace(path)
    attribution = attribute_work(opened.trace)
    trace, placed = attribution.trace, attribution.work
    work, ranges = trace.work, trace.ranges
    if not len(work) or not len(ranges):
        return
    rng = np.random.default_rng(0)
    some = rng.choice(len(ranges), size=min(40, len(ranges)), replace=False)
    for index in some.tolist():
        expected = set()
        if attribution.is_mirror[index]:
            number, end = (int(edge[0]) for edge in attribution.mirrors.span(np.array([index])))
            of_row = attribution.mirrors.of_row
            expected = {row for row in range(len(work)) if number <= of_row[row] < end}
        else:
            threads = {int(ranges.thread[index]), int(ranges.end_thread[index])}
            inside = (work.launch_ns >= ranges.start_ns[index]) & (work.launch_ns < ranges.end_ns[index])
            for row in np.flatnonzero(inside).tolist():
                if int(work.launch_thread[row]) in threads or int(placed.host_thread[row]) in threads:
                    expected.add(row)
        found = placed.under(np.array([index]))
        assert set(found.rows.tolist()) == expected
        assert len(found.rows) == len(expected)
        assert placed.count(np.array([index])).tolist() == [len(expected)]


def test_modules_of_compiled_code_give_one_figure_too(tmp_path: Path) -> None:
    path = whole_run(tmp_path)
    test_every_path_of_the_tree_gives_one_figure(path)
    test_the_rows_under_a_range_equal_those_of_a_slow_account(path)


@pytest.mark.parametrize("name", ["small-train.nsys2025.sqlite", "small-train.kineto.json.gz"])
def test_the_two_profilers_agree_on_a_share_of_one_workload(name: str) -> None:
    """The layers' forward pass of one program, recorded by Nsight Systems and by torch.profiler."""
    path = Path(__file__).parent.parent / "traces" / name
    held = CliRunner().invoke(cli, ["check", str(path), "--max-share", "range:layer *=29%", "--format", "json"])
    (line,) = json.loads(held.stdout)["lines"]
    assert line["held"]
    assert line["measured"] == pytest.approx(0.287, abs=0.001)
