"""What changed in the steps' time without a profiler, from what two runs' manifests keep of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from profkit.analysis.compare.bootstrap import Verdict, bootstrap_differences, judge_change
from profkit.analysis.sample_statistics import median
from profkit.analysis.step_times import twin_of, unprofiled_times_ns
from profkit.names import STEP, context_range
from profkit.run.manifest import Manifest

_LABELS = {"clean": "in a process of their own", "attached": "attached, not recording"}


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

    @property
    def is_whole_step(self) -> bool:
        """Return whether this is of the step and not of one of its phases."""
        return is_whole_step(self.name)


@dataclass(frozen=True)
class CleanComparison:
    """The changes of the step and its phases; ``samples`` are the numbers of unprofiled steps."""

    labels: tuple[str, str]
    samples: tuple[int, int]
    changes: tuple[CleanChange, ...]


def read_clean_steps(manifest: Manifest) -> CleanSteps | None:
    """Return the unprofiled steps that a manifest keeps, None if it keeps none; of several contexts each by itself."""
    samples = manifest.unprofiled
    if samples is None:
        return None
    times_ns = {}
    for context in samples.contexts:
        for phase, (_, times) in unprofiled_times_ns(samples, context).items():
            times_ns[phase if context is None else f"{context_range(context)}, {phase}"] = times
    return CleanSteps(_LABELS[twin_of(manifest)], times_ns)


def is_whole_step(name: str) -> bool:
    """Return whether a name of `CleanSteps.times_ns` is that of the step, of one context or of the only one."""
    return name == STEP or name.endswith(f", {STEP}")


def compare_clean(before: CleanSteps, after: CleanSteps) -> CleanComparison:
    """Return what changed in the phases that both runs timed."""
    shared = [name for name in before.times_ns if name in after.times_ns]
    changes = [_compare_samples(name, before.times_ns[name], after.times_ns[name]) for name in shared]
    counts = [max((len(side.times_ns[name]) for name in shared), default=0) for side in (before, after)]
    return CleanComparison((before.label, after.label), (counts[0], counts[1]), tuple(changes))


def _compare_samples(name: str, before: Sequence[int], after: Sequence[int]) -> CleanChange:
    columns = [np.array(side, dtype=np.int64)[:, None] for side in (before, after)]
    interval = bootstrap_differences(columns[0], columns[1], "median")
    low, high = (None, None) if interval is None else (round(float(end[0])) for end in interval)
    old, new = Fraction(median(before)), Fraction(median(after))
    return CleanChange(name, round(old), round(new), round(new - old), low, high, judge_change(new - old, low, high))
