"""A program's requests, what is known of the allocation that each comes from, and what an edit makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from profkit.allocator.requests import ADDED, Floats, Requests, highest_sum, requests_of, with_request
from profkit.analysis.memory.categories import Claim
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.failures import last_failure
from profkit.errors import UsageError
from profkit.names import BACKWARD, OPTIMIZER
from profkit.snapshot.columns import ALLOC, Ints

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Stream:
    """Requests, as recorded or edited. Every request comes from one recorded allocation: itself, or the one it copies.

    What is known of that allocation (its category, its module) holds for the request too.
    """

    requests: Requests
    source: Ints
    """By request: the row in the `Replay` of the recorded allocation."""

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_recorded(self) -> Bools:
        """Whether a request is a recorded allocation, not one that an edit added."""
        return np.not_equal(self.requests.row, ADDED)

    def of(self, is_row: Bools) -> Bools:
        """Return which requests come from an allocation for which ``is_row`` is true."""
        return is_row[self.source]

    def without(self, gone: Bools) -> Stream:
        """Return the stream without some requests."""
        kept = ~gone
        columns = ("requested_bytes", "born", "freed", "completed", "kind", "row")
        requests = replace(self.requests, **{name: getattr(self.requests, name)[kept] for name in columns})
        return Stream(requests, self.source[kept])

    def resized(self, where: Bools, requested_bytes: Ints) -> Stream:
        """Return the stream with other sizes for some requests."""
        sizes = self.requests.requested_bytes.copy()
        sizes[where] = requested_bytes
        return replace(self, requests=replace(self.requests, requested_bytes=sizes))

    def freed_at(self, where: Bools, positions: Floats) -> Stream:
        """Return the stream with some requests freed at other positions, and free for reuse at once."""
        freed, completed = self.requests.freed.copy(), self.requests.completed.copy()
        freed[where] = completed[where] = positions
        return replace(self, requests=replace(self.requests, freed=freed, completed=completed))

    def with_copies(self, of: Ints, requested_bytes: Ints, born: Floats, freed: Floats) -> Stream:
        """Return the stream with further requests: of the kind and the source of the requests ``of`` (indices)."""
        old = self.requests
        requests = replace(
            old,
            requested_bytes=np.concatenate([old.requested_bytes, requested_bytes]),
            born=np.concatenate([old.born, born]),
            freed=np.concatenate([old.freed, freed]),
            completed=np.concatenate([old.completed, freed]),
            kind=np.concatenate([old.kind, old.kind[of]]),
            row=np.concatenate([old.row, np.full(len(of), ADDED, dtype=np.int64)]),
        )
        return Stream(requests, np.concatenate([self.source, self.source[of]]))

    def requested_peak_bytes(self) -> int:
        """Return the most bytes that were requested at a time."""
        return highest_sum(self.requests, self.requests.requested_bytes, self.requests.completed)


def with_failed_request(memory: DeviceMemory, requests: Requests) -> Requests:
    """Return the requests with the one that failed last, if that ended the program: edits should let it through."""
    event, events = last_failure(memory), memory.device.events
    if event is None or np.any(events.action[event:] == ALLOC):
        return requests
    return with_request(requests, event, int(events.size_bytes[event]), int(events.stream[event]))


class Program:
    """What a snapshot knows of a program's allocations, by row of the `Replay`; worked out when first asked for."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.replay = memory.history.replay

    def recorded(self) -> Stream:
        """Return the requests as they were recorded."""
        requests = requests_of(self.memory.history)
        return Stream(requests, requests.row)

    @cached_property
    def claims(self) -> list[Claim]:
        """What each allocation is for."""
        return [self.memory.classifier.claim_of(row) for row in range(len(self.replay))]

    @cached_property
    def phases(self) -> list[str | None]:
        """The phase in which each allocation was made."""
        return [self.memory.places.phase_of(row) for row in range(len(self.replay))]

    def is_category(self, *categories: str) -> Bools:
        """Return which allocations are of one of some categories, as far as is known or guessed."""
        return self._mask(claim.category in categories for claim in self.claims)

    def is_role(self, role: str) -> Bools:
        """Return which allocations the run recorded as tensors of a role (a key of `ROLES`)."""
        owners = self.memory.owners
        return self._mask(row in owners and owners[row].role == role for row in range(len(self.replay)))

    def element_bytes(self, row: int) -> int | None:
        """Return the size of an element of a known tensor; None if the run did not record it or tensors differ."""
        owner = self.memory.owners.get(row)
        sizes = {part.element_bytes for part in owner.parts} if owner else {None}
        size = sizes.pop() if len(sizes) == 1 else None
        return size if size and size > 0 else None

    @cached_property
    def is_optimizer_temporary(self) -> Bools:
        """Which allocations an optimizer's step made and freed again."""
        memory = self.memory

        def is_one(row: int) -> bool:
            if self.claims[row].category != "temporaries":
                return False
            frames = memory.stacks.of(row).frames
            return self.phases[row] == OPTIMIZER or any("torch/optim/" in file for _, file, _ in frames)

        return self._mask(is_one(row) for row in range(len(self.replay)))

    @cached_property
    def backward_passes(self) -> list[tuple[int, int]]:
        """The first and the last moment of each backward pass."""
        timeline = self.memory.timeline
        return [timeline.moments_of(phase) for phase in timeline.phases if phase.name == BACKWARD]

    def _mask(self, values: object) -> Bools:
        return np.fromiter(values, np.bool_, len(self.replay))  # type: ignore[call-overload,no-any-return]


Bound = Literal["least", "likely", "most"]
"""What is taken for that which nobody knows of an edit: what needs least memory, what was seen mostly, or most."""


@dataclass(frozen=True)
class Change:
    """An edited stream; ``rests_on`` and each line of ``unknown`` are sentences for people."""

    stream: Stream
    rests_on: str
    unknown: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    """Ranges whose forward pass runs a second time."""


@dataclass(frozen=True)
class Applied:
    """One edit as it was written, and what is known of it."""

    text: str
    rests_on: str
    unknown: tuple[str, ...]
    recomputed: tuple[str, ...]
    """Ranges whose forward pass runs a second time."""


class CannotModelError(UsageError):
    """An edit that this snapshot says too little about, or that would change nothing."""
