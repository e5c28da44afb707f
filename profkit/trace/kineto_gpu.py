"""The GPU rows of a torch.profiler trace: kernels, copies and fills, each matched with the call that launched it.

What it says of collectives stands in the arguments of NCCL's kernels, and in the process groups of the header.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from profkit.names import kind_of_collective, name_dtype
from profkit.trace.columns import NO_LAUNCH, Bools, CollectiveCall, Copies, Ints, Syncs, Work, number_in_graph
from profkit.trace.kineto_events import (
    Event,
    HostRows,
    Reading,
    integers,
    job_of,
    name_of,
    objects_in,
    parse_argument,
    parse_id,
    parse_integer,
    parse_interval,
)

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
            ranks=_ranks(arguments.get("Process Group Ranks")) or self._groups.get(str(group), ()),
            dimension=mesh and mesh[1],  # as a device mesh describes the groups of its dimensions
            dtype=name_dtype(dtype) if isinstance(dtype, str) else None,
            byte_count=max(known) * size if known and size is not None else None,
            sequence=parse_integer(arguments.get("Seq")),
        )


def _ranks(text: object) -> tuple[int, ...]:
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
        self.correlation = integers([parse_id(event, "correlation") for event in calls.events])
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
            if (correlation := parse_id(event, "correlation")) in rows
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
            correlation = parse_id(event, "correlation")
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
