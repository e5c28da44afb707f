"""The allocation timeline in bins: what the memory was made of at a few thousand moments instead of a million.

All bins hold the same number of events, so there is detail where something happens, not where the program sleeps. A bin
is represented by its moment with the most allocated memory, so the peak is exact. At each of these moments the series
sum to what was allocated. An allocation that is alive at none of them is in no series. The largest of the others are
kept one by one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from profkit.analysis.memory.categories import CATEGORIES
from profkit.analysis.memory.device import NOT_SELECTED, DeviceMemory, Filter
from profkit.analysis.memory.places import NO_MODULE_KNOWN, OUTSIDE_MODULES, common_start
from profkit.names import kind_of
from profkit.snapshot.columns import Ints

BIN_COUNT = 8192
STACK_COUNT = 12
SHAPE_COUNT = 1500

OTHER_STACKS = "other stacks"
OTHER_MODULES = "other modules"
SEVERAL_MODULES = "(several modules)"

_FEW = 100


@dataclass(frozen=True, eq=False)
class Series:
    """Bytes of one category, stack or module at each sampled moment.

    ``stack`` holds the frames that all of a series' allocations share, the innermost first; ``stack_count`` is how many
    different stacks these are.
    """

    name: str
    bytes: Ints
    stack: tuple[str, ...] = ()
    stack_count: int = 1


@dataclass(frozen=True)
class Shape:
    """One large allocation, alive from sample ``first`` until before ``end``; unknown times are None."""

    bytes: int
    requested_bytes: int
    first: int
    end: int
    category: str
    evidence: str
    owner: str | None
    module: str
    label: str
    stack: tuple[str, ...]
    born_us: int | None
    freed_us: int | None
    born_event: int
    freed_event: int | None


@dataclass(frozen=True, eq=False)
class Bins:
    """The sampled moments of one device's history, and what was allocated at each."""

    moments: Ints
    times_us: Ints
    """When the moments were, since the first event on any device."""
    has_times: bool
    allocated: Ints
    lowest: Ints
    """The least that was allocated within the bin."""
    reserved: Ints
    by_category: tuple[Series, ...]
    by_stack: tuple[Series, ...]
    by_module: tuple[Series, ...]
    """Each allocation at its own module alone, of several that differ in a number as one; empty if none is known."""
    shapes: tuple[Shape, ...]
    peak: int
    """Which sample is the peak."""
    prefers_events: bool
    """Whether nothing happens most of the time: then the number of the event makes a better axis than time."""


def bin_history(memory: DeviceMemory, wanted: Filter | None = None, bin_count: int = BIN_COUNT) -> Bins:
    curves, replay = memory.history.curves, memory.history.replay
    allocated = curves.allocated
    edges = np.unique(np.linspace(0, len(allocated), min(bin_count, len(allocated)) + 1).astype(np.int64))
    moments = _highest(allocated, edges)
    known = memory.timeline.times_us
    times = known[np.maximum(moments - 1, 0)] - memory.device.zero_us if len(known) else moments
    grouping = _Grouping(memory, moments, wanted or Filter())
    peak = int(np.argmax(allocated[moments]))
    return Bins(
        moments=moments,
        times_us=times,
        has_times=bool(replay.event_count),
        allocated=allocated[moments],
        lowest=np.minimum.reduceat(allocated, edges[:-1]),
        reserved=curves.reserved[moments],
        by_category=grouping.by_category(),
        by_stack=grouping.by_stack(),
        by_module=grouping.by_module(),
        shapes=grouping.shapes(),
        peak=peak,
        prefers_events=_is_mostly_flat(times),
    )


class _Grouping:
    def __init__(self, memory: DeviceMemory, moments: Ints, wanted: Filter) -> None:
        replay = memory.history.replay
        self._memory = memory
        self._first = np.searchsorted(moments, replay.birth + 1, "left")
        self._end = np.searchsorted(moments, replay.freed, "right")
        self._count = len(moments)
        self._rows: list[int] = np.flatnonzero(self._first < self._end).tolist()
        self._sizes = memory.history.replay.size_bytes
        wanted_rows = compress(self._rows, memory.selects(self._rows, wanted))
        self._claims = {row: memory.classifier.claim_of(row) for row in wanted_rows}

    def by_category(self) -> tuple[Series, ...]:
        groups = [self._claims[row].category if row in self._claims else NOT_SELECTED for row in self._rows]
        return self._sum(groups, [name for name in (*CATEGORIES, NOT_SELECTED) if name in set(groups)])

    def by_stack(self) -> tuple[Series, ...]:
        """Stacks that begin with the same user lines count as one: a loop may be called from two places. Such a series
        has only the frames that they share.
        """
        groups = []
        stacks = defaultdict[str, set[tuple[str, ...]]](set)
        for row in self._rows:
            facts = self._memory.stacks.facts_of(row)
            groups.append(facts.label if row in self._claims else NOT_SELECTED)
            stacks[groups[-1]].add(facts.user_first if row in self._claims else ())
        return tuple(
            replace(series, stack=common_start(stacks[series.name]), stack_count=len(stacks[series.name]))
            if series.name in stacks
            else series
            for series in self._largest(groups, OTHER_STACKS)
        )

    def by_module(self) -> tuple[Series, ...]:
        groups = [self._module_of(row) if row in self._claims else NOT_SELECTED for row in self._rows]
        is_known = set(groups) - {NO_MODULE_KNOWN, OUTSIDE_MODULES, NOT_SELECTED}
        return self._largest(groups, OTHER_MODULES) if is_known else ()

    def _module_of(self, row: int) -> str:
        modules = [module for module, _ in self._memory.place_of(row).modules]
        if len(modules) > 1:
            return SEVERAL_MODULES
        if not modules:
            return NO_MODULE_KNOWN
        return kind_of(modules[0]) or OUTSIDE_MODULES

    def _largest(self, groups: list[str], others: str) -> tuple[Series, ...]:
        held = Counter[str]()
        sample_counts = (self._end - self._first)[self._rows].tolist()
        for name, size, sample_count in zip(groups, self._sizes[self._rows].tolist(), sample_counts, strict=True):
            held[name] += size * sample_count
        best = [name for name, _ in held.most_common(STACK_COUNT)]
        if len(held) == len(best):
            return self._sum(groups, best)
        return self._sum([name if name in best else others for name in groups], [*best, others])

    def shapes(self) -> tuple[Shape, ...]:
        chosen = np.array(list(self._claims), dtype=np.int64)
        life = self._end[chosen] - self._first[chosen]
        order = np.lexsort((-life, -self._sizes[chosen]))[:SHAPE_COUNT]
        return tuple(self._shape(row) for row in np.sort(chosen[order]).tolist())

    def _shape(self, row: int) -> Shape:
        replay, times = self._memory.history.replay, self._memory.timeline.times_us
        claim, facts = self._claims[row], self._memory.stacks.facts_of(row)
        birth, freed = int(replay.birth[row]), int(replay.freed[row])
        zero = self._memory.device.zero_us
        is_freed = freed < replay.event_count
        return Shape(
            bytes=int(replay.size_bytes[row]),
            requested_bytes=int(replay.requested_bytes[row]),
            first=int(self._first[row]),
            end=int(self._end[row]),
            category=claim.category,
            evidence=claim.evidence,
            owner=self._memory.owner_of(row),
            module=self._module_of(row),
            label=facts.label,
            stack=facts.user_first,
            born_us=int(times[birth] - zero) if birth >= 0 else None,
            freed_us=int(times[freed] - zero) if is_freed else None,
            born_event=birth,
            freed_event=freed if is_freed else None,
        )

    def _sum(self, groups: list[str], names: Sequence[str]) -> tuple[Series, ...]:
        place = {name: number for number, name in enumerate(names)}
        column = np.array([place[name] for name in groups], dtype=np.int64)
        changes = np.zeros((len(names), self._count + 1), dtype=np.int64)
        np.add.at(changes, (column, self._first[self._rows]), self._sizes[self._rows])
        np.subtract.at(changes, (column, self._end[self._rows]), self._sizes[self._rows])
        return tuple(map(Series, names, changes[:, :-1].cumsum(axis=1)))


def _highest(curve: Ints, edges: Ints) -> Ints:
    tops = np.maximum.reduceat(curve, edges[:-1])
    bins = np.repeat(np.arange(len(tops)), np.diff(edges))
    is_top = np.flatnonzero(curve == tops[bins])
    return is_top[np.unique(bins[is_top], return_index=True)[1]]


def _is_mostly_flat(times_us: Ints) -> bool:
    gaps = np.sort(np.diff(times_us))
    longest = gaps[-max(len(gaps) // 100, 1) :] if len(gaps) else gaps
    return len(times_us) > _FEW and int(longest.sum()) > int(gaps.sum()) / 2
