"""What an edited program's peak is made of, next to the recorded one: by category, by module, and where it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from profkit.allocator.simulate import Simulation
from profkit.analysis.memory.places import Path, Piece, fold, sum_by_module
from profkit.analysis.tree.range_tree import RangesResult
from profkit.analysis.whatif.stream import Applied, Program, Stream
from profkit.names import BACKWARD

FAILED_REQUEST = "(the request that failed)"

Cost = Callable[[Sequence[str]], int | None]
"""Returns the kernel time in nanoseconds that some ranges take in a step's forward pass; None if it is not known."""


def cost_of_ranges(tree: RangesResult) -> Cost:
    """Return what tells the kernel time per step of some ranges in the forward pass, from a trace's tree of ranges."""

    def cost(names: Sequence[str]) -> int | None:
        wanted = set(names)
        rows = [row for row in tree.ranges if row.name in wanted and BACKWARD not in row.path.split("/")]
        if not rows or not tree.steps:
            return None
        return sum(row.kernel_time_ns for row in rows) // tree.steps

    return cost


@dataclass(frozen=True)
class PartChange:
    """A category, or a module with the modules in it: its bytes at the recorded peak and at the edited one."""

    name: str
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class EditedPeak:
    """The edits, and what the peak is made of after them; sizes are what the allocator charges."""

    edits: tuple[Applied, ...]
    place: str | None
    """What asks for the memory at the peak: the module and the line."""
    added_kernel_ns: int | None
    """The kernels that checkpoints run again in a step; None if there are none, or if it is not known.

    A step becomes longer by at least this: Python prepares the kernels again, too.
    """
    by_category: tuple[PartChange, ...] = ()
    by_module: tuple[PartChange, ...] = ()


def take_apart(
    program: Program, stream: Stream, applied: tuple[Applied, ...], simulation: Simulation | None, cost: Cost | None
) -> EditedPeak:
    """Return what the peak of an edited stream is made of; without a simulation only what the edits rest on."""
    ranges = [name for edit in applied for name in edit.recomputed]
    added = cost(ranges) if cost and ranges else None
    if simulation is None:
        return EditedPeak(applied, None, added)
    memory, position = program.memory, simulation.peak_position
    before = memory.live_rows(memory.history.peak_moment)
    after = np.flatnonzero((stream.requests.born <= position) & (stream.requests.freed > position))
    recorded = list(zip(before, program.replay.size_bytes[before].tolist(), strict=True))
    edited = list(zip(stream.source[after].tolist(), simulation.size_bytes[after].tolist(), strict=True))
    # A request that failed when the program was recorded comes after all others.
    failed = int(simulation.size_bytes[len(stream) :].sum())
    return EditedPeak(
        applied,
        _place(program, stream, position),
        added,
        _join(
            _by_category(program, recorded),
            {**_by_category(program, edited), **({FAILED_REQUEST: failed} if failed else {})},
        ),
        _join(*(_by_module(program, rows) for rows in (recorded, edited))),
    )


def _place(program: Program, stream: Stream, position: float) -> str | None:
    at = np.flatnonzero(stream.requests.born == position)
    if not len(at):
        return None
    row = int(stream.source[at[0]])
    module = next((name for name, _ in program.memory.place_of(row).modules if name), None)
    again = "" if stream.is_recorded[at[0]] else " (computed again)"
    return f"{module + ': ' if module else ''}{program.memory.stacks.of(row).label}{again}"


def _by_category(program: Program, rows: Iterable[tuple[int, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for row, size in rows:
        sums[program.claims[row].category] += size
    return sums


def _by_module(program: Program, rows: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the bytes of each module, those that differ in a number as one."""
    memory = program.memory
    pieces = [
        Piece(size, program.claims[row].category, memory.place_of(row), program.phases[row] or "") for row, size in rows
    ]
    folded = fold(sum_by_module(pieces, sum(size for _, size in rows), memory.places.modules))
    names: dict[Path, int] = {}
    for part in folded:
        names[part.path] = part.bytes
    return {"/".join(path): size for path, size in names.items()}


def _join(before: dict[str, int], after: dict[str, int]) -> tuple[PartChange, ...]:
    names = dict.fromkeys([*before, *after])
    changes = [PartChange(name, before.get(name, 0), after.get(name, 0)) for name in names]
    return tuple(sorted(changes, key=lambda change: -max(change.before_bytes, change.after_bytes)))
