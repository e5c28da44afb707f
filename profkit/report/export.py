"""What others read: a Chrome trace (``.json.gz``) for timeline viewers, such as Perfetto, and a copy to share.

Two kernels that run at once on one stream, or two copies, stand on two tracks of one name, and a range that crosses
another one of its thread on a track of its own: Perfetto drops slices that overlap on a track.

Rows have the categories and arguments of torch.profiler's.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from heapq import heappop, heappush
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from profkit.analysis.opened import OpenedTrace
from profkit.analysis.placing.attribution import PlacedRows
from profkit.analysis.self_check import SelfCheck
from profkit.analysis.tree.range_tree import kind_paths
from profkit.names import kind_of
from profkit.report.document import Column, Document, Lines, Table
from profkit.report.page.step import EVIDENCE
from profkit.report.units import BYTES, TEXT, format_count
from profkit.sharing import SharedCopy
from profkit.text_kinds import KERNEL, OPERATOR
from profkit.trace.columns import NO_LAUNCH, Copies, Ints, Trace, Work, distinct_values, empty_ints, rows_by_value

_ROWS_AT_ONCE = 8192


def _find_owners(trace: Trace) -> dict[int, int]:
    owners: dict[int, int] = {}
    tables = (
        (trace.ranges.process, trace.ranges.thread),
        (trace.ranges.process, trace.ranges.end_thread),
        (trace.calls.process, trace.calls.thread),
        (trace.work.process, trace.work.launch_thread),
        (trace.copies.process, trace.copies.launch_thread),
    )
    for process, thread in tables:
        known, first = np.unique(thread, return_index=True)
        for number, row in zip(known.tolist(), first.tolist(), strict=True):
            if number != NO_LAUNCH:
                owners.setdefault(number, int(process[row]))
    return owners


def _launching_calls(trace: Trace, rows: Work | Copies) -> Ints:
    calls, launching = trace.calls, np.full(len(rows), -1, dtype=np.int64)
    calls_of = rows_by_value(calls.thread)
    for thread, mine in rows_by_value(rows.launch_thread).items():
        # Calls are sorted by start. Of two that begin together, the first recorded is the outer one, whose time it is.
        theirs = calls_of.get(thread, empty_ints())
        at = np.searchsorted(calls.start_ns[theirs], rows.launch_ns[mine], side="left")
        inside = at < len(theirs)
        inside[inside] = calls.start_ns[theirs[at[inside]]] == rows.launch_ns[mine[inside]]
        launching[mine[inside]] = theirs[at[inside]]
    return launching


def _assign_lanes(start_ns: Ints, end_ns: Ints) -> list[int]:
    lanes = [0] * len(start_ns)
    running: list[tuple[int, int]] = []
    free: list[int] = []
    order = np.lexsort((end_ns, start_ns))
    for row, start, end in zip(order.tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True):
        while running and running[0][0] <= start:
            heappush(free, heappop(running)[1])
        lanes[row] = heappop(free) if free else len(running)
        heappush(running, (end, lanes[row]))
    return lanes


def _find_crossing(start_ns: Ints, end_ns: Ints) -> list[int]:
    crossing = []
    around: list[int] = []
    order = np.lexsort((-end_ns, start_ns))
    for row, start, end in zip(order.tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True):
        while around and around[-1] <= start:
            around.pop()
        if around and end > around[-1]:
            crossing.append(row)
        else:
            around.append(end)
    return crossing


def write_chrome_trace(file: IO[bytes], opened: OpenedTrace, *, zipped: bool) -> None:
    """Write a trace as Chrome JSON. The same input gives the same bytes."""
    if not zipped:
        _write_json(file, opened)
        return
    # With a name or a time in it, two exports would differ.
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as target:
        _write_json(target, opened)


def _write_json(target: IO[bytes] | gzip.GzipFile, opened: OpenedTrace) -> None:
    target.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"
    rows = _Rows(opened).all()
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        target.write((separator + ",\n".join(batch)).encode("utf-8", "replace"))
        separator = ",\n"
    target.write(b"\n]}\n")


class _Rows:
    """The rows of a trace, whose processes and threads have numbers that no two share."""

    def __init__(self, opened: OpenedTrace) -> None:
        self._attribution, self._ranks = opened.attribution, opened.ranks
        self._trace = trace = opened.recorded
        self._owners = _find_owners(trace)
        launched = (distinct_values(table.process).tolist() for table in (trace.work, trace.copies))
        processes = sorted({*self._owners.values(), *chain(*launched)})
        self._pids = {process: number for number, process in enumerate(processes, 1)}
        self._free_tids = count(len(self._pids) + 1)
        # A main thread has the number of its process, as Perfetto takes it.
        self._tids = {
            thread: self._pids[process] if thread in trace.main_threads else next(self._free_tids)
            for thread, process in sorted(self._owners.items())
        }
        tables = (trace.work, trace.copies, trace.calls, trace.ranges)
        self._first_ns = min(int(table.start_ns.min(initial=0)) for table in tables)
        self._paths = [json.dumps(path) for path in kind_paths(opened.attribution)]
        self._names = [json.dumps(name) for name in trace.names]
        self._thread = {
            thread: f'"pid": {self._pids[process]}, "tid": {self._tids[thread]}'
            for thread, process in self._owners.items()
        }
        self._flows = count(1)

    def all(self) -> Iterator[str]:
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

    def _metadata(self) -> Iterator[str]:
        labels = {process: f"rank {number}" for number, process in self._ranks.members}
        for process, pid in self._pids.items():
            yield _metadata("process_name", pid, 0, labels.get(process, "process"))
        for thread, process in self._owners.items():
            name = self._trace.thread_names.get(thread)
            if name:
                yield _metadata("thread_name", self._pids[process], self._tids[thread], name)

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
        ranges = self._trace.ranges
        aside: dict[int, tuple[str, str]] = {}
        for thread, mine in rows_by_value(ranges.thread).items():
            for at in _find_crossing(ranges.start_ns[mine], ranges.end_ns[mine]):
                pid, tid = self._pids[self._owners[thread]], next(self._free_tids)
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
        calls = _launching_calls(self._trace, work).tolist()
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
        calls = _launching_calls(self._trace, copies).tolist()
        for row, (start, end, device, is_memset, from_host, byte_count) in enumerate(columns):
            category = "gpu_memset" if is_memset else "gpu_memcpy"
            name = '"Memset"' if is_memset else '"Memcpy HtoD"' if from_host else '"Memcpy"'
            arguments = f'"device": {device}, "bytes": {byte_count}{placed[row]}{self._launched_by(calls[row])}'
            yield self._slice(category, name, (start, end), where[row], arguments)
            yield from self._flow(calls[row], where[row], start)

    def _tracks(self, rows: Work | Copies, stream: Ints, title: str) -> tuple[list[str], list[str]]:
        lanes = np.zeros(len(rows), dtype=np.int64)
        places = np.stack([rows.process, rows.device, stream])
        _, place_of_row = np.unique(places, axis=1, return_inverse=True)
        for mine in rows_by_value(place_of_row.reshape(-1)).values():
            lanes[mine] = _assign_lanes(rows.start_ns[mine], rows.end_ns[mine])
        tracks: dict[tuple[int, ...], str] = {}
        names = []
        of_row = []
        for place in zip(*places.tolist(), lanes.tolist(), strict=True):
            if place not in tracks:
                pid, tid = self._pids[place[0]], next(self._free_tids)
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

    def _launched_by(self, call: int) -> str:
        return f', "correlation": {self._trace.calls.correlation[call]}' if call >= 0 else ""

    def _flow(self, call: int, where: str, start_ns: int) -> Iterator[str]:
        if call >= 0:
            flow, calls = next(self._flows), self._trace.calls
            yield self._flow_end("s", flow, self._thread[int(calls.thread[call])], int(calls.start_ns[call]))
            yield self._flow_end("f", flow, where, start_ns)

    def _flow_end(self, side: str, flow: int, where: str, time_ns: int) -> str:
        at = _microseconds(time_ns - self._first_ns)
        bound = ', "bp": "e"' if side == "f" else ""
        return f'{{"ph": "{side}", "cat": "ac2g", "name": "ac2g", "id": {flow}, {where}, "ts": {at}{bound}}}'

    def _slice(self, category: str, name: str, times: tuple[int, int], where: str, arguments: str = "") -> str:
        start_ns, end_ns = times
        start = _microseconds(start_ns - self._first_ns)
        said = f', "args": {{{arguments}}}' if arguments else ""
        duration = _microseconds(end_ns - start_ns)
        return f'{{"ph": "X", "cat": "{category}", "name": {name}, {where}, "ts": {start}, "dur": {duration}{said}}}'


def _metadata(kind: str, pid: int, tid: int, name: str) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})


def _columns(table: object, *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(getattr(table, name).tolist() for name in names), strict=True)


def _microseconds(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


_COLUMNS = (
    Column("file", "written", TEXT, flexible=True),
    Column("bytes", "size", BYTES),
    Column("open_with", "open it with", TEXT),
)
_VIEWERS = "ui.perfetto.dev, chrome://tracing"


def build_export_document(capture: Path, output: Path, check: SelfCheck) -> Document:
    rows = [{"file": str(output), "bytes": output.stat().st_size, "open_with": _VIEWERS}]
    table = Table(_COLUMNS, rows)
    return Document("export", {"capture": str(capture), "files": rows}, [table], table, self_check=check.findings)


_KEPT_COLUMNS = (
    Column("kind", "kind", TEXT),
    Column("name", "names that stay", TEXT, flexible=True),
    Column("count", "names"),
)
_CODE = (KERNEL.title, OPERATOR.title)
_ALL = "all: --format json lists them"
_TOOLS = {"export": "nsys stats", "chrome": "Perfetto", "snapshot": "PyTorch's MemoryViz"}


def build_scrub_document(copy: SharedCopy) -> Document:
    """Return the names that stay in a copy, what of a run is not in it, and which programs open it.

    A name stands for all that differ from it in a number; those of kernels and operators, of which most are libraries',
    are counted. ``names`` in the JSON has every one.
    """
    counts = Counter(
        (kind, _ALL if kind in _CODE else kind_of(name)) for kind, names in copy.names.items() for name in names
    )
    rows = [{"kind": kind, "name": name, "count": count} for (kind, name), count in sorted(counts.items())]
    table = Table(_KEPT_COLUMNS, rows)
    lines = [f"{name}: not copied, {why}" for name, why in copy.left_out_files.items()]
    texts = format_count(copy.left_out_text_count, "text")
    lines.append(f"{copy.output} holds numbers and the names above; {texts} left out")
    tools = [_TOOLS[capture] for capture in copy.captures]
    if tools:
        lines.append(f"profkit opens the copy, and so does {' and '.join(tools)}")
    data = {**asdict(copy), "opens_in": ["profkit", *tools]}
    return Document("scrub", data, [table, Lines(lines)], table)
