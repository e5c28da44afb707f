"""What limits a range, in one word, with the rule, the numbers and the raw rows behind it.

Two questions, in this order.

1. Where does the range's time on the GPU go? Its span (`time_account.gpu_time`) has four parts, and the
   largest decides: idle while the host launches → *launch-bound*; idle while the host waits for the GPU, for data or
   makes no CUDA calls, or receiving a batch (`time_account.gpu_time`) → *host-bound*; only
   communication runs, or the range launched only communication →
   *communication-bound*; anything else runs → the second question. Profiling slows the host and hardly the GPU: if the
   unprofiled time of the phase is known, idle time is scaled first (`time_account.account`); waiting for data takes
   what was timed without a profiler, if it was.
2. Which of the GPU's peaks is in the way? By the roofline model (Williams, Waterman, Patterson 2009): if its FLOPs at
   the peak of their dtype (other operations at that of fp32) take longer than its least bytes at the memory's peak, it
   is *compute-bound*, else *memory-bound*. Least bytes are those of one perfect kernel. So if most of its kernel time
   is in kernels that by their names do little but move data (`MOVERS`: elementwise, reductions, copies, …), the range
   is *memory-bound* however long its FLOPs would take: it does not wait for its products. If its least bytes are
   unknown, it is compute-bound if its FLOPs alone would take half of its busy time or more. If they do not tell,
   its kernels' names do: it is *memory-bound* if most of its kernel time is in `MOVERS`; else there is no verdict.

These words are what JSON holds; people read "limited by arithmetic", "kernel launches" and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from profkit.analysis.efficiency.work import VECTOR_DTYPE, Amount, Peaks
from profkit.analysis.intervals import subtract, unite
from profkit.analysis.kernels.categories import CATEGORIES, categorize
from profkit.analysis.placing.attribution import Attribution, mark_members
from profkit.analysis.time_account.account import IdleTime
from profkit.analysis.time_account.gpu_time import GpuParts, GpuTime, build_gpu_times, find_windows
from profkit.analysis.tree.range_tree import RangeNodes, build_nodes, work_by_node
from profkit.analysis.tree.selection import select_ranges
from profkit.trace.columns import Ints, Measure, Trace, Work, rows_by_value
from profkit.trace.nesting import mark_nested

Word = Literal["compute-bound", "memory-bound", "launch-bound", "communication-bound", "host-bound"]

MOVERS = frozenset(CATEGORIES) - {"gemm", "attention", "communication", "graph", "other"}
"""Categories of kernels that do few operations a byte: any GPU's memory limits them long before its arithmetic."""

_SURELY = 0.5
"""FLOPs that at the peak fill this share of the busy time leave no room for a larger limit."""
_MOSTLY = 0.5
"""The share of kernel time from which kernels that move data decide."""


@dataclass(frozen=True)
class Verdict:
    """One word, None if there is no verdict; ``rule`` says in one line why.

    ``loads_data``: where the GPU waits for the host, other than for launches, it mostly waits for data.
    """

    word: Word | None
    rule: str
    loads_data: bool = False


@dataclass(frozen=True)
class Roofline:
    """How long a range's work would take at the peaks, in nanoseconds; None if unknown."""

    compute_ns: float | None
    memory_ns: float | None

    @property
    def bound_ns(self) -> float | None:
        """Return the longer of the two; that of the FLOPs if the other is unknown."""
        if self.compute_ns is None or self.memory_ns is None:
            return self.compute_ns
        return max(self.compute_ns, self.memory_ns)


def build_roofline(amount: Amount, peaks: Peaks | None) -> Roofline:
    """Return how long the work would take if only one peak limited it."""
    if peaks is None:
        return Roofline(None, None)
    compute = product_ns(amount, peaks)
    vector = peaks.flops_per_s.get(VECTOR_DTYPE)
    if compute is not None and amount.other_flops and vector:
        compute += amount.other_flops / vector * 1e9
    memory = None if amount.least_bytes is None else amount.least_bytes / peaks.bytes_per_s * 1e9
    return Roofline(compute, memory)


def product_ns(amount: Amount, peaks: Peaks | None) -> float | None:
    """Return how long matrix products alone would take at their dtypes' peaks, in ns; None if a peak is unknown."""
    if amount.flops is None or peaks is None:
        return None
    done = {dtype: flops for dtype, flops in amount.flops_by_dtype.items() if flops}
    if not done.keys() <= peaks.flops_per_s.keys():
        return None
    return sum(flops / peaks.flops_per_s[dtype] for dtype, flops in done.items()) * 1e9


def judge(
    parts: GpuParts | None,
    idle: IdleTime | None,
    busy_ns: int,
    roofline: Roofline,
    *,
    only_communicates: bool,
    mover_share: float = 0.0,
    input_copy_ns: int = 0,
) -> Verdict:
    """Return what limits a range.

    Args:
        parts: the range's time on its GPUs as recorded; None if it launched nothing.
        idle: the idle part of it, without a profiler if that is known.
        busy_ns: the union of its own kernels.
        roofline: how long its work would take at the peaks.
        only_communicates: all of its own kernels are communication; anything else that runs belongs to other ranges.
        mover_share: the share of `MOVERS` in its own kernel time, without communication.
        input_copy_ns: the part of ``parts`` in which only copies of the batch to the GPU ran.
    """
    if parts is None or idle is None or not parts.span_ns:
        return Verdict(None, "it launched no GPU work")
    waiting, other = idle.causes.data_ns, idle.causes.synchronising_ns + idle.causes.outside_cuda_ns
    shares: dict[Word | None, int] = {
        "launch-bound": idle.causes.launching_ns,
        "host-bound": other + waiting + input_copy_ns,
        "communication-bound": parts.exposed_communication_ns,
        None: parts.computing_ns + parts.exposed_copy_ns - input_copy_ns,
    }
    loads_data = waiting + input_copy_ns > other
    whole = sum(shares.values()) or 1
    word = max(shares, key=lambda key: shares[key])
    share = f"{shares[word] / whole:.1%} of its time on the GPU"
    if idle.is_unprofiled and parts.idle_ns:
        share += f" (idle without a profiler, an estimate: {idle.idle_ns:,} ns for {parts.idle_ns:,} ns recorded)"
    if word == "host-bound" and loads_data:
        waited, copied = (f"{ns / whole:.1%}" for ns in (waiting, input_copy_ns))
        rule = f"the largest part, {share}, is mostly waiting for data: idle {waited}, copying it {copied}"
        return Verdict(word, rule, loads_data)
    if word is not None:
        return Verdict(word, f"the largest part, {share}, is {_MEANING[word]}", loads_data)
    busy = f"the largest part, {share}, is computing and copying"
    if only_communicates:
        return Verdict("communication-bound", "it launched only communication; all else belongs to other ranges")
    if parts.exposed_copy_ns > parts.computing_ns:
        return Verdict("memory-bound", f"{busy}, mostly copying", loads_data)
    return replace(_judge_busy(busy, busy_ns, roofline, mover_share), loads_data=loads_data)


_MEANING = {
    "launch-bound": "idle while Python prepares kernels",
    "host-bound": "idle while the host waits for the GPU or makes no CUDA calls",
    "communication-bound": "communication that is not hidden behind computing",
}


def _judge_busy(busy: str, busy_ns: int, roofline: Roofline, mover_share: float) -> Verdict:
    compute, memory = roofline.compute_ns, roofline.memory_ns
    if compute is not None and memory is not None:
        if compute >= memory and mover_share > _MOSTLY:
            return Verdict("memory-bound", f"{busy}; {mover_share:.1%} of its kernel time is in kernels that move data")
        longer, shorter = ("FLOPs", "least bytes") if compute >= memory else ("least bytes", "FLOPs")
        rule = f"{busy}; at the GPU's peaks its {longer} take longer than its {shorter}"
        return Verdict("compute-bound" if compute >= memory else "memory-bound", rule)
    if compute is not None and busy_ns and compute >= _SURELY * busy_ns:
        return Verdict("compute-bound", f"{busy}; at the peak its FLOPs take {compute / busy_ns:.1%} of its busy time")
    if mover_share > _MOSTLY:
        return Verdict("memory-bound", f"{busy}; {mover_share:.1%} of its kernel time is in kernels that move data")
    missing = "FLOPs (or their dtype's peak)" if compute is None else "least bytes"
    return Verdict(None, f"{busy}; its {missing} are unknown, so the limit is unknown")


@dataclass(frozen=True)
class IdleGap:
    """A gap in which a GPU ran nothing, in the capture's own nanoseconds.

    Three parts say what the host did meanwhile. ``call`` is the CUDA call that was in progress for most of the gap, for
    ``call_ns``. ``ended_by`` is the kernel, copy or fill that ended the gap; its launch call began at ``launch_ns``.
    Each is None if there was none.
    """

    device: int
    start_ns: int
    end_ns: int
    launching_ns: int
    synchronising_ns: int
    outside_cuda_ns: int
    call: str | None
    call_ns: int
    ended_by: str | None
    launch_ns: int | None


@dataclass(frozen=True)
class KernelTime:
    """All kernels of one name under a range; the first of them began at ``first_ns``."""

    name: str
    count: int
    total_ns: int
    first_ns: int


@dataclass(frozen=True)
class Evidence:
    """The longest gaps of a range, its largest kernels, and its kernel time by category, the largest first."""

    gaps: tuple[IdleGap, ...]
    kernels: tuple[KernelTime, ...]
    categories: tuple[tuple[str, int], ...]


def chosen_ranges(attribution: Attribution, range: str | None) -> Ints:
    """Return the ranges to report: all, or those asked for and those within them."""
    trace = attribution.trace
    if range is None:
        return np.arange(len(trace.ranges))
    chosen = mark_members(len(trace.ranges), select_ranges(attribution, range))
    return np.flatnonzero(mark_nested(attribution.parent, chosen))


def find_evidence(
    attribution: Attribution, range: str | None = None, *, numbered: bool = False, most: int = 3
) -> dict[str, Evidence]:
    """Return the evidence for each row of `measure_efficiency`, by path, with at most ``most`` gaps and kernels.

    Raises:
        TraceError, UsageError: as `measure_efficiency` does.
    """
    trace = attribution.trace
    members = chosen_ranges(attribution, range)
    nodes = build_nodes(attribution, numbered=numbered)
    times = build_gpu_times(trace)
    windows = find_windows(attribution, members, times)
    node = nodes.of_range[members[windows.member]]
    kernels = dict(_kernels(attribution, nodes, members))
    present = set(nodes.of_range[members].tolist())
    evidence = {}
    for at in (path for path in nodes.depth_first() if path.node in present):
        gaps: list[IdleGap] = []
        for device, time in times.items():
            mine = (node == at.node) & (windows.device == device)
            gaps += _longest_gaps(trace, device, time, (windows.start_ns[mine], windows.end_ns[mine]), most)
        gaps.sort(key=lambda gap: gap.start_ns - gap.end_ns)
        largest = kernels.get(at.node, ())
        evidence[at.path] = Evidence(tuple(gaps[:most]), largest[:most], _sum_categories(largest, trace.measure))
    return evidence


def _sum_categories(kernels: Sequence[KernelTime], measure: Measure) -> tuple[tuple[str, int], ...]:
    total_ns: dict[str, int] = {}
    for kernel in kernels:
        name = categorize(kernel.name, measure).name
        total_ns[name] = total_ns.get(name, 0) + kernel.total_ns
    return tuple(sorted(total_ns.items(), key=lambda item: (-item[1], item[0])))


def _longest_gaps(trace: Trace, device: int, time: GpuTime, windows: tuple[Ints, Ints], most: int) -> Iterator[IdleGap]:
    idle = subtract(unite(*windows), time.busy)
    longest = np.argsort(idle.start_ns - idle.end_ns, kind="stable")[:most]
    start, end = idle.start_ns[longest], idle.end_ns[longest]
    launching, synchronising = (when.within(start, end).tolist() for when in (time.launching, time.synchronising))
    for began, ended, launch, wait in zip(start.tolist(), end.tolist(), launching, synchronising, strict=True):
        ended_by, launch_ns = _what_began(trace, device, ended)
        call, call_ns = _longest_call(trace, began, ended)
        yield IdleGap(
            device=device,
            start_ns=began,
            end_ns=ended,
            launching_ns=launch,
            synchronising_ns=wait,
            outside_cuda_ns=ended - began - launch - wait,
            call=call,
            call_ns=call_ns,
            ended_by=ended_by,
            launch_ns=launch_ns,
        )


def _what_began(trace: Trace, device: int, time_ns: int) -> tuple[str | None, int | None]:
    """Return what began on a GPU at this very time, and when it was launched; None at the end of a range's window."""
    for table in (trace.work, trace.copies):
        for row in np.flatnonzero((table.start_ns == time_ns) & (table.device == device)).tolist():
            if isinstance(table, Work):
                name = trace.names[int(table.name[row])]
            else:
                name = "a memory fill" if table.is_memset[row] else "a memory copy"
            return name, int(table.launch_ns[row]) if table.launch_thread[row] >= 0 else None
    return None, None


def _longest_call(trace: Trace, start_ns: int, end_ns: int) -> tuple[str | None, int]:
    """Return the CUDA call, of any thread, that was in progress longest between two times, and for how long."""
    calls = trace.calls
    inside = np.minimum(calls.end_ns, end_ns) - np.maximum(calls.start_ns, start_ns)
    if not len(inside) or inside.max() <= 0:
        return None, 0
    longest = int(inside.argmax())
    return trace.names[int(calls.name[longest])], int(inside[longest])


def _kernels(
    attribution: Attribution, nodes: RangeNodes, members: Ints
) -> Iterator[tuple[int, tuple[KernelTime, ...]]]:
    work, names = attribution.trace.work, attribution.trace.names
    for rows, node in work_by_node(attribution, nodes, members):
        for at, which in rows_by_value(node).items():
            mine = rows[which]
            times = []
            for name, same in rows_by_value(work.name[mine]).items():
                total_ns, first_ns = work.duration_ns[mine[same]].sum(), work.start_ns[mine[same]].min()
                times.append(KernelTime(names[name], len(same), int(total_ns), int(first_ns)))
            yield at, tuple(sorted(times, key=lambda kernel: (-kernel.total_ns, kernel.name)))
