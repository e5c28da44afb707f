"""The steps of a target that says itself what they are: a built-in model, or a callable."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from profkit.annotation import RangeObserver
from profkit.names import CONTEXT, COUNTED, STEP, WARMUP

if TYPE_CHECKING:
    from profkit.capture.session import Session

_OWN_STEP = re.compile(rf"{WARMUP}|{STEP} \d+")
_CONTEXT = re.compile(rf"{CONTEXT} (\d+)")


class OwnSteps(RangeObserver):
    """Takes the target's own ranges ``warmup``, ``step N``, ``context N`` and ``counted step`` on the thread that
    attached as what they are called."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._thread = threading.get_ident()
        self._open: list[str] = []

    def opening(self, name: str) -> None:
        if threading.get_ident() != self._thread:
            return
        self._session.own_begin()
        self._open.append(name)
        context = _CONTEXT.fullmatch(name)
        if context:
            self._session.context = int(context[1])
        if name == COUNTED:
            self._session.begin_counting()

    def closed(self) -> None:
        if threading.get_ident() != self._thread or not self._open:
            return
        name = self._open.pop()
        if name == COUNTED:
            self._session.end_counting()
        elif _CONTEXT.fullmatch(name) and self._session.is_in_last_step:
            self._session.own_boundary()
        elif _OWN_STEP.fullmatch(name):
            # The recording ends with the last step, but not before the range around it.
            is_enclosed = any(map(_CONTEXT.fullmatch, self._open))
            if not (is_enclosed and self._session.is_in_last_step):
                self._session.own_boundary()
