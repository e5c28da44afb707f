"""Which range is innermost on a thread at a time, and which range encloses which, for each thread."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from profkit.trace.columns import Bools, Copies, Ints, Ranges, Work, rows_by_value

NO_RANGE = -1


@dataclass(frozen=True, eq=False)
class ThreadTimeline:
    """One thread's ranges as a step function: from ``time_ns[i]`` on, ``innermost[i]`` is the innermost open range.

    The first entry covers all time before the first range.
    """

    time_ns: Ints
    innermost: Ints

    def segment_at(self, time_ns: Ints) -> Ints:
        """Return the index of the step in which each time falls; a range holds its first nanosecond, not its last."""
        return np.searchsorted(self.time_ns, time_ns, side="right") - 1

    def innermost_at(self, time_ns: Ints) -> Ints:
        """Return the innermost range open at each time, or `NO_RANGE`."""
        return self.innermost[self.segment_at(time_ns)]

    def own_stretches(self) -> tuple[Ints, Ints, Ints]:
        is_own = (self.innermost[:-1] != NO_RANGE) & (self.time_ns[:-1] < self.time_ns[1:])
        return self.innermost[:-1][is_own], self.time_ns[:-1][is_own], self.time_ns[1:][is_own]


def build_timelines(ranges: Ranges) -> tuple[dict[int, ThreadTimeline], Ints]:
    """Return each thread's `ThreadTimeline` and each range's parent on its own thread (`NO_RANGE` at the top).

    A push/pop range is innermost until its pop. A start/end range need not nest: the range opened last of those still
    open is innermost, and one that ends on another thread is open on both. A parent encloses its child, in time and
    in threads: of the ranges open when the child begins, the one opened last that ends no earlier and is open wherever
    the child is. So what lies under a range lies under its parent.
    """
    parent = np.full(len(ranges), NO_RANGE, dtype=np.int64)
    timelines = {}
    for thread, members in ranges_by_thread(ranges).items():
        is_pushed = (ranges.thread[members] == ranges.end_thread[members]).all()
        nested = _sweep_nested(ranges, members, parent) if is_pushed else None
        timelines[thread] = nested or _sweep_any(ranges, members, thread, parent)
    return timelines, parent


def nest_spans(start_ns: Ints, end_ns: Ints, thread: Ints) -> tuple[dict[int, ThreadTimeline], Ints]:
    """Return the same of spans that each lie on one thread, as operators do."""
    zeros = np.zeros(len(start_ns), dtype=np.int64)
    return build_timelines(Ranges(zeros, zeros, start_ns, end_ns, zeros, thread, thread, zeros.astype(np.bool_)))


def innermost_at_launch(rows: Work | Copies, timelines: dict[int, ThreadTimeline]) -> Ints:
    """Return each row's innermost range on its launching thread, `NO_RANGE` for none."""
    innermost = np.full(len(rows), NO_RANGE, dtype=np.int64)
    for thread, members in rows_by_value(rows.launch_thread).items():
        if thread in timelines:
            innermost[members] = timelines[thread].innermost_at(rows.placed_ns[members])
    return innermost


def ranges_by_thread(ranges: Ranges) -> dict[int, Ints]:
    """Return the ranges open on each thread, by start, the longer first of two that start together."""
    index = np.arange(len(ranges))
    elsewhere = np.flatnonzero(ranges.end_thread != ranges.thread)
    index = np.concatenate([index, elsewhere])
    thread = np.concatenate([ranges.thread, ranges.end_thread[elsewhere]])
    order = np.lexsort((-ranges.end_ns[index], ranges.start_ns[index], thread))
    index, thread = index[order], thread[order]
    threads, first = np.unique(thread, return_index=True)
    return dict(zip(threads.tolist(), np.split(index, first[1:]), strict=True)) if len(index) else {}


def find_marked(parent: Ints, marked: Bools) -> Ints:
    """Return for each range the innermost marked one that it is or lies in, `NO_RANGE` for none."""
    around, above = np.where(marked, np.arange(len(parent)), NO_RANGE), parent
    # Each round looks twice as far up as the one before.
    while marked.any() and (above != NO_RANGE).any():
        around = np.where((around == NO_RANGE) & (above != NO_RANGE), around[above], around)
        above = np.where(above != NO_RANGE, above[above], NO_RANGE)
    return around


def mark_nested(parent: Ints, marked: Bools) -> Bools:
    """Return which ranges are marked or lie, at any depth, within a marked one."""
    return np.asarray(find_marked(parent, marked) != NO_RANGE)


def _sweep_nested(ranges: Ranges, members: Ints, parent: Ints) -> ThreadTimeline | None:
    """Sweep ranges that nest, as pushes and pops do, all at once, filling their ``parent``; None if some do not."""
    start, end, number = ranges.start_ns[members], ranges.end_ns[members], np.arange(len(members))
    lasts = end > start
    inner_first = len(end) - 1 - np.argsort(end[::-1], kind="stable")
    closing = inner_first[lasts[inner_first]]
    # What takes no time has ended before what comes after it in order, though that may start at the same moment.
    depth = number - np.searchsorted(end[closing], start, side="right") - (np.cumsum(~lasts) - ~lasts)
    by_depth = np.argsort(depth, kind="stable")
    # The last one before it that is one level less deep.
    outer = np.searchsorted(depth[by_depth] * len(members) + by_depth, (depth - 1) * len(members) + number) - 1
    around = np.where(depth > 0, by_depth[outer], NO_RANGE)
    inner = np.flatnonzero(depth > 0)
    if (depth[around[inner]] != depth[inner] - 1).any() or (end[around[inner]] < end[inner]).any():
        return None
    parent[members] = np.where(depth > 0, members[around], NO_RANGE)
    times = np.concatenate([end[closing], start[lasts]])
    innermost = np.concatenate([parent[members[closing]], members[lasts]])
    order = np.argsort(times, kind="stable")
    return ThreadTimeline(np.append(-(1 << 62), times[order]), np.append(NO_RANGE, innermost[order]))


def _sweep_any(ranges: Ranges, members: Ints, thread: int, parent: Ints) -> ThreadTimeline:
    """Ranges may begin or end on another thread; ``parent`` is filled for those that began on this one."""
    times, innermost = [-(1 << 62)], [NO_RANGE]
    stack: list[int] = []  # in order of opening; a range that ended below others stays until it is on top
    ends: list[tuple[int, int]] = []
    open_now: set[int] = set()
    # Thread → the ranges open there too, by opening, each ending before the one before it: an earlier one that ends no
    # later encloses nothing that the later one does not.
    enclosing: dict[int, list[tuple[int, int]]] = {}

    def close_until(time: float) -> None:
        while ends and ends[0][0] <= time:
            end, index = heapq.heappop(ends)
            open_now.discard(index)
            while stack and stack[-1] not in open_now:
                stack.pop()
            times.append(end)
            innermost.append(stack[-1] if stack else NO_RANGE)

    def drop_shorter(other: int, end: int) -> list[tuple[int, int]]:
        around = enclosing.setdefault(other, [])
        while around and (around[-1][0] < end or around[-1][1] not in open_now):
            around.pop()
        return around

    columns = [c[members].tolist() for c in (ranges.start_ns, ranges.end_ns, ranges.thread, ranges.end_thread)]
    for index, start, end, *threads in zip(members.tolist(), *columns, strict=True):
        close_until(start)
        if threads[0] == thread:
            around = drop_shorter(threads[1], end)
            parent[index] = around[-1][1] if around else NO_RANGE
        for other in {thread, *threads}:
            drop_shorter(other, end).append((end, index))
        stack.append(index)
        open_now.add(index)
        heapq.heappush(ends, (end, index))
        times.append(start)
        innermost.append(index)
    close_until(float("inf"))
    return ThreadTimeline(np.array(times, dtype=np.int64), np.array(innermost, dtype=np.int64))


def ancestors(parent: Ints, index: int) -> list[int]:
    """Return a range and all ranges around it, innermost first; none of `NO_RANGE`."""
    chain = []
    while index != NO_RANGE:
        chain.append(index)
        index = int(parent[index])
    return chain
