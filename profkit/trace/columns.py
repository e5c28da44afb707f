"""A trace as columns: what every reader produces and every analysis of time consumes.

Each table is a set of NumPy arrays of one length. Names are interned: columns hold indices into ``Trace.names``. Times
are integer nanoseconds on the capture's own clock. Processes and threads are the reader's own integers (nsys: the
serialized ``globalPid`` and ``globalTid``), meaningful only against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from profkit.errors import TraceError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Severity = Literal["info", "warning", "error"]
Measure = Literal["gpu-kernel", "cpu-operator"]

_FEW_VALUES = 48
_SMALL_SPAN = 1 << 22

NO_LAUNCH = -1
"""``launch_thread`` of work whose launch was not recorded."""


class _Columns:
    """A table: a dataclass of columns of one length; the first one always is there."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))


class _Launched(_Columns):
    """Rows of work that calls launched."""

    launch_ns: Ints
    node_ns: Ints | None

    @property
    def placed_ns(self) -> Ints:
        """That is ``launch_ns``, but of a CUDA graph's nodes ``node_ns``: all of them were launched by one call, and
        each has a moment of its own there (`profkit.analysis.placing.expanded_ranges`).
        """
        return self.launch_ns if self.node_ns is None else self.node_ns


@dataclass(frozen=True, eq=False)
class Work(_Launched):
    """What is measured: GPU kernels and whole CUDA graphs, or CPU operators.

    ``duration_ns`` is ``end_ns - start_ns`` for GPU work and the self time (less the children's) for CPU operators.
    ``launch_ns`` is when the launching call began, ``launch_thread`` who made it (`NO_LAUNCH` if unknown); a CPU
    operator launches itself. ``device`` numbers the trace's GPUs: two GPUs never share a number, whatever the processes
    that use them call them. ``is_graph`` marks CUDA graphs traced whole. ``sequence`` is the index in `Trace.origins`
    of the forward operator that a backward operator belongs to, or -1; ``operator`` the name of the innermost operator
    in which a kernel was launched, or -1. Kineto alone knows these two. ``compiled_launch`` is the name of the range
    around the launch in compiled code, or -1 (`analysis.placing.expanded_ranges`). ``graph_node`` numbers the nodes of
    the CUDA graph that a launch replayed, in the order in which they were captured, from 0; -1 for what is no node.
    """

    name: Ints
    start_ns: Ints
    end_ns: Ints
    duration_ns: Ints
    device: Ints
    stream: Ints
    process: Ints
    launch_ns: Ints
    launch_thread: Ints
    is_graph: Bools
    sequence: Ints | None = None
    operator: Ints | None = None
    compiled_launch: Ints | None = None
    graph_node: Ints | None = None
    node_ns: Ints | None = None
    collective: Ints | None = None
    """The index in `Trace.collectives` of the collective that a kernel runs, or -1."""


@dataclass(frozen=True)
class CollectiveCall:
    """What a trace says of one collective; None and () where it does not say.

    ``kind`` is as `profkit.names.kind_of_collective` says. ``byte_count`` is the larger of what goes in and what comes
    out. ``sequence`` counts the collectives of a group alike on all its ranks.
    """

    kind: str
    group: str | None = None
    ranks: tuple[int, ...] = ()
    dimension: str | None = None
    dtype: str | None = None
    byte_count: int | None = None
    sequence: int | None = None


@dataclass(frozen=True, eq=False)
class Origins(_Columns):
    """Where forward operators ran, for the backward operators that point back at them (`Work.sequence`)."""

    start_ns: Ints
    thread: Ints


@dataclass(frozen=True, eq=False)
class Copies(_Launched):
    """Memory copies and sets on the GPU; columns as in `Work`."""

    start_ns: Ints
    end_ns: Ints
    device: Ints
    process: Ints
    launch_ns: Ints
    launch_thread: Ints
    is_memset: Bools
    from_host: Bools
    """Whether it copies from the host's memory to a GPU's; False where the trace does not say."""
    byte_count: Ints
    stream: Ints
    graph_node: Ints | None = None
    node_ns: Ints | None = None


@dataclass(frozen=True, eq=False)
class Calls(_Columns):
    """CUDA API calls (runtime and driver), every one that was recorded, sorted by time."""

    name: Ints
    start_ns: Ints
    end_ns: Ints
    thread: Ints
    process: Ints
    correlation: Ints
    has_work: Bools
    """Whether a kernel, graph, copy or set carries the call's correlation id."""
    failed: Bools
    """Whether the call returned an error."""


BEFORE_TRACE = -2
"""The call that recorded an event, where the trace begins after it."""


@dataclass(frozen=True, eq=False)
class Syncs(_Columns):
    """What a call waits for, where the profiler says so; ``call`` is its row in `Calls`.

    The call's name says whether a stream waits or the host (nsys 2025 gives both the type "stream waits"). ``stream``
    is the stream that waits or is waited for, -1 if none is meant. ``record`` is the call that recorded the event, and
    ``record_device`` and ``record_stream`` where; -1 if it is unknown, `BEFORE_TRACE` if the trace begins after it.
    """

    call: Ints
    device: Ints
    stream: Ints
    record: Ints
    record_device: Ints
    record_stream: Ints


@dataclass(frozen=True, eq=False)
class Ranges(_Columns):
    """Named host intervals: NVTX push/pop and start/end ranges, or torch.profiler's user annotations.

    ``end_ns`` of a range that never ended is the end of the capture, with ``is_open`` set. ``end_thread`` differs from
    ``thread`` only for a start/end range closed elsewhere. ``payload`` is sparse: range index → number.
    """

    name: Ints
    domain: Ints
    start_ns: Ints
    end_ns: Ints
    process: Ints
    thread: Ints
    end_thread: Ints
    is_open: Bools
    payload: dict[int, int | float] = field(default_factory=dict)
    is_replayed: Bools | None = None
    """Which were open at the capture of a CUDA graph, and stand for its replay: no Python ran in them. None: none."""

    @property
    def was_open(self) -> Bools:
        """Which were open themselves, so that their times are real; the others' only say what encloses what."""
        return np.ones(len(self), dtype=np.bool_) if self.is_replayed is None else ~self.is_replayed

    def sum_open(self, rows: Ints) -> int | None:
        """Return how long these ranges were open in all, None if no Python ran in any."""
        known = rows[self.was_open[rows]]
        return int((self.end_ns[known] - self.start_ns[known]).sum()) if len(known) or not len(rows) else None


@dataclass(frozen=True)
class Diagnostic:
    """A message of the profiler about itself: ``severity`` is ``info``, ``warning`` or ``error``.

    ``silent_pid`` is the process that it speaks of, where nothing of that process was recorded.
    """

    severity: Severity
    text: str
    silent_pid: int | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """One capture of time, from one file."""

    path: str
    source: Literal["nsys", "kineto"]
    product: str
    """What wrote it, in its own words: ``Nsight Systems 2025.3.2.0 (schema 3.20.3)``."""
    measure: Measure
    names: list[str]
    work: Work
    copies: Copies
    calls: Calls
    ranges: Ranges
    thread_names: dict[int, str]
    process_ids: dict[int, int]
    """Process → the operating system's pid."""
    main_threads: frozenset[int]
    """The thread in which each process began (its id is the pid)."""
    gpus: tuple[str, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    origins: Origins | None = None
    has_kernel_table: bool = True
    """False when the capture recorded no GPU work at all: NVTX alone, or a run without CUDA."""
    notes: tuple[str, ...] = ()
    """What the reader had to leave out or assume, one sentence each; shown as warnings."""
    ranks: dict[int, int] = field(default_factory=dict)
    """Process → its rank in a distributed run, where the capture itself says so."""

    collectives: tuple[CollectiveCall, ...] = ()
    """What the capture itself says of collectives; `Work.collective` points here."""

    syncs: Syncs | None = None
    """What calls wait for; None where the profiler does not say."""

    clock_base_ns: int = 0
    """What its times count from, where captures of one machine may count from different moments."""

    has_invisible_ranges: bool = False
    """True when NVTX domains were recorded and not one range: the fingerprint of nvtx ≥ 0.2.12 under an old nsys."""


LARGEST_TIME_NS = 2**62
"""No time is as large, and no sum of durations: 146 years, and sums of two still fit in 64 bits."""


def refuse_impossible(trace: Trace) -> None:
    """Raise if a trace is damaged, or larger in some respect than any program's.

    Raises:
        TraceError: a time, or the sum of a table's durations, does not fit in 64 bits with room to add; more ranges are
            open on one thread at once than `MOST_OPEN_RANGES`; or there are more than `MOST_GPUS`, `MOST_PROCESSES` or
            `MOST_THREADS`, each of which is looked at by itself.
    """
    _refuse_impossible_times(trace)
    _refuse_too_many_open(trace)
    _refuse_too_many_places(trace)


def _refuse_impossible_times(trace: Trace) -> None:
    for what, table in (
        ("kernels", trace.work),
        ("copies", trace.copies),
        ("calls", trace.calls),
        ("ranges", trace.ranges),
    ):
        if not len(table):
            continue
        start_ns, end_ns = table.start_ns.astype(np.float64), table.end_ns.astype(np.float64)
        total = float(np.abs(end_ns - start_ns).sum())
        if max(-start_ns.min(), -end_ns.min(), start_ns.max(), end_ns.max(), total) >= LARGEST_TIME_NS:
            raise TraceError(
                f"{trace.path}: holds impossible times of {what}, or rows without one; the file is damaged: export or"
                " record it again"
            )


def report_left_out(what: str, count: int, first_name: str) -> Diagnostic:
    """Return the message that rows with impossible times are not in a trace: its self-check fails."""
    rows = "1 row" if count == 1 else f"{count:,} rows"
    text = f"{rows} of {what} with impossible times left out, the first named {first_name[:80]!r}"
    return Diagnostic("error", text)


MOST_OPEN_RANGES = 2500
"""As many ranges may be open on a thread at once: more than Python nests calls, or a server holds requests."""


def _refuse_too_many_open(trace: Trace) -> None:
    """To place work under each of them takes time, and memory, that grow with the square of their number."""
    ranges = trace.ranges
    change = np.repeat([1, -1], len(ranges))
    thread = np.concatenate([ranges.thread, ranges.thread])
    # What ends at a moment ends before what begins then.
    order = np.lexsort((change, np.concatenate([ranges.start_ns, ranges.end_ns]), thread))
    most = int(np.cumsum(change[order]).max(initial=0))
    if most > MOST_OPEN_RANGES:
        raise TraceError(
            f"{trace.path}: {most:,} ranges are open on one thread at once; more than {MOST_OPEN_RANGES:,} are not read"
        )


MOST_GPUS, MOST_PROCESSES, MOST_THREADS = 256, 4096, 2**14
"""No machine has as many GPUs, each divided into seven; no program as many processes and threads that do something."""


def _refuse_too_many_places(trace: Trace) -> None:
    work, copies, ranges = trace.work, trace.copies, trace.ranges
    for what, most, columns in (
        ("GPUs", MOST_GPUS, (work.device, copies.device)),
        ("processes", MOST_PROCESSES, (work.process, copies.process, ranges.process)),
        ("threads", MOST_THREADS, (work.launch_thread, copies.launch_thread, ranges.thread, ranges.end_thread)),
    ):
        count = len(distinct_values(np.concatenate([distinct_values(column) for column in columns])))
        if count > most:
            raise TraceError(f"{trace.path}: holds {count:,} {what}; captures with more than {most:,} are not read")


Table = TypeVar("Table", Work, Copies, Calls, Syncs, Ranges, Origins)


def array_columns(table: Table) -> list[str]:
    return [field.name for field in fields(table) if isinstance(getattr(table, field.name), np.ndarray)]


def take_rows(table: Table, rows: Bools | Ints) -> Table:
    taken: dict[str, Any] = {name: getattr(table, name)[rows] for name in array_columns(table)}
    if isinstance(table, Ranges) and table.payload:
        kept = np.arange(len(table))[rows].tolist()
        taken["payload"] = {new: table.payload[old] for new, old in enumerate(kept) if old in table.payload}
    return replace(table, **taken)


def take_calls(trace: Trace, rows: Bools | Ints) -> Trace:
    kept = np.arange(len(trace.calls))[rows]
    syncs = trace.syncs
    if syncs is not None:
        number = np.full(len(trace.calls) + 1, BEFORE_TRACE, dtype=np.int64)
        number[kept] = np.arange(len(kept))
        record = np.where(syncs.record < 0, syncs.record, number[syncs.record])
        syncs = replace(syncs, call=number[syncs.call], record=record)
        syncs = take_rows(syncs, syncs.call >= 0)
    return replace(trace, calls=take_rows(trace.calls, kept), syncs=syncs)


def join_tables(tables: Sequence[Table]) -> Table:
    """Return the rows of several tables as one; a column that some of them lack is -1 there."""

    def column(table: Table, name: str) -> Ints | Bools:
        values: Ints | Bools | None = getattr(table, name)
        return np.full(len(table), -1) if values is None else values

    names = dict.fromkeys(name for table in tables for name in array_columns(table))
    joined: dict[str, Any] = {name: np.concatenate([column(table, name) for table in tables]) for name in names}
    if isinstance(tables[0], Ranges):
        begun = accumulate(map(len, tables), initial=0)
        joined["payload"] = {
            begin + row: number
            for begin, table in zip(begun, tables, strict=False)
            if isinstance(table, Ranges)
            for row, number in table.payload.items()
        }
    return replace(tables[0], **joined)


def distinct_values(values: Ints) -> Ints:
    """Return the distinct values in order; quick where they are small numbers, as ids are."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    if high - low > _SMALL_SPAN:
        # What np.unique does for plain arrays, without the masked ones that it would load a module for.
        ordered = np.sort(values)
        distinct: Ints = ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])]
        return distinct
    present = np.zeros(high - low + 1, dtype=np.bool_)
    present[values - low] = True
    return np.flatnonzero(present) + low


def rows_by_value(values: Ints) -> dict[int, Ints]:
    """Return the row numbers of each distinct value, in order; made for columns of few values, such as threads."""
    if not len(values):
        return {}
    # Equal values come in runs, so that the beginnings of runs are few.
    distinct = distinct_values(values[np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))])
    if len(distinct) == 1:
        return {int(distinct[0]): np.arange(len(values))}
    if len(distinct) <= _FEW_VALUES:
        return {value: np.flatnonzero(values == value) for value in distinct.tolist()}
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], distinct)
    return dict(zip(distinct.tolist(), np.split(order, first[1:]), strict=True))


class NamesWithNew:
    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = list(strings)
        self._index = {name: at for at, name in enumerate(strings)}

    def intern(self, name: str) -> int:
        at = self._index.setdefault(name, len(self.strings))
        if at == len(self.strings):
            self.strings.append(name)
        return at


_NODE_NUMBERS = (1 << 32) - 1


def number_in_graph(node_id: Ints) -> Ints:
    """Return the number of each node in its CUDA graph; -1 stays.

    CUPTI's id of a node is that of its graph in the upper 32 bits and, below, the node's number in the order in which
    the nodes were made; a graph keeps them where it is made executable.
    """
    return np.where(node_id < 0, -1, node_id & _NODE_NUMBERS)


def empty_ints() -> Ints:
    return np.empty(0, dtype=np.int64)
