"""What changed in the kernel time of a step between two captures, by phase, range, category and kernel.

Before and after are compared per step, so captures of different numbers of steps can be. Totals are integers over all
steps of a side and sum exactly; a change is their difference per step, rounded to a nanosecond, and what the rounding
of the parts leaves of the whole is named. Each change has a bootstrap interval over the steps
(`profkit.analysis.compare.bootstrap`), and where that holds 0 there is no measurable difference. The steps of a side
come from one process: what varies from run to run (clocks, placement) is in no interval; and each interval stands by
itself, so that of twenty lines without a difference one is expected to show one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from profkit.analysis.compare.bootstrap import FEWEST, Verdict, bootstrap_differences, judge_change
from profkit.analysis.compare.compare_parts import Match, PartKind, match_parts, nearest
from profkit.analysis.compare.step_samples import Key, RangePath, StepSamples
from profkit.analysis.range_paths import join_path
from profkit.findings import Finding
from profkit.trace.columns import Ints, Measure

IN_NO_RANGE = "(in no range within)"


@dataclass(frozen=True)
class Change:
    """Nanoseconds over all steps before and after, the change per step, and its 95 % interval if there is one.

    ``verdict`` is told in `profkit.analysis.compare.bootstrap`.
    """

    before_ns: int
    after_ns: int
    change_ns: int
    low_ns: int | None
    high_ns: int | None
    verdict: Verdict


@dataclass(frozen=True)
class Line:
    """The change of one phase, range or category."""

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
    """The change of what belongs together: one kernel, or those that took the place of others.

    ``kind`` is told in `profkit.analysis.compare.compare_parts`; ``category`` names both sides' where they differ.
    """

    range: str
    category: str
    kind: PartKind
    change: Change
    before: tuple[KernelTotal, ...]
    after: tuple[KernelTotal, ...]


@dataclass(frozen=True)
class TimeComparison:
    """Two captures' time per step; phases, ranges, categories and ``parts`` each sum to ``kernel_time``.

    ``unit`` says what a sample is, ``samples`` how many there are on either side. A line of ``by_range`` is the work
    whose innermost range (of those that both captures have) it is. ``busy`` and ``wall`` are times in which things
    overlap: they have no parts. ``left_out_ns`` is each capture's kernel time in no sample.
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
    warnings: tuple[Finding, ...]

    @property
    def rounding_ns(self) -> int:
        """Return what the rounded changes of the parts lack to the rounded change of the whole."""
        return self.kernel_time.change_ns - sum(part.change.change_ns for part in self.parts)


def compare_times(before: StepSamples, after: StepSamples) -> TimeComparison:
    """Return what changed from one capture's steps to another's."""
    common = before.paths & after.paths
    matches = match_parts(before, after)
    changes = _change_of_columns(before, after, [(match.before, match.after) for match in matches])
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
        warnings=tuple(_warnings(before, after)),
    )


def measure_change(before: Ints, after: Ints) -> Change:
    """Return the change from one group of samples to another, in nanoseconds."""
    return _measure_changes(before[:, None], after[:, None])[0]


def _measure_changes(before: Ints, after: Ints) -> list[Change]:
    """Return the change of each column of samples, (sample, column)."""
    interval = bootstrap_differences(before, after)
    changes = []
    for column, (old, new) in enumerate(zip(before.sum(axis=0).tolist(), after.sum(axis=0).tolist(), strict=True)):
        exact = Fraction(new, len(after)) - Fraction(old, len(before))
        low, high = (None, None) if interval is None else (round(float(end[column])) for end in interval)
        changes.append(Change(old, new, round(exact), low, high, judge_change(exact, low, high)))
    return changes


def _change_of_columns(
    before: StepSamples, after: StepSamples, columns: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Change]:
    """Return the change of each set of columns, given for either side."""
    if not columns:
        return []
    old, new = (
        np.stack([side.kernel_ns[:, list(pair[number])].sum(axis=1) for pair in columns], axis=1)
        for number, side in enumerate((before, after))
    )
    return _measure_changes(old, new)


def _group(before: StepSamples, after: StepSamples, name_of: Callable[[Key], str]) -> tuple[Line, ...]:
    """Return the changes of the kernel time under each name, the largest first."""
    groups: dict[str, tuple[list[int], list[int]]] = {}
    for number, side in enumerate((before, after)):
        for column, key in enumerate(side.keys):
            groups.setdefault(name_of(key), ([], []))[number].append(column)
    changes = _change_of_columns(before, after, list(groups.values()))
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
        before=_total_kernels(before, match.before),
        after=_total_kernels(after, match.after),
    )


def _total_kernels(side: StepSamples, columns: Sequence[int]) -> tuple[KernelTotal, ...]:
    """Return the columns' kernels, those of one name together, the largest first."""
    totals: dict[str, list[int]] = {}
    for column in columns:
        total = totals.setdefault(side.keys[column].kernel, [0, 0])
        total[0] += int(side.kernel_count[column])
        total[1] += int(side.kernel_ns[:, column].sum())
    kernels = [KernelTotal(name, count, total_ns) for name, (count, total_ns) in totals.items()]
    return tuple(sorted(kernels, key=lambda kernel: (-kernel.total_ns, kernel.name)))


def _warnings(before: StepSamples, after: StepSamples) -> Iterator[Finding]:
    """Yield what a reader must know of the samples."""
    if not before.has_steps:
        yield Finding(
            "no-steps", "not both have steps (ranges `step N`): whole captures are compared, without intervals"
        )
    elif min(before.size, after.size) < FEWEST:
        yield Finding(
            "few-steps",
            f"{before.size} and {after.size} steps: too few for an interval, which needs {FEWEST} a side; record more"
            " with --steps",
        )
    for name, side, other in (("before", before, after), ("after", after, before)):
        alone = sorted({join_path(key.path) for key in side.keys if key.path not in other.paths})
        if alone:
            some = ", ".join(alone[:2]) + (", …" if len(alone) > 2 else "")
            message = f"ranges of {name} alone: {len(alone)} ({some}); what ran there is told at the range around"
            yield Finding("one-sided-ranges", message)
        if not side.even:
            yield Finding("uneven-steps", f"{name}: not all processes made as many steps; the last steps lack some")
        if side.has_contexts:
            yield Finding(
                "contexts",
                f"{name}: steps of several contexts are taken together, and their spread hides changes; compare one"
                " with --range 'context N'",
            )
