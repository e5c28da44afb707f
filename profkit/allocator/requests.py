"""What the simulator is given: a program's requests, one row an allocation, and where CUDA puts segments.

A request stream holds what was asked for, when, on which stream, and when it was given back, without what the recorded
allocator did about it (`profkit.allocator.simulate`). Positions are those of the recorded events, as floats, so that an
edit can put a request between two of them; -1 is before the first event, the number of events or more is never. Every
request of a program comes from one recorded allocation: itself, or the one that an edit copied. What is known of that
(its category, its module) holds for the request too.

CUDA chooses where segments begin. Such a base is *proven* if up to it CUDA was asked for the same segments as in the
recording; the others are drawn.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from profkit.allocator import LARGE_SEGMENT_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES
from profkit.allocator.recorded_heap import find_expandable_ranges, find_regions
from profkit.allocator.replay import History
from profkit.snapshot.columns import (
    ALLOC,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Device,
    Ints,
    read_pool,
)

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Kind = tuple[tuple[int, int], int]
"""A memory pool, ``(0, 0)`` for the default one, and a stream: blocks are shared within a kind only."""

DEFAULT_POOL = (0, 0)
ADDED = -1
"""The row of a request that was not recorded."""

_COLUMNS = ("requested_bytes", "born", "freed", "completed", "kind", "row", "source")
_FAR = 2**62
_EMPTY_CACHE = "empty_cache"


@dataclass(frozen=True)
class Region:
    """Memory that was reserved before the first event: a segment, or a mapped part of an expandable one."""

    address: int
    size_bytes: int
    kind: int
    is_small: bool
    is_expandable: bool
    base: int
    """Where its segment begins, as far as that is known."""


@dataclass(frozen=True)
class Release:
    """Cached memory that went back to CUDA: the pieces (address, bytes) as recorded."""

    position: float
    pieces: tuple[tuple[int, int], ...]
    by_program: bool
    """Whether the program emptied the cache. Otherwise CUDA had no more memory, and the allocator did it itself."""


@dataclass(frozen=True, eq=False)
class Requests:
    """One device's request stream. The arrays are columns of equal length; edits replace them.

    ``freed`` is when the program gave the memory back, ``completed`` when no stream used it any more.
    """

    requested_bytes: Ints
    born: Floats
    freed: Floats
    completed: Floats
    kind: Ints
    """Index into ``kinds``."""
    row: Ints
    """The allocation's row in the `Replay`; -1 for one that an edit added."""
    source: Ints
    """The row of the allocation that it comes from."""
    kinds: tuple[Kind, ...]
    event_count: int
    releases: tuple[Release, ...]
    failures: tuple[tuple[float, int], ...]
    """Requests that failed: position and bytes, as rounded by the allocator."""
    fatal: tuple[int, int, int] | None
    """The request that ended the program: event, bytes and stream."""
    start: tuple[Region, ...]
    addresses: Ints
    """By row of the `Replay`: where the block lay, and in ``sizes`` what the allocator charged for it."""
    sizes: Ints
    bases: dict[int, tuple[int, int]]
    """Row of the `Replay` → base and bytes of the segment that was reserved for it; 0 B for expandable pages."""

    def __len__(self) -> int:
        return len(self.born)

    @property
    def is_recorded(self) -> Bools:
        return np.not_equal(self.row, ADDED)

    def keep(self, kept: Bools) -> Requests:
        return replace(self, **{name: getattr(self, name)[kept] for name in _COLUMNS})

    def resized(self, where: Bools | Ints, requested_bytes: Ints) -> Requests:
        sizes = self.requested_bytes.copy()
        sizes[where] = requested_bytes
        return replace(self, requested_bytes=sizes)

    def freed_at(self, where: Bools | Ints, positions: Floats) -> Requests:
        """Return the requests, some freed at other positions, and free for reuse at once."""
        freed, completed = self.freed.copy(), self.completed.copy()
        freed[where] = completed[where] = positions
        return replace(self, freed=freed, completed=completed)

    def add_copies(self, of: Ints, requested_bytes: Ints, born: Floats, freed: Floats) -> Requests:
        """Return further requests too: of the kind and the source of the requests ``of`` (indices)."""
        added = np.full(len(of), ADDED, dtype=np.int64)
        return self._add((requested_bytes, born, freed, freed, self.kind[of], added, self.source[of]))

    def add_last(self, event: int, size_bytes: int, stream: int) -> Requests:
        """Return one more request too, which comes with an event and stays, in the default pool of a stream."""
        kind, never = (DEFAULT_POOL, stream), float(self.event_count)
        kinds = self.kinds if kind in self.kinds else (*self.kinds, kind)
        values = (size_bytes, float(event), never, never, kinds.index(kind), ADDED, ADDED)
        return replace(self._add(tuple(np.array([value]) for value in values)), kinds=kinds)

    def with_fatal(self) -> Requests:
        """Return the request that ended the program too, if one did: edits should let it through."""
        return self if self.fatal is None else self.add_last(*self.fatal)

    def cut_off_at(self, event: int) -> Requests:
        """Return the requests that came before an event, as if the history ended with it."""
        releases = tuple(release for release in self.releases if release.position < event)
        return replace(self.keep(self.born < event), event_count=event + 1, releases=releases, failures=())

    def peak_bytes(self) -> int:
        return self.highest_sum(self.requested_bytes, self.completed)

    def highest_sum(self, sizes: Ints, ends: Floats) -> int:
        """Return the most bytes that were live at a time, each request from its birth to its end; frees come first."""
        position = np.concatenate([ends, self.born])
        change = np.concatenate([-sizes, sizes])
        order = np.argsort(position, kind="stable")
        order = order[position[order] < self.event_count]
        return int(change[order].cumsum().max(initial=0))

    def _add(self, columns: tuple[npt.NDArray[Any], ...]) -> Requests:
        pairs = zip(_COLUMNS, columns, strict=True)
        longer: dict[str, Any] = {name: np.concatenate([getattr(self, name), more]) for name, more in pairs}
        return replace(self, **longer)


def requests_of(history: History) -> Requests:
    replay, events = history.replay, history.device.events
    kinds, kind, start = _find_kinds(history)
    failed = np.flatnonzero(events.action == OOM)
    rows = np.arange(len(replay), dtype=np.int64)
    last = int(failed[-1]) if len(failed) and not np.any(events.action[failed[-1] :] == ALLOC) else None
    return Requests(
        requested_bytes=replay.requested_bytes,
        born=replay.birth.astype(np.float64),
        freed=replay.freed.astype(np.float64),
        completed=replay.completed.astype(np.float64),
        kind=kind,
        row=rows,
        source=rows,
        kinds=kinds,
        event_count=replay.event_count,
        releases=_find_releases(history),
        failures=tuple(zip(failed.astype(np.float64).tolist(), events.size_bytes[failed].tolist(), strict=True)),
        fatal=None if last is None else (last, int(events.size_bytes[last]), int(events.stream[last])),
        start=start,
        addresses=replay.address,
        sizes=replay.size_bytes,
        bases=_find_bases(history),
    )


def _find_bases(history: History) -> dict[int, tuple[int, int]]:
    """The events on segments stand directly before the allocation that they are for."""
    events, start_count = history.device.events, history.replay.start_count
    births = np.flatnonzero(events.action == ALLOC)
    reserving = np.flatnonzero((events.action == SEGMENT_ALLOC) | (events.action == SEGMENT_MAP))
    rows = np.searchsorted(births, reserving) + start_count
    bases: dict[int, tuple[int, int]] = {}
    for event, row in zip(reserving.tolist(), rows.tolist(), strict=True):
        size = int(events.size_bytes[event]) if events.action[event] == SEGMENT_ALLOC else 0
        bases.setdefault(row, (int(events.address[event]), size))
    return bases


def _find_releases(history: History) -> tuple[Release, ...]:
    """The allocator does it itself when CUDA has no more memory for a request. Then the request's own stack stands at
    the release, and the segment or the failure follows at once.
    """
    events = history.device.events
    is_release = (events.action == SEGMENT_FREE) | (events.action == SEGMENT_UNMAP)
    releases = []
    borders = np.flatnonzero(np.diff(is_release.astype(np.int8), prepend=0, append=0))
    for first, end in zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True):
        pieces = zip(events.address[first:end].tolist(), events.size_bytes[first:end].tolist(), strict=True)
        follows = end < len(events) and events.action[end] in (SEGMENT_ALLOC, SEGMENT_MAP, OOM)
        frames = events.raw[first].get("frames") if first < len(events.raw) else None
        names = [frame.get("name") for frame in frames if isinstance(frame, dict)] if isinstance(frames, list) else []
        is_asked = not follows or not names or _EMPTY_CACHE in names
        releases.append(Release(float(first), tuple(pieces), is_asked))
    return tuple(releases)


def _find_kinds(history: History) -> tuple[tuple[Kind, ...], Ints, tuple[Region, ...]]:
    """An allocation has the pool and the stream of the segment that it lies in."""
    device, replay = history.device, history.replay
    events = device.events
    ranges = find_expandable_ranges(device)
    of_event, of_start = _find_pools(device, ranges)
    kinds: dict[Kind, int] = {}
    plain, mapped = find_regions(device, Counter())
    stretches = [(begin, begin + size, False, begin) for begin, size in plain.items()]
    stretches += [(begin, end, True, _around(ranges, begin)[0]) for begin, end in mapped]
    regions = []
    for begin, end, is_expandable, base in sorted(stretches):
        number = kinds.setdefault(of_start(begin), len(kinds))
        is_small = _is_small(history, *_around(ranges, begin)) if is_expandable else end - begin == SMALL_SEGMENT_BYTES
        regions.append(Region(begin, end - begin, number, is_small, is_expandable, base))
    reserved = [(event, int(events.address[event]), kinds.setdefault(kind, len(kinds))) for event, kind in of_event]
    if len(kinds) <= 1:
        return tuple(kinds) or ((DEFAULT_POOL, 0),), np.zeros(len(replay), dtype=np.int64), tuple(regions)
    return tuple(kinds), _walk(history, regions, reserved), tuple(regions)


def _is_small(history: History, begin: int, end: int) -> bool:
    """Return whether an expandable segment serves requests of up to 1 MiB: those that it served, or the dump, show."""
    segments, replay = history.device.segments, history.replay
    served = np.flatnonzero((replay.address >= begin) & (replay.address < end))
    if len(served):
        return bool(replay.size_bytes[served[0]] <= SMALL_BYTES)
    inside = np.flatnonzero((segments.address >= begin) & (segments.address < end))
    return not segments.is_large[inside].any() if len(inside) else (end - begin) % LARGE_SEGMENT_BYTES != 0


def _around(ranges: list[tuple[int, int]], address: int) -> tuple[int, int]:
    at = bisect_right(ranges, (address, _FAR)) - 1
    return ranges[at] if at >= 0 and address < ranges[at][1] else (address, address)


def _find_pools(device: Device, ranges: list[tuple[int, int]]) -> tuple[list[tuple[int, Kind]], Callable[[int], Kind]]:
    """Return the kind of each segment or page that was reserved, and a function for what was there before.

    Torch 2.13 and later write the pool into the event. Before, it is known for what was there at the dump alone, and
    the rest counts as of the default pool. All pages of an expandable segment (``ranges``) are of one kind.
    """
    events, segments = device.events, device.segments

    def begin_of(address: int) -> int:
        return _around(ranges, address)[0]

    places = zip(segments.pool, segments.stream.tolist(), strict=True)
    known: dict[int, Kind] = dict(zip(map(begin_of, segments.address.tolist()), places, strict=True))
    where = np.flatnonzero((events.action >= SEGMENT_ALLOC) & (events.action <= SEGMENT_UNMAP))[::-1].tolist()
    pools = {event: read_pool(events.raw[event].get("pool_id")) if event < len(events.raw) else None for event in where}
    for event in where:
        pool, begin = pools[event], begin_of(int(events.address[event]))
        if events.action[event] in (SEGMENT_MAP, SEGMENT_UNMAP) and (pool or begin not in known):
            known[begin] = (pool or DEFAULT_POOL, int(events.stream[event]))
    reserved = []
    for event in where:
        begin, stream = begin_of(int(events.address[event])), int(events.stream[event])
        if events.action[event] == SEGMENT_FREE:
            known[begin] = (pools[event] or DEFAULT_POOL, stream)
        elif events.action[event] == SEGMENT_ALLOC:
            reserved.append((event, (pools[event] or known.pop(begin, (DEFAULT_POOL, stream))[0], stream)))
        elif events.action[event] == SEGMENT_MAP:
            reserved.append((event, known[begin]))
    return reserved[::-1], lambda address: known.get(begin_of(address), (DEFAULT_POOL, 0))


def _walk(history: History, regions: list[Region], reserved: list[tuple[int, int, int]]) -> Ints:
    """Return the kind of the segment that each row lies in; ``reserved`` are the later events: number, base, kind."""
    replay = history.replay
    kind_at = {region.address: region.kind for region in regions}
    bases, kinds, at = sorted(kind_at), [], 0
    for address, birth in zip(replay.address.tolist(), replay.birth.tolist(), strict=True):
        while at < len(reserved) and reserved[at][0] < birth:
            _, base, kind = reserved[at]
            if base not in kind_at:
                insort(bases, base)
            kind_at[base] = kind
            at += 1
        kinds.append(kind_at[bases[max(bisect_right(bases, address) - 1, 0)]] if bases else 0)
    return np.array(kinds, dtype=np.int64)


SHIFT: int = 64
ADDRESS: int = (1 << SHIFT) - 1
"""A free block is one integer, its size shifted by `SHIFT` and its address."""

SPACE_BYTES = 2**40
"""Addresses that an expandable segment may grow into: more than a GPU has memory."""

_CHUNK_BYTES = 2**25
_TOP = 2**47
_DRAWN = 2**60
"""Drawn bases are above this; recorded addresses are below."""


class Bases:
    """The segments that are reserved, by base."""

    def __init__(self, requests: Requests, is_expandable: bool, draw: int, largest: int) -> None:
        self._requests = requests
        self._is_expandable = is_expandable
        self._draw = draw
        self._dice = Random(draw)
        self._bits = (
            SPACE_BYTES if is_expandable else min(max(largest, LARGE_SEGMENT_BYTES), SPACE_BYTES)
        ).bit_length() + 1
        self._drawn: set[int] = set()
        self._highest = _DRAWN
        recorded = [base for base, size in requests.bases.values() if size]
        recorded += [region.address for region in requests.start if not region.is_expandable]
        self._lowest = min(recorded, default=_TOP) // _CHUNK_BYTES * _CHUNK_BYTES
        self._gaps: list[tuple[int, int]] = []
        self._expected = sorted(requests.bases)
        self._matched = 0
        """How many segments were reserved as recorded, from the first one on; -1 after another one was."""
        self._known: list[int] = []
        """Bases, sorted."""
        self._end: dict[int, int] = {}
        self.proven: set[int] = set()
        """Bases that CUDA would choose again, because up to them it was asked for the same."""
        self.decide = False

    def choose(self, row: int, size: int) -> int:
        """Return the base of a segment that is reserved for a row of the requests."""
        known_row = int(self._requests.row[row])
        base, recorded = self._requests.bases.get(known_row, (-1, -1))
        is_same = recorded == (0 if self._is_expandable else size)
        if self._matched >= 0:
            is_next = self._matched < len(self._expected) and self._expected[self._matched] == known_row
            self._matched = self._matched + 1 if is_same and is_next else -1
        if not is_same or self._draw > 1 or not self._is_vacant(base, size):
            base = self._draw_base(size)
        elif self._matched >= 0 or self._is_expandable:
            self.proven.add(base)
        self.note(base, size, is_proven=base in self.proven)
        return base

    def note(self, base: int, size: int, *, is_proven: bool = True) -> None:
        insort(self._known, base)
        self._end[base] = base + size
        if is_proven:
            self.proven.add(base)

    def note_tie(self, blocks: list[int], at: int) -> None:
        """Note whether the choice between equal free blocks, the first of which is at ``at``, hangs on a base."""
        size, bases = blocks[at] >> SHIFT, set()
        while at < len(blocks) and blocks[at] >> SHIFT == size:
            bases.add(self.base_around(blocks[at] & ADDRESS))
            at += 1
        self.decide = len(bases) > 1 and not bases <= self.proven

    def forget(self, base: int) -> None:
        del self._known[bisect_left(self._known, base)], self._end[base]
        self.proven.discard(base)

    def base_around(self, address: int) -> int:
        """Return the base of the segment that a reserved address lies in; -1 if it is below all."""
        at = bisect_right(self._known, address) - 1
        return self._known[at] if at >= 0 else -1

    def base_after(self, base: int) -> int:
        """Return the next base above one; if there is none, an address above all."""
        at = bisect_right(self._known, base)
        return self._known[at] if at < len(self._known) else 1 << SHIFT - 1

    def _is_vacant(self, base: int, size: int) -> bool:
        at = bisect_right(self._known, base)
        before_ends = at == 0 or self._end[self._known[at - 1]] <= base
        return self._is_expandable or (before_ends and (at == len(self._known) or base + size <= self._known[at]))

    def _draw_base(self, size: int) -> int:
        if self._draw > 1:
            rank = self._dice.randrange(2 ** (62 - self._bits))
            while rank in self._drawn:
                rank = self._dice.randrange(2 ** (62 - self._bits))
            self._drawn.add(rank)
            return _DRAWN + (rank << self._bits)
        if self._draw == 0 and not self._is_expandable and self._lowest > 2 * size:
            return self._draw_as_cuda(size)
        self._highest += size
        return self._highest - size

    def _draw_as_cuda(self, size: int) -> int:
        """Return the lowest gap that is large enough, else the next 32 MiB downwards: what CUDA was seen to do."""
        for at, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[at : at + 1] = [(begin + size, end)] if begin + size < end else []
                return begin
        end = self._lowest
        self._lowest -= -(-size // _CHUNK_BYTES) * _CHUNK_BYTES
        if self._lowest + size < end:
            insort(self._gaps, (self._lowest + size, end))
        return self._lowest
