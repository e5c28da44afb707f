"""Match the kernel time of two captures part by part, so that a renamed kernel is a move and not a loss and a find.

Parts are matched from the outside in:

1. by range: a path that only one capture has is told at the nearest range around it that both have (compiled code has
   no ranges within ``forward``; the eager model's layers are then told as ``forward``);
2. by category within the range, and by name within that: ``same``;
3. what is left of a category on both sides is one part, ``renamed``: ``sgemm`` became ``nvjet``;
4. what is left of a range after that, gone from some categories and new in others, is one part, ``replaced``: three
   kernels of attention became one. A kernel that Inductor fused stands for kernels of several categories, so its
   ``renamed`` parts are joined to it;
5. the rest is ``gone`` or ``new``.

Every key of either capture lies in exactly one part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from profkit.analysis.compare.step_samples import RangePath, StepSamples

PartKind = Literal["same", "renamed", "replaced", "gone", "new"]

# The names of the kernels that Inductor generates say what was fused in them.
_FUSED = "triton_"


@dataclass(frozen=True)
class Match:
    """One part: which columns of the samples it holds on either side, and what they have in common."""

    path: RangePath
    categories: tuple[tuple[str, ...], tuple[str, ...]]
    kind: PartKind
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass
class _Unmatched:
    """What names of one category within one range have no namesake: columns of either side."""

    before: list[int]
    after: list[int]


def match_parts(before: StepSamples, after: StepSamples) -> list[Match]:
    """Return the parts of two captures' kernel time."""
    common = before.paths & after.paths
    places: dict[RangePath, dict[str, _Unmatched]] = {}
    names: dict[tuple[RangePath, str, str], _Unmatched] = {}
    for side, samples in (("before", before), ("after", after)):
        for column, key in enumerate(samples.keys):
            path = nearest(key.path, common)
            found = names.setdefault((path, key.category, key.kernel), _Unmatched([], []))
            getattr(found, side).append(column)
    matches = []
    for (path, category, _), found in names.items():
        if found.before and found.after:
            matches.append(_match(path, "same", {category: found}))
        else:
            left = places.setdefault(path, {}).setdefault(category, _Unmatched([], []))
            left.before += found.before
            left.after += found.after
    for path, categories in places.items():
        matches += _match_unmatched(path, categories, _fused_categories(categories, before, after))
    return matches


def nearest(path: RangePath, common: frozenset[RangePath]) -> RangePath:
    """Return a path's longest beginning that both captures have."""
    while path and path not in common:
        path = path[:-1]
    return path


def _match_unmatched(path: RangePath, categories: dict[str, _Unmatched], fused: set[str]) -> list[Match]:
    """Match what has no namesake within one range."""
    renamed = {name: left for name, left in categories.items() if left.before and left.after}
    rest = {name: left for name, left in categories.items() if name not in renamed}
    joined = rest | {name: left for name, left in renamed.items() if name in fused}
    if rest and any(left.before for left in joined.values()) and any(left.after for left in joined.values()):
        apart = [_match(path, "renamed", {name: left}) for name, left in renamed.items() if name not in joined]
        return [*apart, _match(path, "replaced", joined)]
    parts = [_match(path, "renamed", {name: left}) for name, left in renamed.items()]
    return parts + [_match(path, "gone" if left.before else "new", {name: left}) for name, left in rest.items()]


def _fused_categories(categories: dict[str, _Unmatched], before: StepSamples, after: StepSamples) -> set[str]:
    """Return the categories in which a kernel that Inductor made has no namesake."""

    def is_fused(samples: StepSamples, columns: Iterable[int]) -> bool:
        return any(samples.keys[column].kernel.startswith(_FUSED) for column in columns)

    return {name for name, left in categories.items() if is_fused(before, left.before) or is_fused(after, left.after)}


def _match(path: RangePath, kind: PartKind, categories: dict[str, _Unmatched]) -> Match:
    return Match(
        path=path,
        categories=(
            tuple(sorted(name for name, left in categories.items() if left.before)),
            tuple(sorted(name for name, left in categories.items() if left.after)),
        ),
        kind=kind,
        before=tuple(column for left in categories.values() for column in left.before),
        after=tuple(column for left in categories.values() for column in left.after),
    )
