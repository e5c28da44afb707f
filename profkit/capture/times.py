"""The times of steps and phases without a profiler: host clock on the CPU, CUDA events on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import torch

from profkit.capture.conditions import counted_since, read_counters
from profkit.names import BACKWARD, DATA, FORWARD, LOSS

Part = Literal["attached", "profiled"]
"""Steps of a recorded process before its recording, and the steps that were asked for."""


class Mark(NamedTuple):
    """One moment: the host's time, and an event if the GPU's own clock says when; None within a stream's capture."""

    host_ns: int
    event: Any


class Span(NamedTuple):
    """A phase from one moment to another; ``computed`` is when a backward pass had run all its nodes, if anybody asks.

    From then on to its end the stream waits for what others do for it: reductions of gradients.
    """

    phase: str
    first: Mark
    last: Mark
    computed: Mark | None = None

    @property
    def is_on_gpu(self) -> bool:
        """Whether events were recorded at both ends."""
        return isinstance(self.first.event, torch.cuda.Event) and isinstance(self.last.event, torch.cuda.Event)


def sum_times(spans: Iterable[Span]) -> dict[str, int]:
    """Return the sum of each phase's times, as ``<phase>_ns`` or ``<phase>_event_ns``.

    It waits until the GPU has passed the last event.
    """
    times: dict[str, int] = {}
    for span in spans:
        first, last = span.first.event, span.last.event
        if span.is_on_gpu:
            last.synchronize()
            name, time_ns = f"{span.phase}_event_ns", round(first.elapsed_time(last) * 1_000_000)
        elif first is _HOST and last is _HOST:
            name, time_ns = f"{span.phase}_ns", span.last.host_ns - span.first.host_ns
        else:  # CUDA came into use, or a capture began, in the middle of it
            continue
        times[name] = times.get(name, 0) + time_ns
    return times


_HOST = object()
"""In the place of an event: the host's time says all."""


class PhaseClock:
    """Times phases on the thread that starts it; a phase within another one counts as the outer one's time.

    The loss is what runs between a forward pass and the backward pass after it, unless the script has a phase for it.
    Where CUDA is in use the host only enqueues a phase, so its clock says nothing: a pair of events does, on the stream
    that is current when the phase begins and ends. Recording an event waits for nothing. Within a stream's capture into
    a CUDA graph no event can be timed, and nothing is collected. Waiting for data keeps the host, and is timed by it.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        self._depth = 0
        self._phase = ""
        self._began = Mark(0, None)
        self._forward_ended: Mark | None = None
        self._computed: Mark | None = None
        self._spans: list[Span] = []

    @property
    def is_running(self) -> bool:
        """Whether phases of this thread are timed."""
        return self._thread == threading.get_ident()

    def start(self) -> None:
        """Start timing."""
        self._thread = threading.get_ident()

    def stop(self) -> None:
        """Stop timing."""
        self._thread = None

    def begin(self, phase: str) -> None:
        """Mark where ``phase`` begins."""
        if self._thread != threading.get_ident():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._phase, self._began = phase, _mark(phase)
        if phase == BACKWARD and self._forward_ended is not None:
            self._spans.append(Span(LOSS, self._forward_ended, self._began))
        self._forward_ended = None

    def end(self) -> None:
        """Mark where the innermost phase ends."""
        if self._thread != threading.get_ident() or not self._depth:
            return
        self._depth -= 1
        if self._depth:
            return
        ended = _mark(self._phase)
        computed, self._computed = self._computed, None
        self._spans.append(Span(self._phase, self._began, ended, computed))
        self._forward_ended = ended if self._phase == FORWARD else None

    def graph_ran(self) -> None:
        """Mark where a backward pass has run all its nodes; the thread that ran the last one may call this."""
        if self._phase == BACKWARD and self._depth == 1:
            self._computed = _mark(BACKWARD)

    def take(self) -> list[Span]:
        """Return the phases since the last call; one that is open ends here."""
        if self._depth:
            self._spans.append(Span(self._phase, self._began, _mark(self._phase)))
            self._depth = 0
            self._computed = None
        spans, self._spans = self._spans, []
        self._forward_ended = None
        return spans


def _mark(phase: str) -> Mark:
    """Return this moment, with an event where CUDA is in use."""
    now_ns = perf_counter_ns()
    if phase == DATA or not torch.cuda.is_initialized():
        return Mark(now_ns, _HOST)
    return Mark(now_ns, mark_on_gpu())


def mark_on_gpu() -> Any:
    """Record an event on the current stream and return it; None within a stream's capture."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event = _unused.pop() if _unused else torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def give_back(events: Iterable[Any]) -> None:
    """Have events that nobody will look at again recorded anew: making one takes as long as recording it."""
    _unused.extend(events)


_unused: list[Any] = []


def wait_for_device() -> None:
    """Wait until the GPU has done all that was launched; within a stream's capture do nothing."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return
    # Within a script's own capture into a CUDA graph there is nothing to wait for, and waiting would break it.
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


class StepCollector:
    """Collects each step's times, part by part, and what `read_counters` counted in each part."""

    def __init__(self) -> None:
        self.steps: dict[Part, list[dict[str, int]]] = {"attached": [], "profiled": []}
        self.during: dict[str, dict[str, int]] = {}
        self._part: Part | None = None
        self._before: dict[str, int] = {}

    def begin(self, part: Part) -> None:
        """Begin a part; the one before it has ended."""
        self.end()
        self._part = part
        self._before = read_counters()

    def end(self) -> None:
        """End the current part, if there is one."""
        if self._part is not None:
            self.during[self._part] = counted_since(self._before)
            self._part = None

    def note(self, times: dict[str, int]) -> None:
        """Keep a step's times; those from before the first part are dropped."""
        if self._part is not None:
            self.steps[self._part].append(times)
