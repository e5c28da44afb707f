"""The replay against what the allocator said of itself in the same process."""

from __future__ import annotations

from dataclasses import dataclass

from profkit.analysis.memory.summary import DeviceMemory
from profkit.run.owners import START


@dataclass(frozen=True)
class LedgerCheck:
    """The allocator's own peaks at the dump, the replay's difference from each, and entries that named nothing."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    requested_peak_bytes: int
    allocated_difference_bytes: int
    reserved_difference_bytes: int
    requested_difference_bytes: int
    unmatched_entries: int
    earlier_peak_bytes: int | None
    """The allocator's own peak of the time before the recording, where the ledger quotes it."""

    @property
    def agrees(self) -> bool:
        """Return whether all three peaks are the same."""
        differences = (self.allocated_difference_bytes, self.reserved_difference_bytes, self.requested_difference_bytes)
        return not any(differences)


def check_ledger(memory: DeviceMemory) -> LedgerCheck | None:
    """Compare the replayed peaks with the highest that the allocator told; None where no ledger has any for the device.

    A script may have reset them in between, which the recorder notes before it happens.
    """
    if memory.ledger is None:
        return None
    all_figures = [one for one in memory.ledger.figures if one.device == memory.device.index]
    earlier = [one.allocated_peak_bytes for one in all_figures if one.moment == START]
    figures = [one for one in all_figures if one.moment != START]
    if not figures:
        return None
    allocated = max(one.allocated_peak_bytes for one in figures)
    reserved = max(one.reserved_peak_bytes for one in figures)
    requested = max(one.requested_peak_bytes for one in figures)
    curves = memory.history.curves
    return LedgerCheck(
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=reserved,
        requested_peak_bytes=requested,
        allocated_difference_bytes=memory.history.allocated_peak_bytes - allocated,
        reserved_difference_bytes=int(curves.reserved.max()) - reserved,
        requested_difference_bytes=int(curves.requested.max()) - requested,
        unmatched_entries=memory.unmatched_entries,
        earlier_peak_bytes=earlier[0] if earlier else None,
    )


def find_capacity(memory: DeviceMemory) -> int | None:
    """Return the device's memory in bytes, where the ledger says."""
    figures = memory.ledger.figures if memory.ledger else ()
    return next(
        (one.capacity_bytes for one in figures if one.device == memory.device.index and one.capacity_bytes), None
    )
