"""The GPU's side of a Kineto trace: work, copies, the calls that launched them, and backward's way to forward."""

from __future__ import annotations

import numpy as np

from profkit.trace.columns import NO_LAUNCH, Bools, Copies, Ints, Origins, Work
from profkit.trace.kineto_file import parse_microseconds
from profkit.trace.kineto_rows import (
    Event,
    HostRows,
    Reading,
    integers,
    name_of,
    parse_argument,
    parse_integer,
    parse_interval,
)
from profkit.trace.operators import OperatorForest

BACKWARD_NODE = "autograd::engine::evaluate_function"
"""How the operator begins in which the autograd engine runs one node of the graph."""


class GpuReader:
    """Matches GPU rows with the calls that launched them.

    Kineto files GPU rows under the device, not the process, so a launch is matched by correlation id alone where the
    file holds one process, as nearly all do. In a merged file, an id that calls of two processes carry fits neither.
    """

    def __init__(self, reading: Reading, calls: HostRows) -> None:
        self._reading = reading
        self.correlation = integers([parse_argument(event, "correlation") or 0 for event in calls.events])
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
        )

    def copies(self, copies: list[Event], sets: list[Event]) -> Copies:
        """Return memory copies, then memory sets."""
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
            byte_count=integers([parse_argument(event, "bytes") or 0 for event in rows]),
        )

    def calls_with_work(self) -> Bools:
        """Return which calls share their correlation id with a GPU row seen so far."""
        return np.isin(self.correlation, list(self._matched))

    def note_ambiguous(self) -> None:
        """Record how many GPU rows fit the launches of several processes."""
        if self._ambiguous_count:
            self._reading.notes.append(
                f"{self._ambiguous_count} GPU rows carry a correlation id that calls of several processes carry; they "
                "count as work without a launch: give the ranks' traces one by one"
            )

    def _timed(self, events: list[Event], what: str) -> tuple[list[Event], Ints, Ints]:
        timed = [(event, times) for event in events if (times := parse_interval(event)) is not None]
        kept = {id(event) for event, _ in timed}
        self._reading.report_impossible(what, [event for event in events if id(event) not in kept])
        timed.sort(key=lambda row: row[1][0])
        start, end = (integers([times[side] for _, times in timed]) for side in (0, 1))
        return [event for event, _ in timed], start, end

    def _find_launches(self, rows: list[Event]) -> tuple[Ints, Ints, Ints]:
        """Return process, launch time and launching thread of each row."""
        processes = self._reading.processes()
        found = []
        for event in rows:
            correlation = parse_argument(event, "correlation") or 0
            launches = self._launches.get(correlation, {}) if correlation else {}
            if correlation:
                self._matched.add(correlation)
            if len(launches) == 1:
                ((process, (start, thread)),) = launches.items()
                found.append((process, start, thread))
                continue
            self._ambiguous_count += len(launches) > 1
            own = processes[0] if len(processes) == 1 else parse_integer(event.get("pid")) or 0
            found.append((own, 0, NO_LAUNCH))
        columns = np.array(found, dtype=np.int64).reshape(-1, 3)
        return columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy()


def find_origins(
    reading: Reading, flows: list[Event], operators: HostRows, forest: OperatorForest, launched_in: Ints
) -> tuple[Ints, Origins]:
    """Return each kernel's forward operator as an index into `Origins` (or -1), and those operators.

    Kineto draws a flow from each forward operator to the backward operator of the same autograd sequence number; it
    ends in the operator inside the engine's node (`BACKWARD_NODE`). Both lead back, and so does everything launched
    under them, unless a closer one leads elsewhere (a checkpoint's recomputation holds a backward pass of its own).
    ``launched_in`` is each kernel's innermost operator, or -1.
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


def _devices(rows: list[Event]) -> Ints:
    return integers([_first(parse_argument(event, "device"), parse_integer(event.get("pid"))) for event in rows])


def _stream(event: Event) -> int:
    track = event.get("tid")
    named = parse_integer(track.removeprefix("stream ").strip()) if isinstance(track, str) else parse_integer(track)
    return _first(parse_argument(event, "stream"), named)


def _first(*values: int | None) -> int:
    return next((value for value in values if value is not None), 0)
