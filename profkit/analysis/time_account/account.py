"""The time account of a run: what its steps took on the GPUs, as recorded and without a profiler.

It is the one source of step times, busy and idle time, and of what recorded idle time stands for in an unprofiled step.
A profiler slows the host and hardly the GPU. So each step keeps its busy time on each GPU, and its unprofiled idle time
is what that leaves of the unprofiled step time: less than was recorded, or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from profkit.analysis.intervals import Stretches, disjoint_pieces
from profkit.analysis.placing.attribution import Attribution, mark_members
from profkit.analysis.ranks import Ranks
from profkit.analysis.time_account import context_of, find_contexts, find_steps, is_step, measured_ranges
from profkit.analysis.time_account.gpu_time import (
    DataWait,
    GpuParts,
    GpuTime,
    Windows,
    build_gpu_times,
    find_data_waits,
    find_windows,
    sum_host_waits,
    sum_parts,
)
from profkit.analysis.tree.range_tree import RangeNodes
from profkit.errors import Finding
from profkit.names import DATA, STEP, phase_of
from profkit.trace.columns import Bools, Ints, distinct_values, empty_ints, rows_by_value
from profkit.trace.nesting import NO_RANGE, mark_nested

if TYPE_CHECKING:
    from profkit.analysis.time_account.step_times import PhaseTimes, StepTimes
    from profkit.run.manifest import Loading

_NONE = -1
"""No context, no rank."""
_PART = 0.1
"""Waits for data that are a smaller share of a step are not worth a warning."""
_FITS = 1.1
"""Of a phase on several GPUs the unprofiled idle time may exceed the recorded one by this much: one time may not fit
them all."""


@dataclass(frozen=True)
class IdleCauses:
    """Why GPUs were idle, in nanoseconds; the four sum up to the idle time.

    ``data_ns``: the program waited for a batch. Else the host prepared kernels, waited for the GPU, or ran without
    calling CUDA.
    """

    data_ns: int
    launching_ns: int
    synchronising_ns: int
    outside_cuda_ns: int


@dataclass(frozen=True)
class IdleTime:
    """The time of GPUs and the idle part of it: without a profiler where ``is_unprofiled``, else as recorded.

    GPUs whose kernels wait for other ranks may be busy for longer, as recorded, than an unprofiled step takes: the
    hosts that they wait for are slower with a profiler. Their time is the step, and none of it is idle.
    """

    span_ns: int
    idle_ns: int
    causes: IdleCauses
    is_unprofiled: bool

    @property
    def share(self) -> float:
        return self.idle_ns / self.span_ns if self.span_ns else 0.0

    def exposed_communication_ns(self, parts: GpuParts) -> int:
        """Return what this time has of the recorded communication that nothing hides: all but the waits beyond it."""
        beyond_ns = parts.busy_ns + self.idle_ns - self.span_ns
        return max(parts.exposed_communication_ns - beyond_ns, 0)


@dataclass(frozen=True, eq=False)
class TimeAccount:
    """One row per measured step and GPU that it launched work on, in order of their start; integer nanoseconds.

    ``steps`` are the steps of the program, as rows of the trace's ranges; ``step`` is each row's place among them.
    ``windows`` are the rows' times on their GPUs, ``parts`` the columns of `GpuParts` in them and ``data`` those of
    `DataWait`, all as recorded. ``context`` and ``rank`` are -1 where there is none. ``timed`` are the steps' times by
    the host's clock, without a profiler and with one; None if the run took none.
    """

    attribution: Attribution
    ranks: Ranks
    timed: StepTimes | None
    gpu_times: dict[int, GpuTime]
    steps: Ints
    windows: Windows
    parts: Ints
    data: Ints
    context: Ints
    rank: Ints

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def step(self) -> Ints:
        return self.windows.member

    @cached_property
    def usual(self) -> Bools:
        """Which rows are not of rare steps; all of a context's on one GPU where it is not known which these are."""
        usual = np.ones(len(self), dtype=np.bool_)
        for context in () if self.timed is None else self.timed.contexts:
            times = self._times(STEP, context)
            if times is None or times.recorded is None:
                continue
            for rows in self._by_gpu(self.context == _number(context)):
                if len(times.recorded.is_usual) == rows.sum():
                    usual[rows] = times.recorded.is_usual
        return usual

    def step_ns(self, context: int | None = None) -> float | None:
        """Return the unprofiled step time; None if it was not taken."""
        times = self._times(STEP, context)
        return None if times is None else times.clean_ns

    def recorded_step_ns(self, context: int | None = None) -> float | None:
        """Return the step time with the profiler: by the host's clock, else the mean of `recorded_steps_ns`."""
        times = self._times(STEP, context)
        if times is not None and times.profiled_ns:
            return times.profiled_ns
        each = self.recorded_steps_ns()
        return float(each.mean()) if len(each) else None

    def recorded_steps_ns(self) -> Ints:
        """Return how long each step of the program took as recorded: on the GPUs, else in Python.

        The n-th steps of all processes are one, which takes as long as the longest of them.
        """
        if not len(self.steps):
            return empty_ints()
        ranges = self.attribution.trace.ranges
        number = np.zeros(len(self.steps), dtype=np.int64)
        for mine in rows_by_value(ranges.process[self.steps]).values():
            number[mine[np.argsort(ranges.start_ns[self.steps[mine]], kind="stable")]] = np.arange(len(mine))
        longest = np.zeros(number.max() + 1, dtype=np.int64)
        if len(self):
            np.maximum.at(longest, number[self.step], self.parts[:, 0])
        else:
            np.maximum.at(longest, number, (ranges.end_ns - ranges.start_ns)[self.steps])
        return longest[longest > 0]

    def measure(self, sets: Mapping[int, Stretches]) -> Ints:
        """Return how much of each row's time on its GPU lies in the set of that GPU; 0 for a GPU without a set."""
        windows, time_ns = self.windows, np.zeros(len(self), dtype=np.int64)
        for device, stretches in sets.items():
            mine = windows.device == device
            time_ns[mine] = stretches.within(windows.start_ns[mine], windows.end_ns[mine])
        return time_ns

    def sum_parts(self, rows: Bools | None = None) -> tuple[GpuParts, DataWait]:
        mine = slice(None) if rows is None else rows
        parts, data = (columns[mine].sum(axis=0).tolist() for columns in (self.parts, self.data))
        return GpuParts(*parts), DataWait(*data)

    def idle_time(self, rows: Bools | None = None) -> IdleTime:
        """Return the idle time of some rows and why, without a profiler where any of their contexts was timed so."""
        mine = np.ones(len(self), dtype=np.bool_) if rows is None else rows
        contexts = [None if number == _NONE else number for number in distinct_values(self.context[mine]).tolist()]
        timed = [context for context in contexts if self.step_ns(context) is not None]
        if not timed:
            return recorded_idle(*self.sum_parts(mine))
        parts = [self._unprofiled_idle(context, rows_of_gpu) for context in timed for rows_of_gpu in self._by_gpu(mine)]
        causes = IdleCauses(*np.sum([astuple(part.causes) for part in parts], axis=0).tolist())
        return IdleTime(
            sum(part.span_ns for part in parts), sum(part.idle_ns for part in parts), causes, is_unprofiled=True
        )

    def unprofiled_part(self, context: int | None) -> float:
        """Return the unprofiled time of the GPUs over the sum of their busy and their idle time; see `IdleTime`."""
        rows = self.context == _number(context)
        idle = self.idle_time(rows)
        whole_ns = self.sum_parts(rows)[0].busy_ns + idle.idle_ns
        return idle.span_ns / whole_ns if whole_ns else 1.0

    def data_change_ns(self, context: int | None) -> float | None:
        """Return how much longer an unprofiled step waits for data than a recorded one; None if that is unknown."""
        waits = self._times(DATA, context)
        if waits is None or waits.profiled_ns is None or self.step_ns(context) is None:
            return None
        return waits.clean_ns - waits.profiled_ns

    def _times(self, phase: str, context: int | None) -> PhaseTimes | None:
        return None if self.timed is None else self.timed.find(phase, context)

    def _by_gpu(self, rows: Bools) -> list[Bools]:
        """Return these rows of each process and GPU: what one of them is busy for is no other's idle time."""
        process = self.attribution.trace.ranges.process[self.steps[self.step]]
        gpus = sorted(set(zip(process[rows].tolist(), self.windows.device[rows].tolist(), strict=True)))
        return [rows & (process == owner) & (self.windows.device == device) for owner, device in gpus]

    def _unprofiled_idle(self, context: int | None, rows: Bools) -> IdleTime:
        """Return the idle time of these rows' context on one GPU, as if all its steps were as busy as the usual ones.

        A recorded step that is rare, in which a model is evaluated, say, is busy for longer than a typical one takes.
        """
        mine = rows & (self.context == _number(context))
        usual = mine & self.usual
        usual = usual if usual.any() else mine
        parts, data = self.sum_parts(usual)
        count, step_ns = int(usual.sum()), self.step_ns(context) or 0.0
        idle_ns = max(round(step_ns * count) - parts.busy_ns, 0)
        change_ns = self.data_change_ns(context)
        causes = divide_idle(parts, data, idle_ns, None if change_ns is None else round(change_ns * count))
        if count < (whole := int(mine.sum())):
            idle_ns = round(idle_ns * whole / count)
            causes = IdleCauses(*share_out(idle_ns, astuple(causes)))
            count = whole
        return IdleTime(round(step_ns * count), idle_ns, causes, is_unprofiled=True)


def recorded_idle(parts: GpuParts, data: DataWait) -> IdleTime:
    """Return the idle time of GPUs as it was recorded; ``data`` are the waits for data in the same time."""
    return IdleTime(parts.span_ns, parts.idle_ns, divide_idle(parts, data, parts.idle_ns), is_unprofiled=False)


def unprofiled_idle(
    parts: GpuParts, data: DataWait, idle_ns: int, data_change_ns: int | None = None, *, part: float = 1.0
) -> IdleTime:
    """Return the time of GPUs that are as busy as recorded and idle for ``idle_ns``, and this part of that together.

    See `divide_idle` and `TimeAccount.unprofiled_part`.
    """
    causes = divide_idle(parts, data, idle_ns, data_change_ns)
    return IdleTime(round((parts.busy_ns + idle_ns) * part), idle_ns, causes, is_unprofiled=True)


def divide_idle(parts: GpuParts, data: DataWait, idle_ns: int, data_change_ns: int | None = None) -> IdleCauses:
    """Return why GPUs are idle for ``idle_ns`` in steps that, as recorded, had these parts and waits for data.

    All causes keep their shares. Where it is known how much longer the steps wait for data than recorded (less than 0
    if shorter), that wait is set first, and the other causes share the rest.
    """
    launching, synchronising, outside = (
        parts.launching_ns - data.launching_ns,
        parts.synchronising_ns - data.synchronising_ns,
        parts.outside_cuda_ns - data.outside_cuda_ns,
    )
    others_ns = launching + synchronising + outside
    if data_change_ns is None:
        return IdleCauses(*share_out(idle_ns, (data.idle_ns, launching, synchronising, outside)))
    waiting_ns = min(max(data.idle_ns + data_change_ns, 0), idle_ns) if others_ns else idle_ns
    return IdleCauses(waiting_ns, *share_out(idle_ns - waiting_ns, (launching, synchronising, outside)))


def share_out(total_ns: int, weights: Sequence[int]) -> list[int]:
    """Return integers in the ratio of the weights that sum up to a total; without any weight the last has it all."""
    if len(weights) == 1:
        return [total_ns]
    whole = sum(weights)
    if not whole:
        return [*([0] * (len(weights) - 1)), total_ns]
    edges = [0]
    for weight in weights:
        edges.append(edges[-1] + weight)
    ends = [(2 * edge * total_ns + whole) // (2 * whole) for edge in edges]
    return [after - before for before, after in pairwise(ends)]


def open_account(attribution: Attribution, ranks: Ranks, timed: StepTimes | None) -> TimeAccount:
    trace = attribution.trace
    times = build_gpu_times(trace) if trace.measure == "gpu-kernel" else {}
    steps = measured_ranges(attribution).get(STEP, empty_ints())
    windows = find_windows(attribution, steps if times else empty_ints(), times)
    windows = windows.take(np.lexsort((windows.device, trace.ranges.start_ns[steps[windows.member]])))
    windows = _cut_overlaps(windows, trace.ranges.process[steps[windows.member]])
    waits = find_data_waits(trace, times)
    own = steps[windows.member]
    lengths = [_NONE] + [_NONE if (length := context_of((name,))) is None else length for name in trace.names]
    return TimeAccount(
        attribution,
        ranks,
        timed,
        times,
        steps,
        windows,
        parts=_measure(windows, len(fields(GpuParts)), {at: time.parts_within for at, time in times.items()}),
        data=_measure(windows, len(fields(DataWait)), {at: partial(waits.parts_within, at) for at in times}),
        context=np.array(lengths, dtype=np.int64)[find_contexts(attribution)[own]],
        rank=np.array([*ranks.numbers, _NONE], dtype=np.int64)[ranks.index_of(trace.ranges.process[own])],
    )


def _cut_overlaps(windows: Windows, process: Ints) -> Windows:
    """Return windows of which each begins no sooner than the one before it on its process and GPU has ended.

    A step that copies its batch on a stream of its own may begin before the kernels of the one before have ended, and
    no time of a GPU counts twice.
    """
    _, group = np.unique(np.stack([process, windows.device]), axis=1, return_inverse=True)
    group = group.reshape(-1)
    order = np.lexsort((windows.start_ns, group))
    start_ns, end_ns = np.empty_like(windows.start_ns), np.empty_like(windows.end_ns)
    _, start_ns[order], end_ns[order] = disjoint_pieces(group, windows.start_ns, windows.end_ns)
    return Windows(windows.member, windows.device, start_ns, end_ns)


def _measure(windows: Windows, size: int, parts_within: Mapping[int, Callable[[Ints, Ints], Ints]]) -> Ints:
    parts = np.zeros((len(windows.member), size), dtype=np.int64)
    for device, measure in parts_within.items():
        mine = windows.device == device
        parts[mine] = measure(windows.start_ns[mine], windows.end_ns[mine])
    return parts


def scale_ranges(account: TimeAccount, nodes: RangeNodes, parts: Mapping[int, GpuParts]) -> list[float | None]:
    """Return for each node of the tree its unprofiled over its recorded idle time, None if that is unknown.

    A range in a phase that was timed unprofiled has the factor of the phase. Any other range of a step keeps what the
    phases in it keep, and of the rest of its idle time as large a share as the step does of its own rest. ``nodes``
    may be numbered; ``parts`` is node → its recorded time.
    """
    known, rest_of = _factors(account)
    idle_ns = [parts[node].idle_ns if node in parts else 0 for node in range(len(nodes))]
    factors: list[float | None] = [None] * len(nodes)
    # What the phases in a range keep beyond the share of the rest; a parent is numbered before its children.
    beyond_ns = [0.0] * len(nodes)
    for node, names in reversed([*enumerate(nodes.names_above())]):
        context = context_of(names)
        keys = [(phase_of(name) or "", context) for name in names]
        phase = next((at for at, key in enumerate(keys) if key in known), None)
        step = next((at for at, name in enumerate(names) if is_step(name)), None)
        rest = rest_of.get(context) if step is not None else None
        is_inside = phase is not None and phase < len(names) - 1
        if phase is not None:
            factors[node] = known[keys[phase]]
            if rest is not None and not is_inside:
                beyond_ns[node] = (known[keys[phase]] - rest) * idle_ns[node]
        elif step == len(names) - 1:
            factors[node] = known.get((STEP, context))
        elif rest is not None:
            factors[node] = rest + (beyond_ns[node] / idle_ns[node] if idle_ns[node] else 0.0)
        above = nodes.parent[node]
        if above != NO_RANGE and not is_inside:
            beyond_ns[above] += beyond_ns[node]
    return factors


def _factors(account: TimeAccount) -> tuple[dict[tuple[str, int | None], float], dict[int | None, float]]:
    """Return the factors of idle time by phase and context, and by context that of a step's time in no phase."""
    known: dict[tuple[str, int | None], float] = {}
    rest_of: dict[int | None, float] = {}
    for context in [] if account.timed is None else account.timed.contexts:
        phases = dict(_scale_phases(account, context))
        idle_ns = sum(parts.idle_ns for parts, _ in phases.values())
        left_ns = sum(parts.idle_ns * factor for parts, factor in phases.values())
        fit = 1.0
        rows = account.context == _number(context)
        whole_ns = account.sum_parts(rows)[0].idle_ns
        if account.step_ns(context) is not None and whole_ns:
            whole_left_ns = account.idle_time(rows).idle_ns
            known[STEP, context] = whole_left_ns / whole_ns
            fit = min(1.0, whole_left_ns / left_ns) if left_ns else 1.0
            rest_ns = whole_ns - idle_ns
            rest_of[context] = (whole_left_ns - left_ns * fit) / rest_ns if rest_ns > 0 else known[STEP, context]
        known |= {(phase, context): factor * fit for phase, (_, factor) in phases.items()}
    return known, rest_of


def _scale_phases(account: TimeAccount, context: int | None) -> Iterator[tuple[str, tuple[GpuParts, float]]]:
    """Yield each timed phase of a context with its recorded time on the GPUs and the factor of its idle time.

    The unprofiled time is that of all instances in a step together. If it is longer than recorded, nothing says that
    it fits every one of several GPUs, and the phase is left out.
    """
    attribution, step_of = account.attribution, find_steps(account.attribution)
    names = [_NONE] + [_number(context_of((name,))) for name in attribution.trace.names]
    is_mine = np.array(names, dtype=np.int64)[find_contexts(attribution)] == _number(context)
    for phase, ranges in _outermost_phases(attribution).items():
        times = account.timed and account.timed.find(phase, context)
        windows = find_windows(attribution, ranges[is_mine[ranges]] if times else empty_ints(), account.gpu_times)
        if not times or not len(windows.member):
            continue
        group = np.zeros(len(windows.member), dtype=np.int64)
        parts = sum_parts(account.gpu_times, group, windows.device, windows.start_ns, windows.end_ns)[0]
        own = ranges[is_mine[ranges]][windows.member]
        step = np.where(step_of[own] != NO_RANGE, step_of[own], own)
        count = np.unique(np.stack([step, windows.device]), axis=1).shape[1]
        if not parts.idle_ns:
            continue
        factor = max(0.0, times.clean_ns - parts.busy_ns / count) / (parts.idle_ns / count)
        if factor <= _FITS or count == len(distinct_values(step)):
            yield phase, (parts, factor)


def _outermost_phases(attribution: Attribution) -> dict[str, Ints]:
    phases = {label: members for label, members in measured_ranges(attribution).items() if label != STEP}
    if not phases:
        return {}
    parent = attribution.parent
    inside = mark_nested(parent, mark_members(len(parent), np.concatenate(list(phases.values()))))
    nested = (parent != NO_RANGE) & inside[parent]
    return {label: members[~nested[members]] for label, members in phases.items()}


def find_too_few_steps(account: TimeAccount, loading: Loading | None) -> Iterator[Finding]:
    """Say if fewer steps were recorded than workers deliver batches at once, in a program that waits for data."""
    if loading is None or not loading.burst_steps or not len(account):
        return
    ranges = account.attribution.trace.ranges
    steps = account.steps[distinct_values(account.step)]
    recorded = max(len(rows) for rows in rows_by_value(ranges.process[steps]).values())
    burst = loading.burst_steps
    waited_ns = sum_host_waits(account.attribution, steps)
    shares = [waited_ns.sum() / (ranges.end_ns - ranges.start_ns)[steps].sum()]
    data, step_ns = account.timed and account.timed.find(DATA, None), account.step_ns()
    shares += [data.clean_ns / step_ns] if data and step_ns else []
    if recorded < burst and max(shares) > _PART:
        yield Finding(
            "few-steps-for-data",
            f"{loading.workers} data loader workers deliver in bursts of up to {burst} steps, and {recorded} were"
            " recorded: they may wait more or less for data than usual;"
            f" record {burst} or more (`profkit run --steps`)",
        )


def _number(context: int | None) -> int:
    return _NONE if context is None else context
