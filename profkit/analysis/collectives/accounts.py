"""What each rank did in each step, so that ranks can be compared: exact parts of a full trace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profkit.analysis.collectives.matching import Matched
from profkit.names import BACKWARD, DATA
from profkit.run.light_record import Cause, LightRecord, StepRecord

Floats = npt.NDArray[np.float64]
Part = tuple[Cause, str, str]
"""Cause, phase and module of what a rank did."""
Parts = dict[Part, float]
"""Part → nanoseconds."""


@dataclass(frozen=True)
class Account:
    """What one rank did in each step, per step: its own parts, and the communication that nothing hid."""

    rank: int
    steps: tuple[Parts, ...]
    exposed_ns: tuple[float, ...]
    is_exact: bool
    sm_mhz: float | None = None

    def own_ns(self, step: int, cause: Cause | None = None) -> float:
        """Return what the rank did by itself in one step, of all causes or of one."""
        return sum(time for key, time in self.steps[step].items() if cause in (None, key[0]))

    def median_parts(self) -> Parts:
        """Return each part's median over the steps, which one strange step does not move."""
        keys = {key for step in self.steps for key in step}
        return {key: float(np.median([step.get(key, 0.0) for step in self.steps])) for key in keys}

    def quickest_parts(self) -> Parts:
        """Return the least that each part took in a step."""
        keys = {key for step in self.steps for key in step}
        return {key: min(step.get(key, 0.0) for step in self.steps) for key in keys}

    def mean_parts(self) -> Parts:
        """Return each part per step."""
        sums: Parts = {}
        for step in self.steps:
            for key, time in step.items():
                sums[key] = sums.get(key, 0.0) + time
        return {key: time / len(self.steps) for key, time in sums.items()}


def exact_account(record: LightRecord) -> Account | None:
    """Return what a rank did in its measured steps by its full trace; None of a rank that left a light record alone.

    The first step is left out unless something before it was recorded.
    """
    named = named_steps(record)
    if not any(step.since for step in record.steps):
        return None
    if len(named) > 1 and not (record.steps[0].name is None and record.steps[0].since):
        named = named[1:]
    steps, exposed = [], []
    for step in named:
        parts: Parts = {}
        for _, cause, phase, module, time in step.since:
            parts[cause, phase, module] = parts.get((cause, phase, module), 0.0) + time
        exposed.append(sum(time for (cause, *_), time in parts.items() if cause == "communication"))
        steps.append({key: time for key, time in parts.items() if key[0] != "communication"})
    return Account(record.rank, tuple(steps), tuple(exposed), True, clock_of(named))


def part_on_host(phase: str) -> Part:
    """Return what a host's time in a phase counts as."""
    return ("data", DATA, "") if phase == DATA else ("python", phase, "")


def longer_on_gpu(step: StepRecord) -> Parts:
    """Return what phases took on the GPU beyond their time on the host, without their collectives.

    A phase's collectives are those that the host called in it, for their start on the GPU is not known. What is longer
    than the phase itself was waited for in the next one. Where nobody timed the collectives, what is known of them is
    how long the GPU waited at a backward pass's end.
    """
    host: dict[str, float] = {}
    talking: dict[str, float] = {}
    calls = step.collectives
    timed = [
        (called, end - begin)
        for called, begin, end in zip(calls.called_ns, calls.start_ns, calls.end_ns, strict=True)
        if called is not None and begin is not None and end is not None
    ]
    for name, start, end in step.phases:
        host[name] = host.get(name, 0.0) + end - start
        talking[name] = talking.get(name, 0.0) + sum([time for called, time in timed if start <= called < end])
    if not timed:
        talking[BACKWARD] = float(sum(filter(None, calls.exposed_ns)))
    parts: Parts = {}
    left = 0.0
    for name, start, end in step.gpu_phases:
        part: Part = ("kernels", name, "")
        left += talking.pop(name, 0.0)
        parts[part] = parts.get(part, 0.0) + max(end - start - left - host.get(name, 0.0), 0.0)
        left = max(left - (end - start), 0.0)
    return parts


def named_steps(record: LightRecord) -> list[StepRecord]:
    """Return the measured steps of a record."""
    return [step for step in record.steps if step.name is not None]


def clock_of(steps: Sequence[StepRecord]) -> float | None:
    """Return the median clock of the GPU, None if nobody recorded it."""
    clocks = [step.sm_mhz for step in steps if step.sm_mhz]
    return float(np.median(clocks)) if clocks else None


def waited_by_step(records: Sequence[LightRecord], matched: Sequence[Matched]) -> dict[int, list[float]]:
    """Return for each rank how long it waited in the collectives of each measured step."""
    return _waits_by_step(records, matched, np.add)


def longest_wait_by_step(records: Sequence[LightRecord], matched: Sequence[Matched]) -> dict[int, list[float]]:
    """Return for each rank the longest time that it waited in one collective of each measured step."""
    return _waits_by_step(records, matched, np.maximum)


def _waits_by_step(
    records: Sequence[LightRecord], matched: Sequence[Matched], join: np.ufunc
) -> dict[int, list[float]]:
    found = {record.rank: np.zeros(len(record.steps)) for record in records}
    for one in matched:
        for here, rank in enumerate(one.ranks):
            if rank in found:
                join.at(found[rank], one.step[here], one.wait_ns[here].astype(np.float64))
    return {record.rank: _of_named(record, found[record.rank]) for record in records}


def lateness_by_step(records: Sequence[LightRecord], matched: Sequence[Matched]) -> dict[int, list[float]]:
    """Return for each rank and each of its measured steps the longest time that the median other rank waited for it."""
    found = {record.rank: np.zeros(len(record.steps)) for record in records}
    for one in matched:
        for to in np.unique(one.last[one.last >= 0]).tolist():
            if one.ranks[to] in found:
                mine = one.last == to
                np.maximum.at(found[one.ranks[to]], one.step[to, mine], one.median_wait_ns[mine].astype(np.float64))
    return {record.rank: _of_named(record, found[record.rank]) for record in records}


def _of_named(record: LightRecord, values: Floats) -> list[float]:
    return [value for step, value in zip(record.steps, values.tolist(), strict=True) if step.name is not None]


def step_times(record: LightRecord) -> list[float]:
    """Return the time from each measured step to the next; of one step, its own."""
    starts = [step.start_ns for step in record.steps if step.name is not None]
    times = [float(after - before) for before, after in itertools.pairwise(starts)]
    return times or [float(step.end_ns - step.start_ns) for step in record.steps if step.name is not None]


def median_of_parts(parts: Sequence[Parts]) -> Parts:
    """Return the median over ranks of each part."""
    keys = {key for one in parts for key in one}
    return {key: float(np.median([one.get(key, 0.0) for one in parts])) for key in keys}


def longer_on_host(late: LightRecord, usual: LightRecord, phase: str) -> float:
    """Return how much longer the host of one rank ran without calling CUDA in a phase, per step, hidden or not."""
    times = [
        float(np.median([sum(time for name, _, time in step.outside_cuda if name == phase) for step in named]))
        for named in map(named_steps, (late, usual))
    ]
    return times[0] - times[1]
