"""Parts of traces: one process taken out of many, several traces made into one, a trace without its first steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from profkit.errors import TraceError
from profkit.trace.columns import (
    NO_LAUNCH,
    Bools,
    Copies,
    Ints,
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

_COUNTED = {
    **dict.fromkeys(("start_ns", "end_ns", "launch_ns"), "ns"),
    "process": "process",
    **dict.fromkeys(("thread", "end_thread", "launch_thread"), "thread"),
    "sequence": "origin",
    "collective": "collective",
    **dict.fromkeys(("call", "record"), "call"),
}
"""Column → what its numbers count: they go on where those of the trace before end."""
_NAMED = ("name", "domain", "operator")

Item = TypeVar("Item")


def only_process(trace: Trace, process: int) -> Trace:
    """Return what one process did; what the profiler said of itself stays, for it concerns all."""
    tables = (trace.calls, trace.work, trace.copies, trace.ranges)
    return replace(
        _select(trace, *(table.process == process for table in tables)),
        process_ids={process: trace.process_ids[process]},
        ranks={other: rank for other, rank in trace.ranks.items() if other == process},
    )


def _select(trace: Trace, calls: Bools, work: Bools, copies: Bools, ranges: Bools) -> Trace:
    return replace(
        take_calls(trace, calls),
        work=take_rows(trace.work, work),
        copies=take_rows(trace.copies, copies),
        ranges=take_rows(trace.ranges, ranges),
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
    begun = Counter[str]()
    for trace in traces:
        begun["ns"] = trace.clock_base_ns - first.clock_base_ns
        parts.append(_renumber(trace, names, begun))
        begun["process"] += _PER_TRACE
        begun["thread"] += _count_threads(trace)
        begun["origin"] += len(trace.origins or ())
        begun["collective"] += len(trace.collectives)
        begun["call"] += len(trace.calls)
    calls = join_tables([part.calls for part in parts])
    syncs = [part.syncs for part in parts if part.syncs is not None]
    origins = [part.origins for part in parts if part.origins is not None]
    joined = replace(first, calls=calls, syncs=join_tables(syncs) if syncs else None)
    return replace(
        take_calls(joined, np.argsort(calls.start_ns, kind="stable")),
        path=path,
        product="; ".join(dict.fromkeys(trace.product for trace in traces)),
        names=list(names),
        work=join_tables([part.work for part in parts]),
        copies=join_tables([part.copies for part in parts]),
        ranges=join_tables([part.ranges for part in parts]),
        origins=join_tables(origins) if origins else None,
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


def _each_once(groups: Iterable[tuple[Item, ...]]) -> tuple[Item, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(groups)))


def _renumber(trace: Trace, names: dict[str, int], begun: Mapping[str, int]) -> Trace:
    """Return the trace with names from a common table, and with all that `_COUNTED` names counted on from ``begun``."""
    name = np.array([names.setdefault(text, len(names)) for text in trace.names] or [0], dtype=np.int64)

    def moved(table: Table) -> Table:
        columns: dict[str, Any] = {}
        for column_name in (field.name for field in fields(table)):
            column = getattr(table, column_name)
            if column is None or column_name not in (*_COUNTED, *_NAMED):
                continue
            new = name[column] if column_name in _NAMED else column + begun[_COUNTED[column_name]]
            # A negative number, but for a time, stands for nothing.
            columns[column_name] = new if column_name.endswith("_ns") else np.where(column < 0, column, new)
        return replace(table, **columns)

    processes, threads = begun["process"], begun["thread"]
    return replace(
        trace,
        work=moved(trace.work),
        copies=moved(trace.copies),
        calls=moved(trace.calls),
        syncs=None if trace.syncs is None else moved(trace.syncs),
        ranges=moved(trace.ranges),
        origins=None if trace.origins is None else moved(trace.origins),
        thread_names={thread + threads: text for thread, text in trace.thread_names.items()},
        process_ids={process + processes: pid for process, pid in trace.process_ids.items()},
        main_threads=frozenset(thread + threads for thread in trace.main_threads),
        ranks={process + processes: rank for process, rank in trace.ranks.items()},
    )


def _count_threads(trace: Trace) -> int:
    columns = [trace.work.launch_thread, trace.calls.thread, trace.ranges.thread, trace.ranges.end_thread]
    columns += [] if trace.origins is None else [trace.origins.thread]
    known = [*trace.thread_names, *trace.main_threads, *(int(column.max()) for column in columns if len(column))]
    return max(known, default=-1) + 1


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
        for process in sorted(processes, key=lambda process: rank_of.get(process, process))[1:]:
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


def begin_at(trace: Trace, name: str) -> Trace:
    """Return what each process did from where its first range ``name`` opened.

    Work counts by its launch. A range that was open then begins there. A process without such a range stays as it is.
    """
    ranges, calls = trace.ranges, trace.calls
    opened = np.flatnonzero(np.array([text == name for text in trace.names] or [False], dtype=np.bool_)[ranges.name])
    begin = {
        process: int(ranges.start_ns[opened[rows]].min())
        for process, rows in rows_by_value(ranges.process[opened]).items()
    }
    if not begin:
        return trace

    def moments(process: Ints) -> Ints:
        moment = np.full(len(process), np.iinfo(np.int64).min)
        for number, begin_ns in begin.items():
            moment[process == number] = begin_ns
        return moment

    def is_launched_later(rows: Work | Copies) -> Bools:
        launched_ns = np.where(rows.launch_thread == NO_LAUNCH, rows.start_ns, rows.launch_ns)
        is_later: Bools = launched_ns >= moments(rows.process)
        return is_later

    later = (is_launched_later(trace.work), is_launched_later(trace.copies))
    left = _select(trace, calls.start_ns >= moments(calls.process), *later, ranges.end_ns > moments(ranges.process))
    start_ns = np.maximum(left.ranges.start_ns, moments(left.ranges.process))
    return replace(left, ranges=replace(left.ranges, start_ns=start_ns))
