"""The backward work of forward ranges, where only torch.profiler's links show it: paths such as ``backward/layer 3``.

torch.profiler draws a link from each forward operator to its backward operator. If the forward operator ran in
``step / forward / layer 3``, its backward operator runs in ``step / backward``, where the program opened no range for
the layer. Each such forward range gets a *mirror*: a range in the tree, under the range in which backward ran, that
holds the linked work. A mirror was never open, so it has no Python time. It is not the forward range: the work of one
never counts in the other.

- If the innermost range of the work is named ``backward``, its mirrors go under that range. Work that has other ranges
  around it inside ``backward`` keeps its place.
- If the program opened no range named ``backward``: for work in a range next to the forward one (``bwd`` after
  ``fwd``) the mirrors go under that range; for work directly in the range around both they go under a mirror named
  ``backward``.
- Of the ranges around the forward operator, those get a mirror that do not enclose the backward work too and lie below
  a phase or ``recompute``. If none of them is a phase, all but the outermost get one: that one is the forward
  counterpart of the range in which the backward work lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from profkit.errors import TraceError
from profkit.names import BACKWARD, RECOMPUTE, phase_of
from profkit.trace.columns import Ints, Ranges, Trace, empty_ints, join_tables, rows_by_value
from profkit.trace.nesting import NO_RANGE, ThreadTimeline, ancestors

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
        """Return the spans of some mirrors, by their index among the ranges."""
        return self.number[members - self.first], self.end[members - self.first]

    def range_at(self, numbers: Ints) -> Ints:
        """Return the index among the ranges of mirrors by their numbers."""
        return self.first + np.argsort(self.number)[numbers]


NO_MIRRORS = Mirrors(1 << 62, empty_ints(), empty_ints(), empty_ints())


@dataclass(frozen=True)
class _Mirror:
    """``parent`` and ``model`` are ranges (``parent`` may be a mirror); ``model`` None means ``backward`` itself."""

    parent: int
    model: int | None


def mirror_forward_ranges(
    trace: Trace, timelines: dict[int, ThreadTimeline], parent: Ints, around: Ints
) -> tuple[Trace, Ints, Mirrors]:
    """Return the trace with mirrors behind its ranges, the ranges' parents, and the mirrors.

    Args:
        trace: the capture.
        timelines: of its threads.
        parent: of each range.
        around: the innermost range of each row of work, or `NO_RANGE`.
    """
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
        """Return the mirror for work in ``around`` whose forward operator lay in ``forward``; `NO_RANGE` if none."""
        if forward == NO_RANGE:
            return NO_RANGE
        base, models = self._choose(ancestors(self._parent, forward)[::-1], ancestors(self._parent, around)[::-1])
        for model in models:
            base = self._mirror(base, model)
        return base if models else NO_RANGE

    def _choose(self, forward: Sequence[int], backward: Sequence[int]) -> tuple[int, list[int | None]]:
        """Return the range to put mirrors under, and the forward ranges to mirror, outermost first."""
        in_forward, in_backward = set(forward), set(backward)
        below = [index for index in forward if index not in in_backward]
        own = [index for index in backward if index not in in_forward]
        phases = [at for at, index in enumerate(below) if self._is_phase(index)]
        inner: list[int | None] = [*below[phases[-1] + 1 :]] if phases else [*below]
        around = backward[-1] if backward else NO_RANGE
        if any(self._phase(index) == BACKWARD for index in backward):
            return (around, inner) if self._phase(around) == BACKWARD else (NO_RANGE, [])
        if not own:
            return around, [None, *inner] if phases or inner else []
        if len(own) > 1:
            return NO_RANGE, []
        return around, inner if phases else inner[1:]

    def _mirror(self, parent: int, model: int | None) -> int:
        key = _Mirror(parent, model)
        if key not in self._index:
            if len(self.mirrors) >= _MOST_MIRRORS + _MOST_MIRRORS_EACH * len(self._trace.ranges):
                raise TraceError(
                    f"{self._trace.path}: its {len(self._trace.ranges):,} ranges lead to over {len(self.mirrors):,}"
                    " more in the backward pass; captures with that many are not read"
                )
            self._index[key] = len(self._trace.ranges) + len(self.mirrors)
            self.mirrors.append(key)
        return self._index[key]

    def _is_phase(self, index: int) -> bool:
        return self._phase(index) is not None or self._name(index).lower() == RECOMPUTE

    def _phase(self, index: int) -> str | None:
        return phase_of(self._name(index))

    def _name(self, index: int) -> str:
        return self._trace.names[int(self._trace.ranges.name[index])] if index != NO_RANGE else ""

    def finish(self, of_row: Ints) -> tuple[Trace, Ints, Mirrors]:
        """Return the trace, the parents and the mirrors; ``of_row`` is the index of each row's mirror."""
        first = len(self._trace.ranges)
        number, end = self._number_tree(first)
        rows = np.where(of_row == NO_RANGE, -1, number[np.maximum(of_row - first, 0)])
        trace = self._with_mirrors(number, end, rows)
        parent = np.concatenate([self._parent, [mirror.parent for mirror in self.mirrors]]).astype(np.int64)
        return trace, parent, Mirrors(first, number, end, rows)

    def _number_tree(self, first: int) -> tuple[Ints, Ints]:
        """Return each mirror's number, depth first, and the number after that of the last mirror below it."""
        above = [max(mirror.parent - first, -1) for mirror in self.mirrors]
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
        """Return the trace with the mirrors behind its ranges, each at the moment of its first launch."""
        trace, ranges, work = self._trace, self._trace.ranges, self._trace.work
        names = list(trace.names)
        if any(mirror.model is None for mirror in self.mirrors) and BACKWARD not in names:
            names.append(BACKWARD)
        order = np.argsort(of_row, kind="stable")
        numbers, launches = of_row[order], np.append(work.placed_ns[order], 1 << 62)
        low, high = np.searchsorted(numbers, number), np.searchsorted(numbers, end)
        start = np.array([launches[a:b].min() for a, b in zip(low.tolist(), high.tolist(), strict=True)], np.int64)
        process = work.process[order[np.minimum(low, len(order) - 1)]]
        model = np.array(
            [NO_RANGE if mirror.model is None else mirror.model for mirror in self.mirrors], dtype=np.int64
        )
        is_copy = model != NO_RANGE
        name = np.where(is_copy, ranges.name[model], names.index(BACKWARD) if BACKWARD in names else 0)
        default = names.index("") if "" in names else int(ranges.domain[0])
        domain = np.where(is_copy, ranges.domain[model], default)
        thread = np.full(len(model), MIRROR_THREAD, dtype=np.int64)
        new = Ranges(name, domain, start, start, process, thread, thread, np.zeros(len(model), dtype=np.bool_))
        if ranges.is_replayed is not None:
            new = replace(new, is_replayed=np.zeros(len(model), dtype=np.bool_))
        return replace(trace, names=names, ranges=join_tables([ranges, new]))
