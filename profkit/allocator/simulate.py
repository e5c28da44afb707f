"""Simulate the caching allocator: from what a program asked for to the addresses that the allocator chooses.

The replay (`profkit.allocator.replay`) follows recorded addresses. Here they are chosen by the allocator's own rules
(`profkit.allocator.heap`), so that other settings, another capacity and an edited program can be tried on a recording.

Only the base addresses of new segments come from outside, because CUDA chooses them. They matter where two free blocks
of equal size lie in different segments: the lower one is taken. `Simulation.bases_decide` says whether that happened
with a base that CUDA need not choose again. Simulations with other draws then show what the addresses change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.allocator.heap import Heap, Limit
from profkit.allocator.replay import History
from profkit.allocator.requests import Floats, Requests
from profkit.snapshot.columns import Ints, Settings

_MOST_BYTES = 2.0**60
"""More than a program could ask for in years; sums of it still fit in 64 bits."""


@dataclass(frozen=True)
class Failure:
    """A request that did not fit, even after all cached memory was released."""

    position: float
    index: int
    """Its row in the `Requests`."""
    requested_bytes: int


@dataclass(frozen=True)
class Identity:
    """Whether the simulator chooses the recorded addresses under the recorded settings."""

    exact: bool
    wrong_address_count: int
    reason: str | None = None
    """Where it first went wrong, or why nothing could be compared."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """What the simulated allocator did: per row of the `Requests`, and curves of bytes over ``positions``.

    Positions are those of the requests, sorted. The first value of a curve is before the first operation.
    """

    address: Ints
    size_bytes: Ints
    """What the allocator charged; 0 for rows after a failure."""
    positions: Floats
    allocated: Ints
    requested: Ints
    reserved: Ints
    failed: Failure | None
    bases_decide: bool
    """Whether a choice hung on the base address of a segment that CUDA need not choose again."""

    @property
    def allocated_peak_bytes(self) -> int:
        return int(self.allocated.max())

    @property
    def requested_peak_bytes(self) -> int:
        return int(self.requested.max())

    @property
    def reserved_peak_bytes(self) -> int:
        return int(self.reserved.max())

    @property
    def peak_position(self) -> float:
        """Where on the axis of events the allocated memory first stood at its peak."""
        return float(self.positions[self.allocated.argmax()])


def simulate(
    requests: Requests,
    settings: Settings,
    *,
    draw: int = 0,
    limit: Limit | None = None,
    follows_releases: bool = False,
    keeps_start: bool = True,
) -> Simulation:
    """Return what an allocator with ``settings`` does with a request stream.

    Args:
        draw: where segments begin for which the recording has no base: as CUDA mostly places them, downwards (0),
            upwards (1), or all segments at random addresses (2 and more, the seed).
        limit: the most that may be reserved. The simulation ends at the request that does not fit.
        follows_releases: release what the recorded allocator released for lack of memory, when it did.
        keeps_start: what was live before the first event keeps its place. Otherwise, or where the settings make
            segments of another kind, it is allocated anew, without the memory that was cached then.
    """
    heap = Heap(requests, settings, draw, limit)
    if keeps_start and all(region.is_expandable == settings.expandable_segments for region in requests.start):
        heap.lay_out()
    start_bytes = heap.reserved_bytes
    rows = np.arange(len(requests))
    position = np.concatenate([requests.completed, requests.born])  # at one position frees come first
    operation = np.concatenate([~rows, rows])
    is_placed = np.concatenate([np.zeros(len(rows), dtype=np.bool_), np.array(heap.sizes, dtype=np.int64) > 0])
    order = np.argsort(position, kind="stable")
    order = order[(position[order] < requests.event_count) & ~is_placed[order]]
    position, operation = position[order], operation[order]
    done = 0
    for release in requests.releases:
        if heap.failed is None and (release.by_program or follows_releases):
            end = int(np.searchsorted(position, release.position))
            heap.run(operation[done:end].tolist())
            done = end
            if heap.failed is None:
                heap.release(release)
    if heap.failed is None:
        heap.run(operation[done:].tolist())
    return _sum_up(requests, heap, start_bytes)


def check_identity(history: History, requests: Requests) -> Identity:
    """Return whether the simulator chooses what the recorded allocator chose."""
    replay = history.replay
    if history.contradictions or history.bounds is not None:
        return Identity(False, 0, "the replay of the recorded history is not proven itself")
    if float(requests.requested_bytes.sum(dtype=np.float64)) > _MOST_BYTES:
        return Identity(False, 0, "it asks for more memory than any GPU could have served")
    simulation = simulate(requests, history.settings, follows_releases=True)
    is_wrong = (simulation.address != replay.address) | (simulation.size_bytes != replay.size_bytes)
    wrong = np.flatnonzero(is_wrong)
    if len(wrong):
        row = int(wrong[0])
        where = f"event {int(replay.birth[row]):,}, a request for {int(replay.requested_bytes[row]):,} B"
        return Identity(False, len(wrong), f"the first wrong address is that of {where}")
    curves = history.curves
    peaks = simulation.allocated_peak_bytes, simulation.reserved_peak_bytes
    if peaks != (int(curves.allocated.max()), int(curves.reserved.max())):
        return Identity(False, 0, "every address is right, but a peak differs")
    return Identity(True, 0)


def _sum_up(requests: Requests, heap: Heap, start_bytes: int) -> Simulation:
    """Return the curves: one entry for each completed free, request to free, change of reserved memory and birth."""
    size = np.array(heap.sizes, dtype=np.int64)
    completed = requests.completed.copy()
    completed[list(heap.completed_early)] = list(heap.completed_early.values())
    changed = np.array(heap.changes, dtype=np.float64).reshape(-1, 2)
    live = np.flatnonzero(size)
    last = float(requests.event_count)
    is_over = [completed[live] < last, requests.freed[live] < last]
    completing, freeing = live[is_over[0]], live[is_over[1]]
    position = np.concatenate([completed[completing], requests.freed[freeing], changed[:, 0], requests.born[live]])
    order = np.argsort(position, kind="stable")
    failed = None
    if heap.failed is not None:
        failed = Failure(float(requests.born[heap.failed]), heap.failed, int(requests.requested_bytes[heap.failed]))
        order = order[position[order] <= failed.position]
    counts = (len(completing), len(freeing), len(changed), len(live))

    def curve(start: int, *parts: Ints | None) -> Ints:
        columns = [
            np.zeros(count, np.int64) if part is None else part for part, count in zip(parts, counts, strict=True)
        ]
        return np.concatenate([[start], start + np.cumsum(np.concatenate(columns)[order])])

    wanted = requests.requested_bytes
    return Simulation(
        address=np.array(heap.addresses, dtype=np.int64),
        size_bytes=size,
        positions=np.concatenate([[-1.0], position[order]]),
        allocated=curve(0, None, -size[freeing], None, size[live]),
        requested=curve(0, -wanted[completing], None, None, wanted[live]),
        reserved=curve(start_bytes, None, None, changed[:, 1].astype(np.int64), None),
        failed=failed,
        bases_decide=heap.bases_decide,
    )


_MOST_DRAWS = 8
_LEAST_DRAWS = 3
_DRAWN_REQUESTS = 400_000
"""About this many requests are simulated for all draws together: more would only take time."""

Range = tuple[int, int | None]
"""The lowest and the highest value; None where there is no bound."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """The simulations of one request stream under some settings: the first, and the ranges over all of them."""

    simulation: Simulation
    allocated_range_bytes: tuple[int, int]
    reserved_range_bytes: tuple[int, int]
    exact: bool
    fits: bool | None
    failed: Failure | None


def predict(requests: Requests, settings: Settings, capacity_bytes: int | None = None) -> Prediction:
    """Simulate a request stream; several times where base addresses or the state before the history decide.

    Args:
        capacity_bytes: what PyTorch may reserve. Where that is too little without releasing cached memory, the peaks
            are those with it if the program survives, and else those that it would need.
    """
    simulations, exact = _simulate_all(requests, settings, None)
    fits: bool | None = None
    failed = None
    if simulations[0].failed is not None:
        fits, failed = False, simulations[0].failed  # more than any GPU has
    elif capacity_bytes is not None:
        fits = max(simulation.reserved_peak_bytes for simulation in simulations) <= capacity_bytes
        if not fits:
            limited, _ = _simulate_all(requests, settings, Limit(capacity_bytes))
            failures = [simulation.failed for simulation in limited if simulation.failed is not None]
            failed = failures[0] if failures else None
            fits = None if 0 < len(failures) < len(limited) else not failures
            simulations = limited if fits else simulations
    allocated = [simulation.allocated_peak_bytes for simulation in simulations]
    reserved = [simulation.reserved_peak_bytes for simulation in simulations]
    ranges = (min(allocated), max(allocated)), (min(reserved), max(reserved))
    return Prediction(simulations[0], *ranges, exact, fits, failed)


def _simulate_all(requests: Requests, settings: Settings, limit: Limit | None) -> tuple[list[Simulation], bool]:
    simulations = [simulate(requests, settings, limit=limit)]
    if simulations[0].bases_decide:
        draws = min(max(_DRAWN_REQUESTS // max(len(requests), 1), _LEAST_DRAWS), _MOST_DRAWS)
        simulations += [simulate(requests, settings, limit=limit, draw=draw) for draw in range(1, draws)]
    if requests.start:
        simulations.append(simulate(requests, settings, limit=limit, keeps_start=False))
    return simulations, len(simulations) == 1 and all(release.by_program for release in requests.releases)
