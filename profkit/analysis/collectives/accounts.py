"""What each rank did in each step, so that ranks can be compared: exact parts of a full trace, else phases."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profkit.analysis.collectives.matching import Matched
from profkit.analysis.collectives.own_time import BEFORE
from profkit.analysis.intervals import unite
from profkit.names import DATA
from profkit.run.light_record import Cause, LightRecord, StepRecord

Floats = npt.NDArray[np.float64]
Parts = dict[tuple[Cause, str, str], float]
"""(cause, phase, module) → nanoseconds."""


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

    def mean_parts(self) -> Parts:
        """Return each part per step."""
        sums: Parts = {}
        for step in self.steps:
            for key, time in step.items():
                sums[key] = sums.get(key, 0.0) + time
        return {key: time / len(self.steps) for key, time in sums.items()}


def build_account(record: LightRecord) -> Account:
    """Return what a rank did in its measured steps, exactly from a full trace, else by its phases.

    Of a full trace the first step is left out unless something before it was recorded.
    """
    if not any(step.since for step in record.steps):
        return account_of_phases(record, {})
    named = named_steps(record)
    if len(named) > 1 and not (record.steps[0].name is None and record.steps[0].since):
        named = named[1:]
    steps, exposed = [], []
    for step in named:
        parts: Parts = {}
        for _, cause, phase, module, time in step.since:
            parts[cause, phase, module] = parts.get((cause, phase, module), 0.0) + time
        exposed.append(sum(time for (cause, *_), time in parts.items() if cause == "communication"))
        steps.append({key: time for key, time in parts.items() if key[0] != "communication"})
    return Account(record.rank, tuple(steps), tuple(exposed), True, _clock(named))


def account_of_phases(record: LightRecord, blocked: Mapping[int, Sequence[tuple[int, int]]]) -> Account:
    """Return what phases took; ``blocked`` is when the host waited in collectives, by the step's position."""
    steps = [
        _phase_parts(step, blocked.get(number, ())) for number, step in enumerate(record.steps) if step.name is not None
    ]
    return Account(record.rank, tuple(steps), (0.0,) * len(steps), False, _clock(named_steps(record)))


def named_steps(record: LightRecord) -> list[StepRecord]:
    """Return the measured steps of a record."""
    return [step for step in record.steps if step.name is not None]


def _clock(steps: Sequence[StepRecord]) -> float | None:
    clocks = [step.sm_mhz for step in steps if step.sm_mhz]
    return float(np.median(clocks)) if clocks else None


def _phase_parts(step: StepRecord, blocked: Sequence[tuple[int, int]]) -> Parts:
    """Return what phases took on the host, and what they took longer on the GPU; waiting in collectives left out."""
    host: dict[str, float] = {}
    spans, reach = [], 0
    for start, end, name in sorted((start, end, name) for name, start, end in step.phases):
        spans += [(f"{BEFORE}{name}", reach, start), (name, start, end)]
        reach = max(reach, end)
    for name, start, end in spans:
        host[name] = host.get(name, 0.0) + max(end - start, 0)
    if blocked:
        waits = unite(*np.array(blocked, dtype=np.int64).T)
        for name, start, end in spans:
            host[name] -= int(waits.within(np.array([start]), np.array([max(end, start)]))[0])
    parts: Parts = {("python", name, ""): time for name, time in host.items() if name != DATA}
    parts["data", DATA, ""] = float(step.data_ns if step.data_ns is not None else host.get(DATA, 0.0))
    calls = step.collectives
    for name, start, end in step.gpu_phases:
        talking = sum(
            stop - begin
            for begin, stop in zip(calls.start_ns, calls.end_ns, strict=True)
            if begin is not None and stop is not None and start <= begin < end
        )
        key: tuple[Cause, str, str] = ("kernels", name, "")
        parts[key] = parts.get(key, 0.0) + max(end - start - talking - host.get(name, 0.0), 0.0)
    return parts


def blocked_times(record: LightRecord, matched: Sequence[Matched]) -> dict[int, list[tuple[int, int]]]:
    """Return when the host of a rank waited in collectives of which only the call is known, by the step's position."""
    found: dict[int, list[tuple[int, int]]] = {}
    for one in matched:
        if record.rank not in one.ranks:
            continue
        here = one.ranks.index(record.rank)
        for at in np.flatnonzero(one.blocked_ns[here] >= 0).tolist():
            step = int(one.step[here, at])
            begin = int(one.blocked_ns[here, at]) - record.clock_base_ns - record.steps[step].start_ns
            found.setdefault(step, []).append((begin, begin + int(one.wait_ns[here, at])))
    return found


def waited_by_step(records: Sequence[LightRecord], matched: Sequence[Matched]) -> dict[int, list[float]]:
    """Return for each rank how long it waited in the collectives of each measured step."""
    found = {record.rank: np.zeros(len(record.steps)) for record in records}
    for one in matched:
        for here, rank in enumerate(one.ranks):
            if rank in found:
                np.add.at(found[rank], one.step[here], one.wait_ns[here].astype(np.float64))
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
    """Return how much longer the host of one rank is in a phase, or between it and the phase before, per step."""
    times = []
    for record in (late, usual):
        each = []
        for step in named_steps(record):
            spans = sorted((start, end, name) for name, start, end in step.phases)
            if phase.startswith(BEFORE):
                pairs = itertools.pairwise(spans)
                each.append(sum(max(b[0] - a[1], 0) for a, b in pairs if b[2] == phase.removeprefix(BEFORE)))
            else:
                each.append(sum(end - start for start, end, name in spans if name == phase))
        times.append(float(np.median(each)) if each else 0.0)
    return times[0] - times[1]
