"""What explains the difference of two peaks: the allocations at each are matched, and the differences summed.

Two allocations match if both runs recorded the same tensor for them, otherwise if the same functions of the same files
asked for them; then by size and position among equal ones of the step. Every allocation at either peak has exactly one
kind, so the parts sum to the difference: ``same``, ``padding`` (another size charged for the same request), ``larger``
and ``smaller`` are at both; ``new`` and ``gone``: the other run never made it; ``longer-lived`` and ``shorter-lived``:
it was not live at the corresponding moment; ``moved peak``: it was, but the other peak lies elsewhere. The
corresponding moment is where the other run made the youngest allocation at the peak that it made at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from profkit.analysis import NotebookResult
from profkit.analysis.memory import read_metadata
from profkit.analysis.memory.categories import Named
from profkit.analysis.memory.device import DeviceMemory

KINDS = ("new", "gone", "larger", "smaller", "longer-lived", "shorter-lived", "moved peak", "padding", "same")

Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Part:
    """What the allocations of one kind from one stack add to the difference; negative if they reduce it.

    ``label`` is the largest one's tensor, out of ``owner_count`` tensors, if all have a name; otherwise the stack's.
    """

    kind: str
    bytes: int
    count: int
    stack: tuple[str, ...]
    label: str
    owner_count: int


@dataclass(frozen=True, repr=False)
class Comparison(NotebookResult, rows="parts", row_type=Part):
    """Two peaks and what makes the difference; ``parts``, the largest first, sum to ``difference_bytes``."""

    before: str
    after: str
    before_peak_bytes: int
    after_peak_bytes: int
    exact: bool
    parts: tuple[Part, ...]

    @property
    def difference_bytes(self) -> int:
        return self.after_peak_bytes - self.before_peak_bytes

    @property
    def by_kind(self) -> dict[str, int]:
        sums: dict[str, int] = dict.fromkeys(KINDS, 0)
        for part in self.parts:
            sums[part.kind] += part.bytes
        present = {part.kind for part in self.parts}
        return {kind: size for kind, size in sums.items() if kind in present}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"difference_bytes": self.difference_bytes, "by_kind": self.by_kind}


class _Side:
    def __init__(self, memory: DeviceMemory, shared: frozenset[Named]) -> None:
        self.memory = memory
        self.shared = shared
        self.replay = memory.history.replay
        self.peak = memory.history.peak_moment
        self.live = memory.live_rows(self.peak)
        self._normalised: dict[int, Key] = {}

    def origin(self, row: int) -> Key:
        number = self.memory.stacks.number_of(row)
        if number not in self._normalised:
            frames = self.memory.stacks.facts[number].but_compiler
            self._normalised[number] = tuple((name, file.rpartition("/")[2]) for name, file, _ in frames)
        is_from_before = int(self.replay.birth[row]) < 0
        return self._normalised[number], read_metadata(self.memory.stacks.raw_of(row)), is_from_before

    def identity(self, row: int) -> Key:
        named = self.memory.classifier.named(row)
        return named if named in self.shared else self.origin(row)

    def size(self, row: int) -> int:
        return int(self.replay.size_bytes[row])

    def is_live(self, row: int, moment: int) -> bool:
        return int(self.replay.birth[row]) < moment <= int(self.replay.freed[row])

    @cached_property
    def rows_by_key(self) -> dict[Key, list[int]]:
        rows_by_key: dict[Key, list[int]] = defaultdict(list)
        for row, requested in enumerate(self.replay.requested_bytes.tolist()):
            rows_by_key[self.identity(row), requested].append(row)
        return rows_by_key

    @cached_property
    def ordinals(self) -> dict[int, int]:
        """Allocation → how many equal ones were made before it in its step."""
        starts = np.array([step.start_us for step in self.memory.timeline.steps], dtype=np.int64)
        times = self.memory.timeline.times_us
        ordinal_of: dict[int, int] = {}
        for rows in self.rows_by_key.values():
            births = self.replay.birth[rows]
            born = times[np.maximum(births, 0)] if len(times) else births
            last, ordinal = None, 0
            for row, step in zip(rows, np.searchsorted(starts, born, "right").tolist(), strict=True):
                ordinal = ordinal + 1 if step == last else 0
                last = step
                ordinal_of[row] = ordinal
        return ordinal_of

    def matches_of(self, other: _Side, row: int) -> list[int]:
        return self.rows_by_key.get((other.identity(row), int(other.replay.requested_bytes[row])), [])


_Share = tuple[int, _Side, int]
"""The bytes that an allocation adds to the difference, its side, and its row there."""


def compare_peaks(before: DeviceMemory, after: DeviceMemory, names: tuple[str, str]) -> Comparison:
    shared = _names(before) & _names(after)
    old, new = _Side(before, shared), _Side(after, shared)
    pairs, only_old, only_new = _pair(old, new)
    groups: dict[tuple[str, Key], list[_Share]] = defaultdict(list)
    for kind, size, side, row in (
        *((_kind_of_pair(old, a, new, b), new.size(b) - old.size(a), new, b) for a, b in pairs),
        *((kind, new.size(row), new, row) for kind, row in _judge(new, only_new, old, ("new", "longer-lived"))),
        *((kind, -old.size(row), old, row) for kind, row in _judge(old, only_old, new, ("gone", "shorter-lived"))),
    ):
        groups[kind, side.origin(row)].append((size, side, row))
    parts = [_sum_up(kind, shares) for (kind, _), shares in groups.items()]
    parts.sort(key=lambda part: (-abs(part.bytes), KINDS.index(part.kind), part.label))
    exact = before.history.bounds is None and after.history.bounds is None
    return Comparison(
        before=names[0],
        after=names[1],
        before_peak_bytes=before.history.allocated_peak_bytes,
        after_peak_bytes=after.history.allocated_peak_bytes,
        exact=exact,
        parts=tuple(parts),
    )


def _names(memory: DeviceMemory) -> frozenset[Named]:
    named = map(memory.classifier.named, range(len(memory.history.replay)))
    return frozenset(name for name in named if name is not None)


def _sum_up(kind: str, shares: list[_Share]) -> Part:
    _, side, row = shares[-1]
    stack = side.memory.stacks.facts_of(row)
    owners: dict[str | None, int] = defaultdict(int)
    for size, side, row in shares:
        owners[side.memory.owner_of(row, side.peak)] += abs(size)
    names = sorted((-size, name) for name, size in owners.items() if name is not None)
    is_owned = len(names) == len(owners)
    return Part(
        kind=kind,
        bytes=sum(size for size, _, _ in shares),
        count=len(shares),
        stack=stack.user_first,
        label=names[0][1] if is_owned else stack.label,
        owner_count=len(names) if is_owned else 0,
    )


def _kind_of_pair(old: _Side, a: int, new: _Side, b: int) -> str:
    difference = int(new.replay.requested_bytes[b]) - int(old.replay.requested_bytes[a])
    if difference:
        return "larger" if difference > 0 else "smaller"
    return "same" if new.size(b) == old.size(a) else "padding"


def _pair(old: _Side, new: _Side) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    pairs: list[tuple[int, int]] = []
    left, right = list(old.live), list(new.live)
    left_made: list[int] = []
    right_made: list[int] = []
    for depth in (3, 2, 1):
        waiting: dict[Key, list[int]] = defaultdict(list)
        for row in left:
            waiting[_key(old, row, depth)].append(row)
        for queue in waiting.values():
            queue.sort(key=lambda row: (old.ordinals[row], row), reverse=True)
        unmatched = []
        for row in sorted(right, key=lambda row: (new.ordinals[row], row)):
            queue = waiting.get(_key(new, row, depth), [])
            if queue:
                pairs.append((queue.pop(), row))
            else:
                unmatched.append(row)
        left, right = [row for queue in waiting.values() for row in queue], unmatched
        if depth == 2:  # the other run made the rest too, in the same size, but not at its peak: not another size
            left_made, left = _split(left, lambda row: bool(new.matches_of(old, row)))
            right_made, right = _split(right, lambda row: bool(old.matches_of(new, row)))
    return pairs, left + left_made, right + right_made


def _key(side: _Side, row: int, depth: int) -> Key:
    return (side.identity(row), int(side.replay.requested_bytes[row]), side.ordinals[row])[:depth]


def _split(rows: list[int], is_first: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    return [row for row in rows if is_first(row)], [row for row in rows if not is_first(row)]


def _judge(side: _Side, rows: list[int], other: _Side, kinds: tuple[str, str]) -> list[tuple[str, int]]:
    never, lives_otherwise = kinds
    moment = _corresponding(side, other)
    judged = []
    for row in rows:
        matches = other.matches_of(side, row)
        if not matches:
            judged.append((never, row))
        elif any(other.is_live(match, moment) for match in matches):
            judged.append(("moved peak", row))
        else:
            judged.append((lives_otherwise, row))
    return judged


def _corresponding(side: _Side, other: _Side) -> int:
    peak_step = other.memory.timeline.step_at(other.peak - 1)
    for row in sorted(side.live, key=lambda row: -int(side.replay.birth[row])):
        for match in other.matches_of(side, row):
            birth = int(other.replay.birth[match])
            if other.memory.timeline.step_at(birth) == peak_step and other.ordinals[match] == side.ordinals[row]:
                return birth + 1
    return other.peak
