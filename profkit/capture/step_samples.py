"""The times of a script's steps before its recording and in it, and what happened meanwhile."""

from __future__ import annotations

from typing import Literal

from profkit.capture.conditions import counted_since, read_counters

Part = Literal["attached", "profiled"]
"""Steps while profkit was attached and recorded nothing, and those that it recorded."""


class StepSamples:
    """Collects each step's times, part by part, and what `read_counters` counted in each part."""

    def __init__(self) -> None:
        self.steps: dict[str, list[dict[str, int]]] = {"attached": [], "profiled": []}
        self.during: dict[str, dict[str, int]] = {}
        self._part: Part | None = None
        self._before: dict[str, int] = {}

    def begin(self, part: Part) -> None:
        """Begin a part; the one before it has ended."""
        self.end()
        self._part = part
        self._before = read_counters()

    def end(self) -> None:
        """End the part that was begun, if one was."""
        if self._part is not None:
            self.during[self._part] = counted_since(self._before)
            self._part = None

    def note(self, times: dict[str, int]) -> None:
        """Keep a step's times; before the first part has begun they are passed over."""
        if self._part is not None:
            self.steps[self._part].append(times)
