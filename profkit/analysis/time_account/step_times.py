"""What the steps of a run took without a profiler, and with one: the two are never mixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from profkit.analysis.notebook import NotebookResult
from profkit.names import DATA, STEP, context_range
from profkit.run.directory import Run
from profkit.run.manifest import Clock, Manifest, Samples, phase_order

if TYPE_CHECKING:
    import pandas as pd

Twin = Literal["clean", "attached"]
"""Where the unprofiled steps ran: in their own process, or in the recorded one before its recording began."""

_LABELS: dict[Twin, str] = {"clean": "own process", "attached": "same process"}


@dataclass(frozen=True)
class SampleStatistics:
    """Location and spread of samples, in their own unit.

    ``median_absolute_deviation`` is the median distance from the median. It is not multiplied by 1.4826, which would
    estimate the standard deviation of a normal distribution: step times have a floor and a tail instead. Percentiles
    interpolate linearly between neighbours (definition 7 of Hyndman and Fan 1996). ``standard_deviation`` divides by
    n − 1; a single sample has none. Medians and percentiles hardly move with one slow sample, mean and standard
    deviation do, so both are kept.
    """

    count: int
    median: float
    median_absolute_deviation: float
    p10: float
    p90: float
    mean: float
    standard_deviation: float | None

    @property
    def relative_deviation(self) -> float | None:
        """The standard deviation as a fraction of the mean; None if it has no meaning."""
        if self.standard_deviation is None or self.mean <= 0:
            return None
        return self.standard_deviation / self.mean


def summarize_samples(samples: Sequence[int] | Sequence[float]) -> SampleStatistics:
    """Return the statistics of at least one sample.

    Raises:
        ValueError: there are no samples.
    """
    if not len(samples):
        raise ValueError("there are no samples")
    values = np.asarray(samples, dtype=np.float64)
    median = np.median(values)
    return SampleStatistics(
        count=len(values),
        median=float(median),
        median_absolute_deviation=float(np.median(np.abs(values - median))),
        p10=float(np.percentile(values, 10)),
        p90=float(np.percentile(values, 90)),
        mean=float(np.mean(values)),
        standard_deviation=float(np.std(values, ddof=1)) if len(values) > 1 else None,
    )


@dataclass(frozen=True)
class PhaseTimes:
    """One phase (or the whole step): its time in ns without a profiler and with one.

    ``clock`` says what measured both: CUDA events around the phase, on the GPU's own clock, or the host's clock.

    Data come in bursts: of eight workers all may deliver at once, so that seven steps find their batch ready and one
    waits for all. The median would hide that. ``clean_rate_ns`` and ``profiled_rate_ns`` are a step's mean wait for
    data plus the median of the rest, of the waits themselves their mean; None if nothing was waited for. The first
    takes the profiled steps' waits if they are longer: then the others found a queue that was full at first.
    """

    phase: str
    context: int | None
    clock: Clock
    clean: SampleStatistics
    profiled: SampleStatistics | None
    clean_rate_ns: float | None = None
    profiled_rate_ns: float | None = None

    @property
    def clean_ns(self) -> float:
        """What one takes without a profiler: the rate if it is known, else the median."""
        return self.clean.median if self.clean_rate_ns is None else self.clean_rate_ns

    @property
    def profiled_ns(self) -> float | None:
        """What one takes with a profiler, likewise; None if it was not timed."""
        if self.profiled_rate_ns is not None or self.profiled is None:
            return self.profiled_rate_ns
        return self.profiled.median

    @property
    def cost(self) -> float | None:
        """What profiling added, as a fraction of the unprofiled time; None if one was not timed, and for waits."""
        if self.phase == DATA or self.profiled_ns is None or self.clean_ns <= 0:
            return None
        return self.profiled_ns / self.clean_ns - 1


@dataclass(frozen=True, repr=False)
class StepTimes(NotebookResult):
    """The times of a run's steps, phase by phase, the whole step last; several contexts follow one another."""

    twin: Twin
    phases: tuple[PhaseTimes, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data, numbers unrounded."""
        return {"twin": self.twin, "phases": [{**asdict(one), "cost": one.cost} for one in self.phases]}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per phase and context; columns such as ``clean_median`` and ``profiled_p90``, in ns."""
        import pandas as pd

        return pd.json_normalize(self.to_dict()["phases"], sep="_")


@dataclass(frozen=True)
class UnprofiledSteps:
    """The unprofiled steps of a run: where they ran, and the times of each phase in ns, the whole step last.

    The names of several contexts are ``context 128, forward`` and so on.
    """

    label: str
    times_ns: dict[str, list[int]]


def read_step_times(run: str | Path) -> StepTimes | None:
    """Return what the steps of the run directory ``run`` took; None if none were timed.

    Raises:
        RunError: it is not a run directory.
    """
    return summarize_step_times(Run(run).manifest)


def summarize_step_times(manifest: Manifest) -> StepTimes | None:
    """Return the statistics of the samples in a run's manifest; None if no step was timed without a profiler."""
    unprofiled = manifest.unprofiled
    if unprofiled is None:
        return None
    profiled = manifest.profiled or Samples()
    phases = [one for context in unprofiled.contexts for one in _summarize(context, unprofiled, profiled)]
    return StepTimes(_twin_of(manifest), tuple(phases)) if phases else None


def read_unprofiled_steps(manifest: Manifest) -> UnprofiledSteps | None:
    """Return the samples of the unprofiled steps in a run's manifest; None if there are none."""
    samples = manifest.unprofiled
    if samples is None:
        return None
    times_ns = {}
    for context in samples.contexts:
        for phase, (_, times) in unprofiled_times_ns(samples, context).items():
            times_ns[phase if context is None else f"{context_range(context)}, {phase}"] = times
    return UnprofiledSteps(_LABELS[_twin_of(manifest)], times_ns)


def is_whole_step(name: str) -> bool:
    """Return whether a name in `UnprofiledSteps.times_ns` is that of a whole step, not of a phase."""
    return name == STEP or name.endswith(f", {STEP}")


def unprofiled_times_ns(samples: Samples, context: int | None) -> dict[str, tuple[Clock, list[int]]]:
    """Return phase → its clock and its times, in the order in which phases run, the whole step last.

    If a sample has both clocks, the host's is taken.
    """
    found: dict[str, tuple[Clock, list[int]]] = {}
    for clock in ("cuda-events", "wall"):
        found |= {phase: (clock, times) for phase, times in samples.times_ns(clock, context).items()}
    return {phase: found[phase] for phase in sorted(found, key=phase_order)}


def _twin_of(manifest: Manifest) -> Twin:
    return "clean" if manifest.clean is not None and manifest.clean.steps else "attached"


def _summarize(context: int | None, unprofiled: Samples, profiled: Samples) -> Iterator[PhaseTimes]:
    for phase, (clock, times) in unprofiled_times_ns(unprofiled, context).items():
        recorded = profiled.times_ns(clock, context).get(phase)
        yield PhaseTimes(
            phase,
            context,
            clock,
            summarize_samples(times),
            summarize_samples(recorded) if recorded else None,
            _rate_ns(unprofiled, phase, context, others=profiled),
            _rate_ns(profiled, phase, context),
        )


def _rate_ns(samples: Samples, phase: str, context: int | None, *, others: Samples | None = None) -> float | None:
    """Return a step's mean wait for data plus the median of the rest, or the mean wait; None for anything else.

    A profiler never makes a program wait longer for its data: where the ``others``, with one, waited longer, a queue
    that was full at first hid it from these.
    """
    waits, rests = _data_times(samples, context)
    if phase not in (DATA, STEP) or not waits:
        return None
    mean = float(np.mean(waits))
    if others is not None:
        mean = max(mean, float(np.mean(_data_times(others, context)[0] or [0])))
    return None if not mean else mean if phase == DATA else mean + float(np.median(rests))


def _data_times(samples: Samples, context: int | None) -> tuple[list[int], list[int]]:
    """Return how long each step waited for data, and how long the rest of it took; none where not all steps say."""
    times = samples.times_ns("wall", context)
    waits, steps = times.get(DATA, []), times.get(STEP, [])
    if len(waits) != len(steps):
        return [], []
    return waits, [step - wait for step, wait in zip(steps, waits, strict=True)]
