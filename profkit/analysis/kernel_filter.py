"""What a request for kernels takes in: its range, less another, one instance, some processes and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from profkit.analysis.attribution import Attribution
from profkit.analysis.launches import Launches
from profkit.analysis.selection import Selected, Selection, lies_within, outermost, select_ranges, select_work
from profkit.errors import UsageError
from profkit.trace.columns import Bools, Copies, Ints, Trace, Work, distinct_values


@dataclass(frozen=True)
class KernelFilter:
    """What to count: a range, less another, one instance, some processes (by pid) and devices; None is no limit.

    ``rank`` tells which rank's trace this is asked of: one that holds nothing else.
    """

    range: str | None = None
    exclude: str | None = None
    instance: int | None = None
    process: int | None = None
    device: int | None = None
    rank: int | None = None


@dataclass(frozen=True, eq=False)
class Instances:
    """The instances of the range asked for, and which of them the other filters left.

    ``present`` marks those that count, by position in ``selection.members``: all but what lies within an excluded
    range and, with a device asked for, what launched nothing there. ``outermost`` are those of them that lie in no
    other; their durations sum to ``wall_ns``.
    """

    selection: Selection
    selected: Selected
    present: Bools
    outermost: Ints
    wall_ns: int

    @property
    def members(self) -> Ints:
        """Return the ranges that count."""
        return self.selection.members[self.present]


@dataclass(frozen=True, eq=False)
class Chosen:
    """Which rows of work and of copies a request takes in, and the instances of its range, if it names one."""

    rows: Bools
    copies: Bools
    instances: Instances | None


def choose_work(attribution: Attribution, wanted: KernelFilter) -> Chosen:
    """Return what a request takes in.

    Raises:
        TraceError: a range is asked of a trace without ranges.
        UsageError: an unknown range, process, device or instance.
    """
    if wanted.instance is not None and wanted.range is None:
        raise UsageError("--instance needs --range")
    trace = attribution.trace
    without = None if wanted.exclude is None else select_ranges(attribution, wanted.exclude)
    rows, copies = _limit(trace, trace.work, wanted), _limit(trace, trace.copies, wanted)
    selection, selected = None, None
    if wanted.range is not None:
        processes = _processes(trace, wanted)
        selection = select_ranges(attribution, wanted.range, instance=wanted.instance, processes=processes)
        selected = select_work(attribution, trace.work, attribution.work, selection)
        rows &= selected.rows
        copies &= select_work(attribution, trace.copies, attribution.copies, selection).rows
    if without is not None:
        rows &= ~select_work(attribution, trace.work, attribution.work, without).rows
        copies &= ~select_work(attribution, trace.copies, attribution.copies, without).rows
    if selection is None or selected is None:
        return Chosen(rows, copies, None)
    present = np.ones(len(selection.members), dtype=np.bool_)
    if without is not None:
        present = ~lies_within(attribution, without)[selection.members]
    if wanted.device is not None:
        present &= _has_work(attribution, selection, rows)
    # Work that a flow places here keeps its range, though the range itself may lie in an excluded one.
    present[selected.instance[rows]] = True
    top = outermost(trace.ranges, selection.members[present])
    wall_ns = int((trace.ranges.end_ns[top] - trace.ranges.start_ns[top]).sum())
    return Chosen(rows, copies, Instances(selection, selected, present, top, wall_ns))


def _has_work(attribution: Attribution, selection: Selection, rows: Bools) -> Bools:
    """Return which instances hold any of the rows."""
    launches = Launches(attribution.trace.work, attribution.work)
    position = np.arange(len(selection.members))
    under, member = launches.under(attribution.trace.ranges, selection.members, position)
    found = np.zeros(len(selection.members), dtype=np.bool_)
    found[member[rows[under]]] = True
    return found


def _limit(trace: Trace, rows: Work | Copies, wanted: KernelFilter) -> Bools:
    """Return the rows of the wanted processes and devices."""
    keep = np.ones(len(rows), dtype=np.bool_)
    processes = _processes(trace, wanted)
    if processes is not None:
        keep &= np.isin(rows.process, list(processes))
    if wanted.device is not None:
        devices = distinct_values(trace.work.device).tolist()
        if wanted.device not in devices:
            raise UsageError(f"--device {wanted.device}: this trace has work on {_listed('device', devices)}")
        keep &= rows.device == wanted.device
    return keep


def _processes(trace: Trace, wanted: KernelFilter) -> frozenset[int] | None:
    if wanted.process is None:
        return None
    found = frozenset(process for process, pid in trace.process_ids.items() if pid == wanted.process)
    if not found:
        raise UsageError(f"--process {wanted.process}: this trace has {_listed('pid', trace.process_ids.values())}")
    return found


def _listed(noun: str, values: Any) -> str:
    ordered = sorted(values)
    return f"{noun}{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered)) or 'none'}"
