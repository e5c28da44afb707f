"""The steps after the recorded ones, with nothing else on: one is counted, and in others lines are looked for."""

from __future__ import annotations

from pathlib import Path

from profkit.capture.hooks.hooks import Hooks
from profkit.capture.lines.recorder import LineSearch
from profkit.capture.steps.times import Span
from profkit.capture.work.counted_step import CountedStep
from profkit.run.directory import LINES, name_of_rank
from profkit.run.recording import Order


class StepsAfter:
    """Begins and ends what an order asks for in these steps."""

    def __init__(self, order: Order, hooks: Hooks) -> None:
        self._order = order
        self._hooks = hooks
        self._rank: int | None = None
        self._lines: LineSearch | None = None
        self.counted = CountedStep(order, hooks)

    @property
    def is_on(self) -> bool:
        """Whether the step that runs now is counted, or shows lines."""
        return self.counted.is_on or (self._lines is not None and self._lines.is_on)

    def prepare(self) -> None:
        """Have workers of data loaders that start from now on be able to look for lines, too."""
        if self._order.lines:
            self._lines = LineSearch(Path(self._order.run), self._hooks)

    def begin(self, rank: int | None, *, shows_lines: bool) -> None:
        """The recorded steps have ended, and the first one after them begins; ``rank`` is this process's, if any."""
        self._rank = rank
        if not shows_lines:
            self._end_lines()
        if not self._order.own_steps:
            self.counted.begin(rank)
        if not self.counted.is_on:
            self._begin_lines()

    def step_ended(self, spans: list[Span]) -> None:
        """A step has ended in these phases: go on to what follows."""
        if self.counted.is_on:
            self.counted.end()
            self._begin_lines()
        elif self._lines is not None and self._lines.step_ended(spans):
            self._end_lines()

    def end(self) -> None:
        """Write down the lines, also where there were too few steps; a step that is not whole does not count."""
        self.counted.drop()
        self._end_lines()

    def forget(self) -> None:
        """Do nothing more: this process is a forked copy."""
        self.counted.drop()
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.forget()

    def _begin_lines(self) -> None:
        if self._lines is not None and not self._lines.begin():
            self._end_lines()

    def _end_lines(self) -> None:
        lines, self._lines = self._lines, None
        if lines is None:
            return
        if lines.is_on:
            self._hooks.clock.stop()
        lines.end(Path(self._order.run) / name_of_rank(LINES, self._rank or 0))
