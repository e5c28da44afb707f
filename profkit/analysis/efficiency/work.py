"""How much arithmetic each range of a trace did, and how well its steps used the GPU for it (MFU).

A run's ``work.json`` names a range by its path below the step, so ``warmup``, steps and everything around them are left
off a range's path before the two are compared. Without ``work.json``, a range's payload counts as its FLOPs if it is a
whole number in NVTX's default domain: that is how `profkit.annotate` stores them.

Model FLOPs utilization is defined by Chowdhery et al. 2022 (PaLM), appendix B: the FLOPs of forward and backward as the
model asks for them, however much is recomputed, over the time of the whole step, optimizer and data included. Here the
time is unprofiled and the peak is the datasheet's, of all GPUs on which the process ran its steps. Hardware FLOPs
utilization (HFU) is the same of all matrix products that the step does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from profkit.analysis.efficiency.facts import RunFacts
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account.account import TimeAccount
from profkit.analysis.time_account.steps import context_of, is_step, is_warmup
from profkit.analysis.tree.range_tree import RangeNodes
from profkit.names import BACKWARD, FORWARD
from profkit.run.work import RangeWork
from profkit.trace.columns import Ints, Trace, distinct_values, rows_by_value

_UNKNOWN_DTYPE = "unknown"


@dataclass(frozen=True)
class Amount:
    """The work of some ranges together; None if it is unknown for any of them. ``flops_by_dtype`` sums to ``flops``."""

    flops: int | None = None
    other_flops: int | None = None
    needed_flops: int | None = None
    least_bytes: int | None = None
    recomputed_flops: int | None = None
    flops_by_dtype: dict[str, int] = field(default_factory=dict)
    sources: frozenset[str] = frozenset()


class RangeWorks:
    """Knows how much work the ranges of a trace did."""

    def __init__(self, trace: Trace, nodes: RangeNodes, facts: RunFacts) -> None:
        """Look up the path of every node; ``nodes`` must be numbered: ``layer 0`` and ``layer 1`` may differ."""
        self._dtype = facts.dtype or _UNKNOWN_DTYPE
        self._node = nodes.of_range
        self._known = _by_node(nodes, facts)
        self._source = facts.work.source if facts.work is not None else ""
        self._payload = np.full(len(trace.ranges), -1, dtype=np.int64)
        for index, value in trace.ranges.payload.items():
            if isinstance(value, int) and value >= 0 and trace.names[int(trace.ranges.domain[index])] == "":
                self._payload[index] = value

    def source(self, members: Ints) -> str | None:
        """Return where the figures for these ranges come from; None if none is known."""
        if any(self._known[node] is not None for node in distinct_values(self._node[members]).tolist()):
            return self._source
        return "payload" if (self._payload[members] >= 0).any() else None

    def total(self, members: Ints) -> Amount:
        """Return the work of the ranges ``members`` together."""
        if not len(members):
            return Amount()
        # Asked of single ranges, a hundred thousand times: no array function is as quick.
        counts = Counter(self._node[members].tolist())
        known = [(self._known[node], counts[node]) for node in sorted(counts)]
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
        for dtype, flops in work.flops_of(count).items():
            by_dtype[dtype] = by_dtype.get(dtype, 0) + flops
    return Amount(
        flops=sum(by_dtype.values()),
        other_flops=sum(work.other_flops * count for work, count in whole),
        needed_flops=sum(work.needed_flops * count for work, count in whole),
        least_bytes=sum(work.least_bytes * count for work, count in whole),
        recomputed_flops=sum(work.recomputed_flops * count for work, count in whole),
        flops_by_dtype=by_dtype,
        sources=frozenset({source}),
    )


def _by_node(nodes: RangeNodes, facts: RunFacts) -> list[RangeWork | None]:
    if facts.work is None:
        return [None] * len(nodes)
    by_path = {work.path: work for work in facts.work.ranges}
    return [_look_up(by_path, names) for names in nodes.names_above()]


def _look_up(by_path: dict[tuple[str, ...], RangeWork], names: tuple[str, ...]) -> RangeWork | None:
    if is_warmup(names[-1]) or context_of(names[-1:]) is not None:
        return None  # these lie around any number of steps
    kept = tuple(name for name in names if not is_step(name) and not is_warmup(name))
    # Ranges that a script opens around its steps are not part of the paths in work.json.
    below = names[max((at + 1 for at, name in enumerate(names) if is_step(name)), default=0) :]
    return by_path.get(kept) or by_path.get(below)


@dataclass(frozen=True)
class Utilization:
    """FLOPs of each of some steps, and the share of what their GPUs could do; None if unknown, or if steps differ."""

    flops: int | None = None
    share: float | None = None


class StepFlops:
    """Knows how many FLOPs the model of a trace asks for in a step (MFU), and how many the hardware did (HFU)."""

    def __init__(self, account: TimeAccount, nodes: RangeNodes, works: RangeWorks, facts: RunFacts) -> None:
        """Find the measured steps; ``nodes`` must be numbered."""
        self._account = account
        self._attribution = account.attribution
        self._nodes = nodes
        self._names = nodes.names_above()
        self._works = works
        self._facts = facts
        self._steps = account.steps
        self._gpu_counts = _count_gpus(account.attribution, self._steps)

    def model(self, members: Ints | None = None) -> Utilization:
        """Return what these steps ask for, forward and backward, whatever is computed again; by default all steps."""
        return self._utilization(self._steps if members is None else members, self._asked_of)

    def hardware(self, members: Ints | None = None) -> Utilization:
        """Return what was computed in these steps, optimizer included; by default in all of them."""
        return self._utilization(self._steps if members is None else members, self._done_in)

    def _utilization(self, steps: Ints, flops_of: Callable[[int], int | None]) -> Utilization:
        contexts = {self._context(step) for step in steps.tolist()}
        amounts = {flops_of(step) for step in steps.tolist()}
        flops = amounts.pop() if len(amounts) == 1 else None
        return Utilization(flops, self._share(flops, contexts.pop(), steps) if len(contexts) == 1 else None)

    def _done_in(self, step: int) -> int | None:
        return self._works.total(np.array([step], dtype=np.int64)).flops

    def _asked_of(self, step: int) -> int | None:
        """Return a step's FLOPs: the run's figure, else the sum of its forward and backward ranges without what is
        computed again.

        A step that only runs forward has no backward range; then forward alone is the sum.
        """
        if self._facts.work is not None and self._context(step) is None:
            return self._facts.work.model_flops
        below = self._children(step)
        below += [inner for child in below if is_step(self._name(child)) for inner in self._children(child)]
        passes = [child for child in below if self._name(child) in (FORWARD, BACKWARD)]
        work = self._works.total(np.array(passes, dtype=np.int64))
        return None if work.flops is None else work.flops - (work.recomputed_flops or 0)

    def _share(self, flops: int | None, context: int | None, steps: Ints) -> float | None:
        """Return the share of what all GPUs of a process could do; its steps count the work of all of them."""
        processes = distinct_values(self._attribution.trace.ranges.process[steps]).tolist()
        gpu_counts = {self._gpu_counts.get(process, 1) for process in processes}
        step_ns, sheet = self._account.step_ns(context), self._facts.datasheet
        peak = sheet.flops_per_s.get(self._facts.dtype or "") if sheet is not None else None
        if flops is None or not step_ns or peak is None or len(gpu_counts) != 1:
            return None
        return flops / (step_ns / 1e9 * peak * gpu_counts.pop())

    def _children(self, index: int) -> list[int]:
        order, parent = self._by_parent
        low, high = np.searchsorted(parent, [index, index + 1]).tolist()
        children: list[int] = order[low:high].tolist()
        return children

    @cached_property
    def _by_parent(self) -> tuple[Ints, Ints]:
        order = np.argsort(self._attribution.parent, kind="stable")
        return order, self._attribution.parent[order]

    def _name(self, index: int) -> str:
        trace = self._attribution.trace
        return trace.names[int(trace.ranges.name[index])]

    def _context(self, step: int) -> int | None:
        return context_of(self._names[self._nodes.of_range[step]])


def _count_gpus(attribution: Attribution, steps: Ints) -> dict[int, int]:
    work = attribution.trace.work
    rows = attribution.work.under(steps).rows
    return {
        process: len(distinct_values(work.device[rows[mine]]))
        for process, mine in rows_by_value(work.process[rows]).items()
    }
