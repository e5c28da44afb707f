"""Where the segments of a simulated allocator begin: at their recorded bases, or at drawn ones.

CUDA chooses the bases. A base is *proven* if up to it CUDA was asked for the same segments as in the recording.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from random import Random

from profkit.allocator.requests import Requests
from profkit.allocator.rules import LARGE_SEGMENT_BYTES

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
        """Add a segment."""
        insort(self._known, base)
        self._end[base] = base + size
        if is_proven:
            self.proven.add(base)

    def note_tie(self, blocks: list[int], at: int) -> None:
        """Note whether the choice between equal free blocks, the first of which is at ``at``, hangs on a base."""
        size, bases = blocks[at] >> SHIFT, set()
        while at < len(blocks) and blocks[at] >> SHIFT == size:
            bases.add(self.of(blocks[at] & ADDRESS))
            at += 1
        self.decide = len(bases) > 1 and not bases <= self.proven

    def forget(self, base: int) -> None:
        """Remove a segment."""
        del self._known[bisect_left(self._known, base)], self._end[base]
        self.proven.discard(base)

    def of(self, address: int) -> int:
        """Return the base of the segment that a reserved address lies in; -1 if it is below all."""
        at = bisect_right(self._known, address) - 1
        return self._known[at] if at >= 0 else -1

    def after(self, base: int) -> int:
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
