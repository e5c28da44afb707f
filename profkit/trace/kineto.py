"""Traces of torch.profiler (Kineto), as Chrome JSON, plain or gzipped, from profkit or from anyone's script.

What counts: rows of category ``kernel`` on a GPU, and ``gpu_mem*``; without any kernel, the CPU's ``cpu_op``
rows by self time, and launches of compiled code that call no operator. Ranges are ``user_annotation`` rows, never
``gpu_user_annotation``, which is Kineto's own guess at the same ranges on the GPU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from profkit.errors import TraceError
from profkit.names import COMPILED_KERNEL, kind_of_collective, name_dtype, read_launch_range
from profkit.trace.columns import (
    NO_LAUNCH,
    Bools,
    Calls,
    CollectiveCall,
    Copies,
    Ints,
    Origins,
    Ranges,
    Syncs,
    Trace,
    Work,
    empty_ints,
    number_in_graph,
    rows_by_value,
)
from profkit.trace.kineto_events import (
    Event,
    HostRows,
    Reading,
    integers,
    job_of,
    load_chrome_trace,
    name_of,
    objects_in,
    parse_argument,
    parse_correlation,
    parse_integer,
    parse_interval,
    parse_microseconds,
)
from profkit.trace.nesting import NO_RANGE, nest_spans

THREAD_NAME = re.compile(r"^thread -?\d{1,20} \((.*)\)$")
BACKWARD_NODE = "autograd::engine::evaluate_function"
"""How the operator begins in which the autograd engine runs one node of the graph."""


def read_kineto(path: Path) -> Trace:
    """Return a torch.profiler trace as columns; `Trace.measure` says whether it holds GPU or CPU work.

    Work with impossible times (missing, negative, or 0 for start and duration both) is left out and named in an error
    `Diagnostic`; other rows of unexpected shape are ignored.

    Raises:
        TraceError: the file cannot be read, or holds nothing that torch.profiler records.
    """
    header, rows = load_chrome_trace(path)
    if not set(rows) - {"flow", "metadata", "sync"}:
        raise TraceError(f"{path}: a Chrome trace, but it holds no operator, kernel or annotation of torch.profiler")
    copied = bool(rows["memcpy"] or rows["memset"])
    has_kernels = any(parse_interval(event) is not None for event in rows["kernel"])
    on_gpu = has_kernels or bool(not rows["operator"] and (copied or rows["kernel"]))
    reading = Reading()
    operators = reading.host_rows(rows["operator"], work="" if on_gpu else "CPU operators")
    call_rows = reading.host_rows(rows["call"])
    annotations = reading.host_rows(rows["annotation"])
    ranges = _read_ranges(reading, annotations, (operators, call_rows))
    if not on_gpu:
        operators = _with_compiled_kernels(reading, operators, annotations)
    forest = OperatorForest(operators.start_ns, operators.end_ns, operators.thread)
    collectives = CollectiveArguments(header)
    gpu = GpuReader(reading, call_rows, collectives)
    work, copies = gpu.work(rows["kernel"]), gpu.copies(rows["memcpy"], rows["memset"])
    gpu.note_ambiguous()
    origins = None
    if on_gpu and operators.events:
        launched_in = forest.innermost_at(work.launch_ns, work.launch_thread)
        sequence, origins = _find_origins(reading, rows["flow"], operators, forest, launched_in)
        # One more entry, so that a launch outside every operator (-1) finds no name.
        work = replace(work, sequence=sequence, operator=np.append(operators.name, -1)[launched_in])
    elif not on_gpu:
        work = _cpu_work(operators, forest.self_ns)
        _note_missing_gpu(reading, call_rows, len(copies))
    return Trace(
        path=str(path),
        source="kineto",
        product=_product(header),
        measure="gpu-kernel" if on_gpu else "cpu-operator",
        work=work,
        copies=copies,
        calls=_build_calls(call_rows, gpu),
        ranges=ranges,
        thread_names=_thread_names(rows["metadata"], reading),
        process_ids={pid: pid for pid in sorted({*reading.processes(), *work.process.tolist()})},
        main_threads=frozenset(thread for (pid, tid), thread in reading.threads.items() if pid == tid),
        gpus=tuple(str(device.get("name", "unnamed GPU")) for device in objects_in(header.get("deviceProperties"))),
        diagnostics=tuple(reading.diagnostics),
        origins=origins,
        has_kernel_table=has_kernels or bool(operators.events),
        notes=tuple(reading.notes),
        names=reading.names,
        ranks=_ranks(header, reading),
        collectives=tuple(collectives.found),
        syncs=gpu.syncs(rows["sync"]),
        clock_base_ns=parse_integer(header.get("baseTimeNanoseconds")) or 0,
    )


def _read_ranges(reading: Reading, rows: HostRows, others: tuple[HostRows, ...]) -> Ranges:
    last = max(int(table.end_ns.max(initial=0)) for table in (rows, *others))
    return Ranges(
        name=rows.name,
        domain=np.full(len(rows.events), reading.intern(""), dtype=np.int64),
        start_ns=rows.start_ns,
        end_ns=np.where(rows.is_open, last, rows.end_ns),
        process=rows.process,
        thread=rows.thread,
        end_thread=rows.thread,
        is_open=rows.is_open,
    )


def _build_calls(rows: HostRows, gpu: GpuReader) -> Calls:
    return Calls(
        name=rows.name,
        start_ns=rows.start_ns,
        end_ns=rows.end_ns,
        thread=rows.thread,
        process=rows.process,
        correlation=gpu.correlation,
        has_work=gpu.calls_with_work(),
        failed=np.zeros(len(rows.events), dtype=np.bool_),  # Kineto does not keep what a call returned
    )


def _with_compiled_kernels(reading: Reading, operators: HostRows, annotations: HostRows) -> HostRows:
    """Return the operators and, as further ones, the launches of compiled code in which none of them began."""
    is_launch = np.array([read_launch_range(name) is not None for name in reading.names] or [False], dtype=np.bool_)
    chosen = []
    for thread, there in rows_by_value(annotations.thread).items():
        rows = there[is_launch[annotations.name[there]] & ~annotations.is_open[there]]
        starts = operators.start_ns[operators.thread == thread]
        begun = np.searchsorted(starts, annotations.start_ns[rows])
        chosen.append(rows[begun == np.searchsorted(starts, annotations.end_ns[rows])])
    kernels = np.concatenate(chosen) if chosen else empty_ints()
    if not len(kernels):
        return operators
    order = np.argsort(np.concatenate([operators.start_ns, annotations.start_ns[kernels]]), kind="stable")

    def joined(name: str) -> Ints:
        column: Ints = np.concatenate([getattr(operators, name), getattr(annotations, name)[kernels]])[order]
        return column

    events = [*operators.events, *(annotations.events[row] for row in kernels.tolist())]
    name = np.concatenate([operators.name, np.full(len(kernels), reading.intern(COMPILED_KERNEL))])[order]
    return HostRows(
        [events[row] for row in order.tolist()],
        name,
        joined("start_ns"),
        joined("end_ns"),
        joined("process"),
        joined("thread"),
        np.concatenate([operators.is_open, annotations.is_open[kernels]])[order],
    )


def _cpu_work(operators: HostRows, self_ns: Ints) -> Work:
    """Return the CPU's operators as work that launches itself; their duration is their self time."""
    zeros = np.zeros(len(operators.events), dtype=np.int64)
    return Work(
        name=operators.name,
        start_ns=operators.start_ns,
        end_ns=operators.end_ns,
        duration_ns=self_ns,
        device=zeros,
        stream=zeros,
        process=operators.process,
        launch_ns=operators.start_ns,
        launch_thread=operators.thread,
        is_graph=zeros.astype(np.bool_),
    )


def _note_missing_gpu(reading: Reading, calls: HostRows, copy_count: int) -> None:
    launches = sum("Launch" in reading.names[name] for name in calls.name.tolist())
    if launches or copy_count:
        what = f"{copy_count} GPU copies but no kernel" if copy_count else f"{launches} launches but no GPU work"
        reading.notes.append(
            f"the trace holds {what}, so CPU operators are measured; record with ProfilerActivity.CUDA to measure"
            " kernels"
        )


def _thread_names(events: list[Event], reading: Reading) -> dict[int, str]:
    """A thread may be named twice, the second time after its process; then the other name stands."""
    process_names: dict[int | None, str] = {}
    names: dict[int, str] = {}
    for event in events:
        name = event.get("args", {}).get("name")
        if isinstance(name, str) and event.get("name") == "process_name":
            process_names[parse_integer(event.get("pid"))] = name
        if isinstance(name, str) and event.get("name") == "thread_name":
            place = reading.known_thread_of(event)
            inner = THREAD_NAME.match(name.strip())
            own = inner.group(1) if inner else name.strip()
            if place is not None and names.get(place[1]) in (None, process_names.get(place[0])):
                names[place[1]] = own
    return names


def _ranks(header: dict[str, Any], reading: Reading) -> dict[int, int]:
    rank, processes = parse_integer(job_of(header).get("rank")), reading.processes()
    return {processes[0]: rank} if rank is not None and len(processes) == 1 else {}


def _product(header: dict[str, Any]) -> str:
    """Return what wrote the trace and where: its schema, CUDA version and rank, as far as the file says so."""
    parts = []
    schema, cuda = parse_integer(header.get("schemaVersion")), parse_integer(header.get("cuda_runtime_version"))
    if schema is not None:
        parts.append(f"trace schema {schema}")
    if cuda:
        parts.append(f"CUDA {cuda // 1000}.{cuda % 1000 // 10}")
    rank, size = (parse_integer(job_of(header).get(key)) for key in ("rank", "world_size"))
    if rank is not None and size is not None:
        parts.append(f"rank {rank} of {size}")
    return f"PyTorch Kineto ({', '.join(parts)})" if parts else "PyTorch Kineto"


def _find_origins(
    reading: Reading, flows: list[Event], operators: HostRows, forest: OperatorForest, launched_in: Ints
) -> tuple[Ints, Origins]:
    """Kineto draws a flow from each forward operator to the backward operator of the same autograd sequence number; it
    ends in the operator inside the engine's node (`BACKWARD_NODE`). Both lead back, and so does everything launched
    under them, unless a closer one leads elsewhere (a checkpoint's recomputation holds a backward pass of its own). An
    operator is an index into `Origins`, or -1.
    """
    starts: dict[tuple[int, int], tuple[int, int]] = {}
    ends: dict[tuple[int, int], tuple[int, int]] = {}
    for event in flows:
        flow, moment = parse_integer(event.get("id")), parse_microseconds(event.get("ts"))
        place = reading.known_thread_of(event)
        if flow is not None and moment is not None and place is not None:
            side = starts if event["ph"] == "s" else ends
            side[place[0], flow] = (moment, place[1])
    whole = [flow for flow in ends if flow in starts]
    origins = Origins(*_columns([starts[flow] for flow in whole]))
    leads_to = np.full(len(operators.events), -1, dtype=np.int64)
    for origin, operator in enumerate(forest.innermost_at(*_columns([ends[flow] for flow in whole])).tolist()):
        if operator < 0:
            continue
        leads_to[operator] = origin
        node = int(forest.parent[operator])
        if node >= 0 and leads_to[node] < 0 and reading.names[operators.name[node]].startswith(BACKWARD_NODE):
            leads_to[node] = origin
    # One more entry, so that a launch outside every operator (-1) finds none.
    leads_to = np.append(forest.inherit(leads_to), -1)
    return leads_to[launched_in], origins


def _columns(places: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    return integers([moment for moment, _ in places]), integers([thread for _, thread in places])


class OperatorForest:
    """The operators of all threads, each under the one that called it.

    A moment belongs to the operator that began last among those open on its thread, so that the self times of a thread
    sum to the time it spent in operators. Operators with equal times nest in the order in which they are given.
    """

    def __init__(self, start_ns: Ints, end_ns: Ints, thread: Ints) -> None:
        self._timelines, self.parent = nest_spans(start_ns, end_ns, thread)
        self._outer_first: Ints = np.lexsort((-end_ns, start_ns))
        self.self_ns = np.zeros(len(start_ns), dtype=np.int64)
        for timeline in self._timelines.values():
            operator, from_ns, to_ns = timeline.own_stretches()
            np.add.at(self.self_ns, operator, to_ns - from_ns)

    def innermost_at(self, moment_ns: Ints, thread: Ints) -> Ints:
        operator = np.full(len(moment_ns), NO_RANGE, dtype=np.int64)
        for number, rows in rows_by_value(thread).items():
            if number in self._timelines:
                operator[rows] = self._timelines[number].innermost_at(moment_ns[rows])
        return operator

    def inherit(self, values: Ints) -> Ints:
        """Return each operator's own value, or where that is -1 its nearest ancestor's."""
        inherited: list[int] = values.tolist()
        parents = self.parent.tolist()
        for index in self._outer_first.tolist():
            if inherited[index] < 0 <= parents[index]:
                inherited[index] = inherited[parents[index]]
        return np.array(inherited, dtype=np.int64)


_ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
}
_LONGEST_NUMBER = 6
_MOST_RANKS = 2**16


class CollectiveArguments:
    """Collects the collectives of a trace, each once, as its kernels are read."""

    def __init__(self, header: dict[str, Any]) -> None:
        """Note the process groups of ``header``: a kernel's list of ranks may be cut short."""
        self.found: list[CollectiveCall] = []
        self._groups: dict[str, tuple[int, ...]] = {}
        for group in objects_in(job_of(header).get("pg_config")):
            if isinstance(group.get("ranks"), list):
                ranks = tuple(rank for rank in group["ranks"][:_MOST_RANKS] if isinstance(rank, int))
                if len(ranks) == parse_integer(group.get("pg_size", len(ranks))):
                    self._groups[str(group.get("pg_name"))] = ranks

    def add(self, event: Event) -> int:
        """Return the index in ``found`` of the collective that a kernel runs, or -1."""
        arguments = event.get("args", {})
        name = arguments.get("Collective name")
        kind = kind_of_collective(name) if isinstance(name, str) else None
        if kind is None:
            return -1
        self.found.append(self._read(arguments, kind))
        return len(self.found) - 1

    def _read(self, arguments: dict[str, Any], kind: str) -> CollectiveCall:
        dtype, group = (arguments.get(key) for key in ("dtype", "Process Group Name"))
        counts = [parse_integer(arguments.get(key)) for key in ("In msg nelems", "Out msg nelems")]
        known = [count for count in counts if count is not None]
        size = _ELEMENT_BYTES.get(dtype) if isinstance(dtype, str) else None
        mesh = re.match(r"mesh_(.+)$", str(arguments.get("Process Group Description")))
        return CollectiveCall(
            kind=kind,
            group=None if group is None else str(group),
            ranks=_parse_ranks(arguments.get("Process Group Ranks")) or self._groups.get(str(group), ()),
            dimension=mesh and mesh[1],  # as a device mesh describes the groups of its dimensions
            dtype=name_dtype(dtype) if isinstance(dtype, str) else None,
            byte_count=max(known) * size if known and size is not None else None,
            sequence=parse_integer(arguments.get("Seq")),
        )


def _parse_ranks(text: object) -> tuple[int, ...]:
    if not isinstance(text, str) or not (text.startswith("[") and text.endswith("]")):
        return ()
    parts = [part.strip() for part in text[1:-1].split(",")]
    whole = all(part.isdecimal() and len(part) <= _LONGEST_NUMBER for part in parts)
    return tuple(map(int, parts)) if whole else ()


_FROM_HOST = "HtoD"
_NO_STREAM = 0xFFFF_FFFF


class GpuReader:
    """Matches GPU rows with the calls that launched them.

    Kineto files GPU rows under the device, not the process, so a launch is matched by correlation id alone where the
    file holds one process, as nearly all do. In a merged file, an id that calls of two processes carry fits neither.
    """

    def __init__(self, reading: Reading, calls: HostRows, collectives: CollectiveArguments) -> None:
        self._reading = reading
        self._collectives = collectives
        self.correlation = integers([parse_correlation(event) for event in calls.events])
        self._matched: set[int] = set()
        self._ambiguous_count = 0
        self._launches: dict[int, dict[int, tuple[int, int]]] = {}
        places = zip(calls.process.tolist(), calls.start_ns.tolist(), calls.thread.tolist(), strict=True)
        # Calls are sorted by time: of two in a process with one id (runtime around driver) the outer comes first.
        for correlation, (process, start, thread) in zip(self.correlation.tolist(), places, strict=True):
            self._launches.setdefault(correlation, {}).setdefault(process, (start, thread))

    def work(self, events: list[Event]) -> Work:
        """Return the kernels; those of a CUDA graph share the correlation id of its launch."""
        rows, start, end = self._timed(events, "kernels")
        process, launch_ns, launch_thread = self._find_launches(rows)
        return Work(
            name=integers([self._reading.intern(name_of(event)) for event in rows]),
            start_ns=start,
            end_ns=end,
            duration_ns=end - start,
            device=_devices(rows),
            stream=integers([_stream(event) for event in rows]),
            process=process,
            launch_ns=launch_ns,
            launch_thread=launch_thread,
            is_graph=np.zeros(len(rows), dtype=np.bool_),
            graph_node=_nodes(rows),
            collective=integers([self._collectives.add(event) for event in rows]),
        )

    def copies(self, copies: list[Event], sets: list[Event]) -> Copies:
        copies, *copy_times = self._timed(copies, "memory copies")
        sets, *set_times = self._timed(sets, "memory sets")
        rows = copies + sets
        process, launch_ns, launch_thread = self._find_launches(rows)
        return Copies(
            start_ns=np.concatenate([copy_times[0], set_times[0]]),
            end_ns=np.concatenate([copy_times[1], set_times[1]]),
            device=_devices(rows),
            process=process,
            launch_ns=launch_ns,
            launch_thread=launch_thread,
            is_memset=np.arange(len(rows)) >= len(copies),
            from_host=np.array([_FROM_HOST in name_of(event) for event in rows], dtype=np.bool_),
            byte_count=integers([parse_argument(event, "bytes") or 0 for event in rows]),
            stream=integers([_stream(event) for event in rows]),
            graph_node=_nodes(rows),
        )

    def syncs(self, events: list[Event]) -> Syncs | None:
        """Return what calls wait for; None where the profiler does not say (it writes -1 for what it does not know).

        Only of a file of one process: a wait is matched with its call by the correlation id alone.
        """
        if not events or len(self._reading.processes()) != 1:
            return None
        rows = {number: row for row, number in reversed([*enumerate(self.correlation.tolist())]) if number > 0}
        waits = [
            (
                rows[correlation],
                _first(parse_argument(event, "device"), parse_integer(event.get("pid"))),
                _stream_or_none(parse_argument(event, "stream")),
                rows.get(parse_argument(event, "wait_on_cuda_event_record_corr_id") or -1, -1),
                _stream_or_none(parse_argument(event, "wait_on_stream")),
            )
            for event in events
            if (correlation := parse_correlation(event)) in rows
        ]
        call, device, stream, record, record_stream = np.array(waits, dtype=np.int64).reshape(-1, 5).T.copy()
        return Syncs(call, device, stream, record, device, record_stream)

    def calls_with_work(self) -> Bools:
        return np.isin(self.correlation, list(self._matched))

    def note_ambiguous(self) -> None:
        if self._ambiguous_count:
            self._reading.notes.append(
                f"{self._ambiguous_count} GPU rows have a correlation id that several processes use; they "
                "count as work without a launch: open each rank's trace by itself"
            )

    def _timed(self, events: list[Event], what: str) -> tuple[list[Event], Ints, Ints]:
        timed = [(event, parse_interval(event)) for event in events]
        self._reading.report_impossible(what, [event for event, times in timed if times is None])
        rows = sorted([(times, event) for event, times in timed if times is not None], key=lambda row: row[0][0])
        start, end = (integers([times[side] for times, _ in rows]) for side in (0, 1))
        return [event for _, event in rows], start, end

    def _find_launches(self, rows: list[Event]) -> tuple[Ints, Ints, Ints]:
        processes = self._reading.processes()
        placed = []
        for event in rows:
            correlation = parse_correlation(event)
            launches = self._launches.get(correlation, {}) if correlation else {}
            if correlation:
                self._matched.add(correlation)
            if len(launches) == 1:
                ((process, (start, thread)),) = launches.items()
                placed.append((process, start, thread))
                continue
            self._ambiguous_count += len(launches) > 1
            own = processes[0] if len(processes) == 1 else parse_integer(event.get("pid")) or 0
            placed.append((own, 0, NO_LAUNCH))
        columns = np.array(placed, dtype=np.int64).reshape(-1, 3).T.copy()
        return columns[0], columns[1], columns[2]


def _nodes(rows: list[Event]) -> Ints:
    # Kineto writes 0 for what is no node, and no graph has the number 0.
    return number_in_graph(integers([parse_argument(event, "graph node id") or -1 for event in rows]))


def _devices(rows: list[Event]) -> Ints:
    return integers([_first(parse_argument(event, "device"), parse_integer(event.get("pid"))) for event in rows])


def _stream(event: Event) -> int:
    return _first(parse_argument(event, "stream"), parse_integer(event.get("tid")))


def _stream_or_none(stream: int | None) -> int:
    """Return a stream's number; CUPTI has all bits set for none, which is -1 as a signed number."""
    return -1 if stream is None or not 0 <= stream < _NO_STREAM else stream


def _first(*values: int | None) -> int:
    return next((value for value in values if value is not None), 0)
