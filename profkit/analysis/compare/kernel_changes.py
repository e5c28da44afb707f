"""What changed in the kernel time of a step between two captures, by phase, range, category, kernel and module.

Totals are integers over all steps of a side and sum exactly. A change is the difference per step, rounded to a
nanosecond; ``rounding_ns`` is what the rounded parts leave of the whole. Its interval over the steps
(`profkit.analysis.statistics`) leaves out what varies from run to run, and stands by itself: of twenty lines without a
difference, one is expected to show one.

Every key of either capture lies in exactly one part. Parts are matched from the outside in, so that a renamed kernel is
one change, not a loss and a gain:

1. by range: a path that only one capture has counts in the nearest enclosing range that both have; what torch.compile
   itself runs is apart from all others;
2. by category within the range, and by name within the category: ``same``;
3. what remains of a category on both sides: ``renamed``;
4. what then remains of a range, gone from some categories and new in others: ``replaced``. A kernel that Inductor fused
   stands for kernels of several categories, so its ``renamed`` parts join it;
5. the rest is ``gone`` or ``new``.

Modules are matched by name, those that differ in a number as one, in whichever pass they ran. Rows nest: a module's
time holds the modules within it, and rows without a parent sum to the kernel time. What several modules of compiled
code share (``shared: a + b``) has a row under the module around them all.

A fusion is made of the modules, in one phase, that a generated kernel of either capture joins, and those joined to
these. All their kernels but matrix products, attention and communication count on either side, so that both do the same
work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeVar

import numpy as np

from profkit.analysis.compare import Key, RangePath, StepSamples
from profkit.analysis.statistics import FEWEST, Verdict, interval_of_means, judge_change
from profkit.analysis.tree import join_path
from profkit.analysis.tree.modules import ModuleTree, Place
from profkit.errors import Finding
from profkit.names import COMPILING, is_shared, sharing_modules
from profkit.trace.columns import Ints, Measure

PartKind = Literal["same", "renamed", "replaced", "gone", "new"]
Name = TypeVar("Name")
Sides = tuple[list[int], list[int]]
"""Columns of the samples before, and of those after."""

IN_NO_RANGE = "(in no inner range)"

_FUSED = ("triton_", "cpp_fused_")
"""Inductor's names for the kernels that it generates begin so."""


@dataclass(frozen=True)
class Change:
    """A change per step, with its 95 % interval if there is one.

    ``before_per_sample_ns``, ``after_per_sample_ns`` and ``change_ns`` are per step, each rounded by itself;
    ``before_ns`` and ``after_ns`` are sums over all steps of a side.
    """

    before_ns: int
    after_ns: int
    before_per_sample_ns: int
    after_per_sample_ns: int
    change_ns: int
    low_ns: int | None
    high_ns: int | None
    verdict: Verdict


@dataclass(frozen=True)
class Line:
    name: str
    change: Change


@dataclass(frozen=True)
class KernelTotal:
    """One kernel of a part, over all steps of its side."""

    name: str
    count: int
    total_ns: int


@dataclass(frozen=True)
class Part:
    """The change of one kernel, or of kernels that replaced others; ``category`` is ``old → new`` if it changed."""

    range: str
    category: str
    kind: PartKind
    change: Change
    before: tuple[KernelTotal, ...]
    after: tuple[KernelTotal, ...]


@dataclass(frozen=True)
class TimeComparison:
    """Two captures' time per step; phases, ranges, categories and ``parts`` each sum to ``kernel_time``.

    ``unit`` says what a sample is, ``samples`` how many each side has. A line of ``by_range`` holds the work of which
    it is the innermost range that both captures have. Things overlap in ``busy`` and ``wall``, so they have no parts.
    ``left_out_ns`` is each capture's kernel time in no sample.
    """

    measure: Measure
    unit: Literal["step", "capture"]
    samples: tuple[int, int]
    range: str | None
    kernel_time: Change
    busy: Change
    wall: Change | None
    kernel_count: tuple[int, int]
    by_phase: tuple[Line, ...]
    by_range: tuple[Line, ...]
    by_category: tuple[Line, ...]
    parts: tuple[Part, ...]
    left_out_ns: tuple[int, int]
    gpu_counts: tuple[int, int]
    warnings: tuple[Finding, ...]

    @property
    def rounding_ns(self) -> int:
        """Return the rounded change of the whole minus the sum of the parts' rounded changes."""
        return self.kernel_time.change_ns - sum(part.change.change_ns for part in self.parts)


def compare_times(before: StepSamples, after: StepSamples) -> TimeComparison:
    common = common_paths(before, after)
    matches = match_parts(before, after)
    changes = change_of_columns(before, after, [match.sides for match in matches])
    parts = [_build_part(before, after, match, change) for match, change in zip(matches, changes, strict=True)]
    parts.sort(key=lambda part: (-abs(part.change.change_ns), part.range, part.category, part.kind))
    return TimeComparison(
        measure=before.measure,
        unit="step" if before.has_steps else "capture",
        samples=(before.size, after.size),
        range=before.range,
        kernel_time=measure_change(before.kernel_ns.sum(axis=1), after.kernel_ns.sum(axis=1)),
        busy=measure_change(before.busy_ns, after.busy_ns),
        wall=None if before.wall_ns is None or after.wall_ns is None else measure_change(before.wall_ns, after.wall_ns),
        kernel_count=(int(before.kernel_count.sum()), int(after.kernel_count.sum())),
        by_phase=_group(before, after, lambda key: _name_range(nearest(key.path, common)[:1])),
        by_range=_group(before, after, lambda key: _name_range(nearest(key.path, common))),
        by_category=_group(before, after, lambda key: key.category),
        parts=tuple(parts),
        left_out_ns=(before.left_out_ns, after.left_out_ns),
        gpu_counts=(before.gpu_count, after.gpu_count),
        warnings=tuple(_warnings(before, after)),
    )


def measure_change(before: Ints, after: Ints) -> Change:
    """Return the change from one group of samples to another, in nanoseconds."""
    return _measure_changes(before[:, None], after[:, None])[0]


def _measure_changes(before: Ints, after: Ints) -> list[Change]:
    interval = interval_of_means(before, after)
    changes = []
    for column, (old, new) in enumerate(zip(before.sum(axis=0).tolist(), after.sum(axis=0).tolist(), strict=True)):
        each = Fraction(old, len(before)), Fraction(new, len(after))
        exact = each[1] - each[0]
        low, high = (None, None) if interval is None else (round(float(end[column])) for end in interval)
        per_sample = round(each[0]), round(each[1]), round(exact)
        changes.append(Change(old, new, *per_sample, low, high, judge_change(exact, low, high)))
    return changes


def columns_by(before: StepSamples, after: StepSamples, names_of: Callable[[Key], Iterable[Name]]) -> dict[Name, Sides]:
    """Return the columns of either side under each name, in the order in which names occur; a key may have several."""
    groups: dict[Name, Sides] = {}
    for number, side in enumerate((before, after)):
        for column, key in enumerate(side.keys):
            for name in names_of(key):
                groups.setdefault(name, ([], []))[number].append(column)
    return groups


def change_of_columns(before: StepSamples, after: StepSamples, columns: Sequence[Sides]) -> list[Change]:
    """Return the change of each set of columns, given for either side."""
    if not columns:
        return []
    old, new = (
        np.stack([side.kernel_ns[:, list(pair[number])].sum(axis=1) for pair in columns], axis=1)
        for number, side in enumerate((before, after))
    )
    return _measure_changes(old, new)


def _group(before: StepSamples, after: StepSamples, name_of: Callable[[Key], str]) -> tuple[Line, ...]:
    groups = columns_by(before, after, lambda key: (name_of(key),))
    changes = change_of_columns(before, after, list(groups.values()))
    lines = [Line(name, change) for name, change in zip(groups, changes, strict=True)]
    return tuple(sorted(lines, key=lambda line: (-abs(line.change.change_ns), line.name)))


def _name_range(path: RangePath) -> str:
    return join_path(path) or IN_NO_RANGE


def _build_part(before: StepSamples, after: StepSamples, match: Match, change: Change) -> Part:
    old, new = (", ".join(categories) for categories in match.categories)
    return Part(
        range=_name_range(match.path),
        category=f"{old} → {new}" if old and new and old != new else old or new,
        kind=match.kind,
        change=change,
        before=total_kernels(before, match.sides[0]),
        after=total_kernels(after, match.sides[1]),
    )


def total_kernels(side: StepSamples, columns: Sequence[int]) -> tuple[KernelTotal, ...]:
    """Return the columns' kernels, one entry per name, the largest first."""
    totals: dict[str, list[int]] = {}
    for column in columns:
        total = totals.setdefault(side.keys[column].kernel, [0, 0])
        total[0] += int(side.kernel_count[column])
        total[1] += int(side.kernel_ns[:, column].sum())
    kernels = [KernelTotal(name, count, total_ns) for name, (count, total_ns) in totals.items()]
    return tuple(sorted(kernels, key=lambda kernel: (-kernel.total_ns, kernel.name)))


@dataclass(frozen=True)
class Match:
    """One part: its columns of the samples on either side, and what they have in common."""

    path: RangePath
    categories: tuple[tuple[str, ...], tuple[str, ...]]
    kind: PartKind
    sides: Sides


def is_generated(kernel: str) -> bool:
    return kernel.startswith(_FUSED)


def match_parts(before: StepSamples, after: StepSamples) -> list[Match]:
    """Return the parts of two captures' kernel time, by the rules above."""
    common = common_paths(before, after)
    places: dict[RangePath, dict[str, Sides]] = {}
    names = columns_by(before, after, lambda key: ((nearest(key.path, common), key.category, key.kernel),))
    matches = []
    for (path, category, _), sides in names.items():
        if all(sides):
            matches.append(_match(path, "same", {category: sides}))
        else:
            left = places.setdefault(path, {}).setdefault(category, ([], []))
            for columns, more in zip(left, sides, strict=True):
                columns.extend(more)
    for path, categories in places.items():
        fused = {
            name for name, left in categories.items() if has_generated(before, left[0]) or has_generated(after, left[1])
        }
        matches += _match_unmatched(path, categories, fused)
    return matches


def common_paths(before: StepSamples, after: StepSamples) -> frozenset[RangePath]:
    """Return the ranges in which work is compared: those that both captures have, and torch.compile's own work."""
    return before.paths & after.paths | {(COMPILING,)}


def nearest(path: RangePath, common: frozenset[RangePath]) -> RangePath:
    """Return the longest beginning of a path that both captures have."""
    while path and path not in common:
        path = path[:-1]
    return path


def _match_unmatched(path: RangePath, categories: dict[str, Sides], fused: set[str]) -> list[Match]:
    renamed = {name: left for name, left in categories.items() if all(left)}
    rest = {name: left for name, left in categories.items() if name not in renamed}
    joined = rest | {name: left for name, left in renamed.items() if name in fused}
    if rest and all(any(columns) for columns in zip(*joined.values(), strict=True)):
        apart = [_match(path, "renamed", {name: left}) for name, left in renamed.items() if name not in joined]
        return [*apart, _match(path, "replaced", joined)]
    parts = [_match(path, "renamed", {name: left}) for name, left in renamed.items()]
    return parts + [_match(path, "gone" if left[0] else "new", {name: left}) for name, left in rest.items()]


def has_generated(samples: StepSamples, columns: Iterable[int]) -> bool:
    return any(is_generated(samples.keys[column].kernel) for column in columns)


def _match(path: RangePath, kind: PartKind, categories: dict[str, Sides]) -> Match:
    names = [tuple(sorted(name for name, left in categories.items() if left[side])) for side in (0, 1)]
    columns = [[column for left in categories.values() for column in left[side]] for side in (0, 1)]
    return Match(path, (names[0], names[1]), kind, (columns[0], columns[1]))


def _warnings(before: StepSamples, after: StepSamples) -> Iterator[Finding]:
    if not before.has_steps:
        yield Finding(
            "no-steps", "one of the two has no steps (ranges `step N`): whole captures are compared, without intervals"
        )
    elif min(before.size, after.size) < FEWEST:
        yield Finding(
            "few-steps",
            f"{before.size} recorded step{'s' * (before.size != 1)} before, {after.size} after: their changes have no"
            f" intervals, which need {FEWEST} on each side; record more with --steps",
        )


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
    modules = tree.modules_around(place)
    if not modules:
        return [f"(no module: {place.phase})" if place.phase else "(in no phase)"]
    return list(dict.fromkeys([*tree.above(modules[0]), *modules]))


def larger_time(change: Change) -> int:
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
