"""The tree of ranges: that it counts what ``--range PATH`` counts, whatever crosses, nests or leaks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from profkit import read_trace
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.tree.range_tree import RangeRow
from profkit.trace import nesting
from profkit.trace.nsys import read_nsys
from tests.nsys_builder import NsysBuilder

MAIN, AUTOGRAD, OTHER = 100, 101, 102


def _opened(builder: NsysBuilder, tmp_path: Path) -> OpenedTrace:
    return read_trace(builder.write(tmp_path / "t.sqlite"))


def _figures(opened: OpenedTrace, *, numbered: bool = True) -> dict[str, tuple[int, int]]:
    return {row.path: (row.kernel_time_ns, row.kernel_count) for row in opened.ranges(numbered=numbered).ranges}


def test_a_range_that_has_ended_holds_nothing_launched_later(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.range("forward", 0, 100)
    builder.range("async", 50, 400, end_tid=100)
    builder.range("backward", 150, 300)
    builder.kernel(10, 5)
    builder.kernel(200, 70)
    opened = _opened(builder, tmp_path)
    assert _figures(opened) == {"forward": (5, 1), "async": (70, 1), "async/backward": (70, 1)}
    for row in opened.ranges().ranges:
        assert opened.kernels(row.path).kernel_time_ns == row.kernel_time_ns


def test_an_autograd_range_that_outlives_its_backward_call_ends_with_it(tmp_path: Path) -> None:
    builder = NsysBuilder()
    builder.name_thread("pt_autograd_0", AUTOGRAD)
    builder.range("step", 0, 1000)
    builder.range("forward", 0, 90)
    builder.kernel(10, 1)
    builder.range("backward", 100, 500)
    builder.range("nccl", 200, 700, tid=AUTOGRAD)
    builder.kernel(300, 20, tid=AUTOGRAD)
    builder.kernel(400, 30, tid=AUTOGRAD)
    assert _figures(_opened(builder, tmp_path)) == {
        "step": (51, 3),
        "step/forward": (1, 1),
        "step/backward": (50, 2),
        "step/backward/nccl": (50, 2),
    }


def test_ranges_that_leak_do_not_fill_the_memory(tmp_path: Path) -> None:
    builder = NsysBuilder()
    for index in range(400):
        builder.range("leaked", index * 10, None)
        builder.kernel(index * 10 + 5, 1)
    rows = _opened(builder, tmp_path).ranges().ranges
    assert [row.kernel_count for row in rows] == list(range(400, 0, -1))
    assert [row.busy_ns for row in rows] == list(range(400, 0, -1))


def _siblings(tmp_path: Path, names: list[str]) -> OpenedTrace:
    builder = NsysBuilder()
    for index, name in enumerate(names):
        builder.range(name, 100 * index, 100 * index + 90)
        builder.kernel(100 * index + 10, 10**index)
    return _opened(builder, tmp_path)


def test_a_kind_shown_in_the_tree_selects_its_ranges(tmp_path: Path) -> None:
    opened = _siblings(tmp_path, ["layer 0", "layer 1", "layer norm", "h.0.mlp", "h.1.mlp", "x[0]", "x[1]"])
    assert _figures(opened, numbered=False) == {
        "layer *": (11, 2),
        "layer norm": (100, 1),
        "h.*.mlp": (11_000, 2),
        "x[*]": (1_100_000, 2),
    }
    for row in opened.ranges(numbered=False).ranges:
        assert opened.kernels(row.path).kernel_time_ns == row.kernel_time_ns
    assert opened.kernels("layer*").kernel_time_ns == 111
    assert {row.name: row.total_ns for row in opened.kernels(by="range").kernels}["layer *"] == 11


def test_a_number_within_a_word_or_without_a_sibling_stays(tmp_path: Path) -> None:
    opened = _siblings(tmp_path, ["conv2d", "conv3d", "block7", "pool_2d"])
    assert [row.name for row in opened.ranges(numbered=False).ranges] == ["conv2d", "conv3d", "block7", "pool_2d"]


@st.composite
def traces(draw: st.DrawFn) -> NsysBuilder:
    """Push/pop ranges that nest on two or three threads, start/end ranges that need not, and kernels anywhere."""
    builder = NsysBuilder()
    moment = st.integers(0, 200)
    threads = [MAIN, AUTOGRAD, OTHER]
    if draw(st.booleans()):
        builder.name_thread("pt_autograd_0", AUTOGRAD)

    def push(tid: int, low: int, high: int, depth: int) -> None:
        at = low
        for _ in range(draw(st.integers(0, 3))):
            start = at + draw(st.integers(0, 20))
            end = start + draw(st.integers(1, 120))
            if end > high:
                return
            builder.range(draw(st.sampled_from("abc")) + "·", start, end, tid=tid)
            if depth < 3:
                push(tid, start, end, depth + 1)
            at = end

    for tid in threads:
        push(tid, 0, 220, 0)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(moment)
        tid, end_tid = draw(st.sampled_from(threads)), draw(st.sampled_from(threads))
        builder.range(draw(st.sampled_from("xyz")), start, start + draw(st.integers(1, 150)), tid=tid, end_tid=end_tid)
    for _ in range(draw(st.integers(1, 25))):
        tid, device = draw(st.sampled_from(threads)), draw(st.sampled_from([0, 1]))
        builder.kernel(draw(moment), draw(st.integers(0, 30)), tid=tid, device=device)
    return builder


@settings(max_examples=150, deadline=None)
@given(builder=traces())
def test_each_path_of_the_tree_selects_the_work_it_shows(builder: NsysBuilder) -> None:
    with tempfile.TemporaryDirectory() as folder:
        opened = _opened(builder, Path(folder))
    ranges = opened.trace.ranges
    # Of two ranges that begin and end together neither is the outer one.
    assume(len(set(zip(ranges.start_ns.tolist(), ranges.end_ns.tolist(), strict=True))) == len(ranges))
    for numbered in (True, False):
        rows = opened.ranges(numbered=numbered).ranges
        times = {row.path: row.kernel_time_ns for row in rows}
        for row in rows:
            assert row.kernel_time_ns <= times.get(row.path.rpartition("/")[0], row.kernel_time_ns)
            # A path names every chain of ranges that ends in it: ask only for those that name one row.
            if sum(other.path == row.path or other.path.endswith("/" + row.path) for other in rows) == 1:
                assert _by_range(opened, row) == _by_tree(row)


def _by_tree(row: RangeRow) -> tuple[Any, ...]:
    return row.path, row.instances, row.wall_ns, row.kernel_time_ns, row.busy_ns, row.kernel_count


def _by_range(opened: OpenedTrace, row: RangeRow) -> tuple[Any, ...]:
    result = opened.kernels(row.path, per_instance=True)
    assert result.per_instance is not None
    assert sum(instance.kernel_time_ns for instance in result.per_instance) == result.kernel_time_ns
    for by in ("category", "range"):
        grouped = opened.kernels(row.path, by=by)  # type: ignore[arg-type]
        assert sum(line.total_ns for line in grouped.kernels) == result.kernel_time_ns
    return row.path, result.instances, result.wall_ns, result.kernel_time_ns, result.busy_ns, result.kernel_count


def test_the_two_sweeps_agree_where_ranges_nest(captures: Path) -> None:
    for name in ("small.nsys2023", "ddp.nsys2025", "hooks.nsys2025"):
        ranges = read_nsys(captures / f"{name}.sqlite").ranges
        for thread, members in nesting.ranges_by_thread(ranges).items():
            quick, slow = (np.full(len(ranges), nesting.NO_RANGE) for _ in range(2))
            nested = nesting._sweep_nested(ranges, members, quick)
            general = nesting._sweep_any(ranges, members, thread, slow)
            assert nested is not None
            assert np.array_equal(quick, slow)
            assert np.array_equal(nested.time_ns, general.time_ns)
            assert np.array_equal(nested.innermost, general.innermost)
