"""What limits a step: the chain of calls and operations that each ended last before the next could begin.

The chain is followed back from what ended last in the step to its beginning. Its pieces follow one another without
gaps, so that they sum up to the step, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from profkit.analysis.step_replay.columns import COPY, NONE, WAIT, StepColumns
from profkit.analysis.step_replay.replay import BY_LAUNCH, Replayed


class Cause(StrEnum):
    """What a piece of the chain is."""

    PYTHON = "python"
    """The host between two CUDA calls: Python, the framework, data."""
    CALL = "call"
    """The host within a CUDA call that does not wait: mostly launches."""
    LATENCY = "latency"
    """From the end of a launch to the start of its operation on a free GPU."""
    OPERATION = "operation"
    """An operation runs on the GPU."""
    BETWEEN = "between"
    """Between two operations of a stream, or after a wait for another stream."""
    WAKING = "waking"
    """From an operation's end to that of the call that waited for it."""
    EARLIER = "earlier"
    """Work of an earlier step keeps the stream busy."""


class Moment(NamedTuple):
    """When a call or an operation begins or ends: ``at`` is its place in the step's columns."""

    is_call: bool
    at: int
    is_end: bool


@dataclass(frozen=True)
class Piece:
    """A piece of the chain, and the call or operation that it leads to."""

    cause: Cause
    start_ns: int
    end_ns: int
    to: Moment


def find_limits(step: StepColumns, found: Replayed) -> list[Piece]:
    """Return the chain of a replayed step, from its beginning to its end."""
    pieces = []
    moment = _last(found)
    while moment is not None:
        earlier, cause = _earlier(step, found, moment)
        start_ns, end_ns = (0 if earlier is None else _time(found, earlier)), _time(found, moment)
        if end_ns > start_ns:
            pieces.append(Piece(cause, start_ns, end_ns, moment))
        moment = earlier
    return pieces[::-1]


def _last(found: Replayed) -> Moment | None:
    """Return the end of the call or the operation that ended last."""
    ends = [
        Moment(is_call, max(range(len(column)), key=column.__getitem__), is_end=True)
        for is_call, column in ((True, found.call_end_ns), (False, found.end_ns))
        if column
    ]
    return max(ends, key=lambda moment: _time(found, moment), default=None)


def _time(found: Replayed, moment: Moment) -> int:
    if moment.is_call:
        return (found.call_end_ns if moment.is_end else found.call_start_ns)[moment.at]
    return (found.end_ns if moment.is_end else found.start_ns)[moment.at]


def _earlier(step: StepColumns, found: Replayed, moment: Moment) -> tuple[Moment | None, Cause]:
    """Return what this moment came after, None for the step's beginning, and what lies between the two."""
    at = moment.at
    if not moment.is_call:
        return (
            (Moment(False, at, is_end=False), Cause.OPERATION) if moment.is_end else _before_operation(step, found, at)
        )
    if not moment.is_end:
        before = step.before[at]
        return (None if before == NONE else Moment(True, before, is_end=True)), Cause.PYTHON
    awaited = found.call_cause[at]
    if awaited == NONE:
        return Moment(True, at, is_end=False), Cause.CALL
    # Of a full queue the launch awaits an operation's start.
    return Moment(False, awaited, is_end=step.kind[at] in (WAIT, COPY)), Cause.WAKING


def _before_operation(step: StepColumns, found: Replayed, row: int) -> tuple[Moment | None, Cause]:
    cause = found.cause[row]
    if cause == NONE:
        return None, Cause.EARLIER
    if cause != BY_LAUNCH:
        return Moment(False, cause, is_end=True), Cause.BETWEEN
    call = step.launcher[row]
    return Moment(True, call, is_end=step.kind[call] != COPY), Cause.LATENCY
