"""The lines of the share table: work grouped by kernel, category, range or operator, and what each rank did of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from profkit.analysis.attribution import AMBIGUOUS_HOST, NO_LAUNCH_RECORD, OUTSIDE, Attribution
from profkit.analysis.categories import categorize
from profkit.analysis.range_paths import kind_paths
from profkit.analysis.ranks import Ranks
from profkit.errors import UsageError
from profkit.trace.columns import Bools, Ints, Trace, distinct_values

Grouping = Literal["kernel", "category", "range", "operator"]

_PLACELESS = {
    OUTSIDE: "(outside every range)",
    AMBIGUOUS_HOST: "(ambiguous: two or more ranges could claim it)",
    NO_LAUNCH_RECORD: "(no launch record)",
}


_NO_OPERATOR = "(in no operator)"


@dataclass(frozen=True)
class KernelRow:
    """One line of the share table; ``name`` is a kernel, a category, a range path or an operator, as grouped.

    ``share`` is of the kernel and graph time of the selection, 0–1. ``per_instance_count`` is ``count`` over the
    range's outermost instances, null without a range. Times are in nanoseconds, ``mean_ns`` rounded. ``per_rank_ns``
    is the part of ``total_ns`` that each rank ran, in the order of the result's ``ranks``.
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


def build_rows(
    attribution: Attribution, rows: Bools, by: Grouping, instances: int | None, ranks: Ranks
) -> tuple[KernelRow, ...]:
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
    each = _per_rank(ranks, work.process[chosen][order], ordered, first)
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
        )
        for key, count, total, low, high, of_ranks in zip(
            *(column.tolist() for column in (keys, counts, totals, lows, highs, each)), strict=True
        )
    ]
    return tuple(sorted(table, key=lambda row: (-row.total_ns, row.name)))


def _per_rank(ranks: Ranks, process: Ints, duration_ns: Ints, first: Ints) -> Ints:
    """Return the time of each group of rows (groups, ranks); ``first`` are the groups' first rows."""
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(process))))
    index = ranks.index_of(process)
    each = np.zeros((len(first), len(ranks.members)), dtype=np.int64)
    np.add.at(each, (group[index >= 0], index[index >= 0]), duration_ns[index >= 0])
    return each


def _group_keys(attribution: Attribution, chosen: Ints, by: Grouping) -> tuple[Callable[[int], tuple[str, str]], Ints]:
    """Return each chosen row's group, and what gives a group its name and category."""
    trace = attribution.trace
    name = trace.work.name[chosen]
    if by == "range":
        placed = attribution.work
        innermost = placed.innermost[chosen]
        # Below the ranges' own numbers, one for each reason why work has none.
        place = np.where(innermost >= 0, innermost, -1 - placed.verdict[chosen])
        ids, inverse = np.unique(place, return_inverse=True)
        kinds = kind_paths(attribution)
        paths = [kinds[i] if i >= 0 else _PLACELESS[-1 - i] for i in ids.tolist()]
        distinct = sorted(set(paths))
        return lambda key: (distinct[key], ""), np.array([distinct.index(p) for p in paths], dtype=np.int64)[inverse]
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


def _launching_operator(trace: Trace) -> Ints:
    """Return the name of the innermost operator that launched each row of work, -1 for none; an operator is its own."""
    if trace.measure == "cpu-operator":
        return trace.work.name
    if trace.work.operator is None:
        raise UsageError(
            f"{trace.path}: does not say which operators launched its kernels; record with torch.profiler, or group"
            " by kernel, category or range"
        )
    return trace.work.operator
