"""The one step of a program in which its work is counted, with nothing else on; or why no step is counted.

A program's step is the one after its recorded steps; a built-in model opens a range around its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torch.utils._python_dispatch import _get_current_dispatch_mode

from profkit.annotation import annotate
from profkit.capture.compilations import has_compiled
from profkit.capture.errors import describe_error
from profkit.capture.flight_recorder import several_ranks
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.work.counter import WorkCounter
from profkit.names import WARMUP
from profkit.run.directory import WORK
from profkit.run.recording import Order
from profkit.run.work import write_work

_NOT_REACHED = "the program ended too soon"


class CountedStep:
    """Counts from `begin` to `end`, as ``order`` says."""

    def __init__(self, order: Order, hooks: Hooks) -> None:
        self._order = order
        self._hooks = hooks
        self._counter: WorkCounter | None = None
        self._around = ExitStack()
        self.why_not: str | None = None if order.flops == "no" else _NOT_REACHED
        """Why no work was counted, None if it was or nobody asked."""
        self.is_on = False
        """Whether the step that runs now is counted, of several ranks by the first."""

    def begin(self, rank: int | None) -> None:
        """Count what runs from now on, if it is to be counted and can be."""
        if self._order.flops == "no":
            return
        forbidden = self._forbidden(rank)
        self.is_on = forbidden is None
        if forbidden is not None or rank:
            self.why_not = forbidden
            return
        self._hooks.steps.settle()
        if self._order.annotate:
            self._hooks.start()
        if not self._order.own_steps:
            # Where nsys records the whole process it sees this step too: not as one of those that were asked for.
            self._around.enter_context(annotate(WARMUP))
        self._counter = WorkCounter()
        self._hooks.on_backward = self._counter.backward_begins
        self._counter.start()

    def end(self, *, keeps_ranges: bool = False) -> None:
        """Write down what was counted; ``keeps_ranges``: the hooks' ranges go on."""
        counter = self._stop()
        if counter is None:
            return
        if not keeps_ranges:
            self._hooks.stop()
        self.why_not = counter.failure
        if self.why_not is not None:
            return
        try:
            write_work(Path(self._order.run) / WORK, counter.content())
        except OSError as error:
            self.why_not = describe_error(error)

    def drop(self) -> None:
        """Count no more, and leave nothing: the step is not whole, or this process is a forked copy."""
        self._stop()

    def _stop(self) -> WorkCounter | None:
        counter, self._counter, self.is_on = self._counter, None, False
        if counter is not None:
            self._hooks.on_backward = None
            counter.stop()
            self._around.close()
        return counter

    def _forbidden(self, rank: int | None) -> str | None:
        """Return what keeps this program from being counted, with ``--flops`` or by default; None if nothing does."""
        if _get_current_dispatch_mode() is not None:
            return "the program has a TorchDispatchMode on"
        if self._order.flops == "any":
            return None
        if rank is not None or several_ranks():
            return "several ranks need --flops"
        if has_compiled():
            return "compiled code needs --flops"
        if self._hooks.steps.has_captured:
            return "CUDA graphs need --flops"
        return None
