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

from profkit.analysis.compare.kernel_changes import (
    Change,
    KernelTotal,
    Sides,
    change_of_columns,
    has_generated,
    is_generated,
    total_kernels,
)
from profkit.analysis.compare.samples import StepSamples
from profkit.analysis.tree.modules import ModuleTree, Place
from profkit.names import is_shared, sharing_modules

_KEPT = frozenset({"gemm", "attention", "communication"})
_Member = tuple[str, str]
"""A phase and a module in it."""


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
    keys = [*before.keys, *after.keys]
    if not any(key.place.modules for key in keys):
        return None
    is_compiled = any(is_generated(key.kernel) or any(map(is_shared, key.path)) for key in keys)
    return ModuleComparison(is_compiled, tuple(_changes(before, after)), tuple(_fusions(before, after)))


def _changes(before: StepSamples, after: StepSamples) -> Iterator[ModuleChange]:
    tree = ModuleTree(key.place for side in (before, after) for key in side.keys)
    columns: dict[str, Sides] = {}
    for number, side in enumerate((before, after)):
        for column, key in enumerate(side.keys):
            for name in _rows_of(tree, key.place):
                columns.setdefault(name, ([], []))[number].append(column)
    changes = dict(zip(columns, change_of_columns(before, after, list(columns.values())), strict=True))
    below: dict[str | None, list[str]] = {}
    for name in columns:
        below.setdefault(tree.parent.get(name), []).append(name)

    def walk(parent: str | None, depth: int) -> Iterator[ModuleChange]:
        for name in sorted(below.get(parent, ()), key=lambda module: (-larger_time(changes[module]), module)):
            counts = (
                int(side.kernel_count[columns[name][number]].sum()) for number, side in enumerate((before, after))
            )
            yield ModuleChange(name, parent, depth, changes[name], *counts)
            yield from walk(name, depth + 1)

    return walk(None, 0)


def _rows_of(tree: ModuleTree, place: Place) -> list[str]:
    """Return the rows that hold a place, and with them exactly one row without a parent."""
    modules = tree.modules_around(place)
    if not modules:
        return [f"(no module: {place.phase})" if place.phase else "(in no phase)"]
    return list(dict.fromkeys([*tree.above(modules[0]), *modules]))


def larger_time(change: Change) -> int:
    """Return the larger one of the times before and after, per step."""
    return max(change.before_per_sample_ns, change.after_per_sample_ns)


def _fusions(before: StepSamples, after: StepSamples) -> Iterator[Fusion]:
    groups = _Groups()
    columns: dict[_Member, Sides] = {}
    for number, side in enumerate((before, after)):
        for column, key in enumerate(side.keys):
            phase, modules = key.place.phase or "", key.place.modules
            if not modules or key.category in _KEPT:
                continue
            first, *others = sharing_modules(modules[-1]) if is_shared(modules[-1]) else [modules[-1]]
            for other in others:
                groups.join((phase, first), (phase, other))
            columns.setdefault((phase, first), ([], []))[number].append(column)
    joined: dict[_Member, Sides] = {}
    for member, sides in columns.items():
        whole = joined.setdefault(groups.first(member), ([], []))
        for number in (0, 1):
            whole[number].extend(sides[number])
    fused = {
        member: sides
        for member, sides in joined.items()
        if has_generated(before, sides[0]) != has_generated(after, sides[1]) and all(sides)
    }
    changes = change_of_columns(before, after, list(fused.values()))
    sizes = {member: sum(map(_total, (before, after), sides)) for member, sides in columns.items()}

    def name_largest_first(member: _Member) -> tuple[str, ...]:
        members = sorted(groups.members(member), key=lambda other: (-sizes.get(other, 0), other))
        return tuple(name for _, name in members)

    fusions = [
        Fusion(
            phase=member[0],
            modules=name_largest_first(member),
            change=change,
            before_count=int(before.kernel_count[sides[0]].sum()),
            after_count=int(after.kernel_count[sides[1]].sum()),
            before=total_kernels(before, sides[0]),
            after=total_kernels(after, sides[1]),
        )
        for (member, sides), change in zip(fused.items(), changes, strict=True)
    ]
    yield from sorted(fusions, key=lambda fusion: (-abs(fusion.change.change_ns), fusion.phase, fusion.modules))


def _total(samples: StepSamples, columns: Sequence[int]) -> int:
    return int(samples.kernel_ns[:, columns].sum())


class _Groups:
    def __init__(self) -> None:
        self._above: dict[_Member, _Member] = {}

    def first(self, member: _Member) -> _Member:
        self._above.setdefault(member, member)
        while self._above[member] != member:
            member = self._above[member]
        return member

    def join(self, member: _Member, other: _Member) -> None:
        first, second = self.first(member), self.first(other)
        self._above[second] = first

    def members(self, member: _Member) -> list[_Member]:
        first = self.first(member)
        return [other for other in self._above if self.first(other) == first]
