"""What the steps of a run took without a profiler, and with one: the two are never mixed.

Both stand in the run's manifest, sample for sample. A built-in model's steps were timed in a process of their own
(``clean``); those of a script in the same process, before its recording began (``attached``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from profkit.analysis.sample_statistics import SampleStatistics, summarize_samples
from profkit.ranges import PHASES, STEP
from profkit.run_directory import read_manifest

if TYPE_CHECKING:
    import pandas as pd

Clock = Literal["wall", "cuda-events"]
Twin = Literal["clean", "attached"]
StepKind = Literal["unbroken", "phase by phase", "whole"]
"""Which steps MFU is over: those timed without a break, those that wait after each phase, or those timed as a whole."""

REST = "rest"
"""What a script's step does outside the phases that were timed: its forward pass, its loss, its data."""

_EVENTS, _WALL = "_event_ns", "_ns"

Step = Mapping[str, int]


@dataclass(frozen=True)
class PhaseTimes:
    """One phase (or the whole step): its time in ns without a profiler, beside that with one.

    ``clock`` says what measured both: the host's clock up to the point where the device had done the phase, or CUDA
    events around it on the GPU's own. ``on_gpu`` is what CUDA events say where ``clock`` is ``wall``.
    """

    phase: str
    context: int | None
    clock: Clock
    clean: SampleStatistics
    profiled: SampleStatistics | None
    on_gpu: SampleStatistics | None

    @property
    def cost(self) -> float | None:
        """What profiling added, as a fraction of the unprofiled median; None where one of the two was not timed."""
        if self.profiled is None or self.clean.median <= 0:
            return None
        return self.profiled.median / self.clean.median - 1


@dataclass(frozen=True)
class StepTimes:
    """The times of a run's steps, phase by phase, the whole step last; of several contexts one after the other.

    The steps of a built-in model wait for the device after each phase. ``unbroken`` are others of them, by context
    (None if there is one), that wait at their end alone, as a training loop may. Not every run has them.
    """

    twin: Twin
    phases: tuple[PhaseTimes, ...]
    unbroken: Mapping[int | None, SampleStatistics]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data, numbers as they are."""
        rows = [{**asdict(one), "cost": one.cost} for one in self.phases]
        unbroken = [{"context": context, **asdict(one)} for context, one in self.unbroken.items()]
        return {"twin": self.twin, "phases": rows, "unbroken": unbroken}

    @property
    def waits_for_phases(self) -> bool:
        """Whether the steps of ``phases`` wait for the device after each phase."""
        return self.twin == "clean" and len({one.phase for one in self.phases} - {STEP}) > 1

    @property
    def kind(self) -> StepKind:
        """Which steps MFU is of: unbroken ones where there are any."""
        if self.unbroken:
            return "unbroken"
        return "phase by phase" if self.waits_for_phases else "whole"

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per phase and context; columns such as ``clean_median`` and ``profiled_p90``, in ns."""
        import pandas as pd

        return pd.json_normalize(self.to_dict()["phases"], sep="_")


def read_step_times(run: str | Path) -> StepTimes | None:
    """Return what the steps of the run directory ``run`` took; None if none were timed.

    Raises:
        RunError: it is no run.
    """
    return summarize_step_times(read_manifest(Path(run)))


def summarize_step_times(manifest: Mapping[str, Any]) -> StepTimes | None:
    """Return the statistics of the samples in a run's manifest; None where no step was timed without a profiler."""
    twin, clean, profiled = _read_steps(manifest)
    phases: list[PhaseTimes] = []
    for context in dict.fromkeys(step.get("context") for step in clean):
        mine, theirs = ([step for step in steps if step.get("context") == context] for steps in (clean, profiled))
        phases += _summarize(context, mine, theirs)
    return StepTimes(twin, tuple(phases), _read_unbroken(manifest)) if phases else None


def collect_samples(manifest: Mapping[str, Any]) -> tuple[Twin, dict[tuple[int | None, str], list[int]]]:
    """Return where the unprofiled steps were timed, and (context, phase) → its time in ns in each step, in order."""
    twin, clean, _ = _read_steps(manifest)
    samples: dict[tuple[int | None, str], list[int]] = {}
    for context in dict.fromkeys(step.get("context") for step in clean):
        mine = [step for step in clean if step.get("context") == context]
        by_phase = _by_phase(mine, _EVENTS) | _by_phase(mine, _WALL)
        samples |= {(context, phase): by_phase[phase] for phase in sorted(by_phase, key=_place)}
    return twin, samples


def _read_unbroken(manifest: Mapping[str, Any]) -> dict[int | None, SampleStatistics]:
    found: dict[int | None, list[int]] = {}
    for step in _steps(manifest.get("clean"), "unbroken"):
        found.setdefault(step.get("context"), []).append(step[f"{STEP}{_WALL}"])
    return {context: summarize_samples(samples) for context, samples in found.items()}


def _read_steps(manifest: Mapping[str, Any]) -> tuple[Twin, list[Step], list[Step]]:
    """Return where the unprofiled steps were timed, these steps, and the profiled ones."""
    twin: Twin = "clean" if manifest.get("clean") else "attached"
    clean, profiled = (_steps(manifest.get(part)) for part in (twin, "profiled"))
    if twin == "attached":
        clean, profiled = ([_with_rest(step) for step in steps] for steps in (clean, profiled))
    return twin, clean, profiled


def _summarize(context: int | None, clean: list[Step], profiled: list[Step]) -> Iterable[PhaseTimes]:
    walls, events = _by_phase(clean, _WALL), _by_phase(clean, _EVENTS)
    profiled_walls, profiled_events = _by_phase(profiled, _WALL), _by_phase(profiled, _EVENTS)
    for phase in sorted(walls | events, key=_place):
        clock: Clock = "wall" if phase in walls else "cuda-events"
        samples = walls.get(phase) or events[phase]
        beside = (profiled_walls if clock == "wall" else profiled_events).get(phase)
        on_gpu = events.get(phase) if clock == "wall" else None
        yield PhaseTimes(
            phase,
            context,
            clock,
            summarize_samples(samples),
            summarize_samples(beside) if beside else None,
            summarize_samples(on_gpu) if on_gpu else None,
        )


def _by_phase(steps: list[Step], suffix: str) -> dict[str, list[int]]:
    """Return phase → its times in the steps that have it, by the clock whose names end in ``suffix``."""
    found: dict[str, list[int]] = {}
    for step in steps:
        for name, time_ns in step.items():
            if name.endswith(suffix) and name.endswith(_EVENTS) == (suffix == _EVENTS):
                found.setdefault(name.removesuffix(suffix), []).append(time_ns)
    return found


def _steps(part: Any, name: str = "steps") -> list[Step]:
    steps = part.get(name) if isinstance(part, dict) else None
    return steps or []


def _with_rest(step: Step) -> Step:
    """Return the step with what its timed phases leave of it, if any was timed."""
    phases = [time_ns for name, time_ns in step.items() if name != f"{STEP}{_WALL}"]
    return {**step, f"{REST}{_WALL}": step[f"{STEP}{_WALL}"] - sum(phases)} if phases else step


def _place(phase: str) -> tuple[int, str]:
    order = (*PHASES, REST, STEP)
    return (order.index(phase) if phase in order else len(PHASES), phase)
