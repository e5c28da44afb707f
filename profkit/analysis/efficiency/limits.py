"""What limits a range, in one word.

1. Where does its time on the GPU go? The largest part of its span (`time_account.gpu_time`) decides: idle while the
   host launches is *launch-bound*; idle for any other reason, or receiving a batch, *host-bound*; communication alone
   *communication-bound*; anything else leads to the second question. Idle time is that without a profiler, if known.
2. Which peak is in the way? By the roofline model (Williams, Waterman, Patterson 2009): if its FLOPs at the peak of
   their dtype (other operations at that of fp32) take longer than its least bytes at the memory's peak, it is
   *compute-bound*, else *memory-bound*. Least bytes are those of one perfect kernel; so a range most of whose kernel
   time is in `MOVERS` is *memory-bound* in any case. Without least bytes it is compute-bound if its FLOPs alone would
   take half of its busy time, else memory-bound by its `MOVERS`, else there is no verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from profkit.analysis.efficiency import VECTOR_DTYPE, Amount, Peaks
from profkit.analysis.kernels import CATEGORIES
from profkit.analysis.placing.attribution import Attribution, mark_members
from profkit.analysis.time_account.account import IdleTime
from profkit.analysis.time_account.gpu_time import GpuParts
from profkit.analysis.tree import select_ranges
from profkit.trace.columns import Ints
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
    """One word, None if there is no verdict.

    ``loads_data``: where the GPU waits for the host, other than for launches, it mostly waits for data.
    """

    word: Word | None
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
        return Verdict(None)
    waiting, other = idle.causes.data_ns, idle.causes.synchronising_ns + idle.causes.outside_cuda_ns
    shares: dict[Word | None, int] = {
        "launch-bound": idle.causes.launching_ns,
        "host-bound": other + waiting + input_copy_ns,
        "communication-bound": parts.exposed_communication_ns,
        None: parts.computing_ns + parts.exposed_copy_ns - input_copy_ns,
    }
    word = max(shares, key=lambda key: shares[key])
    if word is None and only_communicates:
        return Verdict("communication-bound")
    if word is None:
        is_copying = parts.exposed_copy_ns > parts.computing_ns
        word = "memory-bound" if is_copying else _judge_busy(busy_ns, roofline, mover_share)
    return Verdict(word, loads_data=waiting + input_copy_ns > other)


def _judge_busy(busy_ns: int, roofline: Roofline, mover_share: float) -> Word | None:
    compute, memory = roofline.compute_ns, roofline.memory_ns
    if compute is not None and memory is not None:
        return "compute-bound" if compute >= memory and mover_share <= _MOSTLY else "memory-bound"
    if compute is not None and busy_ns and compute >= _SURELY * busy_ns:
        return "compute-bound"
    return "memory-bound" if mover_share > _MOSTLY else None


def chosen_ranges(attribution: Attribution, range: str | None) -> Ints:
    """Return the ranges to report: all, or those asked for and those within them."""
    trace = attribution.trace
    if range is None:
        return np.arange(len(trace.ranges))
    chosen = mark_members(len(trace.ranges), select_ranges(attribution, range))
    return np.flatnonzero(mark_nested(attribution.parent, chosen))
