"""A replayed step as lanes of host threads and streams, to be drawn: what each was doing at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from profkit.analysis.step_replay import COPY, WAIT, StepColumns
from profkit.analysis.step_replay.limits import OF_OPERATION, Limit
from profkit.analysis.step_replay.replay import Steady
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.analysis.time_account.gpu_time import LONGEST_PAUSE_NS
from profkit.names import DATA

CELLS = 600
"""A step is drawn in so many parts; each shows what took most of it."""

_SHOWN = 0.2
"""A cell of which less is taken is idle: short kernels far apart show as lines."""

_Interval = tuple[int, int, str]


@dataclass(frozen=True)
class LaneSpan:
    """A piece of a lane, in nanoseconds since the step began; ``kind`` is a `Limit` or an operation's category."""

    start_ns: int
    end_ns: int
    kind: str


@dataclass(frozen=True)
class StepLanes:
    """A step as it runs among others: the lane ``host``, and one for each stream, ``GPU`` or ``stream N``."""

    step_ns: int
    lanes: dict[str, tuple[LaneSpan, ...]]


def lay_out_lanes(step: ReplayedStep, columns: StepColumns, steady: Steady, step_ns: int) -> StepLanes:
    begin, end = steady.ended_ns, steady.ended_ns + steady.step_ns
    streams = sorted(set(columns.stream))
    lanes = {"host": _host(step, columns, steady)}
    for number in streams:
        name = "GPU" if len(streams) == 1 else f"stream {number}"
        lanes[name] = _operations(step, columns, steady, number)
    scale = step_ns / max(steady.step_ns, 1)
    return StepLanes(step_ns, {name: tuple(_cells(lane, begin, end, scale)) for name, lane in lanes.items()})


def _host(step: ReplayedStep, columns: StepColumns, steady: Steady) -> Iterator[_Interval]:
    found = steady.found
    for at, start in enumerate(found.call_start_ns):
        gap = max(columns.gap_ns[at], 0)
        is_pause = gap > LONGEST_PAUSE_NS or DATA in step.gap_phases[at]
        yield start - gap, start, Limit.PYTHON if is_pause else Limit.PREPARING
        waits = columns.kind[at] in (WAIT, COPY)
        yield start, found.call_end_ns[at], Limit.WAITING if waits else Limit.PREPARING


def _operations(step: ReplayedStep, columns: StepColumns, steady: Steady, stream: int) -> Iterator[_Interval]:
    for row, number in enumerate(columns.stream):
        if number == stream:
            category = step.categories[int(columns.row[row])]
            kind = OF_OPERATION.get(category, Limit.COMPUTING)
            yield steady.found.start_ns[row], steady.found.end_ns[row], kind


def _cells(intervals: Iterable[_Interval], begin: int, end: int, scale: float) -> Iterator[LaneSpan]:
    """Yield what took most of each cell of a lane; equal neighbours are one span, and idle ones none.

    A step's host and its streams may begin before the steps before it have ended, or end after that: a lane is the
    step's own work, moved by whole steps into one.
    """
    whole = max(end - begin, 1)
    cells: list[dict[str, int]] = [{} for _ in range(CELLS)]
    for start, stop, kind in intervals:
        at = start
        while at < stop:
            cell = (at - begin) * CELLS // whole
            until = min(stop, begin + -(-(cell + 1) * whole // CELLS))
            sums = cells[cell % CELLS]
            sums[kind] = sums.get(kind, 0) + until - at
            at = max(until, at + 1)
    return _join(cells, whole / CELLS, scale)


def _join(cells: Sequence[dict[str, int]], width: float, scale: float) -> Iterator[LaneSpan]:
    kinds = [max(sums, key=sums.__getitem__) if sums and sum(sums.values()) * 2 >= width else None for sums in cells]
    at = 0
    for kind, same in groupby(kinds):
        count = len(list(same))
        if kind is not None:
            yield LaneSpan(round(at * width * scale), round((at + count) * width * scale), kind)
        at += count
