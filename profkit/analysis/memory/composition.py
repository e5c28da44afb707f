"""What one device's memory was made of at a moment: by category, stack, module and phase, the largest, the unused.

The parts add up: the categories sum to what was allocated at the moment, and so do the stacks, the phases, and the
modules at the top of their tree. Sizes are what the allocator charged, with the bytes lost to rounding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import compress

from profkit.allocator.layout import lay_out, sum_releasable
from profkit.allocator.replay import History
from profkit.analysis.memory.categories import CATEGORIES, EVIDENCE
from profkit.analysis.memory.device import DeviceMemory, Filter
from profkit.analysis.memory.places import (
    BEFORE_RECORDING,
    IN_NO_PHASE,
    PartRow,
    Piece,
    sum_by_module,
    sum_by_phase,
)
from profkit.analysis.memory.stacks import sum_by_stack
from profkit.names import kind_of
from profkit.snapshot.columns import INACTIVE

NOT_SELECTED = "(not selected)"

LARGEST_COUNT = 10


@dataclass(frozen=True)
class CategoryRow:
    """Bytes of one category; ``evidence`` splits them by how the category is known."""

    category: str
    bytes: int
    share: float
    count: int
    evidence: dict[str, int]


@dataclass(frozen=True)
class StackRow:
    """Bytes that one stack asked for."""

    bytes: int
    share: float
    count: int
    stack: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class LargeRow:
    """One allocation."""

    bytes: int
    requested_bytes: int
    category: str
    phase: str | None
    owner: str | None
    stack: tuple[str, ...]
    label: str
    is_from_before: bool
    count: int = 1
    """How many equal allocations this row stands for: of one size, purpose, phase, owner and stack."""


@dataclass(frozen=True)
class Composition:
    """What was allocated at one moment."""

    what: str
    """``peak``, ``phase:backward``, or the time that was asked for."""
    moment: int
    time_us: int | None
    phase: str | None
    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int
    by_category: tuple[CategoryRow, ...]
    by_stack: tuple[StackRow, ...]
    by_module: tuple[PartRow, ...]
    """The tree of modules, depth first; next to it what is in no module."""
    by_phase: tuple[PartRow, ...]
    largest: tuple[LargeRow, ...]
    largest_groups: tuple[LargeRow, ...]
    """The largest allocations, equal ones as one row."""
    evidence: dict[str, int]


@dataclass(frozen=True)
class Fragmentation:
    """Reserved memory that is not allocated, at one moment; the ``end_`` figures describe the dump."""

    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int
    """Freed by the program, still used by another stream."""
    free_bytes: int
    free_share: float
    """Of the reserved bytes."""
    padding_bytes: int
    """Allocated beyond what was requested: rounding, and rests too small to split off. Shown as lost to rounding."""
    free_blocks: int | None
    """In how many pieces the free bytes were; this and the next two are None where the history contradicts itself."""
    largest_free_bytes: int | None
    releasable_bytes: int | None
    end_free_bytes: int
    end_free_blocks: int
    end_largest_free_bytes: int
    end_releasable_bytes: int
    """What ``empty_cache()`` would give back: segments without a live block (for expandable ones, an estimate)."""


def compose(memory: DeviceMemory, what: str, moment: int, wanted: Filter | None = None) -> Composition:
    """Return what was allocated at a moment on the curves; ``what`` is the moment as the user named it."""
    curves, replay = memory.history.curves, memory.history.replay
    live = memory.live_rows(moment)
    rows = list(compress(live, memory.selects(live, wanted or Filter())))
    total = int(curves.allocated[moment])
    rest_bytes, rest_count = total - int(replay.size_bytes[rows].sum()), len(live) - len(rows)
    rest_share = _share(rest_bytes, total)
    pieces = [piece_of(memory, row, moment) for row in rows]
    by_category, by_stack = _by_category(pieces, total), _by_stack(memory, moment, rows, total)
    by_module, by_phase = sum_by_module(pieces, total, memory.places.modules), sum_by_phase(pieces, total)
    if rest_count:
        by_category.append(CategoryRow(NOT_SELECTED, rest_bytes, rest_share, rest_count, {}))
        by_stack.append(StackRow(rest_bytes, rest_share, rest_count, (), NOT_SELECTED))
        other = PartRow(NOT_SELECTED, (NOT_SELECTED,), rest_bytes, rest_share, rest_count, rest_bytes, {}, {})
        by_module, by_phase = (*by_module, other), (*by_phase, other)
    ordered = sorted(rows, key=lambda row: (-int(replay.size_bytes[row]), row))
    return Composition(
        what=what,
        moment=moment,
        time_us=memory.history.time_us(moment),
        phase=memory.timeline.phase_at(moment - 1),
        allocated_bytes=total,
        requested_bytes=int(replay.requested_bytes[live].sum()),
        reserved_bytes=int(curves.reserved[moment]),
        by_category=tuple(by_category),
        by_stack=tuple(by_stack),
        by_module=by_module,
        by_phase=by_phase,
        largest=tuple(_large_row(memory, moment, row) for row in ordered[:LARGEST_COUNT]),
        largest_groups=_largest_groups(memory, moment, ordered),
        evidence={kind: sum(row.evidence.get(kind, 0) for row in by_category) for kind in EVIDENCE},
    )


def _by_category(pieces: list[Piece], total: int) -> list[CategoryRow]:
    sizes, counts = defaultdict[str, Counter[str]](Counter), Counter[str]()
    for piece in pieces:
        sizes[piece.category][piece.evidence] += piece.bytes
        counts[piece.category] += 1
    rows = [
        CategoryRow(
            category,
            by_evidence.total(),
            _share(by_evidence.total(), total),
            counts[category],
            {kind: by_evidence[kind] for kind in EVIDENCE if kind in by_evidence},
        )
        for category, by_evidence in sizes.items()
    ]
    return sorted(rows, key=lambda row: (-row.bytes, CATEGORIES.index(row.category)))


def _by_stack(memory: DeviceMemory, moment: int, rows: list[int], total: int) -> list[StackRow]:
    stacks = (memory.stack_of(row, moment) for row in rows)
    sums = sum_by_stack(stacks, memory.history.replay.size_bytes[rows].tolist())
    by_stack = [
        StackRow(size, _share(size, total), count, stack.user_first, stack.label) for stack, size, count in sums
    ]
    return sorted(by_stack, key=lambda row: (-row.bytes, row.label))


def piece_of(memory: DeviceMemory, row: int, moment: int) -> Piece:
    """Return an allocation (a row of the replay) with its category, its phase and its module at a moment."""
    claim = memory.classifier.claim_of(row)
    size, place = int(memory.history.replay.size_bytes[row]), memory.place_of(row, moment)
    return Piece(size, claim.category, place, _phase_of(memory, row), claim.evidence)


def _phase_of(memory: DeviceMemory, row: int) -> str:
    """Return the phase in which an allocation was made, or in brackets what is known where there was none."""
    birth = int(memory.history.replay.birth[row])
    if birth < 0:
        return BEFORE_RECORDING
    gap = memory.timeline.gap_at(birth)
    return memory.places.phase_of(row) or (IN_NO_PHASE if gap is None else f"({gap})")


def _largest_groups(memory: DeviceMemory, moment: int, ordered: list[int]) -> tuple[LargeRow, ...]:
    """Return the largest allocations with equal ones as one row; ``ordered`` are all, the largest first.

    Owners that differ only in a number are equal: ``h.*.mlp.weight`` for ``h.0.mlp.weight`` and ``h.1.mlp.weight``.
    """
    groups: dict[LargeRow, list[LargeRow]] = {}
    for row in ordered:
        large = _large_row(memory, moment, row)
        if len(groups) >= LARGEST_COUNT and large.bytes < next(reversed(groups)).bytes:
            break
        kind = replace(large, owner=None if large.owner is None else kind_of(large.owner))
        groups.setdefault(kind, []).append(large)
    rows = [
        replace(kind if len({large.owner for large in some}) > 1 else some[0], count=len(some))
        for kind, some in groups.items()
    ]
    return tuple(sorted(rows, key=lambda large: (-large.bytes, -large.count))[:LARGEST_COUNT])


def _large_row(memory: DeviceMemory, moment: int, row: int) -> LargeRow:
    replay, stack = memory.history.replay, memory.stack_of(row, moment)
    return LargeRow(
        bytes=int(replay.size_bytes[row]),
        requested_bytes=int(replay.requested_bytes[row]),
        category=memory.classifier.claim_of(row).category,
        phase=memory.places.phase_of(row),
        owner=memory.owner_of(row, moment),
        stack=stack.user_first,
        label=stack.label,
        is_from_before=bool(replay.birth[row] < 0),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def measure_fragmentation(history: History, moment: int) -> Fragmentation:
    """Return what was reserved and not allocated at a moment on the curves."""
    replay, curves, blocks, segments = history.replay, history.curves, history.device.blocks, history.device.segments
    is_live = (replay.birth < moment) & (replay.freed >= moment)
    is_pending = (replay.freed < moment) & (replay.completed >= moment)
    allocated, reserved = int(curves.allocated[moment]), int(curves.reserved[moment])
    pending = int(replay.size_bytes[is_pending].sum())
    # Less than nothing only where the replay contradicts itself, which `History.contradictions` says.
    free = max(reserved - allocated - pending, 0)
    is_free = blocks.state == INACTIVE
    free_bytes, segment = blocks.size_bytes[is_free], blocks.segment[is_free]
    layout = lay_out(history, moment)
    return Fragmentation(
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        pending_bytes=pending,
        free_bytes=free,
        free_share=free / reserved if reserved else 0.0,
        padding_bytes=max(allocated - int(replay.requested_bytes[is_live].sum()), 0),
        free_blocks=None if layout is None else len(layout.free_blocks),
        largest_free_bytes=None if layout is None else int(layout.free_blocks.max(initial=0)),
        releasable_bytes=None if layout is None else layout.releasable_bytes,
        end_free_bytes=int(free_bytes.sum()),
        end_free_blocks=len(free_bytes),
        end_largest_free_bytes=int(free_bytes.max(initial=0)),
        end_releasable_bytes=sum_releasable(free_bytes, segment, segments.size_bytes, segments.is_expandable),
    )
