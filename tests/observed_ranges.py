"""What profkit's ranges show to whoever observes them, and to NVTX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from profkit.annotation import RangeObserver, ignore_ranges, observe_ranges


class ObservedRanges(RangeObserver):
    """The ranges that opened, each with those around it, and in `events` their names and ``closed`` in turn."""

    def __init__(self) -> None:
        self.stacks: list[list[str]] = []
        self.events: list[str] = []
        self._open: list[str] = []

    def opening(self, name: str) -> None:
        self._open.append(name)
        self.stacks.append(list(self._open))
        self.events.append(name)

    def closed(self) -> None:
        self._open.pop()
        self.events.append("closed")


@contextmanager
def observed_ranges() -> Iterator[ObservedRanges]:
    """Observe the ranges that open in the block."""
    observer = ObservedRanges()
    observe_ranges(observer)
    try:
        yield observer
    finally:
        ignore_ranges(observer)
