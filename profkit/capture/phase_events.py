"""CUDA events around the phases of a step: what each took on the GPU's own clock."""

from __future__ import annotations

from typing import Any

import torch


class PhaseEvents:
    """Collects pairs of events, and tells the time between them once the GPU has passed both.

    The time goes from when the GPU had done all that was enqueued before `begin`, on the current stream, to when it had
    done all before `end`. Recording waits for nothing. Within a stream's capture into a CUDA graph no event can be
    timed: there nothing is collected.
    """

    def __init__(self) -> None:
        self._begun: dict[str, Any] = {}
        self._pairs: list[tuple[str, Any, Any]] = []

    def begin(self, phase: str) -> None:
        """Mark where ``phase`` begins on the GPU."""
        if not torch.cuda.is_current_stream_capturing():
            self._begun[phase] = _recorded_event()

    def end(self, phase: str) -> None:
        """Mark where it ends."""
        first = self._begun.pop(phase, None)
        if first is not None and not torch.cuda.is_current_stream_capturing():
            self._pairs.append((phase, first, _recorded_event()))

    def take(self) -> dict[str, int]:
        """Return ``<phase>_event_ns`` of what was collected, of repeated phases the sum, and begin anew.

        It waits until the GPU has passed the last event.
        """
        times: dict[str, int] = {}
        for phase, first, last in self._pairs:
            last.synchronize()
            name = f"{phase}_event_ns"
            times[name] = times.get(name, 0) + round(first.elapsed_time(last) * 1_000_000)  # it tells milliseconds
        self._pairs.clear()
        return times


def _recorded_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
