"""When the boundary between two steps is made: not within a range of the script's own that belongs to one step.

A built-in model says itself what its steps are, by ranges of its own (`OwnSteps`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Protocol

from profkit.annotation import RangeObserver
from profkit.names import CONTEXT, COUNTED, STEP, WARMUP


class Boundaries:
    """Calls ``make(number)`` where step ``number`` begins: once it is due and the step's own ranges have closed.

    A script may open a range around a step, or around the optimizer's part of it. Those that were open at the last
    boundary already, as one around the whole loop, hold several steps.

    Args:
        make: ends the step that runs and begins this one.
        depth: returns how many of the script's ranges are open on the thread that asks.
    """

    def __init__(self, make: Callable[[int], None], depth: Callable[[], int]) -> None:
        self._make_boundary = make
        self._depth = depth
        self._thread = 0
        self._waiting: int | None = None
        self._last_due = -1
        self._lost = 0
        self._base = 0

    def due(self, number: int) -> None:
        """Step ``number`` begins as soon as it can; if the one before it could not yet, the two are one step."""
        if number <= self._last_due:  # counting has begun anew
            self._waiting, self._lost = None, 0
        self._last_due = number
        self._thread = threading.get_ident()
        if self._waiting is not None:
            # The ranges that it waited for hold several steps.
            self._lost += 1
            self._make(number - self._lost)
        elif number == 0 or self._depth() <= self._base:
            self._make(number - self._lost)
        else:
            self._waiting = number - self._lost

    def work_begins(self) -> None:
        """Work such as a call or a backward pass begins: if the first step has ended, this is the second one's."""
        if self._waiting == 1:
            self._make(1)

    def range_closed(self) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._waiting is not None and self._depth() <= self._base:
            self._make(self._waiting)
        # Where a boundary was made here, a range around the step that begins may have opened with it.
        self._base = min(self._base, self._depth())

    def _make(self, number: int) -> None:
        self._waiting = None
        self._make_boundary(number)
        # What was open when the first step began may be the step's own: nobody can tell yet.
        self._base = 0 if number == 0 else self._depth()


_OWN_STEP = re.compile(rf"{WARMUP}|{STEP} \d+")
_CONTEXT = re.compile(rf"{CONTEXT} (\d+)")


class OwnStepListener(Protocol):
    """Counts the steps that the target's own ranges show."""

    context: int | None

    @property
    def is_in_last_step(self) -> bool: ...

    def own_begin(self) -> None: ...

    def own_boundary(self) -> None: ...

    def begin_counting(self) -> None: ...

    def end_counting(self) -> None: ...


class OwnSteps(RangeObserver):
    """Takes the target's own ranges ``warmup``, ``step N``, ``context N`` and ``counted step`` on the thread that
    attached as what they are called.
    """

    def __init__(self, listener: OwnStepListener) -> None:
        self._listener = listener
        self._thread = threading.get_ident()
        self._open: list[str] = []

    def opening(self, name: str) -> None:
        if threading.get_ident() != self._thread:
            return
        self._listener.own_begin()
        self._open.append(name)
        context = _CONTEXT.fullmatch(name)
        if context:
            self._listener.context = int(context[1])
        if name == COUNTED:
            self._listener.begin_counting()

    def closed(self) -> None:
        if threading.get_ident() != self._thread or not self._open:
            return
        name = self._open.pop()
        if name == COUNTED:
            self._listener.end_counting()
        elif _CONTEXT.fullmatch(name) and self._listener.is_in_last_step:
            self._listener.own_boundary()
        elif _OWN_STEP.fullmatch(name):
            # The recording ends with the last step, but not before the range around it.
            is_enclosed = any(map(_CONTEXT.fullmatch, self._open))
            if not (is_enclosed and self._listener.is_in_last_step):
                self._listener.own_boundary()
