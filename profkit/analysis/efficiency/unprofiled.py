"""What profiling cost the steps, and how much of a range's idle time would be left without a profiler.

Profiling slows the host and hardly the GPU. If it is known how long a phase takes without a profiler, its busy time is
kept and its idle time is scaled so that the two sum to the unprofiled time. Ranges within the phase are scaled alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from profkit.analysis.attribution import Attribution
from profkit.analysis.efficiency.facts import RunFacts
from profkit.analysis.efficiency.gpu_time import GpuParts, GpuTime, find_windows, sum_parts
from profkit.analysis.range_paths import RangeNodes
from profkit.analysis.step_times import PhaseTimes
from profkit.analysis.steps import context_of, is_step, measured_ranges
from profkit.findings import Finding
from profkit.names import PHASES, STEP
from profkit.trace.columns import Ints, empty_ints

_WIDE = 0.3
"""Steps vary widely if their standard deviation is more than this share of their mean; `profkit run` agrees."""
_APART = 1.4
"""A phase is uneven if its 90th percentile is more than this many times its 10th."""
_PART = 0.1
"""A phase that is a smaller share of the step than this is not worth a warning."""


@dataclass(frozen=True)
class ProfilingCost:
    """A phase's (or step's) median with a profiler and without one, in ns; ``cost`` is what profiling added, relative.

    The unprofiled steps are those of another process, or other steps of the same one.
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
        self._steps: list[tuple[GpuParts, float]] = []
        measured = measured_ranges(attribution) if facts.phases else {}
        names = nodes.names_above()
        for one in facts.phases:
            members = measured.get(one.phase, empty_ints())
            mine = [i for i in members.tolist() if context_of(names[nodes.of_range[i]]) == one.context]
            found = _scale_idle(attribution, times, np.array(mine, dtype=np.int64), one)
            if found is None:
                continue
            self._factors[one.phase, one.context] = found[1]
            if one.phase == STEP:
                self._steps.append(found)

    @property
    def idle_share(self) -> float | None:
        """The idle share of all steps without a profiler; None if they were not timed or nothing was idle."""
        idle_ns = sum(parts.idle_ns * factor for parts, factor in self._steps)
        whole_ns = idle_ns + sum(parts.busy_ns for parts, _ in self._steps)
        return idle_ns / whole_ns if whole_ns else None

    def factor(self, names: Sequence[str]) -> float | None:
        """Return the share of a range's idle time (0 to 1) that would be left; ``names`` lead to it from the outermost.

        It is the factor of the nearest phase or step around the range that was timed unprofiled; None if there is none.
        """
        context = context_of(names)
        around = (self._factors.get((STEP if is_step(name) else name.lower(), context)) for name in reversed(names))
        return next((factor for factor in around if factor is not None), None)


def _scale_idle(
    attribution: Attribution, times: dict[int, GpuTime], members: Ints, phase: PhaseTimes
) -> tuple[GpuParts, float] | None:
    """Return a phase's time on the GPUs, and its unprofiled over its profiled idle time; None if nothing was idle."""
    windows = find_windows(attribution, members, times)
    count = len(windows.member)
    if not count:
        return None
    parts = sum_parts(times, np.zeros(count, dtype=np.int64), windows.device, windows.start_ns, windows.end_ns)[0]
    if not parts.idle_ns:
        return None
    idle_ns = max(0.0, phase.clean.median - parts.busy_ns / count)
    return parts, min(1.0, idle_ns / (parts.idle_ns / count))


def profiling_costs(facts: RunFacts) -> tuple[ProfilingCost, ...]:
    """Return what profiling cost each phase that was timed with and without a profiler."""
    return tuple(
        ProfilingCost(one.phase, one.context, one.clean.median, one.profiled.median, one.cost)
        for one in facts.phases
        if one.profiled is not None and one.cost is not None
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
                f" {deviation:.0%} of their mean. Verdicts and MFU use their median;"
                " time more steps (`profkit run --warmup`)",
            )
    uneven = [one for one in facts.phases if _is_uneven(facts, one)]
    if uneven:
        ranges = ", ".join(
            f"{one.phase}{_where(one)} took {_ms(one.clean.p10)} to {_ms(one.clean.p90)} ms" for one in uneven
        )
        rest = "its verdict and idle share use" if len(uneven) == 1 else "their verdicts and idle shares use"
        yield Finding("uneven-clean-phases", f"{ranges} unprofiled (10th to 90th percentile); {rest} the median")


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
