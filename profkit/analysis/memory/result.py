"""The result of ``profkit memory`` for one device, and its form in JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from profkit.analysis.memory.fragmentation import Fragmentation
from profkit.analysis.memory.leaks import LeakCheck
from profkit.analysis.memory.ledger import LedgerCheck
from profkit.analysis.memory.oom import OomVerdict
from profkit.analysis.memory.peak import History
from profkit.analysis.memory.summary import Composition, PhasePeak
from profkit.findings import Finding


@dataclass(frozen=True)
class Totals:
    """One device's figures over the recorded window, in bytes; ``bounds`` where the peak is not proven."""

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
    """What was recorded: whether from an empty allocator on, and if not, why that is known."""

    complete: bool
    events: int
    reason: str | None
    start_allocated_bytes: int
    start_reserved_bytes: int
    start_us: int | None
    end_us: int | None


@dataclass(frozen=True)
class MemoryResult:
    """The account of a snapshot: plain data, the JSON of ``profkit memory --format json`` by `to_dict`."""

    snapshot: str
    totals: Totals
    history: HistoryFacts
    composition: Composition
    phases: tuple[PhasePeak, ...]
    fragmentation: Fragmentation
    oom: OomVerdict | None
    leaks: LeakCheck
    ledger_check: LedgerCheck | None
    others: tuple[Totals, ...]
    warnings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready data; ``peak`` is the composition of the moment that was asked for."""
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
                "largest": [_without(asdict(row), "label") for row in at.largest],
                "evidence": at.evidence,
            },
            "phases": [asdict(phase) for phase in self.phases],
            "fragmentation": asdict(self.fragmentation),
            "oom": None if self.oom is None else asdict(self.oom),
            "leaks": asdict(self.leaks) | {"suspect_bytes": self.leaks.suspect_bytes},
            "ledger": None if self.ledger_check is None else asdict(self.ledger_check),
            "devices": [other.to_dict() for other in self.others],
            "warnings": [asdict(warning) for warning in self.warnings],
        }


def _without(data: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != key}


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
    """Return what was recorded and, where it is not everything, how that shows."""
    replay, events = history.replay, history.device.events
    reason = None
    if not len(events):
        reason = "no history was recorded: only the state at the dump is known"
    elif replay.start_count:
        start = int(history.curves.allocated[0])
        reason = (
            f"{replay.start_count:,} blocks ({start:,} B) were live before the first event: recording began in mid-run,"
            " or its buffer wrapped"
        )
    elif replay.start_reserved_bytes:
        reason = f"{replay.start_reserved_bytes:,} B were reserved, and free, before the first event"
    return HistoryFacts(
        complete=history.is_complete,
        events=len(events),
        reason=reason,
        start_allocated_bytes=int(history.curves.allocated[0]),
        start_reserved_bytes=replay.start_reserved_bytes,
        start_us=history.time_us(1) if len(events) else None,
        end_us=history.time_us(len(events)) if len(events) else None,
    )
