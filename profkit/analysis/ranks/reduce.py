"""What one rank hands over so that it can be compared: all that is known of it without the others, in little memory.

A full trace becomes the same columns as a light record, so that one analysis compares ranks from either; and it says
what the rank did by itself in each step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from profkit.analysis.intervals import Stretches, unite
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.ranks.costs import Account, StepParts, clock_of, longer_on_gpu
from profkit.analysis.ranks.matching import Calls, tabulate_calls
from profkit.analysis.ranks.own_time import (
    CAUSES,
    OwnTime,
    collective_ranges,
    divide_own_time,
    host_time,
    phase_or_data,
)
from profkit.analysis.time_account.gpu_time import communication_rows
from profkit.analysis.time_account.steps import measured_ranges
from profkit.errors import ProfkitError, RunError
from profkit.names import STEP, kind_of_collective
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
from profkit.trace.columns import Bools, CollectiveCall, Ints, Trace, distinct_values, empty_ints
from profkit.trace.nesting import NO_RANGE

_NODE = re.compile(r"node(\d+)")
"""The name of a machine's run within that of its job."""


@dataclass(frozen=True, eq=False)
class ReducedRank:
    """A rank's record, whose steps stand in ``steps``, and its collectives in ``calls``: the number of their group →
    columns; and so does ``sent``, what it sends to and receives from one other rank.

    ``exact`` is what it did by its full trace; of a rank without one, None. ``on_gpu`` is what phases of each measured
    step took longer on its GPU. ``between_ns`` is what its sends and receives in a group took in the steps of ``exact``
    that nothing hid.
    """

    record: LightRecord
    steps: StepColumns
    calls: Mapping[int, Calls]
    sent: Mapping[int, Calls]
    on_gpu: StepParts
    exact: Account | None = None
    between_ns: Mapping[int, int] = field(default_factory=dict)


def reduce_columns(rank: LightColumns) -> ReducedRank:
    """Return what a rank hands over of its columns."""
    calls, sent = tabulate_calls(rank)
    return ReducedRank(rank.record, rank.steps, calls, sent, longer_on_gpu(rank.steps, rank.calls))


def reduce_ranks(opened: OpenedTrace, light: Mapping[int, LightColumns]) -> list[ReducedRank]:
    """Return what the trace says of each of its ranks; of a trace that names none, of rank 0.

    What the ranks wrote themselves completes what a trace does not say: process groups, bytes, clocks.

    Raises:
        TraceError: the trace's times are impossible.
    """
    if not opened.ranks.members or opened.rank is not None:
        rank = opened.rank or 0
        return [_reduce_trace(opened.attribution, rank, light.get(rank))]
    return [_reduce_trace(opened.of_rank(rank).attribution, rank, light.get(rank)) for rank in opened.ranks.numbers]


def _reduce_trace(attribution: Attribution, rank: int, light: LightColumns | None) -> ReducedRank:
    trace = attribution.trace
    own, host = divide_own_time(attribution)
    steps = _tabulate_steps(attribution, own, host)
    calls, groups = _tabulate_calls(attribution, steps)
    record = LightRecord(
        rank=rank,
        world_size=0,
        device=None if trace.measure != "gpu-kernel" or not len(trace.work) else int(trace.work.device[0]),
        source=trace.source,
        clock_base_ns=trace.clock_base_ns,
        groups=groups,
    )
    columns = LightColumns(record, steps, calls)
    if light is not None:
        columns = _complete(columns, light)
    return _add_own_time(columns, own) if len(calls.step) or len(trace.work) else reduce_columns(columns)


def _tabulate_steps(attribution: Attribution, own: OwnTime, host: OwnTime) -> StepColumns:
    """Return the steps, and what ran before the first and after the last as steps without a name."""
    trace = attribution.trace
    rows = measured_ranges(attribution).get(STEP, empty_ints())
    rows = rows[np.argsort(trace.ranges.start_ns[rows], kind="stable")]
    starts, ends = trace.ranges.start_ns[rows], trace.ranges.end_ns[rows]
    begin, end = (own.start_ns[:1], own.end_ns[-1:]) if len(own.start_ns) else np.zeros((2, 1), dtype=np.int64)
    start_ns, end_ns = np.concatenate([begin, starts, ends[-1:]]), np.concatenate([starts[:1], ends, end])
    names = (None, *(trace.names[name] for name in trace.ranges.name[rows].tolist()), *(None for _ in starts[:1]))
    launches = own.cause == CAUSES.index("launch")
    idle = Stretches(own.start_ns[launches], own.end_ns[launches])
    unknown = np.full(len(names), UNKNOWN)
    steps = StepColumns(
        names=names,
        start_ns=start_ns,
        end_ns=end_ns,
        launch_wait_ns=idle.within(start_ns, end_ns),
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
    start_ns, end_ns = ranges.start_ns[rows], ranges.end_ns[rows]
    step, at = np.nonzero((start_ns >= begin_ns[:, None]) & (end_ns <= stop_ns[:, None]))
    names, name = np.unique([str(phase_of[number]) for number in ranges.name[rows[at]].tolist()], return_inverse=True)
    start_ns, end_ns = start_ns[at] - begin_ns[step], end_ns[at] - begin_ns[step]
    order = np.lexsort((name, end_ns, start_ns, step))
    return Phases(tuple(names.tolist()), step[order], name[order], start_ns[order], end_ns[order])


_Key = tuple[str, tuple[int, ...]]
"""The name and the ranks of a process group."""


@dataclass(frozen=True, eq=False)
class _Recorded:
    """Collectives as a trace has them, in the order in which they were called; ``busy`` is when something computed."""

    called_ns: Ints
    start_ns: Ints
    end_ns: Ints
    facts: list[CollectiveCall]
    groups: list[_Key]
    busy: Stretches


def _find_kernels(attribution: Attribution) -> _Recorded:
    trace, work = attribution.trace, attribution.trace.work
    computing = ~communication_rows(trace)
    rows = np.flatnonzero(~computing)
    rows = rows[np.lexsort((work.start_ns[rows], work.launch_ns[rows]))]
    facts: list[CollectiveCall] = []
    groups: list[_Key] = []
    for row in rows.tolist():
        index = -1 if work.collective is None else int(work.collective[row])
        facts.append(trace.collectives[index] if index >= 0 else _guess_kind(attribution, row))
        group = facts[-1].group
        groups.append((f"stream {work.stream[row]}", ()) if group is None else (group, facts[-1].ranks))
    busy = unite(work.start_ns[computing], work.end_ns[computing])
    return _Recorded(work.launch_ns[rows], work.start_ns[rows], work.end_ns[rows], facts, groups, busy)


def _find_ranges(trace: Trace) -> _Recorded:
    rows = collective_ranges(trace)
    start_ns, names = trace.ranges.start_ns[rows], [trace.names[name] for name in trace.ranges.name[rows].tolist()]
    facts = [CollectiveCall(kind_of_collective(name) or "barrier") for name in names]
    groups: list[_Key] = [(name.partition(":")[0], ()) for name in names]
    return _Recorded(start_ns, start_ns, trace.ranges.end_ns[rows], facts, groups, host_time(trace).computing)


def _tabulate_calls(attribution: Attribution, steps: StepColumns) -> tuple[CallColumns, tuple[Group, ...]]:
    is_on_gpu = attribution.trace.measure == "gpu-kernel"
    found = _find_kernels(attribution) if is_on_gpu else _find_ranges(attribution.trace)
    facts, numbers = found.facts, {key: number for number, key in enumerate(dict.fromkeys(found.groups))}
    dimension = dict(zip(found.groups, (fact.dimension for fact in facts), strict=True))
    groups = tuple(
        Group(number, key[0], key[1], dimension[key], None if is_on_gpu else key[0]) for key, number in numbers.items()
    )
    group = np.array([numbers[key] for key in found.groups], dtype=np.int64)
    step = np.searchsorted(_edges_ns(steps), found.called_ns, side="right")
    begin_ns = steps.start_ns[step]
    pairs, what = _number_names((fact.kind, fact.dtype) for fact in facts)
    calls = CallColumns(
        names=pairs,
        step=step,
        group=group,
        what=what,
        bytes=np.array([UNKNOWN if fact.byte_count is None else fact.byte_count for fact in facts], dtype=np.int64),
        sequence=_number_sequences(group, facts, step),
        called_ns=found.called_ns - begin_ns,
        start_ns=found.start_ns - begin_ns,
        end_ns=found.end_ns - begin_ns,
        hidden_ns=found.busy.within(found.start_ns, found.end_ns),
        exposed_ns=np.full(len(facts), UNKNOWN),
    )
    return calls, groups


def _guess_kind(attribution: Attribution, row: int) -> CollectiveCall:
    """Return what the name of NCCL's range around the launch says of a kernel, else its own name."""
    trace = attribution.trace
    around = int(attribution.work.innermost[row])
    named = None if around == NO_RANGE else kind_of_collective(trace.names[int(trace.ranges.name[around])])
    return CollectiveCall(named or kind_of_collective(trace.names[int(trace.work.name[row])]) or "send")


def _number_names(pairs: Iterable[tuple[str, str | None]]) -> tuple[tuple[tuple[str, str | None], ...], Ints]:
    names: dict[tuple[str, str | None], int] = {}
    what = np.array([names.setdefault(pair, len(names)) for pair in pairs], dtype=np.int64)
    return tuple(names), what


def _number_sequences(group: Ints, facts: Sequence[CollectiveCall], step: Ints) -> Ints:
    """Return the sequence numbers; where the trace has none, counted from the first of a measured step."""
    numbers = np.zeros(len(facts), dtype=np.int64)
    for each in distinct_values(group).tolist():
        rows = np.flatnonzero(group == each)
        known = [number for row in rows.tolist() if (number := facts[row].sequence) is not None]
        first = int((step[rows] == 0).sum()) if (step[rows] > 0).any() else 0
        numbers[rows] = known if len(known) == len(rows) else np.arange(len(rows)) - first
    return numbers


def _add_own_time(columns: LightColumns, own: OwnTime) -> ReducedRank:
    """Return the rank with what it did by itself before the ends of its collectives, for the steps that called these.

    Of a rank that calls no collective it is from a step's start to the next one's. The first step is left out unless
    something before it was recorded.
    """
    rank, steps, calls = reduce_columns(columns), columns.steps, columns.calls
    ends_ns = steps.start_ns[calls.step] + calls.end_ns
    by_end = np.argsort(ends_ns, kind="stable")
    if len(by_end):
        cell, part, time_ns = own.sum_between(ends_ns[by_end])
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
    did = StepParts(tuple(parts[at] for at in alone), times_ns[named][:, alone])
    exposed_ns = times_ns[named][:, talks].sum(axis=1)
    exact = Account(rank.record.rank, did, exposed_ns, is_exact=True, sm_mhz=clock_of(steps, named))
    talking = np.flatnonzero(kept)[talks[column]]
    between_ns = _sum_sending(calls, called[talking], time_ns[talking]) if len(by_end) else {}
    return replace(rank, exact=exact, between_ns=between_ns)


def _sum_sending(calls: CallColumns, rows: Ints, time_ns: Ints) -> dict[int, int]:
    """Return by group what sends and receives took of these times, each spent in the collective of that row."""
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
    """Return the collectives of a trace and those in the light record that they are; None where kinds differ.

    ``theirs`` is the position there of each step in the trace, -1 of those that it does not hold.
    """
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
    """Return collectives with the waits of those that they are paired with, and in ``unnamed`` groups with all else."""
    rows, other = pairs
    taken, from_theirs = rows[unnamed[rows]], other[unnamed[rows]]
    group, sequence, size, exposed_ns = (
        column.copy() for column in (calls.group, calls.sequence, calls.bytes, calls.exposed_ns)
    )
    exposed_ns[rows] = theirs.exposed_ns[other]
    group[taken] = [number_of[number] for number in theirs.group[from_theirs].tolist()]
    sequence[taken], size[taken] = theirs.sequence[from_theirs], theirs.bytes[from_theirs]
    pair = [calls.names[number] for number in calls.what.tolist()]
    for row, number in zip(taken.tolist(), theirs.what[from_theirs].tolist(), strict=True):
        pair[row] = theirs.names[number]
    names, what = _number_names(pair)
    return replace(calls, names=names, what=what, group=group, sequence=sequence, bytes=size, exposed_ns=exposed_ns)


def _join_groups(record: LightRecord, light: LightRecord) -> tuple[tuple[Group, ...], dict[int, int]]:
    """Return the groups of both, each once and with its dimension; and number in the light record → number there."""
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

    ``written`` are the light records of ranks that also left a trace, ``recorded_ns`` its steps by the time account.
    """

    ranks: tuple[ReducedRank, ...]
    lost: tuple[tuple[int | None, str], ...] = ()
    written: tuple[ReducedRank, ...] = ()
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
    written = {rank: reduce_columns(columns) for rank, columns in light.items()}
    if open_it is None:
        return ReadRanks(tuple(written.values()), tuple(lost))
    traced: dict[int, ReducedRank] = {}
    recorded_ns: list[int] = []
    try:
        opened = open_it()
        recorded_ns = opened.account.recorded_steps_ns().tolist()
        traced = {rank.record.rank: rank for rank in reduce_ranks(opened, light)}
    except ProfkitError as error:
        unread: list[int | None] = [only] if only is not None else [*light]
        stands_in = "; its light record stands in for the trace"
        lost += [(rank, f"{error}{stands_in if rank in light else ''}") for rank in unread or [None]]
    return ReadRanks(tuple((written | traced).values()), tuple(lost), tuple(written.values()), tuple(recorded_ns))


def _check_rank(columns: LightColumns, rank: int, path: Path) -> LightColumns:
    """Return the columns, their record on the machine that its directory names."""
    record = columns.record
    if record.rank != rank:
        raise RunError(f"{path}: holds rank {record.rank}, not {rank}: a copy, or renamed")
    # torchrun numbers machines in the order in which they join, the directory keeps their --node-rank.
    node = _NODE.fullmatch(path.parent.name)
    return columns if node is None else replace(columns, record=replace(record, node=int(node[1])))
