"""CUDA events around the phases of a step: what each took on the GPU's own clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Pair = tuple[Any, Any]


class PhaseEvents:
    """Collects a pair of events per block, and tells their times once the device has been waited for.

    A pair's time goes from when the GPU had done all that was enqueued before the block, on the current stream, to when
    it had done the block's own work. Recording waits for nothing. Within a stream's capture into a CUDA graph no event
    can be timed: there, and without CUDA, nothing is collected.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[str, Pair]] = []

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Time what is enqueued in the block."""
        first = _recorded_event()
        try:
            yield
        finally:
            last = _recorded_event()
            if first is not None and last is not None:
                self._pairs.append((phase, (first, last)))

    def take(self) -> dict[str, int]:
        """Return ``<phase>_event_ns`` of what was collected, of repeated phases the sum, and begin anew.

        The device must have done all of it.
        """
        times: dict[str, int] = {}
        for phase, (first, last) in self._pairs:
            name = f"{phase}_event_ns"
            times[name] = times.get(name, 0) + round(first.elapsed_time(last) * 1_000_000)  # from milliseconds
        self._pairs.clear()
        return times


def _recorded_event() -> Any:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()) or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
