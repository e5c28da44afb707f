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
from typing import Any, Literal

from profkit.allocator import format_settings, list_variants, parse_settings, round_sizes, segment_size_bytes
from profkit.allocator.requests import Requests, requests_of
from profkit.allocator.simulate import Identity, Range, Simulation, check_identity, predict
from profkit.analysis import NotebookResult
from profkit.analysis.memory import find_capacity
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.whatif import Program
from profkit.analysis.whatif.apply import Cost, EditedPeak, Rung, apply_edits, find_fitting, take_apart
from profkit.errors import SnapshotError, UsageError
from profkit.snapshot.columns import Settings

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
    """Whether it survives in the capacity; None where that hangs on what is not known, and where no capacity is."""
    failed_request_bytes: int | None = None
    """Where it does not fit, or perhaps not: the request that fails."""


CapacitySource = Literal["asked", "seen", "gpu"]
"""Where a capacity comes from: it was asked for; it is the most that CUDA could give, where the recorded allocator
lacked memory; or it is the memory of the recorded GPU."""


@dataclass(frozen=True, repr=False)
class WhatIf(NotebookResult, rows="cases", row_type=Case):
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
    """Of a search for edits that fit, whether it found some that surely do; else None."""


def what_if(
    memory: DeviceMemory,
    snapshot: str,
    *,
    allocators: Sequence[str],
    capacity_bytes: int | None,
    edits: Sequence[str],
    fit: bool,
    cost: Cost | None,
) -> WhatIf:
    """Return the peaks of one device today, and under other settings of the allocator or after edits of the program."""
    history = memory.history
    variants = [parse_settings(text) for text in allocators]
    if not len(history.device.events):
        raise SnapshotError(f"{snapshot}: no history was recorded, so there is nothing to simulate")
    requests = requests_of(history)
    if requests.requested_bytes.max(initial=0) > _LARGEST_REQUEST_BYTES:
        raise SnapshotError(f"{snapshot}: a request for more memory than any GPU has; nothing is simulated")
    identity = check_identity(history, requests)
    capacity, source = _find_capacity(memory, requests, capacity_bytes)
    cases = _Cases(memory, requests, capacity, is_proven=identity.exact)
    today = cases.today()
    edited = has_found = None
    if edits or fit:
        others, edited, has_found = cases.edited(today, tuple(edits), variants, fit=fit, cost=cost)
    else:
        variants = variants or list_variants(history.settings)
        if not capacity:
            variants = [variant for variant in variants if allocators or not variant.garbage_collection_threshold]
        others = [cases.under(settings, requests.with_fatal())[0] for settings in variants]
    return WhatIf(
        snapshot=snapshot,
        device=memory.device.index,
        identity=identity,
        capacity_bytes=capacity,
        capacity_from=source,
        history_is_complete=history.is_complete,
        cases=(today, *others),
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


class _Cases:
    """The cases of one recorded program; without proof of the simulator only bounds of them."""

    def __init__(self, memory: DeviceMemory, requests: Requests, capacity: int | None, *, is_proven: bool) -> None:
        self._memory, self._requests = memory, requests
        self._capacity, self._is_proven = capacity, is_proven

    def today(self) -> Case:
        history, capacity = self._memory.history, self._capacity
        curves, moment = history.curves, history.peak_moment
        allocated, reserved = history.allocated_peak_bytes, int(curves.reserved.max())
        fits, failed = True if capacity is not None and reserved <= capacity else None, None
        if capacity is not None and not fits and self._is_proven:
            limited = predict(self._requests, history.settings, capacity)
            fits, failed = limited.fits, limited.failed
        failed_bytes = None if failed is None else failed.requested_bytes
        if self._requests.fatal is not None:
            fits, failed_bytes = False, self._requests.fatal[1]
        return _case(
            history.settings,
            int(curves.requested.max()),
            history.bounds or (allocated, allocated),
            (reserved, reserved),
            allocated_peak_bytes=allocated,
            reserved_peak_bytes=reserved,
            exact=history.bounds is None,
            phase=self._memory.timeline.phase_at(moment - 1),
            fits=fits,
            failed_request_bytes=failed_bytes,
        )

    def under(
        self, settings: Settings, requests: Requests, edits: tuple[str, ...] = ()
    ) -> tuple[Case, Simulation | None]:
        """Unproven, it holds what any allocator with these settings does: no peak is below the requests, rounded."""
        if not self._is_proven:
            low = requests.highest_sum(round_sizes(requests.requested_bytes, settings), requests.freed)
            fits = None if self._capacity is None or low <= self._capacity else False
            return _case(settings, requests.peak_bytes(), (low, None), (low, None), edits=edits, fits=fits), None
        prediction = predict(requests, settings, self._capacity)
        simulation, failed = prediction.simulation, prediction.failed
        last = len(self._memory.device.events) - 1
        case = _case(
            settings,
            simulation.requested_peak_bytes,
            prediction.allocated_range_bytes,
            prediction.reserved_range_bytes,
            edits=edits,
            allocated_peak_bytes=simulation.allocated_peak_bytes,
            reserved_peak_bytes=simulation.reserved_peak_bytes,
            exact=prediction.exact,
            phase=self._memory.timeline.phase_at(min(int(simulation.peak_position), last)),
            fits=prediction.fits,
            failed_request_bytes=None if failed is None else failed.requested_bytes,
        )
        return case, simulation

    def edited(
        self, today: Case, texts: tuple[str, ...], variants: list[Settings], *, fit: bool, cost: Cost | None
    ) -> tuple[list[Case], EditedPeak | None, bool | None]:
        program, recorded = Program(self._memory), self._memory.history.settings
        variants, has_found = variants or [recorded], None
        if fit:
            if self._capacity is None or not self._is_proven:
                raise UsageError("no edits can be searched for: the simulator is not proven on this snapshot")
            if today.fits and self._requests.fatal is None:
                return [], None, True

            def fits(rung: Rung) -> bool | None:
                return self._edited_cases(program, rung.edits, [rung.settings])[0][0].fits

            rung, has_found = find_fitting(program, recorded, self._capacity, cost, fits)
            texts, variants = rung.edits, [rung.settings]
        cases, peak = self._edited_cases(program, texts, variants)
        return cases, peak, has_found

    def _edited_cases(
        self, program: Program, texts: tuple[str, ...], variants: list[Settings]
    ) -> tuple[list[Case], EditedPeak]:
        requests, applied = apply_edits(program, texts)
        found = [self.under(settings, requests.with_fatal(), texts) for settings in variants]
        cases = [case for case, _ in found]
        if any(edit.unknown for edit in applied):
            ends = [apply_edits(program, texts, bound=bound)[0].with_fatal() for bound in ("least", "most")]
            cases = [self._widen(case, ends, settings) for case, settings in zip(cases, variants, strict=True)]
        if any(edit.recomputed for edit in applied):
            cases = [_stretch(case, self._capacity) for case in cases]
        return cases, take_apart(program, requests, applied, found[0][1])

    def _widen(self, case: Case, ends: list[Requests], settings: Settings) -> Case:
        requested = [(end.peak_bytes(), end.peak_bytes()) for end in ends]
        case = replace(case, exact=False, requested_range_bytes=_span(case.requested_range_bytes, requested))
        if not self._is_proven:
            return case
        both = [predict(end, settings, self._capacity) for end in ends]
        return replace(
            case,
            fits=case.fits if {end.fits for end in both} == {case.fits} else None,
            allocated_range_bytes=_span(case.allocated_range_bytes, [end.allocated_range_bytes for end in both]),
            reserved_range_bytes=_span(case.reserved_range_bytes, [end.reserved_range_bytes for end in both]),
        )


def _case(
    settings: Settings,
    requested: int,
    allocated: Range,
    reserved: Range,
    edits: tuple[str, ...] = (),
    **known: Any,
) -> Case:
    return Case(
        allocator=format_settings(settings),
        edits=edits,
        requested_peak_bytes=requested,
        requested_range_bytes=(requested, requested),
        allocated_range_bytes=allocated,
        reserved_range_bytes=reserved,
        **known,
    )


def _stretch(case: Case, capacity_bytes: int | None) -> Case:
    """Return a case with ranges as wide as real programs with checkpoints were found to need.

    It surely fits if all of what it may reserve does, and surely not if none of it does. PyTorch reserves what it has
    allocated, and allocates what was requested: a lower end is never below that of the peak before it.
    """
    margins = {"requested": _MARGIN, "allocated": _MARGIN, "reserved": _RESERVED_MARGIN}
    ranges: dict[str, Any] = {}
    least = 0
    for kind, margin in margins.items():
        low, high = getattr(case, f"{kind}_range_bytes")
        least = max(least, int(low * (1 - margin)))
        ranges[f"{kind}_range_bytes"] = least, None if high is None else int(high * (1 + margin))
    stretched = replace(case, **ranges)
    if capacity_bytes is None or case.fits is None:
        return stretched
    low, high = stretched.reserved_range_bytes
    is_within = high is not None and high <= capacity_bytes
    is_sure = is_within if case.fits else low > capacity_bytes
    return stretched if is_sure else replace(stretched, fits=None)


def _span(first: Range, others: Sequence[Range]) -> Range:
    highs = [high for _, high in (first, *others) if high is not None]
    return min(low for low, _ in (first, *others)), max(highs) if len(highs) > len(others) else None
