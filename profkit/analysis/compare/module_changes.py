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

from collections.abc import Iterator
from dataclasses import dataclass

from profkit.analysis.compare.kernel_changes import (
    Change,
    KernelTotal,
    Sides,
    change_of_columns,
    columns_by,
    has_generated,
    is_generated,
    total_kernels,
)
from profkit.analysis.compare.samples import Key, StepSamples
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
    columns = columns_by(before, after, lambda key: _rows_of(tree, key.place))
    changes = dict(zip(columns, change_of_columns(before, after, list(columns.values())), strict=True))
    below: dict[str | None, list[str]] = {}
    for name in columns:
        below.setdefault(tree.parent.get(name), []).append(name)

    def walk(parent: str | None, depth: int) -> Iterator[ModuleChange]:
        for name in sorted(below.get(parent, ()), key=lambda module: (-larger_time(changes[module]), module)):
            yield ModuleChange(name, parent, depth, changes[name], *_count_kernels(before, after, columns[name]))
            yield from walk(name, depth + 1)

    return walk(None, 0)


def _count_kernels(before: StepSamples, after: StepSamples, sides: Sides) -> tuple[int, int]:
    return int(before.kernel_count[sides[0]].sum()), int(after.kernel_count[sides[1]].sum())


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
    groups: dict[_Member, frozenset[_Member]] = {}

    def first_member(key: Key) -> list[_Member]:
        phase, modules = key.place.phase or "", key.place.modules
        if not modules or key.category in _KEPT:
            return []
        names = sharing_modules(modules[-1]) if is_shared(modules[-1]) else [modules[-1]]
        members = [(phase, name) for name in names]
        joined = frozenset[_Member]().union(*(groups.get(member, {member}) for member in members))
        groups.update(dict.fromkeys(joined, joined))
        return members[:1]

    columns = columns_by(before, after, first_member)
    sizes: dict[_Member, int] = {}
    of_group: dict[frozenset[_Member], Sides] = {}
    for member, sides in columns.items():
        whole = of_group.setdefault(groups[member], ([], []))
        sizes[member] = 0
        for samples, mine, all_columns in zip((before, after), sides, whole, strict=True):
            all_columns.extend(mine)
            sizes[member] += int(samples.kernel_ns[:, mine].sum())
    fused = {
        members: sides
        for members, sides in of_group.items()
        if has_generated(before, sides[0]) != has_generated(after, sides[1]) and all(sides)
    }
    changes = change_of_columns(before, after, list(fused.values()))
    fusions = []
    for (members, sides), change in zip(fused.items(), changes, strict=True):
        largest_first = sorted(members, key=lambda member: (-sizes.get(member, 0), member))
        phase, modules = largest_first[0][0], tuple(name for _, name in largest_first)
        kernels = total_kernels(before, sides[0]), total_kernels(after, sides[1])
        fusions.append(Fusion(phase, modules, change, *_count_kernels(before, after, sides), *kernels))
    yield from sorted(fusions, key=lambda fusion: (-abs(fusion.change.change_ns), fusion.phase, fusion.modules))
