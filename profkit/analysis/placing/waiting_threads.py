"""Which thread works for which: launches that belong to the ranges of another thread, which waits.

PyTorch runs the backward pass on threads of its own (``pt_autograd_0`` for device 0, …), while the thread that called
``backward()`` waits inside its range. The helper's launches belong to that range. No record in an nsys export says
so; the evidence is that a waiting thread makes no CUDA call. The candidates are the threads of the same process that
have a range open and also launch kernels. The host is the one candidate that is silent in that time; if two or more
are silent, the work is ambiguous; if none is, the helper has no host.

*In that time* means the host's current step of nesting, between two of its range events. The host is silent if it makes
no CUDA call between the helper's first and last call in that step. If it does make calls (gradient accumulation in one
wide range: the host works, waits, works, waits), the gap between its two neighbouring calls must hold several calls of
the helper: two for an autograd thread, which runs only while a caller waits, and eight for any other thread.

A thread that is not PyTorch's autograd may also work on its own next to a busy host, as a prefetcher does. So two more
conditions hold for it. The host's gap must be unusual: ten times the usual spacing of the host's calls. And the thread
must be a helper throughout: of its calls while some candidate has a range open, nine in ten must fall into a gap of a
candidate. A thread that also works while nobody waits works for itself, and what it launches while another thread
happens to wait belongs to no range.

A replica of ``nn.DataParallel`` runs on a thread that lives for one call of the model, while its caller waits. Its
ranges lie in one named ``replica``, and are treated as those of an autograd thread.

An autograd thread works for one ``backward`` call at a time, so no range of its own can outlast that call. Hooks may
still leave one open: PyTorch runs the callback at the end of the graph on the calling thread alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from profkit.names import BACKWARD, REPLICA, phase_of
from profkit.trace.columns import Bools, Calls, Ints, Trace, empty_ints, rows_by_value
from profkit.trace.nesting import NO_RANGE, ThreadTimeline, ancestors

AMBIGUOUS = -2
"""The host range of a launch for which two or more threads may have waited."""

_AUTOGRAD = "pt_autograd"
_CALLS_IN_SILENCE = 8
_AUTOGRAD_CALLS_IN_SILENCE = 2
_UNUSUAL_SILENCE = 10
_HELPER_THROUGHOUT = 0.9


@dataclass(frozen=True, eq=False)
class Hosts:
    """The host of one helper thread at some times, and its innermost range then (or `NO_RANGE`, `AMBIGUOUS`)."""

    range: Ints
    thread: Ints


class WaitingThreads:
    """Finds, for any thread of a trace and any times, the thread under whose ranges it works."""

    def __init__(self, trace: Trace, timelines: dict[int, ThreadTimeline]) -> None:
        self._trace = trace
        self._timelines = timelines
        self._calls = _calls_by_thread(trace.calls)
        launching = rows_by_value(trace.work.launch_thread).keys()
        ranges = trace.ranges
        of_replicas = np.array([name == REPLICA for name in trace.names], dtype=np.bool_)[ranges.name]
        self._replicas = set(ranges.thread[of_replicas & (ranges.end_thread == ranges.thread)].tolist())
        # A single replica runs on the thread that calls the model, which is a main thread.
        self._replicas -= set(trace.main_threads)
        self._candidates = [t for t in timelines if t in launching and not self.works_for_another(t)]
        self._process_of = dict(zip(ranges.end_thread.tolist(), ranges.process.tolist(), strict=True))
        self._throughout: dict[int, bool] = {}
        self._process_of |= dict(zip(ranges.thread.tolist(), ranges.process.tolist(), strict=True))

    def is_autograd(self, thread: int) -> bool:
        """Return whether the thread belongs to PyTorch's autograd engine, by its name."""
        return self._trace.thread_names.get(thread, "").startswith(_AUTOGRAD)

    def works_for_another(self, thread: int) -> bool:
        """Return whether the thread's own ranges lie under those of a thread that waits: autograd's, or a replica's."""
        return self.is_autograd(thread) or thread in self._replicas

    def may_help(self, thread: int) -> bool:
        """Return whether the thread may work for another: any but the main thread of its process."""
        return self.works_for_another(thread) or thread not in self._trace.main_threads

    def find_hosts(self, helper: int, process: int, time_ns: Ints) -> Hosts:
        """Return the innermost range of the thread that ``helper`` works for at each time, and that thread."""
        if not self.works_for_another(helper) and not self._helps_throughout(helper, process):
            none = np.full(len(time_ns), NO_RANGE, dtype=np.int64)
            return Hosts(none, none)
        return self._find_hosts(helper, process, time_ns)[0]

    def _find_hosts(self, helper: int, process: int, time_ns: Ints) -> tuple[Hosts, Bools]:
        """Return the hosts, and at which times any candidate had a range open at all."""
        host_range = np.full(len(time_ns), NO_RANGE, dtype=np.int64)
        host_thread = np.full(len(time_ns), NO_RANGE, dtype=np.int64)
        count = np.zeros(len(time_ns), dtype=np.int64)
        in_range = np.zeros(len(time_ns), dtype=np.bool_)
        for host in self._candidates:
            if host == helper or self._process_of.get(host) != process:
                continue
            waiting, innermost = self._waiting(host, helper, time_ns)
            in_range |= innermost != NO_RANGE
            host_range[waiting], host_thread[waiting] = innermost[waiting], host
            count += waiting
        host_range[count > 1] = AMBIGUOUS
        host_thread[count > 1] = NO_RANGE
        return Hosts(host_range, host_thread), in_range

    def _helps_throughout(self, helper: int, process: int) -> bool:
        """Return whether a thread that is not named after autograd calls CUDA only while another thread waits."""
        if helper not in self._throughout:
            mine = self._calls.get(helper)
            times = mine.start_ns if mine is not None else empty_ints()
            if helper in self._timelines:
                times = times[self._timelines[helper].innermost_at(times) == NO_RANGE]
            hosts, in_range = self._find_hosts(helper, process, times)
            held = int((hosts.range != NO_RANGE).sum())
            self._throughout[helper] = held >= _HELPER_THROUGHOUT * int(in_range.sum())
        return self._throughout[helper]

    def _waiting(self, host: int, helper: int, time_ns: Ints) -> tuple[Bools, Ints]:
        """Return at which times ``host`` waits in a range while ``helper`` works, and its innermost range then."""
        timeline = self._timelines[host]
        segment = timeline.segment_at(time_ns)
        innermost = timeline.innermost[segment]
        begin = timeline.time_ns[segment]
        end = np.append(timeline.time_ns, 1 << 62)[segment + 1]
        theirs, mine = self._calls[host], self._calls.get(helper)
        if mine is None:
            return np.zeros(len(time_ns), dtype=np.bool_), innermost

        first, last = _span_of_calls(mine, begin, end, time_ns)
        silent = theirs.none_between(first, last)
        gap_begin, gap_end = theirs.silence_around(time_ns, begin, end)
        quiet = gap_begin <= time_ns
        if self.works_for_another(helper):
            enough = _AUTOGRAD_CALLS_IN_SILENCE
        else:
            enough = _CALLS_IN_SILENCE
            quiet &= gap_end - gap_begin >= _UNUSUAL_SILENCE * theirs.usual_spacing_ns
        between = mine.count_between(gap_begin, gap_end) >= enough
        return (innermost != NO_RANGE) & quiet & (silent | between), innermost


def end_with_backward(
    trace: Trace, timelines: dict[int, ThreadTimeline], parent: Ints, waiting: WaitingThreads
) -> Trace:
    """Return the trace with no range of an autograd thread open for longer than the backward call it works for.

    That call lies in the innermost range named ``backward`` that the waiting thread had open when the range began,
    or, where there is none of this name, in the outermost of its ranges. A range that is cut counts as ended.
    """
    ranges = trace.ranges
    end_ns = ranges.end_ns.copy()
    is_backward = np.array([phase_of(name) == BACKWARD for name in trace.names], dtype=np.bool_)
    for thread in timelines:
        if not waiting.is_autograd(thread):
            continue
        mine = np.flatnonzero((ranges.thread == thread) & (ranges.end_thread == thread))
        if not len(mine):
            continue
        hosts = waiting.find_hosts(thread, int(ranges.process[mine[0]]), ranges.start_ns[mine])
        for host, which in rows_by_value(hosts.range).items():
            if host >= 0:
                around = ancestors(parent, host)
                call = next((index for index in around if is_backward[ranges.name[index]]), around[-1])
                end_ns[mine[which]] = np.minimum(end_ns[mine[which]], ranges.end_ns[call])
    is_cut = end_ns < ranges.end_ns
    if not is_cut.any():
        return trace
    return replace(trace, ranges=replace(ranges, end_ns=end_ns, is_open=ranges.is_open & ~is_cut))


@dataclass(frozen=True, eq=False)
class _ThreadCalls:
    """One thread's CUDA calls, by start; ``end_ns`` is the latest end so far, so that it is sorted too."""

    start_ns: Ints
    end_ns: Ints

    @cached_property
    def usual_spacing_ns(self) -> int:
        """Return the median time from one call's start to the next one's."""
        return int(np.median(np.diff(self.start_ns))) if len(self.start_ns) > 1 else 0

    def none_between(self, first: Ints, last: Ints) -> Bools:
        """Return where no call is under way at any time from ``first`` to ``last``."""
        return _search(self.start_ns, last, "right") <= _search(self.end_ns, first, "left")

    def count_between(self, first: Ints, last: Ints) -> Ints:
        """Return how many calls start from ``first`` to ``last``."""
        return _search(self.start_ns, last, "right") - _search(self.start_ns, first, "left")

    def silence_around(self, time_ns: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Return the longest stretch around each time, within begin and end, in which no call is under way.

        If a call is under way at that time, the stretch begins after it.
        """
        next_call = np.searchsorted(self.start_ns, time_ns, side="right")
        previous_end = np.concatenate([[-(1 << 62)], self.end_ns])[next_call]
        next_start = np.append(self.start_ns, 1 << 62)[next_call]
        return np.maximum(previous_end, begin), np.minimum(next_start, end)


def _span_of_calls(calls: _ThreadCalls, begin: Ints, end: Ints, time_ns: Ints) -> tuple[Ints, Ints]:
    """Return the starts of the first and last call from begin to end, widened to include ``time_ns``."""
    low = _search(calls.start_ns, begin, "left")
    high = _search(calls.start_ns, end, "left") - 1
    some = high >= low
    first = np.where(some, calls.start_ns[np.minimum(low, len(calls.start_ns) - 1)], time_ns)
    last = np.where(some, calls.start_ns[np.maximum(high, 0)], time_ns)
    return np.minimum(first, time_ns), np.maximum(last, time_ns)


def _search(times_ns: Ints, wanted_ns: Ints, side: Literal["left", "right"]) -> Ints:
    """Return `np.searchsorted`, faster: what is launched in one range asks for the same times again and again."""
    is_new = np.concatenate([[True], wanted_ns[1:] != wanted_ns[:-1]])[: len(wanted_ns)]
    place: Ints = np.searchsorted(times_ns, wanted_ns[is_new], side=side)[np.cumsum(is_new) - 1]
    return place


def _calls_by_thread(calls: Calls) -> dict[int, _ThreadCalls]:
    return {
        thread: _ThreadCalls(calls.start_ns[rows], np.maximum.accumulate(calls.end_ns[rows]))
        for thread, rows in rows_by_value(calls.thread).items()
    }
