"""Open a memory snapshot and ask it questions: the Python face of the analyses of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from profkit.analysis.memory.composition import compose, measure_fragmentation
from profkit.analysis.memory.device import DeviceMemory, Filter
from profkit.analysis.memory.leaks import check_leaks
from profkit.analysis.memory.oom import judge_oom, last_failure
from profkit.analysis.memory.owners import check_with_allocator, find_capacity
from profkit.analysis.memory.result import MemoryResult, describe_history, find_warnings, sum_up
from profkit.errors import SnapshotError, UsageError
from profkit.run.owners import Owners
from profkit.snapshot.columns import Snapshot

if TYPE_CHECKING:
    from profkit.analysis.memory.compare import Comparison
    from profkit.analysis.whatif.answers import WhatIf
    from profkit.run.compiled_code import CompiledGraph

PEAK = "peak"
FAILURE = "oom"
_PHASE = "phase:"
_TIME = re.compile(r"(?P<value>\d+(\.\d+)?)\s*(?P<unit>us|µs|ms|s|)$")
_UNITS = {"us": 1, "µs": 1, "ms": 1_000, "s": 1_000_000}


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

    def against(self, after: OpenedSnapshot, *, device: int | None = None) -> Comparison:
        """Return what explains the difference between this snapshot's peak and that of ``after``.

        Raises:
            UsageError: one of them recorded nothing for the device.
        """
        from profkit.analysis.memory.compare import compare_peaks  # few ask for it

        names = (self.snapshot.path, after.snapshot.path)
        return compare_peaks(self.device(device), after.device(device), names)

    def whatif(
        self,
        *,
        allocators: Sequence[str] = (),
        edits: Sequence[str] = (),
        scale_from: Sequence[OpenedSnapshot] = (),
        fit: bool = False,
        device: int | None = None,
        capacity_bytes: int | None = None,
        cost: Callable[[Sequence[str]], int | None] | None = None,
    ) -> WhatIf:
        """Return the peaks today and under other settings or after edits; ``profkit whatif`` prints them.

        Args:
            allocators: settings as in ``PYTORCH_CUDA_ALLOC_CONF``; by default those that are worth a try.
            edits: changes of the program, all together, such as ``optimizer:sgd`` or ``checkpoint:h.*``.
            scale_from: snapshots of the program at other sizes, for ``batch:×2`` and ``sequence:×2``.
            fit: search for the edits that make the program fit.
            device: the device's index; by default the one with the highest peak.
            capacity_bytes: what PyTorch may reserve; by default the memory of the GPU that the run recorded.
            cost: returns the kernel time (ns) of some ranges in a step's forward pass, None if it is not known.

        Raises:
            UsageError: an unknown device, a setting that torch would refuse, or an edit that cannot be modelled.
            SnapshotError: no history was recorded.
        """
        from profkit.analysis.whatif.answers import Edits, what_if  # few ask for it

        memory = self.device(device)
        others = tuple(other.device(device) for other in scale_from)
        return what_if(
            memory,
            self.snapshot.path,
            allocators=allocators,
            capacity_bytes=capacity_bytes,
            edits=Edits(tuple(edits), others, cost, fit) if edits or fit else None,
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
                time: ``1.5s`` or ``300ms`` after the first event on any device, or microseconds since the epoch.
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
        check = check_with_allocator(memory.recorded, memory.history, memory.unmatched_entries)
        capacity_bytes = capacity_bytes or find_capacity(memory.recorded, memory.device.index)
        return MemoryResult(
            snapshot=self.snapshot.path,
            totals=sum_up(memory.history),
            history=describe_history(memory.history),
            composition=composition,
            phases=memory.phase_peaks(),
            fragmentation=measure_fragmentation(memory.history, moment),
            oom=judge_oom(memory, capacity_bytes),
            leaks=leaks,
            allocator_check=check,
            others=tuple(sum_up(one.history) for one in self.devices.values() if one is not memory),
            warnings=find_warnings(self.snapshot, memory, composition, leaks, check),
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
        raise SnapshotError(f"moment {at!r}: the snapshot records no times; only peak is possible")
    first = memory.device.zero_us
    unit = match["unit"]
    value = float(match["value"]) * _UNITS[unit] + first if unit else float(match["value"])
    if not unit and value < first:
        raise UsageError(f"moment {at!r}: write {match['value']}s for seconds after the first event")
    if not first <= value <= int(memory.timeline.times_us[-1]):
        span = (int(memory.timeline.times_us[-1]) - first) / 1e6
        raise UsageError(f"moment {at!r}: outside the history, which lasts {span:.6f}s from {first} µs")
    return memory.timeline.moment_at(int(value))


def _phase_moment(memory: DeviceMemory, name: str) -> int:
    peaks = {peak.name: peak.moment for peak in memory.phase_peaks()}
    if name not in peaks:
        raise UsageError(f"no phase {name!r}; the phases are: {', '.join(peaks) or 'none'}")
    return peaks[name]
