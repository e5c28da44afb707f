"""How long a step would take after edits: the unprofiled step, and what they add to or take from its replay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from profkit.analysis import NotebookResult
from profkit.analysis.step_replay import WORLDS, ProgramFacts, StepColumns, World
from profkit.analysis.step_replay.calibrate import USUAL_HOST, Fit, describe_replay
from profkit.analysis.step_replay.data_waits import change_workers, keep_waiting
from profkit.analysis.step_replay.edits import (
    CannotPredictError,
    Change,
    Setting,
    add_checkpoints,
    change_cpu,
    change_optimizer,
    drop_checkpoints,
    drop_python_of_line,
    drop_waits_of_line,
    drop_zeroed_gradients,
    launch_as_graph,
    pin_memory,
    slow_host,
)
from profkit.analysis.step_replay.kernel_edits import (
    benchmark_convolutions,
    change_batch,
    change_gpu,
    change_kernels,
    change_links,
    compile_model,
    stop_anomaly_detection,
    use_bf16,
    use_channels_last,
    use_flash_attention,
    use_tf32,
)
from profkit.analysis.step_replay.lanes import StepLanes, lay_out_lanes
from profkit.analysis.step_replay.limits import sum_parts
from profkit.analysis.step_replay.replay import Proof
from profkit.analysis.step_replay.steps import ReplayedStep, StepReplay
from profkit.run.edits import Edit, read_factor

if TYPE_CHECKING:
    import pandas as pd

    from profkit.analysis.whatif.answers import WhatIf

OTHER_HOST = (0.78, 1.25)
"""The host's time in another process of one program on one machine, of its time in this one: on H200s 0.82 to 1.38."""

OTHER_GPU = (0.985, 1.045)
"""The same of a step that the GPU limits: under a load that lasts its clock is often lower than in a short run."""

_UNEXPLAINED = 0.015
"""The share of the step as it is that no part of a prediction's error accounts for, either way.

Of 65 predictions on H200s 44 held without it, and 53 would have held with it (`recipes/results/planted_faults`).
"""

_OF_SAVED_BELOW, _OF_SAVED_ABOVE = 0.1, 0.05
"""The same of what a change is expected to save: a mend often spares more than what was recorded of its cause.

Of 150 predictions there 103 held without it, 33 steps were shorter than the least, and 122 would have held with it.
"""

_JOINT = math.sqrt(2)
"""Two assumptions that are each at the end of their range by chance are seldom both there at once."""


@dataclass(frozen=True)
class StepChange:
    """A change of a step, by an edit or by the removal of a cause.

    ``assumption`` is what it leaves open; ``bound`` says why no step after it is expected, empty if one is. With
    ``of_loader`` batches come in another time; else those that the step waits for come no sooner.
    """

    apply: Change
    assumption: str = ""
    bound: str = ""
    of_loader: bool = False


_WRAPPERS = "how much Python the wrapper of a checkpoint takes"

CHANGES = {
    "optimizer": StepChange(change_optimizer, "how many launches and which bandwidth the other optimizer has"),
    "zero-grad": StepChange(drop_zeroed_gradients),
    "no-wait": StepChange(drop_waits_of_line, "which of the phase's waits the line makes"),
    "no-host": StepChange(drop_python_of_line, "the line's time is sampled"),
    "no-checkpoint": StepChange(drop_checkpoints, _WRAPPERS),
    "checkpoint": StepChange(add_checkpoints, _WRAPPERS),
    "tf32": StepChange(use_tf32, "products in TF32 take from an eighth to a third of their time in fp32"),
    "autocast": StepChange(
        use_bf16,
        "products in bf16 take from a sixteenth to a fifth of their time in fp32, and casts take Python's time",
    ),
    "channels-last": StepChange(use_channels_last, "how fast convolutions and norms are in the other layout"),
    "cudnn-benchmark": StepChange(
        benchmark_convolutions,
        bound="cudnn-benchmark is a bound: which kernel is fastest only a run shows",
    ),
    "no-cudnn-attention": StepChange(use_flash_attention, "how fast the other attention is"),
    "compile": StepChange(compile_model, "which kernels a compiler fuses"),
    "graphs": StepChange(launch_as_graph, "what launching a graph takes for each kernel"),
    "workers": StepChange(
        change_workers,
        "how much longer a worker takes for a batch than the thread that trains",
        of_loader=True,
    ),
    "pin-memory": StepChange(pin_memory, "how fast copies from pinned memory are"),
    "gpu": StepChange(change_gpu),
    "kernels": StepChange(change_kernels),
    "links": StepChange(change_links, "all memory copies pass a link"),
    "cpu": StepChange(change_cpu),
    "batch": StepChange(change_batch, "how fast kernels are on another batch"),
    "no-anomaly": StepChange(stop_anomaly_detection, "how much of Python's time keeping stacks takes"),
}
"""What each edit whose effect is known does to a step."""


@dataclass(frozen=True)
class TimeAnswer:
    """The step after some edits, in nanoseconds: ``low_ns``, ``expected_ns``, ``high_ns``; None where unknown.
    ``high_here_ns`` is the most where host and GPU are as fast as in this process, and steps differ no more.

    ``now_ns`` is the measured step: unprofiled, or as recorded where ``unprofiled_ns`` is None. ``limited_by`` is what
    limits the step after, by cause; it sums up to ``expected_ns``. ``widths_ns`` is by how much each assumption moves
    the prediction, the most first. ``refusal`` says why nothing is predicted. ``batch_factor`` is how many times
    as many samples the step after has. ``edits`` are those that were asked about; a cause's answer has none.
    """

    now_ns: int | None
    unprofiled_ns: int | None
    proof: Proof | None
    fit: Fit
    refusal: str | None = None
    low_ns: int | None = None
    expected_ns: int | None = None
    high_ns: int | None = None
    high_here_ns: int | None = None
    limited_by: Mapping[str, int] | None = None
    assumptions: tuple[str, ...] = ()
    widths_ns: Mapping[str, int] | None = None
    batch_factor: float = 1.0
    edits: tuple[str, ...] = ()

    @property
    def as_many_ns(self) -> dict[str, int | None]:
        """The step after, for as many samples as the step has now."""
        ends = {"low": self.low_ns, "expected": self.expected_ns, "high": self.high_ns}
        return {name: None if time_ns is None else round(time_ns / self.batch_factor) for name, time_ns in ends.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "edits": list(self.edits),
            "step_ns": self.now_ns,
            "unprofiled_ns": self.unprofiled_ns,
            "replay": describe_replay(self.proof, self.fit),
            "after_ns": {"low": self.low_ns, "expected": self.expected_ns, "high": self.high_ns},
            "batch_factor": self.batch_factor,
            "as_many_samples_ns": self.as_many_ns,
            "limited_by": self.limited_by,
            "assumptions": list(self.assumptions),
            "widths_ns": self.widths_ns,
            "refusal": self.refusal,
        }


@dataclass(frozen=True)
class _Run:
    """How long a recorded step takes before and after the edits, at one speed of the host, in one world."""

    speed: int
    world: World
    before_ns: int
    after_ns: int


@dataclass(frozen=True)
class _Reach:
    """By how much a prediction may be too long and too short, in nanoseconds."""

    below: float
    above: float

    @classmethod
    def around(cls, expected_ns: float, steps_ns: Sequence[float]) -> _Reach:
        return cls(max(0.0, expected_ns - min(steps_ns)), max(0.0, max(steps_ns) - expected_ns))

    @classmethod
    def of_error(cls, error_ns: float) -> _Reach:
        return cls(error_ns, error_ns)

    @classmethod
    def together(cls, reaches: Sequence[_Reach]) -> _Reach:
        return cls(math.hypot(*(each.below for each in reaches)), math.hypot(*(each.above for each in reaches)))


def predict_time(replay: StepReplay, edits: Sequence[Edit], facts: ProgramFacts) -> TimeAnswer:
    texts = tuple(edit.text for edit in edits)
    unknown = ", ".join(edit.text for edit in edits if edit.spec.name not in CHANGES)
    if unknown or replay.refusal is not None:
        why = f"what {unknown} would do to the time is not known: only a run of the edited program shows it"
        return replace(_refuse(replay, replay.refusal or why), edits=texts)
    answer = predict_changes(replay, [change_of(edit) for edit in edits], facts)
    factors = [float(read_factor(edit.argument)) for edit in edits if edit.spec.name == "batch"]
    return replace(answer, edits=texts, batch_factor=math.prod(factors))


def change_of(edit: Edit) -> StepChange:
    known = CHANGES[edit.spec.name]

    def apply(columns: StepColumns, setting: Setting) -> StepColumns:
        return known.apply(columns, replace(setting, argument=edit.argument))

    return replace(known, apply=apply)


def predict_changes(replay: StepReplay, changes: Sequence[StepChange], facts: ProgramFacts) -> TimeAnswer:
    if replay.refusal is None and replay.now_ns is not None:
        try:
            return _predict(replay, changes, facts)
        except CannotPredictError as error:
            return _refuse(replay, str(error))
    return _refuse(replay, replay.refusal)


def expect_after(replay: StepReplay, changes: Sequence[StepChange], facts: ProgramFacts) -> int | None:
    """Return the step that `predict_changes` expects, from its typical step alone; None where nothing is expected."""
    step = replay.typical
    if step is None or replay.refusal is not None or replay.now_ns is None or any(change.bound for change in changes):
        return None
    columns = step.at_speed(step.fit.middle)
    try:
        changed = _change(replay, step, columns, changes, facts)
    except CannotPredictError:
        return None
    return round(replay.now_ns * replay.run(changed).step_ns / max(replay.run(columns).step_ns, 1))


def share_saved_on_fast_host(replay: StepReplay, changes: Sequence[StepChange], facts: ProgramFacts) -> float:
    """Return the share of the typical step that changes save if the profiler slowed the host as much as profilers do.

    For a step whose unprofiled time is unknown: what is saved while Python is slow may be nothing when it is not.
    """
    step, columns = replay.typical, replay.typical_on_fast_host
    if step is None or columns is None:
        return 0.0
    before_ns, changed = replay.fast_ns, _change(replay, step, columns, changes, facts)
    return (before_ns - replay.run(changed).step_ns) / max(before_ns, 1)


def lanes_before_and_after(
    replay: StepReplay, changes: Sequence[StepChange], facts: ProgramFacts
) -> tuple[StepLanes, StepLanes] | None:
    """Return the typical step's lanes as it is and as it is expected after some changes; None without a prediction."""
    step, after_ns = replay.typical, expect_after(replay, changes, facts)
    if step is None or after_ns is None or replay.now_ns is None:
        return None
    columns = step.at_speed(step.fit.middle)
    before, after = (columns, replay.now_ns), (_change(replay, step, columns, changes, facts), after_ns)
    now, then = (lay_out_lanes(step, form, replay.run(form), time_ns) for form, time_ns in (before, after))
    return now, then


def _refuse(replay: StepReplay, refusal: str | None) -> TimeAnswer:
    return TimeAnswer(replay.now_ns, replay.unprofiled_ns, replay.proof, replay.fit, refusal)


def _predict(replay: StepReplay, changes: Sequence[StepChange], facts: ProgramFacts) -> TimeAnswer:
    now_ns = replay.now_ns
    assert now_ns is not None
    steps = replay.fitted
    runs = list(_run_all(replay, steps, changes, facts))
    typical = steps[len(steps) // 2]
    changed = _change(replay, typical, typical.at_speed(typical.fit.middle), changes, facts)
    before_ns = median(run.before_ns for run in runs if run.speed == 1)
    after_ns = _medians(runs, now_ns / max(before_ns, 1))
    # How much the profiler slowed the host is unknown where no step was timed without it: between not and most.
    fast_share = None if replay.unprofiled_ns else share_saved_on_fast_host(replay, changes, facts)
    on_fast_ns = [] if fast_share is None else [now_ns * (1 - fast_share)]
    expected_ns = round(fmean([after_ns[1, "expected"], *on_fast_ns]))
    reaches = {
        _SPEED: _Reach.around(
            expected_ns, [*(ns for (_, world), ns in after_ns.items() if world == "expected"), *on_fast_ns]
        ),
        _OPEN: _Reach.around(expected_ns, [ns for (speed, _), ns in after_ns.items() if speed == 1]),
        "how recorded steps differ": _Reach.of_error(_error_of_steps(runs)),
        _PROCESSES: _reach_of_processes(replay, changed, expected_ns),
        _STEPS: _Reach.of_error(replay.variation * expected_ns),
        # What makes the replays longer or shorter than the measured step changes by the same share, or stays.
        "how the replay differs from the measured step": _Reach.around(
            expected_ns, [after_ns[1, "expected"] * before_ns / now_ns + now_ns - before_ns]
        ),
        "how the replay differs from the recorded step": _Reach.of_error(
            0.0 if replay.proof is None else abs(replay.proof.error) * expected_ns
        ),
    }
    corner = _Reach.around(expected_ns, [*after_ns.values()])
    reach = _reach_of_all(reaches, corner)
    here = _reach_of_all({name: each for name, each in reaches.items() if name not in (_STEPS, _PROCESSES)}, corner)
    saved_ns = max(0, now_ns - expected_ns)
    unexplained = _Reach(*(_UNEXPLAINED * now_ns + share * saved_ns for share in (_OF_SAVED_BELOW, _OF_SAVED_ABOVE)))
    shortest = _change(replay, typical, typical.at_speed(typical.fit.middle), changes, facts, world="least")
    least_ns = max(expected_ns - reach.below - unexplained.below, OTHER_GPU[0] * _busiest_ns(shortest))
    bounds = [change.bound for change in changes if change.bound]
    parts = typical.find_parts(changed, replay.run(changed), max(0, expected_ns))
    widths_ns = {name: round(each.below + each.above) for name, each in reaches.items()}
    widths_ns["what no part of this accounts for"] = round(unexplained.below + unexplained.above)
    return TimeAnswer(
        now_ns,
        replay.unprofiled_ns,
        replay.proof,
        replay.fit,
        low_ns=max(0, min(expected_ns, round(least_ns))),
        expected_ns=None if bounds else expected_ns,
        high_ns=round(expected_ns + reach.above + unexplained.above),
        high_here_ns=round(expected_ns + here.above),
        limited_by=None if bounds else sum_parts(parts, "cause"),
        assumptions=(*bounds, *_assumptions(replay, changes)),
        widths_ns=dict(sorted(widths_ns.items(), key=lambda item: -item[1])),
    )


def _busiest_ns(columns: StepColumns) -> int:
    """Return what the operations of a step's busiest stream take: no host makes the step shorter than that."""
    sums_ns = Counter[int]()
    for stream, duration_ns in zip(columns.stream, columns.duration_ns, strict=True):
        sums_ns[stream] += duration_ns
    return max(sums_ns.values(), default=0)


def _reach_of_processes(replay: StepReplay, changed: StepColumns, expected_ns: int) -> _Reach:
    usual_ns = max(replay.run(changed).step_ns, 1)
    others_ns = [expected_ns * replay.run(slow_host(changed, by)).step_ns / usual_ns for by in OTHER_HOST]
    gpus_ns = [expected_ns * by for by in OTHER_GPU]
    return _Reach.together([_Reach.around(expected_ns, others_ns), _Reach.around(expected_ns, gpus_ns)])


_STEPS = "how unprofiled steps differ"
_SPEED, _OPEN = "how fast Python is without the profiler", "what the edit leaves open"
_PROCESSES = "how speed differs between two processes"


def _reach_of_all(reaches: Mapping[str, _Reach], corner: _Reach) -> _Reach:
    """Return the reach of all; a race may be lost only where the host is fast and the kernels are short: ``corner``."""
    both = _Reach.together([reaches[_SPEED], reaches[_OPEN]])
    both = _Reach(max(both.below, corner.below / _JOINT), max(both.above, corner.above / _JOINT))
    return _Reach.together([both, *(reach for name, reach in reaches.items() if name not in (_SPEED, _OPEN))])


def _run_all(
    replay: StepReplay, steps: Sequence[ReplayedStep], changes: Sequence[StepChange], facts: ProgramFacts
) -> Iterator[_Run]:
    for step in steps:
        speeds = (step.fit.least, step.fit.middle, step.fit.most)
        for speed, factor in enumerate(speeds):
            if speed != 1 and factor == step.fit.middle:
                continue
            columns = step.at_speed(factor)
            before_ns = replay.run(columns).step_ns
            for world in WORLDS:
                changed = _change(replay, step, columns, changes, facts, world=world)
                yield _Run(speed, world, before_ns, replay.run(changed).step_ns)


def _medians(runs: Sequence[_Run], scale: float) -> dict[tuple[int, World], float]:
    after: dict[tuple[int, World], list[int]] = {}
    for run in runs:
        after.setdefault((run.speed, run.world), []).append(run.after_ns)
    return {key: scale * median(steps) for key, steps in after.items()}


def _error_of_steps(runs: Sequence[_Run]) -> float:
    changes = [run.after_ns - run.before_ns for run in runs if run.speed == 1 and run.world == "expected"]
    return (max(changes) - min(changes)) / 2 / math.sqrt(len(changes))


def _change(
    replay: StepReplay,
    step: ReplayedStep,
    columns: StepColumns,
    changes: Sequence[StepChange],
    facts: ProgramFacts,
    *,
    world: World = "expected",
) -> StepColumns:
    setting, changed = Setting(step, replay.constants, facts, world), columns
    for change in changes:
        changed = change.apply(changed, setting)
    return changed if any(change.of_loader for change in changes) else keep_waiting(changed, columns, setting)


def _assumptions(replay: StepReplay, changes: Sequence[StepChange]) -> Iterator[str]:
    (least, most), (fast, slow) = OTHER_HOST, OTHER_GPU
    yield f"in another process Python takes {least} to {most} times as long, and the GPU {fast} to {slow} times"
    if replay.unprofiled_ns is None:
        yield "no unprofiled step was timed: the step is as recorded, and the profiler may have slowed Python"
    elif not replay.fit.is_identified:
        yield (
            "the GPU sets the pace, so the recording does not say how fast Python is without the profiler: taken as in "
            f"other recordings, {USUAL_HOST[0]:.0%} to {USUAL_HOST[1]:.0%} of its recorded time"
        )
    if any(step.columns.inferred_waits for step in replay.fitted):
        yield (
            "streams wait for events, and the profiler does not say where these were recorded: taken to wait for all "
            "that was launched before and had ended"
        )
    yield from (change.assumption for change in changes if change.assumption)


@dataclass(frozen=True, repr=False)
class Prediction(NotebookResult):
    """What edits do to the step's time and to memory; None where the capture does not hold one of them.

    ``memory_note`` says why nothing stands under ``memory`` although the capture holds it: ``unchanged``, or the reason
    why it is not predicted.
    """

    time: TimeAnswer | None
    memory: WhatIf | None
    memory_note: str = ""

    def to_pandas(self) -> pd.DataFrame:
        """Return the step in nanoseconds and the peak of allocated memory in bytes, now and after the edits."""
        import pandas as pd

        columns = ["figure", "now", "low", "expected", "high"]
        rows: list[tuple[object, ...]] = []
        if self.time is not None:
            time = self.time
            rows.append(("step_ns", time.now_ns, time.low_ns, time.expected_ns, time.high_ns))
        if self.memory is not None:
            today, after = (case.allocated_peak_bytes for case in (self.memory.cases[0], self.memory.cases[-1]))
            rows.append(("allocated_peak_bytes", today, None, after, None))
        return pd.DataFrame(rows, columns=columns)
