"""What a GPU was doing at any time, in parts that sum up: computing, communicating, copying, or idle for a reason.

::

    span = computing            a kernel or a graph runs that is no communication
         + exposed communication  only communication kernels run, copies perhaps beside them
         + exposed copies         only copies and sets run
         + idle                 nothing runs; the host is launching, synchronising or outside CUDA (`host_time`)

Communication and copies that run beside other work are *overlapped*: they cost no time of their own.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict, dataclass

import numpy as np

from profkit.analysis.categories import categorize
from profkit.analysis.efficiency.host_time import HostTime, build_host_times
from profkit.analysis.intervals import NOTHING, Stretches, disjoint_pieces, intersect, subtract, unite, unite_all
from profkit.trace.columns import Bools, Ints, Trace, distinct_values

_NO_HOST = HostTime(NOTHING, NOTHING)


@dataclass(frozen=True)
class GpuParts:
    """The time of one or more GPUs in its parts, in nanoseconds; two GPUs count twice.

    ``span_ns`` is the sum of all but the last two, which lie within ``computing_ns`` and, of copies, within exposed
    communication.
    """

    span_ns: int
    computing_ns: int
    exposed_communication_ns: int
    exposed_copy_ns: int
    launching_ns: int
    synchronising_ns: int
    outside_cuda_ns: int
    overlapped_communication_ns: int
    overlapped_copy_ns: int

    @property
    def busy_ns(self) -> int:
        """Return the time in which anything ran."""
        return self.computing_ns + self.exposed_communication_ns + self.exposed_copy_ns

    @property
    def idle_ns(self) -> int:
        """Return the time in which nothing ran."""
        return self.launching_ns + self.synchronising_ns + self.outside_cuda_ns

    @property
    def idle_share(self) -> float:
        """Return the share of the span in which nothing ran, 0 of no span."""
        return self.idle_ns / self.span_ns if self.span_ns else 0.0

    def idle_share_at(self, factor: float) -> float:
        """Return the idle share if only this part of the idle time were there: 0 to 1."""
        return self._share_at(self.idle_ns, factor)

    def launching_share_at(self, factor: float) -> float:
        """Return the share that is idle while the host launches, if only this part of all idle time were there."""
        return self._share_at(self.launching_ns, factor)

    def host_share_at(self, factor: float) -> float:
        """Return the share that is idle while the host does not launch, if only this part of all idle time were there.

        The host synchronises then, or is outside CUDA.
        """
        return self._share_at(self.synchronising_ns + self.outside_cuda_ns, factor)

    def span_ns_at(self, factor: float) -> float:
        """Return how long the span would be if only this part of its idle time were there."""
        return self.busy_ns + self.idle_ns * factor

    def _share_at(self, idle_part_ns: int, factor: float) -> float:
        whole = self.span_ns_at(factor)
        return idle_part_ns * factor / whole if whole else 0.0

    def to_dict(self) -> dict[str, int]:
        """Return the parts, and the two sums of them."""
        return {**asdict(self), "busy_ns": self.busy_ns, "idle_ns": self.idle_ns}


@dataclass(frozen=True, eq=False)
class GpuTime:
    """One GPU's time as disjoint sets; ``busy`` is all that anything runs in. What is neither in
    it nor in ``launching`` or ``synchronising`` is idle with the host outside CUDA.

    ``starts_ns`` and ``reach_ns`` are when its pieces of work began, sorted, and by when all up to each had ended.
    """

    busy: Stretches
    computing: Stretches
    exposed_communication: Stretches
    exposed_copies: Stretches
    launching: Stretches
    synchronising: Stretches
    overlapped_communication: Stretches
    overlapped_copies: Stretches
    starts_ns: Ints
    reach_ns: Ints

    def parts_within(self, start_ns: Ints, end_ns: Ints) -> Ints:
        """Return the parts of each window, in the order of `GpuParts`: ``(windows, parts)``."""
        sets = (self.computing, self.exposed_communication, self.exposed_copies, self.launching, self.synchronising)
        known = [one.within(start_ns, end_ns) for one in sets]
        span = end_ns - start_ns
        beside = (self.overlapped_communication, self.overlapped_copies)
        return np.stack(
            [span, *known, span - np.sum(known, axis=0), *(one.within(start_ns, end_ns) for one in beside)], axis=1
        )

    def last_end_before(self, time_ns: Ints) -> Ints:
        """Return when all work that began before each time had ended (long ago, if there was none)."""
        before = np.searchsorted(self.starts_ns, time_ns, side="left")
        return np.concatenate([[-(1 << 62)], self.reach_ns])[before]


def build_gpu_times(trace: Trace) -> dict[int, GpuTime]:
    """Return each device's time in its parts."""
    hosts = build_host_times(trace)
    talks = communication_rows(trace)
    devices = distinct_values(np.concatenate([trace.work.device, trace.copies.device])).tolist()
    return {device: _build_one(trace, device, talks, hosts.get(device, _NO_HOST)) for device in devices}


def communication_rows(trace: Trace) -> Bools:
    """Return which kernels communicate, by the category of their name."""
    return category_rows(trace, frozenset({"communication"}))


def category_rows(trace: Trace, categories: Container[str]) -> Bools:
    """Return which kernels are of one of the categories, by their names."""
    is_one = np.zeros(len(trace.names), dtype=np.bool_)
    names = distinct_values(trace.work.name).tolist()
    is_one[[i for i in names if categorize(trace.names[i], trace.measure).name in categories]] = True
    return is_one[trace.work.name]


def sum_parts(
    trace_times: dict[int, GpuTime], group: Ints, device: Ints, start_ns: Ints, end_ns: Ints
) -> dict[int, GpuParts]:
    """Return the parts of each group of windows; windows of one group that overlap on a device count once."""
    found: dict[int, Ints] = {}
    for number, one in trace_times.items():
        mine = device == number
        groups, starts, ends = disjoint_pieces(group[mine], start_ns[mine], end_ns[mine])
        if not len(groups):
            continue
        parts = one.parts_within(starts, ends)
        first = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        for key, total in zip(groups[first].tolist(), np.add.reduceat(parts, first, axis=0), strict=True):
            found[key] = found[key] + total if key in found else total
    return {key: GpuParts(*map(int, total)) for key, total in found.items()}


def _build_one(trace: Trace, device: int, talks: Bools, host: HostTime) -> GpuTime:
    work, copies = trace.work, trace.copies
    here = work.device == device
    computing, communicating = (unite(work.start_ns[rows], work.end_ns[rows]) for rows in (here & ~talks, here & talks))
    moved = copies.device == device
    copying = unite(copies.start_ns[moved], copies.end_ns[moved])
    kernels = unite_all([computing, communicating])
    busy = unite_all([kernels, copying])
    starts = np.concatenate([work.start_ns[here], copies.start_ns[moved]])
    order = np.argsort(starts, kind="stable")
    return GpuTime(
        busy=busy,
        computing=computing,
        exposed_communication=subtract(communicating, computing),
        exposed_copies=subtract(copying, kernels),
        launching=subtract(host.launching, busy),
        synchronising=subtract(host.synchronising, busy),
        overlapped_communication=intersect(communicating, computing),
        overlapped_copies=intersect(copying, kernels),
        starts_ns=starts[order],
        reach_ns=np.maximum.accumulate(np.concatenate([work.end_ns[here], copies.end_ns[moved]])[order]),
    )
