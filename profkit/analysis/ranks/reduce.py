"""What one rank hands over so that it can be compared: all that is known of it without the others, in little memory.

A full trace is first reduced to the form of a light record, so that one analysis compares ranks from either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from profkit.analysis.intervals import Stretches, unite
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.ranks.costs import Account, StepParts, exact_account, longer_on_gpu
from profkit.analysis.ranks.matching import Calls, tabulate_calls
from profkit.analysis.ranks.own_time import OwnTime, collective_ranges, divide_own_time, host_time, phase_or_data
from profkit.analysis.time_account.gpu_time import communication_rows
from profkit.analysis.time_account.steps import measured_ranges
from profkit.errors import ProfkitError, RunError
from profkit.names import STEP, kind_of_collective
from profkit.run.light_columns import LightColumns, StepColumns, columns_of, read_light, read_light_columns
from profkit.run.light_record import CAUSES, NO_COLLECTIVE, P2P, Collectives, Group, LightRecord, StepRecord
from profkit.trace.columns import CollectiveCall, Ints, distinct_values, empty_ints
from profkit.trace.nesting import NO_RANGE

_NODE = re.compile(r"node(\d+)")
"""The name of a machine's run within that of its job."""


@dataclass(frozen=True, eq=False)
class _Calls:
    called_ns: Ints
    start_ns: Ints
    end_ns: Ints
    hidden_ns: Ints
    group: Ints
    facts: list[CollectiveCall]

    def __len__(self) -> int:
        return len(self.called_ns)


def reduce_rank(opened: OpenedTrace, rank: int, light: LightRecord | None = None) -> LightRecord:
    """Return what a rank's trace says, as a light record.

    Args:
        opened: the trace, limited to that rank.
        rank: its number.
        light: what the rank wrote itself; it completes what a trace does not say: process groups, bytes, clocks.

    Raises:
        TraceError: the trace's times are impossible.
    """
    attribution = opened.attribution
    trace = attribution.trace
    own, host = divide_own_time(attribution)
    calls, groups = _find_calls(attribution)
    steps = measured_ranges(attribution).get(STEP, empty_ints())
    steps = steps[np.argsort(trace.ranges.start_ns[steps], kind="stable")]
    record = LightRecord(
        rank=rank,
        world_size=0,
        node=0 if light is None else light.node,
        device=None if trace.measure != "gpu-kernel" or not len(trace.work) else int(trace.work.device[0]),
        source=trace.source,
        clock_base_ns=trace.clock_base_ns,
        groups=groups,
        steps=tuple(_build_steps(attribution, own, host, calls, steps)),
    )
    return record if light is None else _complete(record, light)


def reduce_ranks(opened: OpenedTrace, light: Mapping[int, LightRecord]) -> list[LightRecord]:
    """Return what the trace says of each of its ranks; of a trace that names none, of rank 0.

    Raises:
        TraceError: the trace's times are impossible.
    """
    if not opened.ranks.members or opened.rank is not None:
        rank = opened.rank or 0
        return [reduce_rank(opened, rank, light.get(rank))]
    return [reduce_rank(opened.of_rank(rank), rank, light.get(rank)) for rank in opened.ranks.numbers]


def _find_calls(attribution: Attribution) -> tuple[_Calls, tuple[Group, ...]]:
    trace = attribution.trace
    work = trace.work
    computing = ~communication_rows(trace)
    if trace.measure == "gpu-kernel":
        rows = np.flatnonzero(~computing)
        rows = rows[np.lexsort((work.start_ns[rows], work.launch_ns[rows]))]
        columns = (work.launch_ns[rows], work.start_ns[rows], work.end_ns[rows])
        facts, keys = [], []
        for row in rows.tolist():
            index = -1 if work.collective is None else int(work.collective[row])
            fact = trace.collectives[index] if index >= 0 else _guess_kind(attribution, row)
            facts.append(fact)
            keys.append((fact.group, fact.ranks) if fact.group is not None else (f"stream {work.stream[row]}", ()))
        busy = unite(work.start_ns[computing], work.end_ns[computing])
    else:
        rows = collective_ranges(trace)
        columns = (trace.ranges.start_ns[rows], trace.ranges.start_ns[rows], trace.ranges.end_ns[rows])
        names = [trace.names[name] for name in trace.ranges.name[rows].tolist()]
        facts = [CollectiveCall(kind_of_collective(name) or "barrier") for name in names]
        keys = [(name.partition(":")[0], ()) for name in names]
        busy = host_time(trace).computing
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    dimension = dict(zip(keys, (fact.dimension for fact in facts), strict=True))
    groups = tuple(
        Group(number, key[0], key[1], dimension[key], None if trace.measure == "gpu-kernel" else key[0])
        for key, number in numbers.items()
    )
    group = np.array([numbers[key] for key in keys], dtype=np.int64)
    return _Calls(*columns, busy.within(columns[1], columns[2]), group, facts), groups


def _guess_kind(attribution: Attribution, row: int) -> CollectiveCall:
    """Return what the name of NCCL's range around the launch says of a kernel, else its own name."""
    trace = attribution.trace
    around = int(attribution.work.innermost[row])
    named = None if around == NO_RANGE else kind_of_collective(trace.names[int(trace.ranges.name[around])])
    return CollectiveCall(named or kind_of_collective(trace.names[int(trace.work.name[row])]) or "send")


def _build_steps(attribution: Attribution, own: OwnTime, host: OwnTime, calls: _Calls, steps: Ints) -> list[StepRecord]:
    """Return the steps, and what ran before the first and after the last as steps without a name."""
    trace = attribution.trace
    begin, end = (int(own.start_ns[0]), int(own.end_ns[-1])) if len(own.start_ns) else (0, 0)
    starts, ends = trace.ranges.start_ns[steps].tolist(), trace.ranges.end_ns[steps].tolist()
    names: list[str | None] = [trace.names[name] for name in trace.ranges.name[steps].tolist()]
    spans = list(zip(names, starts, ends, strict=True))
    # What is called after a step and before the next one belongs to the step; what follows the last one does not.
    edges = [*starts, ends[-1]] if spans else []
    spans = [(None, begin, starts[0]), *spans, (None, ends[-1], end)] if spans else [(None, begin, end)]
    step_of = np.searchsorted(np.array(edges, dtype=np.int64), calls.called_ns, side="right")
    outside = host.sum_between(np.array(edges, dtype=np.int64))
    alone = own.sum_between(np.array(edges, dtype=np.int64)) if len(trace.work) and not len(calls) else {}
    by_end = np.argsort(calls.end_ns, kind="stable")
    since = {int(by_end[cell]): parts for cell, parts in own.sum_between(calls.end_ns[by_end]).items()}
    sequence = _number_sequences(calls, step_of)
    rows_of = [np.flatnonzero(step_of == number) for number in range(len(spans))]
    records = []
    for number, ((name, start, stop), rows) in enumerate(zip(spans, rows_of, strict=True)):
        if name is None and not len(rows):
            continue
        position = {row: at for at, row in enumerate(rows.tolist())}
        records.append(
            replace(
                _describe_step(attribution, own, start, stop),
                name=name,
                collectives=_columns(calls, sequence, rows, start),
                since=tuple((position[row], *rest) for row in rows.tolist() for rest in since.get(row, ()))
                + tuple((NO_COLLECTIVE, *rest) for rest in alone.get(number, ())),
                outside_cuda=tuple(part[1:] for part in outside.get(number, ())),
            )
        )
    return records


def _number_sequences(calls: _Calls, step_of: Ints) -> list[int]:
    """Return the sequence numbers; where the trace has none, counted from the first of a measured step."""
    numbers = [0] * len(calls)
    for group in distinct_values(calls.group).tolist():
        rows = np.flatnonzero(calls.group == group)
        known = [calls.facts[row].sequence for row in rows.tolist()]
        first = int((step_of[rows] == 0).sum()) if (step_of[rows] > 0).any() else 0
        for at, (row, number) in enumerate(zip(rows.tolist(), known, strict=True)):
            numbers[row] = at - first if None in known or number is None else number
    return numbers


def _columns(calls: _Calls, sequence: list[int], rows: Ints, begin: int) -> Collectives:
    facts = [calls.facts[row] for row in rows.tolist()]
    return Collectives(
        group=calls.group[rows].tolist(),
        sequence=[sequence[row] for row in rows.tolist()],
        kind=[fact.kind for fact in facts],
        dtype=[fact.dtype for fact in facts],
        bytes=[fact.byte_count for fact in facts],
        called_ns=(calls.called_ns[rows] - begin).tolist(),
        start_ns=(calls.start_ns[rows] - begin).tolist(),
        end_ns=(calls.end_ns[rows] - begin).tolist(),
        hidden_ns=calls.hidden_ns[rows].tolist(),
        exposed_ns=[None] * len(rows),
    )


def _describe_step(attribution: Attribution, own: OwnTime, begin: int, end: int) -> StepRecord:
    trace = attribution.trace
    ranges = trace.ranges
    inside = (ranges.start_ns >= begin) & (ranges.end_ns <= end)
    distinct = distinct_values(ranges.name[inside]).tolist()
    wanted = {i: phase for i in distinct if (phase := phase_or_data(trace.names[i])) is not None}
    rows = np.flatnonzero(inside & np.isin(ranges.name, list(wanted)))
    phases = sorted(
        (int(ranges.start_ns[row]) - begin, int(ranges.end_ns[row]) - begin, wanted[int(ranges.name[row])])
        for row in rows.tolist()
    )
    window = np.array([begin]), np.array([end])
    launched = (own.cause == CAUSES.index("launch")) & (own.start_ns < end) & (own.end_ns > begin)
    idle = Stretches(own.start_ns[launched], own.end_ns[launched])
    return StepRecord(
        None,
        begin,
        end,
        phases=tuple((name, start, stop) for start, stop, name in phases),
        launch_wait_ns=int(idle.within(*window)[0]),
    )


def _complete(record: LightRecord, light: LightRecord) -> LightRecord:
    """Return the record with what the rank wrote itself: memory, clocks, waits, the groups and sizes of collectives.

    Groups, kinds and sizes are taken over of collectives in groups whose ranks the trace does not know, where both have
    the same kinds of collectives in every step.
    A group that both know is named by its dimension in a device mesh, which only the rank itself may know. Sends and
    receives of which the trace says no group belong to the only group in which the rank sent or received anything.
    """
    written = {step.name: step for step in light.steps if step.name is not None}
    shared = [step.name for step in record.steps if step.name in written and len(step.collectives)]
    mine = {step.name: step.collectives for step in record.steps}
    fits = bool(shared) and all(_kinds_agree(mine[name].kind, written[name].collectives.kind) for name in shared)
    groups, number_of = _join_groups(record, light)
    all_calls = [
        (group, kind)
        for step in light.steps
        for group, kind in zip(step.collectives.group, step.collectives.kind, strict=True)
    ]
    sending = {number_of[group] for group, kind in all_calls if kind in P2P}
    unnamed = {group.number for group in record.groups if not group.ranks}
    steps = []
    for step in record.steps:
        theirs = None if step.name is None else written.get(step.name)
        if theirs is None:
            steps.append(step)
            continue
        noted = {name: getattr(theirs, name) for name in ("peak_bytes", "reserved_bytes", "sm_mhz", "throttle")}
        calls = step.collectives
        if fits:
            called = theirs.collectives
            taken: dict[str, list[Any]] = {"exposed_ns": called.exposed_ns}
            own = {name: getattr(called, name) for name in ("sequence", "kind", "dtype", "bytes")}
            for name, column in {**own, "group": [number_of[number] for number in called.group]}.items():
                rows = zip(calls.group, getattr(calls, name), column, strict=True)
                taken[name] = [said if group in unnamed else known for group, known, said in rows]
            calls = replace(calls, **taken)
        elif len(sending) == 1:
            (only,) = sending
            pairs = zip(calls.group, calls.kind, strict=True)
            calls = replace(
                calls, group=[only if kind in P2P and number in unnamed else number for number, kind in pairs]
            )
        steps.append(replace(step, **noted, collectives=calls))
    return replace(record, node=light.node, groups=groups, steps=tuple(steps))


_OF_SENDS = ("all_to_all", "gather", "scatter")
"""What torch makes of sends and receives, so that NCCL, and a trace of it, knows only these."""


def _kinds_agree(traced: Sequence[str], called: Sequence[str]) -> bool:
    """Return whether these kinds in a trace are those that torch called, one by one.

    Of a kernel that sends or receives a trace may not say which of the two it does.
    """
    return len(traced) == len(called) and all(
        known == other or (known in P2P and other in (*P2P, *_OF_SENDS))
        for known, other in zip(traced, called, strict=True)
    )


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


@dataclass(frozen=True, eq=False)
class ReducedRank:
    """A rank's record, whose steps stand in ``steps``, and its collectives in ``calls``: the number of their group →
    columns; and so does ``sent``, what it sends to and receives from one other rank.

    ``exact`` is what it did by its full trace; of a rank without one, None. ``on_gpu`` is what phases of each measured
    step took longer on its GPU. ``between_ns`` is what its sends and receives in a group took in its last steps, as
    many as ``exact`` has, that nothing hid.
    """

    record: LightRecord
    steps: StepColumns
    calls: Mapping[int, Calls]
    sent: Mapping[int, Calls]
    exact: Account | None
    on_gpu: StepParts
    between_ns: Mapping[int, int]


def reduce_columns(rank: LightColumns) -> ReducedRank:
    """Return what a rank hands over of its record."""
    exact = exact_account(rank)
    calls, sent = tabulate_calls(rank)
    return ReducedRank(
        record=rank.record,
        steps=rank.steps,
        calls=calls,
        sent=sent,
        exact=exact,
        on_gpu=longer_on_gpu(rank.steps, rank.calls),
        between_ns={} if exact is None else _time_sending(rank, len(exact.own)),
    )


def _time_sending(rank: LightColumns, steps: int) -> dict[int, int]:
    since, calls = rank.since, rank.calls
    talks = np.array([cause == "communication" for cause, *_ in since.parts], dtype=np.bool_)[since.part]
    rows = np.flatnonzero(talks & (since.row != NO_COLLECTIVE) & np.isin(since.step, rank.steps.named[-steps:]))
    called = np.searchsorted(calls.step, since.step[rows]) + since.row[rows]
    is_sent = np.array([kind in P2P for kind, _ in calls.names], dtype=np.bool_)[calls.what[called]]
    groups, number = np.unique(calls.group[called[is_sent]], return_inverse=True)
    sums = np.zeros(len(groups), dtype=np.int64)
    np.add.at(sums, number, since.time_ns[rows[is_sent]])
    return dict(zip(groups.tolist(), sums.tolist(), strict=True))


def make_comparable(ranks: Sequence[ReducedRank], written: Mapping[int, ReducedRank]) -> list[ReducedRank]:
    """Return the ranks so that their steps can be compared: where only some left full traces, all by light records.

    What a trace knows of a step and what a light record knows are not the same. Light records have those steps alone
    that are in a trace: the third step of a trace is another than the third of theirs. They keep the trace's source,
    for a profiler slowed these ranks. So too with traces without collectives that light records know, and with traces
    of ranges alone, as nsys leaves them without a GPU.

    Args:
        ranks: by its trace each rank that has one, else by its light record.
        written: the light records of ranks with a trace.
    """
    traced = [rank for rank in ranks if rank.record.source != "light"]
    is_known = any(rank.exact is not None and (rank.calls or rank.sent) for rank in traced)
    is_alike = len(traced) == len(ranks) and (is_known or not any(rank.calls for rank in written.values()))
    if is_alike or not traced:
        return list(ranks)
    named = {name for rank in traced for name in rank.steps.names if name is not None}
    sources = [rank.record.source for rank in ranks]
    limited = [_keep_steps(written.get(rank.record.rank, rank), named) for rank in ranks]
    return [replace(rank, record=replace(rank.record, source=of)) for rank, of in zip(limited, sources, strict=True)]


def _keep_steps(rank: ReducedRank, named: Set[str]) -> ReducedRank:
    kept = [at for at, name in enumerate(rank.steps.names) if name in named]
    numbers = np.full(len(rank.steps), -1)
    numbers[kept] = np.arange(len(kept))
    calls, sent = (
        {group: some for group, whole in columns.items() if len(some := whole.of_steps(numbers))}
        for columns in (rank.calls, rank.sent)
    )
    return replace(
        rank,
        steps=rank.steps.only(kept),
        calls=calls,
        sent=sent,
        on_gpu=rank.on_gpu.within(numbers[rank.steps.named] >= 0),
    )


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

    Args:
        light_paths: their light records.
        open_it: opens their trace; None if they left light records alone.
        only: the one rank of which the trace is, if it is known.
    """
    lost: list[tuple[int | None, str]] = []
    ranks: dict[int, ReducedRank] = {}
    light: dict[int, LightRecord] = {}
    written: dict[int, ReducedRank] = {}
    recorded_ns: list[int] = []
    for rank, path in light_paths.items():
        try:
            if open_it is None:
                ranks[rank] = reduce_columns(_check_rank(read_light_columns(path), rank, path))
            else:
                columns, record = read_light(path)
                columns = _check_rank(columns, rank, path)
                written[rank] = reduce_columns(columns)
                light[rank] = replace(columns.record, steps=record.steps)
        except ProfkitError as error:
            lost.append((rank, str(error)))
    if open_it is not None:
        try:
            opened = open_it()
            recorded_ns = opened.account.recorded_steps_ns().tolist()
            for record in reduce_ranks(opened, light):
                ranks[record.rank] = reduce_columns(columns_of(record))
        except ProfkitError as error:
            unread: list[int | None] = [only] if only is not None else [*light]
            stands_in = "; its light record stands in for the trace"
            lost += [(rank, f"{error}{stands_in if rank in light else ''}") for rank in unread or [None]]
    return ReadRanks(tuple((written | ranks).values()), tuple(lost), tuple(written.values()), tuple(recorded_ns))


def _check_rank(columns: LightColumns, rank: int, path: Path) -> LightColumns:
    """Return the columns, their record on the machine that its directory names.

    Raises:
        RunError: it is another rank's.
    """
    record = columns.record
    if record.rank != rank:
        raise RunError(f"{path}: holds rank {record.rank}, not {rank}: a copy, or renamed")
    # torchrun numbers machines in the order in which they join, the directory keeps their --node-rank.
    node = _NODE.fullmatch(path.parent.name)
    return columns if node is None else replace(columns, record=replace(record, node=int(node[1])))
