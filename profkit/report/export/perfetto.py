"""A Perfetto trace (``.pftrace``): the same slices and figures as profkit's tables, on tracks.

The format is a stream of protobuf messages, of which only a dozen fields are needed; their numbers below are those of
Perfetto's public schema (protos/perfetto/trace: trace_packet, track_event, track_descriptor, interned_data), which
never change. A message is encoded by hand, for a capture has millions of them and none is ever read back here. Equal
texts are written once and referred to by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import IO

import numpy as np

from profkit.analysis.kernels.categories import categorize
from profkit.analysis.opened import OpenedTrace
from profkit.analysis.placing.attribution import (
    AMBIGUOUS_HOST,
    DIRECT,
    INFERRED,
    NO_LAUNCH_RECORD,
    OUTSIDE,
    Attribution,
    PlacedRows,
)
from profkit.analysis.placing.nesting import NO_RANGE
from profkit.analysis.tree.range_tree import build_nodes
from profkit.report.export.layout import (
    Layout,
    MemoryProcess,
    MemoryTracks,
    find_idle_time,
    launching_calls,
    lay_out,
    place_memory,
    rows_by_place,
    split_into_lanes,
)
from profkit.trace.columns import NO_LAUNCH, Ints, distinct_values, rows_by_value

_TRACE_PACKET = 1
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _INTERNED, _SEQUENCE_FLAGS, _TRACK_DESCRIPTOR = 8, 10, 11, 12, 13, 60
_STATE_CLEARED, _NEEDS_STATE = 1, 2
# TrackEvent
_CATEGORY, _ANNOTATION, _TYPE, _NAME, _TRACK, _COUNTER_VALUE, _FLOW, _FLOW_END = 3, 4, 9, 10, 11, 30, 47, 48
_BEGIN, _END, _COUNTER = 1, 2, 4
# TrackDescriptor, and within it ProcessDescriptor, ThreadDescriptor and CounterDescriptor
_UUID, _TRACK_NAME, _PROCESS, _THREAD, _PARENT, _COUNTER_TRACK = 1, 2, 3, 4, 5, 8
_PID, _PROCESS_NAME, _TID, _THREAD_NAME, _UNIT, _BYTES = 1, 6, 2, 5, 3, 3
# InternedData: texts by what they are used for
_CATEGORIES, _NAMES, _ANNOTATION_NAMES, _ANNOTATION_VALUES = 1, 2, 3, 29
_VALUE_OF_ANNOTATION = 17

_COPIES = (("memory copy", "copy"), ("copy from the host", "copy"), ("memory fill", "fill"))
_PLACED = {
    DIRECT: "by the thread that launched it",
    INFERRED: "by the thread that waited for the launching one",
    AMBIGUOUS_HOST: "in no range: two or more threads may have waited",
    OUTSIDE: "in no range",
    NO_LAUNCH_RECORD: "in no range: its launch was not recorded",
}


def write_perfetto(file: IO[bytes], opened: OpenedTrace | None, memory: Sequence[MemoryTracks]) -> None:
    """Write a trace, and the memory of its program, as a Perfetto trace. The same input gives the same bytes.

    Every process of the trace has its threads with their ranges and CUDA calls, a track for each stream of each GPU,
    its copies, and why the GPU was idle. Each call is joined with what it launched by a flow. Times are those of the
    capture in nanoseconds (moved to 0 if some are negative).
    """
    packets = _Packets(file.write)
    layout = None
    if opened is not None:
        layout = lay_out(opened.trace, opened.ranks)
        _Timeline(packets, opened.attribution, layout).write()
    for one, process in place_memory(memory, layout):
        _write_memory(packets, one, process)


@dataclass(frozen=True, eq=False)
class _Slices:
    """Slices: when they were, what they are (`_Packets.what`), and the flows that begin or end at each."""

    start_ns: Ints
    end_ns: Ints
    what: Sequence[bytes]
    flows: Sequence[bytes] = ()

    def take(self, rows: Ints) -> _Slices:
        """Return some of them."""
        own = rows.tolist()
        flows = [self.flows[row] for row in own] if self.flows else ()
        return _Slices(self.start_ns[rows], self.end_ns[rows], [self.what[row] for row in own], flows)


class _Packets:
    """Writes the packets of one sequence, and knows the texts and tracks that it has written."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._texts: dict[tuple[int, str], int] = {}
        self._tracks = 0
        self._packet(_varint_field(_SEQUENCE_FLAGS, _STATE_CLEARED))

    def text(self, kind: int, text: str) -> int:
        """Return the number of a text of one kind, which is written when it is first asked for."""
        key = (kind, text)
        if key not in self._texts:
            self._texts[key] = number = len(self._texts) + 1
            entry = _varint_field(1, number) + _text_field(2, text)
            self._packet(_field(_INTERNED, _field(kind, entry)))
        return self._texts[key]

    def process(self, pid: int, name: str) -> int:
        """Write a process and return its track."""
        return self._track(_field(_PROCESS, _varint_field(_PID, pid) + _text_field(_PROCESS_NAME, name)))

    def thread(self, pid: int, tid: int, name: str) -> int:
        """Write a thread of a process and return its track."""
        ids = _varint_field(_PID, pid) + _varint_field(_TID, tid)
        return self._track(_field(_THREAD, ids + _text_field(_THREAD_NAME, name)))

    def track(self, parent: int, name: str, *, counts_bytes: bool = False) -> int:
        """Write a track under another one and return it."""
        counter = _field(_COUNTER_TRACK, _varint_field(_UNIT, _BYTES)) if counts_bytes else b""
        return self._track(_varint_field(_PARENT, parent) + _text_field(_TRACK_NAME, name) + counter)

    def what(self, name: str, category: str, **notes: str) -> bytes:
        """Return the part of a slice that says what it is."""
        found = _varint_field(_CATEGORY, self.text(_CATEGORIES, category))
        for key, value in notes.items():
            number = self.text(_ANNOTATION_NAMES, key.replace("_", " "))
            value_number = self.text(_ANNOTATION_VALUES, value)
            note = _varint_field(1, number) + _varint_field(_VALUE_OF_ANNOTATION, value_number)
            found += _field(_ANNOTATION, note)
        return found + _varint_field(_NAME, self.text(_NAMES, name))

    def slices(self, track: int, edges: list[int], slices: _Slices) -> None:
        """Write the slices of one lane (`split_into_lanes`)."""
        start_ns, end_ns, what, flows = slices.start_ns.tolist(), slices.end_ns.tolist(), slices.what, slices.flows
        on_track = _varint_field(_TRACK, track)
        begin = _varint_field(_TYPE, _BEGIN) + on_track
        end = _field(_TRACK_EVENT, _varint_field(_TYPE, _END) + on_track)
        for edge in edges:
            if edge < 0:
                self._event(end_ns[~edge], end)
            else:
                text = begin + what[edge] + (flows[edge] if flows else b"")
                self._event(start_ns[edge], _field(_TRACK_EVENT, text))

    def counter(self, track: int, time_ns: Ints, values: Ints) -> None:
        """Write the values of a counter."""
        begin = _varint_field(_TYPE, _COUNTER) + _varint_field(_TRACK, track)
        for moment, value in zip(time_ns.tolist(), values.tolist(), strict=True):
            # A number below 0, which a contradictory history may give, is written as 64 bits.
            self._event(moment, _field(_TRACK_EVENT, begin + _varint_field(_COUNTER_VALUE, value & _ALL_BITS)))

    def _track(self, content: bytes) -> int:
        self._tracks += 1
        self._packet(_field(_TRACK_DESCRIPTOR, _varint_field(_UUID, self._tracks) + content))
        return self._tracks

    def _event(self, time_ns: int, event: bytes) -> None:
        self._packet(_TIMESTAMP_KEY + _varint(time_ns) + event + _USES_STATE)

    def _packet(self, content: bytes) -> None:
        self._write(_field(_TRACE_PACKET, content + _ON_SEQUENCE))


class _Timeline:
    """Writes the tracks of one trace of time."""

    def __init__(self, packets: _Packets, attribution: Attribution, layout: Layout) -> None:
        self._packets, self._attribution, self._layout = packets, attribution, layout
        self._trace = attribution.trace
        nodes = build_nodes(attribution, numbered=True)
        self._node_of = nodes.of_range
        self._paths = {place.node: place.path for place in nodes.depth_first()}
        self._processes = {
            process: packets.process(pid, layout.labels[process]) for process, pid in layout.pids.items()
        }

    def write(self) -> None:
        """Write the host's tracks, then the GPUs'."""
        trace, calls = self._trace, self._trace.calls
        on_gpu = trace.measure == "gpu-kernel"
        work_call, copy_call = (launching_calls(trace, rows) for rows in (trace.work, trace.copies))
        starts: list[bytes] = [b""] * len(calls)
        work_ends = _join_flows(starts, work_call if on_gpu else work_call[:0], 1)
        copy_ends = _join_flows(starts, copy_call, len(trace.work) + 1)
        threads = {
            thread: self._packets.thread(self._layout.pids[process], self._layout.tids[thread], label)
            for thread, process in self._layout.owners.items()
            for label in [self._layout.thread_labels[thread]]
        }
        self._write_ranges(threads)
        names = {
            name: self._packets.what(trace.names[name], "CUDA call") for name in distinct_values(calls.name).tolist()
        }
        called = _Slices(calls.start_ns, calls.end_ns, [names[name] for name in calls.name.tolist()], starts)
        for thread, rows in rows_by_value(calls.thread).items():
            self._write_tracks(threads[thread], "CUDA calls", called.take(rows), nests=True)
        self._write_work(threads, work_ends)
        self._write_copies(copy_ends)
        self._write_idle()

    def _write_ranges(self, threads: dict[int, int]) -> None:
        ranges, names = self._trace.ranges, self._trace.names
        recorded = ~self._attribution.is_mirror & ranges.was_open
        what = [
            self._packets.what(names[name], "range", path=self._paths[node]) if own else b""
            for name, node, own in zip(ranges.name.tolist(), self._node_of.tolist(), recorded.tolist(), strict=True)
        ]
        slices = _Slices(ranges.start_ns, ranges.end_ns, what)
        for thread, rows in rows_by_value(np.where(recorded, ranges.thread, NO_LAUNCH)).items():
            if thread != NO_LAUNCH:
                self._write_tracks(threads[thread], None, slices.take(rows), nests=True)

    def _write_work(self, threads: dict[int, int], flows: Sequence[bytes]) -> None:
        trace, work = self._trace, self._trace.work
        labels = {}
        for name in distinct_values(work.name).tolist():
            labels[name] = trace.names[name], categorize(trace.names[name], trace.measure).name
        slices = _Slices(work.start_ns, work.end_ns, self._what_of(self._attribution.work, work.name, labels), flows)
        if trace.measure == "cpu-operator":
            for thread, rows in rows_by_value(work.launch_thread).items():
                self._write_tracks(threads[thread], "operators", slices.take(rows), nests=True)
            return
        for (process, device, stream), rows in rows_by_place(work.process, work.device, work.stream):
            self._write_tracks(self._processes[process], f"GPU {device} stream {stream}", slices.take(rows))

    def _write_copies(self, flows: Sequence[bytes]) -> None:
        copies = self._trace.copies
        kind = np.where(copies.is_memset, 2, copies.from_host)
        what = self._what_of(self._attribution.copies, kind, dict(enumerate(_COPIES)))
        slices = _Slices(copies.start_ns, copies.end_ns, what, flows)
        for (process, device), rows in rows_by_place(copies.process, copies.device):
            self._write_tracks(self._processes[process], f"GPU {device} copies and fills", slices.take(rows))

    def _write_idle(self) -> None:
        for idle in find_idle_time(self._trace):
            start, end = (
                np.concatenate([getattr(stretches, side) for _, stretches in idle.causes])
                for side in ("start_ns", "end_ns")
            )
            what = [text for cause, some in idle.causes for text in [self._packets.what(cause, "idle")] * len(some)]
            name = f"GPU {idle.device} idle, by cause"
            self._write_tracks(self._processes[idle.process], name, _Slices(start, end, what))

    def _what_of(self, placed: PlacedRows, kind: Ints, labels: Mapping[int, tuple[str, str]]) -> list[bytes]:
        """Return of each row what it is: name and category of its kind, its innermost range, and how that is known."""

        @cache
        def what(kind: int, node: int, verdict: int) -> bytes:
            name, category = labels[kind]
            around = {} if node == NO_RANGE else {"range": self._paths[node]}
            return self._packets.what(name, category, **around, placed=_PLACED[verdict])

        # One more entry, for what lies in no range (-1).
        node = np.append(self._node_of, NO_RANGE)[placed.innermost]
        return [what(*one) for one in zip(kind.tolist(), node.tolist(), placed.verdict.tolist(), strict=True)]

    def _write_tracks(self, parent: int, name: str | None, slices: _Slices, *, nests: bool = False) -> None:
        """Write slices on a track under ``parent``, or on ``parent`` itself if it has no name.

        Those that do not fit there get tracks of the same name, which Perfetto shows as one.
        """
        shift = self._layout.shift_ns
        moved = replace(slices, start_ns=slices.start_ns + shift, end_ns=slices.end_ns + shift)
        for number, edges in enumerate(split_into_lanes(moved.start_ns, moved.end_ns, nests=nests)):
            on_parent = name is None and number == 0
            track = parent if on_parent else self._packets.track(parent, name or "ranges that overlap")
            self._packets.slices(track, edges, moved)


def _write_memory(packets: _Packets, memory: MemoryTracks, place: MemoryProcess) -> None:
    process, begin_ns = packets.process(place.pid, place.name), place.begin_ns
    for name, spans in (("steps", memory.steps), ("phases", memory.phases)):
        if not spans:
            continue
        track = packets.track(process, name)
        start, end = (
            (np.array([getattr(one, side) for one in spans], dtype=np.int64) - memory.first_us) * 1000 + begin_ns
            for side in ("start_us", "end_us")
        )
        what = [packets.what(one.name, name) for one in spans]
        # What began before the first event begins with it.
        slices = _Slices(np.maximum(start, begin_ns), np.maximum(end, begin_ns), what)
        for edges in split_into_lanes(slices.start_ns, slices.end_ns, nests=True):
            packets.slices(track, edges, slices)
    for counter in memory.counters:
        track = packets.track(process, counter.name, counts_bytes=True)
        packets.counter(track, np.maximum(counter.time_ns + begin_ns, begin_ns), counter.bytes)


def _join_flows(starts: list[bytes], calls: Ints, first: int) -> list[bytes]:
    """Add to ``starts``, by call, where flows begin, numbered from ``first``; return where they end, by row."""
    ends = []
    for flow, call in enumerate(calls.tolist(), first):
        number = flow.to_bytes(8, "little")
        if call >= 0:
            starts[call] += _FLOW_KEY + number
        ends.append(_FLOW_END_KEY + number if call >= 0 else b"")
    return ends


def _varint(value: int) -> bytes:
    if value < 128:
        return _BYTE[value]
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


_BYTE = [bytes([value]) for value in range(128)]
_ALL_BITS = 2**64 - 1
_VARINT, _FIXED64, _LENGTH = 0, 1, 2
"""How a field's value is encoded."""


@cache
def _key(field: int, encoding: int) -> bytes:
    return _varint(field << 3 | encoding)


def _varint_field(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _key(field, _LENGTH) + _varint(len(content)) + content


def _text_field(field: int, text: str) -> bytes:
    return _field(field, text.encode("utf-8", "replace"))


_FLOW_KEY, _FLOW_END_KEY = _key(_FLOW, _FIXED64), _key(_FLOW_END, _FIXED64)
_TIMESTAMP_KEY = _key(_TIMESTAMP, _VARINT)
_ON_SEQUENCE = _varint_field(_SEQUENCE, 1)
_USES_STATE = _varint_field(_SEQUENCE_FLAGS, _NEEDS_STATE)
