"""How much work each range of a trace did: what the run's ``work.json`` says of its path, else the range's own payload.

``work.json`` names a range by the path of profkit's ranges below the step, so steps, ``warmup`` and what lies around
them are left off a range's path before the two are compared. A payload counts where it is a whole number in NVTX's
default domain, which is how `profkit.annotate` gives a range its FLOPs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from profkit.analysis.efficiency.run_facts import RunFacts
from profkit.analysis.range_paths import RangeNodes
from profkit.analysis.selection import is_warmup
from profkit.names import STEP
from profkit.run.work import RangeWork
from profkit.trace.columns import Ints, Trace, distinct_values

_STEP = re.compile(rf"{STEP}( (\d+|\*))?", re.IGNORECASE)
_CONTEXT = re.compile(r"context (\d+)")
_UNKNOWN_DTYPE = "unknown"


@dataclass(frozen=True)
class Amount:
    """Work of some ranges together; None is unknown, of one of them at least. ``flops_by_dtype`` sums to ``flops``."""

    flops: int | None = None
    other_flops: int | None = None
    needed_flops: int | None = None
    least_bytes: int | None = None
    flops_by_dtype: dict[str, int] = field(default_factory=dict)
    sources: frozenset[str] = frozenset()


def is_step(name: str) -> bool:
    """Return whether a range (or a kind of them, ``step *``) of this name is a step, as profkit names them."""
    return _STEP.fullmatch(name) is not None


class RangeWorks:
    """Answers how much work some ranges of a trace did together."""

    def __init__(self, trace: Trace, nodes: RangeNodes, facts: RunFacts) -> None:
        """Look every node's path up; ``nodes`` must be numbered: ``layer 0`` and ``layer 1`` differ in work."""
        self._dtype = facts.dtype or _UNKNOWN_DTYPE
        self._node = nodes.of_range
        self._known = _by_node(nodes, facts)
        self._source = facts.work.source if facts.work is not None else ""
        self._payload = np.full(len(trace.ranges), -1, dtype=np.int64)
        for index, value in trace.ranges.payload.items():
            if isinstance(value, int) and value >= 0 and trace.names[int(trace.ranges.domain[index])] == "":
                self._payload[index] = value

    def source(self, members: Ints) -> str | None:
        """Return where what is known of these ranges' work comes from; None where nothing is known."""
        if any(self._known[node] is not None for node in distinct_values(self._node[members]).tolist()):
            return self._source
        return "payload" if (self._payload[members] >= 0).any() else None

    def total(self, members: Ints) -> Amount:
        """Return the work of the ranges ``members`` together."""
        if not len(members):
            return Amount()
        nodes, counts = np.unique(self._node[members], return_counts=True)
        known = [(self._known[node], count) for node, count in zip(nodes.tolist(), counts.tolist(), strict=True)]
        whole = [(work, count) for work, count in known if work is not None]
        if len(whole) == len(known):
            return _sum(whole, self._source)
        payload = self._payload[members]
        if (payload < 0).any():
            return Amount()
        flops = int(payload.sum())
        return Amount(flops=flops, flops_by_dtype={self._dtype: flops}, sources=frozenset({"payload"}))


def _sum(whole: list[tuple[RangeWork, int]], source: str) -> Amount:
    by_dtype: dict[str, int] = {}
    for work, count in whole:
        for dtype, flops in work.flops_by_dtype.items():
            by_dtype[dtype] = by_dtype.get(dtype, 0) + flops * count
    return Amount(
        flops=sum(work.flops * count for work, count in whole),
        other_flops=sum(work.other_flops * count for work, count in whole),
        needed_flops=sum(work.needed_flops * count for work, count in whole),
        least_bytes=sum(work.least_bytes * count for work, count in whole),
        flops_by_dtype=by_dtype,
        sources=frozenset({source}),
    )


def _by_node(nodes: RangeNodes, facts: RunFacts) -> list[RangeWork | None]:
    """Return what the run says of each node's path."""
    if facts.work is None:
        return [None] * len(nodes)
    by_path = {work.path: work for work in facts.work.ranges}
    return [_look_up(by_path, names) for names in nodes.names_above()]


def _look_up(by_path: dict[tuple[str, ...], RangeWork], names: tuple[str, ...]) -> RangeWork | None:
    if is_warmup(names[-1]) or context_of(names[-1:]) is not None:
        return None  # around steps, and of as many steps as there are
    kept = tuple(name for name in names if not is_step(name) and not is_warmup(name))
    # A script's own ranges around its steps are no part of its steps' paths.
    below = names[max((at + 1 for at, name in enumerate(names) if is_step(name)), default=0) :]
    return by_path.get(kept) or by_path.get(below)


def context_of(names: Iterable[str]) -> int | None:
    """Return which context the ranges of these names lie in, of a run over several."""
    found = (_CONTEXT.fullmatch(name) for name in names)
    return next((int(match[1]) for match in found if match), None)
