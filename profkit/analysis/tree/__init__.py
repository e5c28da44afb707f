"""The tree of range paths, and which ranges and work a request selects: the one rule that every command asks.

A name that exists means exactly that name. A kind that the tree of ranges shows (``layer *`` for ``layer 0`` and
``layer 1``) means those ranges, and any other glob (``l*``) matches whole names. A path (``forward/layer 3``) names
consecutive ancestors and, last, the range itself; each part is a name or a glob, ``\\/`` is a slash that belongs to a
name, and a leading slash begins at the top. Mirrors of forward ranges (`placing.other_threads`) were never
open: only a path that starts above them selects them (``backward/layer 3``).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profkit.analysis.intervals import running_maximum
from profkit.analysis.placing.attribution import DIRECT, INFERRED, SEQUENCE, Attribution, mark_members
from profkit.errors import TraceError, UsageError
from profkit.names import BACKWARD, kind_of, phase_of
from profkit.trace.columns import Bools, Copies, Ints, Ranges, Trace, Work, distinct_values, rows_by_value
from profkit.trace.nesting import NO_RANGE, mark_nested


def split_path(request: str) -> list[str]:
    """Return the parts of a path; ``\\/`` is a slash within a part."""
    return [part.replace("\\/", "/") for part in re.split(r"(?<!\\)/", request)]


def join_path(parts: Iterable[str]) -> str:
    """Return a path as it is written: parts joined by slashes; a slash within a part is ``\\/``."""
    return "/".join(part.replace("/", "\\/") for part in parts)


def select_ranges(
    attribution: Attribution,
    request: str,
    *,
    instance: int | None = None,
    processes: frozenset[int] | None = None,
) -> Ints:
    """Return the ranges that ``request`` names, in order of their start.

    With ``instance`` only the n-th of them, counted from 0, with ``processes`` only those of these processes.

    Raises:
        TraceError: the trace holds no ranges at all.
        UsageError: nothing matches (with the nearest names), or there is no such instance.
    """
    ranges = attribution.trace.ranges
    if not len(ranges):
        raise TraceError(f"{attribution.trace.path}: {explain_no_ranges(attribution.trace)}")
    chosen = _match(attribution, request)
    if processes is not None:
        chosen &= np.isin(ranges.process, list(processes))
    members = np.flatnonzero(chosen)
    members = members[np.argsort(ranges.start_ns[members], kind="stable")]
    if not len(members):
        raise UsageError(_explain_unknown(attribution, request, limited=processes is not None))
    if instance is not None:
        if not 0 <= instance < len(members):
            raise UsageError(f"no instance {instance}: {request!r} has {len(members)} instances, counted from 0")
        members = members[instance : instance + 1]
    return members


def explain_no_ranges(trace: Trace) -> str:
    if trace.has_invisible_ranges:
        return (
            "NVTX domains were recorded but no range: this nsys cannot see the ranges of the"
            " `nvtx` package ≥ 0.2.12; install 'nvtx<0.2.12' or use nsys 2025.3 or newer"
        )
    if trace.source == "kineto":
        return "no ranges were recorded: wrap the parts of the step in profkit.annotate or record_function"
    return (
        "no ranges were recorded: nsys ran without --trace=nvtx, the program opened none, or they opened before"
        " the capture began (nsys 2023.4.4 also cannot see those of the `nvtx` package ≥ 0.2.12)"
    )


def _match(attribution: Attribution, request: str) -> Bools:
    ranges, names = attribution.trace.ranges, attribution.trace.names
    used = distinct_values(ranges.name).tolist()
    by_name = _nameable(attribution)
    exact = [index for index in used if names[index] == request]
    if exact:
        return np.asarray(np.isin(ranges.name, exact) & by_name)
    parts = split_path(request.removeprefix("/"))
    chosen = np.isin(ranges.name, _match_names(names, used, parts[-1]))
    reached = by_name.copy()
    above = np.where(chosen, attribution.parent, NO_RANGE)
    for part in reversed(parts[:-1]):
        matching = np.isin(ranges.name, _match_names(names, used, part))
        chosen &= (above != NO_RANGE) & matching[above]
        reached |= (above != NO_RANGE) & by_name[above]
        above = np.where(chosen, attribution.parent[above], NO_RANGE)
    if request.startswith("/"):
        chosen &= above == NO_RANGE
    return np.asarray(chosen & reached)


def _nameable(attribution: Attribution) -> Bools:
    names, is_mirror = attribution.trace.names, attribution.is_mirror
    backward = np.array([phase_of(name) == BACKWARD for name in names], dtype=np.bool_)[attribution.trace.ranges.name]
    is_outer = attribution.parent < attribution.mirrors.first
    return np.asarray(~is_mirror | (is_outer & backward))


def _match_names(names: list[str], used: list[int], pattern: str) -> list[int]:
    """Return the matching names: the exact one, else those of a kind that the tree shows, else by the glob."""
    exact = [index for index in used if names[index] == pattern]
    if exact:
        return exact
    kind = [index for index in used if kind_of(names[index]) == pattern] if "*" in pattern else []
    if len(kind) > 1:
        return kind
    return [index for index in used if fnmatch.fnmatchcase(names[index], pattern)]


def find_near_names(name: str, known: Sequence[str]) -> list[str]:
    """Return up to three of ``known`` that are spelled much as ``name``, or else hold it."""
    import difflib  # few names are unknown

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return near + [other for other in known if name.lower() in other.lower() and other not in near][: 3 - len(near)]


def _explain_unknown(attribution: Attribution, request: str, *, limited: bool) -> str:
    trace = attribution.trace
    known = sorted({trace.names[index] for index in distinct_values(trace.ranges.name).tolist()})
    last = split_path(request)[-1]
    near = find_near_names(last, known)
    hint = f"nearest: {', '.join(map(repr, near))}" if near else f"there are {', '.join(map(repr, known[:5]))}"
    hint += "" if near or len(known) <= 5 else f" and {len(known) - 5} more"
    where = " in the chosen processes" if limited else ""
    return f"{trace.path}: no range {request!r}{where}; {hint} (`profkit ranges` lists them)"


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
        if self.instances is None:
            return None
        kinds = (DIRECT, INFERRED, SEQUENCE)
        return RangeEvidence(*(int(duration_ns[self.rows & (self.instances.evidence == kind)].sum()) for kind in kinds))


def choose_work(attribution: Attribution, wanted: KernelFilter) -> Chosen:
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
        each = attribution.work.under(members, np.arange(len(members)))
        present &= mark_members(len(members), each.member[rows[each.rows]])
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


def _limit(trace: Trace, rows: Work | Copies, wanted: KernelFilter) -> Bools:
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
    processes = frozenset(process for process, pid in trace.process_ids.items() if pid == wanted.process)
    if not processes:
        raise UsageError(f"no process {wanted.process}: this trace has {_listed('pid', trace.process_ids.values())}")
    return processes


def _listed(noun: str, values: Any) -> str:
    ordered = sorted(values)
    return f"{noun}{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered)) or 'none'}"
