"""The steps of a target that says itself what they are: a built-in model, or a callable."""

from __future__ import annotations

import re
import threading
from typing import Protocol

from profkit.annotation import RangeObserver
from profkit.names import CONTEXT, COUNTED, STEP, WARMUP

_OWN_STEP = re.compile(rf"{WARMUP}|{STEP} \d+")
_CONTEXT = re.compile(rf"{CONTEXT} (\d+)")


class OwnStepListener(Protocol):
    """Counts the steps that the target's own ranges show."""

    context: int | None

    @property
    def is_in_last_step(self) -> bool:
        """Whether the end of the step that runs now ends the recording."""

    def own_begin(self) -> None:
        """The target opens a range of its own: the first of them begins the first step."""

    def own_boundary(self) -> None:
        """One of the target's own steps has ended."""

    def begin_counting(self) -> None:
        """The step whose work is counted begins."""

    def end_counting(self) -> None:
        """That step has ended."""


class OwnSteps(RangeObserver):
    """Takes the target's own ranges ``warmup``, ``step N``, ``context N`` and ``counted step`` on the thread that
    attached as what they are called."""

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
