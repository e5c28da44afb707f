"""Which work a request selects: under a range, not under another, of one instance, process or device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from profkit.analysis.intervals import running_maximum
from profkit.analysis.placing.attribution import DIRECT, INFERRED, SEQUENCE, Attribution, mark_members
from profkit.analysis.placing.nesting import mark_nested
from profkit.analysis.tree.range_paths import select_ranges
from profkit.errors import UsageError
from profkit.trace.columns import Bools, Copies, Ints, Ranges, Trace, Work, distinct_values, rows_by_value


@dataclass(frozen=True)
class KernelFilter:
    """What to count: the work under a range, not under another, of one instance, process (pid) or device; None: any.

    ``rank`` is the one rank that the trace holds, if it was limited to one.
    """

    range: str | None = None
    exclude: str | None = None
    instance: int | None = None
    process: int | None = None
    device: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class RangeEvidence:
    """How the work came under the selected range; the parts sum to its kernel and graph time.

    ``sequence_ns`` is nonzero for torch.profiler's traces alone: backward work placed by its operators' links.
    """

    direct_ns: int
    inferred_ns: int
    sequence_ns: int


@dataclass(frozen=True, eq=False)
class Instances:
    """The instances of the range asked for, and which of them the other filters left.

    ``members`` are all of them by start, numbered from ``first_number``: 0, or the one instance that was asked for.
    ``present`` marks those that count: all but what lies within an excluded range and, with a device asked for, what
    launched nothing there. ``outermost`` are those of them that lie in no other; their durations sum to ``wall_ns``.
    ``of_row`` is each row of work's outermost instance (its position), -1 for none; ``evidence`` how it came under it.
    """

    request: str
    members: Ints
    first_number: int
    present: Bools
    outermost: Ints
    wall_ns: int | None
    of_row: Ints
    evidence: Ints


@dataclass(frozen=True, eq=False)
class Chosen:
    """Which rows of work and of copies a request selects, and the instances of its range, if it names one."""

    rows: Bools
    copies: Bools
    instances: Instances | None

    def sum_evidence(self, duration_ns: Ints) -> RangeEvidence | None:
        """Return how the selected work came under the range, None without one."""
        if self.instances is None:
            return None
        kinds = (DIRECT, INFERRED, SEQUENCE)
        return RangeEvidence(*(int(duration_ns[self.rows & (self.instances.evidence == kind)].sum()) for kind in kinds))


def choose_work(attribution: Attribution, wanted: KernelFilter) -> Chosen:
    """Return what a request selects.

    Raises:
        TraceError: a range is asked of a trace without ranges.
        UsageError: an unknown range, process, device or instance.
    """
    if wanted.instance is not None and wanted.range is None:
        raise UsageError("one instance needs a range: an instance is one opening of a range")
    trace = attribution.trace
    without = None if wanted.exclude is None else select_ranges(attribution, wanted.exclude)
    rows, copies = _limit(trace, trace.work, wanted), _limit(trace, trace.copies, wanted)
    if without is not None:
        rows &= ~mark_members(len(rows), attribution.work.under(without).rows)
        copies &= ~mark_members(len(copies), attribution.copies.under(without).rows)
    if wanted.range is None:
        return Chosen(rows, copies, None)
    processes = _processes(trace, wanted)
    members = select_ranges(attribution, wanted.range, instance=wanted.instance, processes=processes)
    under = attribution.work.under(members)
    rows &= mark_members(len(rows), under.rows)
    copies &= mark_members(len(copies), attribution.copies.under(members).rows)
    of_row, evidence = (np.full(len(rows), -1, dtype=np.int64) for _ in range(2))
    of_row[under.rows], evidence[under.rows] = under.member, under.evidence
    present = np.ones(len(members), dtype=np.bool_)
    if without is not None:
        present = ~lies_within(attribution, without)[members]
    if wanted.device is not None:
        present &= _has_work(attribution, members, rows)
    # Work that a waiting thread or a link places here keeps its range, even if that lies in an excluded one.
    present[of_row[rows]] = True
    top = outermost(trace.ranges, members[present])
    wall_ns = trace.ranges.sum_open(top)
    first = wanted.instance or 0
    return Chosen(rows, copies, Instances(wanted.range, members, first, present, top, wall_ns, of_row, evidence))


def outermost(ranges: Ranges, members: Ints, group: Ints | None = None) -> Ints:
    """Return the members that lie within no other member of their thread (and group), in order of their start."""
    keys = [-ranges.end_ns[members], ranges.start_ns[members], ranges.thread[members]]
    keys += [] if group is None else [group]
    order = members[np.lexsort(keys)]
    if not len(order):
        return order
    changes = ranges.thread[order][1:] != ranges.thread[order][:-1]
    if group is not None:
        changes |= np.sort(group)[1:] != np.sort(group)[:-1]
    first = np.flatnonzero(np.concatenate([[True], changes]))
    reach = running_maximum(ranges.end_ns[order], first)
    before = np.concatenate([[0], reach[:-1]])
    keep = ranges.end_ns[order] > before
    keep[first] = True
    kept = order[keep]
    return kept[np.argsort(ranges.start_ns[kept], kind="stable")]


def lies_within(attribution: Attribution, around: Ints) -> Bools:
    """Return which ranges lie within one of ``around``: under it in the tree, or at the same time on its thread."""
    ranges = attribution.trace.ranges
    inside = mark_nested(attribution.parent, mark_members(len(ranges), around))
    for thread, which in rows_by_value(ranges.thread[around]).items():
        outer = around[which]
        mine = np.flatnonzero((ranges.thread == thread) & (ranges.end_thread == thread))
        begun = np.searchsorted(ranges.start_ns[outer], ranges.start_ns[mine], side="right") - 1
        reach = np.maximum.accumulate(ranges.end_ns[outer])
        inside[mine] |= (begun >= 0) & (reach[begun] >= ranges.end_ns[mine])
    return inside


def _has_work(attribution: Attribution, members: Ints, rows: Bools) -> Bools:
    """Return which instances hold any of the rows."""
    under = attribution.work.under(members, np.arange(len(members)))
    return mark_members(len(members), under.member[rows[under.rows]])


def _limit(trace: Trace, rows: Work | Copies, wanted: KernelFilter) -> Bools:
    """Return the rows of the wanted processes and devices."""
    keep = np.ones(len(rows), dtype=np.bool_)
    processes = _processes(trace, wanted)
    if processes is not None:
        keep &= np.isin(rows.process, list(processes))
    if wanted.device is not None:
        devices = distinct_values(trace.work.device).tolist()
        if wanted.device not in devices:
            raise UsageError(f"no device {wanted.device}: this trace has work on {_listed('device', devices)}")
        keep &= rows.device == wanted.device
    return keep


def _processes(trace: Trace, wanted: KernelFilter) -> frozenset[int] | None:
    if wanted.process is None:
        return None
    found = frozenset(process for process, pid in trace.process_ids.items() if pid == wanted.process)
    if not found:
        raise UsageError(f"no process {wanted.process}: this trace has {_listed('pid', trace.process_ids.values())}")
    return found


def _listed(noun: str, values: Any) -> str:
    ordered = sorted(values)
    return f"{noun}{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered)) or 'none'}"
