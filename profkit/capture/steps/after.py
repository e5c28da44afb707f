"""The steps after the recorded ones, with nothing else on: one is counted, and in others lines are looked for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns

from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode

from profkit.annotation import annotate
from profkit.capture import describe_error, say
from profkit.capture.flight_recorder import several_ranks
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.lines import LineRecorder, WorkerLines
from profkit.capture.steps.conditions import count_compiled_graphs
from profkit.capture.steps.times import Span, sum_times, wait_for_device
from profkit.capture.work.counter import WorkCounter
from profkit.names import WARMUP
from profkit.run import write_record
from profkit.run.directory import LINES, WORK, name_of_rank
from profkit.run.lines import write_lines
from profkit.run.recording import ENDED_TOO_SOON, Order


class StepsAfter:
    """Begins and ends what an order asks for in these steps."""

    def __init__(self, order: Order, hooks: Hooks) -> None:
        self._order = order
        self._hooks = hooks
        self._rank: int | None = None
        self._workers: WorkerLines | None = None
        """Workers of data loaders, while they can still be told to look for lines."""
        self._lines: LineRecorder | None = None
        self._step_began_ns = 0
        self.steps: tuple[Mapping[str, int], ...] = ()
        """The times of the steps in which lines were looked for, once that has ended."""
        self.counted = CountedStep(order, hooks)

    @property
    def is_on(self) -> bool:
        return self.counted.is_on or self._lines is not None

    def prepare(self) -> None:
        """Have workers of data loaders that start from now on be able to look for lines, too."""
        if self._order.lines:
            self._workers = WorkerLines(Path(self._order.run))

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
        elif self._lines is not None:
            wait_for_device()
            times = {**sum_times(spans), "step_ns": perf_counter_ns() - self._step_began_ns}
            self._step_began_ns = perf_counter_ns()
            if self._lines.step_ended(times):
                self._end_lines()

    def end(self) -> None:
        """Write down the lines, also where there were too few steps; a step that is not whole does not count."""
        self.counted.drop()
        self._end_lines()

    def forget(self) -> None:
        self.counted.drop()
        lines, self._lines, self._workers = self._lines, None, None
        if lines is not None:
            lines.forget()

    def _begin_lines(self) -> None:
        if self._workers is None:
            return
        self._lines = LineRecorder(lambda: self._hooks.clock.phase, self._workers)
        self._hooks.clock.start()
        try:
            self._lines.start()
        except Exception as error:  # no thread can be started, say: the target trains on
            say(f"{self._order.run}: no lines are looked for: {describe_error(error)}")
            self._end_lines()
            return
        self._hooks.on_backward = self._lines.backward_begins
        self._step_began_ns = perf_counter_ns()

    def _end_lines(self) -> None:
        (lines, self._lines), (workers, self._workers) = (self._lines, None), (self._workers, None)
        if lines is None:
            if workers is not None:
                workers.stop()
            return
        self._hooks.clock.stop()
        self._hooks.on_backward = None
        try:
            result = lines.stop()
            if result is not None:
                self.steps = result.steps.steps
                write_lines(Path(self._order.run) / name_of_rank(LINES, self._rank or 0), result)
        except Exception as error:  # a full disk, say: what was recorded before is kept
            say(f"{self._order.run}: the lines could not be saved: {describe_error(error)}")


class CountedStep:
    """Counts from `begin` to `end`, as ``order`` says."""

    def __init__(self, order: Order, hooks: Hooks) -> None:
        self._order = order
        self._hooks = hooks
        self._counter: WorkCounter | None = None
        self._around = ExitStack()
        self.why_not: str | None = None if order.flops == "no" else ENDED_TOO_SOON
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
        trained = [one for model in self._hooks.steps.models for one in model.parameters() if one.requires_grad]
        try:
            self._counter = WorkCounter(self._hooks.optimizers.parameters_of_each(), trained)
        except Exception as error:  # a parameter of which nobody can say where it lies
            self.why_not, self.is_on = describe_error(error), False
            return
        self._hooks.steps.settle()
        if self._order.annotate:
            self._hooks.start()
        if not self._order.own_steps:
            # Where nsys records the whole process it sees this step too: not as one of those that were asked for.
            self._around.enter_context(annotate(WARMUP))
        self._hooks.on_backward, self._hooks.on_call = self._counter.backward_begins, self._counter.model_called
        self._hooks.on_optimizer = self._optimizer_stepped
        self._counter.start()

    def end(self, *, keeps_ranges: bool = False) -> None:
        """Write down what was counted; ``keeps_ranges``: the hooks' ranges go on."""
        counter = self.drop()
        if counter is None:
            return
        if not keeps_ranges:
            self._hooks.stop()
        self.why_not = counter.failure
        if self.why_not is not None:
            return
        try:
            write_record(Path(self._order.run) / WORK, counter.content())
        except Exception as error:  # a full disk, say, or a line that nobody can name: the program goes on
            self.why_not = describe_error(error)

    def drop(self) -> WorkCounter | None:
        """Count no more, and leave nothing: the step is not whole, or this process is a forked copy."""
        counter, self._counter, self.is_on = self._counter, None, False
        if counter is not None:
            self._hooks.on_backward = self._hooks.on_call = self._hooks.on_optimizer = None
            counter.stop()
            self._around.close()
        return counter

    def _optimizer_stepped(self, optimizer: Optimizer) -> None:
        assert self._counter is not None
        hooks = self._hooks
        stepped = set(map(id, hooks.optimizers.parameters()))
        self._counter.optimizer_stepped(id(optimizer), hooks.steps.models, hooks.names.range_of, stepped)

    def _forbidden(self, rank: int | None) -> str | None:
        if _get_current_dispatch_mode() is not None:
            return "the program has a TorchDispatchMode on"
        if self._order.flops == "any":
            return None
        if rank is not None or several_ranks():
            return "several ranks need --flops"
        if count_compiled_graphs():
            return "compiled code needs --flops"
        if self._hooks.steps.has_captured:
            return "CUDA graphs need --flops"
        return None
