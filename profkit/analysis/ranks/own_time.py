"""What one rank did at any time, as disjoint pieces, each with a cause and a place in the program.

At each moment the first that applies counts: a kernel computed; only collectives ran; only copies ran; the rank was
idle: it waited for data, the host launched (or waited for the GPU), or the host ran without calling CUDA. So the pieces
sum up to the whole time. Without a GPU, operators count as kernels; those that communicate or wait for it, and torch's
ranges around collectives (``gloo:…``), count as collectives.

The place of a kernel or a copy is where the host launched it; that of idle time is where the host was then.

Summed up by step it is the rank's `Account`; what a rank hands over to be compared, from a full trace as from a light
record, is a `ReducedRank`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from profkit.analysis.intervals import (
    NOTHING,
    Stretches,
    disjoint_pieces,
    intersect,
    spread,
    subtract,
    unite,
    unite_all,
)
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.time_account.gpu_time import (
    GpuTime,
    build_gpu_times,
    build_host_times,
    communication_rows,
    is_data_wait,
    threads_by_device,
)
from profkit.names import BACKWARD, DATA, phase_of
from profkit.run.light_columns import UNKNOWN, CallColumns, StepColumns
from profkit.run.light_record import LightRecord
from profkit.trace.columns import NO_LAUNCH, Bools, Copies, Ints, Trace, Work, distinct_values, empty_ints
from profkit.trace.kineto import BACKWARD_NODE
from profkit.trace.nesting import NO_RANGE

_ON_THE_HOST = re.compile(r"(gloo|mpi|ucc):\w+")
_NCCL = "nccl"
_PYTHON_NODE = "Backward"
"""How nodes of a Python function end. torch's own have a number behind: ``AddmmBackward0``."""
_COMPILED_NODE = "CompiledFunction"

Cause = Literal["data", "python", "launch", "kernels", "copy", "clock", "communication"]
"""What a rank did: it waited for data, ran Python without calling CUDA, launched, ran kernels, copied, ran kernels on a
slower clock, or did nothing but communicate, which includes waiting for other ranks."""

CAUSES: tuple[Cause, ...] = get_args(Cause)

Place = tuple[str, str]
"""The phase and the innermost module; "" where there is none."""

Part = tuple[Cause, str, str]
"""Cause, phase and module of what a rank did."""

_NOWHERE, _LOADING = ("", ""), (DATA, "")
_LOADING_NUMBER = 1
BEFORE = "before "
"""How the place of time between two phases begins; the name of the later one follows."""

_EVER = 1 << 62


@dataclass(frozen=True, eq=False)
class OwnTime:
    """Disjoint pieces in order of time; ``cause`` points into `CAUSES`, ``place`` into ``places``."""

    start_ns: Ints
    end_ns: Ints
    cause: Ints
    place: Ints
    places: list[Place]

    def part(self, number: int) -> Part:
        """Return the part that a number of `sum_between` stands for."""
        cause, place = divmod(number, len(self.places))
        return CAUSES[cause], *self.places[place]

    def sum_between(self, edges_ns: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the sums between each two edges as columns: which (0: before the first), the part's number, the time.

        ``edges_ns`` are sorted; what lies after the last is left out.
        """
        start_ns, end_ns, piece = _cut_at(edges_ns, self.start_ns, self.end_ns)
        cell = np.searchsorted(edges_ns, start_ns, side="right")
        part_count = len(CAUSES) * len(self.places)
        key = cell * part_count + self.cause[piece] * len(self.places) + self.place[piece]
        kept = cell < len(edges_ns)
        keys, inverse = np.unique(key[kept], return_inverse=True)
        sums = np.zeros(len(keys), dtype=np.int64)
        np.add.at(sums, inverse, (end_ns - start_ns)[kept])
        return keys // part_count, keys % part_count, sums


def collective_ranges(trace: Trace) -> Ints:
    """Return the ranges that are collectives which run on the host, such as gloo's, in order of their start."""
    names = [i for i in distinct_values(trace.ranges.name).tolist() if _ON_THE_HOST.fullmatch(trace.names[i])]
    rows = np.flatnonzero(np.isin(trace.ranges.name, names))
    return rows[np.argsort(trace.ranges.start_ns[rows], kind="stable")]


def divide_own_time(attribution: Attribution) -> tuple[OwnTime, OwnTime]:
    """Return what a rank did from the first to the last thing recorded, and when its host ran without calling CUDA.

    The trace holds that rank alone. The latter is what hid behind the GPU's work too.
    """
    trace = attribution.trace
    places, of_range = _find_places(attribution)
    time, kernels = _busy_time(attribution)
    tables = (trace.work, trace.copies, trace.calls, trace.ranges)
    begin = min((int(table.start_ns.min()) for table in tables if len(table)), default=0)
    end = max((int(table.end_ns.max()) for table in tables if len(table)), default=0)
    waits = is_data_wait(trace)
    waiting = unite(trace.ranges.start_ns[waits], trace.ranges.end_ns[waits])
    whole = Stretches(np.array([begin]), np.array([end])) if begin < end else NOTHING
    idle = subtract(whole, time.busy)
    data, rest = intersect(idle, waiting), subtract(idle, waiting)
    calling = unite_all([time.launching, time.synchronising])
    host = _HostPlaces(attribution, of_range, places)
    pieces: list[tuple[Ints, Ints, Cause, Ints]] = []
    every_copy = np.arange(len(trace.copies))
    busy: dict[Cause, tuple[Work | Copies, Ints, Ints, Stretches]] = {
        "kernels": (trace.work, kernels, attribution.work.innermost, time.computing),
        "copy": (trace.copies, every_copy, attribution.copies.innermost, time.exposed_copies),
    }
    for cause, (table, rows, innermost, when) in busy.items():
        start_ns, end_ns, row = _pieces_within(table, rows, when)
        place = np.append(of_range, 0)[innermost[row]]
        in_no_phase = (place == 0) & (table.launch_thread[row] != NO_LAUNCH)
        place[in_no_phase] = host.at(table.placed_ns[row[in_no_phase]])
        pieces.append((start_ns, end_ns, cause, place))
    talking = time.exposed_communication
    pieces.append((talking.start_ns, talking.end_ns, "communication", np.zeros(len(talking), dtype=np.int64)))
    pieces.append((data.start_ns, data.end_ns, "data", np.full(len(data), _LOADING_NUMBER)))
    elsewhere: dict[Cause, Stretches] = {"launch": intersect(rest, calling), "python": subtract(rest, calling)}
    for cause, when in elsewhere.items():
        start_ns, end_ns = host.cut(when)
        pieces.append((start_ns, end_ns, cause, host.at(start_ns)))
    columns = [(start, end, np.full(len(start), CAUSES.index(cause)), place) for start, end, cause, place in pieces]
    start_ns, end_ns, causes, place = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(start_ns, kind="stable")
    own = OwnTime(start_ns[order], end_ns[order], causes[order], place[order], places)
    # Of a rank without a GPU, when it was idle.
    hosts = build_host_times(trace).values() if trace.measure == "gpu-kernel" else ()
    calling = unite_all([part for each in hosts for part in (each.launching, each.synchronising)])
    start_ns, end_ns = host.cut(subtract(whole, calling) if trace.measure == "gpu-kernel" else idle)
    return own, OwnTime(start_ns, end_ns, np.full(len(start_ns), CAUSES.index("python")), host.at(start_ns), places)


def _busy_time(attribution: Attribution) -> tuple[GpuTime, Ints]:
    trace = attribution.trace
    if trace.measure != "gpu-kernel":
        return host_time(trace), _computes(trace)
    times = list(build_gpu_times(trace).values())
    return times[0] if len(times) == 1 else _join_times(times), np.flatnonzero(~communication_rows(trace))


def _pieces_within(table: Work | Copies, rows: Ints, when: Stretches) -> tuple[Ints, Ints, Ints]:
    rows = rows[np.argsort(table.start_ns[rows], kind="stable")]
    none = np.zeros(len(rows), dtype=np.int64)
    _, start_ns, end_ns = disjoint_pieces(none, table.start_ns[rows], table.end_ns[rows])
    edges = np.sort(np.concatenate([when.start_ns, when.end_ns]))
    start_ns, end_ns, piece = _cut_at(edges, start_ns, end_ns)
    kept = when.within(start_ns, end_ns) > 0
    return start_ns[kept], end_ns[kept], rows[piece[kept]]


def _join_times(times: list[GpuTime]) -> GpuTime:
    busy, computing, copying = (
        unite_all([getattr(time, name) for time in times]) for name in ("busy", "computing", "exposed_copies")
    )
    talking = subtract(unite_all([time.exposed_communication for time in times]), computing)
    return GpuTime(
        busy=busy,
        computing=computing,
        exposed_communication=talking,
        exposed_copies=subtract(subtract(copying, computing), talking),
        launching=subtract(unite_all([time.launching for time in times]), busy),
        synchronising=subtract(unite_all([time.synchronising for time in times]), busy),
    )


def _computes(trace: Trace) -> Ints:
    """Hooks run in the engine's own ones. What a ``torch.autograd.Function`` in Python calls has operators of its own;
    what compiled code computes has none.
    """
    nodes = {name.removeprefix(BACKWARD_NODE).lstrip(": ") for name in trace.names if name.startswith(BACKWARD_NODE)}
    functions = {node for node in nodes if node.endswith(_PYTHON_NODE) and not node.startswith(_COMPILED_NODE)}
    functions |= {node.removesuffix(_PYTHON_NODE) for node in functions}
    names = [i for i, name in enumerate(trace.names) if name.startswith(BACKWARD_NODE) or name in functions]
    return np.flatnonzero(~np.isin(trace.work.name, names) & ~communication_rows(trace))


def host_time(trace: Trace) -> GpuTime:
    """Return the time of a rank without a GPU: its operators compute, and nothing is launched.

    What an operator calls to communicate, or to wait for it, is not computing.
    """
    work = trace.work
    computes = np.zeros(len(work), dtype=np.bool_)
    computes[_computes(trace)] = True
    talks = communication_rows(trace)
    of_threads, talking = [], [NOTHING]
    for thread in distinct_values(work.launch_thread).tolist():
        mine, talk = (
            unite(work.start_ns[rows], work.end_ns[rows])
            for rows in (which & (work.launch_thread == thread) for which in (computes, talks))
        )
        of_threads.append(subtract(mine, talk))
        talking.append(talk)
    computing = unite_all([NOTHING, *of_threads])
    calls = collective_ranges(trace)
    communicating = unite_all([unite(trace.ranges.start_ns[calls], trace.ranges.end_ns[calls]), *talking])
    return GpuTime(
        busy=unite_all([computing, communicating]),
        computing=computing,
        exposed_communication=subtract(communicating, computing),
        overlapped_communication=intersect(communicating, computing),
    )


def phase_or_data(name: str) -> str | None:
    """Return what a range's name makes it among the parts of a step: a phase, waiting for data, or neither."""
    return DATA if name == DATA else phase_of(name)


def _find_places(attribution: Attribution) -> tuple[list[Place], Ints]:
    trace = attribution.trace
    places: list[Place] = [_NOWHERE, _LOADING]
    numbers = {_NOWHERE: 0, _LOADING: 1}
    number_of = [-1] * len(trace.ranges)
    parents, names = attribution.parent.tolist(), trace.ranges.name.tolist()
    passed_over = {i for i, name in enumerate(trace.names) if _NCCL in name.lower() or _ON_THE_HOST.fullmatch(name)}
    for index in range(len(number_of)):
        chain, at = [], index
        while at != NO_RANGE and number_of[at] < 0:
            chain.append(at)
            at = parents[at]
        place = _NOWHERE if at == NO_RANGE else places[number_of[at]]
        for row in reversed(chain):
            name = trace.names[names[row]]
            phase = phase_or_data(name)
            if phase is not None:
                place = (phase, "")
            elif place[0] and names[row] not in passed_over:
                place = (place[0], name)
            if place not in numbers:
                numbers[place] = len(places)
                places.append(place)
            number_of[row] = numbers[place]
    return places, np.array(number_of, dtype=np.int64)


class _HostPlaces:
    """Where the host was at any time: on the thread of the steps, or within ``backward`` on the autograd engine's."""

    def __init__(self, attribution: Attribution, of_range: Ints, places: list[Place]) -> None:
        trace = attribution.trace
        launching = {thread for threads in threads_by_device(trace).values() for thread in threads}
        threads = [thread for thread in attribution.timelines if thread in launching]
        phases = {number for number, (phase, _) in enumerate(places) if phase}

        def time_in_phases(thread: int) -> int:
            mine = (trace.ranges.thread == thread) & np.isin(of_range, list(phases))
            return int((trace.ranges.end_ns[mine] - trace.ranges.start_ns[mine]).sum())

        # The thread of the steps has whole phases open, the autograd engine's modules alone.
        threads.sort(key=lambda thread: (thread not in trace.main_threads, -time_in_phases(thread)))
        self._timelines = [attribution.timelines[thread] for thread in threads]
        self._of_range = np.append(of_range, 0)
        self._before = [self._names_before(attribution, thread, places) for thread in threads[:1]]
        self._backward = [number for number, (phase, _) in enumerate(places) if phase == BACKWARD]
        edges = [timeline.time_ns for timeline in self._timelines]
        self._edges = np.sort(np.concatenate(edges)) if edges else empty_ints()

    def at(self, time_ns: Ints) -> Ints:
        place_at = np.zeros(len(time_ns), dtype=np.int64)
        for number, timeline in enumerate(self._timelines):
            here = self._of_range[timeline.innermost_at(time_ns)]
            inner = np.isin(place_at, self._backward) & np.isin(here, self._backward)
            place_at = np.where((place_at == 0) | (inner & (number > 0)), here, place_at)
        for starts, place in self._before:
            place_at = np.where(place_at == 0, place[np.searchsorted(starts, time_ns, side="right")], place_at)
        return place_at

    @staticmethod
    def _names_before(attribution: Attribution, thread: int, places: list[Place]) -> tuple[Ints, Ints]:
        ranges, names = attribution.trace.ranges, attribution.trace.names
        mine = np.flatnonzero(ranges.thread == thread)
        mine = mine[np.argsort(ranges.start_ns[mine], kind="stable")].tolist()
        rows = [row for row in mine if phase_or_data(names[ranges.name[row]]) is not None]
        numbers = []
        for row in rows:
            place = (f"{BEFORE}{names[ranges.name[row]]}", "")
            if place not in places:
                places.append(place)
            numbers.append(places.index(place))
        # What follows the last of them lies in no place.
        return ranges.start_ns[rows], np.array([*numbers, 0], dtype=np.int64)

    def cut(self, when: Stretches) -> tuple[Ints, Ints]:
        start_ns, end_ns, _ = _cut_at(self._edges, when.start_ns, when.end_ns)
        return start_ns, end_ns


def _cut_at(edges_ns: Ints, start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints, Ints]:
    first = np.searchsorted(edges_ns, start_ns, side="right")
    last = np.searchsorted(edges_ns, end_ns, side="left")
    which, at = spread(first, last + 1)
    edges = np.concatenate([[-_EVER], edges_ns, [_EVER]])
    begin, end = np.maximum(start_ns[which], edges[at]), np.minimum(end_ns[which], edges[at + 1])
    kept = begin < end
    return begin[kept], end[kept], which[kept]


Floats = npt.NDArray[np.float64]

Parts = dict[Part, float]
"""Part → nanoseconds."""


@dataclass(frozen=True, eq=False)
class Account:
    """What one rank did by itself in each step, as (steps, parts), and the communication that nothing hid."""

    parts: tuple[Part, ...]
    times_ns: Floats
    exposed_ns: Floats
    is_exact: bool
    sm_mhz: float | None = None

    def __len__(self) -> int:
        return len(self.times_ns)

    def sums(self) -> Floats:
        total: Floats = self.times_ns.sum(axis=1)
        return total

    def median(self, steps: slice | Bools = slice(None)) -> Parts:
        """Return each part's median over some of the steps, which one strange step does not move."""
        times = self.times_ns[steps]
        return dict(zip(self.parts, np.median(times, axis=0).tolist(), strict=True)) if len(times) else {}

    def usual(self) -> Parts:
        """Return what it does in a step: the mean of a full trace, so that parts sum up, else the median."""
        if not self.is_exact or not len(self):
            return self.median()
        return dict(zip(self.parts, (self.times_ns.sum(axis=0) / len(self)).tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class ReducedRank:
    """A rank's record, whose steps stand in ``steps``; ``calls`` are those of measured steps, in order of their groups.

    ``longer_on_gpu`` is what phases of each measured step took longer on its GPU, as parts and (steps, parts).
    ``exact`` is what it did by its full trace; of a rank without one, None. ``between_ns`` is what its sends and
    receives in a group took in the steps of ``exact`` that nothing hid. ``light`` is the rank by the light record that
    it left beside its trace: that holds the steps that no profiler recorded too. ``between_phases_ns`` is what lines of
    source took outside of all phases in a step without a profiler; None where they were not looked for.
    """

    record: LightRecord
    steps: StepColumns
    calls: CallColumns
    longer_on_gpu: tuple[tuple[Part, ...], Floats]
    exact: Account | None = None
    between_ns: Mapping[int, int] = field(default_factory=dict)
    light: ReducedRank | None = None
    between_phases_ns: int | None = None


def clock_of(steps: StepColumns, which: Ints) -> float | None:
    """Return the median clock of the GPU in these steps, None if nobody recorded it."""
    clocks = steps.sm_mhz[which]
    known = clocks[(clocks != UNKNOWN) & (clocks != 0)]
    return float(np.median(known)) if len(known) else None
