"""The leak check: what was allocated in one step and is still there when the next one ends.

State that is made on first use grows once, and a window of the last results until it is full: a leak goes on. So a
stack is suspected if at the ends of `_RISES` steps or more it had more allocations than ever before, of which something
is still there, and if the last rise is about as many steps ago as rises are apart. A window that fills until the
recording ends looks like a leak.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.stacks import StackFacts
from profkit.snapshot.columns import Ints

_RISES = 3


@dataclass(frozen=True)
class LeakRow:
    """What one stack left behind in one step."""

    bytes: int
    count: int
    stack: tuple[str, ...]
    label: str
    every: int = 1
    """Of a suspect: in every how many steps it leaves something behind."""


@dataclass(frozen=True)
class LeftBehind:
    """Bytes that began in the step ``began_in`` and are still there at the end of the next, ``step``."""

    step: str
    began_in: str
    bytes: int
    by_stack: tuple[LeakRow, ...]


@dataclass(frozen=True)
class LeakCheck:
    """All steps that can be judged, and the stacks suspected of leaking."""

    steps: tuple[LeftBehind, ...]
    suspects: tuple[LeakRow, ...]
    """What the stacks that keep growing left behind when they last did."""

    @property
    def suspect_bytes(self) -> int:
        """Return how much the suspects left behind when they last did."""
        return sum(row.bytes for row in self.suspects)


def check_leaks(memory: DeviceMemory) -> LeakCheck:
    """Return what each step left behind; nothing where the history has fewer than two steps."""
    replay, timeline = memory.history.replay, memory.timeline
    steps = timeline.steps
    if len(steps) < 2 or not len(replay):
        return LeakCheck((), ())
    starts = np.array([step.start_us for step in steps], dtype=np.int64)
    # Rows are sorted by birth, so each step's are together.
    births = timeline.times_us[replay.birth[replay.start_count :]]
    firsts = (np.searchsorted(births, starts, "left") + replay.start_count).tolist()
    left_behind = []
    for number in range(1, len(steps)):
        moment = timeline.moment_at(steps[number].end_us)
        first, end = firsts[number - 1], firsts[number]
        rows = np.flatnonzero(replay.freed[first:end] >= moment) + first
        sums = memory.stacks.sum_by_stack(rows.tolist())
        by_stack = [LeakRow(size, count, stack.user_first, stack.label) for stack, size, count in sums]
        by_stack.sort(key=lambda leak: (-leak.bytes, leak.label))
        total = int(replay.size_bytes[rows].sum())
        left_behind.append(LeftBehind(steps[number].name, steps[number - 1].name, total, tuple(by_stack)))
    ends = [timeline.moments_of(step)[0] for step in steps[1:]] + [timeline.moment_at(steps[-1].end_us)]
    moments = np.array(ends, dtype=np.int64)
    return LeakCheck(tuple(left_behind), _find_suspects(memory, moments, np.array([*firsts, len(replay)])))


def _find_suspects(memory: DeviceMemory, moments: Ints, firsts: Ints) -> tuple[LeakRow, ...]:
    """Return the stacks that keep growing, by what they left behind last.

    ``moments`` are where the next step begins, for the last step where it ends; ``firsts`` are the first row of each
    step and the number of rows.
    """
    replay = memory.history.replay
    rows = np.arange(firsts[0], firsts[-1])
    births = np.searchsorted(firsts, rows, "right") - 1
    stays = (replay.freed[rows] >= moments[births]) & (replay.birth[rows] < moments[births])
    by_number: defaultdict[int, list[int]] = defaultdict(list)
    for row in rows[stays].tolist():
        by_number[memory.stacks.number_of(row)].append(row)
    by_stack: defaultdict[tuple[object, bool], list[int]] = defaultdict(list)
    for number, of_stack in by_number.items():
        facts = memory.stacks.facts[number]
        by_stack[facts.shown, facts.is_compiled] += of_stack
    judged = [_judge(memory, np.array(sorted(some)), moments, firsts) for some in by_stack.values()]
    return tuple(sorted((leak for leak in judged if leak), key=lambda leak: (-leak.bytes, leak.label)))


def _judge(memory: DeviceMemory, rows: Ints, moments: Ints, firsts: Ints) -> LeakRow | None:
    """Return what one stack left behind last if it keeps growing; ``rows`` are those that outlive their step."""
    replay = memory.history.replay
    kept = rows[replay.freed[rows] >= moments[-1]]
    births = np.searchsorted(firsts, kept, "right") - 1
    if len(set(births.tolist())) < _RISES:
        return None
    # The stacks of blocks from before the history are unknown: any of the same size may belong to the same window.
    before = np.flatnonzero(np.isin(replay.requested_bytes[: replay.start_count], replay.requested_bytes[kept]))
    all_rows = np.concatenate([before, rows])
    alive = (replay.birth[all_rows] < moments[:, None]) & (replay.freed[all_rows] >= moments[:, None])
    counts = alive.sum(axis=1)
    rises = np.flatnonzero(np.diff(np.maximum.accumulate(counts), prepend=0) > 0)
    gaps = np.diff(rises)
    # One step more, because what the program does after the last step's end is not counted.
    if len(rises) < _RISES or len(moments) - 1 - rises[-1] > gaps.max():
        return None
    if births.max() > rises[-1] and replay.freed[all_rows].min() >= moments[rises[-1]]:
        return None  # a window that is full since then
    # What began in the last step may be freed in the next.
    last = births[births < len(moments) - 1].max()
    left = kept[births == last]
    stack: StackFacts = memory.stacks.of(int(left[0]))
    size = int(replay.size_bytes[left].sum())
    return LeakRow(size, len(left), stack.user_first, stack.label, round(float(np.median(gaps))))
