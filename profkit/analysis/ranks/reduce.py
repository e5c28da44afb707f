"""How a rank becomes what it hands over: a full trace the same columns as a light record, and what the rank did by
itself in each step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from profkit.analysis.intervals import Stretches, unite
from profkit.analysis.lines import LinesResult
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.ranks.own_time import (
    CAUSES,
    Account,
    Floats,
    OwnTime,
    Part,
    ReducedRank,
    clock_of,
    collective_ranges,
    divide_own_time,
    host_time,
    phase_or_data,
)
from profkit.analysis.time_account import measured_ranges
from profkit.analysis.time_account.gpu_time import communication_rows
from profkit.errors import ProfkitError, RunError
from profkit.names import BACKWARD, STEP, kind_of_collective
from profkit.run.light_columns import (
    NO_PHASES,
    UNKNOWN,
    CallColumns,
    LightColumns,
    Phases,
    StepColumns,
    read_light_columns,
)
from profkit.run.light_record import P2P, Group, LightRecord
from profkit.trace.columns import Bools, CollectiveCall, Ints, Ranges, Trace, Work, distinct_values, empty_ints
from profkit.trace.nesting import NO_RANGE

_NODE = re.compile(r"node(\d+)")
"""The name of a machine's run within that of its job."""


def reduce_columns(rank: LightColumns) -> ReducedRank:
    """Return what a rank hands over of its columns: of the collectives of a group each number once, in their order.

    Each rank numbers for itself what it sends to and receives from one other rank. Collectives outside the measured
    steps count only if there are no such steps.
    """
    steps, calls = rank.steps, rank.calls
    counts = np.zeros(len(steps), dtype=np.bool_)
    counts[steps.named if len(steps.named) else slice(None)] = True
    rows = np.lexsort((calls.sequence, calls.group, calls.is_pairwise))
    rows = rows[counts[calls.step[rows]]]
    keys = calls.take(rows)
    is_again = (np.diff(keys.group, prepend=keys.group[:1] - 1) == 0) & (np.diff(keys.sequence, prepend=0) == 0)
    return ReducedRank(rank.record, steps, keys.take(keys.is_pairwise | ~is_again), longer_on_gpu(steps, calls))


def reduce_ranks(opened: OpenedTrace, light: Mapping[int, LightColumns]) -> list[ReducedRank]:
    """Return what the trace says of each of its ranks; of a trace that names none, of rank 0.

    What the ranks wrote themselves completes what a trace does not say: process groups, bytes, clocks.
    """
    numbers = opened.ranks.numbers
    if not numbers or opened.rank is not None:
        traces = {opened.rank or 0: opened}
    else:
        traces = {rank: opened.of_rank(rank) for rank in numbers}
    return [
        replace(_reduce_trace(own.attribution, rank, light.get(rank)), between_phases_ns=_between_phases(own.lines))
        for rank, own in traces.items()
    ]


def _between_phases(lines: LinesResult | None) -> int | None:
    if lines is None:
        return None
    return sum(line.own_ns for line in lines.lines if line.thread == "main" and line.phase is None)


def _reduce_trace(attribution: Attribution, rank: int, light: LightColumns | None) -> ReducedRank:
    trace, base_ns = attribution.trace, attribution.trace.clock_base_ns
    own, host = (
        replace(own, start_ns=own.start_ns + base_ns, end_ns=own.end_ns + base_ns)
        for own in divide_own_time(attribution)
    )
    steps = _tabulate_steps(attribution, own, host)
    calls, groups = _tabulate_calls(attribution, steps)
    device = None if trace.measure != "gpu-kernel" or not len(trace.work) else int(trace.work.device[0])
    columns = LightColumns(LightRecord(rank, 0, device=device, source=trace.source, groups=groups), steps, calls)
    if light is not None:
        columns = _complete(columns, light)
    reduced = _add_own_time(columns, own) if len(calls) or len(trace.work) else reduce_columns(columns)
    return reduced if light is None else replace(reduced, light=reduce_columns(light))


def _tabulate_steps(attribution: Attribution, own: OwnTime, host: OwnTime) -> StepColumns:
    trace, base_ns = attribution.trace, attribution.trace.clock_base_ns
    rows = measured_ranges(attribution).get(STEP, empty_ints())
    rows = rows[np.argsort(trace.ranges.start_ns[rows], kind="stable")]
    starts, ends = trace.ranges.start_ns[rows] + base_ns, trace.ranges.end_ns[rows] + base_ns
    begin, end = (own.start_ns[:1], own.end_ns[-1:]) if len(own.start_ns) else np.full((2, 1), base_ns)
    start_ns, end_ns = np.concatenate([begin, starts, ends[-1:]]), np.concatenate([starts[:1], ends, end])
    names = (None, *(trace.names[name] for name in trace.ranges.name[rows].tolist()), *(None for _ in starts[:1]))
    launches = own.cause == CAUSES.index("launch")
    unknown = np.full(len(names), UNKNOWN)
    steps = StepColumns(
        names=names,
        start_ns=start_ns,
        end_ns=end_ns,
        launch_wait_ns=Stretches(own.start_ns[launches], own.end_ns[launches]).within(start_ns, end_ns),
        peak_bytes=unknown,
        sm_mhz=unknown,
        throttle=((),) * len(names),
        phases=_find_phases(trace, start_ns, end_ns),
        gpu_phases=NO_PHASES,
    )
    step, part, time_ns = host.sum_between(_edges_ns(steps))
    phases, number = np.unique([host.part(number)[1] for number in part.tolist()], return_inverse=True)
    return replace(steps, outside_cuda=Phases(tuple(phases.tolist()), step, number, np.zeros_like(time_ns), time_ns))


def _edges_ns(steps: StepColumns) -> Ints:
    """Return what parts the time between steps: where each begins, and where the last one ends.

    What is called after a step and before the next one belongs to the step; what follows the last one does not.
    """
    return np.append(steps.start_ns[steps.named], steps.end_ns[steps.named][-1:])


def _find_phases(trace: Trace, begin_ns: Ints, stop_ns: Ints) -> Phases:
    ranges = trace.ranges
    phase_of = {name: phase_or_data(trace.names[name]) for name in distinct_values(ranges.name).tolist()}
    rows = np.flatnonzero(np.isin(ranges.name, [name for name, phase in phase_of.items() if phase is not None]))
    start_ns, end_ns = ranges.start_ns[rows] + trace.clock_base_ns, ranges.end_ns[rows] + trace.clock_base_ns
    step, at = np.nonzero((start_ns >= begin_ns[:, None]) & (end_ns <= stop_ns[:, None]))
    names, name = np.unique([str(phase_of[number]) for number in ranges.name[rows[at]].tolist()], return_inverse=True)
    order = np.lexsort((name, end_ns[at], start_ns[at], step))
    at = at[order]
    return Phases(tuple(names.tolist()), step[order], name[order], start_ns[at], end_ns[at])


def _tabulate_calls(attribution: Attribution, steps: StepColumns) -> tuple[CallColumns, tuple[Group, ...]]:
    trace, is_on_gpu = attribution.trace, attribution.trace.measure == "gpu-kernel"
    table: Work | Ranges
    if is_on_gpu:
        table, computes = trace.work, ~communication_rows(trace)
        rows = np.flatnonzero(~computes)
        rows = rows[np.lexsort((table.start_ns[rows], table.launch_ns[rows]))]
        called_ns, computing = table.launch_ns[rows], unite(table.start_ns[computes], table.end_ns[computes])
        facts = [_facts_of(attribution, row) for row in rows.tolist()]
    else:
        table, rows = trace.ranges, collective_ranges(trace)
        called_ns, computing = table.start_ns[rows], host_time(trace).computing
        names = [trace.names[name] for name in table.name[rows].tolist()]
        facts = [CollectiveCall(kind_of_collective(name) or "barrier", name.partition(":")[0]) for name in names]
    start_ns, end_ns = table.start_ns[rows], table.end_ns[rows]
    by_key = {(fact.group or "", fact.ranks): fact.dimension for fact in facts}
    groups = tuple(
        Group(number, name, ranks, dimension, None if is_on_gpu else name)
        for number, ((name, ranks), dimension) in enumerate(by_key.items())
    )
    number_of = {(group.name, group.ranks): group.number for group in groups}
    group = np.array([number_of[fact.group or "", fact.ranks] for fact in facts], dtype=np.int64)
    called_ns = called_ns + trace.clock_base_ns
    step = np.searchsorted(_edges_ns(steps), called_ns, side="right")
    names_of_kinds: dict[tuple[str, str | None], int] = {}
    what = [names_of_kinds.setdefault((fact.kind, fact.dtype), len(names_of_kinds)) for fact in facts]
    calls = CallColumns(
        names=tuple(names_of_kinds),
        step=step,
        group=group,
        what=np.array(what, dtype=np.int64),
        bytes=np.array([UNKNOWN if fact.byte_count is None else fact.byte_count for fact in facts], dtype=np.int64),
        sequence=_number_sequences(group, facts, step),
        called_ns=called_ns,
        start_ns=start_ns + trace.clock_base_ns,
        end_ns=end_ns + trace.clock_base_ns,
        hidden_ns=computing.within(start_ns, end_ns),
        exposed_ns=np.full(len(facts), UNKNOWN),
    )
    return calls, groups


def _facts_of(attribution: Attribution, row: int) -> CollectiveCall:
    """Return what the trace says of a kernel, else the name of NCCL's range around the launch, else its own name.

    Where no group is known its stream stands for it.
    """
    trace, work = attribution.trace, attribution.trace.work
    index = -1 if work.collective is None else int(work.collective[row])
    if index >= 0:
        fact = trace.collectives[index]
    else:
        around = int(attribution.work.innermost[row])
        named = None if around == NO_RANGE else kind_of_collective(trace.names[int(trace.ranges.name[around])])
        fact = CollectiveCall(named or kind_of_collective(trace.names[int(work.name[row])]) or "send")
    return fact if fact.group is not None else replace(fact, group=f"stream {work.stream[row]}", ranks=())


def _number_sequences(group: Ints, facts: Sequence[CollectiveCall], step: Ints) -> Ints:
    numbers = np.zeros(len(facts), dtype=np.int64)
    for each in distinct_values(group).tolist():
        rows = np.flatnonzero(group == each)
        known = [number for row in rows.tolist() if (number := facts[row].sequence) is not None]
        first = int((step[rows] == 0).sum()) if (step[rows] > 0).any() else 0
        numbers[rows] = known if len(known) == len(rows) else np.arange(len(rows)) - first
    return numbers


def longer_on_gpu(steps: StepColumns, calls: CallColumns) -> tuple[tuple[Part, ...], Floats]:
    """Return what phases of the measured steps took on the GPU beyond their time on the host, without collectives.

    A phase's collectives are those that the host called in it, for their start on the GPU is not known. What is longer
    than the phase itself was waited for in the next one. Where nobody timed the collectives of a step, what is known of
    them is how long the GPU waited at a backward pass's end.
    """
    host, gpu = steps.phases, steps.gpu_phases
    names = tuple(sorted({*host.names, *gpu.names, BACKWARD}))
    on_host, talking = np.zeros((2, len(steps), len(names)))
    host_name, gpu_name = (
        np.array([names.index(name) for name in phases.names], dtype=np.int64) for phases in (host, gpu)
    )
    on_host[:, host_name] = host.times(len(steps))
    timed = np.flatnonzero((calls.called_ns != UNKNOWN) & (calls.duration_ns != UNKNOWN))
    timed = timed[np.argsort(calls.called_ns[timed], kind="stable")]
    until = np.concatenate([[0], np.cumsum(calls.duration_ns[timed])])
    first, last = (np.searchsorted(calls.called_ns[timed], times) for times in (host.start_ns, host.end_ns))
    np.add.at(talking, (host.step, host_name[host.name]), until[np.maximum(first, last)] - until[first])
    is_timed = np.bincount(calls.step[timed], minlength=len(steps)) > 0
    known = calls.exposed_ns != UNKNOWN
    waited = np.bincount(calls.step[known], calls.exposed_ns[known], minlength=len(steps))
    talking[~is_timed] = 0
    talking[~is_timed, names.index(BACKWARD)] = waited[~is_timed]
    longer, is_there, left = np.zeros(on_host.shape), np.zeros(on_host.shape, dtype=np.bool_), np.zeros(len(steps))
    # The first phase of each step, then the second ones, and so on: what was left waits for the next one.
    place = np.arange(len(gpu.step)) - np.searchsorted(gpu.step, gpu.step)
    for number in range(int(place.max(initial=-1)) + 1):
        rows = np.flatnonzero(place == number)
        step, name, time = gpu.step[rows], gpu_name[gpu.name[rows]], (gpu.end_ns - gpu.start_ns)[rows]
        left[step] += talking[step, name]
        talking[step, name] = 0
        longer[step, name] += np.maximum(time - left[step] - on_host[step, name], 0)
        left[step] = np.maximum(left[step] - time, 0)
        is_there[step, name] = True
    used = np.flatnonzero(is_there[steps.named].any(axis=0))
    return tuple(("kernels", names[at], "") for at in used.tolist()), longer[steps.named][:, used]


def _add_own_time(columns: LightColumns, own: OwnTime) -> ReducedRank:
    """Return the rank with what it did by itself before the ends of its collectives, for the steps that called these.

    Of a rank that calls no collective it is from a step's start to the next one's. The first step is left out unless
    something before it was recorded.
    """
    rank, steps, calls = reduce_columns(columns), columns.steps, columns.calls
    by_end = np.argsort(calls.end_ns, kind="stable")
    if len(by_end):
        cell, part, time_ns = own.sum_between(calls.end_ns[by_end])
        called = by_end[cell]
        step = calls.step[called]
    else:
        step, part, time_ns = own.sum_between(_edges_ns(steps))
        step, part, time_ns = step[step > 0], part[step > 0], time_ns[step > 0]
    if not len(step):
        return rank
    named = steps.named[1:] if len(steps.named) > 1 and step.min() > 0 else steps.named
    kept = np.isin(step, named)
    used, column = np.unique(part[kept], return_inverse=True)
    parts = [own.part(number) for number in used.tolist()]
    times_ns = np.zeros((len(steps), len(parts)))
    np.add.at(times_ns, (step[kept], column), time_ns[kept])
    talks = np.array([cause == "communication" for cause, *_ in parts], dtype=np.bool_)
    alone = sorted(np.flatnonzero(~talks).tolist(), key=parts.__getitem__)
    exact = Account(
        tuple(parts[at] for at in alone),
        times_ns[named][:, alone],
        times_ns[named][:, talks].sum(axis=1),
        is_exact=True,
        sm_mhz=clock_of(steps, named),
    )
    talking = np.flatnonzero(kept)[talks[column]]
    between_ns = _sum_sending(calls, called[talking], time_ns[talking]) if len(by_end) else {}
    return replace(rank, exact=exact, between_ns=between_ns)


def _sum_sending(calls: CallColumns, rows: Ints, time_ns: Ints) -> dict[int, int]:
    is_sent = calls.is_pairwise[rows]
    groups, number = np.unique(calls.group[rows[is_sent]], return_inverse=True)
    sums = np.zeros(len(groups), dtype=np.int64)
    np.add.at(sums, number, time_ns[is_sent])
    return dict(zip(groups.tolist(), sums.tolist(), strict=True))


def _complete(mine: LightColumns, light: LightColumns) -> LightColumns:
    """Return the columns of a trace with what the rank wrote itself: memory, clocks, waits, groups and sizes.

    Groups, kinds and sizes are taken over of collectives in groups whose ranks the trace does not know, where both have
    the same kinds of collectives in every step.
    A group that both know is named by its dimension in a device mesh, which only the rank itself may know. Sends and
    receives of which the trace says no group belong to the only group in which the rank sent or received anything.
    """
    groups, number_of = _join_groups(mine.record, light.record)
    record = replace(mine.record, node=light.record.node, groups=groups)
    number_of_name = {name: number for number, name in enumerate(light.steps.names)}
    theirs = np.array([-1 if name is None else number_of_name.get(name, -1) for name in mine.steps.names])
    if not (theirs >= 0).any():
        return replace(mine, record=record)
    steps = replace(
        mine.steps,
        peak_bytes=np.where(theirs >= 0, light.steps.peak_bytes[theirs], UNKNOWN),
        sm_mhz=np.where(theirs >= 0, light.steps.sm_mhz[theirs], UNKNOWN),
        throttle=tuple(light.steps.throttle[number] if number >= 0 else () for number in theirs.tolist()),
    )
    calls = mine.calls
    known = theirs[calls.step] >= 0
    unnamed = known & np.isin(calls.group, [group.number for group in mine.record.groups if not group.ranks])
    pairs = _pair_calls(mine, light, theirs)
    if pairs is not None:
        return LightColumns(record, steps, _take_over(calls, light.calls, pairs, unnamed, number_of))
    sending = {number_of[number] for number in np.unique(light.calls.group[light.calls.is_pairwise]).tolist()}
    if len(sending) == 1:
        calls = replace(calls, group=np.where(calls.is_pairwise & unnamed, sending.pop(), calls.group))
    return LightColumns(record, steps, calls)


def _pair_calls(mine: LightColumns, light: LightColumns, theirs: Ints) -> tuple[Ints, Ints] | None:
    """None where kinds differ. ``theirs`` is the position there of each of the trace's steps, -1 where it lacks one."""
    counts, their_counts = (np.bincount(rank.calls.step, minlength=max(len(rank.steps), 1)) for rank in (mine, light))
    shared = np.flatnonzero((theirs >= 0) & (counts > 0))
    if not len(shared) or (counts[shared] != their_counts[theirs[shared]]).any():
        return None
    rows = np.flatnonzero(np.isin(mine.calls.step, shared))
    step = mine.calls.step[rows]
    place = rows - np.searchsorted(mine.calls.step, step)
    other = np.searchsorted(light.calls.step, theirs[step]) + place
    kinds = set(zip(mine.calls.what[rows].tolist(), light.calls.what[other].tolist(), strict=True))
    both = [(mine.calls.names[traced][0], light.calls.names[called][0]) for traced, called in kinds]
    # Of a kernel that sends or receives a trace may not say which of the two it does.
    is_alike = all(of == called or (of in P2P and called in (*P2P, *_OF_SENDS)) for of, called in both)
    return (rows, other) if is_alike else None


_OF_SENDS = ("all_to_all", "gather", "scatter")
"""What torch makes of sends and receives, so that NCCL, and a trace of it, knows only these."""


def _take_over(
    calls: CallColumns, theirs: CallColumns, pairs: tuple[Ints, Ints], unnamed: Bools, number_of: Mapping[int, int]
) -> CallColumns:
    rows, other = pairs
    taken, from_theirs = rows[unnamed[rows]], other[unnamed[rows]]
    group, what, exposed_ns = calls.group.copy(), calls.what.copy(), calls.exposed_ns.copy()
    sequence, size = calls.sequence.copy(), calls.bytes.copy()
    exposed_ns[rows] = theirs.exposed_ns[other]
    group[taken] = [number_of[number] for number in theirs.group[from_theirs].tolist()]
    sequence[taken], size[taken] = theirs.sequence[from_theirs], theirs.bytes[from_theirs]
    what[taken] = theirs.what[from_theirs] + len(calls.names)
    names = calls.names + theirs.names
    return replace(calls, names=names, what=what, group=group, sequence=sequence, bytes=size, exposed_ns=exposed_ns)


def _join_groups(record: LightRecord, light: LightRecord) -> tuple[tuple[Group, ...], dict[int, int]]:
    dimension = {(group.name, group.ranks): group.dimension for group in light.groups}
    groups = [
        replace(group, dimension=group.dimension or dimension.get((group.name, group.ranks))) for group in record.groups
    ]
    known = {(group.name, group.ranks): group.number for group in groups if group.ranks}
    number_of = {}
    for group in light.groups:
        number_of[group.number] = known.get((group.name, group.ranks), len(groups))
        if number_of[group.number] == len(groups):
            groups.append(replace(group, number=len(groups)))
    return tuple(groups), number_of


@dataclass(frozen=True)
class ReadRanks:
    """The ranks of one trace, or of some light records; ``lost`` says of a rank why its trace, or all of it, is lost.

    ``recorded_ns`` are the steps of the trace by the time account.
    """

    ranks: tuple[ReducedRank, ...]
    lost: tuple[tuple[int | None, str], ...] = ()
    recorded_ns: tuple[int, ...] = ()


def read_and_reduce(
    light_paths: Mapping[int, Path], open_it: Callable[[], OpenedTrace] | None, only: int | None = None
) -> ReadRanks:
    """Return what ranks hand over; of a trace that cannot be read the ranks' light records stand in.

    ``open_it`` is None if they left light records alone; ``only`` is the one rank of which the trace is, if it is
    known.
    """
    lost: list[tuple[int | None, str]] = []
    light: dict[int, LightColumns] = {}
    for rank, path in light_paths.items():
        try:
            light[rank] = _check_rank(read_light_columns(path), rank, path)
        except ProfkitError as error:
            lost.append((rank, str(error)))
    traced: list[ReducedRank] = []
    recorded_ns: list[int] = []
    try:
        if open_it is not None:
            opened = open_it()
            recorded_ns = opened.account.recorded_steps_ns().tolist()
            traced = reduce_ranks(opened, light)
    except ProfkitError as error:
        unread: list[int | None] = [only] if only is not None else [*light]
        stands_in = "; its light record stands in for the trace"
        lost += [(rank, f"{error}{stands_in if rank in light else ''}") for rank in unread or [None]]
    rest = light.keys() - {rank.record.rank for rank in traced}
    ranks = *traced, *(reduce_columns(columns) for rank, columns in light.items() if rank in rest)
    return ReadRanks(ranks, tuple(lost), tuple(recorded_ns))


def _check_rank(columns: LightColumns, rank: int, path: Path) -> LightColumns:
    record = columns.record
    if record.rank != rank:
        raise RunError(f"{path}: holds rank {record.rank}, not {rank}: a copy, or renamed")
    # torchrun numbers machines in the order in which they join, the directory keeps their --node-rank.
    node = _NODE.fullmatch(path.parent.name)
    return columns if node is None else replace(columns, record=replace(record, node=int(node[1])))
