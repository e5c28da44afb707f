"""Parts of traces: one process taken out of many, several traces made into one, a trace without its first steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from profkit.errors import TraceError
from profkit.trace.columns import (
    NO_LAUNCH,
    Bools,
    Copies,
    Ints,
    Syncs,
    Table,
    Trace,
    Work,
    distinct_values,
    join_tables,
    rows_by_value,
    take_calls,
    take_rows,
)

_NCCL = ("ncclKernel", "ncclDevKernel")

# A process keeps its number within its own trace, and no two traces share one.
_PER_TRACE = 1 << 40


def only_process(trace: Trace, process: int) -> Trace:
    """Return what one process did; what the profiler said of itself stays, for it concerns all."""
    mine = trace.ranges.process == process
    kept = np.cumsum(mine) - 1
    return replace(
        take_calls(trace, trace.calls.process == process),
        work=take_rows(trace.work, trace.work.process == process),
        copies=take_rows(trace.copies, trace.copies.process == process),
        ranges=replace(
            take_rows(trace.ranges, mine),
            payload={int(kept[index]): number for index, number in trace.ranges.payload.items() if mine[index]},
        ),
        process_ids={process: trace.process_ids[process]},
        ranks={one: rank for one, rank in trace.ranks.items() if one == process},
    )


def combine_traces(traces: Sequence[Trace], path: str) -> Trace:
    """Return the traces of several processes, one file each, as one trace.

    Processes and threads get numbers of their own, so that correlation and process ids that two files share stay
    apart. Times are put on the first trace's clock; the files are of one machine.

    Raises:
        TraceError: some measured kernels and some CPU operators.
    """
    first = traces[0]
    strange = next((trace for trace in traces if trace.measure != first.measure), None)
    if strange is not None:
        raise TraceError(
            f"{strange.path}: holds {strange.measure}s and {first.path} {first.measure}s; open one rank alone"
        )
    names: dict[str, int] = {}
    parts: list[Trace] = []
    for number, trace in enumerate(traces):
        threads = sum(_thread_count(part) for part in traces[:number])
        parts.append(_renumbered(trace, names, number * _PER_TRACE, threads, trace.clock_base_ns - first.clock_base_ns))
    offsets = np.cumsum([0, *(len(part.origins.thread) if part.origins else 0 for part in parts)]).tolist()
    called = np.cumsum([0, *(len(part.collectives) for part in parts)]).tolist()
    works = [
        _shift_collectives(_shift_origins(part.work, offset), begin)
        for part, offset, begin in zip(parts, offsets, called, strict=False)
    ]
    calls = join_tables([part.calls for part in parts])
    begun = np.cumsum([0, *(len(part.ranges) for part in parts)]).tolist()
    payload = {
        begin + index: number
        for begin, part in zip(begun, parts, strict=False)
        for index, number in part.ranges.payload.items()
    }
    joined = replace(first, calls=calls, syncs=_join_syncs(parts))
    return replace(
        take_calls(joined, np.argsort(calls.start_ns, kind="stable")),
        path=path,
        product="; ".join(dict.fromkeys(trace.product for trace in traces)),
        names=list(names),
        work=join_tables(works),
        copies=join_tables([part.copies for part in parts]),
        ranges=replace(join_tables([part.ranges for part in parts]), payload=payload),
        origins=join_tables([part.origins for part in parts if part.origins])
        if any(p.origins for p in parts)
        else None,
        thread_names={thread: name for part in parts for thread, name in part.thread_names.items()},
        process_ids={process: pid for part in parts for process, pid in part.process_ids.items()},
        main_threads=frozenset(thread for part in parts for thread in part.main_threads),
        gpus=max((trace.gpus for trace in traces), key=len),
        diagnostics=_each_once(trace.diagnostics for trace in traces),
        has_kernel_table=any(trace.has_kernel_table for trace in traces),
        notes=_each_once(trace.notes for trace in traces),
        ranks={process: rank for part in parts for process, rank in part.ranks.items()},
        collectives=tuple(call for part in parts for call in part.collectives),
    )


def separate_gpus(trace: Trace, rank_of: Mapping[int, int]) -> Trace:
    """Return the trace with a number for each GPU, where several processes call different GPUs by one number.

    Each rank of a job may see one GPU, as 0. NCCL never puts two ranks on one GPU, so processes that each run NCCL's
    kernels on a device of one number have a GPU each: the first rank keeps the number, the others get free ones.
    """
    work, copies, syncs = trace.work, trace.copies, trace.syncs
    is_nccl = np.array([text.startswith(_NCCL) for text in trace.names] or [False], dtype=np.bool_)[work.name]
    used = distinct_values(np.concatenate([work.device, copies.device])).tolist()
    work_device, copy_device = work.device.copy(), copies.device.copy()
    if syncs is not None:
        syncs = replace(syncs, device=syncs.device.copy(), record_device=syncs.record_device.copy())
    for device in used[:]:
        processes = distinct_values(work.process[is_nccl & (work.device == device)]).tolist()
        for process in sorted(processes, key=lambda one: rank_of.get(one, one))[1:]:
            free = next(number for number in range(len(used) + 1) if number not in used)
            used.append(free)
            work_device[(work.process == process) & (work.device == device)] = free
            copy_device[(copies.process == process) & (copies.device == device)] = free
            if syncs is not None:
                own = trace.calls.process[syncs.call] == process
                syncs.device[own & (syncs.device == device)] = free
                syncs.record_device[own & (syncs.record_device == device)] = free
    if np.array_equal(work_device, work.device):
        return trace
    work, copies = replace(work, device=work_device), replace(copies, device=copy_device)
    return replace(trace, work=work, copies=copies, syncs=syncs)


def _join_syncs(parts: Sequence[Trace]) -> Syncs | None:
    begun = np.cumsum([0, *(len(part.calls) for part in parts)]).tolist()
    shifted = [
        replace(syncs, call=syncs.call + begin, record=np.where(syncs.record < 0, syncs.record, syncs.record + begin))
        for part, begin in zip(parts, begun, strict=False)
        if (syncs := part.syncs) is not None
    ]
    return join_tables(shifted) if shifted else None


Item = TypeVar("Item")


def _each_once(groups: Iterable[tuple[Item, ...]]) -> tuple[Item, ...]:
    return tuple(dict.fromkeys(item for group in groups for item in group))


def _renumbered(trace: Trace, names: dict[str, int], processes: int, threads: int, shift_ns: int) -> Trace:
    """Return the trace with its processes and threads moved up, its times shifted, and names from a common table."""
    name = np.array([names.setdefault(text, len(names)) for text in trace.names] or [0], dtype=np.int64)

    def moved(table: Table) -> Table:
        columns: dict[str, Any] = {}
        for field in fields(table):
            column = getattr(table, field.name)
            if field.name in ("start_ns", "end_ns", "launch_ns", "node_ns") and column is not None:
                columns[field.name] = column + shift_ns
            elif field.name == "process":
                columns[field.name] = column + processes
            elif field.name in ("thread", "end_thread", "launch_thread"):
                columns[field.name] = np.where(column < 0, column, column + threads)
            elif field.name in ("name", "domain"):
                columns[field.name] = name[column]
            elif field.name == "operator" and column is not None:
                columns[field.name] = np.where(column < 0, column, name[column])
        return replace(table, **columns)

    return replace(
        trace,
        work=moved(trace.work),
        copies=moved(trace.copies),
        calls=moved(trace.calls),
        ranges=moved(trace.ranges),
        origins=None if trace.origins is None else moved(trace.origins),
        thread_names={thread + threads: text for thread, text in trace.thread_names.items()},
        process_ids={process + processes: pid for process, pid in trace.process_ids.items()},
        main_threads=frozenset(thread + threads for thread in trace.main_threads),
        ranks={process + processes: rank for process, rank in trace.ranks.items()},
    )


def _thread_count(trace: Trace) -> int:
    columns = (trace.work.launch_thread, trace.calls.thread, trace.ranges.thread, trace.ranges.end_thread)
    known = [*trace.thread_names, *trace.main_threads, *(int(column.max()) for column in columns if len(column))]
    if trace.origins is not None and len(trace.origins.thread):
        known.append(int(trace.origins.thread.max()))
    return max(known, default=-1) + 1


def _shift_origins(work: Work, offset: int) -> Work:
    sequence = np.full(len(work), -1, dtype=np.int64) if work.sequence is None else work.sequence
    return replace(work, sequence=np.where(sequence < 0, sequence, sequence + offset))


def _shift_collectives(work: Work, offset: int) -> Work:
    collective = np.full(len(work), -1, dtype=np.int64) if work.collective is None else work.collective
    return replace(work, collective=np.where(collective < 0, collective, collective + offset))


def begin_at(trace: Trace, name: str) -> Trace:
    """Return what each process did from where its first range ``name`` opened.

    Work counts by its launch. A range that was open then begins there. A process without such a range stays as it is.
    """
    ranges = trace.ranges
    opened = np.flatnonzero(np.array([text == name for text in trace.names] or [False], dtype=np.bool_)[ranges.name])
    begin = {process: int(ranges.start_ns[opened[rows]].min()) for process, rows in _by_process(ranges.process, opened)}
    if not begin:
        return trace
    kept = ranges.end_ns > _moments(begin, ranges.process)
    number = np.cumsum(kept) - 1
    left = take_rows(ranges, kept)
    return replace(
        take_calls(trace, trace.calls.start_ns >= _moments(begin, trace.calls.process)),
        work=take_rows(trace.work, _launched_from(trace.work, begin)),
        copies=take_rows(trace.copies, _launched_from(trace.copies, begin)),
        ranges=replace(
            left,
            start_ns=np.maximum(left.start_ns, _moments(begin, left.process)),
            payload={int(number[index]): value for index, value in ranges.payload.items() if kept[index]},
        ),
    )


def _by_process(process: Ints, rows: Ints) -> list[tuple[int, Ints]]:
    return list(rows_by_value(process[rows]).items())


def _moments(begin: dict[int, int], process: Ints) -> Ints:
    found = np.full(len(process), np.iinfo(np.int64).min, dtype=np.int64)
    for number, moment in begin.items():
        found[process == number] = moment
    return found


def _launched_from(rows: Work | Copies, begin: dict[int, int]) -> Bools:
    launched_ns = np.where(rows.launch_thread == NO_LAUNCH, rows.start_ns, rows.launch_ns)
    kept: Bools = launched_ns >= _moments(begin, rows.process)
    return kept
