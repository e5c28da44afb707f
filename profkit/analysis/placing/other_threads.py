"""Work that belongs to ranges of another thread: of one that waits, or of the one that its forward operator ran on.

**Threads that wait.** PyTorch runs the backward pass on threads of its own (``pt_autograd_0`` for device 0, …), while
the thread that called ``backward()`` waits inside its range, to which the helper's launches belong. No record says so;
the evidence is that a waiting thread makes no CUDA call. Candidates are the threads of the process that have a range
open and also launch kernels. The host is the one that is silent in that time; of two or more the work is ambiguous, of
none the helper has no host.

*In that time* is the host's current step of nesting, between two of its range events: no CUDA call between the
helper's first and last in it. A host that does make calls there (gradient accumulation in one wide range) waits in a
gap between two of them that holds several calls of the helper: two of an autograd thread, which runs only while a
caller waits, eight of any other thread. Any other thread may also work on its own beside a busy host, as a prefetcher
does: its host's gap must be ten times the usual spacing of the host's calls, and nine in ten of its calls while some
candidate has a range open must fall into such a gap. Else it works for itself.

A replica of ``nn.DataParallel`` runs on a thread that lives for one call of the model; its ranges lie in one named
``replica``, or in recordings of before this name in a forward pass (`name_replicas`). An autograd thread works for one
``backward`` call at a time, so no range of its own outlasts that call, although hooks may leave one open.

**Links.** torch.profiler draws a link from each forward operator to its backward operator. If the former ran in
``step / forward / layer 3``, the latter runs in ``step / backward``, where no range was opened for the layer. Each such
forward range gets a *mirror*: a range in the tree, under the one in which backward ran, that holds the linked work and
was never open. The work of one never counts in the other.

- If the innermost range of the work is named ``backward``, its mirrors go under that; work in other ranges inside
  ``backward`` keeps its place.
- Without a range of that name: for work in a range next to the forward one (``bwd`` after ``fwd``) the mirrors go under
  that range; for work directly in the range around both, under a mirror named ``backward``.
- Those ranges around the forward operator get a mirror that do not enclose the backward work too and lie below a phase
  or ``recompute``. If none is a phase, all but the outermost do: that is the counterpart of where backward lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from profkit.errors import TraceError
from profkit.names import BACKWARD, FORWARD, INFERENCE, RECOMPUTE, REPLICA, phase_of
from profkit.trace.columns import Bools, Calls, Ints, Ranges, Trace, empty_ints, join_tables, rows_by_value
from profkit.trace.nesting import NO_RANGE, ThreadTimeline, ancestors

AMBIGUOUS = -2
"""The host range of a launch for which two or more threads may have waited."""

_AUTOGRAD = "pt_autograd"
_PASSES = (FORWARD, INFERENCE)
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
        in_gap = _search(mine.start_ns, gap_end, "right") - _search(mine.start_ns, gap_begin, "left")
        return (innermost != NO_RANGE) & quiet & (silent | (in_gap >= enough)), innermost


def name_replicas(trace: Trace, parent: Ints) -> Trace:
    """Return the trace in which the work of every replica of ``nn.DataParallel`` lies in a range `REPLICA`.

    Recordings of before this name hold a forward pass in its place. Its thread began no process and is not autograd's,
    and all that is outermost on it are such passes: each lies within a forward pass of another thread of the process,
    which makes no CUDA call meanwhile.
    """
    ranges = trace.ranges
    is_pass = np.array([phase_of(name) in _PASSES for name in trace.names], dtype=np.bool_)[ranges.name]
    passes = _passes_of_helpers(trace, np.flatnonzero(parent == NO_RANGE), is_pass)
    calls = _calls_by_thread(trace.calls) if passes else {}
    renamed = [
        index
        for mine in passes
        if all(_has_waiting_range(ranges, np.flatnonzero(is_pass), index, calls) for index in mine)
        for index in mine
    ]
    if not renamed:
        return trace
    names = trace.names if REPLICA in trace.names else [*trace.names, REPLICA]
    name = ranges.name.copy()
    name[renamed] = names.index(REPLICA)
    return replace(trace, names=names, ranges=replace(ranges, name=name))


def _passes_of_helpers(trace: Trace, outermost: Ints, is_pass: Bools) -> list[list[int]]:
    by_thread = rows_by_value(trace.ranges.thread[outermost])
    return [
        outermost[rows].tolist()
        for thread, rows in by_thread.items()
        if thread not in trace.main_threads
        and not trace.thread_names.get(thread, "").startswith(_AUTOGRAD)
        and is_pass[outermost[rows]].all()
    ]


def _has_waiting_range(ranges: Ranges, others: Ints, index: int, calls: dict[int, _ThreadCalls]) -> bool:
    start, end = ranges.start_ns[[index]], ranges.end_ns[[index]]
    around = others[(ranges.start_ns[others] <= start) & (ranges.end_ns[others] >= end)]
    around = around[ranges.process[around] == ranges.process[index]]
    hosts = {*ranges.thread[around].tolist()} & calls.keys() - {int(ranges.thread[index])}
    return any(calls[host].none_between(start, end) for host in hosts)


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
        return int(np.median(np.diff(self.start_ns))) if len(self.start_ns) > 1 else 0

    def none_between(self, first: Ints, last: Ints) -> Bools:
        return _search(self.start_ns, last, "right") <= _search(self.end_ns, first, "left")

    def silence_around(self, time_ns: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Return the longest stretch around each time, within begin and end, in which no call is under way."""
        next_call = np.searchsorted(self.start_ns, time_ns, side="right")
        previous_end = np.concatenate([[-(1 << 62)], self.end_ns])[next_call]
        next_start = np.append(self.start_ns, 1 << 62)[next_call]
        return np.maximum(previous_end, begin), np.minimum(next_start, end)


def _span_of_calls(calls: _ThreadCalls, begin: Ints, end: Ints, time_ns: Ints) -> tuple[Ints, Ints]:
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


MIRROR_THREAD = -9
"""The ``thread`` of mirrors: no thread opened them."""


_MOST_MIRRORS = 100_000
_MOST_MIRRORS_EACH = 4
"""A trace with more mirrors than the two numbers allow is refused. A range has one mirror for each backward call."""


@dataclass(frozen=True, eq=False)
class Mirrors:
    """The mirrors of a trace, numbered depth first, so that a mirror and all below it are one span of numbers.

    ``first`` is the index of the first of them among the ranges. ``number`` and ``end`` are the span of each;
    ``of_row`` is the number of the innermost mirror of each row of work, -1 for none.
    """

    first: int
    number: Ints
    end: Ints
    of_row: Ints

    def __len__(self) -> int:
        return len(self.number)

    def span(self, members: Ints) -> tuple[Ints, Ints]:
        return self.number[members - self.first], self.end[members - self.first]


NO_MIRRORS = Mirrors(1 << 62, empty_ints(), empty_ints(), empty_ints())


_Mirror = tuple[int, int | None]
"""Its parent, a range or a mirror, and the range that it is the mirror of; None means ``backward`` itself."""


def mirror_forward_ranges(
    trace: Trace, timelines: dict[int, ThreadTimeline], parent: Ints, around: Ints
) -> tuple[Trace, Ints, Mirrors]:
    """Return the trace with mirrors behind its ranges, the ranges' parents, and the mirrors."""
    sequence, origins = trace.work.sequence, trace.origins
    if sequence is None or origins is None:
        return trace, parent, NO_MIRRORS
    linked = np.flatnonzero(sequence >= 0)
    forward = np.full(len(linked), NO_RANGE, dtype=np.int64)
    threads, times = origins.thread[sequence[linked]], origins.start_ns[sequence[linked]]
    for thread, rows in rows_by_value(threads).items():
        if thread in timelines:
            forward[rows] = timelines[thread].innermost_at(times[rows])
    builder = _Builder(trace, parent)
    pairs, inverse = np.unique(np.stack([forward, around[linked]]), axis=1, return_inverse=True)
    places = [builder.place(forward_range, around_range) for forward_range, around_range in pairs.T.tolist()]
    if not builder.mirrors:
        return trace, parent, NO_MIRRORS
    of_row = np.full(len(trace.work), NO_RANGE, dtype=np.int64)
    of_row[linked] = np.array(places, dtype=np.int64)[inverse.reshape(-1)]
    return builder.finish(of_row)


class _Builder:
    """Collects the mirrors; those made earlier have the lower indices, so that a parent stands before its children."""

    def __init__(self, trace: Trace, parent: Ints) -> None:
        self._trace, self._parent = trace, parent
        self._index: dict[_Mirror, int] = {}
        self.mirrors: list[_Mirror] = []

    def place(self, forward: int, around: int) -> int:
        if forward == NO_RANGE:
            return NO_RANGE
        base, models = self._choose(ancestors(self._parent, forward)[::-1], ancestors(self._parent, around)[::-1])
        for model in models:
            base = self._mirror(base, model)
        return base if models else NO_RANGE

    def _choose(self, forward: Sequence[int], backward: Sequence[int]) -> tuple[int, list[int | None]]:
        in_forward, in_backward = set(forward), set(backward)
        below = [index for index in forward if index not in in_backward]
        own = [index for index in backward if index not in in_forward]
        names = [self._name(index) for index in below]
        phases = [at for at, name in enumerate(names) if phase_of(name) or name.lower() == RECOMPUTE]
        inner: list[int | None] = [*below[phases[-1] + 1 :]] if phases else [*below]
        around = backward[-1] if backward else NO_RANGE
        if any(phase_of(self._name(index)) == BACKWARD for index in backward):
            return (around, inner) if phase_of(self._name(around)) == BACKWARD else (NO_RANGE, [])
        if not own:
            return around, [None, *inner] if phases or inner else []
        if len(own) > 1:
            return NO_RANGE, []
        return around, inner if phases else inner[1:]

    def _mirror(self, parent: int, model: int | None) -> int:
        key = parent, model
        if key not in self._index:
            if len(self.mirrors) >= _MOST_MIRRORS + _MOST_MIRRORS_EACH * len(self._trace.ranges):
                raise TraceError(
                    f"{self._trace.path}: its {len(self._trace.ranges):,} ranges lead to over {len(self.mirrors):,}"
                    " more in the backward pass; captures with that many are not read"
                )
            self._index[key] = len(self._trace.ranges) + len(self.mirrors)
            self.mirrors.append(key)
        return self._index[key]

    def _name(self, index: int) -> str:
        return self._trace.names[int(self._trace.ranges.name[index])] if index != NO_RANGE else ""

    def finish(self, of_row: Ints) -> tuple[Trace, Ints, Mirrors]:
        first = len(self._trace.ranges)
        number, end = self._number_tree(first)
        rows = np.where(of_row == NO_RANGE, -1, number[np.maximum(of_row - first, 0)])
        trace = self._with_mirrors(number, end, rows)
        parent = np.concatenate([self._parent, [above for above, _ in self.mirrors]]).astype(np.int64)
        return trace, parent, Mirrors(first, number, end, rows)

    def _number_tree(self, first: int) -> tuple[Ints, Ints]:
        above = [max(parent - first, -1) for parent, _ in self.mirrors]
        size, number = np.ones((2, len(above)), dtype=np.int64)
        for at in reversed(range(len(above))):
            if above[at] >= 0:
                size[above[at]] += size[at]
        next_below = {-1: 0}
        for at, parent in enumerate(above):
            number[at] = next_below[parent]
            next_below[parent] += int(size[at])
            next_below[at] = int(number[at]) + 1
        return number, number + size

    def _with_mirrors(self, number: Ints, end: Ints, of_row: Ints) -> Trace:
        trace, ranges, work = self._trace, self._trace.ranges, self._trace.work
        names = list(trace.names)
        if any(of is None for _, of in self.mirrors) and BACKWARD not in names:
            names.append(BACKWARD)
        order = np.argsort(of_row, kind="stable")
        numbers, launches = of_row[order], np.append(work.placed_ns[order], 1 << 62)
        low, high = np.searchsorted(numbers, number), np.searchsorted(numbers, end)
        start = np.array([launches[a:b].min() for a, b in zip(low.tolist(), high.tolist(), strict=True)], np.int64)
        process = work.process[order[np.minimum(low, len(order) - 1)]]
        model = np.array([NO_RANGE if of is None else of for _, of in self.mirrors], dtype=np.int64)
        is_copy = model != NO_RANGE
        name = np.where(is_copy, ranges.name[model], names.index(BACKWARD) if BACKWARD in names else 0)
        default = names.index("") if "" in names else int(ranges.domain[0])
        domain = np.where(is_copy, ranges.domain[model], default)
        thread = np.full(len(model), MIRROR_THREAD, dtype=np.int64)
        new = Ranges(name, domain, start, start, process, thread, thread, np.zeros(len(model), dtype=np.bool_))
        if ranges.is_replayed is not None:
            new = replace(new, is_replayed=np.zeros(len(model), dtype=np.bool_))
        return replace(trace, names=names, ranges=join_tables([ranges, new]))
