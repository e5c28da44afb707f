"""What goes wrong with memory: what keeps growing, and an allocation that failed.

**Leaks**: what was allocated in one step and is still there when the next one ends. State that is made on first use
grows once, and a window of the last results until it is full: a leak goes on. So a stack is suspected if at the ends of
`_RISES` steps or more it had more allocations than ever before, of which something is still there, and if the last rise
is about as many steps ago as rises are apart.

**Out of memory**: why the allocation failed, and by how many bytes. Before it gives up, the allocator has released
every cached segment without a live block and has asked CUDA for a new one. So CUDA had less free than the segment that
was wanted (or the process has a limit of its own), and PyTorch's unused memory lies in segments with live blocks, in
pieces too small, or in another pool or on another stream.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from profkit.allocator import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    format_settings,
    list_variants,
    segment_size_bytes,
)
from profkit.allocator.recorded_heap import find_regions
from profkit.allocator.replay import History
from profkit.analysis.memory.device import DeviceMemory
from profkit.analysis.memory.stacks import StackFacts, sum_by_stack
from profkit.snapshot.columns import ALLOCATED, INACTIVE, OOM, PENDING, SEGMENT_ALLOC, SEGMENT_UNMAP, Ints, Settings

_RISES = 3


@dataclass(frozen=True)
class LeakRow:
    bytes: int
    count: int
    stack: tuple[str, ...]
    label: str
    every: int = 1
    """Of a suspect: in every how many steps it leaves something behind."""


@dataclass(frozen=True)
class LeftBehind:
    """Bytes that began in the step ``began_in`` and are still there at the end of the next, ``step``."""

    step: str
    began_in: str
    bytes: int
    by_stack: tuple[LeakRow, ...]


@dataclass(frozen=True)
class LeakCheck:
    """All steps that can be judged, and the stacks suspected of leaking."""

    steps: tuple[LeftBehind, ...]
    suspects: tuple[LeakRow, ...]
    """What the stacks that keep growing left behind when they last did."""

    @property
    def suspect_bytes(self) -> int:
        return sum(row.bytes for row in self.suspects)


def check_leaks(memory: DeviceMemory) -> LeakCheck:
    """Return what each step left behind; nothing where the history has fewer than two steps."""
    replay, timeline = memory.history.replay, memory.timeline
    steps = timeline.steps
    if len(steps) < 2 or not len(replay):
        return LeakCheck((), ())
    starts = np.array([step.start_us for step in steps], dtype=np.int64)
    # Rows are sorted by birth, so each step's are together.
    births = timeline.times_us[replay.birth[replay.start_count :]]
    firsts = (np.searchsorted(births, starts, "left") + replay.start_count).tolist()
    left_behind = []
    for number in range(1, len(steps)):
        moment = timeline.moment_at(steps[number].end_us)
        first, end = firsts[number - 1], firsts[number]
        rows = np.flatnonzero(replay.freed[first:end] >= moment) + first
        sums = sum_by_stack(map(memory.stacks.facts_of, rows.tolist()), replay.size_bytes[rows].tolist())
        by_stack = [LeakRow(size, count, stack.user_first, stack.label) for stack, size, count in sums]
        by_stack.sort(key=lambda leak: (-leak.bytes, leak.label))
        total = int(replay.size_bytes[rows].sum())
        left_behind.append(LeftBehind(steps[number].name, steps[number - 1].name, total, tuple(by_stack)))
    ends = [timeline.moments_of(step)[0] for step in steps[1:]] + [timeline.moment_at(steps[-1].end_us)]
    moments = np.array(ends, dtype=np.int64)
    return LeakCheck(tuple(left_behind), _find_suspects(memory, moments, np.array([*firsts, len(replay)])))


def _find_suspects(memory: DeviceMemory, moments: Ints, firsts: Ints) -> tuple[LeakRow, ...]:
    """``moments`` are where the next step begins, for the last step where it ends; ``firsts`` are the first row of each
    step and the number of rows.
    """
    replay = memory.history.replay
    rows = np.arange(firsts[0], firsts[-1])
    births = np.searchsorted(firsts, rows, "right") - 1
    stays = (replay.freed[rows] >= moments[births]) & (replay.birth[rows] < moments[births])
    by_number: defaultdict[int, list[int]] = defaultdict(list)
    for row in rows[stays].tolist():
        by_number[memory.stacks.number_of(row)].append(row)
    by_stack: defaultdict[tuple[object, bool], list[int]] = defaultdict(list)
    for number, of_stack in by_number.items():
        facts = memory.stacks.facts[number]
        by_stack[facts.shown, facts.is_compiled] += of_stack
    judged = [_judge(memory, np.array(sorted(some)), moments, firsts) for some in by_stack.values()]
    return tuple(sorted((leak for leak in judged if leak), key=lambda leak: (-leak.bytes, leak.label)))


def _judge(memory: DeviceMemory, rows: Ints, moments: Ints, firsts: Ints) -> LeakRow | None:
    replay = memory.history.replay
    kept = rows[replay.freed[rows] >= moments[-1]]
    births = np.searchsorted(firsts, kept, "right") - 1
    if len(set(births.tolist())) < _RISES:
        return None
    # The stacks of blocks from before the history are unknown: any of the same size may belong to the same window.
    before = np.flatnonzero(np.isin(replay.requested_bytes[: replay.start_count], replay.requested_bytes[kept]))
    all_rows = np.concatenate([before, rows])
    alive = (replay.birth[all_rows] < moments[:, None]) & (replay.freed[all_rows] >= moments[:, None])
    counts = alive.sum(axis=1)
    rises = np.flatnonzero(np.diff(np.maximum.accumulate(counts), prepend=0) > 0)
    gaps = np.diff(rises)
    # One step more, because what the program does after the last step's end is not counted.
    if len(rises) < _RISES or len(moments) - 1 - rises[-1] > gaps.max():
        return None
    if births.max() > rises[-1] and replay.freed[all_rows].min() >= moments[rises[-1]]:
        return None  # a window that is full since then
    # What began in the last step may be freed in the next.
    last = births[births < len(moments) - 1].max()
    left = kept[births == last]
    stack: StackFacts = memory.stacks.facts_of(int(left[0]))
    size = int(replay.size_bytes[left].sum())
    return LeakRow(size, len(left), stack.user_first, stack.label, round(float(np.median(gaps))))


_CONTEXT_BYTES = 2**30
"""What a CUDA context, its kernels and libraries take at most; more memory outside PyTorch is another program's."""

_PINS_SHOWN = 3


@dataclass(frozen=True)
class Pin:
    """A live block that keeps the segment of a free block from being given back."""

    bytes: int
    owner: str | None
    label: str


@dataclass(frozen=True)
class FreeBlock:
    """The largest free block of one pool and stream, and the live blocks nearest to it in its segment."""

    bytes: int
    pool: str
    stream: int
    is_usable: bool
    """Whether it lies in the pool and on the stream of the request."""
    pinned_by: tuple[Pin, ...]


@dataclass(frozen=True)
class OomVerdict:
    """Why an allocation failed."""

    cause: str
    """``capacity``, ``fragmentation``, ``outside`` or ``outsized``."""
    message: str
    is_limited: bool
    """Whether CUDA had enough free: then the process has a limit of its own (a memory fraction)."""
    count: int
    """How many such errors the history holds; this is the last."""
    time_us: int | None
    requested_bytes: int
    """As rounded by the allocator."""
    needed_bytes: int
    """The new segment that it asked CUDA for."""
    device_free_bytes: int
    short_bytes: int
    """How much more memory it needed. If the process is limited, an upper bound: of its limit only the most that
    it ever reserved is known."""
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    outside_bytes: int | None
    largest_free: tuple[FreeBlock, ...]
    fitting_settings: tuple[str, ...] | None
    """Settings of the allocator, as torch writes them, under which the simulated request fits; None where the
    simulation does not fail under the recorded ones, so that it proves nothing."""


def last_failure(memory: DeviceMemory) -> int | None:
    where = np.flatnonzero(memory.device.events.action == OOM)
    return int(where[-1]) if len(where) else None


def judge_oom(memory: DeviceMemory, capacity_bytes: int | None) -> OomVerdict | None:
    """Return the verdict on the last out-of-memory error of the history; None if there was none."""
    events = memory.device.events
    event = last_failure(memory)
    if event is None:
        return None
    wanted, device_free = int(events.size_bytes[event]), int(events.address[event])
    is_expandable = memory.history.settings.expandable_segments
    needed = wanted if is_expandable else segment_size_bytes(wanted)
    curves = memory.history.curves
    allocated, reserved = int(curves.allocated[event + 1]), int(curves.reserved[event + 1])
    segments = lay_out(memory.history, event + 1) or []
    free = sum(size for segment in segments for _, size, state, _ in segment.blocks if state == INACTIVE)
    outside = None if capacity_bytes is None else max(capacity_bytes - device_free - reserved, 0)
    is_limited = device_free >= needed
    if is_limited:
        short = max(reserved + needed - int(curves.reserved.max()), MIN_BLOCK_BYTES)
        cause = _cause(wanted, short, room=reserved + needed - MIN_BLOCK_BYTES, loose=free, outside=None)
    else:
        short = needed - device_free
        cause = _cause(wanted, short, room=reserved + device_free, loose=free + device_free, outside=outside)
    return OomVerdict(
        cause=cause,
        message=_MESSAGES[cause] + (_LIMITED if is_limited else ""),
        is_limited=is_limited,
        count=int((events.action == OOM).sum()),
        time_us=memory.history.time_us(event + 1),
        requested_bytes=wanted,
        needed_bytes=needed,
        device_free_bytes=device_free,
        short_bytes=short,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        free_bytes=free,
        outside_bytes=outside,
        largest_free=_largest_free(memory, segments, (wanted > SMALL_BYTES, int(events.stream[event]))),
        fitting_settings=_find_fitting_settings(memory, event, is_limited),
    )


def _find_fitting_settings(memory: DeviceMemory, event: int, is_limited: bool) -> tuple[str, ...] | None:
    """PyTorch could have what it had reserved and what CUDA had free. Of a limit of its own only bounds are known: the
    most that it ever reserved, for what fits, and one byte less than it needed, for what does not.
    """
    # Most histories hold no failure, and need no simulator.
    from profkit.allocator.heap import Limit
    from profkit.allocator.requests import requests_of
    from profkit.allocator.simulate import check_identity, simulate

    history, events = memory.history, memory.device.events
    wanted, reserved = int(events.size_bytes[event]), history.curves.reserved[: event + 2]
    requests = requests_of(history)
    if requests.start or not check_identity(history, requests).exact:
        return None
    requests = requests.cut_off_at(event).add_last(event, wanted, int(events.stream[event]))
    least = max(int(reserved.max()), 0 if is_limited else int(reserved[-1] + events.address[event]))
    most = int(reserved[-1]) + segment_size_bytes(wanted) - 1 if is_limited else least

    def fails(settings: Settings, capacity: int, draws: int = 1) -> bool:
        limit = Limit(capacity, counts_pages=not is_limited)
        failures = (simulate(requests, settings, draw=draw, limit=limit).failed for draw in range(draws))
        return any(failure is not None for failure in failures)

    if not fails(history.settings, most):
        return None
    variants = list_variants(history.settings)
    fitting = [settings for settings in variants if not fails(settings, least, _DRAWS)]
    if not fitting and not all(fails(settings, most) for settings in variants):
        return None
    return tuple(format_settings(settings) for settings in fitting)


_DRAWS = 3
"""Of the addresses of segments: a setting must let the request through with all of them."""

_MESSAGES = {
    "outsized": "the request is too large: it would not fit even if everything else were freed",
    "fragmentation": "fragmentation: enough memory is free, but in pieces, pools or streams that could not be used",
    "outside": "memory outside PyTorch: without it the request would have fitted",
    "capacity": "capacity: the live allocations and the request do not fit together",
}

_LIMITED = "; CUDA had more free, so the process has a limit of its own (a memory fraction)"


def _cause(wanted: int, short: int, *, room: int, loose: int, outside: int | None) -> str:
    """Return the cause; ``room`` is the most that the process could have, ``loose`` the part of it that was free."""
    if wanted > room:
        return "outsized"
    if loose >= wanted:
        return "fragmentation"
    if outside is not None and outside - _CONTEXT_BYTES >= short:
        return "outside"
    return "capacity"


def _largest_free(memory: DeviceMemory, segments: list[Segment], own: tuple[bool, int]) -> tuple[FreeBlock, ...]:
    begins, streams = _streams(memory.history)
    largest: dict[tuple[bool, int], tuple[int, Segment, int]] = {}
    for segment in segments:
        stream = streams[max(bisect_right(begins, segment.begin) - 1, 0)] if streams else 0
        key = segment.is_large, stream
        for at, (_, size, state, _) in enumerate(segment.blocks):
            if state == INACTIVE and (key not in largest or size > largest[key][0]):
                largest[key] = size, segment, at
    ordered = sorted(largest.items(), key=lambda item: (item[0] != own, -item[1][0]))
    return tuple(
        FreeBlock(size, "large" if key[0] else "small", key[1], key == own, tuple(_pins(memory, segment, at)))
        for key, (size, segment, at) in ordered
    )


def _pins(memory: DeviceMemory, segment: Segment, at: int) -> Iterator[Pin]:
    begin, size, *_ = segment.blocks[at]
    reach = 2 * _PINS_SHOWN  # no two free blocks lie next to each other
    around = [*segment.blocks[max(at - reach, 0) : at], *segment.blocks[at + 1 : at + 1 + reach]]
    live = [block for block in around if block[3] >= 0]
    live.sort(key=lambda block: min(abs(block[0] - begin - size), abs(begin - block[0])))
    for *_, row in live[:_PINS_SHOWN]:
        size_bytes = int(memory.history.replay.size_bytes[row])
        yield Pin(size_bytes, memory.owner_of(row), memory.stacks.facts_of(row).label)


@dataclass(frozen=True)
class Segment:
    """One segment at a moment: where it lies, and its blocks by address, which fill it without a gap.

    A block is its address, its bytes, its state, and its allocation, a row of the replay; -1 for free memory, and where
    none is known. Pages of an expandable segment that lie next to each other count as one segment.
    """

    begin: int
    end: int
    is_expandable: bool
    blocks: tuple[tuple[int, int, int, int], ...]

    @property
    def is_large(self) -> bool:
        is_small_segment = self.end - self.begin == SMALL_SEGMENT_BYTES and not self.is_expandable
        sizes = [size for _, size, _, row in self.blocks if row >= 0]
        return not is_small_segment and (not sizes or max(sizes) > SMALL_BYTES)


def lay_out(history: History, moment: int) -> list[Segment] | None:
    """Return how memory lay at a moment on the curves; None if the recorded blocks do not fit into the segments."""
    replay = history.replay
    rows = np.flatnonzero((replay.birth < moment) & (replay.completed >= moment))
    rows = rows[np.argsort(replay.address[rows], kind="stable")]
    states = np.where(replay.freed[rows] >= moment, ALLOCATED, PENDING)
    columns = replay.address[rows], replay.size_bytes[rows], states, rows
    used = list(zip(*(column.tolist() for column in columns), strict=True))
    plain, mapped = find_regions(history.device, Counter(), moment)
    regions = sorted(
        [(begin, begin + length, False) for begin, length in plain.items()] + [(*stretch, True) for stretch in mapped]
    )
    segments = []
    covered = 0
    for begin, end, is_expandable in regions:
        first, last = (bisect_left(used, (edge,)) for edge in (begin, end))
        covered += last - first
        blocks, at = [], begin
        for block in used[first:last]:
            if block[0] < at or sum(block[:2]) > end:
                return None
            blocks += [(at, block[0] - at, INACTIVE, -1)] if at < block[0] else []
            blocks.append(block)
            at = sum(block[:2])
        blocks += [(at, end - at, INACTIVE, -1)] if at < end else []
        segments.append(Segment(begin, end, is_expandable, tuple(blocks)))
    return segments if covered == len(used) else None


def _streams(history: History) -> tuple[list[int], list[int]]:
    events, segments = history.device.events, history.device.segments
    where = (events.action >= SEGMENT_ALLOC) & (events.action <= SEGMENT_UNMAP)
    known = dict(zip(events.address[where].tolist(), events.stream[where].tolist(), strict=True))
    known |= dict(zip(segments.address.tolist(), segments.stream.tolist(), strict=True))
    return sorted(known), [known[address] for address in sorted(known)]
