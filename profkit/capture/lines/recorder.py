"""Looks for the lines behind the time of some steps, with nothing else on: where they wait, and where time goes."""

from __future__ import annotations

import math
import re
import sys
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from profkit.capture.errors import describe_error, say
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.lines.samples import PERIOD_NS, Key, Stack, StackSampler, describe, find_stack
from profkit.capture.lines.workers import OfWorkers, WorkerLines
from profkit.capture.steps.times import Span, sum_times, wait_for_device
from profkit.run.lines import Line, LineSteps, LineTime, RunLines, Thread, split_lines, write_lines

_SYNCHRONIZES = "called a synchronizing CUDA operation"
_FILTER: tuple[Any, ...] = (
    "always",
    re.compile(f"{_SYNCHRONIZES}|Synchronization debug mode is a prototype"),
    Warning,
    None,
    0,
)
_WARN, _ERROR = 1, 2


class Waits:
    """Counts calls that wait for the GPU by stack, and by the phase and thread that ``phase`` returns.

    torch names each in a warning, which is collected unprinted: ``.item()``, ``.cpu()``, ``nonzero`` and what else
    copies to pageable memory or asks for a value. It does not see ``torch.cuda.synchronize()``, copies from pageable
    memory with ``non_blocking``, or NCCL. Python's own state stays as it was: the filters keep their order and version,
    so that no registry of warnings shown once is cleared.
    """

    def __init__(self, phase: Callable[[], tuple[str | None, Thread]]) -> None:
        self.counts: Counter[Key] = Counter()
        self.unknown: str | None = None
        """Why the calls are not known; None if they are."""
        self._phase = phase
        self._mode = 0
        self._passes_on = False
        self._restore: list[Callable[[], None]] = []

    def start(self) -> None:
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            self.unknown = "no GPU was used"
            return
        self._mode = torch.cuda.get_sync_debug_mode()
        if self._mode == _ERROR:
            self.unknown = "the script has torch.cuda.set_sync_debug_mode('error')"
            return
        self._passes_on = self._mode == _WARN
        self._collect()
        torch.cuda.set_sync_debug_mode(_WARN)

    def stop(self) -> None:
        """End; filters, functions and torch's mode are again as they were."""
        if not self._restore:
            return
        try:
            # A script that has set another mode meanwhile keeps it.
            if torch.cuda.get_sync_debug_mode() == _WARN:
                torch.cuda.set_sync_debug_mode(self._mode)
        finally:
            self.forget()

    def forget(self) -> None:
        """Leave Python's state as it was, and torch's mode alone: a forked copy cannot use CUDA."""
        while self._restore:
            self._restore.pop()()

    def _collect(self) -> None:
        """Put a filter before all others, keep it there, and take what it lets through."""
        lists: dict[int, list[Any]] = {}
        _put_first(lists)
        self._restore.append(lambda: _leave_out(*lists.values()))
        for name in ("_filters_mutated", "_filters_mutated_lock_held"):  # Python 3.14 has the second
            self._wrap(name, lambda original: _keeps_first(original, lists))
        self._wrap("_showwarnmsg", self._takes)

    def _wrap(self, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(warnings, name, None)
        if original is None:
            return
        replaced = wrapped(original)
        setattr(warnings, name, replaced)

        def restore() -> None:
            if getattr(warnings, name) is replaced:
                setattr(warnings, name, original)

        self._restore.append(restore)

    def _takes(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def take(message: Any) -> None:
            if not _FILTER[1].match(str(message.message)):
                original(message)
                return
            if str(message.message).startswith(_SYNCHRONIZES):
                self.counts[find_stack(sys._getframe(1)), *self._phase()] += 1
                if self._passes_on:
                    original(message)

        return take


def _keeps_first(mutated: Callable[[], None], lists: dict[int, list[Any]]) -> Callable[[], None]:
    """Return what is called wherever filters change: at both ends of ``catch_warnings`` too, where the list is another.

    Without it a script's wait would raise after ``simplefilter("error")``, or after the end of a ``catch_warnings``
    that was open when the collecting began.
    """

    def filters_mutated() -> None:
        mutated()
        _put_first(lists)

    return filters_mutated


def _put_first(lists: dict[int, list[Any]]) -> None:
    """Put the filter before all others of the list in force, which joins ``lists``."""
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    _leave_out(filters)
    filters.insert(0, _FILTER)
    lists[id(filters)] = filters


def _leave_out(*lists: Any) -> None:
    for filters in lists:
        while _FILTER in filters:
            filters.remove(_FILTER)


FEWEST_STEPS = 3
MOST_STEPS = 60
ENOUGH_NS = 1_000_000_000


class LineRecorder:
    """Looks at the thread that starts it, at threads that call backward, and at workers of data loaders."""

    def __init__(self, phase: Callable[[], str | None], workers: WorkerLines | None = None) -> None:
        self._sampler = StackSampler(phase)
        self._waits = Waits(self._phase_here)
        self._phase = phase
        self._main = threading.get_ident()
        self._workers = workers
        self._steps: list[dict[str, int]] = []
        self._start_ns = 0

    def _phase_here(self) -> tuple[str | None, Thread]:
        """Return the phase and the kind of the calling thread; phases are those of the thread that trains."""
        return (self._phase(), "main") if threading.get_ident() == self._main else (None, "backward")

    def start(self) -> None:
        self._sampler.watch(threading.get_ident(), "main")
        self._waits.start()
        if self._workers is not None:
            self._workers.start()
        self._start_ns = perf_counter_ns()
        self._sampler.start()

    def backward_begins(self) -> None:
        self._sampler.watch(threading.get_ident(), "backward")

    def step_ended(self, times: dict[str, int]) -> bool:
        """Note a step's times (`profkit.run.samples`); return whether there are enough steps."""
        self._sampler.step_ended()
        self._steps.append(times)
        elapsed_ns = perf_counter_ns() - self._start_ns
        return len(self._steps) >= (FEWEST_STEPS if elapsed_ns >= ENOUGH_NS else MOST_STEPS)

    def forget(self) -> None:
        """Leave Python as it was in this process, a forked copy in which nobody samples."""
        self._sampler.forget()
        self._waits.forget()

    def stop(self) -> RunLines | None:
        """End, and return what was found; None if no step ended meanwhile."""
        try:
            self._sampler.stop()
            self._waits.stop()
        finally:
            of_workers = None if self._workers is None else self._workers.stop()
        if not self._steps:
            return None
        rows = _merge(self._sampler, self._waits, len(self._steps))
        of_workers = of_workers or OfWorkers()
        rows += of_workers.lines
        rows.sort(key=lambda row: (-row.time_ns, -row.waits))
        steps = LineSteps(
            PERIOD_NS,
            tuple(self._steps),
            of_workers.batches,
            of_workers.batch_ns,
            self._waits.unknown,
            batch_cpu_ns=of_workers.batch_cpu_ns or None,
        )
        return split_lines(steps, rows)


class LineSearch:
    """The steps of a program in which lines are looked for, and the file that is left of them.

    Workers of data loaders that start from now on can be told to look, too.
    """

    def __init__(self, run: Path, hooks: Hooks) -> None:
        self._run = run
        self._hooks = hooks
        self._workers = WorkerLines(run)
        self._recorder: LineRecorder | None = None
        self._start_ns = 0

    @property
    def is_on(self) -> bool:
        return self._recorder is not None

    def begin(self) -> bool:
        self._recorder = LineRecorder(lambda: self._hooks.clock.phase, self._workers)
        self._hooks.clock.start()
        try:
            self._recorder.start()
        except Exception as error:  # no thread can be started, say: the target trains on
            say(f"{self._run}: no lines are looked for: {describe_error(error)}")
            return False
        self._hooks.on_backward = self._recorder.backward_begins
        self._start_ns = perf_counter_ns()
        return True

    def step_ended(self, spans: list[Span]) -> bool:
        """Note that a step has ended in these phases, if lines are looked for; return whether there are enough."""
        if self._recorder is None:
            return False
        wait_for_device()
        is_enough = self._recorder.step_ended({**sum_times(spans), "step_ns": perf_counter_ns() - self._start_ns})
        self._start_ns = perf_counter_ns()
        return is_enough

    def end(self, path: Path) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            self._workers.close()
            return
        self._hooks.on_backward = None
        try:
            lines = recorder.stop()
            if lines is not None:
                write_lines(path, lines)
        except Exception as error:  # a full disk, say: what was recorded before is kept
            say(f"{self._run}: the lines could not be saved: {describe_error(error)}")

    def forget(self) -> None:
        """Leave Python as it was in this process, a forked copy in which nobody samples."""
        if self._recorder is not None:
            self._recorder.forget()


_Row = tuple[Line, str | None, Thread, bool]
"""A line apart from what it calls, its phase, its thread, and whether it has called the line that ran."""


@dataclass
class _Total:
    """What a row took in each step, and what its line called, with the time of each."""

    times: list[int]
    called: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    samples: int = 0
    waits: int = 0
    waiting_ns: int = 0


def _merge(sampler: StackSampler, waits: Waits, steps: int) -> list[LineTime]:
    totals: defaultdict[_Row, _Total] = defaultdict(lambda: _Total([0] * steps))
    for key, times in sampler.times.items():
        for row, called in _rows_of(*key):
            total = totals[row]
            total.samples += sampler.samples[key]
            for step, time_ns in enumerate(times):
                total.times[step] += time_ns
            if key in waits.counts:
                total.waiting_ns += sum(times)
            if called is not None:
                total.called[called] += sum(times)
    for key, count in waits.counts.items():
        for row, called in _rows_of(*key):
            totals[row].waits += count
            if called is not None:
                totals[row].called[called] += 0
    return [_line_time(row, total, steps) for row, total in totals.items()]


def _rows_of(stack: Stack, phase: str | None, thread: Thread) -> Iterator[tuple[_Row, str | None]]:
    """Yield the row of the line that runs, then those of its callers; one that calls itself counts once."""
    known: set[tuple[str | None, int]] = set()
    for line in map(describe, stack) if stack else [Line(None, 0, "")]:
        if (line.file, line.line) not in known:
            yield (line._replace(called=None), phase, thread, bool(known)), line.called
        known.add((line.file, line.line))


def _line_time(row: _Row, total: _Total, steps: int) -> LineTime:
    mean = sum(total.times) / steps
    squares = sum((time_ns - mean) ** 2 for time_ns in total.times)
    error = math.sqrt(squares / (steps - 1) / steps) if steps > 1 else mean
    called = max(total.called, key=lambda name: total.called[name], default=None)
    line, phase, thread, is_caller = row
    return LineTime(
        **line._replace(called=called)._asdict(),
        phase=phase,
        thread=thread,
        samples=total.samples,
        time_ns=round(mean),
        error_ns=round(error),
        waits=total.waits / steps,
        waiting_ns=round(total.waiting_ns / steps),
        is_caller=is_caller,
    )
