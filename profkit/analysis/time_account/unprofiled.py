"""What profiling cost the steps, and how much of a range's idle time would be left without a profiler.

Profiling slows the host and hardly the GPU. If it is known how long a phase takes without a profiler, its busy time is
kept and its idle time is scaled so that the two sum to the unprofiled time. Ranges within the phase are scaled alike.
The step is timed too; what it keeps is divided among its phases and the rest of it, so that the parts sum to the whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profkit.analysis.efficiency.facts import RunFacts
from profkit.analysis.placing.attribution import Attribution, mark_members
from profkit.analysis.placing.nesting import NO_RANGE, mark_nested
from profkit.analysis.time_account.gpu_steps import GpuStep
from profkit.analysis.time_account.gpu_time import GpuParts, GpuTime, find_windows, sum_parts
from profkit.analysis.time_account.step_times import PhaseTimes
from profkit.analysis.time_account.steps import context_of, find_steps, is_step, measured_ranges
from profkit.analysis.tree.range_tree import RangeNodes
from profkit.findings import Finding
from profkit.names import DATA, PHASES, STEP
from profkit.trace.columns import Ints, empty_ints

_WIDE = 0.3
"""Steps vary widely if their standard deviation is more than this share of their mean; `profkit run` agrees."""
_APART = 1.4
"""A phase is uneven if its 90th percentile is more than this many times its 10th."""
_FITS = 1.1
"""An estimate of idle time may exceed the recorded idle time by this much: medians of different steps differ."""
_PART = 0.1
"""A phase that is a smaller share of the step than this is not worth a warning."""


@dataclass(frozen=True)
class ProfilingCost:
    """What a phase (or step) takes with a profiler and without one, in ns; ``cost`` is what profiling added, relative.

    Both are medians, of steps that wait for data as in `PhaseTimes.clean_rate_ns`. The unprofiled steps are those of
    another process, or other steps of the same one.
    """

    phase: str
    context: int | None
    clean_ns: float
    profiled_ns: float
    cost: float


class UnprofiledIdle:
    """Knows how much idle time the phases of a trace would keep without a profiler; nothing if they were not timed."""

    def __init__(self, attribution: Attribution, times: dict[int, GpuTime], nodes: RangeNodes, facts: RunFacts) -> None:
        """Compare the phases' profiled and unprofiled times; ``nodes`` must be numbered."""
        self._factors: dict[tuple[str, int | None], float] = {}
        self._rest: dict[int | None, float] = {}
        self._steps: list[tuple[GpuParts, float]] = []
        self._facts = facts
        measured = _outermost_phases(attribution) if facts.phases else {}
        steps, names = find_steps(attribution), nodes.names_above()
        for context in dict.fromkeys(one.context for one in facts.phases):
            found: dict[str, tuple[GpuParts, float]] = {}
            for one in facts.phases:
                members = measured.get(one.phase, empty_ints()) if one.context == context else empty_ints()
                mine = [i for i in members.tolist() if context_of(names[nodes.of_range[i]]) == context]
                scaled = _scale_idle(attribution, times, np.array(mine, dtype=np.int64), steps, one)
                if scaled is not None:
                    found[one.phase] = scaled
            self._add(context, found)

    def _add(self, context: int | None, found: dict[str, tuple[GpuParts, float]]) -> None:
        """Keep the factors of one context, such that the phases keep no more idle time than their steps."""
        step = found.pop(STEP, None)
        idle_ns = sum(parts.idle_ns for parts, _ in found.values())
        left_ns = sum(parts.idle_ns * factor for parts, factor in found.values())
        fit = 1.0
        if step is not None:
            self._steps.append(step)
            self._factors[STEP, context] = step[1]
            whole_ns, whole_left_ns = step[0].idle_ns, step[0].idle_ns * step[1]
            fit = min(1.0, whole_left_ns / left_ns) if left_ns else 1.0
            rest_ns, rest_left_ns = whole_ns - idle_ns, whole_left_ns - left_ns * fit
            self._rest[context] = min(1.0, rest_left_ns / rest_ns) if rest_ns > 0 else step[1]
        self._factors |= {(phase, context): factor * fit for phase, (_, factor) in found.items()}

    def hidden_wait_ns(self, context: int | None) -> float | None:
        """Return how much longer a step waits for data without a profiler, None if it is not known."""
        waits = self._facts.unprofiled(DATA, context)
        if waits is None or waits.profiled_ns is None or (STEP, context) not in self._factors:
            return None
        return max(0.0, waits.clean_ns - waits.profiled_ns)

    @property
    def idle_share(self) -> float | None:
        """The idle share of all steps without a profiler; None if they were not timed, or if nothing was idle."""
        idle_ns = sum(parts.idle_ns * factor for parts, factor in self._steps)
        whole_ns = idle_ns + sum(parts.busy_ns for parts, _ in self._steps)
        return idle_ns / whole_ns if whole_ns else None

    def factors(self, nodes: RangeNodes, parts: Mapping[int, GpuParts]) -> list[float | None]:
        """Return for each node the share of its idle time (0 to 1) that would be left, None if that is unknown.

        A range in a phase that was timed unprofiled has the factor of the phase. Any other range of a step keeps what
        the phases in it keep, and of the rest of its idle time as large a share as the step does of its own rest.
        """
        idle_ns = [parts[node].idle_ns if node in parts else 0 for node in range(len(nodes))]
        found: list[float | None] = [None] * len(nodes)
        # What the phases in a range keep beyond the share of the rest; a parent is numbered before its children.
        beyond_ns = [0.0] * len(nodes)
        for node, names in reversed([*enumerate(nodes.names_above())]):
            context = context_of(names)
            keys = [(name.lower(), context) for name in names]
            phase = next((at for at, key in enumerate(keys) if key[0] != STEP and key in self._factors), None)
            step = next((at for at, name in enumerate(names) if is_step(name)), None)
            rest = self._rest.get(context) if step is not None else None
            if phase is not None:
                found[node] = self._factors[keys[phase]]
                if rest is not None and phase == len(names) - 1:
                    beyond_ns[node] = (self._factors[keys[phase]] - rest) * idle_ns[node]
            elif step == len(names) - 1:
                found[node] = self._factors.get((STEP, context))
            elif rest is not None:
                found[node] = rest + (beyond_ns[node] / idle_ns[node] if idle_ns[node] else 0.0)
            above = nodes.parent[node]
            if above != NO_RANGE and (phase is None or phase == len(names) - 1):
                beyond_ns[above] += beyond_ns[node]
        return found


def _outermost_phases(attribution: Attribution) -> dict[str, Ints]:
    """Return the measured steps and phases by label, without phases in other phases: those count as the outer one."""
    measured, parent = measured_ranges(attribution), attribution.parent
    phases = [members for label, members in measured.items() if label != STEP]
    if not phases:
        return measured
    inside = mark_nested(parent, mark_members(len(parent), np.concatenate(phases)))
    nested = (parent != NO_RANGE) & inside[parent]
    return {label: members if label == STEP else members[~nested[members]] for label, members in measured.items()}


def _scale_idle(
    attribution: Attribution, times: dict[int, GpuTime], members: Ints, steps: Ints, phase: PhaseTimes
) -> tuple[GpuParts, float] | None:
    """Return a phase's time on the GPUs, and its unprofiled over its profiled idle time; None if that is unknown.

    The unprofiled time is that of all instances in a step together. A profiler can only lengthen the idle time: if the
    estimate is longer, the recorded time stands, but on several GPUs nothing says that one time fits them all.
    """
    windows = find_windows(attribution, members, times)
    if not len(windows.member):
        return None
    group = np.zeros(len(windows.member), dtype=np.int64)
    parts = sum_parts(times, group, windows.device, windows.start_ns, windows.end_ns)[0]
    if not parts.idle_ns:
        return None
    own = members[windows.member]
    step = np.where(steps[own] != NO_RANGE, steps[own], own)
    count = np.unique(np.stack([step, windows.device]), axis=1).shape[1]
    factor = max(0.0, phase.clean_ns - parts.busy_ns / count) / (parts.idle_ns / count)
    if factor > _FITS and count > len(np.unique(step)):
        return None
    return parts, min(1.0, factor)


def profiling_costs(facts: RunFacts) -> tuple[ProfilingCost, ...]:
    """Return what profiling cost each phase that was timed with and without a profiler."""
    return tuple(
        ProfilingCost(one.phase, one.context, one.clean_ns, one.profiled_ns, one.cost)
        for one in facts.phases
        if one.profiled_ns is not None and one.cost is not None
    )


def find_uneven_times(facts: RunFacts) -> Iterator[Finding]:
    """Yield what makes the unprofiled medians doubtful: verdicts and MFU rest on them.

    A step can be even although a phase of it is not: two modes of one phase are lost among the other phases' time.
    """
    for one in facts.phases:
        deviation = one.clean.relative_deviation
        if one.phase == STEP and deviation is not None and deviation > _WIDE:
            yield Finding(
                "uneven-clean-steps",
                f"{one.clean.count} unprofiled steps{_where(one)} vary widely: their standard deviation is"
                f" {deviation:.0%} of their mean. Verdicts and MFU use {_used_of(one)};"
                " time more steps (`profkit run --warmup`)",
            )
    uneven = [one for one in facts.phases if _is_uneven(facts, one)]
    if uneven:
        ranges = ", ".join(
            f"{one.phase}{_where(one)} took {_ms(one.clean.p10)} to {_ms(one.clean.p90)} ms" for one in uneven
        )
        rest = "its verdict and idle share use" if len(uneven) == 1 else "their verdicts and idle shares use"
        yield Finding("uneven-clean-phases", f"{ranges} unprofiled (10th to 90th percentile); {rest} the median")


def _used_of(step: PhaseTimes) -> str:
    return "their median" if step.clean_rate_ns is None else "their mean wait for data and the median of the rest"


def find_too_few_steps(facts: RunFacts, steps: Sequence[GpuStep]) -> Iterator[Finding]:
    """Say if fewer steps were recorded than workers deliver batches at once, in a program that waits for data."""
    loading = facts.loading
    if loading is None or not loading.batches_per_step or not steps:
        return
    recorded = max(Counter(process for process, _ in {(step.process, step.start_ns) for step in steps}).values())
    burst = math.ceil(loading.workers / loading.batches_per_step)
    waited_ns, whole_ns = (sum(getattr(step, name) for step in steps) for name in ("data_wait_ns", "wall_ns"))
    unprofiled = facts.unprofiled(DATA, None), facts.unprofiled(STEP, None)
    shares = [waited_ns / whole_ns] + [data.clean_ns / step.clean_ns for data, step in [unprofiled] if data and step]
    if recorded < burst and max(shares) > _PART:
        yield Finding(
            "few-steps-for-data",
            f"{loading.workers} data loader workers deliver in bursts of up to {burst} steps, and {recorded} were"
            " recorded: they may wait more or less for data than usual;"
            f" record {burst} or more (`profkit run --steps`)",
        )


def _is_uneven(facts: RunFacts, one: PhaseTimes) -> bool:
    step = facts.unprofiled(STEP, one.context)
    if one.phase not in PHASES or step is None or one.clean.median < _PART * step.clean.median:
        return False
    return one.clean.p90 > _APART * one.clean.p10


def _where(one: PhaseTimes) -> str:
    return "" if one.context is None else f" at context {one.context}"


def _ms(time_ns: float) -> str:
    time_ms = time_ns / 1e6
    return f"{time_ms:#.3g}" if time_ms < 100 else f"{time_ms:,.0f}"
