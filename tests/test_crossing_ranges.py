"""The parent of ranges that cross, and what lies within others, against a plain search."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from profkit.trace.columns import Ranges
from profkit.trace.nesting import NO_RANGE, ancestors, build_timelines, mark_nested
from profkit.trace.nsys import read_nsys
from tests.child import run_in_child
from tests.fuzz import worst_exports
from tests.nsys_builder import NsysBuilder


def plain_parent(ranges: Ranges, index: int) -> int:
    """Return the range opened last of those that enclose a range, in time and in threads."""
    start, end = int(ranges.start_ns[index]), int(ranges.end_ns[index])
    mine = (int(ranges.thread[index]), int(ranges.end_thread[index]))
    order = np.lexsort((-ranges.end_ns, ranges.start_ns)).tolist()
    for other in reversed(order[: order.index(index)]):
        threads = (ranges.thread[other], ranges.end_thread[other])
        if ranges.end_ns[other] > start and ranges.end_ns[other] >= end and set(mine) <= set(threads):
            return other
    return NO_RANGE


def test_the_parent_of_a_crossing_range_is_the_last_opened_that_encloses_it(tmp_path: Path) -> None:
    random = Random(5)
    for _ in range(60):
        builder = NsysBuilder()
        for number in range(random.choice([3, 8, 25])):
            start = random.randrange(40)
            tid, end_tid = random.choice([(100, 100), (100, 100), (100, 101), (101, 100), (101, 101)])
            builder.range(str(number), start, start + random.randrange(1, 40), tid=tid, end_tid=end_tid)
        path = tmp_path / "crossing.sqlite"
        path.unlink(missing_ok=True)
        ranges = read_nsys(builder.write(path)).ranges
        _, parent = build_timelines(ranges)
        assert parent.tolist() == [plain_parent(ranges, index) for index in range(len(ranges))]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9))
def test_ranges_that_nest_touch_and_take_no_time_are_found_by_a_plain_search(drawn: list[tuple[int, int]]) -> None:
    spans: list[tuple[int, int]] = []
    for start, length in drawn:
        end = start + length
        if not any(other < start < its_end < end or start < other < end < its_end for other, its_end in spans):
            spans.append((start, end))
    start_ns, end_ns = np.array(spans, dtype=np.int64).T
    zeros = np.zeros(len(spans), dtype=np.int64)
    ranges = Ranges(zeros, zeros, start_ns, end_ns, zeros, zeros, zeros, zeros.astype(np.bool_))
    timelines, parent = build_timelines(ranges)
    assert parent.tolist() == [plain_parent(ranges, index) for index in range(len(spans))]
    order = np.lexsort((-end_ns, start_ns)).tolist()
    for moment in range(-1, 20):
        is_open = [index for index in order if spans[index][0] <= moment < spans[index][1]]
        assert timelines[0].innermost_at(np.array([moment])).tolist() == [is_open[-1] if is_open else NO_RANGE]


def test_thousands_of_ranges_that_cross_are_not_searched_one_by_one(tmp_path: Path) -> None:
    ranges = read_nsys(worst_exports.overlapping(60_000).write(tmp_path / "server.sqlite")).ranges
    parents = run_in_child(lambda: int((build_timelines(ranges)[1] != NO_RANGE).sum()), cpu_seconds=5)
    assert parents == 0


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=40))
def test_what_lies_within_a_marked_range_is_found_at_any_depth(drawn: list[tuple[int, bool]]) -> None:
    parent = np.array([number % (at + 1) - 1 for at, (number, _) in enumerate(drawn)], dtype=np.int64)
    marked = np.array([is_marked for _, is_marked in drawn], dtype=np.bool_)
    slowly = [any(marked[index] for index in ancestors(parent, at)) for at in range(len(drawn))]
    assert mark_nested(parent, marked).tolist() == slowly
