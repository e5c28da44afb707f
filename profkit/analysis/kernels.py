"""Which kernels spent the time, in the whole capture or under a range: the result behind ``profkit kernels``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from profkit.analysis.attribution import Attribution, Ledger
from profkit.analysis.busy import busy_ns, union_ns
from profkit.analysis.categories import categorize
from profkit.analysis.range_tree import path_of
from profkit.analysis.selection import (
    DIRECT_EVIDENCE,
    INFERRED_EVIDENCE,
    SEQUENCE_EVIDENCE,
    RangeEvidence,
    Selection,
    select_ranges,
    select_work,
)
from profkit.analysis.warnings import Warning, warn_of_placement, warn_of_selection, warn_of_sequence
from profkit.errors import TraceError, UsageError
from profkit.trace.columns import Bools, Copies, Ints, Measure, Trace, Work, distinct_values

if TYPE_CHECKING:
    import pandas as pd

Grouping = Literal["kernel", "category", "range"]

_OUTSIDE = "(outside every range)"


@dataclass(frozen=True)
class KernelRow:
    """One line of the share table; ``name`` is a kernel, a category or a range path, as grouped.

    ``share`` is of the kernel and graph time of the selection, 0–1. ``per_instance_count`` is ``count`` over the
    range's instances, null without a range. Times are in nanoseconds, ``mean_ns`` rounded.
    """

    name: str
    category: str
    count: int
    per_instance_count: float | None
    total_ns: int
    share: float
    mean_ns: int
    min_ns: int
    max_ns: int


@dataclass(frozen=True)
class InstanceRow:
    """One instance of the selected range: when it began, how long it was open, and the work launched under it."""

    instance: int
    start_ns: int
    wall_ns: int
    kernel_count: int
    kernel_time_ns: int
    busy_ns: int


@dataclass(frozen=True)
class CopyTotals:
    """Copies and sets of device memory launched under the selection."""

    memcpy_count: int
    memcpy_ns: int
    memset_count: int
    memset_ns: int


@dataclass(frozen=True)
class KernelFilter:
    """What to count: a range, less another, one instance, some processes (by pid) and devices; None is no limit."""

    range: str | None = None
    exclude: str | None = None
    instance: int | None = None
    process: int | None = None
    device: int | None = None


@dataclass(frozen=True)
class KernelsResult:
    """The share table with its books: plain data, the JSON of ``profkit kernels --format json`` field for field.

    ``filters`` is what was asked for: with one of them set, the table holds a part of the capture or range.
    ``first_ns`` is the start of the first thing recorded, from which instances are counted for people.
    """

    trace: str
    measure: Measure
    range: str | None
    instances: int | None
    kernel_count: int
    graph_count: int
    kernel_time_ns: int
    graph_time_ns: int
    busy_ns: int
    wall_ns: int
    copies: CopyTotals
    kernels: tuple[KernelRow, ...]
    range_evidence: RangeEvidence | None
    ledger: Ledger
    warnings: tuple[Warning, ...]
    by: Grouping = "kernel"
    per_instance: tuple[InstanceRow, ...] | None = None
    filters: KernelFilter = KernelFilter()
    first_ns: int = 0

    @property
    def total_ns(self) -> int:
        """Return kernel and graph time together: what shares are a fraction of."""
        return self.kernel_time_ns + self.graph_time_ns

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        data = asdict(self)
        if self.per_instance is None:
            del data["per_instance"]
        return data

    def to_pandas(self) -> pd.DataFrame:
        """Return the share table as a DataFrame, one row a kernel (or category, or range), sorted by total time."""
        import pandas as pd

        columns = list(KernelRow.__dataclass_fields__)
        return pd.DataFrame([asdict(row) for row in self.kernels], columns=columns)


def summarize_kernels(
    attribution: Attribution,
    wanted: KernelFilter | None = None,
    *,
    by: Grouping = "kernel",
    per_instance: bool = False,
) -> KernelsResult:
    """Return which kernels spent the time under a range, or in the whole capture.

    Raises:
        TraceError: the trace recorded no GPU work, or a range is asked of a trace without ranges.
        UsageError: an unknown range, process, device or instance, or options that exclude each other.
    """
    wanted = wanted or KernelFilter()
    trace = attribution.trace
    if not len(trace.work):
        raise TraceError(explain_no_work(trace))
    if per_instance and wanted.range is None:
        raise UsageError("--per-instance needs --range: an instance is one opening of a range")
    selection, rows, instance, evidence = _select(attribution, wanted)
    copies = _select_copies(attribution, wanted, selection)
    work = trace.work
    total_ns = int(work.duration_ns[rows].sum())
    first_ns, last_ns = _extent_ns(trace)
    graphs = rows & work.is_graph
    instances = None if selection is None else len(selection.members)
    evidence_ns = None if evidence is None else _sum_evidence(work.duration_ns, evidence, rows)
    return KernelsResult(
        trace=trace.path,
        measure=trace.measure,
        range=wanted.range,
        instances=instances,
        kernel_count=int((rows & ~work.is_graph).sum()),
        graph_count=int(graphs.sum()),
        kernel_time_ns=total_ns - int(work.duration_ns[graphs].sum()),
        graph_time_ns=int(work.duration_ns[graphs].sum()),
        busy_ns=busy_ns(work.device[rows], work.start_ns[rows], work.end_ns[rows]),
        wall_ns=last_ns - first_ns if selection is None else selection.wall_ns,
        copies=_total_copies(trace.copies, copies),
        kernels=_build_rows(attribution, rows, by, instances),
        range_evidence=evidence_ns,
        ledger=attribution.ledger,
        warnings=(
            *warn_of_selection(selection, wanted.exclude, int(rows.sum())),
            *warn_of_sequence(selection, evidence_ns),
            *warn_of_placement(attribution),
        ),
        by=by,
        per_instance=_instance_rows(attribution, selection, rows, instance) if per_instance and selection else None,
        filters=wanted,
        first_ns=first_ns,
    )


def explain_no_work(trace: Trace) -> str:
    """Return why there is nothing to share out, in one line."""
    if trace.source == "kineto":
        return f"{trace.path}: recorded neither GPU kernels nor CPU operators"
    if trace.has_kernel_table:
        return f"{trace.path}: recorded no GPU kernels"
    return (
        f"{trace.path}: recorded no GPU kernels (it has no kernel table): the program launched none, or nsys ran"
        " without --trace=cuda; `profkit ranges` still shows wall times"
    )


def _select(attribution: Attribution, wanted: KernelFilter) -> tuple[Selection | None, Bools, Ints | None, Ints | None]:
    """Return the selection, the rows of work it holds, and each row's instance and evidence."""
    rows = _limit(attribution.trace, attribution.trace.work, wanted)
    if wanted.instance is not None and wanted.range is None:
        raise UsageError("--instance needs --range")
    selection, instance, evidence = None, None, None
    if wanted.range is not None:
        selection = select_ranges(
            attribution, wanted.range, instance=wanted.instance, processes=_processes(attribution.trace, wanted)
        )
        selected = select_work(attribution, attribution.trace.work, attribution.work, selection)
        rows, instance, evidence = rows & selected.rows, selected.instance, selected.evidence
    if wanted.exclude is not None:
        without = select_ranges(attribution, wanted.exclude)
        rows &= ~select_work(attribution, attribution.trace.work, attribution.work, without).rows
        if selection is not None:
            selection = _drop_excluded(attribution, selection, without)
    return selection, rows, instance, evidence


def _drop_excluded(attribution: Attribution, selection: Selection, without: Selection) -> Selection:
    """Return the selection less the instances that lie wholly within an excluded range."""
    ranges = attribution.trace.ranges
    keep = []
    for index in selection.members.tolist():
        same = without.members[ranges.thread[without.members] == ranges.thread[index]]
        around = (ranges.start_ns[same] <= ranges.start_ns[index]) & (ranges.end_ns[same] >= ranges.end_ns[index])
        keep.append(not around.any())
    kept = selection.members[np.array(keep, dtype=np.bool_)]
    outermost = selection.outermost[np.isin(selection.outermost, kept)]
    wall = int((ranges.end_ns[outermost] - ranges.start_ns[outermost]).sum())
    return replace(selection, members=kept, outermost=outermost, wall_ns=wall)


def _select_copies(attribution: Attribution, wanted: KernelFilter, selection: Selection | None) -> Bools:
    copies = attribution.trace.copies
    rows = _limit(attribution.trace, copies, wanted)
    if selection is not None:
        rows &= select_work(attribution, copies, attribution.copies, selection).rows
    if wanted.exclude is not None:
        without = select_ranges(attribution, wanted.exclude)
        rows &= ~select_work(attribution, copies, attribution.copies, without).rows
    return rows


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


def _extent_ns(trace: Trace) -> tuple[int, int]:
    """Return when the first thing recorded began and the last one ended."""
    starts = [c for c in (trace.work.start_ns, trace.calls.start_ns, trace.ranges.start_ns) if len(c)]
    ends = [c for c in (trace.work.end_ns, trace.calls.end_ns, trace.ranges.end_ns) if len(c)]
    return min(int(c.min()) for c in starts), max(int(c.max()) for c in ends)


def _sum_evidence(duration_ns: Ints, evidence: Ints, rows: Bools) -> RangeEvidence:
    kinds = (DIRECT_EVIDENCE, INFERRED_EVIDENCE, SEQUENCE_EVIDENCE)
    return RangeEvidence(*(int(duration_ns[rows & (evidence == kind)].sum()) for kind in kinds))


def _total_copies(copies: Copies, rows: Bools) -> CopyTotals:
    duration = copies.end_ns - copies.start_ns
    sets, moves = rows & copies.is_memset, rows & ~copies.is_memset
    return CopyTotals(int(moves.sum()), int(duration[moves].sum()), int(sets.sum()), int(duration[sets].sum()))


def _build_rows(attribution: Attribution, rows: Bools, by: Grouping, instances: int | None) -> tuple[KernelRow, ...]:
    """Return the lines of the table, the largest total first, equal totals by name."""
    work = attribution.trace.work
    chosen = np.flatnonzero(rows)
    labels, key = _group_keys(attribution, chosen, by)
    if not len(chosen):
        return ()
    duration = work.duration_ns[chosen]
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    ordered = duration[order]
    totals = np.add.reduceat(ordered, first)
    lows, highs = np.minimum.reduceat(ordered, first), np.maximum.reduceat(ordered, first)
    counts = np.diff(np.append(first, len(ordered)))
    whole = int(duration.sum())
    table = [
        KernelRow(
            name=labels(key)[0],
            category=labels(key)[1],
            count=count,
            per_instance_count=count / instances if instances else None,
            total_ns=total,
            share=total / whole if whole else 0.0,
            mean_ns=round(total / count),
            min_ns=low,
            max_ns=high,
        )
        for key, count, total, low, high in zip(
            keys.tolist(), counts.tolist(), totals.tolist(), lows.tolist(), highs.tolist(), strict=True
        )
    ]
    return tuple(sorted(table, key=lambda row: (-row.total_ns, row.name)))


def _group_keys(attribution: Attribution, chosen: Ints, by: Grouping) -> tuple[Callable[[int], tuple[str, str]], Ints]:
    """Return each chosen row's group, and what gives a group its name and category."""
    trace = attribution.trace
    name = trace.work.name[chosen]
    if by == "range":
        placed = attribution.work
        innermost = np.where(placed.own[chosen] >= 0, placed.own[chosen], placed.host[chosen])
        ids, inverse = np.unique(np.maximum(innermost, -1), return_inverse=True)
        paths = [path_of(attribution, i, numbered=False) if i >= 0 else _OUTSIDE for i in ids.tolist()]
        distinct = sorted(set(paths))
        return lambda key: (distinct[key], ""), np.array([distinct.index(p) for p in paths], dtype=np.int64)[inverse]
    categories = {i: categorize(trace.names[i], trace.measure).name for i in distinct_values(name).tolist()}
    if by == "kernel":
        return lambda key: (trace.names[key], categories[key]), name
    distinct = sorted(set(categories.values()))
    position = {i: distinct.index(category) for i, category in categories.items()}
    ids, inverse = np.unique(name, return_inverse=True)
    index = np.array([position[i] for i in ids.tolist()], dtype=np.int64)
    return lambda key: (distinct[key], distinct[key]), index[inverse]


def _instance_rows(
    attribution: Attribution, selection: Selection, rows: Bools, instance: Ints | None
) -> tuple[InstanceRow, ...]:
    """Return one line per instance; nested instances of one name report under the one around them."""
    assert instance is not None
    trace, work = attribution.trace, attribution.trace.work
    chosen = np.flatnonzero(rows)
    position = instance[chosen]
    count = np.bincount(position, minlength=len(selection.members))
    devices, device = np.unique(work.device[chosen], return_inverse=True)
    group = position * max(len(devices), 1) + device
    groups, unions = union_ns(group, work.start_ns[chosen], work.end_ns[chosen])
    busy, total = (np.zeros(len(selection.members), dtype=np.int64) for _ in range(2))
    np.add.at(busy, groups // max(len(devices), 1), unions)
    np.add.at(total, position, work.duration_ns[chosen])
    ranges = trace.ranges
    return tuple(
        InstanceRow(
            instance=i,
            start_ns=int(ranges.start_ns[index]),
            wall_ns=int(ranges.end_ns[index] - ranges.start_ns[index]),
            kernel_count=int(count[i]),
            kernel_time_ns=int(total[i]),
            busy_ns=int(busy[i]),
        )
        for i, index in enumerate(selection.members.tolist())
    )
