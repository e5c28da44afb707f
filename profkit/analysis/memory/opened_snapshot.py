"""Open a memory snapshot and ask it questions: the Python face of the analyses of memory, and ``profkit memory``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from profkit.allocator.replay import History
from profkit.analysis import NotebookResult, table_of
from profkit.analysis.memory import AllocatorCheck, check_with_allocator, find_capacity
from profkit.analysis.memory.device import (
    CategoryRow,
    Composition,
    DeviceMemory,
    Filter,
    Fragmentation,
    PhasePeak,
    compose,
    measure_fragmentation,
)
from profkit.analysis.memory.failures import LeakCheck, OomVerdict, check_leaks, judge_oom, last_failure
from profkit.errors import Finding, SnapshotError, UsageError
from profkit.run.owners import Owners
from profkit.snapshot.columns import Snapshot

if TYPE_CHECKING:
    import pandas as pd

    from profkit.analysis.memory.compare import Comparison
    from profkit.analysis.whatif.answers import WhatIf
    from profkit.run.compiled_code import CompiledGraph

PEAK = "peak"
FAILURE = "oom"
_PHASE = "phase:"
_TIME = re.compile(r"(?P<value>\d+(\.\d+)?)\s*(?P<unit>us|µs|ms|s)$")
_UNITS = {"us": 1, "µs": 1, "ms": 1_000, "s": 1_000_000}
_MANY_UNKNOWN = 0.05
"""If the purpose of more than this share of the bytes is unknown, a warning says so."""


@dataclass(frozen=True)
class Totals:
    """One device's figures over the recorded window, in bytes; ``bounds`` if the peak is not proven."""

    device: int
    allocated_peak_bytes: int
    allocated_end_bytes: int
    peak_time_us: int | None
    reserved_peak_bytes: int
    reserved_end_bytes: int
    requested_peak_bytes: int
    exact: bool
    bounds: tuple[int, int | None] | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "allocated": {
                "peak_bytes": self.allocated_peak_bytes,
                "peak_time_us": self.peak_time_us,
                "end_bytes": self.allocated_end_bytes,
            },
            "reserved": {"peak_bytes": self.reserved_peak_bytes, "end_bytes": self.reserved_end_bytes},
            "requested": {"peak_bytes": self.requested_peak_bytes},
            "exact": self.exact,
            "bounds": None if self.bounds is None else {"allocated_peak_bytes": list(self.bounds)},
        }


@dataclass(frozen=True)
class HistoryFacts:
    """What was recorded: ``complete`` if it began with an empty allocator; if not, ``reason`` says how that shows."""

    complete: bool
    events: int
    reason: str | None
    start_us: int | None
    end_us: int | None
    zero_us: int
    """The first event on any device: moments are printed as times since then."""


@dataclass(frozen=True, repr=False)
class MemoryResult(NotebookResult):
    """The account of one device's memory: plain data; `to_dict` returns the JSON of ``profkit memory``."""

    snapshot: str
    totals: Totals
    history: HistoryFacts
    composition: Composition
    phases: tuple[PhasePeak, ...]
    fragmentation: Fragmentation
    oom: OomVerdict | None
    leaks: LeakCheck
    allocator_check: AllocatorCheck | None
    others: tuple[Totals, ...]
    warnings: tuple[Finding, ...]

    def __repr__(self) -> str:
        peak, exact = self.totals.allocated_peak_bytes, self.totals.exact
        return f"MemoryResult(snapshot={self.snapshot!r}, allocated_peak_bytes={peak}, exact={exact})"

    @property
    def peak(self) -> int:
        """Return the most bytes that were allocated at once in the recorded window."""
        return self.totals.allocated_peak_bytes

    def to_pandas(self) -> pd.DataFrame:
        """Return what the moment was made of, one row a category; the bytes sum to what was allocated."""
        return table_of(self.composition.by_category, CategoryRow)

    def to_dict(self) -> dict[str, Any]:
        at = self.composition
        left_out = at.allocated_bytes - sum(at.evidence.values())
        return {
            "snapshot": self.snapshot,
            **self.totals.to_dict(),
            "history": asdict(self.history),
            "peak": {
                "at": at.what,
                **_without(asdict(at), "what", "moment"),
                "by_stack": [
                    {"bytes": row.bytes, "share": row.share, "count": row.count, "stack": row.stack or (row.label,)}
                    for row in at.by_stack
                ],
                "by_module": [{"module": row.name, **_without(asdict(row), "name", "number")} for row in at.by_module],
                "by_phase": [
                    {"phase": row.name, **_without(asdict(row), "name", "number", "path", "own_bytes", "evidence")}
                    for row in at.by_phase
                ],
                "largest": [_without(asdict(row), "label", "count") for row in at.largest],
                "largest_groups": [_without(asdict(row), "label") for row in at.largest_groups],
                "evidence": at.evidence | ({"not_selected": left_out} if left_out else {}),
            },
            "phases": [asdict(phase) for phase in self.phases],
            "fragmentation": asdict(self.fragmentation),
            "oom": None if self.oom is None else asdict(self.oom),
            "leaks": asdict(self.leaks) | {"suspect_bytes": self.leaks.suspect_bytes},
            "ledger": None if self.allocator_check is None else asdict(self.allocator_check),
            "devices": [other.to_dict() for other in self.others],
            "warnings": [vars(warning) for warning in self.warnings],
        }


def _without(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in keys}


class OpenedSnapshot:
    """One snapshot, read and replayed; made by `profkit.reading.open_snapshot`."""

    def __init__(
        self,
        snapshot: Snapshot,
        recorded: Owners | None = None,
        phases: Mapping[str, str] | None = None,
        compiled: Sequence[CompiledGraph] = (),
    ) -> None:
        self.snapshot = snapshot
        self.devices: dict[int, DeviceMemory] = {
            device.index: DeviceMemory(
                device,
                snapshot.settings,
                recorded,
                phases,
                compiled=compiled,
                is_only_device=len(snapshot.devices) == 1,
            )
            for device in snapshot.devices
        }

    def device(self, index: int | None = None) -> DeviceMemory:
        """Return one device's history; by default the one with the highest allocated peak.

        Raises:
            UsageError: nothing was recorded of that device.
        """
        if index is None:
            return max(
                self.devices.values(), key=lambda memory: (memory.history.allocated_peak_bytes, -memory.device.index)
            )
        if index not in self.devices:
            known = ", ".join(map(str, self.devices))
            raise UsageError(f"no device {index}: this snapshot recorded device {known}")
        return self.devices[index]

    def against(self, after: OpenedSnapshot) -> Comparison:
        """Return what explains the difference between this snapshot's peak and that of ``after``."""
        from profkit.analysis.memory.compare import compare_peaks  # few ask for it

        return compare_peaks(self.device(), after.device(), (self.snapshot.path, after.snapshot.path))

    def whatif(
        self,
        *,
        allocators: Sequence[str] = (),
        edits: Sequence[str] = (),
        fit: bool = False,
        device: int | None = None,
        capacity_bytes: int | None = None,
        cost: Callable[[Sequence[str]], int | None] | None = None,
    ) -> WhatIf:
        """Return the peaks today and under other settings or after edits; ``profkit whatif`` prints them.

        Args:
            allocators: settings as in ``PYTORCH_CUDA_ALLOC_CONF``; by default those that are worth a try.
            edits: changes of the program, all together, such as ``optimizer:sgd`` or ``checkpoint:h.*``.
            fit: search for the edits that make the program fit.
            device: the device's index; by default the one with the highest peak.
            capacity_bytes: what PyTorch may reserve; by default the memory of the GPU that the run recorded.
            cost: returns the kernel time (ns) of some ranges in a step's forward pass, None if it is not known.

        Raises:
            UsageError: an unknown device, a setting that torch would refuse, or an edit that cannot be modelled.
            SnapshotError: no history was recorded.
        """
        from profkit.analysis.whatif.answers import what_if  # few ask for it

        return what_if(
            self.device(device),
            self.snapshot.path,
            allocators=allocators,
            capacity_bytes=capacity_bytes,
            edits=edits,
            fit=fit,
            cost=cost,
        )

    def memory(
        self,
        *,
        at: str = PEAK,
        device: int | None = None,
        stack: str | None = None,
        min_bytes: int = 0,
        capacity_bytes: int | None = None,
    ) -> MemoryResult:
        """Return how much was allocated, when it peaked, and what a moment was made of; ``profkit memory`` prints it.

        Args:
            at: ``peak``; ``oom`` for the last allocation that failed; ``phase:NAME`` for the peak within a phase; or a
                time: ``1.5s`` or ``300ms`` after the first event on any device.
            device: the device's index; by default the one with the highest peak.
            stack: show only allocations with this text in their stack or owner.
            min_bytes: show only allocations of at least this size.
            capacity_bytes: the device's memory, for the verdict on an out-of-memory error; by default what the run
                recorded.

        Raises:
            UsageError: an unknown device, phase or form of time, or a filter that leaves nothing.
        """
        memory = self.device(device)
        moment = find_moment(memory, at)
        composition = compose(memory, at, moment, Filter(stack, min_bytes))
        if composition.allocated_bytes and not composition.largest:
            words = [] if stack is None else [f"has {stack!r} in its stack or its tensor's name"]
            words += [f"is of {min_bytes:,} B or more"] if min_bytes else []
            raise UsageError(f"no allocation at this moment ({at}) {' and '.join(words)}")
        leaks = check_leaks(memory)
        check = check_with_allocator(memory.recorded, memory.history, memory.matched_owners[1])
        capacity_bytes = capacity_bytes or find_capacity(memory.recorded, memory.device.index)
        return MemoryResult(
            snapshot=self.snapshot.path,
            totals=_sum_up(memory.history),
            history=_describe_history(memory.history),
            composition=composition,
            phases=memory.phase_peaks(),
            fragmentation=measure_fragmentation(memory.history, moment),
            oom=judge_oom(memory, capacity_bytes),
            leaks=leaks,
            allocator_check=check,
            others=tuple(_sum_up(other.history) for other in self.devices.values() if other is not memory),
            warnings=tuple(_find_warnings(memory, composition, leaks, check)),
        )


def find_moment(memory: DeviceMemory, at: str) -> int:
    """Return the point on the curves that ``at`` names (`OpenedSnapshot.memory`)."""
    history = memory.history
    if at == PEAK:
        return history.peak_moment
    if at == FAILURE:
        failed = last_failure(memory)
        if failed is None:
            raise UsageError(f"moment {at!r}: no allocation failed in this history")
        return failed + 1
    if at.startswith(_PHASE):
        return _phase_moment(memory, at.removeprefix(_PHASE))
    match = _TIME.fullmatch(at.strip())
    if match is None:
        raise UsageError(
            f"moment {at!r}: write peak, oom, phase:NAME, or a time after the first event such as 1.5s or 300ms"
        )
    if history.time_us(1) is None:
        raise SnapshotError(f"moment {at!r}: without a history there are no times; only peak is possible")
    first = memory.device.zero_us
    value = float(match["value"]) * _UNITS[match["unit"]] + first
    if not first <= value <= int(memory.timeline.times_us[-1]):
        span = (int(memory.timeline.times_us[-1]) - first) / 1e6
        raise UsageError(f"moment {at!r}: outside the history, which lasts {span:.6f}s")
    return memory.timeline.moment_at(int(value))


def _phase_moment(memory: DeviceMemory, name: str) -> int:
    peaks = {peak.name: peak.moment for peak in memory.phase_peaks()}
    if name not in peaks:
        raise UsageError(f"no phase {name!r}; the phases are: {', '.join(peaks) or 'none'}")
    return peaks[name]


def _sum_up(history: History) -> Totals:
    curves, bounds = history.curves, history.bounds
    return Totals(
        device=history.device.index,
        allocated_peak_bytes=history.allocated_peak_bytes,
        allocated_end_bytes=history.allocated_end_bytes,
        peak_time_us=history.time_us(history.peak_moment),
        reserved_peak_bytes=int(curves.reserved.max()),
        reserved_end_bytes=int(curves.reserved[-1]),
        requested_peak_bytes=int(curves.requested.max()),
        exact=bounds is None,
        bounds=bounds,
    )


def _describe_history(history: History) -> HistoryFacts:
    replay, events = history.replay, history.device.events
    reason = None
    if not len(events):
        reason = "no history was recorded: only the state at the dump is known"
    elif replay.start_count:
        start = int(history.curves.allocated[0])
        reason = (
            f"{replay.start_count:,} blocks ({start:,} B) were live before the first event: recording began in the"
            " middle of the run, or its buffer was too small"
        )
    elif replay.start_reserved_bytes:
        reason = f"{replay.start_reserved_bytes:,} B were reserved but unused before the first event"
    return HistoryFacts(
        complete=history.is_complete,
        events=len(events),
        reason=reason,
        start_us=history.time_us(1) if len(events) else None,
        end_us=history.time_us(len(events)) if len(events) else None,
        zero_us=history.device.zero_us,
    )


def _find_warnings(
    memory: DeviceMemory, composition: Composition, leaks: LeakCheck, check: AllocatorCheck | None
) -> Iterator[Finding]:
    yield from _doubt_history(memory.history)
    if check is not None and not check.agrees:
        yield Finding(
            "ledger-disagrees",
            f"PyTorch itself reported peaks of {check.allocated_peak_bytes:,} B allocated,"
            f" {check.reserved_peak_bytes:,} B reserved and {check.requested_peak_bytes:,} B requested",
            "failed",
        )
    if check is not None and check.unmatched_entries:
        yield Finding(
            "ledger-unmatched",
            f"{check.unmatched_entries:,} tensor{'s' * (check.unmatched_entries != 1)} could not be matched to an"
            " allocation (CUDA graphs cause this); sizes are not affected",
        )
    unknown = composition.evidence["none"]
    # A run with a ledger has recorded what can be known: nothing is left to do about the rest.
    if memory.recorded is None and unknown > _MANY_UNKNOWN * composition.allocated_bytes:
        yield Finding(
            "unattributed",
            f"the purpose of {unknown / composition.allocated_bytes:.1%} of the bytes is unknown;"
            " `profkit run --memory` records whose tensors they are",
        )
    if leaks.suspects:
        yield Finding(
            "leak",
            f"{leaks.suspect_bytes:,} B that a step allocated are never freed, and so in the steps before;"
            " --leaks shows the lines",
        )


def _doubt_history(history: History) -> Iterator[Finding]:
    facts = _describe_history(history)
    if not facts.events:
        yield Finding("no-history", f"{facts.reason}; the true peak is unknown")
        return
    for what, count in history.contradictions.items():
        yield Finding("contradiction", f"{count:,} × {what}: the replayed figures are not proven", "failed")
    if history.bounds is not None:
        yield Finding("bounded", "the allocated peak lies between {:,} and {:,} B".format(*history.bounds))
    if not facts.complete:
        yield Finding("incomplete-history", f"{facts.reason}; peaks are those of the recorded time")
