"""Allocations and frees in the order of eager execution, recorded without a GPU.

A `Block` is a tensor's memory. It dies with its last holder: the Python variable or C++ frame that it was made for (one
holder from birth), and each node of autograd's graph that saved it. Sizes are products of named lengths, as requested,
before the allocator rounds them: b batch, t context, d width, f inner width, h heads, v vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
GRADIENTS = "gradients"
AUTOCAST_COPIES = "autocast copies"

STREAM = "b t d"
INNER = "b t f"
SCORES = "b h t t"
ROWS = "b h t"
POSITIONS = "b t"
LOGITS = "b t v"
SQUARE = "d d"
WIDE = "d f"
VOCABULARY = "v d"
HALF_STREAM = "b t d /2"

INDEX_BYTES = 8


@dataclass(eq=False)
class Block:
    """One tensor's memory: ``shape`` names its lengths, such as ``b t d``; each element takes ``width_bytes``."""

    category: str
    name: str
    shape: str
    width_bytes: int
    bytes: int
    holders: int = 1
    is_saved: bool = False


@dataclass(frozen=True)
class Line:
    """Blocks of one category, name and size together."""

    category: str
    name: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Peak:
    """The highest requested bytes in a phase, and what was alive then."""

    phase: str
    bytes: int
    lines: tuple[Line, ...]


class Tape:
    """The allocations and frees, phase by phase.

    ``keeps_graph`` is False under ``torch.no_grad``, and inside a checkpoint: then nothing is saved.
    """

    def __init__(self, lengths: Mapping[str, int], *, keeps_graph: bool) -> None:
        self._lengths = lengths
        self.keeps_graph = keeps_graph
        self.phases: list[tuple[str, int]] = []
        self.events: list[tuple[int, Block]] = []
        """(+1 or -1, block)"""

    def begin(self, phase: str) -> None:
        """Events from now on belong to this phase."""
        self.phases.append((phase, len(self.events)))

    def new(self, name: str, shape: str, width_bytes: int, category: str = TEMPORARIES) -> Block:
        """Allocate; ``shape`` may hold lengths by name and numbers, and divisors such as ``/2``."""
        block = Block(category, name, shape, width_bytes, self._size(shape) * width_bytes)
        self.events.append((1, block))
        return block

    def new_copy(self, name: str, shape: str, width_bytes: int) -> tuple[Block, ...]:
        """Allocate a copy in another order; with a batch of one the data has that order already."""
        return (self.new(name, shape, width_bytes),) if self._lengths["b"] > 1 else ()

    def save(self, *blocks: Block) -> None:
        """Let a node of autograd's graph hold these until its backward has run; temporaries become activations."""
        if self.keeps_graph:
            for block in blocks:
                block.holders += 1
                block.is_saved = True
                if block.category == TEMPORARIES:
                    block.category = ACTIVATIONS

    def drop(self, *blocks: Block) -> None:
        """Take one holder from each block, and free those without any left."""
        for block in blocks:
            block.holders -= 1
            if block.holders == 0:
                self.events.append((-1, block))

    def live(self) -> list[Block]:
        """Return the blocks that are allocated now."""
        live: dict[Block, None] = {}
        self._run(live, 0, len(self.events))
        return list(live)

    def peaks(self) -> tuple[Peak, ...]:
        """Return the peak of each phase, in the order of the phases."""
        ends = [start for _, start in self.phases[1:]] + [len(self.events)]
        live: dict[Block, None] = {}
        self._run(live, 0, self.phases[0][1])
        found = []
        for (phase, start), end in zip(self.phases, ends, strict=True):
            top = self._top(start, end)
            self._run(live, start, top)
            found.append(Peak(phase, sum(block.bytes for block in live), group(live)))
            self._run(live, top, end)
        return tuple(found)

    def _top(self, start: int, end: int) -> int:
        """Return the event after which the sum is highest for the first time."""
        now = highest = 0
        top = start
        for place in range(start, end):
            sign, block = self.events[place]
            now += sign * block.bytes
            if now > highest:
                highest, top = now, place + 1
        return top

    def _run(self, live: dict[Block, None], start: int, end: int) -> None:
        for sign, block in self.events[start:end]:
            if sign > 0:
                live[block] = None
            else:
                del live[block]

    def _size(self, shape: str) -> int:
        factors = [part for part in shape.split() if not part.startswith("/")]
        product = prod(self._lengths[part] if part in self._lengths else int(part) for part in factors)
        for part in shape.split():
            if part.startswith("/"):
                product //= int(part[1:])
        return product


def group(blocks: Iterable[Block]) -> tuple[Line, ...]:
    """Return the blocks grouped by category, name and size, the largest first."""
    found = Counter((block.category, block.name, block.bytes) for block in blocks)
    lines = [Line(category, name, size * count, count) for (category, name, size), count in found.items()]
    return tuple(sorted(lines, key=lambda line: (-line.bytes, line.category, line.name)))
