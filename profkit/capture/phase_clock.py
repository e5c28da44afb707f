"""The time of phases in a script that is not recorded: host clock on the CPU, CUDA events on a GPU, no waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from profkit.capture.phase_events import PhaseEvents


class PhaseClock:
    """Times the functions that it was put around while it runs; of nested ones the outermost.

    Where CUDA is in use the host only enqueues a phase, so that its clock says nothing: events do, on the stream that
    is current when the phase begins. It changes no value and keeps nothing of the script's.
    """

    def __init__(self) -> None:
        self._running = False
        self._within = False
        self._wall_ns: dict[str, int] = {}
        self._events = PhaseEvents()

    def start(self) -> None:
        """Time from now on."""
        self._running = True

    def stop(self) -> None:
        """Time no more."""
        self._running = False

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time counted as the phase's."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._running or self._within:
                return function(*args, **kwargs)
            on_gpu = torch.cuda.is_initialized()
            self._within = True
            if on_gpu:
                self._events.begin(phase)
            start_ns = perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._within = False
                if on_gpu:
                    self._events.end(phase)
                else:
                    name = f"{phase}_ns"
                    self._wall_ns[name] = self._wall_ns.get(name, 0) + perf_counter_ns() - start_ns

        return counted

    def take(self) -> dict[str, int]:
        """Return the sum of each phase's times since the last call, as ``<phase>_ns`` or ``<phase>_event_ns``.

        It waits until the GPU has passed the last event.
        """
        times = {**self._wall_ns, **self._events.take()}
        self._wall_ns = {}
        return times
