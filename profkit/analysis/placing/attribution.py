"""Put every piece of GPU work under the ranges that were open when it was launched: the one rule that all commands use.

A launch and its kernel share correlation id and process; the readers have matched them. A kernel has up to three
places. A place is a thread and a moment on it:

1. its launching thread, at the launch (`DIRECT`);
2. the thread that waited for the launching one, at the launch (`INFERRED`);
3. for backward work in a trace of torch.profiler, the range that stands for the range of its forward operator
   (`SEQUENCE`; both in `profkit.analysis.placing.other_threads`).

It lies under every range that is open in one of its places: from the range's first nanosecond to just before its last.
A child lies within its parent, so what lies under a range lies under its parent too. The ledger over all work closes in
integers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from profkit.analysis.intervals import running_maximum, spread
from profkit.analysis.placing.other_threads import (
    AMBIGUOUS,
    NO_MIRRORS,
    Hosts,
    Mirrors,
    WaitingThreads,
    end_with_backward,
    mirror_forward_ranges,
    name_replicas,
)
from profkit.errors import Finding, TraceError
from profkit.trace.columns import (
    NO_LAUNCH,
    Bools,
    Copies,
    Ints,
    Ranges,
    Trace,
    Work,
    distinct_values,
    empty_ints,
    rows_by_value,
    take_rows,
)
from profkit.trace.nesting import NO_RANGE, ThreadTimeline, build_timelines, innermost_at_launch

DIRECT, INFERRED, SEQUENCE = range(3)
"""How a row came under a range: by its own thread, by the thread that waited for it, by its operator's link."""

OUTSIDE, AMBIGUOUS_HOST, NO_LAUNCH_RECORD = 3, 4, 5
"""Why a row came under no range at all."""

_MOST_PLACES = 2**25
_MOST_PLACES_EACH = 64
"""A trace that exceeds both is refused: pairs of a row and a range over it in all, ranges over a row on average."""

NEVER = 1 << 62
"""A time after all others: 2⁶² ns are 146 years."""


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
class Under:
    """Rows that lie under ranges: each row once for each group, with the outermost range over it and the evidence.

    ``member`` is the position of that range among those asked about. Of two kinds of evidence the lower number stands.
    """

    rows: Ints
    member: Ints
    evidence: Ints


class PlacedRows:
    """The rows of a table, work or copies, in their places; answers which of them lie under which ranges."""

    def __init__(self, rows: Work | Copies, trace: Trace, own: Ints, hosts: Hosts, mirrors: Mirrors) -> None:
        """Place the rows of a capture, in which the ranges of ``mirrors`` stand last.

        ``own`` is each row's innermost range on its launching thread, or `NO_RANGE`; ``hosts`` its innermost range on
        the thread that waited for it, and that thread.
        """
        self.ranges = trace.ranges
        self._file = trace.path
        self._rows = rows
        self._own, self._hosts, self._mirrors = own, hosts, mirrors
        self._queues: dict[int, list[tuple[int, Ints, int]]] = {}  # thread → begin in _order, launch times, evidence
        order, begin = [], 0
        for evidence, threads in ((DIRECT, rows.launch_thread), (INFERRED, hosts.thread)):
            for thread, rows_of_thread in rows_by_value(threads).items():
                if thread < 0:
                    continue
                times = rows.placed_ns[rows_of_thread]
                in_order = (times[1:] >= times[:-1]).all()
                queue = rows_of_thread if in_order else rows_of_thread[np.argsort(times, kind="stable")]
                self._queues.setdefault(thread, []).append((begin, rows.placed_ns[queue], evidence))
                order.append(queue)
                begin += len(queue)
        self._linked = (begin, empty_ints())
        if len(mirrors) and isinstance(rows, Work):
            linked = np.flatnonzero(mirrors.of_row >= 0)
            queue = linked[np.argsort(mirrors.of_row[linked], kind="stable")]
            self._linked = (begin, mirrors.of_row[queue])
            order.append(queue)
        self._order = np.concatenate(order) if order else empty_ints()

    @property
    def host_thread(self) -> Ints:
        """Return the thread that waited for each row's launching one, or `NO_RANGE`."""
        return self._hosts.thread

    @cached_property
    def verdict(self) -> Ints:
        """Return how each row was placed, or why it was not: `DIRECT`, `INFERRED`, `OUTSIDE`, …

        A link does not change this: a row that lies under a mirror and under no recorded range counts as `OUTSIDE`.
        """
        return np.select(
            [
                self._rows.launch_thread == NO_LAUNCH,
                self._own != NO_RANGE,
                self._hosts.range >= 0,
                self._hosts.range == AMBIGUOUS,
            ],
            [NO_LAUNCH_RECORD, DIRECT, INFERRED, AMBIGUOUS_HOST],
            default=OUTSIDE,
        )

    @cached_property
    def innermost(self) -> Ints:
        """Return the innermost range that each row lies under, `NO_RANGE` for none."""
        innermost = np.where(self._own != NO_RANGE, self._own, np.maximum(self._hosts.range, NO_RANGE))
        if len(self._mirrors) and isinstance(self._rows, Work):
            linked = self._mirrors.of_row >= 0
            innermost[linked] = self._mirrors.first + np.argsort(self._mirrors.number)[self._mirrors.of_row[linked]]
        return innermost

    def under(self, members: Ints, group: Ints | None = None) -> Under:
        """Return the rows that lie under the ranges ``members``, each once; with ``group``, once for each group."""
        group = np.zeros(len(members), dtype=np.int64) if group is None else group
        position, low, high, evidence = self._slices(members)
        if not len(position):
            return Under(position, position, position)
        ranges = self.ranges
        # Of two that begin before the same launch, the one that opened first and stays longest is the outer one.
        keys = (-ranges.end_ns[members[position]], ranges.start_ns[members[position]], low, group[position])
        order = np.lexsort(keys)
        position, low, high, evidence = position[order], low[order], high[order], evidence[order]
        groups = group[position]
        first = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        before = np.concatenate([[0], running_maximum(high, first)[:-1]])
        before[first] = low[first]
        low = np.maximum(low, before)
        self.refuse_many(int(np.maximum(high - low, 0).sum()))
        which, at = spread(low, high)
        rows, position, evidence = self._order[at], position[which], evidence[which]
        if self._has_two_places and len(rows):
            # One sort brings together what lies in one group twice, the best evidence first.
            pairs = (group[position] * len(self._rows) + rows) * (SEQUENCE + 1) + evidence
            order = np.argsort(pairs, kind="stable")
            pairs = pairs[order] // (SEQUENCE + 1)
            kept = order[np.concatenate([[True], pairs[1:] != pairs[:-1]])]
            rows, position, evidence = rows[kept], position[kept], evidence[kept]
        return Under(rows, position, evidence)

    def count(self, members: Ints) -> Ints:
        if self._has_two_places:
            under = self.under(members, np.arange(len(members)))
            return np.bincount(under.member, minlength=len(members))
        return self.count_places(members)

    def count_places(self, members: Ints) -> Ints:
        """Return how many places of rows lie under each range; a row has up to three."""
        position, low, high, _ = self._slices(members)
        counts = np.zeros(len(members), dtype=np.int64)
        np.add.at(counts, position, high - low)
        return counts

    def refuse_many(self, count: int) -> None:
        """Raise TraceError if there are more pairs of a row and a range over it than any real program has: each takes
        time.
        """
        if count > max(_MOST_PLACES, _MOST_PLACES_EACH * len(self._rows)):
            raise TraceError(
                f"{self._file}: {len(self._rows):,} kernels or copies lie under more than {_MOST_PLACES_EACH} ranges"
                " each; captures with that many are not read"
            )

    def extent(self, members: Ints, start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints]:
        """Return the first start and the last end of the rows under each range; without rows, `NEVER` and -`NEVER`.

        ``start_ns`` and ``end_ns`` are those of all rows, in their own order; `NEVER` and -`NEVER` leave a row out.
        """
        first = np.full(len(members), NEVER, dtype=np.int64)
        last = np.full(len(members), -NEVER, dtype=np.int64)
        position, low, high, _ = self._slices(members)
        filled = np.flatnonzero(high > low)
        # reduceat also reads what lies between two stretches: at most once each, if they are sorted by beginning.
        filled = filled[np.argsort(low[filled], kind="stable")]
        if len(filled):
            edges = np.stack([low[filled], high[filled]], axis=1).reshape(-1)
            starts, ends = np.append(start_ns[self._order], NEVER), np.append(end_ns[self._order], -NEVER)
            np.minimum.at(first, position[filled], np.minimum.reduceat(starts, edges)[::2])
            np.maximum.at(last, position[filled], np.maximum.reduceat(ends, edges)[::2])
        return first, last

    @cached_property
    def _has_two_places(self) -> bool:
        ranges = self.ranges
        both = (self._own >= 0) & (self._hosts.thread >= 0)
        return bool(len(self._mirrors) or both.any() or (ranges.thread != ranges.end_thread).any())

    def _slices(self, members: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return stretches of ``_order`` under the ranges: which range (its position), from, to, by what evidence."""
        ranges, none = self.ranges, empty_ints()
        elsewhere = np.flatnonzero(ranges.end_thread[members] != ranges.thread[members])
        position = np.concatenate([np.arange(len(members)), elsewhere])
        threads = np.concatenate([ranges.thread[members], ranges.end_thread[members[elsewhere]]])
        parts = [(none, none, none, none)]
        for thread, which in rows_by_value(threads).items():
            mine = members[position[which]]
            for begin, times, evidence in self._queues.get(thread, []):
                low = begin + np.searchsorted(times, ranges.start_ns[mine], side="left")
                high = begin + np.searchsorted(times, ranges.end_ns[mine], side="left")
                parts.append((position[which], low, np.maximum(low, high), np.full(len(mine), evidence)))
        mirrored = np.flatnonzero(members >= self._mirrors.first)
        if len(mirrored):
            begin, numbers = self._linked
            low, high = (begin + np.searchsorted(numbers, edge) for edge in self._mirrors.span(members[mirrored]))
            parts.append((mirrored, low, high, np.full(len(mirrored), SEQUENCE)))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return columns[0], columns[1], columns[2], columns[3]


@dataclass(frozen=True, eq=False)
class Attribution:
    """A trace with its work placed: the input of every analysis of time.

    ``trace.ranges`` are the recorded ranges and, after them, the ``mirrors``.
    """

    trace: Trace
    timelines: dict[int, ThreadTimeline]
    parent: Ints
    """Range → the range around it: on its own thread, else of the thread that its thread worked for."""
    mirrors: Mirrors
    work: PlacedRows
    copies: PlacedRows
    ledger: Ledger

    @cached_property
    def is_mirror(self) -> Bools:
        """Return which ranges were never open, but stand for forward ranges in the backward pass."""
        return np.arange(len(self.trace.ranges)) >= self.mirrors.first


def attribute_work(trace: Trace, *, thread_only: bool = False) -> Attribution:
    """Return the trace with every kernel, graph and copy placed under the ranges open at its launch.

    With ``thread_only``, as per-thread tools do, the launching thread's own ranges alone count: what launches from an
    autograd thread then lies outside every range.
    """
    timelines, parent = build_timelines(trace.ranges)
    # One more entry, so that a launch outside every range (-1) finds no adopter.
    waiting, adopter = None, np.full(len(trace.ranges) + 1, NO_RANGE, dtype=np.int64)
    if not thread_only and trace.measure == "gpu-kernel":
        trace = name_replicas(trace, parent)
        waiting = WaitingThreads(trace, timelines)
        ended = end_with_backward(trace, timelines, parent, waiting)
        if ended is not trace:
            trace = ended
            timelines, parent = build_timelines(trace.ranges)
            waiting = WaitingThreads(trace, timelines)
        _adopt_top_ranges(trace, timelines, parent, adopter, waiting)
    adopted = _timelines_of_adopted(trace.ranges, timelines, adopter)
    own, hosts = _place(trace.work, timelines, adopter, adopted, waiting)
    own_copies, copy_hosts = _place(trace.copies, timelines, adopter, adopted, waiting)
    mirrors = NO_MIRRORS
    if not thread_only and trace.origins is not None:
        around = np.where(own != NO_RANGE, own, np.maximum(hosts.range, NO_RANGE))
        trace, parent, mirrors = mirror_forward_ranges(trace, timelines, parent, around)
    work = PlacedRows(trace.work, trace, own, hosts, mirrors)
    copies = PlacedRows(trace.copies, trace, own_copies, copy_hosts, mirrors)
    ledger = _build_ledger(work.verdict, trace.work.duration_ns)
    return Attribution(trace, timelines, parent, mirrors, work, copies, ledger)


def _place(
    rows: Work | Copies,
    timelines: dict[int, ThreadTimeline],
    adopter: Ints,
    adopted: dict[int, ThreadTimeline],
    waiting: WaitingThreads | None,
) -> tuple[Ints, Hosts]:
    own = innermost_at_launch(rows, timelines)
    host, host_thread = (np.full(len(rows), NO_RANGE, dtype=np.int64) for _ in range(2))
    for thread, members in rows_by_value(rows.launch_thread).items():
        if thread == NO_LAUNCH or waiting is None or not waiting.may_help(thread):
            continue
        # A thread with a range of its own works for itself, unless it is the autograd engine's or a replica's.
        asking = members if waiting.works_for_another(thread) else members[own[members] == NO_RANGE]
        if len(asking):
            times = rows.placed_ns[asking]
            hosts = waiting.find_hosts(thread, int(rows.process[asking[0]]), times)
            host[asking], host_thread[asking] = hosts.range, hosts.thread
            # What was launched in an adopted range has that range's host, so that it lies under the range's parent too.
            around = adopted[thread].innermost_at(times) if thread in adopted else np.full(len(asking), NO_RANGE)
            for other, inside in rows_by_value(adopter[around]).items():
                if other != NO_RANGE:
                    host[asking[inside]] = timelines[other].innermost_at(times[inside])
                    host_thread[asking[inside]] = other
    return own, Hosts(host, host_thread)


def _adopt_top_ranges(
    trace: Trace, timelines: dict[int, ThreadTimeline], parent: Ints, adopter: Ints, waiting: WaitingThreads
) -> None:
    """Fill ``parent`` for these ranges; ``adopter`` gets the other thread, for them and all within them."""
    ranges = trace.ranges
    for thread in timelines:
        if not waiting.works_for_another(thread):
            continue
        mine = np.flatnonzero((ranges.thread == thread) & (ranges.end_thread == thread))
        top = mine[parent[mine] == NO_RANGE]
        if len(top):
            hosts = waiting.find_hosts(thread, int(ranges.process[top[0]]), ranges.start_ns[top])
            parent[top] = _enclosing(ranges, parent, np.maximum(hosts.range, NO_RANGE), top)
            adopter[top] = np.where(parent[top] != NO_RANGE, hosts.thread, NO_RANGE)
            for index in mine[np.lexsort((-ranges.end_ns[mine], ranges.start_ns[mine]))].tolist():
                if adopter[index] == NO_RANGE and parent[index] != NO_RANGE:
                    adopter[index] = adopter[parent[index]]


def _timelines_of_adopted(
    ranges: Ranges, timelines: dict[int, ThreadTimeline], adopter: Ints
) -> dict[int, ThreadTimeline]:
    """Return the timeline of each thread's adopted ranges alone: one that crosses them or ends elsewhere hides none."""
    is_adopted = adopter[:-1] != NO_RANGE
    found = {}
    for thread in distinct_values(ranges.thread[is_adopted]).tolist():
        mine = np.flatnonzero(is_adopted & (ranges.thread == thread))
        if len(mine) == np.count_nonzero((ranges.thread == thread) | (ranges.end_thread == thread)):
            found[thread] = timelines[thread]
        else:
            timeline = build_timelines(take_rows(ranges, mine))[0][thread]
            found[thread] = replace(timeline, innermost=np.append(mine, NO_RANGE)[timeline.innermost])
    return found


def _enclosing(ranges: Ranges, parent: Ints, candidate: Ints, members: Ints) -> Ints:
    """Return, for each member, the innermost of its candidate and the ranges around that which ends no earlier."""
    while True:
        climbing = (candidate != NO_RANGE) & (ranges.end_ns[candidate] < ranges.end_ns[members])
        if not climbing.any():
            return candidate
        candidate = np.where(climbing, parent[candidate], candidate)


def _build_ledger(verdict: Ints, duration_ns: Ints) -> Ledger:
    def total(kind: int) -> int:
        return int(duration_ns[verdict == kind].sum())

    return Ledger(
        direct_ns=total(DIRECT),
        inferred_ns=total(INFERRED),
        ambiguous_ns=total(AMBIGUOUS_HOST),
        outside_ns=total(OUTSIDE),
        no_launch_ns=total(NO_LAUNCH_RECORD),
        total_ns=int(duration_ns.sum()),
    )


def mark_members(count: int, members: Ints) -> Bools:
    marked = np.zeros(count, dtype=np.bool_)
    marked[members] = True
    return marked


def warn_of_placement(attribution: Attribution) -> list[Finding]:
    """Return findings on work that no range gets, and on what the reader of the file had to leave out."""
    ledger = attribution.ledger
    reasons = (
        ("ambiguous", ledger.ambiguous_ns, "were launched by threads for which two or more threads may have waited"),
        ("no-launch", ledger.no_launch_ns, "have no launch record"),
    )
    unplaced = [
        Finding(code, f"{ns:,} ns ({ns / ledger.total_ns:.1%} of all kernel time) {reason}; no range gets them")
        for code, ns, reason in reasons
        if ns
    ]
    return [*unplaced, *(Finding("reader", note) for note in attribution.trace.notes)]
