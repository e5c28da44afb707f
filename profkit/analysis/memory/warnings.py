"""What a reader of a memory account must know before trusting it, the gravest first."""

from __future__ import annotations

from collections.abc import Iterator

from profkit.analysis.memory.leaks import LeakCheck
from profkit.analysis.memory.ledger import LedgerCheck
from profkit.analysis.memory.result import HistoryFacts, Totals
from profkit.analysis.memory.summary import Composition, DeviceMemory
from profkit.findings import Finding
from profkit.snapshot.columns import Snapshot


def warn_of_memory(
    snapshot: Snapshot,
    memory: DeviceMemory,
    *,
    totals: Totals,
    facts: HistoryFacts,
    composition: Composition,
    leaks: LeakCheck,
    ledger: LedgerCheck | None,
) -> tuple[Finding, ...]:
    """Return all warnings about one device's account."""
    found = [*_of_proof(memory, totals, facts), *_of_ledger(ledger), *_of_snapshot(snapshot, memory)]
    return (*found, *_of_attribution(composition), *_of_leaks(leaks))


def _of_proof(memory: DeviceMemory, totals: Totals, facts: HistoryFacts) -> Iterator[Finding]:
    if not facts.events:
        yield Finding("no-history", f"{facts.reason}; peaks are unknown and the segments alone are analysed")
        return
    for what, count in memory.history.contradictions.items():
        yield Finding("contradiction", f"{count:,} × {what}: the replayed figures are not proven")
    if totals.bounds is not None:
        low, high = totals.bounds
        yield Finding(
            "bounded", f"the allocated peak lies between {low:,} and {high:,} B" if high else "no upper bound"
        )
    if not facts.complete:
        yield Finding("incomplete-history", f"{facts.reason}; peaks are those of the recorded window")


def _of_ledger(ledger: LedgerCheck | None) -> Iterator[Finding]:
    if ledger is not None and not ledger.agrees:
        yield Finding(
            "ledger-disagrees",
            f"the allocator itself reported peaks of {ledger.allocated_peak_bytes:,} B allocated,"
            f" {ledger.reserved_peak_bytes:,} B reserved and {ledger.requested_peak_bytes:,} B requested",
        )
    if ledger is not None and ledger.unmatched_entries:
        yield Finding("ledger-unmatched", f"{ledger.unmatched_entries:,} ledger entries name no recorded allocation")


def _of_snapshot(snapshot: Snapshot, memory: DeviceMemory) -> Iterator[Finding]:
    for action, count in snapshot.unknown_actions.items():
        yield Finding("unknown-action", f"{count:,} events of the unknown kind {action!r} were passed over")
    if not snapshot.settings.is_recorded:
        yield Finding("no-settings", "the file records no allocator settings (torch before 2.2): defaults are assumed")
    if len(memory.device.events) and not memory.device.events.has_times:
        yield Finding("no-times", "the file records no times (torch before 2.2): no phases, and moments are events")
    yield from (Finding("reader", note) for note in snapshot.notes)


def _of_attribution(composition: Composition) -> Iterator[Finding]:
    unknown = composition.evidence["none"]
    if composition.allocated_bytes and unknown > 0.05 * composition.allocated_bytes:
        yield Finding(
            "unattributed",
            f"{unknown / composition.allocated_bytes:.1%} of the bytes at this moment have no known purpose;"
            " `profkit run --memory` records whose they are",
        )


def _of_leaks(leaks: LeakCheck) -> Iterator[Finding]:
    if leaks.suspects:
        yield Finding(
            "leak",
            f"{leaks.suspect_bytes:,} B that began in {leaks.steps[-1].began_in!r} are alive after"
            f" {leaks.steps[-1].step!r}, and the step before left the like behind; see --leaks",
        )
