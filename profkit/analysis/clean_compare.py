"""What changed in the steps' time without a profiler, from what two runs' manifests keep of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from statistics import median
from typing import Any

import numpy as np

from profkit.analysis.bootstrap import Verdict, bootstrap_differences, judge_change

# Where a manifest keeps unprofiled steps, and what they are: a twin's, or a script's own from before the recording.
_SOURCES = {"clean": "in a process of their own", "attached": "attached, not recording"}
_SUFFIX = "_ns"


@dataclass(frozen=True)
class CleanSteps:
    """The unprofiled steps of a run: how they were measured, and each phase's time in each, the whole step's last."""

    label: str
    times_ns: dict[str, list[int]]


@dataclass(frozen=True)
class CleanChange:
    """Medians over the unprofiled steps, their change, and its 95 % interval if there is one."""

    name: str
    before_ns: int
    after_ns: int
    change_ns: int
    low_ns: int | None
    high_ns: int | None
    verdict: Verdict


@dataclass(frozen=True)
class CleanComparison:
    """The changes of the step and its phases; ``samples`` are the numbers of unprofiled steps."""

    labels: tuple[str, str]
    samples: tuple[int, int]
    changes: tuple[CleanChange, ...]


def read_clean_steps(manifest: Mapping[str, Any]) -> CleanSteps | None:
    """Return the unprofiled steps that a manifest keeps, None if it keeps none."""
    for source, label in _SOURCES.items():
        part = manifest.get(source)
        steps = part.get("steps") if isinstance(part, dict) else None
        if steps:
            names = [key for key in steps[0] if key.endswith(_SUFFIX) and all(key in step for step in steps)]
            return CleanSteps(label, {name.removesuffix(_SUFFIX): [step[name] for step in steps] for name in names})
    return None


def compare_clean(before: CleanSteps, after: CleanSteps) -> CleanComparison:
    """Return what changed in the phases that both runs timed."""
    shared = [name for name in before.times_ns if name in after.times_ns]
    old, new = (np.array([side.times_ns[name] for name in shared], dtype=np.int64).T for side in (before, after))
    interval = bootstrap_differences(old, new, "median")
    changes = []
    for column, name in enumerate(shared):
        one, other = (Fraction(median(side.times_ns[name])) for side in (before, after))
        low, high = (None, None) if interval is None else (round(float(end[column])) for end in interval)
        change = other - one
        changes.append(
            CleanChange(name, round(one), round(other), round(change), low, high, judge_change(change, low, high))
        )
    return CleanComparison((before.label, after.label), (len(old), len(new)), tuple(changes))
