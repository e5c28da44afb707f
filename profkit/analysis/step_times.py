"""What the steps of a run took without a profiler, and with one: the two are never mixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from profkit.analysis.sample_statistics import SampleStatistics, summarize_samples
from profkit.run.directory import Run
from profkit.run.manifest import Manifest
from profkit.run.samples import Clock, Samples, phase_order

if TYPE_CHECKING:
    import pandas as pd

Twin = Literal["clean", "attached"]
"""Where the unprofiled steps ran: in a process of their own, or in the recorded one before its recording began."""


@dataclass(frozen=True)
class PhaseTimes:
    """One phase (or the whole step): its time in ns without a profiler, beside that with one.

    ``clock`` says what measured both: CUDA events around the phase, on the GPU's own clock, or the host's clock.
    """

    phase: str
    context: int | None
    clock: Clock
    clean: SampleStatistics
    profiled: SampleStatistics | None

    @property
    def cost(self) -> float | None:
        """What profiling added, as a fraction of the unprofiled median; None where one of the two was not timed."""
        if self.profiled is None or self.clean.median <= 0:
            return None
        return self.profiled.median / self.clean.median - 1


@dataclass(frozen=True)
class StepTimes:
    """The times of a run's steps, phase by phase, the whole step last; of several contexts one after the other."""

    twin: Twin
    phases: tuple[PhaseTimes, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data, numbers as they are."""
        return {"twin": self.twin, "phases": [{**asdict(one), "cost": one.cost} for one in self.phases]}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per phase and context; columns such as ``clean_median`` and ``profiled_p90``, in ns."""
        import pandas as pd

        return pd.json_normalize(self.to_dict()["phases"], sep="_")


def read_step_times(run: str | Path) -> StepTimes | None:
    """Return what the steps of the run directory ``run`` took; None if none were timed.

    Raises:
        RunError: it is no run.
    """
    return summarize_step_times(Run(run).manifest)


def summarize_step_times(manifest: Manifest) -> StepTimes | None:
    """Return the statistics of the samples in a run's manifest; None where no step was timed without a profiler."""
    unprofiled = manifest.unprofiled
    if unprofiled is None:
        return None
    profiled = manifest.profiled or Samples()
    phases = [one for context in unprofiled.contexts for one in _summarize(context, unprofiled, profiled)]
    return StepTimes(twin_of(manifest), tuple(phases)) if phases else None


def twin_of(manifest: Manifest) -> Twin:
    """Return where the unprofiled steps of a run were timed."""
    return "clean" if manifest.clean is not None and manifest.clean.steps else "attached"


def unprofiled_times_ns(samples: Samples, context: int | None) -> dict[str, tuple[Clock, list[int]]]:
    """Return phase → what timed it and its times, in the order in which phases run, the whole step last.

    The host's clock goes before CUDA events where a sample has both.
    """
    found: dict[str, tuple[Clock, list[int]]] = {}
    for clock in ("cuda-events", "wall"):
        found |= {phase: (clock, times) for phase, times in samples.times_ns(clock, context).items()}
    return {phase: found[phase] for phase in sorted(found, key=phase_order)}


def _summarize(context: int | None, unprofiled: Samples, profiled: Samples) -> Iterator[PhaseTimes]:
    for phase, (clock, times) in unprofiled_times_ns(unprofiled, context).items():
        recorded = profiled.times_ns(clock, context).get(phase)
        yield PhaseTimes(
            phase, context, clock, summarize_samples(times), summarize_samples(recorded) if recorded else None
        )
