"""Attention in parts: the time and the operations of its two matrix products and its softmax in the forward pass.

The parts are the ranges that profkit's built-in models open (`profkit.names`). A softmax does a few operations per
score; a product does two per score and head dimension. The table shows that the softmax's time is not smaller by the
same ratio.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from profkit.analysis.efficiency.facts import RunFacts
from profkit.analysis.efficiency.work import RangeWorks
from profkit.analysis.notebook import NotebookResult, table_of
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.placing.nesting import mark_nested
from profkit.analysis.time_account.steps import find_warmup
from profkit.analysis.tree.range_tree import build_nodes
from profkit.analysis.tree.selection import lies_within, select_ranges
from profkit.errors import TraceError
from profkit.names import BACKWARD, SCORES, SOFTMAX, VALUE_PRODUCT
from profkit.trace.columns import Bools, Ints, Trace

if TYPE_CHECKING:
    import pandas as pd

PARTS = (SCORES, SOFTMAX, VALUE_PRODUCT)

_LAYER = re.compile(r"layer (\d+)")


@dataclass(frozen=True)
class AttentionPart:
    """One part in one layer, or in all layers (``layer`` None): its kernel time in ns and its operations.

    ``operations`` are matrix products and all others together; of a trace without a run directory, the products that
    its ranges carry; None if unknown. The ratios are to the scores of the same layers.
    """

    layer: int | None
    part: str
    instances: int
    kernel_time_ns: int
    operations: int | None
    time_ratio: float | None
    operations_ratio: float | None


@dataclass(frozen=True, repr=False)
class AttentionResult(NotebookResult):
    """The parts over all layers, then layer by layer, without ``warmup``; with a ``range``, only those within it."""

    trace: str
    range: str | None
    work_source: str | None
    parts: tuple[AttentionPart, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        return asdict(self)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per part and layer."""
        return table_of(self.parts, AttentionPart)


def measure_attention(attribution: Attribution, facts: RunFacts, range: str | None = None) -> AttentionResult:
    """Return what the parts of attention took, everywhere or within ``range``.

    Raises:
        TraceError: there are no ranges of the three parts, or the trace has impossible times.
        UsageError: an unknown range.
    """
    trace = attribution.trace
    part_of = _parts(trace)
    forward = ~_lies_in(attribution, BACKWARD) & ~_lies_in(attribution, find_warmup(trace))
    if range is not None:
        forward &= lies_within(attribution, select_ranges(attribution, range))
    members = np.flatnonzero((part_of >= 0) & forward)
    if not len(members):
        where = "" if range is None else f" of the forward pass within {range!r}"
        raise TraceError(
            f"{trace.path}: no ranges {', '.join(map(repr, PARTS))}{where}; profkit's built-in models open them"
            " if they are not compiled"
        )
    works = RangeWorks(trace, build_nodes(attribution, numbered=True), facts)
    layer_of = _layers(attribution, members)
    under = attribution.work.under(members, np.arange(len(members)))
    time_ns = np.zeros(len(members), dtype=np.int64)
    np.add.at(time_ns, under.member, trace.work.duration_ns[under.rows])
    found: list[AttentionPart] = []
    for layer in (None, *sorted(set(layer_of.tolist()) - {-1})):
        inside = np.ones(len(members), dtype=np.bool_) if layer is None else layer_of == layer
        found += _compare(layer, members[inside], part_of[members[inside]], time_ns[inside], works)
    return AttentionResult(trace.path, range, works.source(members), tuple(found))


def _compare(layer: int | None, members: Ints, part_of: Ints, time_ns: Ints, works: RangeWorks) -> list[AttentionPart]:
    """Return the three parts of one layer, or of all, with their ratios to the scores."""
    amounts = [works.total(members[part_of == part]) for part in range(len(PARTS))]
    times = [int(time_ns[part_of == part].sum()) for part in range(len(PARTS))]
    counts = [None if one.flops is None else one.flops + (one.other_flops or 0) for one in amounts]
    return [
        AttentionPart(
            layer=layer,
            part=name,
            instances=int((part_of == part).sum()),
            kernel_time_ns=times[part],
            operations=counts[part],
            time_ratio=_ratio(times[part], times[0]),
            operations_ratio=_ratio(counts[part], counts[0]),
        )
        for part, name in enumerate(PARTS)
    ]


def _ratio(one: int | None, other: int | None) -> float | None:
    return one / other if one is not None and other else None


def _parts(trace: Trace) -> Ints:
    """Return the index in `PARTS` of each range, or -1."""
    table = np.full(len(trace.names), -1, dtype=np.int64)
    for index, name in enumerate(trace.names):
        if name in PARTS:
            table[index] = PARTS.index(name)
    return table[trace.ranges.name]


def _lies_in(attribution: Attribution, name: str | None) -> Bools:
    """Return which ranges have this name or lie within one that has it."""
    trace = attribution.trace
    named = np.array([one == name for one in trace.names], dtype=np.bool_)
    return mark_nested(attribution.parent, named[trace.ranges.name])


def _layers(attribution: Attribution, members: Ints) -> Ints:
    """Return the number of the nearest layer around each range, or -1."""
    trace = attribution.trace
    numbers = [int(match[1]) if (match := _LAYER.fullmatch(name)) else -1 for name in trace.names]
    own = np.append(np.array(numbers, dtype=np.int64)[trace.ranges.name], -1)
    parent = np.append(attribution.parent, -1)
    at, found = members.copy(), np.full(len(members), -1, dtype=np.int64)
    while ((found < 0) & (at >= 0)).any():
        found = np.where(found < 0, own[at], found)
        at = parent[at]
    return found
