"""What changed in the kernel time of each module between two captures, and what was fused into what.

Modules are matched by name, those that differ in a number as one (``h.*.mlp``), whatever their place in the tree and in
whichever pass they ran. Rows nest: a module's time holds the modules within it. What several modules of compiled code
share (``shared: a + b``) has a row under the module around them all; no module gets a part of it by invention. The rows
without a parent sum to the kernel time.

A fusion is made of the modules, in one phase, that a generated kernel of either capture joins: those that share it,
those that share another with one of these, and so on. All their kernels but matrix products, attention and
communication, which stay what they are, count on either side: so both sides do the same work, and the change is the
fusion's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profkit.analysis.compare.kernel_changes import Change, KernelTotal, change_of_columns, is_generated, total_kernels
from profkit.analysis.compare.samples import Key, StepSamples
from profkit.analysis.tree.module_times import is_compiling, is_module_range
from profkit.names import PHASES, is_shared, sharing_modules
from profkit.run.compiled_code import COMPILING

_KEPT = frozenset({"gemm", "attention", "communication"})
_NO_PHASE = ""


@dataclass(frozen=True)
class ModuleChange:
    """The change of one module's kernel time, the modules within it included; counts are over all steps of a side."""

    module: str
    parent: str | None
    depth: int
    change: Change
    before_count: int
    after_count: int


@dataclass(frozen=True)
class Fusion:
    """Kernels of ``modules`` in ``phase`` on either side; one side has generated ones. The largest module is first."""

    phase: str
    modules: tuple[str, ...]
    change: Change
    before_count: int
    after_count: int
    before: tuple[KernelTotal, ...]
    after: tuple[KernelTotal, ...]


@dataclass(frozen=True)
class ModuleComparison:
    """What changed by module; ``is_compiled`` says whether either capture shows modules of compiled code."""

    is_compiled: bool
    modules: tuple[ModuleChange, ...]
    fusions: tuple[Fusion, ...]


def compare_modules(before: StepSamples, after: StepSamples) -> ModuleComparison | None:
    """Return what changed by module; None if neither capture has a range within its phases."""
    sides = (before, after)
    places = [[_place(key) for key in side.keys] for side in sides]
    if not any(modules for side in places for _, modules in side):
        return None
    is_compiled = any(is_generated(key.kernel) or any(map(is_shared, key.path)) for side in sides for key in side.keys)
    return ModuleComparison(is_compiled, tuple(_changes(before, after, places)), tuple(_fusions(before, after, places)))


Place = tuple[str, tuple[str, ...]]
"""The phase that a key lies in, and the modules around it within that, outermost first."""


def _place(key: Key) -> Place:
    if is_compiling(key.path):
        return COMPILING, ()
    at = next((n for n, name in enumerate(key.path) if name in PHASES), None)
    if at is None:
        return _NO_PHASE, ()
    # A module within itself counts once.
    return key.path[at], tuple(dict.fromkeys(name for name in key.path[at + 1 :] if is_module_range(name)))


def _changes(before: StepSamples, after: StepSamples, places: Sequence[Sequence[Place]]) -> Iterator[ModuleChange]:
    parents = _parents(places)
    columns: dict[str, tuple[list[int], list[int]]] = {}
    for side, of_side in enumerate(places):
        for column, place in enumerate(of_side):
            modules = _modules(place)
            # What lies in one pass under the phase itself may lie in a module in the other pass.
            for name in dict.fromkeys((*modules, *_above(parents, modules[0]))):
                columns.setdefault(name, ([], []))[side].append(column)
    changes = dict(zip(columns, change_of_columns(before, after, list(columns.values())), strict=True))
    below: dict[str | None, list[str]] = {}
    for name, parent in parents.items():
        below.setdefault(parent, []).append(name)

    def walk(parent: str | None, depth: int) -> Iterator[ModuleChange]:
        for name in sorted(below.get(parent, ()), key=lambda one: (-_size(changes[one]), one)):
            counts = [
                int(samples.kernel_count[columns[name][side]].sum()) for side, samples in enumerate((before, after))
            ]
            yield ModuleChange(name, parent, depth, changes[name], *counts)
            yield from walk(name, depth + 1)

    return walk(None, 0)


def _modules(place: Place) -> tuple[str, ...]:
    phase, modules = place
    return modules or (f"(no module: {phase})" if phase else "(in no phase)",)


def _parents(places: Sequence[Sequence[Place]]) -> dict[str, str | None]:
    """Return each row's parent: the module around it where it was met first within one."""
    parents: dict[str, str | None] = {}
    for of_side in places:
        for place in of_side:
            around: str | None = None
            for name in _modules(place):
                parents.setdefault(name, None)
                if parents[name] is None and around is not None and name not in (around, *_above(parents, around)):
                    parents[name] = around
                around = name
    return parents


def _above(parents: dict[str, str | None], name: str) -> Iterator[str]:
    """Yield the modules around one, the nearest first."""
    around = parents[name]
    while around is not None:
        yield around
        around = parents[around]


def _size(change: Change) -> int:
    return max(change.before_per_sample_ns, change.after_per_sample_ns)


def _fusions(before: StepSamples, after: StepSamples, places: Sequence[Sequence[Place]]) -> Iterator[Fusion]:
    groups = _Groups()
    columns: dict[Place, tuple[list[int], list[int]]] = {}
    for side, samples in enumerate((before, after)):
        for column, key in enumerate(samples.keys):
            phase, modules = places[side][column]
            if not modules or key.category in _KEPT:
                continue
            joined = sharing_modules(modules[-1]) if is_shared(modules[-1]) else [modules[-1]]
            for one in joined:
                groups.join((phase, (joined[0],)), (phase, (one,)))
            columns.setdefault((phase, (joined[0],)), ([], []))[side].append(column)
    found: dict[Place, tuple[list[int], list[int]]] = {}
    for place, sides in columns.items():
        whole = found.setdefault(groups.first(place), ([], []))
        for side in (0, 1):
            whole[side].extend(sides[side])
    fused = {
        place: sides
        for place, sides in found.items()
        if _has_generated(before, sides[0]) != _has_generated(after, sides[1]) and all(sides)
    }
    changes = change_of_columns(before, after, list(fused.values()))
    sizes = {place: sum(map(_total, (before, after), sides)) for place, sides in columns.items()}
    fusions = [
        Fusion(
            phase=place[0],
            modules=tuple(
                name for _, (name,) in sorted(groups.members(place), key=lambda one: (-sizes.get(one, 0), one))
            ),
            change=change,
            before_count=int(before.kernel_count[sides[0]].sum()),
            after_count=int(after.kernel_count[sides[1]].sum()),
            before=total_kernels(before, sides[0]),
            after=total_kernels(after, sides[1]),
        )
        for (place, sides), change in zip(fused.items(), changes, strict=True)
    ]
    yield from sorted(fusions, key=lambda one: (-abs(one.change.change_ns), one.phase, one.modules))


def _total(samples: StepSamples, columns: Sequence[int]) -> int:
    return int(samples.kernel_ns[:, columns].sum())


def _has_generated(samples: StepSamples, columns: Sequence[int]) -> bool:
    return any(is_generated(samples.keys[column].kernel) for column in columns)


class _Groups:
    """Sets of places that were joined."""

    def __init__(self) -> None:
        self._above: dict[Place, Place] = {}

    def first(self, place: Place) -> Place:
        self._above.setdefault(place, place)
        while self._above[place] != place:
            place = self._above[place]
        return place

    def join(self, one: Place, other: Place) -> None:
        first, second = self.first(one), self.first(other)
        self._above[second] = first

    def members(self, place: Place) -> list[Place]:
        first = self.first(place)
        return [one for one in self._above if self.first(one) == first]
