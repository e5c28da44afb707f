"""What other settings of the allocator would need: predicted peaks, how sure they are, and whether they fit.

The simulator (`profkit.allocator.simulate`) is believed only where it is proven on the recording itself: with the
recorded settings it must choose every recorded address. If it does not, only what holds for any allocator is returned:
the requested peak, and that no peak is lower than the requests, rounded.

The requested peak is exact. The allocated and reserved peaks are exact where no choice hangs on the base address of a
segment that CUDA need not choose again; else they are a range over several draws of these addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profkit.allocator.heap import Limit
from profkit.allocator.history import History
from profkit.allocator.requests import Requests, requests_of
from profkit.allocator.rules import round_sizes
from profkit.allocator.settings import format_settings, list_variants, parse_settings
from profkit.allocator.simulate import Failure, Identity, Simulation, check_identity, simulate
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.owners import find_capacity
from profkit.analysis.notebook import NotebookResult, table_of
from profkit.errors import SnapshotError
from profkit.snapshot.columns import Settings

if TYPE_CHECKING:
    import pandas as pd

_MOST_DRAWS = 8
_LEAST_DRAWS = 3
_DRAWN_REQUESTS = 400_000
"""About this many requests are simulated for all draws together: more would only take time."""
_LARGEST_REQUEST_BYTES = 2**46

Range = tuple[int, int | None]


@dataclass(frozen=True)
class Case:
    """The peaks of one device under some settings, in bytes; None where they cannot be predicted."""

    allocator: str
    """The settings as torch writes them; empty for the defaults."""
    edits: tuple[str, ...]
    requested_peak_bytes: int
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    exact: bool
    allocated_range_bytes: Range
    reserved_range_bytes: Range
    phase: str | None
    """In which the allocated memory is at its peak."""
    fits: bool | None
    unused_bytes: int | None
    """Reserved but not allocated at the allocated peak."""
    failed_request_bytes: int | None
    """Where it does not fit: the request that fails."""


@dataclass(frozen=True, repr=False)
class WhatIf(NotebookResult):
    """What ``profkit whatif`` shows: today's case first."""

    snapshot: str
    device: int
    identity: Identity
    capacity_bytes: int | None
    """What PyTorch may reserve: as asked for, or the memory of the recorded GPU."""
    is_recorded_gpu: bool
    history_is_complete: bool
    cases: tuple[Case, ...]

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per case, today's first."""
        return table_of(self.cases, Case)


@dataclass(frozen=True, eq=False)
class Prediction:
    """The simulations of one request stream under some settings: the first, and the ranges over all of them."""

    simulation: Simulation
    allocated_range_bytes: Range
    reserved_range_bytes: Range
    exact: bool
    fits: bool | None
    failed: Failure | None


def predict(requests: Requests, settings: Settings, capacity_bytes: int | None = None) -> Prediction:
    """Simulate a request stream; several times where base addresses or the state before the history decide.

    Args:
        capacity_bytes: what PyTorch may reserve. Where that is too little without releasing cached memory, the peaks
            are those with it if the program survives, and else those that it would need.
    """
    found, exact = _simulate_all(requests, settings, None)
    fits: bool | None = None
    failed = None
    if capacity_bytes is not None:
        fits = max(one.reserved_peak_bytes for one in found) <= capacity_bytes
        if not fits:
            limited, _ = _simulate_all(requests, settings, Limit(capacity_bytes))
            failures = [one.failed for one in limited if one.failed is not None]
            failed = failures[0] if failures else None
            fits = None if 0 < len(failures) < len(limited) else not failures
            found = limited if fits else found
    allocated, reserved = ([getattr(one, f"{kind}_peak_bytes") for one in found] for kind in ("allocated", "reserved"))
    ranges = (min(allocated), max(allocated)), (min(reserved), max(reserved))
    return Prediction(found[0], *ranges, exact, fits, failed)


def what_if(
    memory: DeviceMemory, snapshot: str, *, allocators: Sequence[str] = (), capacity_bytes: int | None = None
) -> WhatIf:
    """Return the peaks of one device today and under other settings of the allocator.

    Args:
        snapshot: its path, for the result.
        allocators: settings as torch writes them; by default those that are worth a try.
        capacity_bytes: what PyTorch may reserve; by default the memory of the GPU that the run recorded.

    Raises:
        UsageError: torch would refuse a setting.
        SnapshotError: no history was recorded, or a request is larger than any GPU.
    """
    history = memory.history
    variants = [parse_settings(text) for text in allocators] or list_variants(history.settings)
    requests = read_requests(history, snapshot)
    identity = check_identity(history, requests)
    recorded = find_capacity(memory.recorded, memory.device.index)
    capacity = capacity_bytes or recorded
    if not capacity:
        variants = [one for one in variants if allocators or not one.garbage_collection_threshold]
    cases = [_today(memory, requests, capacity)]
    for settings in variants:
        if identity.exact:
            cases.append(build_case(memory, predict(requests, settings, capacity), settings))
        else:
            cases.append(_bounded(history, settings))
    return WhatIf(
        snapshot=snapshot,
        device=memory.device.index,
        identity=identity,
        capacity_bytes=capacity,
        is_recorded_gpu=capacity_bytes is None and recorded is not None,
        history_is_complete=history.is_complete,
        cases=tuple(cases),
    )


def read_requests(history: History, snapshot: str) -> Requests:
    """Return the request stream of a device.

    Raises:
        SnapshotError: no history was recorded, or a request is larger than any GPU.
    """
    if not len(history.device.events):
        raise SnapshotError(f"{snapshot}: no history was recorded, so there is nothing to simulate")
    requests = requests_of(history)
    if requests.requested_bytes.max(initial=0) > _LARGEST_REQUEST_BYTES:
        raise SnapshotError(f"{snapshot}: a request for more memory than any GPU has; nothing is simulated")
    return requests


def build_case(memory: DeviceMemory, prediction: Prediction, settings: Settings, edits: tuple[str, ...] = ()) -> Case:
    """Return the figures of a prediction."""
    one = prediction.simulation
    peak = int(one.allocated.argmax())
    failed = prediction.failed
    return Case(
        allocator=format_settings(settings),
        edits=edits,
        requested_peak_bytes=one.requested_peak_bytes,
        allocated_peak_bytes=one.allocated_peak_bytes,
        reserved_peak_bytes=one.reserved_peak_bytes,
        exact=prediction.exact,
        allocated_range_bytes=prediction.allocated_range_bytes,
        reserved_range_bytes=prediction.reserved_range_bytes,
        phase=memory.timeline.phase_at(min(int(one.peak_position), len(memory.device.events) - 1)),
        fits=prediction.fits,
        unused_bytes=int(one.reserved[peak] - one.allocated[peak]),
        failed_request_bytes=None if failed is None else failed.requested_bytes,
    )


def _simulate_all(requests: Requests, settings: Settings, limit: Limit | None) -> tuple[list[Simulation], bool]:
    """Return one simulation, or several that show what the unknown changes; and whether the one is exact."""
    found = [simulate(requests, settings, limit=limit)]
    if found[0].bases_decide:
        draws = min(max(_DRAWN_REQUESTS // max(len(requests), 1), _LEAST_DRAWS), _MOST_DRAWS)
        found += [simulate(requests, settings, limit=limit, draw=draw) for draw in range(1, draws)]
    if requests.start:
        found.append(simulate(requests, settings, limit=limit, keeps_start=False))
    return found, len(found) == 1 and all(release.by_program for release in requests.releases)


def _today(memory: DeviceMemory, requests: Requests, capacity: int | None) -> Case:
    """Return the recorded case, as the replay proves it."""
    history = memory.history
    curves, bounds = history.curves, history.bounds
    allocated, reserved = history.allocated_peak_bytes, int(curves.reserved.max())
    moment = history.peak_moment
    fits, failed = None if capacity is None else reserved <= capacity, None
    if fits is False and bounds is None:
        limited = predict(requests, history.settings, capacity)
        fits, failed = limited.fits, limited.failed
    return Case(
        allocator=format_settings(history.settings),
        edits=(),
        requested_peak_bytes=int(curves.requested.max()),
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=reserved,
        exact=bounds is None,
        allocated_range_bytes=bounds or (allocated, allocated),
        reserved_range_bytes=(reserved, reserved),
        phase=memory.timeline.phase_at(moment - 1),
        fits=fits,
        unused_bytes=int(curves.reserved[moment]) - allocated,
        failed_request_bytes=None if failed is None else failed.requested_bytes,
    )


def _bounded(history: History, settings: Settings) -> Case:
    """Return what holds for any allocator with these settings: no peak is lower than the requests, rounded."""
    replay = history.replay
    change = np.zeros(replay.event_count + 2, dtype=np.int64)
    rounded = round_sizes(replay.requested_bytes, settings)
    np.add.at(change, replay.birth + 1, rounded)
    np.subtract.at(change, replay.freed + 1, rounded)
    low = int(change[:-1].cumsum().max())
    return Case(
        allocator=format_settings(settings),
        edits=(),
        requested_peak_bytes=int(history.curves.requested.max()),
        allocated_peak_bytes=None,
        reserved_peak_bytes=None,
        exact=False,
        allocated_range_bytes=(low, None),
        reserved_range_bytes=(low, None),
        phase=None,
        fits=None,
        unused_bytes=None,
        failed_request_bytes=None,
    )
