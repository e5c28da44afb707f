"""A trial inside the program's process: edits are made, some steps are timed, and the process ends.

Nothing else is on: the hooks count steps, the GPU is waited for before the timed steps and after them, and the losses
are kept where they are until then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import isfunction
from multiprocessing import active_children
from pathlib import Path
from time import monotonic, perf_counter_ns, sleep
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed

from profkit.capture import describe_error, find_failure, say
from profkit.capture.changes import (
    AllocatorSettings,
    Change,
    CudnnBenchmark,
    NoAnomaly,
    NoCudnnAttention,
    NotMadeError,
    Tf32,
    Threads,
)
from profkit.capture.changes.program import (
    Autocast,
    Batch,
    ChannelsLast,
    Checkpoint,
    Compile,
    OptimizerKeyword,
    PinMemory,
    Workers,
    ZeroGrad,
)
from profkit.capture.flight_recorder import several_ranks
from profkit.capture.hooks.backward_nodes import running_graph
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.hooks.module_calls import Watcher
from profkit.capture.steps.conditions import count_compiled_graphs
from profkit.capture.steps.data_loading import is_loader_worker
from profkit.capture.steps.times import wait_for_device
from profkit.run import LARGEST_NUMBER
from profkit.run.edits import Evidence, Measured, parse_edits
from profkit.run.job import rank_of_command
from profkit.run.recording import Order, count_left, leave_failure, leave_measured

MAKERS: dict[str, Callable[[str], Change]] = {
    "allocator": AllocatorSettings,
    "autocast": Autocast,
    "batch": Batch,
    "channels-last": ChannelsLast,
    "checkpoint": Checkpoint,
    "compile": Compile,
    "cudnn-benchmark": CudnnBenchmark,
    "no-anomaly": NoAnomaly,
    "no-cudnn-attention": NoCudnnAttention,
    "optimizer": OptimizerKeyword,
    "pin-memory": PinMemory,
    "tf32": Tf32,
    "threads": Threads,
    "workers": Workers,
    "zero-grad": ZeroGrad,
}
"""What makes each edit that can be tried, by the edit's name."""

_MOST_WINDOWS = 4
"""How often the timed steps begin anew, because something was compiled in them."""

_PATIENCE_S = 20.0
"""How long a rank waits for the others before it ends."""


class _Losses(Watcher):
    """Keeps the loss of each backward pass where it is: reading it would wait for the GPU."""

    def __init__(self) -> None:
        self._steps: list[list[Tensor]] = [[]]

    def step_begins(self, number: int) -> None:
        del self._steps[number:]
        self._steps.append([])

    def backward_begins(self, tensors: Any) -> None:
        if running_graph() != -1:
            return
        (given,) = tensors
        for tensor in given if isinstance(given, Sequence) else (given,):
            if isinstance(tensor, Tensor) and tensor.numel() == 1:
                self._steps[-1].append(tensor.detach().clone())

    def read(self) -> tuple[float | None, ...]:
        """Return the mean loss of each step that has ended and has some; None where it has grown beyond all use."""
        means = [sum(float(loss) for loss in step) / len(step) for step in self._steps[:-1] if step]
        return tuple(mean if abs(mean) < LARGEST_NUMBER else None for mean in means)


class _All(Watcher):
    def __init__(self, watchers: Sequence[Watcher]) -> None:
        for name in (name for name, value in vars(Watcher).items() if isfunction(value)):
            setattr(self, name, _call_each([getattr(watcher, name) for watcher in watchers]))


def _call_each(functions: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        for function in functions:
            function(*args)

    return call


class Trial:
    """Makes edits, times steps and ends the process; leaves what it measured for the launcher."""

    def __init__(self, order: Order) -> None:
        assert order.trial is not None
        assert order.steps is not None
        self.run = Path(order.run)
        self._edits = parse_edits(order.trial)
        self._changes = [MAKERS[edit.spec.name](edit.argument) for edit in self._edits]
        self._losses = _Losses()
        self._hooks = Hooks(self, None, order.step_on, _All([self._losses, *self._changes]))
        self._rank = rank_of_command(os.environ, sys.orig_argv)
        self._pid = os.getpid()
        self._first = self._warmup = order.warmup_steps
        self._steps = order.steps
        self._begun = -1
        self._began_ns = self._window_ns = 0
        self._graphs_before = 0
        self._windows = 0
        self._reason: str | None = None
        self._is_over = False

    def begin(self) -> None:
        for change in self._changes:
            change.begin()
        self._hooks.install()

    def boundary(self, number: int) -> None:
        if self._begun < 0 and is_loader_worker():
            self.abandon()
        if self._is_over:
            return
        if number <= self._begun:  # the script has shown what its steps are, and counting begins anew
            self._first = self._warmup
        self._losses.step_begins(number)
        if self._begun < 0:
            self._began_ns = perf_counter_ns()
        self._begun = number
        for change in self._changes:
            change.step_begins()
        if number == self._first:
            self._begin_window()
        elif number == self._first + self._steps:
            self._end_window()

    def _begin_window(self) -> None:
        if any(change.refusal is not None for change in self._changes):
            self._end_process(Measured())  # the others need not be measured for it
        self._hooks.steps.settle()
        self._graphs_before = count_compiled_graphs()
        wait_for_device()
        self._window_ns = perf_counter_ns()

    def _end_window(self) -> None:
        wait_for_device()
        took_ns = perf_counter_ns() - self._window_ns
        self._windows += 1
        has_compiled = count_compiled_graphs() > self._graphs_before
        if has_compiled and self._windows < _MOST_WINDOWS and not several_ranks():
            self._first = self._begun
            self._begin_window()
            return
        first_ns = self._window_ns - self._began_ns
        self._end_process(Measured(self._steps, took_ns / self._steps, first_ns))

    def _end_process(self, measured: Measured) -> NoReturn:
        """Leave what was measured, and end at once: what the script does at its end, such as saving, is not wanted."""
        self._is_over = True
        try:
            self._leave(measured)
            if several_ranks():
                self._await_others()
        finally:
            for child in active_children():
                child.terminate()
            with suppress(OSError, AttributeError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)

    def _leave(self, measured: Measured) -> None:
        on_gpu = torch.cuda.is_initialized()
        self._rank = distributed.get_rank() if several_ranks() else self._rank
        evidence = [_find_evidence(edit.text, change) for edit, change in zip(self._edits, self._changes, strict=True)]
        complete = replace(
            measured,
            steps_seen=max(self._begun, 0),
            losses=self._losses.read(),
            evidence=tuple(evidence),
            allocated_peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
            reserved_peak_bytes=torch.cuda.max_memory_reserved() if on_gpu else None,
            rank=self._rank,
            device="cuda" if on_gpu else "cpu",
            gpu=torch.cuda.get_device_name() if on_gpu else None,
            torch=torch.__version__,
            reason=self._reason,
        )
        leave_measured(self.run, self._pid, complete)

    def _await_others(self) -> None:
        """Wait until all ranks of this machine have left theirs: what one of them still sends may come from here."""
        count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        deadline = monotonic() + _PATIENCE_S
        while count_left(self.run) < count and monotonic() < deadline:
            sleep(0.01)

    def log_is_full(self) -> None:
        """No log of ranges is kept."""

    def hooks_failed(self, error: Exception) -> None:
        """A change, or what counts steps, failed: nothing is measured."""
        if self._is_over:
            return
        self._reason = f"the change could not be made: {describe_error(error)}"
        self._end_process(Measured())

    def leave(self) -> None:
        """The process ends by itself: say how many steps it made, and what ended it."""
        if self._is_over or self._pid != os.getpid():
            return
        self._is_over = True
        failure = find_failure(self._rank)
        try:
            if failure is not None:
                leave_failure(self.run, f"{self._pid}", failure)
            if self._begun >= 0:
                self._leave(Measured())
        except OSError as error:
            say(f"{self.run}: {error}")

    def abandon(self) -> None:
        self._is_over = True
        self._hooks.stop()


def _find_evidence(edit: str, change: Change) -> Evidence:
    try:
        change.require(change.refusal is None, "")
        return Evidence(edit, True, change.prove(), change.place)
    except NotMadeError as error:
        return Evidence(edit, False, str(error), change.place)
    except Exception as error:  # what was measured of the other edits must not be lost by it
        return Evidence(edit, False, f"it could not be proven: {describe_error(error)}", change.place)
