"""Put every piece of GPU work under the ranges that were open when it was launched.

The rules of truth: a launch and its kernel share correlation id and process (the readers see to that); a kernel
belongs to the ranges of its launching thread (`direct`), and around those stand the ranges of the thread that the
launching one works for (`inferred`, see `profkit.analysis.helpers`). The ledger that follows closes in integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.helpers import AMBIGUOUS, HelperFinder
from profkit.analysis.nesting import NO_RANGE, Timeline, build_timelines
from profkit.trace.columns import NO_LAUNCH, Copies, Ints, Trace, Work, rows_by_value

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
    finder = None
    if not thread_only and trace.measure == "gpu-kernel":
        finder = HelperFinder(trace, timelines)
        _adopt_top_ranges(trace, timelines, parent, finder)
    work = _place(trace.work, timelines, finder)
    copies = _place(trace.copies, timelines, finder)
    return Attribution(trace, timelines, parent, work, copies, _build_ledger(work, trace.work.duration_ns))


def _place(rows: Work | Copies, timelines: dict[int, Timeline], finder: HelperFinder | None) -> Placement:
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
            hosts = finder.find_hosts(thread, process, rows.launch_ns[asking])
            host[asking], host_thread[asking] = hosts.range, hosts.thread
    verdict = np.select(
        [rows.launch_thread == NO_LAUNCH, own != NO_RANGE, host >= 0, host == AMBIGUOUS],
        [NO_LAUNCH_RECORD, DIRECT, INFERRED, AMBIGUOUS_HOST],
        default=OUTSIDE,
    )
    return Placement(own, host, host_thread, verdict)


def _adopt_top_ranges(trace: Trace, timelines: dict[int, Timeline], parent: Ints, finder: HelperFinder) -> None:
    """Give the outermost ranges of helper threads a parent: the innermost range of the thread they work for."""
    ranges = trace.ranges
    for thread in timelines:
        if not finder.is_autograd(thread):
            continue
        top = np.flatnonzero((ranges.thread == thread) & (parent == NO_RANGE))
        if len(top):
            hosts = finder.find_hosts(thread, int(ranges.process[top[0]]), ranges.start_ns[top])
            # A range begun here and ended on the host's thread is open there too: it must not enclose itself.
            began, ended = ranges.start_ns[hosts.range], ranges.end_ns[hosts.range]
            around = (began < ranges.start_ns[top]) | ((began == ranges.start_ns[top]) & (ended > ranges.end_ns[top]))
            parent[top] = np.where((hosts.range >= 0) & around, hosts.range, NO_RANGE)


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
