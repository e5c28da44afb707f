"""A Chrome trace (``.json.gz``) for timeline viewers, such as Perfetto.

Two kernels that run at once on one stream, or two copies, stand on two tracks of one name, and a range that crosses
another one of its thread on a track of its own: Perfetto drops slices that overlap on a track.

Rows have the categories and arguments of torch.profiler's.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, islice
from typing import IO, Any

import numpy as np

from profkit.analysis.opened import OpenedTrace
from profkit.analysis.placing.attribution import PlacedRows
from profkit.analysis.tree.range_tree import kind_paths
from profkit.report.chrome_layout import (
    Layout,
    MemoryTracks,
    assign_lanes,
    find_crossing,
    find_idle_time,
    launching_calls,
    lay_out,
)
from profkit.report.page.step import EVIDENCE
from profkit.trace.columns import Copies, Ints, Work, rows_by_value

_ROWS_AT_ONCE = 8192
_GAP_NS = 1_000_000
_ANOTHER_PROCESS = "recorded in another process: its clock is not that of the kernels"


def write_chrome_trace(
    file: IO[bytes], opened: OpenedTrace | None, memory: Sequence[MemoryTracks], *, zipped: bool = True
) -> None:
    """Write a trace, and the memory of its program, as Chrome JSON. The same input gives the same bytes."""
    if not zipped:
        _write_json(file, opened, memory)
        return
    # With a name or a time in it, two exports would differ.
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as target:
        _write_json(target, opened, memory)


def _write_json(target: IO[bytes] | gzip.GzipFile, opened: OpenedTrace | None, memory: Sequence[MemoryTracks]) -> None:
    layout = None if opened is None else lay_out(opened.recorded, opened.ranks)
    target.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"
    rows = _rows(opened, layout, memory)
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        target.write((separator + ",\n".join(batch)).encode("utf-8", "replace"))
        separator = ",\n"
    target.write(b"\n]}\n")


def _rows(opened: OpenedTrace | None, layout: Layout | None, memory: Sequence[MemoryTracks]) -> Iterator[str]:
    used = (0,) if layout is None else (0, *layout.pids.values(), *layout.tids.values())
    free = count(max(used) + 1)
    if opened is not None and layout is not None:
        yield from _TimeRows(opened, layout, free).all()
    begin_ns = 0 if layout is None else layout.end_ns + _GAP_NS
    # A thread with the number of a process would be its main thread for Perfetto: processes get theirs first.
    for pid, tracks in [(next(free), tracks) for tracks in memory]:
        name = tracks.label if layout is None else f"{tracks.label} ({_ANOTHER_PROCESS})"
        yield _metadata("process_name", pid, 0, name)
        yield from _memory_rows(tracks, pid, begin_ns, free)


class _TimeRows:
    def __init__(self, opened: OpenedTrace, layout: Layout, free: Iterator[int]) -> None:
        self._attribution, self._layout = opened.attribution, layout
        self._trace = trace = opened.recorded
        self._paths = [json.dumps(path) for path in kind_paths(opened.attribution)]
        self._names = [json.dumps(name) for name in trace.names]
        self._thread = {
            thread: f'"pid": {layout.pids[process]}, "tid": {layout.tids[thread]}'
            for thread, process in layout.owners.items()
        }
        self._free_tids = free
        self._flows = count(1)

    def all(self) -> Iterator[str]:
        """Return every row: names of processes and threads, host, GPUs, flows."""
        trace = self._trace
        yield from self._metadata()
        yield from self._ranges()
        yield from self._calls()
        if trace.measure == "cpu-operator":
            for name, start, end, thread in _columns(trace.work, "name", "start_ns", "end_ns", "launch_thread"):
                yield self._slice("cpu_op", self._names[name], (start, end), self._thread[thread])
        else:
            yield from self._gpu_work()
        yield from self._copies()
        yield from self._idle()

    def _metadata(self) -> Iterator[str]:
        layout = self._layout
        for process, pid in layout.pids.items():
            yield _metadata("process_name", pid, 0, layout.labels[process])
        for thread, process in layout.owners.items():
            name = self._trace.thread_names.get(thread)
            if name:
                yield _metadata("thread_name", layout.pids[process], layout.tids[thread], name)

    def _ranges(self) -> Iterator[str]:
        ranges = self._trace.ranges
        columns = _columns(ranges, "name", "domain", "start_ns", "end_ns", "thread", "is_open")
        aside = self._tracks_aside()
        yield from (name for _, name in aside.values())
        for row, (name, domain, start, end, thread, is_open) in enumerate(columns):
            arguments = []
            if self._trace.names[domain]:
                arguments.append(f'"domain": {self._names[domain]}')
            if row in ranges.payload:
                arguments.append(f'"payload": {json.dumps(ranges.payload[row])}')
            if is_open:
                arguments.append('"finished": false')
            where = aside[row][0] if row in aside else self._thread[thread]
            yield self._slice("user_annotation", self._names[name], (start, end), where, ", ".join(arguments))

    def _tracks_aside(self) -> dict[int, tuple[str, str]]:
        """Return a track, and the row that names it, for each range that crosses another one of its thread."""
        ranges = self._trace.ranges
        aside: dict[int, tuple[str, str]] = {}
        for thread, mine in rows_by_value(ranges.thread).items():
            for at in find_crossing(ranges.start_ns[mine], ranges.end_ns[mine]):
                pid, tid = self._layout.pids[self._layout.owners[thread]], next(self._free_tids)
                aside[int(mine[at])] = (
                    f'"pid": {pid}, "tid": {tid}',
                    _metadata("thread_name", pid, tid, "range that crosses others"),
                )
        return aside

    def _calls(self) -> Iterator[str]:
        columns = _columns(self._trace.calls, "name", "start_ns", "end_ns", "thread", "correlation")
        for name, start, end, thread, correlation in columns:
            category = "cuda_runtime" if self._trace.names[name].startswith("cuda") else "cuda_driver"
            correlated = f'"correlation": {correlation}'
            yield self._slice(category, self._names[name], (start, end), self._thread[thread], correlated)

    def _gpu_work(self) -> Iterator[str]:
        work = self._trace.work
        where, names = self._tracks(work, work.stream, "GPU {} stream {}")
        yield from names
        placed = self._placed(self._attribution.work)
        columns = _columns(work, "name", "start_ns", "end_ns", "device", "stream")
        calls = launching_calls(self._trace, work).tolist()
        operators = [-1] * len(work) if work.operator is None else work.operator.tolist()
        for row, (name, start, end, device, stream) in enumerate(columns):
            arguments = f'"device": {device}, "stream": {stream}{placed[row]}{self._launched_by(calls[row])}'
            if operators[row] >= 0:
                arguments += f', "operator": {self._names[operators[row]]}'
            yield self._slice("kernel", self._names[name], (start, end), where[row], arguments)
            yield from self._flow(calls[row], where[row], start)

    def _copies(self) -> Iterator[str]:
        copies = self._trace.copies
        where, names = self._tracks(copies, np.zeros_like(copies.device), "GPU {} copies and fills")
        yield from names
        placed = self._placed(self._attribution.copies)
        columns = _columns(copies, "start_ns", "end_ns", "device", "is_memset", "from_host", "byte_count")
        calls = launching_calls(self._trace, copies).tolist()
        for row, (start, end, device, is_memset, from_host, byte_count) in enumerate(columns):
            category = "gpu_memset" if is_memset else "gpu_memcpy"
            name = '"Memset"' if is_memset else '"Memcpy HtoD"' if from_host else '"Memcpy"'
            arguments = f'"device": {device}, "bytes": {byte_count}{placed[row]}{self._launched_by(calls[row])}'
            yield self._slice(category, name, (start, end), where[row], arguments)
            yield from self._flow(calls[row], where[row], start)

    def _tracks(self, rows: Work | Copies, stream: Ints, title: str) -> tuple[list[str], list[str]]:
        """Return each row's track, and the rows that name the tracks: one for a process, GPU, stream and lane."""
        lanes = np.zeros(len(rows), dtype=np.int64)
        places = np.stack([rows.process, rows.device, stream])
        _, place_of_row = np.unique(places, axis=1, return_inverse=True)
        for mine in rows_by_value(place_of_row.reshape(-1)).values():
            lanes[mine] = assign_lanes(rows.start_ns[mine], rows.end_ns[mine])
        tracks: dict[tuple[int, ...], str] = {}
        names = []
        of_row = []
        for place in zip(*places.tolist(), lanes.tolist(), strict=True):
            if place not in tracks:
                pid, tid = self._layout.pids[place[0]], next(self._free_tids)
                tracks[place] = f'"pid": {pid}, "tid": {tid}'
                names.append(_metadata("thread_name", pid, tid, title.format(place[1], place[2])))
            of_row.append(tracks[place])
        return of_row, names

    def _placed(self, placed: PlacedRows) -> list[str]:
        words = {verdict: f', "placed": {json.dumps(text)}' for verdict, text in EVIDENCE.items()}

        @cache
        def arguments(node: int, verdict: int) -> str:
            return (f', "range": {self._paths[node]}' if node >= 0 else "") + words[verdict]

        return list(map(arguments, placed.innermost.tolist(), placed.verdict.tolist()))

    def _idle(self) -> Iterator[str]:
        for idle in find_idle_time(self._trace):
            tid = next(self._free_tids)
            pid = self._layout.pids[idle.process]
            yield _metadata("thread_name", pid, tid, f"GPU {idle.device} idle, by cause")
            for cause, stretches in idle.causes:
                for start, end in _columns(stretches, "start_ns", "end_ns"):
                    yield self._slice("gpu_idle", json.dumps(cause), (start, end), f'"pid": {pid}, "tid": {tid}')

    def _launched_by(self, call: int) -> str:
        return f', "correlation": {self._trace.calls.correlation[call]}' if call >= 0 else ""

    def _flow(self, call: int, where: str, start_ns: int) -> Iterator[str]:
        if call >= 0:
            flow, calls = next(self._flows), self._trace.calls
            yield self._flow_end("s", flow, self._thread[int(calls.thread[call])], int(calls.start_ns[call]))
            yield self._flow_end("f", flow, where, start_ns)

    def _flow_end(self, side: str, flow: int, where: str, time_ns: int) -> str:
        at = _microseconds(time_ns + self._layout.shift_ns)
        bound = ', "bp": "e"' if side == "f" else ""
        return f'{{"ph": "{side}", "cat": "ac2g", "name": "ac2g", "id": {flow}, {where}, "ts": {at}{bound}}}'

    def _slice(self, category: str, name: str, times: tuple[int, int], where: str, arguments: str = "") -> str:
        start_ns, end_ns = times
        start = _microseconds(start_ns + self._layout.shift_ns)
        said = f', "args": {{{arguments}}}' if arguments else ""
        duration = _microseconds(end_ns - start_ns)
        return f'{{"ph": "X", "cat": "{category}", "name": {name}, {where}, "ts": {start}, "dur": {duration}{said}}}'


def _memory_rows(memory: MemoryTracks, pid: int, begin_ns: int, free: Iterator[int]) -> Iterator[str]:
    for name, spans in (("steps", memory.steps), ("phases", memory.phases)):
        tid = next(free)
        if spans:
            yield _metadata("thread_name", pid, tid, name)
        for span in spans:
            start, end = ((max(us - memory.first_us, 0)) * 1000 + begin_ns for us in (span.start_us, span.end_us))
            yield (
                f'{{"ph": "X", "cat": "memory_phase", "name": {json.dumps(span.name)}, "pid": {pid}, "tid": {tid},'
                f' "ts": {_microseconds(start)}, "dur": {_microseconds(max(end - start, 0))}}}'
            )
    for counter in memory.counters:
        name = json.dumps(counter.name)
        for time, value in zip(counter.time_ns.tolist(), counter.bytes.tolist(), strict=True):
            at = _microseconds(time + begin_ns)
            yield f'{{"ph": "C", "name": {name}, "pid": {pid}, "ts": {at}, "args": {{"bytes": {value}}}}}'


def _metadata(kind: str, pid: int, tid: int, name: str) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})


def _columns(table: object, *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(getattr(table, name).tolist() for name in names), strict=True)


def _microseconds(time_ns: int) -> str:
    """Return a time as a JSON number of microseconds, exact."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"
