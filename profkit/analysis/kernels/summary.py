"""Which kernels spent the time, in the whole capture or under a range: the result behind ``profkit kernels``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from profkit.analysis import NotebookResult
from profkit.analysis.intervals import BusyTime
from profkit.analysis.kernels import categorize
from profkit.analysis.placing.attribution import (
    AMBIGUOUS_HOST,
    NO_LAUNCH_RECORD,
    OUTSIDE,
    Attribution,
    Ledger,
    warn_of_placement,
)
from profkit.analysis.ranks import RankRow, Ranks, compare_ranks
from profkit.analysis.time_account import count_in_warmup, count_steps
from profkit.analysis.tree import Chosen, Instances, KernelFilter, RangeEvidence, choose_work
from profkit.errors import Finding, TraceError, UsageError
from profkit.trace.columns import Bools, Copies, Ints, Measure, Trace, distinct_values

if TYPE_CHECKING:
    from profkit.analysis.kernels.compiled_code import KernelSource, SharedKernels
    from profkit.run.compiled_code import CompiledGraph


Grouping = Literal["kernel", "category", "module", "range", "operator"]

_PLACELESS = {
    OUTSIDE: "(in no range)",
    AMBIGUOUS_HOST: "(ambiguous: two or more ranges could claim it)",
    NO_LAUNCH_RECORD: "(no launch record)",
}
_NO_OPERATOR = "(in no operator)"


@dataclass(frozen=True)
class KernelRow:
    """One line of the share table; ``name`` is a kernel, a category, a range path or an operator, as grouped.

    ``share`` is of the kernel and graph time of the selection, 0–1. ``per_instance_count`` is ``count`` over the
    range's outermost instances, null without a range. Times are in nanoseconds, ``mean_ns`` rounded. ``per_rank_ns``
    is the part of ``total_ns`` that each rank ran, in the order of the result's ``ranks``. ``waiting_ns`` is the part
    in which collectives waited for another rank, null where that is unknown or nothing communicates.
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
    per_rank_ns: tuple[int, ...] = ()
    waiting_ns: int | None = None


@dataclass(frozen=True)
class InstanceRow:
    """One instance of the selected range: when it began, how long it was open, and the work launched under it."""

    instance: int
    start_ns: int
    wall_ns: int | None
    kernel_count: int
    kernel_time_ns: int
    busy_ns: int
    rank: int | None = None


@dataclass(frozen=True)
class CopyTotals:
    """Memory copies and fills launched under the selection."""

    memcpy_count: int
    memcpy_ns: int
    memset_count: int
    memset_ns: int


@dataclass(frozen=True, repr=False)
class KernelsResult(NotebookResult, rows="kernels", row_type=KernelRow):
    """The share table with its books: plain data, the JSON of ``profkit kernels --format json`` field for field.

    ``filters`` is what was asked for: with one of them set, the table holds a part of the capture or range.
    ``first_ns`` is the start of the first thing recorded, from which instances are counted for people. ``instances``
    are those left by the filters, with a device those that have work on it; ``outermost_instances`` of them lie in no
    other: a time or count per instance is over these. ``ranks`` has a row for each rank of a distributed run, known by
    ``rank_evidence``; the slowest is the one with the most kernel time outside communication. ``steps`` is in how many
    measured steps all of this work ran, None where some of it ran in none. ``shared`` is what compiled code computes
    for the range's modules and others together, which is not under the range. ``sources`` are where the kernels of
    compiled code come from, None if that was not asked for.
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
    wall_ns: int | None
    copies: CopyTotals
    kernels: tuple[KernelRow, ...]
    range_evidence: RangeEvidence | None
    ledger: Ledger
    warnings: tuple[Finding, ...]
    by: Grouping = "kernel"
    per_instance: tuple[InstanceRow, ...] | None = None
    filters: KernelFilter = field(default_factory=KernelFilter)
    first_ns: int = 0
    outermost_instances: int | None = None
    ranks: tuple[RankRow, ...] = ()
    rank_evidence: str | None = None
    steps: int | None = None
    shared: SharedKernels | None = None
    sources: tuple[KernelSource, ...] | None = None

    @property
    def total_ns(self) -> int:
        """Return kernel and graph time together: what shares are a fraction of."""
        return self.kernel_time_ns + self.graph_time_ns

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for name in ("per_instance", "shared", "sources"):
            if data[name] is None:
                del data[name]
        return data


def summarize_kernels(
    attribution: Attribution,
    wanted: KernelFilter,
    ranks: Ranks,
    *,
    by: Grouping = "kernel",
    per_instance: bool = False,
    compiled_code: Mapping[str, CompiledGraph] | None = None,
) -> KernelsResult:
    """Return which kernels spent the time under a range, or in the whole capture.

    With ``compiled_code``, what the run knows of it by the graphs' ids, it also says where its kernels come from.
    """
    trace = attribution.trace
    if not len(trace.work):
        raise TraceError(explain_no_work(trace))
    if per_instance and wanted.range is None:
        raise UsageError("one line per instance needs a range: an instance is one opening of a range")
    first_ns, last_ns = extent_ns(trace)
    chosen = choose_work(attribution, wanted)
    rows, instances = chosen.rows, chosen.instances
    work = trace.work
    total_ns = int(work.duration_ns[rows].sum())
    graphs = rows & work.is_graph
    outermost_count = None if instances is None else len(instances.outermost)
    sources = None
    if compiled_code is not None:
        from profkit.analysis.kernels.compiled_code import find_kernel_sources  # few captures have such code

        sources = find_kernel_sources(attribution, rows, compiled_code)
    return KernelsResult(
        trace=trace.path,
        measure=trace.measure,
        range=wanted.range,
        instances=None if instances is None else int(instances.present.sum()),
        kernel_count=int((rows & ~work.is_graph).sum()),
        graph_count=int(graphs.sum()),
        kernel_time_ns=total_ns - int(work.duration_ns[graphs].sum()),
        graph_time_ns=int(work.duration_ns[graphs].sum()),
        busy_ns=BusyTime(work).total_ns(rows),
        wall_ns=last_ns - first_ns if instances is None else instances.wall_ns,
        copies=_total_copies(trace.copies, chosen.copies),
        kernels=_build_rows(attribution, rows, by, outermost_count, ranks),
        range_evidence=chosen.sum_evidence(work.duration_ns),
        ledger=attribution.ledger,
        warnings=(
            *_warn_of_instances(attribution, instances, int(rows.sum())),
            *warn_of_placement(attribution),
        ),
        by=by,
        per_instance=_instance_rows(attribution, rows, instances, ranks) if per_instance and instances else None,
        filters=wanted,
        first_ns=first_ns,
        outermost_instances=outermost_count,
        ranks=compare_ranks(trace, ranks, chosen),
        rank_evidence=ranks.evidence,
        steps=count_steps(attribution, rows),
        shared=_find_shared(attribution, wanted, chosen),
        sources=sources,
    )


def _find_shared(attribution: Attribution, wanted: KernelFilter, chosen: Chosen) -> SharedKernels | None:
    if wanted.range is None or chosen.instances is None or wanted.instance is not None:
        return None
    if attribution.trace.work.compiled_launch is None:
        return None
    from profkit.analysis.kernels.compiled_code import find_shared

    others = choose_work(attribution, replace(wanted, range=None)).rows & ~chosen.rows
    return find_shared(attribution, wanted.range, chosen.instances.members, others)


def explain_no_work(trace: Trace) -> str:
    if len(trace.copies):
        missing = "neither a GPU kernel nor a CPU operator" if trace.source == "kineto" else "no GPU kernel"
        return f"{trace.path}: recorded {len(trace.copies):,} copies and fills of GPU memory, but {missing}"
    if trace.source == "kineto":
        return f"{trace.path}: recorded neither GPU kernels nor CPU operators"
    if trace.has_kernel_table:
        return f"{trace.path}: recorded no GPU kernels"
    return (
        f"{trace.path}: recorded no GPU kernels (it has no kernel table): the program launched none, or nsys ran"
        " without --trace=cuda; `profkit ranges` still shows Python times"
    )


def extent_ns(trace: Trace) -> tuple[int, int]:
    starts = [c for c in (trace.work.start_ns, trace.calls.start_ns, trace.ranges.start_ns) if len(c)]
    ends = [c for c in (trace.work.end_ns, trace.calls.end_ns, trace.ranges.end_ns) if len(c)]
    return min(int(c.min()) for c in starts), max(int(c.max()) for c in ends)


def _warn_of_instances(attribution: Attribution, instances: Instances | None, row_count: int) -> list[Finding]:
    if instances is None:
        return []
    request, findings = instances.request, []
    members = instances.members[instances.present]
    warm, name = count_in_warmup(attribution, members)
    if warm:
        findings.append(
            Finding(
                "warmup",
                f"{warm} of {len(members)} instances of {request!r} lie inside `{name}`;"
                f" exclude {name!r} to leave them out",
            )
        )
    if not row_count:
        findings.append(Finding("empty-range", f"no kernel was launched under {request!r}"))
    return findings


def _total_copies(copies: Copies, rows: Bools) -> CopyTotals:
    duration = copies.end_ns - copies.start_ns
    sets, moves = rows & copies.is_memset, rows & ~copies.is_memset
    return CopyTotals(int(moves.sum()), int(duration[moves].sum()), int(sets.sum()), int(duration[sets].sum()))


def _instance_rows(
    attribution: Attribution, rows: Bools, instances: Instances, ranks: Ranks
) -> tuple[InstanceRow, ...]:
    trace, work = attribution.trace, attribution.trace.work
    chosen = np.flatnonzero(rows)
    position = instances.of_row[chosen]
    count = np.bincount(position, minlength=len(instances.members))
    busy = BusyTime(work).sum_by(position, chosen, len(instances.members))
    total = np.zeros(len(instances.members), dtype=np.int64)
    np.add.at(total, position, work.duration_ns[chosen])
    ranges = trace.ranges
    rank_of = {process: rank for rank, process in ranks.members}
    return tuple(
        InstanceRow(
            instance=instances.first_number + i,
            start_ns=int(ranges.start_ns[index]),
            wall_ns=ranges.sum_open(np.array([index])),
            kernel_count=int(count[i]),
            kernel_time_ns=int(total[i]),
            busy_ns=int(busy[i]),
            rank=rank_of.get(int(ranges.process[index])),
        )
        for i, index in enumerate(instances.members.tolist())
        if instances.present[i]
    )


def _build_rows(
    attribution: Attribution, rows: Bools, by: Grouping, instances: int | None, ranks: Ranks
) -> tuple[KernelRow, ...]:
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
    each = _per_rank(ranks, work.process[chosen][order], ordered, first)
    waits = _waiting(attribution.trace, ranks, chosen[order], first)
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
            per_rank_ns=tuple(of_ranks),
            waiting_ns=waiting,
        )
        for key, count, total, low, high, of_ranks, waiting in zip(
            *(column.tolist() for column in (keys, counts, totals, lows, highs, each)), waits, strict=True
        )
    ]
    return tuple(sorted(table, key=lambda row: (-row.total_ns, row.name)))


def _waiting(trace: Trace, ranks: Ranks, rows: Ints, first: Ints) -> list[int | None]:
    """Return how long the collectives of each group of rows waited; None of a group in which that is unknown."""
    if len(ranks.members) < 2 or trace.measure != "gpu-kernel":
        return [None] * len(first)
    from profkit.analysis.ranks.matching import find_waiting  # few captures are of several ranks

    waiting, work = find_waiting(trace, ranks), trace.work
    waited = np.zeros(len(rows), dtype=np.int64)
    for device in distinct_values(waiting.device).tolist():
        mine = np.flatnonzero((work.device[rows] == device) & waiting.is_known[rows])
        waited[mine] = waiting.waits_of(device).within(work.start_ns[rows[mine]], work.end_ns[rows[mine]])
    sums, known = np.add.reduceat(waited, first), np.logical_or.reduceat(waiting.is_known[rows], first)
    return [waited_ns if is_known else None for waited_ns, is_known in zip(sums.tolist(), known.tolist(), strict=True)]


def _per_rank(ranks: Ranks, process: Ints, duration_ns: Ints, first: Ints) -> Ints:
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(process))))
    index = ranks.index_of(process)
    each = np.zeros((len(first), len(ranks.members)), dtype=np.int64)
    np.add.at(each, (group[index >= 0], index[index >= 0]), duration_ns[index >= 0])
    return each


def _group_keys(attribution: Attribution, chosen: Ints, by: Grouping) -> tuple[Callable[[int], tuple[str, str]], Ints]:
    trace = attribution.trace
    name = trace.work.name[chosen]
    if by in ("range", "module"):
        placed = attribution.work
        innermost = placed.innermost[chosen]
        # Below the ranges' own numbers, one for each reason why work has none.
        place = np.where(innermost >= 0, innermost, -1 - placed.verdict[chosen])
        ids, inverse = np.unique(place, return_inverse=True)
        kinds = _kinds_of_ranges(attribution, by)
        paths = [kinds[i] if i >= 0 else _PLACELESS[-1 - i] for i in ids.tolist()]
        distinct = sorted(set(paths))
        number = {path: at for at, path in enumerate(distinct)}
        return lambda key: (distinct[key], ""), np.array([number[path] for path in paths], dtype=np.int64)[inverse]
    if by == "operator":
        return lambda key: (_NO_OPERATOR if key < 0 else trace.names[key], ""), _launching_operator(trace)[chosen]
    categories = {i: categorize(trace.names[i], trace.measure).name for i in distinct_values(name).tolist()}
    if by == "kernel":
        return lambda key: (trace.names[key], categories[key]), name
    distinct = sorted(set(categories.values()))
    position = {i: distinct.index(category) for i, category in categories.items()}
    ids, inverse = np.unique(name, return_inverse=True)
    index = np.array([position[i] for i in ids.tolist()], dtype=np.int64)
    return lambda key: (distinct[key], distinct[key]), index[inverse]


def _kinds_of_ranges(attribution: Attribution, by: Grouping) -> Sequence[str]:
    if by == "range":
        from profkit.analysis.tree.range_tree import kind_paths

        return kind_paths(attribution)
    from profkit.analysis.tree.modules import modules_of_ranges

    return modules_of_ranges(attribution)


def _launching_operator(trace: Trace) -> Ints:
    """Return the name of the innermost operator that launched each row of work, -1 for none; an operator is its own."""
    if trace.measure == "cpu-operator":
        return trace.work.name
    if trace.work.operator is None:
        raise UsageError(
            f"{trace.path}: does not say which operators launched its kernels; record CPU operators too, "
            "or group by kernel, category or range"
        )
    return trace.work.operator
