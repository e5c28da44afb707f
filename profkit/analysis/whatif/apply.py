"""Apply edits, written as on the command line, to a recorded program's requests, and search for those that make it fit.

What is tried, alone and together: pages for segments (``expandable_segments``), a fused optimizer or one in 8 bits, a
fused loss, gradients set to None, and checkpoints of every or of every second block. If none of these is enough, the
optimizer and the gradients go to the host, whose time nobody knows. Nothing that changes what the model computes in
bf16 is tried. What the peak of an edited program is made of stands next to the recorded one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

import numpy as np

from profkit.allocator.requests import Requests
from profkit.allocator.simulate import Simulation, predict, simulate
from profkit.analysis.memory.places import Piece, fold, sum_by_module
from profkit.analysis.tree.range_tree import RangesResult
from profkit.analysis.whatif import (
    Bound,
    CannotModelError,
    Change,
    Program,
    drop_gradients,
    edit_gradients,
    edit_loss,
    edit_optimizer,
    edit_parameters,
)
from profkit.analysis.whatif.checkpoint import edit_checkpoint, forward_ranges
from profkit.errors import UsageError
from profkit.names import BACKWARD
from profkit.run.edits import parse_edits
from profkit.snapshot.columns import Settings

FAILED_REQUEST = "(the request that failed)"

Cost = Callable[[Sequence[str]], int | None]
"""Returns the kernel time in nanoseconds that some ranges take in a step's forward pass; None if it is not known."""

Fits = Callable[["Rung"], bool | None]
"""Returns whether a program with some edits fits, whatever is not known of them; None if that decides."""


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
class Applied:
    """One edit as it was written, and what is known of it; the fields of its `Change`."""

    text: str
    rests_on: str
    unknown: tuple[str, ...]
    recomputed: tuple[str, ...]


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
    by_category: tuple[PartChange, ...] = ()
    by_module: tuple[PartChange, ...] = ()


def take_apart(
    program: Program, requests: Requests, applied: tuple[Applied, ...], simulation: Simulation | None
) -> EditedPeak:
    """Return what the peak of an edited program is made of; without a simulation only what the edits rest on."""
    if simulation is None:
        return EditedPeak(applied, None)
    memory, position = program.memory, simulation.peak_position
    before = memory.live_rows(memory.history.peak_moment)
    after = np.flatnonzero((requests.born <= position) & (requests.freed > position))
    recorded = list(zip(before, program.replay.size_bytes[before].tolist(), strict=True))
    edited = list(zip(requests.source[after].tolist(), simulation.size_bytes[after].tolist(), strict=True))
    # A request that failed when the program was recorded comes after all others.
    failed = int(simulation.size_bytes[len(requests) :].sum())
    return EditedPeak(
        applied,
        _place(program, requests, position),
        _join(
            _by_category(program, recorded),
            {**_by_category(program, edited), **({FAILED_REQUEST: failed} if failed else {})},
        ),
        _join(*(_by_module(program, rows) for rows in (recorded, edited))),
    )


def _place(program: Program, requests: Requests, position: float) -> str | None:
    at = np.flatnonzero(requests.born == position)
    if not len(at):
        return None
    row = int(requests.source[at[0]])
    module = next((name for name, _ in program.memory.place_of(row).modules if name), None)
    again = "" if requests.is_recorded[at[0]] else " (computed again)"
    return f"{module + ': ' if module else ''}{program.memory.stacks.facts_of(row).label}{again}"


def _by_category(program: Program, rows: Iterable[tuple[int, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for row, size in rows:
        sums[program.claims[row].category] += size
    return sums


def _by_module(program: Program, rows: Sequence[tuple[int, int]]) -> dict[str, int]:
    memory = program.memory
    pieces = [
        Piece(size, program.claims[row].category, memory.place_of(row), program.phases[row] or "") for row, size in rows
    ]
    folded = fold(sum_by_module(pieces, sum(size for _, size in rows), memory.places.modules))
    return {"/".join(part.path): part.bytes for part in folded}


def _join(before: dict[str, int], after: dict[str, int]) -> tuple[PartChange, ...]:
    names = dict.fromkeys([*before, *after])
    changes = [PartChange(name, before.get(name, 0), after.get(name, 0)) for name in names]
    return tuple(sorted(changes, key=lambda change: -max(change.before_bytes, change.after_bytes)))


_EDITS: dict[str, Callable[[Program, Requests, str], Change]] = {
    "optimizer": edit_optimizer,
    "gradients": edit_gradients,
    "parameters": edit_parameters,
    "loss": edit_loss,
    "zero-grad": drop_gradients,
}
_CHECKPOINT = "checkpoint"
MODELLED = (*_EDITS, _CHECKPOINT)
"""Edits whose effect on memory is simulated."""


def apply_edits(
    program: Program,
    texts: Sequence[str],
    *,
    requests: Requests | None = None,
    bound: Bound = "likely",
) -> tuple[Requests, tuple[Applied, ...]]:
    """Return the program's requests after some edits, and what each of them rests on.

    Args:
        texts: edits such as ``optimizer:sgd``; they are applied in the order of `profkit.run.edits.EDITS`.
        requests: what the edits change; by default what was recorded.
        bound: what to take for what is not known of them.
    """
    requests, applied = requests or program.recorded(), []
    for edit in parse_edits(texts):
        name, argument, text = edit.spec.name, edit.argument, edit.text
        if name not in MODELLED:
            raise UsageError(f"{text}: what it does to memory is not known")
        try:
            if name == _CHECKPOINT:
                change = edit_checkpoint(program, requests, argument, bound)
            else:
                change = _EDITS[name](program, requests, argument)
        except CannotModelError as error:
            raise UsageError(f"{text}: {error}") from None
        requests = change.requests
        applied.append(Applied(text, *change[1:]))
    return requests, tuple(applied)


_OPTIMIZERS = ("optimizer:adamw-fused", "optimizer:adamw-8bit", "optimizer:offload")
_OTHERS = ("loss:fused", "zero-grad:none", "gradients:offload")
_UNKNOWN_TIME = ("optimizer:offload", "gradients:offload")
_MOST_PATTERNS = 3
_NUMBERED = re.compile(r"\d+")
_ENDS_IN_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+$")


@dataclass(frozen=True)
class Rung:
    """A set of edits, with the settings of the allocator."""

    edits: tuple[str, ...]
    settings: Settings
    added: float
    """What checkpoints compute again: nanoseconds of kernel time a step, or calls where that is not known."""


def find_fitting(
    program: Program, settings: Settings, capacity_bytes: int, cost: Cost | None, fits: Fits
) -> tuple[Rung, bool]:
    """Return the cheapest set that surely fits, and True; else the cheapest that perhaps fits, else that of the lowest
    reserved peak, and False.
    """
    edited: _Known = {(): program.recorded()}

    def price(rung: Rung) -> tuple[int, float, int]:
        unknown = sum(edit in _UNKNOWN_TIME for edit in rung.edits)
        return unknown, rung.added, len(rung.edits) + (rung.settings != settings)

    perhaps: Rung | None = None
    tried: list[tuple[int, Rung]] = []
    for rung in sorted(_rungs(program, settings, cost, edited), key=price):
        after = _edited(program, rung.edits, edited)
        if after is None:
            continue
        requests = after.with_fatal()
        requested = requests.peak_bytes()
        tried.append((requested, rung))
        if requested <= capacity_bytes and predict(requests, rung.settings, capacity_bytes).fits is not False:
            found = fits(rung)
            if found:
                return rung, True
            if found is None and perhaps is None:
                perhaps = rung
    return perhaps or _least_reserved(tried, edited), False


def _least_reserved(tried: list[tuple[int, Rung]], edited: _Known) -> Rung:
    least, least_bytes = tried[0][1], 2**62
    for requested, rung in sorted(tried, key=itemgetter(0)):
        if requested >= least_bytes:
            break
        simulation = simulate(edited[rung.edits].with_fatal(), rung.settings)
        if simulation.failed is None and simulation.reserved_peak_bytes < least_bytes:
            least, least_bytes = rung, simulation.reserved_peak_bytes
    return least


def _rungs(program: Program, settings: Settings, cost: Cost | None, edited: _Known) -> Iterator[Rung]:
    def possible(texts: tuple[str, ...]) -> list[str]:
        return ["", *(text for text in texts if _edited(program, (text,), edited) is not None)]

    checkpoints = possible(tuple(_checkpoints(program)))
    added = {text: _added(program, text, cost) for text in checkpoints}
    chosen = product(possible(_OPTIMIZERS), checkpoints, *(possible((text,)) for text in _OTHERS))
    variants = [settings] if settings.expandable_segments else [settings, replace(settings, expandable_segments=True)]
    for edits in chosen:
        for variant in variants:
            yield Rung(tuple(filter(None, edits)), variant, added[edits[1]])


_Known = dict[tuple[str, ...], Requests]
"""What some edits make of the program."""


def _edited(program: Program, edits: tuple[str, ...], known: _Known) -> Requests | None:
    if edits not in known:
        before = _edited(program, edits[:-1], known)
        if before is None:
            return None
        try:
            known[edits], _ = apply_edits(program, edits[-1:], requests=before)
        except UsageError:
            return None
    return known[edits]


def _checkpoints(program: Program) -> Iterator[str]:
    patterns: dict[str, set[str]] = {}
    for name in forward_ranges(program):
        if _ENDS_IN_NUMBER.search(name):
            patterns.setdefault(_NUMBERED.sub("*", name), set()).add(name)
    several = [pattern for pattern, names in patterns.items() if len(names) > 1 and not pattern.startswith("step")]
    for pattern in several[:_MOST_PATTERNS]:
        yield f"checkpoint:{pattern}"
        yield f"checkpoint:{pattern}:every=2"


def _added(program: Program, text: str, cost: Cost | None) -> float:
    if not text:
        return 0
    _, (applied,) = apply_edits(program, [text])
    known = cost(applied.recomputed) if cost else None
    return len(applied.recomputed) if known is None else known
