"""What profiling made of the steps, and what is left of a range's idle time without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profkit.analysis.attribution import Attribution
from profkit.analysis.checks.step_check import find_measured
from profkit.analysis.efficiency.gpu_time import GpuParts, GpuTime, sum_parts
from profkit.analysis.efficiency.range_work import context_of, is_step
from profkit.analysis.efficiency.result import Inflation
from profkit.analysis.efficiency.run_facts import RunFacts
from profkit.analysis.efficiency.windows import find_windows
from profkit.analysis.range_paths import RangeNodes
from profkit.analysis.step_times import PhaseTimes
from profkit.names import STEP
from profkit.trace.columns import Ints

_Key = tuple[str, int | None]


class Inflations:
    """What a run's unprofiled times say of its profiled ones, phase by phase; nothing of a trace without them."""

    def __init__(self, attribution: Attribution, times: dict[int, GpuTime], nodes: RangeNodes, facts: RunFacts) -> None:
        """Compare; ``nodes`` are those of the trace, numbered."""
        phases = facts.step_times.phases if facts.step_times is not None else ()
        self._factors: dict[_Key, float] = {}
        self._steps: list[tuple[GpuParts, float]] = []
        measured = find_measured(attribution) if phases else {}
        names = nodes.names_above()
        for one in phases:
            members = measured.get(one.phase, np.empty(0, dtype=np.int64))
            mine = [i for i in members.tolist() if context_of(names[nodes.of_range[i]]) == one.context]
            found = _shrink(attribution, times, np.array(mine, dtype=np.int64), one)
            if found is None:
                continue
            self._factors[one.phase, one.context] = found[1]
            if one.phase == STEP:
                self._steps.append(found)
        self.table = tuple(
            Inflation(one.phase, one.context, one.clean.median, one.profiled.median, one.cost)
            for one in phases
            if one.profiled is not None and one.cost is not None
        )

    @property
    def clean_idle_share(self) -> float | None:
        """The idle share of all steps without a profiler; None where they were not timed, or nothing was idle."""
        idle_ns = sum(parts.idle_ns * factor for parts, factor in self._steps)
        whole_ns = idle_ns + sum(parts.busy_ns for parts, _ in self._steps)
        return idle_ns / whole_ns if whole_ns else None

    def idle_factor(self, names: Sequence[str]) -> float | None:
        """Return what is left of the idle time of a range that lies below these names (its own the last).

        It is that of the nearest phase or step around the range that was timed without a profiler, None without one.
        """
        context = context_of(names)
        around = (self._factors.get((_phase_of(name), context)) for name in reversed(names))
        return next((factor for factor in around if factor is not None), None)


def _phase_of(name: str) -> str:
    return STEP if is_step(name) else name.lower()


def _shrink(
    attribution: Attribution, times: dict[int, GpuTime], members: Ints, phase: PhaseTimes
) -> tuple[GpuParts, float] | None:
    """Return a phase's time on the GPUs, and unprofiled over profiled idle time of it, 0 to 1; None if none was idle.

    Idle is what unprofiled time leaves beside busy time.
    """
    windows = find_windows(attribution, members, times)
    count = len(windows.member)
    if not count:
        return None
    parts = sum_parts(times, np.zeros(count, dtype=np.int64), windows.device, windows.start_ns, windows.end_ns)[0]
    if not parts.idle_ns:
        return None
    idle_ns = max(0.0, phase.clean.median - parts.busy_ns / count)
    return parts, min(1.0, idle_ns / (parts.idle_ns / count))
