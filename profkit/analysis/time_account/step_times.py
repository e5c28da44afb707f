"""What the steps of a run took without a profiler, and with one: the two are never mixed.

A step takes its mean wait for data and the median of the rest. Data come in bursts: of eight workers all may deliver at
once, so that seven steps find their batch ready and one waits for all, which a median hides. Waits take their mean, and
every other phase takes its median. A wait that the GPU's work hides makes no step longer: of a step only as much of its
wait counts as it is longer than the fastest step. All commands ask here how long a step takes.

The typical step is none of the rare ones, which do what most do not: they evaluate the model, or write a checkpoint.
Neither their time nor their waits are part of it, and no phase is that most of the others lack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from profkit.analysis import NotebookResult
from profkit.errors import Finding
from profkit.names import DATA, EVALUATION, PHASES, STEP, context_range
from profkit.run.directory import Run
from profkit.run.lines import RARELY
from profkit.run.manifest import Clock, Manifest, Samples, phase_order, times_of_step
from profkit.trace.columns import Bools, Ints

if TYPE_CHECKING:
    import pandas as pd

Twin = Literal["clean", "attached"]
"""Where the unprofiled steps ran: in their own process, or in the recorded one before its recording began."""

_WIDE = 0.3
"""Steps vary widely if their standard deviation is more than this share of their mean; `profkit run` agrees."""
_PART = 0.1
"""A phase or wait that is a smaller share of the step than this is not worth a warning."""
_RARE = 0.25
"""Long steps are rare ones if there are no more of them than this share."""
_DATA_NS, _STEP_NS = "data_ns", "step_ns"
_CLOCKS: tuple[Clock, ...] = ("cuda-events", "wall")
_LABELS: dict[Twin, str] = {"clean": "own process", "attached": "same process"}


@dataclass(frozen=True)
class SampleStatistics:
    """Location and spread of samples, in their own unit.

    ``median_absolute_deviation`` is the median distance from the median, without a factor. Percentiles interpolate
    linearly between neighbours (definition 7 of Hyndman and Fan 1996). ``standard_deviation`` divides by n − 1; a
    single sample has none.
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


def summarize_samples(samples: Sequence[int] | Sequence[float] | Ints) -> SampleStatistics:
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


@dataclass(frozen=True, eq=False)
class PhaseSamples:
    """The times of one phase by one clock, in ns: of each sample by how much it waits longer for data, and the rest.

    ``is_usual`` are the samples of steps that are not rare. ``lacking`` is how many such steps have none of the phase.
    """

    clock: Clock
    rest_ns: Ints
    wait_ns: Ints
    is_usual: Bools
    lacking: int = 0

    @property
    def total_ns(self) -> Ints:
        return self.rest_ns + self.wait_ns

    @property
    def waits(self) -> bool:
        return bool(self.wait_ns.any())

    @property
    def counted(self) -> Bools:
        """Which samples say what one takes: those of usual steps, or all of a phase that rare steps alone have."""
        return self.is_usual if self.is_usual.any() else np.ones_like(self.is_usual)

    @property
    def time_ns(self) -> float:
        """Return what one takes: the mean wait for data and the median of the rest; see `name_statistic`."""
        return float(np.median(self.rest_ns[self.counted])) + self.exposed_ns

    @property
    def exposed_ns(self) -> float:
        """Return by how much one takes longer for data, on average."""
        return float(np.mean(self.wait_ns[self.counted]))

    @property
    def mean_ns(self) -> float:
        """Return what usual steps have of it on average."""
        usual = int(self.is_usual.sum()) + self.lacking
        return float(self.total_ns[self.is_usual].sum()) / usual if usual else 0.0

    @property
    def typical_ns(self) -> float:
        """Return what the typical step has of it: nothing of what rare steps alone have, or fewer than half of all."""
        absent = np.zeros(self.lacking, dtype=np.int64)
        rest_ns, wait_ns = (np.append(times[self.is_usual], absent) for times in (self.rest_ns, self.wait_ns))
        return float(np.median(rest_ns)) + float(np.mean(wait_ns)) if len(rest_ns) else 0.0


def name_statistic(*, waits: bool, several: bool = False) -> str:
    """Return in words what `PhaseSamples.time_ns` is, of samples that wait for data or not; of several runs or one."""
    if several:
        return "mean waits and medians of the rest" if waits else "medians"
    return "mean wait for data and median of the rest" if waits else "median"


@dataclass(frozen=True, eq=False)
class PhaseTimes:
    """One phase (or the whole step): its samples without a profiler, and with one if it was timed by the same clock."""

    phase: str
    context: int | None
    unprofiled: PhaseSamples
    recorded: PhaseSamples | None

    @property
    def name(self) -> str:
        """Return the phase, in a run of several contexts as ``context 128, forward``."""
        return self.phase if self.context is None else f"{context_range(self.context)}, {self.phase}"

    @property
    def clock(self) -> Clock:
        """Return what measured both: CUDA events around the phase, on the GPU's own clock, or the host's clock."""
        return self.unprofiled.clock

    @cached_property
    def clean(self) -> SampleStatistics:
        return summarize_samples(self.unprofiled.total_ns)

    @cached_property
    def usual(self) -> SampleStatistics:
        """The statistics of the samples that say what one takes: those of rare steps are left out."""
        return summarize_samples(self.unprofiled.total_ns[self.unprofiled.counted])

    @property
    def rare_count(self) -> int:
        return self.clean.count - self.usual.count

    @cached_property
    def profiled(self) -> SampleStatistics | None:
        return None if self.recorded is None else summarize_samples(self.recorded.total_ns)

    @property
    def clean_ns(self) -> float:
        return self.unprofiled.time_ns

    @property
    def typical_ns(self) -> float:
        """What the typical unprofiled step has of it."""
        return self.unprofiled.typical_ns

    @property
    def profiled_ns(self) -> float | None:
        """What one takes with a profiler; None if it was not timed."""
        return None if self.recorded is None else self.recorded.time_ns

    @property
    def cost(self) -> float | None:
        """What profiling added, as a fraction of the unprofiled time; None if one was not timed, and for waits."""
        if self.phase == DATA or self.profiled_ns is None or self.clean_ns <= 0:
            return None
        return self.profiled_ns / self.clean_ns - 1

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data; the rates are `PhaseSamples.time_ns` where this is no median, else None."""
        return {
            "phase": self.phase,
            "context": self.context,
            "clock": self.clock,
            "clean": asdict(self.clean),
            "profiled": None if self.profiled is None else asdict(self.profiled),
            "clean_rate_ns": self.clean_ns if self.unprofiled.waits or self.rare_count else None,
            "profiled_rate_ns": self.profiled_ns if self.recorded is not None and self.recorded.waits else None,
            "cost": self.cost,
        }


@dataclass(frozen=True, repr=False)
class StepTimes(NotebookResult):
    """The times of a run's steps, phase by phase, the whole step last; several contexts follow one another.

    ``host_ns`` is how long the host was in each phase of an unprofiled step (median), of a run over one context.
    ``waited_ns`` is the mean wait for data that was timed where a full queue hid the one that steps have (see
    `settle_waits`); None where none did. ``may_hide_waits``: not without workers, of which no queue hides a wait, nor
    where later steps showed that none had.
    """

    twin: Twin
    phases: tuple[PhaseTimes, ...]
    host_ns: Mapping[str, float] = field(default_factory=dict)
    waited_ns: float | None = None
    may_hide_waits: bool = True

    @property
    def contexts(self) -> list[int | None]:
        return list(dict.fromkeys(times.context for times in self.phases))

    def find(self, phase: str, context: int | None) -> PhaseTimes | None:
        return next((times for times in self.phases if (times.phase, times.context) == (phase, context)), None)

    @property
    def label(self) -> str:
        return _LABELS[self.twin]

    @property
    def samples(self) -> dict[str, PhaseSamples]:
        return {times.name: times.unprofiled for times in self.phases}

    def to_dict(self) -> dict[str, Any]:
        return {"twin": self.twin, "phases": [times.to_dict() for times in self.phases]}

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per phase and context; columns such as ``clean_median`` and ``profiled_p90``, in ns."""
        import pandas as pd

        return pd.json_normalize(self.to_dict()["phases"], sep="_")


def mark_rare(times_ns: Sequence[int] | Ints) -> Bools:
    """Return which steps are rare ones, those of a checkpoint say: far longer than most, and few; none if they are not.

    ``times_ns`` are without waits for data, which are part of the typical step.
    """
    values = np.asarray(times_ns, dtype=np.float64)
    is_long = values > RARELY * np.median(values) if len(values) else np.zeros(0, dtype=np.bool_)
    return is_long if is_long.sum() <= _RARE * len(values) else np.zeros_like(is_long)


def mark_rare_steps(steps: Sequence[Mapping[str, int]]) -> Bools:
    """Return which steps of one context length are rare: as `mark_rare` says, or they evaluate a model as few do.

    An evaluation that is long enough for a warning makes a step another one than most, however long these are.
    """
    if not steps or not all(_STEP_NS in step for step in steps):
        return np.zeros(len(steps), dtype=np.bool_)
    times_ns = np.array([step[_STEP_NS] for step in steps], dtype=np.int64)
    waits_ns = np.array([step.get(_DATA_NS, 0) for step in steps], dtype=np.int64)
    rest_ns = times_ns - np.minimum(waits_ns, times_ns - times_ns.min())
    evaluating_ns = [
        sum(step.get(f"{phase}_ns", step.get(f"{phase}_event_ns", 0)) for phase in EVALUATION) for step in steps
    ]
    is_long = mark_rare(rest_ns)
    is_rare = is_long | (np.array(evaluating_ns) > _PART * np.median(rest_ns))
    return is_rare if 2 * is_rare.sum() < len(steps) else is_long


def read_step_times(run: str | Path) -> StepTimes | None:
    """Return what the steps of the run directory ``run`` took; None if none were timed.

    Raises:
        RunError: it is not a run directory.
    """
    return summarize_step_times(Run(run).manifest)


def summarize_step_times(manifest: Manifest) -> StepTimes | None:
    """Return the statistics of the samples in a run's manifest; None if no step was timed without a profiler."""
    unprofiled = settle_waits(manifest)
    if unprofiled is None:
        return None
    profiled = manifest.profiled or Samples()
    phases = [times for context in unprofiled.contexts for times in _summarize(context, unprofiled, profiled)]
    on_host = {phase: float(np.median(times)) for phase, times in unprofiled.times_ns("host", None).items()}
    twin: Twin = "clean" if manifest.clean is not None and manifest.clean.steps else "attached"
    waited_ns = None
    if unprofiled is not manifest.unprofiled and manifest.unprofiled is not None:
        waited_ns = samples_by_phase(manifest.unprofiled, None)[DATA].time_ns
    loading = manifest.loading
    may_hide = not manifest.processes if loading is None else loading.later_wait_ns is None  # older runs do not say
    may_hide = may_hide or waited_ns is not None
    return StepTimes(twin, tuple(phases), on_host, waited_ns, may_hide) if phases else None


def settle_waits(manifest: Manifest) -> Samples | None:
    """Return a run's unprofiled steps, with the waits for data that they have once a queue that was full is empty.

    Workers that are too slow are not waited for until the queue is empty that they filled while the program started.
    No profiler makes a program wait longer for workers: if the recorded steps did, and are enough for one delivery of
    all workers, then unprofiled steps that go on take as long as these, but for what Python takes less outside of the
    waits. They get it as unevenly as the recorded ones, and no more than the steps after the recording waited: an epoch
    may have begun in the few that were recorded. None if no step was timed without a profiler.
    """
    unprofiled, loading = manifest.unprofiled, manifest.loading
    recorded = () if manifest.profiled is None else manifest.profiled.steps
    profiled = list(compress(recorded, ~mark_rare_steps(recorded)))
    if unprofiled is None or loading is None or not 0 < loading.burst_steps <= len(profiled):
        return unprofiled
    is_usual = ~mark_rare_steps(unprofiled.steps)
    longer_ns = _longer_for_data(list(compress(unprofiled.steps, is_usual)), profiled, loading.later_wait_ns)
    if longer_ns is None:
        return unprofiled
    waits_ns = np.zeros(len(is_usual))
    # The longest come first, since there may be fewer unprofiled steps than recorded ones.
    waits_ns[is_usual] = np.resize(sorted((step[_DATA_NS] for step in profiled), reverse=True), is_usual.sum())
    more_ns = np.rint(waits_ns * (longer_ns / waits_ns[is_usual].mean())).astype(np.int64).tolist()
    steps = [
        {**step, _DATA_NS: step[_DATA_NS] + more, _STEP_NS: step[_STEP_NS] + more} if more else step
        for step, more in zip(unprofiled.steps, more_ns, strict=True)
    ]
    return replace(unprofiled, steps=tuple(steps))


def _longer_for_data(
    unprofiled: Sequence[Mapping[str, int]], profiled: Sequence[Mapping[str, int]], later_wait_ns: int | None
) -> float | None:
    """Return by how much steps are longer for data than the unprofiled ones were; None if by little, or nobody knows.

    By no more than the recorded ones were longer, since work of the GPU may hide a wait.
    """
    if not all(_DATA_NS in step and _STEP_NS in step for step in (*unprofiled, *profiled)):
        return None
    before, after = (
        np.array([(step[_DATA_NS], step[_STEP_NS] - step[_DATA_NS], step[_STEP_NS]) for step in steps], dtype=np.int64)
        for steps in (unprofiled, profiled)
    )
    waits_ns, _, steps_ns = after.mean(axis=0) - before.mean(axis=0)
    later_ns = math.inf if later_wait_ns is None else later_wait_ns - before[:, 0].mean()
    slower_ns = max(float(np.median(after[:, 1]) - np.median(before[:, 1])), 0.0)
    if min(waits_ns, steps_ns, later_ns) <= _PART * float(np.median(before[:, 2])):
        return None
    return min(float(waits_ns) + slower_ns, float(steps_ns), float(later_ns))


def measure_memory_cost(manifest: Manifest) -> float | None:
    """Return what recording the allocator added to the step time, as a fraction of it; None if either is unknown."""
    if manifest.memory is None or manifest.unprofiled is None:
        return None
    recorded, unprofiled = (
        samples_by_phase(samples, None).get(STEP) for samples in (Samples(manifest.memory.steps), manifest.unprofiled)
    )
    return None if recorded is None or unprofiled is None else recorded.time_ns / unprofiled.time_ns - 1


def is_whole_step(name: str) -> bool:
    return name == STEP or name.endswith(f", {STEP}")


def samples_by_phase(samples: Samples, context: int | None) -> dict[str, PhaseSamples]:
    """Return phase → its times, by the host's clock if a sample has it, in their order, the whole step last."""
    steps = samples.steps_over(context)
    by_phase = {phase: times for clock in _CLOCKS for phase, times in _samples_by_clock(steps, clock).items()}
    return {phase: by_phase[phase] for phase in sorted(by_phase, key=phase_order)}


def samples_on_host(steps: Sequence[Mapping[str, int]]) -> dict[str, PhaseSamples]:
    """Return phase → its times on the host in steps over one context length; by CUDA events where those are unknown."""
    clocks: tuple[Clock, ...] = (*_CLOCKS, "host")
    return {phase: times for clock in clocks for phase, times in _samples_by_clock(steps, clock).items()}


def _samples_by_clock(steps: Sequence[Mapping[str, int]], clock: Clock) -> dict[str, PhaseSamples]:
    is_usual = ~mark_rare_steps(steps)
    each = [times_of_step(step, clock) for step in steps]
    return {
        phase: _phase_samples(steps, clock, phase, [times.get(phase) for times in each], is_usual)
        for phase in dict.fromkeys(phase for times in each for phase in times)
    }


def _phase_samples(
    steps: Sequence[Mapping[str, int]], clock: Clock, phase: str, times: Sequence[int | None], is_usual: Bools
) -> PhaseSamples:
    has_it = np.array([time_ns is not None for time_ns in times])
    times_ns = np.array([time_ns for time_ns in times if time_ns is not None], dtype=np.int64)
    waits_ns = np.zeros_like(times_ns)
    if phase == DATA:
        waits_ns = times_ns
    elif phase == STEP and has_it.all():
        waits_ns = _exposed_waits(steps, times_ns)
    return PhaseSamples(clock, times_ns - waits_ns, waits_ns, is_usual[has_it], int((is_usual & ~has_it).sum()))


def _exposed_waits(steps: Sequence[Mapping[str, int]], times_ns: Ints) -> Ints:
    """Return how much longer each step is for its wait; known only where every step says how long it waited."""
    if not all(_DATA_NS in step for step in steps):
        return np.zeros_like(times_ns)
    waits_ns = np.array([step[_DATA_NS] for step in steps], dtype=np.int64)
    exposed_ns: Ints = np.minimum(waits_ns, times_ns - times_ns.min())
    return exposed_ns


def _summarize(context: int | None, unprofiled: Samples, profiled: Samples) -> Iterator[PhaseTimes]:
    recorded = {clock: _samples_by_clock(profiled.steps_over(context), clock) for clock in _CLOCKS}
    for phase, clean in samples_by_phase(unprofiled, context).items():
        yield PhaseTimes(phase, context, clean, recorded[clean.clock].get(phase))


def find_timing_doubts(timed: StepTimes | None) -> Iterator[Finding]:
    """Yield what makes the unprofiled times doubtful: verdicts, idle shares and MFU rest on them."""
    if timed is None:
        return
    if timed.waited_ns is None:
        yield from _find_uneven_steps(timed)
    yield from _find_missing_phases(timed)
    if timed.may_hide_waits:
        yield from _find_grown_waits(timed)


def _find_uneven_steps(timed: StepTimes) -> Iterator[Finding]:
    for step in timed.phases:
        deviation = step.usual.relative_deviation
        if step.phase == STEP and deviation is not None and deviation > _WIDE:
            used = name_statistic(waits=step.unprofiled.waits)
            yield Finding(
                "uneven-clean-steps",
                f"{step.usual.count} unprofiled steps{_where(step)} vary widely: their standard deviation is"
                f" {deviation:.0%} of their mean. Verdicts and MFU use their {used};"
                " time more steps (`profkit run --warmup`)",
            )


def _find_missing_phases(timed: StepTimes) -> Iterator[Finding]:
    """A phase that runs every eighth step, as a rollout or an evaluation, may lie outside the recorded steps."""
    for context in timed.contexts:
        phases = [times for times in timed.phases if times.context == context and times.phase in PHASES]
        step = timed.find(STEP, context)
        if step is None or step.profiled is None or not any(times.profiled for times in phases):
            continue
        missing = [times for times in phases if times.profiled is None and times.clean.median]
        if missing:
            told = ", ".join(
                f"{times.phase} in {times.clean.count} of {step.clean.count} steps ({_ms(times.clean.median)} ms)"
                for times in missing
            )
            yield Finding(
                "phases-not-recorded",
                f"the unprofiled steps{_where(step)} had {told}; no recorded step had it: kernels, idle time and"
                " advice leave it out; record more steps (`profkit run --steps`)",
            )


def _find_grown_waits(timed: StepTimes) -> Iterator[Finding]:
    """A profiler never makes a program wait longer for data: a queue that was full hid it from earlier steps."""
    for context in timed.contexts:
        data, step_ns = timed.find(DATA, context), timed.find(STEP, context)
        if data is None or step_ns is None or data.profiled_ns is None or data.profiled is None:
            continue
        waited_ns = data.clean_ns if timed.waited_ns is None else timed.waited_ns
        if data.profiled_ns - waited_ns > _PART * step_ns.clean_ns:
            hidden = "may have hidden waits; time more steps (`profkit run --warmup`)"
            if timed.waited_ns is not None:
                hidden = "hid the wait, which is counted in the unprofiled step"
            yield Finding(
                "data-waits-grew",
                f"the recorded steps{_where(data)} waited {_ms(data.profiled_ns)} ms for data and the unprofiled ones"
                f" before them {_ms(waited_ns)} ms: a queue that was full at first {hidden}",
            )


def _where(times: PhaseTimes) -> str:
    return "" if times.context is None else f" at context {times.context}"


def _ms(time_ns: float) -> str:
    time_ms = time_ns / 1e6
    return f"{time_ms:#.3g}" if time_ms < 100 else f"{time_ms:,.0f}"
