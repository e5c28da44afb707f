"""One process's step as the columns that the replay runs: what the host called, and what ran on the GPU for it.

A call begins a recorded *gap* after the call before it ended: the last one of any thread, since a program's threads
mostly hand the baton to each other (the main thread waits while autograd's launches); where two calls overlap in time,
the last one of its own thread. An operation on the GPU follows the one before it on its stream. What is known of the
program besides its trace is in `ProgramFacts`: its lines of source, its data loader, the machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from profkit.names import DATA
from profkit.run.lines import LineTime
from profkit.trace.columns import Bools, Ints, Trace, distinct_values, rows_by_value

HOST, LAUNCH, WAIT, COPY = range(4)
"""What a call is: one that does nothing on the GPU, one that launches, one that waits for the GPU, and a copy from or
to pageable memory, which ends after it has run."""

KERNEL, MEMCPY, MEMSET, NODE = range(4)
"""What an operation is; a node is one of a CUDA graph after the first on its stream."""

NONE = -1
"""The call before the first one, and the operation before a stream's first one."""

_WAITS = re.compile(r"^(cuda|cu)(Device|Stream|Event|Ctx|Thread)Synchronize")
_STREAM_WAITS = re.compile(r"^(cuda|cu)StreamWaitEvent")
_EVENTS = re.compile(r"^(cuda|cu)(EventRecord|StreamWaitEvent)")
_ACTS = re.compile(rf"{_WAITS.pattern}|{_EVENTS.pattern}")
_COPIES = re.compile(r"^(cuda|cu)Memcpy")


@dataclass(eq=False)
class StepColumns:
    """A step in columns; lists, because the replay reads them one by one.

    Times are nanoseconds since the step began. Of calls: ``before`` is the call whose end the gap is counted from,
    ``own_ns`` how long the call took by itself, ``targets`` the operations that it waits for, ``launches`` those that
    it launches, from the first to before the last. Of operations: ``previous`` is the one before on its stream,
    ``awaited`` operations of other streams that it waits for, ``slots`` how many places of its stream's queue it takes.
    ``free_ns`` is until when earlier steps' work kept each stream busy, and ``backlog_ns`` when those of its operations
    begin that wait in the queue when the step begins.
    """

    call: Ints
    """Rows of the trace's calls."""
    thread: list[int]
    before: list[int]
    gap_ns: list[int]
    own_ns: list[int]
    kind: list[int]
    targets: list[Sequence[int]]
    launches: list[tuple[int, int]]
    call_start_ns: list[int]
    call_end_ns: list[int]

    row: Ints
    """Rows of the trace's work; those of its copies follow on."""
    launcher: list[int]
    operation: list[int]
    stream: list[int]
    previous: list[int]
    duration_ns: list[int]
    awaited: dict[int, list[int]]
    start_ns: list[int]
    end_ns: list[int]
    slots: list[int]
    free_ns: dict[int, int] = field(default_factory=dict)
    backlog_ns: dict[int, list[int]] = field(default_factory=dict)
    between_ns: list[int] = field(default_factory=list)
    """Between each operation and the one before it on its stream.

    `profkit.analysis.step_replay.replay.prepare` fills in this and what follows.
    """
    latency_ns: list[int] = field(default_factory=list)
    """Between the end of its launch and each operation's start, if nothing else holds it up."""
    stall_ns: dict[int, int] = field(default_factory=dict)
    """How much later an operation began than the rules say."""
    wake_ns: dict[int, int] = field(default_factory=dict)
    """Of waits: how long after its target's end the host went on, where the recording shows it."""
    graph_share: dict[int, float] = field(default_factory=dict)
    """Of calls that launch a CUDA graph: after which share of its time the first operation may begin."""
    late_ns: int = 0
    """How much longer the mean step waits for data than this one: such waits come in bursts, which no work hides."""
    inferred_waits: int = 0
    """How many waits of streams are for events of which the profiler does not say where they were recorded."""

    @property
    def recorded_ns(self) -> int:
        """How long the step took: until its host and its GPUs had ended."""
        return max(max(self.call_end_ns, default=0), max(self.end_ns, default=0))

    def waits_among(self, calls: Iterable[int]) -> list[int]:
        """Return those of some calls in which the host waits for the GPU, or until it has copied pageable memory."""
        return [call for call in calls if self.kind[call] in (WAIT, COPY)]

    def launching(self, calls: Iterable[int]) -> list[int]:
        return [call for call in calls if range(*self.launches[call])]

    def rows_of(self, calls: Iterable[int]) -> list[int]:
        """Return the operations that some calls launch."""
        return [row for call in calls for row in range(*self.launches[call])]


@dataclass(frozen=True, eq=False)
class _Operations:
    """Kernels, then copies, of one process; ``call`` is the place of the launching one among its outermost calls."""

    row: Ints
    kind: Ints
    start_ns: Ints
    end_ns: Ints
    stream: Ints
    call: Ints
    slots: Ints
    """How many places of its stream's queue it takes, with the events that are recorded and awaited after it."""

    def take(self, rows: Ints | Bools) -> _Operations:
        return _Operations(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class ProcessCalls:
    """One process's calls and operations; `step` cuts a step out of them.

    Only the outermost of nested calls count: a runtime call makes driver calls. What a thread does that only asks
    whether events have happened, as NCCL's watchdog, holds nothing up.
    """

    def __init__(self, trace: Trace, process: int) -> None:
        self._trace = trace
        calls = trace.calls
        mine = np.flatnonzero(calls.process == process)
        acts = calls.has_work | np.array([bool(_ACTS.match(name)) for name in trace.names], dtype=np.bool_)[calls.name]
        is_outer = np.zeros(len(calls), dtype=np.bool_)
        around = np.full(len(calls), NONE, dtype=np.int64)
        for rows in rows_by_value(calls.thread[mine]).values():
            here = mine[rows]
            if acts[here].any():
                reach = np.maximum.accumulate(calls.end_ns[here])
                is_outer[here] = np.append(True, calls.start_ns[here[1:]] >= reach[:-1])
                around[here] = np.maximum.accumulate(np.where(is_outer[here], here, NONE))
        self._calls = np.flatnonzero(is_outer)
        self._place = np.where(around == NONE, NONE, np.cumsum(is_outer)[around] - 1)
        """Of each call of the trace, the place of the outermost one around it."""
        self._streams: dict[tuple[int, int], int] = {}
        self._operations = self._read_operations(process)
        self._syncs = self._read_syncs()

    def _read_operations(self, process: int) -> _Operations:
        trace = self._trace
        work, copies = trace.work, trace.copies
        parts = []
        for table, offset, kind in (
            (work, 0, np.full(len(work), KERNEL)),
            (copies, len(work), np.where(copies.is_memset, MEMSET, MEMCPY)),
        ):
            rows = np.flatnonzero((table.process == process) & (table.launch_thread >= 0))
            call = np.append(self._place, NONE)[self._find_calls(table.launch_ns[rows], table.launch_thread[rows])]
            rows, call = rows[call != NONE], call[call != NONE]
            stream = self._number_streams(table.device[rows], table.stream[rows])
            slots = np.ones(len(rows), dtype=np.int64)
            parts.append(
                _Operations(rows + offset, kind[rows], table.start_ns[rows], table.end_ns[rows], stream, call, slots)
            )
        joined = _Operations(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in _Operations.__dataclass_fields__)
        )
        # Operations of one stream run in the order in which they were launched.
        ordered = joined.take(np.lexsort((joined.start_ns, joined.call)))
        of_events = np.array([bool(_EVENTS.match(name)) for name in trace.names], dtype=np.bool_)
        events = np.flatnonzero(of_events[trace.calls.name[self._calls]])
        before = np.searchsorted(ordered.call, events, side="right") - 1
        np.add.at(ordered.slots, before[before >= 0], 1)
        return ordered

    def _find_calls(self, launch_ns: Ints, thread: Ints) -> Ints:
        """Two calls of one thread never begin together."""
        starts, threads = self._trace.calls.start_ns, self._trace.calls.thread
        last = len(starts) - 1
        found = np.minimum(np.searchsorted(starts, launch_ns), last)
        for _ in range(_MOST_AT_ONCE):
            other = (starts[found] == launch_ns) & (threads[found] != thread)
            if not other.any():
                break
            found = np.where(other, np.minimum(found + 1, last), found)
        return np.where((starts[found] == launch_ns) & (threads[found] == thread), found, NONE)

    def _number_streams(self, device: Ints, stream: Ints) -> Ints:
        numbers = np.empty(len(stream), dtype=np.int64)
        for at in distinct_values(device).tolist():
            for one in distinct_values(stream[device == at]).tolist():
                numbers[(device == at) & (stream == one)] = self._streams.setdefault((at, one), len(self._streams))
        return numbers

    def _read_syncs(self) -> dict[int, _Sync]:
        syncs = self._trace.syncs
        if syncs is None:
            return {}
        columns = (syncs.call, syncs.device, syncs.stream, syncs.record, syncs.record_device, syncs.record_stream)
        found = {}
        for call, device, stream, record, at_device, at_stream in zip(*(c.tolist() for c in columns), strict=True):
            place = int(self._place[call])
            if place >= 0:
                # `BEFORE_TRACE` stays: nothing that a step launched is waited for then.
                recorded = int(self._place[record]) if record >= 0 else record
                found[place] = _Sync(
                    self._streams.get((device, stream), NONE),
                    stream >= 0,
                    recorded,
                    self._streams.get((at_device, at_stream), NONE),
                )
        return found

    def step(self, start_ns: int, end_ns: int, host_end_ns: int | None = None) -> StepColumns:
        """Return the calls that began in ``[start_ns, end_ns)`` and what they launched.

        Python after the last of them, until ``host_end_ns``, is the gap before one more, which takes no time.
        """
        calls = self._trace.calls
        first, last = np.searchsorted(calls.start_ns[self._calls], [start_ns, end_ns]).tolist()
        rows = self._calls[first:last]
        operations = self._operations
        mine = operations.take((operations.call >= first) & (operations.call < last))
        starts, ends = ((column[rows] - start_ns).tolist() for column in (calls.start_ns, calls.end_ns))
        threads = calls.thread[rows].tolist()
        before, gaps = _gaps(starts, ends, threads)
        launcher = (mine.call - first).tolist()
        streams = mine.stream.tolist()
        previous = _previous(streams)
        is_node = [at != NONE and launcher[at] == launcher[row] for row, at in enumerate(previous)]
        free_ns, backlog_ns = self._earlier(first, start_ns)
        step = StepColumns(
            call=rows,
            thread=threads,
            before=before,
            gap_ns=gaps,
            own_ns=[end - start for start, end in zip(starts, ends, strict=True)],
            kind=[HOST] * len(rows),
            targets=[()] * len(rows),
            launches=_intervals(mine.call - first, len(rows)),
            call_start_ns=starts,
            call_end_ns=ends,
            row=mine.row,
            launcher=launcher,
            operation=np.where(np.array(is_node, dtype=np.bool_), NODE, mine.kind).tolist(),
            stream=streams,
            previous=previous,
            duration_ns=(mine.end_ns - mine.start_ns).tolist(),
            awaited={},
            start_ns=(mine.start_ns - start_ns).tolist(),
            end_ns=(mine.end_ns - start_ns).tolist(),
            slots=mine.slots.tolist(),
            free_ns=free_ns,
            backlog_ns=backlog_ns,
        )
        self._find_waits(step, first)
        if ends and host_end_ns is not None and host_end_ns - start_ns > max(ends):
            _add_end(step, host_end_ns - start_ns)
        return step

    def _earlier(self, first: int, start_ns: int) -> tuple[dict[int, int], dict[int, list[int]]]:
        """Return until when operations launched before keep each stream busy, and when the queued ones begin."""
        earlier = self._operations.take((self._operations.call < first) & (self._operations.end_ns > start_ns))
        free_ns, backlog_ns = {}, {}
        for stream in distinct_values(earlier.stream).tolist():
            mine = earlier.take(earlier.stream == stream)
            free_ns[stream] = int(mine.end_ns.max()) - start_ns
            queued = mine.take(mine.start_ns > start_ns)
            backlog_ns[stream] = np.repeat(np.sort(queued.start_ns) - start_ns, queued.slots).tolist()
        return free_ns, backlog_ns

    def _find_waits(self, step: StepColumns, first: int) -> None:
        names = [self._trace.names[name] for name in self._trace.calls.name[step.call].tolist()]
        last: dict[int, int] = {}
        recorded: dict[int, dict[int, int]] = {}
        latest: dict[int, int] = {}
        pending: dict[int, list[int]] = {}
        inferred: dict[int, dict[int, int]] = {}
        for at, name in enumerate(names):
            sync = self._syncs.get(first + at)
            begin, end = step.launches[at]
            if _WAITS.match(name):
                step.kind[at] = WAIT
                is_of_event = "Event" in name and (sync is None or sync.record == NONE)
                step.targets[at] = _ended_before(step, at, last) if is_of_event else _targets(sync, last, recorded)
            elif _STREAM_WAITS.match(name):
                target = None if sync is None else recorded.get(sync.record, {}).get(sync.recorded_on)
                if sync is None or sync.record == NONE:
                    step.inferred_waits += 1
                    inferred[NONE if sync is None else sync.stream] = latest
                elif target is not None:
                    pending.setdefault(sync.stream, []).append(target)
            elif begin < end:
                is_held = _COPIES.match(name) and all(_holds(step, at, row) for row in range(begin, end))
                step.kind[at] = COPY if is_held else LAUNCH
            elif "EventRecord" in name:
                recorded[first + at] = latest = dict(last)
            for row in range(begin, end):
                stream = step.stream[row]
                waits = pending.pop(stream, [])
                for place in (stream, NONE):  # where the waiting stream is unknown, it is the one that runs next
                    waits += _awaited(step, row, inferred.pop(place, {}))
                if waits:
                    step.awaited[row] = waits
                last[stream] = row


def _holds(step: StepColumns, call: int, row: int) -> bool:
    """Return whether a call holds the host until it has copied: all, or most of what takes long.

    The last piece of pageable memory is on its way when the call returns.
    """
    left_ns, duration_ns = step.end_ns[row] - step.call_end_ns[call], step.end_ns[row] - step.start_ns[row]
    return left_ns <= 0 or (duration_ns > _LONG_COPY_NS and 2 * left_ns < duration_ns)


_LONG_COPY_NS = 100_000
_MOST_AT_ONCE = 64
"""How many threads may begin a call in the same nanosecond."""


@dataclass(frozen=True)
class _Sync:
    """What a call waits for: a stream's number (``names_stream`` is set if one is meant), or a recorded event."""

    stream: int
    names_stream: bool
    record: int
    recorded_on: int


def _add_end(step: StepColumns, end_ns: int) -> None:
    last = max(range(len(step.call_end_ns)), key=step.call_end_ns.__getitem__)
    step.call = np.append(step.call, step.call[-1:])
    step.thread.append(step.thread[last])
    step.before.append(last)
    step.gap_ns.append(end_ns - step.call_end_ns[last])
    step.own_ns.append(0)
    step.kind.append(HOST)
    step.targets.append(())
    step.launches.append((len(step.row), len(step.row)))
    step.call_start_ns.append(end_ns)
    step.call_end_ns.append(end_ns)


def _targets(sync: _Sync | None, last: dict[int, int], recorded: dict[int, dict[int, int]]) -> list[int]:
    """Return the operations that a waiting call waits for: the one before the event, the stream's last, or all last."""
    if sync is not None and sync.record != NONE:
        target = recorded.get(sync.record, {}).get(sync.recorded_on)
        return [] if target is None else [target]
    if sync is not None and sync.names_stream:
        return [last[sync.stream]] if sync.stream in last else []
    return sorted(last.values())


def _awaited(step: StepColumns, row: int, latest: Mapping[int, int]) -> list[int]:
    """Return which operations one may have waited for, of those that streams had last when an event was recorded.

    Which event it was is unknown: none after an operation that ran on when this one began. Of each other stream it
    waits for the last one before: what truly is independent is then never run in another order than in the recording.
    """
    others = (other for stream, other in latest.items() if stream != step.stream[row])
    return [at for at in (_last_ended(step, other, step.start_ns[row]) for other in others) if at != NONE]


def _last_ended(step: StepColumns, row: int, time_ns: int) -> int:
    while row != NONE and step.end_ns[row] > time_ns:
        row = step.previous[row]
    return row


def _ended_before(step: StepColumns, call: int, last: Mapping[int, int]) -> list[int]:
    """Nothing that ran on when the call ended; so it is the operation that ended last before."""
    ended = [at for at in (_last_ended(step, row, step.call_end_ns[call]) for row in last.values()) if at != NONE]
    return [max(ended, key=step.end_ns.__getitem__)] if ended else []


def _gaps(starts: list[int], ends: list[int], threads: list[int]) -> tuple[list[int], list[int]]:
    before, gaps = [], []
    latest = NONE
    own: dict[int, int] = {}
    for at, (start, thread) in enumerate(zip(starts, threads, strict=True)):
        earlier = latest
        if latest != NONE and ends[latest] > start:
            earlier = own.get(thread, NONE)
        before.append(earlier)
        gaps.append(start - (0 if earlier == NONE else ends[earlier]))
        own[thread] = at
        if latest == NONE or ends[at] >= ends[latest]:
            latest = at
    return before, gaps


def _previous(streams: list[int]) -> list[int]:
    last: dict[int, int] = {}
    previous = []
    for row, stream in enumerate(streams):
        previous.append(last.get(stream, NONE))
        last[stream] = row
    return previous


def _intervals(launcher: Ints, calls: int) -> list[tuple[int, int]]:
    edges = np.searchsorted(launcher, np.arange(calls + 1)).tolist()
    return list(pairwise(edges))


World = Literal["least", "expected", "most"]
WORLDS: tuple[World, ...] = ("least", "expected", "most")

_CROWDED = {"least": 1.0, "expected": 1.1, "most": 1.5}
"""How many times longer a worker takes for a batch than one process that has the machine's CPU to itself."""
_CROWDED_CORES = {"least": 1.0, "expected": 1.35, "most": 1.6}
"""The same where all CPUs are at work: these mostly are threads of half as many cores."""
_LEAST_BUSY = 0.25
"""No worker is taken to keep less of a CPU busy."""
_FIRST_BATCHES = {"least": 0, "expected": 1, "most": 2}
"""How many times what a worker usually takes for a batch an epoch's first one takes: all workers begin at once."""
_TORCHS = ("torch.", "F.", "nn.functional.")


@dataclass(frozen=True)
class ProgramFacts:
    """What is known of the program besides its trace.

    ``lines`` are the lines of source behind its unprofiled steps, and ``callers`` what lines that called others took in
    them. ``optimizer_bytes`` is what a fused optimizer moves, None if torch has none for it; ``bytes_per_s`` the
    memory's peak. The data loader has ``workers`` processes, each of which takes ``batch_ns`` for what a step needs,
    None if that is not known. It ``starts_workers`` anew for each epoch of ``epoch_batches`` batches, or goes on with
    them; until the first batch comes that takes ``restart_ns``, shared among the epoch's steps. Both are 0 if that is
    not known. The machine has ``cpus``, None if that is not known, of which a worker keeps ``worker_cpus`` busy; torch
    computes with ``threads`` in the program, and with one in each worker.
    """

    lines: Sequence[LineTime] | None = None
    callers: Sequence[LineTime] = ()
    optimizer_bytes: int | None = None
    bytes_per_s: float | None = None
    batch_ns: int | None = None
    workers: int = 0
    epoch_batches: int = 0
    restart_ns: int = 0
    starts_workers: bool = True
    cpus: int | None = None
    worker_cpus: float = 1.0
    threads: int = 1
    detects_anomalies: bool = False

    @property
    def room(self) -> int | None:
        """For how many workers the CPUs have room, None if that is not known: those that wait for files share one."""
        return None if self.cpus is None else max(2, int(self.cpus / max(self.worker_cpus, _LEAST_BUSY)))

    def saved_by_keeping_workers(self, world: World) -> int:
        """Return by how much a step is shorter, on average, if workers stay, or go on where they do.

        If they only stay, an epoch's first batch is waited for.
        """
        first_ns = (self.batch_ns or 0) * _FIRST_BATCHES[world] if self.starts_workers else 0
        return max(0, round(self.restart_ns - first_ns / max(self.epoch_batches, 1)))

    def batches_at_once(self, workers: int, world: World) -> float:
        """Return how many batches workers make in the time that one alone takes for one; more never make less.

        The workers beyond half of the CPUs' room share cores with the others.
        """
        if self.room is None:
            return workers / _CROWDED[world]
        half, busy = self.room / 2, min(workers, self.room)
        on_all = self.room / _CROWDED_CORES[world]
        return float(np.interp(busy, [0, half, self.room], [0, half / _CROWDED[world], on_all]))

    def slower_beside(self, workers: float, world: World) -> float:
        """Return how many times longer the program's Python takes while so many workers are at work."""
        if not self.cpus:
            return 1.0
        return 1 + (_CROWDED_CORES[world] - 1) * min(1.0, workers * self.worker_cpus / self.cpus)

    def batch_in_worker(self, waited_ns: int, world: World) -> int | None:
        """Return what a worker takes for a batch, as known, or as what the program takes itself says: ``waited_ns``.

        By how much torch's operations are slower on one thread is open: not at all, or as many times as it has cores,
        of each of which two of its threads may run on one.
        """
        if self.workers:
            return self.batch_ns
        slower = {"least": 1.0, "expected": math.sqrt(self.threads), "most": max(1.0, self.threads / 2)}[world]
        return round(waited_ns * (1 + self._torchs_share() * (slower - 1)))

    def _torchs_share(self) -> float:
        loading = [line for line in self.lines or () if line.phase == DATA and line.thread == "main"]
        in_torch = [line for line in loading if (line.called or "").startswith(_TORCHS)]
        return sum(line.time_ns for line in in_torch) / max(1, sum(line.time_ns for line in loading))
