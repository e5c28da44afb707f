"""The result of ``profkit memory`` for one device, its form in JSON, and what a reader must know before trusting it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from profkit.allocator.replay import History
from profkit.analysis.memory.composition import CategoryRow, Composition, Fragmentation
from profkit.analysis.memory.device import DeviceMemory, PhasePeak
from profkit.analysis.memory.leaks import LeakCheck
from profkit.analysis.memory.oom import OomVerdict
from profkit.analysis.memory.owners import AllocatorCheck
from profkit.analysis.memory.places import PartRow
from profkit.analysis.notebook import NotebookResult, table_of
from profkit.findings import Finding
from profkit.snapshot.columns import Snapshot

if TYPE_CHECKING:
    import pandas as pd

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
        """Return the figures in the JSON's shape."""
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
    start_allocated_bytes: int
    start_reserved_bytes: int
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
        """Return the snapshot and its peak in one line."""
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
        """Return the result as JSON-ready data; ``peak`` describes the moment that was asked for."""
        at = self.composition
        return {
            "snapshot": self.snapshot,
            **self.totals.to_dict(),
            "history": asdict(self.history),
            "peak": {
                "at": at.what,
                "time_us": at.time_us,
                "phase": at.phase,
                "allocated_bytes": at.allocated_bytes,
                "requested_bytes": at.requested_bytes,
                "reserved_bytes": at.reserved_bytes,
                "by_category": [asdict(row) for row in at.by_category],
                "by_stack": [
                    {"bytes": row.bytes, "share": row.share, "count": row.count, "stack": row.stack or (row.label,)}
                    for row in at.by_stack
                ],
                "by_module": [_module(row) for row in at.by_module],
                "by_phase": [_phase(row) for row in at.by_phase],
                "largest": [_without(asdict(row), "label", "count") for row in at.largest],
                "largest_groups": [_without(asdict(row), "label") for row in at.largest_groups],
                "evidence": _evidence(at),
            },
            "phases": [asdict(phase) for phase in self.phases],
            "fragmentation": asdict(self.fragmentation),
            "oom": None if self.oom is None else asdict(self.oom),
            "leaks": asdict(self.leaks) | {"suspect_bytes": self.leaks.suspect_bytes},
            "ledger": None if self.allocator_check is None else asdict(self.allocator_check),
            "devices": [other.to_dict() for other in self.others],
            "warnings": [vars(warning) for warning in self.warnings],
        }


def _evidence(at: Composition) -> dict[str, int]:
    """Return the bytes by how their use is known; what a filter leaves out has its own key."""
    left_out = at.allocated_bytes - sum(at.evidence.values())
    return {**at.evidence, **({"not_selected": left_out} if left_out else {})}


def _without(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in keys}


def _module(row: PartRow) -> dict[str, Any]:
    return {"module": row.name, **_without(asdict(row), "name", "number")}


def _phase(row: PartRow) -> dict[str, Any]:
    return {"phase": row.name, **_without(asdict(row), "name", "number", "path", "own_bytes", "evidence")}


def sum_up(history: History) -> Totals:
    """Return the figures of one device."""
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


def describe_history(history: History) -> HistoryFacts:
    """Return what was recorded and, if that is not everything, how it shows."""
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
        start_allocated_bytes=int(history.curves.allocated[0]),
        start_reserved_bytes=replay.start_reserved_bytes,
        start_us=history.time_us(1) if len(events) else None,
        end_us=history.time_us(len(events)) if len(events) else None,
        zero_us=history.device.zero_us,
    )


def find_warnings(
    snapshot: Snapshot,
    memory: DeviceMemory,
    composition: Composition,
    leaks: LeakCheck,
    check: AllocatorCheck | None,
) -> tuple[Finding, ...]:
    """Return what a reader must know about one device's account, the gravest first."""
    findings = [*_of_proof(memory.history), *_of_owners(check), *_of_snapshot(snapshot, memory)]
    # A run with a ledger has recorded what can be known: nothing is left to do about the rest.
    purposes = _of_purposes(composition) if memory.recorded is None else ()
    return (*findings, *purposes, *_of_leaks(leaks))


def _of_proof(history: History) -> Iterator[Finding]:
    facts = describe_history(history)
    if not facts.events:
        yield Finding("no-history", f"{facts.reason}; the true peak is unknown")
        return
    for what, count in history.contradictions.items():
        yield Finding("contradiction", f"{count:,} × {what}: the replayed figures are not proven", "failed")
    if history.bounds is not None:
        yield Finding("bounded", "the allocated peak lies between {:,} and {:,} B".format(*history.bounds))
    if not facts.complete:
        yield Finding("incomplete-history", f"{facts.reason}; peaks are those of the recorded time")


def _of_owners(check: AllocatorCheck | None) -> Iterator[Finding]:
    if check is not None and not check.agrees:
        yield Finding(
            "ledger-disagrees",
            f"PyTorch itself reported peaks of {check.allocated_peak_bytes:,} B allocated,"
            f" {check.reserved_peak_bytes:,} B reserved and {check.requested_peak_bytes:,} B requested",
            "failed",
        )
    if check is not None and check.unmatched_entries:
        count = f"{check.unmatched_entries:,} tensor{'s' * (check.unmatched_entries != 1)}"
        yield Finding(
            "ledger-unmatched",
            f"{count} could not be matched to an allocation (CUDA graphs cause this); sizes are not affected",
        )


def _of_snapshot(snapshot: Snapshot, memory: DeviceMemory) -> Iterator[Finding]:
    for action, count in snapshot.unknown_actions.items():
        yield Finding("unknown-action", f"{count:,} events of the unknown kind {action!r} were ignored")
    if not snapshot.settings.is_recorded:
        yield Finding("no-settings", "the file records no allocator settings (torch before 2.2): defaults are assumed")
    if len(memory.device.events) and not memory.device.events.has_times:
        yield Finding(
            "no-times", "the file records no times (torch before 2.2): phases are unknown, and times are event numbers"
        )


def _of_purposes(composition: Composition) -> Iterator[Finding]:
    unknown = composition.evidence["none"]
    if unknown > _MANY_UNKNOWN * composition.allocated_bytes:
        yield Finding(
            "unattributed",
            f"the purpose of {unknown / composition.allocated_bytes:.1%} of the bytes is unknown;"
            " `profkit run --memory` records whose tensors they are",
        )


def _of_leaks(leaks: LeakCheck) -> Iterator[Finding]:
    if leaks.suspects:
        yield Finding(
            "leak",
            f"{leaks.suspect_bytes:,} B that a step allocated are never freed, and so in the steps before;"
            " --leaks shows the lines",
        )
