"""The leak check: what was allocated in one step and is still there when the next one ends.

What a step needs is freed within it, or within the next. Bytes that began in step N-1 and are still there at the end of
step N are kept by something. Once is no leak: state that is made on first use begins in some step. A stack that leaves
bytes behind in each of the last `_REPEATS` steps is suspected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.memory.device import DeviceMemory

_REPEATS = 2


@dataclass(frozen=True)
class LeakRow:
    """What one stack left behind in one step."""

    bytes: int
    count: int
    stack: tuple[str, ...]
    label: str


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
    """What the last step left behind from stacks that left bytes behind in each of the last steps."""

    @property
    def suspect_bytes(self) -> int:
        """Return how much the suspects left behind in the last step."""
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
    found = []
    for number in range(1, len(steps)):
        moment = timeline.moment_at(steps[number].end_us)
        first, end = firsts[number - 1], firsts[number]
        rows = np.flatnonzero(replay.freed[first:end] >= moment) + first
        by_stack = _by_stack(memory, rows.tolist())
        total = sum(row.bytes for row in by_stack)
        found.append(LeftBehind(steps[number].name, steps[number - 1].name, total, by_stack))
    return LeakCheck(tuple(found), _suspects(found))


def _by_stack(memory: DeviceMemory, rows: list[int]) -> tuple[LeakRow, ...]:
    found = [
        LeakRow(size, count, stack.user_first, stack.label) for stack, size, count in memory.stacks.sum_by_stack(rows)
    ]
    return tuple(sorted(found, key=lambda one: (-one.bytes, one.label)))


def _suspects(steps: list[LeftBehind]) -> tuple[LeakRow, ...]:
    if len(steps) < _REPEATS:
        return ()
    last = [{row.stack for row in step.by_stack} for step in steps[-_REPEATS:]]
    return tuple(row for row in steps[-1].by_stack if all(row.stack in stacks for stacks in last))
