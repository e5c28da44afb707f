"""Put every piece of GPU work under the ranges that were open when it was launched.

The rules of truth: a launch and its kernel share correlation id and process (the readers see to that); a kernel
belongs to the ranges of its launching thread (`direct`), and around those stand the ranges of the thread that the
launching one works for (`inferred`, see `profkit.analysis.helpers`). The ledger that follows closes in integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.helpers import AMBIGUOUS, HelperFinder, Hosts
from profkit.analysis.nesting import NO_RANGE, Timeline, build_timelines
from profkit.trace.columns import NO_LAUNCH, Copies, Ints, Ranges, Trace, Work, rows_by_value

DIRECT, INFERRED, AMBIGUOUS_HOST, OUTSIDE, NO_LAUNCH_RECORD = range(5)


@dataclass(frozen=True)
class Ledger:
    """All work of the capture, by how it was placed, in nanoseconds; the five parts sum to ``total_ns``."""

    direct_ns: int
    inferred_ns: int
    ambiguous_ns: int
    outside_ns: int
    no_launch_ns: int
    total_ns: int


@dataclass(frozen=True, eq=False)
class Placement:
    """Where each row of a table (work or copies) was launched from.

    ``own`` is the innermost range of the launching thread, ``host`` that of the thread it worked for (`NO_RANGE`,
    `AMBIGUOUS`), ``host_thread`` that thread. ``verdict`` is one of `DIRECT`, `INFERRED`, `AMBIGUOUS_HOST`, `OUTSIDE`,
    `NO_LAUNCH_RECORD`.
    """

    own: Ints
    host: Ints
    host_thread: Ints
    verdict: Ints


@dataclass(frozen=True, eq=False)
class Attribution:
    """A trace with its work placed: the input of every analysis of time."""

    trace: Trace
    timelines: dict[int, Timeline]
    parent: Ints
    """Range → the range around it: on its own thread, else of the thread that its thread worked for."""
    work: Placement
    copies: Placement
    ledger: Ledger


def attribute_work(trace: Trace, *, thread_only: bool = False) -> Attribution:
    """Return the trace with every kernel, graph and copy placed under the ranges open at its launch.

    Args:
        trace: the capture.
        thread_only: look at the launching thread's own ranges alone, as per-thread tools do; what launches from an
            autograd thread then lies outside every range.
    """
    timelines, parent = build_timelines(trace.ranges)
    # One more entry, so that a launch outside every range (-1) finds no adopter.
    finder, adopter = None, np.full(len(trace.ranges) + 1, NO_RANGE, dtype=np.int64)
    if not thread_only and trace.measure == "gpu-kernel":
        finder = HelperFinder(trace, timelines)
        _adopt_top_ranges(trace, timelines, parent, adopter, finder)
    work = _place(trace.work, timelines, adopter, finder)
    copies = _place(trace.copies, timelines, adopter, finder)
    return Attribution(trace, timelines, parent, work, copies, _build_ledger(work, trace.work.duration_ns))


def _place(
    rows: Work | Copies, timelines: dict[int, Timeline], adopter: Ints, finder: HelperFinder | None
) -> Placement:
    own = np.full(len(rows), NO_RANGE, dtype=np.int64)
    host = own.copy()
    host_thread = own.copy()
    for thread, members in rows_by_value(rows.launch_thread).items():
        if thread == NO_LAUNCH:
            continue
        times = rows.launch_ns[members]
        if thread in timelines:
            own[members] = timelines[thread].innermost_at(times)
        if finder is None or not finder.is_helper(thread):
            continue
        # A thread with a range of its own works for itself, unless it is the autograd engine's.
        asking = members if finder.is_autograd(thread) else members[own[members] == NO_RANGE]
        if len(asking):
            process = int(rows.process[asking[0]])
            times = rows.launch_ns[asking]
            hosts = _follow_adopters(finder.find_hosts(thread, process, times), adopter[own[asking]], times, timelines)
            host[asking], host_thread[asking] = hosts.range, hosts.thread
    verdict = np.select(
        [rows.launch_thread == NO_LAUNCH, own != NO_RANGE, host >= 0, host == AMBIGUOUS],
        [NO_LAUNCH_RECORD, DIRECT, INFERRED, AMBIGUOUS_HOST],
        default=OUTSIDE,
    )
    return Placement(own, host, host_thread, verdict)


def _follow_adopters(hosts: Hosts, adopters: Ints, time_ns: Ints, timelines: dict[int, Timeline]) -> Hosts:
    """Give what was launched in an adopted range that range's host, so that it lies under the range's parent too."""
    found, thread_of_row = hosts.range.copy(), hosts.thread.copy()
    for thread, rows in rows_by_value(adopters).items():
        if thread != NO_RANGE:
            found[rows], thread_of_row[rows] = timelines[thread].innermost_at(time_ns[rows]), thread
    return Hosts(found, thread_of_row)


def _adopt_top_ranges(
    trace: Trace, timelines: dict[int, Timeline], parent: Ints, adopter: Ints, finder: HelperFinder
) -> None:
    """Give the outermost ranges of helper threads a parent: the innermost range of the thread they work for.

    Fills ``parent``, and with that thread ``adopter``, also of the ranges within.
    """
    ranges = trace.ranges
    for thread in timelines:
        if not finder.is_autograd(thread):
            continue
        mine = np.flatnonzero((ranges.thread == thread) & (ranges.end_thread == thread))
        top = mine[parent[mine] == NO_RANGE]
        if len(top):
            hosts = finder.find_hosts(thread, int(ranges.process[top[0]]), ranges.start_ns[top])
            parent[top] = _enclosing(ranges, parent, np.maximum(hosts.range, NO_RANGE), top)
            adopter[top] = np.where(parent[top] != NO_RANGE, hosts.thread, NO_RANGE)
            for index in mine[np.lexsort((-ranges.end_ns[mine], ranges.start_ns[mine]))].tolist():
                if adopter[index] == NO_RANGE and parent[index] != NO_RANGE:
                    adopter[index] = adopter[parent[index]]


def _enclosing(ranges: Ranges, parent: Ints, candidate: Ints, members: Ints) -> Ints:
    """Return of each candidate and the ranges around it the innermost that encloses the member in time."""
    while True:
        began, ended = ranges.start_ns[candidate], ranges.end_ns[candidate]
        begin, end = ranges.start_ns[members], ranges.end_ns[members]
        # A range begun here and ended on the host's thread is open there too: it must not enclose itself.
        around = ((began < begin) & (ended >= end)) | ((began == begin) & (ended > end))
        climbing = (candidate != NO_RANGE) & ~around
        if not climbing.any():
            return candidate
        candidate = np.where(climbing, parent[candidate], candidate)


def _build_ledger(placement: Placement, duration_ns: Ints) -> Ledger:
    def total(verdict: int) -> int:
        return int(duration_ns[placement.verdict == verdict].sum())

    return Ledger(
        direct_ns=total(DIRECT),
        inferred_ns=total(INFERRED),
        ambiguous_ns=total(AMBIGUOUS_HOST),
        outside_ns=total(OUTSIDE),
        no_launch_ns=total(NO_LAUNCH_RECORD),
        total_ns=int(duration_ns.sum()),
    )
