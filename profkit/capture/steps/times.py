"""The times of steps and phases without a profiler: host clock on the CPU, CUDA events on a GPU."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import torch

from profkit.capture.steps.conditions import read_counters
from profkit.names import BACKWARD, DATA, FORWARD, LOSS

Part = Literal["attached", "profiled"]
"""Steps of a recorded process before its recording, and the steps that were asked for."""


class Mark(NamedTuple):
    """One moment: the host's time, and an event if the GPU's own clock says when; None within a stream's capture.

    ``device`` is the GPU of the event: times between two GPUs' events are unknown.
    """

    host_ns: int
    event: Any
    device: int = 0


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
        """Whether events of one GPU were recorded at both ends."""
        first, last = self.first, self.last
        return first.event not in _NO_EVENTS and last.event not in _NO_EVENTS and first.device == last.device

    @property
    def marks(self) -> Sequence[Mark]:
        """The marks of a span on the GPU whose times from each other are known."""
        first, last, computed = self.first, self.last, self.computed
        if computed is None or computed.event in _NO_EVENTS or computed.device != first.device:
            return first, last
        return first, computed, last


def sum_times(spans: Iterable[Span]) -> dict[str, int]:
    """Return the sum of each phase's times, as ``<phase>_ns``, or ``<phase>_event_ns`` and ``<phase>_host_ns``.

    It waits until the GPU has passed the last event.
    """
    times: dict[str, int] = {}
    for span in spans:
        first, last = span.first.event, span.last.event
        if span.is_on_gpu:
            last.synchronize()
            name, time_ns = f"{span.phase}_event_ns", round(first.elapsed_time(last) * 1_000_000)
            on_host = f"{span.phase}_host_ns"
            times[on_host] = times.get(on_host, 0) + span.last.host_ns - span.first.host_ns
        elif first is _HOST and last is _HOST:
            name, time_ns = f"{span.phase}_ns", span.last.host_ns - span.first.host_ns
        else:  # in the middle of it CUDA came into use, a capture began, or another GPU became the current one
            continue
        times[name] = times.get(name, 0) + time_ns
    return times


_HOST = object()
"""In the place of an event: the host's time says all."""

_NO_EVENTS = (None, _HOST)


def times_without_waits(steps: Iterable[Mapping[str, int]]) -> list[int]:
    """Return what steps took without waits for data: one that waits for workers is none of the rare, long ones."""
    return [step["step_ns"] - step.get("data_ns", 0) for step in steps]


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
        self._paused = ""
        self._began = Mark(0, None)
        self._forward_ended: Mark | None = None
        self._computed: Mark | None = None
        self._spans: list[Span] = []
        self._mark = self._mark_before_cuda

    @property
    def phase(self) -> str | None:
        return self._phase if self._depth else None

    @property
    def is_running(self) -> bool:
        return self._thread == threading.get_ident()

    def start(self) -> None:
        self._thread = threading.get_ident()

    def stop(self) -> None:
        self._thread = None

    def begin(self, phase: str) -> None:
        if self._thread != threading.get_ident():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._phase = phase
        self._began = self._now()
        if phase == BACKWARD and self._forward_ended is not None:
            self._spans.append(_span((LOSS, self._forward_ended, self._began, None)))
        self._forward_ended = None

    def end(self) -> None:
        if self._thread != threading.get_ident() or not self._depth:
            return
        self._depth -= 1
        if self._depth:
            return
        ended = self._now()
        computed, self._computed = self._computed, None
        self._spans.append(_span((self._phase, self._began, ended, computed)))
        self._forward_ended = ended if self._phase == FORWARD else None

    def pause(self) -> None:
        """Leave the phase for others that it calls, as an optimizer its closure; not if it lies in another one."""
        if self._thread == threading.get_ident() and self._depth == 1:
            self._paused = self._phase
            self.end()

    def resume(self) -> None:
        if self._thread == threading.get_ident() and self._paused and not self._depth:
            self.begin(self._paused)

    def graph_ran(self) -> None:
        """Mark where a backward pass has run all its nodes; the thread that ran the last one may call this."""
        if self._phase == BACKWARD and self._depth == 1:
            self._computed = self._mark()

    def _now(self) -> Mark:
        return mark_on_host() if self._phase == DATA else self._mark()

    def _mark_before_cuda(self) -> Mark:
        """Return this moment, with an event as soon as CUDA is in use: it stays so."""
        if torch.cuda.is_initialized():
            self._mark = mark_on_gpu
        return mark_moment()

    def take(self) -> list[Span]:
        """Return the phases since the last call; one that is open ends here."""
        if self._depth:
            ended = self._now()
            self._spans.append(Span(self._phase, self._began, ended))
            self._depth = 0
            self._computed = None
        spans, self._spans = self._spans, []
        self._forward_ended = None
        return spans


def mark_on_host() -> Mark:
    return _mark((perf_counter_ns(), _HOST, 0))


def mark_on_gpu() -> Mark:
    """Return this moment, with an event that is recorded on the current stream but within a stream's capture.

    All that can be is asked of torch's C++ at once: of the public functions most cost more than recording the event.
    """
    now_ns = perf_counter_ns()
    if _is_capturing():
        return _mark((now_ns, None, 0))
    device = _current_device()
    key = _current_stream(device)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream()
    unused = _unused[device]
    event = unused.pop() if unused else _new_event(enable_timing=True)
    event.record(stream)
    return _mark((now_ns, event, device))


_mark: Callable[[tuple[int, Any, int]], Mark] = partial(tuple.__new__, Mark)
_span: Callable[[tuple[str, Mark, Mark, Mark | None]], Span] = partial(tuple.__new__, Span)
"""As the classes do, but without a function of Python's: some ten are made in each step, among other work."""

_c: Any = torch._C
_is_capturing: Callable[[], bool] = getattr(
    _c, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
_current_device: Callable[[], int] = getattr(_c, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Callable[[int], tuple[int, int, int]] = getattr(
    _c, "_cuda_getCurrentStream", torch.cuda.current_stream
)
_new_event: Callable[..., Any] = getattr(_c, "_CudaEventBase", torch.cuda.Event)

_streams: dict[tuple[int, int, int], Any] = {}
"""Streams by what torch's C++ calls them: a new object for the current one takes longer to make than an event."""


def mark_moment() -> Mark:
    return mark_on_gpu() if torch.cuda.is_initialized() else mark_on_host()


def time_between(first: Mark, last: Mark) -> int:
    """Return the nanoseconds between two moments, by the GPU's clock where both have an event of one GPU.

    It waits until the GPU has passed the last event.
    """
    span = Span("", first, last)
    if not span.is_on_gpu:
        return last.host_ns - first.host_ns
    last.event.synchronize()
    return round(first.event.elapsed_time(last.event) * 1_000_000)


def give_back(device: int, events: Iterable[Any]) -> None:
    """Have events that nobody will look at again recorded anew: making one takes as long as recording it.

    CUDA records an event only on the GPU on which it was first recorded, here ``device``.
    """
    _unused[device].extend(events)


_unused: defaultdict[int, list[Any]] = defaultdict(list)


def wait_for_device() -> None:
    """Wait until the GPU has done all that was launched; within a stream's capture do nothing."""
    if not torch.cuda.is_initialized():
        return
    # Within a script's own capture into a CUDA graph there is nothing to wait for, and waiting would break it.
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


class _UnreadStep(NamedTuple):
    context: Mapping[str, int]
    spans: list[Span]
    began: Mark
    ended: Mark


_READ_TOGETHER = 64
"""After so many steps their times are read, which waits for the GPU."""


class StepCollector:
    """Collects each step's times, part by part, and what `read_counters` counted in each part.

    Args:
        clock: knows the steps' phases. While it runs, a step ends on the GPU, and a program that waits nowhere goes on
            at once, too; else once the GPU has done its work.
    """

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._began = mark_on_host()
        self._unread: list[_UnreadStep] = []
        self.steps: dict[Part, list[dict[str, int]]] = {"attached": [], "profiled": []}
        self.during: dict[str, dict[str, int]] = {}
        self._part: Part | None = None
        self._before: dict[str, int] = {}

    def begin(self, part: Part) -> None:
        self.end()
        self._part = part
        self._before = read_counters()

    def end(self) -> None:
        self.read()
        if self._part is not None:
            self.during[self._part] = {name: n - self._before[name] for name, n in read_counters().items()}
            self._part = None

    def step_begins(self) -> None:
        self._began = self._mark()

    def step_ended(self, context: Mapping[str, int]) -> list[Span]:
        """Note that a step of this context has ended, and return its phases; one before the first part is dropped."""
        ended = self._mark()
        spans = self._clock.take()
        self._unread.append(_UnreadStep(context, spans, self._began, ended))
        if len(self._unread) >= _READ_TOGETHER:
            self.read()
        return spans

    def _mark(self) -> Mark:
        if self._clock.is_running:
            return mark_moment()
        wait_for_device()
        return mark_on_host()

    def read(self) -> None:
        unread, self._unread = self._unread, []
        if self._part is not None:
            self.steps[self._part] += (
                {**step.context, **sum_times(step.spans), "step_ns": time_between(step.began, step.ended)}
                for step in unread
            )
