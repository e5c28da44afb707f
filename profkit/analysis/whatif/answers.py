"""What other settings of the allocator, or an edited program, would need: predicted peaks, and how sure they are.

The simulator (`profkit.allocator.simulate`) is believed only where it is proven on the recording itself: with the
recorded settings it must choose every recorded address. If it does not, only what holds for any allocator is returned:
the requested peak, and that no peak is lower than the requests, rounded.

The requested peak is exact. The allocated and reserved peaks are exact where no choice hangs on the base address of a
segment that CUDA need not choose again; else they are a range over several draws of these addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from profkit.allocator.replay import History
from profkit.allocator.requests import Requests, highest_sum, requests_of
from profkit.allocator.rules import format_settings, list_variants, parse_settings, round_sizes, segment_size_bytes
from profkit.allocator.simulate import Identity, Prediction, Range, Simulation, check_identity, predict
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.recorded import find_capacity
from profkit.analysis.notebook import NotebookResult, table_of
from profkit.analysis.whatif.apply import Cost, EditedPeak, apply_edits, find_fitting, take_apart
from profkit.analysis.whatif.edits import Program, add_failed_request
from profkit.errors import SnapshotError, UsageError
from profkit.snapshot.columns import Settings

if TYPE_CHECKING:
    import pandas as pd

_LARGEST_REQUEST_BYTES = 2**46
_MARGIN, _RESERVED_MARGIN = 0.01, 0.1
"""By how much the true peaks of checkpointed programs may lie outside what is simulated. Of 17 programs (transformers
and convolutional networks, fp32 and bf16) requested and allocated peaks did by up to 0.8 %, reserved ones by 8.7 %."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The peaks of one device under some settings, in bytes; None where they cannot be predicted."""

    allocator: str
    """The settings as torch writes them; empty for the defaults."""
    edits: tuple[str, ...]
    requested_peak_bytes: int
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    exact: bool = False
    requested_range_bytes: Range
    allocated_range_bytes: Range
    reserved_range_bytes: Range
    phase: str | None = None
    """In which the allocated memory is at its peak."""
    fits: bool | None = None
    unused_bytes: int | None = None
    """Reserved but not allocated at the allocated peak; None if that is below zero: the history is impossible."""
    failed_request_bytes: int | None = None
    """Where it does not fit: the request that fails."""


CapacitySource = Literal["asked", "seen", "gpu"]
"""Where a capacity comes from: it was asked for; it is the most that CUDA could give, where the recorded allocator
lacked memory; or it is the memory of the recorded GPU."""


@dataclass(frozen=True, repr=False)
class WhatIf(NotebookResult):
    """What ``profkit whatif`` shows: today's case first."""

    snapshot: str
    device: int
    identity: Identity
    capacity_bytes: int | None
    """What PyTorch may reserve."""
    capacity_from: CapacitySource | None
    history_is_complete: bool
    cases: tuple[Case, ...]
    edited: EditedPeak | None = None
    """What the edited program's peak is made of."""
    search: bool | None = None
    """Of a search for edits that fit, whether it found some; else None."""

    def to_pandas(self) -> pd.DataFrame:
        return table_of(self.cases, Case)


def what_if(
    memory: DeviceMemory,
    snapshot: str,
    *,
    allocators: Sequence[str] = (),
    capacity_bytes: int | None = None,
    edits: Sequence[str] = (),
    fit: bool = False,
    cost: Cost | None = None,
) -> WhatIf:
    """Return the peaks of one device today, and under other settings of the allocator or after edits of the program.

    Args:
        allocators: settings as torch writes them; by default those that are worth a try, with edits today's.
        capacity_bytes: what PyTorch may reserve; by default what the recording shows (`CapacitySource`).
        fit: change whatever makes it fit.
        cost: says how long ranges of the forward pass take.

    Raises:
        UsageError: torch would refuse a setting, or an edit cannot be modelled.
        SnapshotError: no history was recorded, or a request is larger than any GPU.
    """
    history = memory.history
    variants = [parse_settings(text) for text in allocators]
    requests = read_requests(history, snapshot)
    identity = check_identity(history, requests)
    capacity, source = _find_capacity(memory, requests, capacity_bytes)
    today = _today(memory, requests, capacity, is_proven=identity.exact)
    if not (edits or fit):
        variants = variants or list_variants(history.settings)
        if not capacity:
            variants = [variant for variant in variants if allocators or not variant.garbage_collection_threshold]
        asked = add_failed_request(memory, requests)
        cases, _ = _cases(memory, asked, variants, capacity=capacity, is_proven=identity.exact)
        edited = has_found = None
    else:
        variants = variants or [history.settings]
        cases, edited, has_found = _edited_cases(
            memory, tuple(edits), variants, today, fit=fit, cost=cost, capacity=capacity, is_proven=identity.exact
        )
    return WhatIf(
        snapshot=snapshot,
        device=memory.device.index,
        identity=identity,
        capacity_bytes=capacity,
        capacity_from=source,
        history_is_complete=history.is_complete,
        cases=(today, *cases),
        edited=edited,
        search=has_found,
    )


def _find_capacity(
    memory: DeviceMemory, requests: Requests, asked: int | None
) -> tuple[int | None, CapacitySource | None]:
    if asked:
        return asked, "asked"
    reserved, events = memory.history.curves.reserved, memory.device.events
    seen = [int(reserved.max())] if any(not release.by_program for release in requests.releases) else []
    for position, size in requests.failures:
        device_free = int(events.address[int(position)])
        if device_free >= segment_size_bytes(size):
            return None, None  # the process has a limit of its own, which nothing tells
        seen.append(max(int(reserved.max()), int(reserved[int(position) + 1]) + device_free))
    if seen:
        return max(seen), "seen"
    recorded = find_capacity(memory.recorded, memory.device.index)
    return recorded, "gpu" if recorded else None


def _edited_cases(
    memory: DeviceMemory,
    texts: tuple[str, ...],
    variants: list[Settings],
    today: Case,
    *,
    fit: bool,
    cost: Cost | None,
    capacity: int | None,
    is_proven: bool,
) -> tuple[list[Case], EditedPeak | None, bool | None]:
    """Return the cases of an edited program, what its peak is made of, and what a search found."""
    program, has_found = Program(memory), None
    if fit:
        if capacity is None or not is_proven:
            raise UsageError("no edits can be searched for: the simulator is not proven on this snapshot")
        if today.fits and not len(add_failed_request(memory, program.recorded().requests)) > len(program.replay):
            return [], None, True
        rung, has_found = find_fitting(program, memory.history.settings, capacity, cost)
        texts, variants = rung.edits, [rung.settings]
    stream, applied = apply_edits(program, texts)
    requests = add_failed_request(memory, stream.requests)
    cases, simulations = _cases(memory, requests, variants, texts, capacity=capacity, is_proven=is_proven)
    if any(edit.unknown for edit in applied):
        extremes = [apply_edits(program, texts, bound=bound)[0] for bound in ("least", "most")]
        asked = [add_failed_request(memory, stream.requests) for stream in extremes]
        cases = [
            _widen(case, asked, settings, is_proven=is_proven) for case, settings in zip(cases, variants, strict=True)
        ]
        if any(edit.recomputed for edit in applied):  # as wide as real programs were found to need
            cases = [
                replace(
                    case,
                    requested_range_bytes=_stretch(case.requested_range_bytes, _MARGIN),
                    allocated_range_bytes=_stretch(case.allocated_range_bytes, _MARGIN),
                    reserved_range_bytes=_stretch(case.reserved_range_bytes, _RESERVED_MARGIN),
                )
                for case in cases
            ]
    first = simulations[0] if simulations else None
    return cases, take_apart(program, stream, applied, first, cost), has_found


def _widen(case: Case, extremes: list[Requests], settings: Settings, *, is_proven: bool) -> Case:
    """Return a case with ranges that also cover other assumptions on what is not known of its edits."""
    requested = [highest_sum(some, some.requested_bytes, some.completed) for some in extremes]
    spread = _span(case.requested_range_bytes, [(size, size) for size in requested])
    case = replace(case, exact=False, requested_range_bytes=spread)
    if not is_proven:
        return case
    both = [predict(requests, settings) for requests in extremes]
    return replace(
        case,
        allocated_range_bytes=_span(case.allocated_range_bytes, [end.allocated_range_bytes for end in both]),
        reserved_range_bytes=_span(case.reserved_range_bytes, [end.reserved_range_bytes for end in both]),
    )


def _cases(
    memory: DeviceMemory,
    requests: Requests,
    variants: list[Settings],
    edits: tuple[str, ...] = (),
    *,
    capacity: int | None,
    is_proven: bool,
) -> tuple[list[Case], list[Simulation]]:
    if not is_proven:
        return [_bounded(requests, settings, edits) for settings in variants], []
    predictions = [predict(requests, settings, capacity) for settings in variants]
    cases = [
        build_case(memory, prediction, settings, edits)
        for prediction, settings in zip(predictions, variants, strict=True)
    ]
    return cases, [prediction.simulation for prediction in predictions]


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
    simulation = prediction.simulation
    peak = int(simulation.allocated.argmax())
    failed = prediction.failed
    return Case(
        allocator=format_settings(settings),
        edits=edits,
        requested_peak_bytes=simulation.requested_peak_bytes,
        allocated_peak_bytes=simulation.allocated_peak_bytes,
        reserved_peak_bytes=simulation.reserved_peak_bytes,
        exact=prediction.exact,
        requested_range_bytes=(simulation.requested_peak_bytes, simulation.requested_peak_bytes),
        allocated_range_bytes=prediction.allocated_range_bytes,
        reserved_range_bytes=prediction.reserved_range_bytes,
        phase=memory.timeline.phase_at(min(int(simulation.peak_position), len(memory.device.events) - 1)),
        fits=prediction.fits,
        unused_bytes=_unused(int(simulation.reserved[peak]), int(simulation.allocated[peak])),
        failed_request_bytes=None if failed is None else failed.requested_bytes,
    )


def _today(memory: DeviceMemory, requests: Requests, capacity: int | None, *, is_proven: bool) -> Case:
    """Return the recorded case, as the replay proves it; whether it survives in less memory is simulated."""
    history = memory.history
    curves, bounds = history.curves, history.bounds
    allocated, reserved = history.allocated_peak_bytes, int(curves.reserved.max())
    requested, moment = int(curves.requested.max()), history.peak_moment
    fits, failed = True if capacity is not None and reserved <= capacity else None, None
    if capacity is not None and not fits and is_proven:
        limited = predict(requests, history.settings, capacity)
        fits, failed = limited.fits, limited.failed
    failed_bytes = None if failed is None else failed.requested_bytes
    if len(add_failed_request(memory, requests)) > len(requests):
        fits, failed_bytes = False, requests.failures[-1][1]
    return Case(
        allocator=format_settings(history.settings),
        edits=(),
        requested_peak_bytes=requested,
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=reserved,
        exact=bounds is None,
        requested_range_bytes=(requested, requested),
        allocated_range_bytes=bounds or (allocated, allocated),
        reserved_range_bytes=(reserved, reserved),
        phase=memory.timeline.phase_at(moment - 1),
        fits=fits,
        unused_bytes=_unused(int(curves.reserved[moment]), allocated),
        failed_request_bytes=failed_bytes,
    )


def _unused(reserved_bytes: int, allocated_bytes: int) -> int | None:
    return None if reserved_bytes < allocated_bytes else reserved_bytes - allocated_bytes


def _bounded(requests: Requests, settings: Settings, edits: tuple[str, ...]) -> Case:
    """Return what holds for any allocator with these settings: no peak is lower than the requests, rounded."""
    rounded = round_sizes(requests.requested_bytes, settings)
    low = highest_sum(requests, rounded, requests.freed)
    requested = highest_sum(requests, requests.requested_bytes, requests.completed)
    return Case(
        allocator=format_settings(settings),
        edits=edits,
        requested_peak_bytes=requested,
        requested_range_bytes=(requested, requested),
        allocated_range_bytes=(low, None),
        reserved_range_bytes=(low, None),
    )


def _stretch(both: Range, margin: float) -> Range:
    low, high = both
    return int(low * (1 - margin)), None if high is None else int(high * (1 + margin))


def _span(first: Range, others: Sequence[Range]) -> Range:
    """Return from where to where some ranges reach together; an end that one of them lacks is unknown."""
    highs = [high for _, high in (first, *others) if high is not None]
    return min(low for low, _ in (first, *others)), max(highs) if len(highs) > len(others) else None
