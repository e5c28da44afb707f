"""What ranks did before the collective that waited, from light records: phases on the host, and on the GPU.

In each step there is a first collective that makes the median rank wait long. What a rank's host did between its call
of the collective before and its call of that one is where the time went: the phases, the time between two of them
(named after the later), and waits for data. Between two phases the host may wait for the GPU: what counts there is the
time in which the GPU was between phases too. What kernels took longer is known for whole phases only, from events on
the GPU.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from profkit.analysis.collectives.accounts import Account, Parts, clock_of, longer_on_gpu, named_steps, part_on_host
from profkit.analysis.collectives.matching import Matched
from profkit.analysis.collectives.own_time import BEFORE
from profkit.analysis.intervals import Stretches, unite
from profkit.names import BACKWARD
from profkit.run.light_record import LightRecord
from profkit.trace.columns import Ints

_Spans = tuple[list[int], list[int], list[str]]


_AT_THE_END = ("all_reduce", "reduce_scatter")
"""What is launched in a backward pass and waited for at its end: reductions of gradients."""


def account_before_waits(record: LightRecord, matched: Sequence[Matched]) -> Account:
    """Return what a rank did before the first long wait of each measured step; without one, in the whole step."""
    spans = _host_spans(record)
    windows, waits = _find_windows(record, matched), _host_waits(record, matched)
    steps = []
    for number, step in enumerate(record.steps):
        if step.name is None:
            continue
        begin = record.clock_base_ns + step.start_ns
        window = windows.get(number, (begin, begin + step.end_ns - step.start_ns))
        steps.append(_sum_spans(spans, waits, *window) | longer_on_gpu(step))
    return Account(record.rank, tuple(steps), (0.0,) * len(steps), False, clock_of(named_steps(record)))


def _host_spans(record: LightRecord) -> _Spans:
    """Return when the host was in each phase or between two, in order, by the rank's own clock."""
    found = []
    for step in record.steps:
        begin = record.clock_base_ns + step.start_ns
        found += [(begin + start, begin + end, name) for name, start, end in step.phases]
    found.sort()
    busy = _gpu_phases(record)
    spans, reach = [], found[0][0] if found else 0
    for start, end, name in found:
        if start > reach:
            spans += [(low, high, f"{BEFORE}{name}") for low, high in _less_busy(busy, reach, start)]
        spans.append((max(start, reach), max(end, reach), name))
        reach = max(reach, end)
    return [start for start, _, _ in spans], [end for _, end, _ in spans], [name for _, _, name in spans]


def has_untimed_waits(records: Sequence[LightRecord], matched: Sequence[Matched]) -> bool:
    """Return whether ranks may have waited where nobody timed it.

    Of what is reduced in a backward pass the wait at the pass's end is known; not so of other collectives.
    """
    by_rank = {record.rank: record for record in records}
    for one in matched:
        record = by_rank.get(one.ranks[0])
        if record is None or not one.is_untimed.any():
            continue
        spans = [
            (record.clock_base_ns + step.start_ns + start, record.clock_base_ns + step.start_ns + end)
            for step in record.steps
            for name, start, end in step.phases
            if name == BACKWARD
        ]
        starts, ends = (np.array([span[side] for span in spans], dtype=np.int64) for side in (0, 1))
        called = one.called_ns[0]
        at = np.searchsorted(starts, called, side="right") - 1
        in_backward = (at >= 0) & (called < ends[at]) if len(ends) else np.zeros(len(called), dtype=np.bool_)
        is_reduced = np.array([kind in _AT_THE_END for kind in one.kind], dtype=np.bool_)
        if (one.is_untimed & ~(in_backward & is_reduced)).any():
            return True
    return False


def _gpu_phases(record: LightRecord) -> Stretches:
    """Return when the GPU was in any phase, by the rank's own clock."""
    found = [
        (record.clock_base_ns + step.start_ns + start, record.clock_base_ns + step.start_ns + end)
        for step in record.steps
        for _, start, end in step.gpu_phases
        if start <= end
    ]
    starts, ends = (np.array([span[side] for span in found], dtype=np.int64) for side in (0, 1))
    return unite(starts, ends)


def _less_busy(busy: Stretches, start: int, end: int) -> list[tuple[int, int]]:
    """Return what is left of a time of the host without what the GPU was in a phase."""
    first, last = int(np.searchsorted(busy.end_ns, start)), int(np.searchsorted(busy.start_ns, end))
    edges = [start, *np.stack([busy.start_ns, busy.end_ns], axis=1)[first:last].ravel().tolist(), end]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


class _Waits:
    """When the host of a rank waited, and how long in all up to any time."""

    def __init__(self, start_ns: Ints, end_ns: Ints) -> None:
        self._start_ns = start_ns.tolist()
        self._end_ns = end_ns.tolist()
        self._before_ns = [0, *np.cumsum(end_ns - start_ns).tolist()]
        self.total_ns = self._before_ns[-1]

    def until(self, time_ns: int) -> int:
        """Return how long it had waited by this time."""
        at = bisect_left(self._start_ns, time_ns)
        return self._before_ns[at] - max(self._end_ns[at - 1] - time_ns, 0) if at else 0


def _host_waits(record: LightRecord, matched: Sequence[Matched]) -> _Waits:
    """Return when the host of a rank waited in collectives of which only the call is known, as of gloo's."""
    starts, ends = [], []
    for one in matched:
        if record.rank in one.ranks and one.only_called.any():
            here = one.ranks.index(record.rank)
            called = one.called_ns[here, one.only_called]
            starts.append(called)
            ends.append(called + one.wait_ns[here, one.only_called])
    none = np.empty(0, dtype=np.int64)
    united = unite(np.concatenate([none, *starts]), np.concatenate([none, *ends]))
    return _Waits(united.start_ns, united.end_ns)


def _find_windows(record: LightRecord, matched: Sequence[Matched]) -> dict[int, tuple[int, int]]:
    """Return for each step the calls of the collective before the first one that waited long, and of that one.

    Long is half of the longest wait of the step: whoever is late in one collective is often late in all after it.
    """
    longest = np.zeros(len(record.steps), dtype=np.int64)
    mine = [(one, one.ranks.index(record.rank)) for one in matched if record.rank in one.ranks]
    for one, here in mine:
        np.maximum.at(longest, one.step[here], one.median_wait_ns)
    found: dict[int, tuple[int, int]] = {}
    for one, here in mine:
        step, called = one.step[here], one.called_ns[here]
        is_long = (one.median_wait_ns > 0) & (one.median_wait_ns * 2 >= longest[step])
        # Where nobody timed a collective the rank may have waited in it or not: what came before it counts too.
        timed = np.flatnonzero(~one.is_untimed)
        which = np.flatnonzero(is_long[timed])
        which = which[which > 0]
        rows = timed[which]
        begin, end = called[timed[which - 1]], called[rows]
        known = (begin > 0) & (end > begin)
        for number, start, stop in zip(
            step[rows][known].tolist(), begin[known].tolist(), end[known].tolist(), strict=True
        ):
            if number not in found or stop < found[number][1]:
                found[number] = start, stop
    return found


def _sum_spans(spans: _Spans, waits: _Waits, begin: int, end: int) -> Parts:
    """Return what the host did between two moments, without waiting in collectives."""
    starts, ends, names = spans
    parts: Parts = {}
    for at in range(bisect_right(ends, begin), bisect_left(starts, end)):
        start, stop = max(starts[at], begin), min(ends[at], end)
        part = part_on_host(names[at])
        waited = waits.until(stop) - waits.until(start) if waits.total_ns else 0
        parts[part] = parts.get(part, 0.0) + stop - start - waited
    return parts
