"""What profkit's ranges show to whoever observes them, and to NVTX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from profkit.annotation import RangeObserver, ignore_ranges, observe_ranges

NvtxEvent = tuple[Any, ...]
"""``("push", name, payload)`` or ``("pop", name)``, as the fixture ``nvtx_events`` has them."""


def payloads_by_path(events: list[NvtxEvent]) -> dict[str, int | None]:
    """Return the payload of each range by the names of the ranges around it and its own."""
    stack: list[str] = []
    found: dict[str, int | None] = {}
    for kind, name, *payload in events:
        if kind == "pop":
            stack.pop()
        else:
            stack.append(name)
            found["/".join(stack)] = payload[0]
    return found


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
