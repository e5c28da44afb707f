"""How operators nest: self times add up to the time in operators."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profkit.analysis.intervals import BusyTime
from profkit.trace.columns import Work
from profkit.trace.kineto import OperatorForest
from tests.kineto_builder import TID, read, row


@st.composite
def nested_operators(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Return (start, end) of operators that nest, in ns, in any order."""

    def inside(start: int, end: int, depth: int) -> list[tuple[int, int]]:
        cuts = sorted(draw(st.lists(st.integers(start, end), max_size=6)))
        found = []
        for low, high in list(pairwise(cuts))[::2]:
            found.append((low, high))
            found += inside(low, high, depth - 1) if depth else []
        return found

    return draw(st.permutations(inside(1, draw(st.integers(1, 10**6)), 3)))


def union_ns(intervals: list[tuple[int, int]]) -> int:
    covered, until = 0, -(10**30)
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered


@given(st.lists(nested_operators(), min_size=1, max_size=3), st.integers(0, 8 * 10**18 // 10**3))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_self_times_sum_to_top_level_time(tmp_path: Path, threads: list[list[tuple[int, int]]], base_us: int) -> None:
    base_us = base_us // 10**3
    events = [
        # As Kineto prints it: microseconds with three decimals, more digits than a double holds.
        row("cpu_op", "op", f"{base_us + s // 1000}.{s % 1000:03d}", f"{(e - s) // 1000}.{(e - s) % 1000:03d}", TID + t)
        for t, operators in enumerate(threads)
        for s, e in operators
    ]
    if not any(e > s for operators in threads for s, e in operators):
        return
    trace = read(tmp_path, events)
    assert int(trace.work.duration_ns.sum()) == sum(map(union_ns, threads))
    assert (trace.work.duration_ns >= 0).all()
    starts = sorted(base_us * 1000 + s for operators in threads for s, e in operators)
    assert trace.work.start_ns.tolist() == starts


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(0, 1)), max_size=30))
def test_self_times_add_up_where_rounding_makes_a_child_outlive_its_parent(rows: list[tuple[int, int, int]]) -> None:
    start, duration, thread = (np.array([r[i] for r in rows], dtype=np.int64) for i in range(3))
    forest = OperatorForest(start, start + duration, thread)
    assert (forest.self_ns >= 0).all()
    for one in (0, 1):
        mine = [(s, s + d) for s, d, t in rows if t == one]
        assert int(forest.self_ns[thread == one].sum()) == union_ns(mine)
    if len(rows):
        zeros = np.zeros(len(rows), dtype=np.int64)
        work = Work(
            zeros, start, start + duration, forest.self_ns, zeros, zeros, thread, start, thread, zeros.astype(np.bool_)
        )
        each = np.arange(len(rows))
        assert BusyTime(work).sum_by(each, each, len(rows)).tolist() == forest.self_ns.tolist()
    # Who is innermost at a moment: the one that began last (the shorter, the later given) and is still open.
    moments = np.repeat(np.arange(95), 2)
    threads = np.tile([0, 1], 95)
    for moment, one, found in zip(moments, threads, forest.innermost_at(moments, threads), strict=True):
        is_open = [(s, -d, i) for i, (s, d, t) in enumerate(rows) if t == one and s <= moment < s + d]
        assert found == (max(is_open)[2] if is_open else -1)
