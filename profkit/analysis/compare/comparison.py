"""Compare two captures in kernel time, in unprofiled steps and in memory: the result of ``profkit compare``.

Some differences of where they come from disturb a comparison: another profiler, GPU, driver, library, workload or
precision changes times for its own reasons, and a capture that fails its self-check lacks times. The workload is the
program. Other differences are only stated, because they are what one wants to compare: the program's arguments, how the
model was compiled, the revision of the code, what was annotated, whether CPU operators were recorded. A fact that only
one capture has is unknown, not different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profkit.analysis import NotebookResult, table_of
from profkit.analysis.compare import ReducedWork, reduce_work, sample_both
from profkit.analysis.compare.kernel_changes import (
    Change,
    ModuleComparison,
    TimeComparison,
    compare_modules,
    compare_times,
    measure_change,
)
from profkit.analysis.kernels.compiled_code import RunCompilations, find_compilations, read_run_compilations
from profkit.analysis.lines import find_rare_steps_of
from profkit.analysis.memory.compare import Comparison
from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.self_check import SelfCheck
from profkit.analysis.statistics import Verdict, interval_of_step_times, judge_change
from profkit.analysis.time_account.step_times import (
    PhaseSamples,
    StepTimes,
    is_whole_step,
    name_statistic,
    summarize_step_times,
)
from profkit.errors import Finding, UsageError
from profkit.run.directory import Run
from profkit.run.manifest import Manifest, find_condition
from profkit.trace.columns import Ints, Trace, distinct_values, empty_ints, rows_by_value

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class CleanChange:
    """What a phase takes unprofiled (`PhaseSamples.time_ns`), its change, and its 95 % interval if there is one."""

    name: str
    before_ns: int
    after_ns: int
    change_ns: int
    low_ns: int | None
    high_ns: int | None
    verdict: Verdict
    waits: bool

    @property
    def is_whole_step(self) -> bool:
        return is_whole_step(self.name)


@dataclass(frozen=True)
class CleanComparison:
    """The changes of unprofiled steps and phases; ``labels`` say where they ran, ``samples`` how many there are."""

    labels: tuple[str, str]
    samples: tuple[int, int]
    changes: tuple[CleanChange, ...]

    def describe_samples(self, change: CleanChange) -> str:
        """Return what the times of one change are of: ``medians of 4 and 4 unprofiled steps``."""
        statistic = name_statistic(waits=change.waits, several=True)
        return f"{statistic} of {self.samples[0]} and {self.samples[1]} unprofiled steps"


@dataclass(frozen=True)
class Headline:
    """How long a step took before and after: the first thing that a person asks.

    ``what`` says what was timed, ``source`` how. ``change_share`` is the change as a fraction of before and
    ``speed_factor`` before over after; None where that would divide by 0.
    """

    what: str
    source: str
    before_ns: int
    after_ns: int
    change_ns: int
    change_share: float | None
    speed_factor: float | None
    low_ns: int | None
    high_ns: int | None
    verdict: Verdict


@dataclass(frozen=True, repr=False)
class CaptureComparison(NotebookResult):
    """What changed from one capture to another; a part is None if one of the captures lacks what it compares.

    ``time`` is the profiled kernel time per step, ``clean`` the time of unprofiled steps, ``memory`` the allocated
    peak. ``warnings`` say which side lacks which part, and what to know about the others.
    ``modules`` is the kernel time by module, ``compilations`` what torch.compile did in either run, ``recorded_step``
    the change of the steps under the profiler. The JSON of ``profkit compare --format json`` has the same fields.
    """

    before: str
    after: str
    provenance: Provenance
    time: TimeComparison | None
    clean: CleanComparison | None
    memory: Comparison | None
    warnings: tuple[Finding, ...]
    modules: ModuleComparison | None = None
    compilations: tuple[RunCompilations | None, RunCompilations | None] = (None, None)
    recorded_step: Change | None = None

    @property
    def headlines(self) -> tuple[Headline, ...]:
        """Return the change of a step, by the best clock that both captures have; one for each context of a run."""
        if self.clean is not None and (whole := [change for change in self.clean.changes if change.is_whole_step]):
            labels = " and ".join(dict.fromkeys(self.clean.labels))
            return tuple(
                _headline(
                    change.name,
                    f"{self.clean.describe_samples(change)}, {labels}",
                    (change.before_ns, change.after_ns),
                    change,
                )
                for change in whole
            )
        if self.time is None:
            return ()
        change, what = self.time.kernel_time, "kernel time" if self.time.measure == "gpu-kernel" else "self time"
        if self.recorded_step is not None:
            change, what = self.recorded_step, "step, profiled,"
        elif self.time.range is not None:
            what = f"{what} under {self.time.range!r}"
        source = f"means of {self.time.samples[0]} and {self.time.samples[1]} {self.time.unit}s"
        return (_headline(what, source, (change.before_per_sample_ns, change.after_per_sample_ns), change),)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per change: of the kernels in their ranges, else of unprofiled phases, else of memory.

        Of kernels the columns ``before`` and ``after`` are names, and times are as in `Change`.
        """
        import pandas as pd

        if self.time is not None:
            return pd.DataFrame(
                [
                    {
                        **{key: getattr(part, key) for key in ("range", "category", "kind")},
                        "before": "; ".join(kernel.name for kernel in part.before),
                        "after": "; ".join(kernel.name for kernel in part.after),
                        **vars(part.change),
                    }
                    for part in self.time.parts
                ]
            )
        if self.clean is not None:
            return table_of(self.clean.changes, CleanChange)
        return pd.DataFrame() if self.memory is None else self.memory.to_pandas()

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self) | {"headlines": [asdict(headline) for headline in self.headlines]}
        if self.time is not None:
            data["time"]["rounding_ns"] = self.time.rounding_ns
        if self.memory is not None:
            data["memory"] = self.memory.to_dict()
        return data


def _headline(what: str, source: str, times_ns: tuple[int, int], change: Change | CleanChange) -> Headline:
    before, after = times_ns
    return Headline(
        what=what,
        source=source,
        before_ns=before,
        after_ns=after,
        change_ns=change.change_ns,
        change_share=change.change_ns / before if before else None,
        speed_factor=before / after if after else None,
        low_ns=change.low_ns,
        high_ns=change.high_ns,
        verdict=change.verdict,
    )


@dataclass(frozen=True, eq=False)
class ReducedCapture:
    """What a comparison needs of a capture, so that its trace can be forgotten before the next one is read.

    ``work`` is None if there is no trace, or nothing in it to compare. ``steps_ns`` are the recorded steps of the whole
    capture, none if only what lies under ``range`` is compared.
    """

    path: Path
    run: Run | None
    snapshot: OpenedSnapshot | None
    origin: Origin
    range: str | None
    work: ReducedWork | None
    steps_ns: Ints


def reduce_capture(capture: OpenedCapture, range: str | None = None) -> ReducedCapture:
    trace, work, steps_ns = capture.trace, None, empty_ints()
    if trace is not None and len(trace.trace.work):
        steps_ns = trace.account.recorded_steps_ns() if range is None else steps_ns
        work = reduce_work(trace.attribution, range)
    return ReducedCapture(capture.path, capture.run, capture.snapshot, find_origin(capture), range, work, steps_ns)


def compare_captures(
    before: ReducedCapture, after: ReducedCapture, *, force: bool, may_be_empty: bool = False
) -> CaptureComparison:
    """Return what changed between two captures, reduced to the same range; see `profkit.compare`.

    Raises:
        UsageError: one measures GPU kernels and the other CPU operators; they differ in something that could be
            mistaken for a change of the program, without ``force``; or there is nothing to compare, as in light records
            of ranks alone, unless it ``may_be_empty``.
    """
    refuse_other_measure(before, after)
    provenance, range = compare_provenance(before.origin, after.origin), before.range
    if provenance.disturbances and not force:
        facts = ", ".join(difference.fact for difference in provenance.disturbances)
        raise UsageError(
            f"{before.path} and {after.path} differ in {facts}, which may change times by itself; record both under the"
            " same conditions, or pass --force"
        )
    runs = (before.run, after.run)
    steps = [None if run is None else summarize_step_times(run.manifest) for run in runs]
    time = clean = memory = modules = recorded_step = None
    if before.work is not None and after.work is not None:
        samples = sample_both(before.work, after.work)
        time, modules = compare_times(*samples), compare_modules(*samples)
        if time.unit == "step" and len(before.steps_ns) and len(after.steps_ns):
            recorded_step = measure_change(before.steps_ns, after.steps_ns)
    if range is None:
        if steps[0] is not None and steps[1] is not None:
            clean = compare_unprofiled(steps[0], steps[1])
        if before.snapshot is not None and after.snapshot is not None:
            memory = before.snapshot.against(after.snapshot)
    if time is None and clean is None and memory is None and not may_be_empty:
        raise UsageError(_explain_nothing(before, after, range))
    return CaptureComparison(
        before=str(before.path),
        after=str(after.path),
        provenance=provenance,
        time=time,
        clean=clean,
        memory=memory,
        warnings=(
            *_warn_of_missing("kernel times", before.work, after.work),
            *_warn_of_missing("unprofiled steps", *steps),
            *(_warn_of_phases(*steps) if range is None else ()),
            *(() if clean is None else (*_warn_of_rare_steps("before", before), *_warn_of_rare_steps("after", after))),
            *_warn_of_missing("memory snapshots", before.snapshot, after.snapshot),
            *(() if time is None else time.warnings),
            *_warn_of_compilations("before", before),
            *_warn_of_compilations("after", after),
        ),
        modules=modules,
        compilations=(read_run_compilations(before.run), read_run_compilations(after.run)),
        recorded_step=recorded_step,
    )


def compare_unprofiled(before: StepTimes, after: StepTimes) -> CleanComparison:
    shared = [name for name in before.samples if name in after.samples]
    changes = [_compare_samples(name, before.samples[name], after.samples[name]) for name in shared]
    counts = [max((len(side.samples[name].rest_ns) for name in shared), default=0) for side in (before, after)]
    return CleanComparison((before.label, after.label), (counts[0], counts[1]), tuple(changes))


def _compare_samples(name: str, before: PhaseSamples, after: PhaseSamples) -> CleanChange:
    columns = [np.stack([side.rest_ns, side.wait_ns], axis=1)[side.counted] for side in (before, after)]
    interval = interval_of_step_times(columns[0], columns[1])
    low, high = (None, None) if interval is None else (round(end) for end in interval)
    # A median of integers may end in one half, which a rounded difference would lose.
    old, new = Fraction(before.time_ns), Fraction(after.time_ns)
    verdict, waits = judge_change(new - old, low, high), before.waits or after.waits
    return CleanChange(name, round(old), round(new), round(new - old), low, high, verdict, waits)


def refuse_other_measure(before: ReducedCapture, after: ReducedCapture) -> None:
    """Raise UsageError if one trace measures GPU kernels and the other CPU operators: no force helps."""
    measures = [None if capture.work is None else capture.work.measure for capture in (before, after)]
    if None not in measures and measures[0] != measures[1]:
        named = {"gpu-kernel": "the time of GPU kernels", "cpu-operator": "the self time of CPU operators"}
        first, second = (named[measure] for measure in measures if measure is not None)
        raise UsageError(f"{before.path} measures {first} and {after.path} measures {second}: they cannot be compared")


def _warn_of_compilations(side: str, capture: ReducedCapture) -> Iterator[Finding]:
    for finding in find_compilations(capture.run):
        yield Finding(finding.code, f"{side}: {finding.message}", finding.verdict)


def _warn_of_missing(what: str, before: object, after: object) -> tuple[Finding, ...]:
    if (before is None) == (after is None):
        return ()
    return (Finding("one-sided", f"{what}: only {'after' if before is None else 'before'} has them; not compared"),)


def _warn_of_phases(before: StepTimes | None, after: StepTimes | None) -> Iterator[Finding]:
    """Name what only one side timed: the changes of the other phases do not add up to that of the step."""
    if before is None or after is None:
        return
    for side, mine, others in (("before", before, after), ("after", after, before)):
        alone = [name for name in mine.samples if name not in others.samples]
        if alone:
            yield Finding(
                "one-sided-phases", f"only the run {side} timed {', '.join(alone)}: part of its step, not compared"
            )


def _warn_of_rare_steps(side: str, capture: ReducedCapture) -> Iterator[Finding]:
    rare = None if capture.run is None else find_rare_steps_of(capture.run)
    if rare is not None:
        longer = f"{rare.which} {rare.longer_ns / 1e6:,.1f} ms longer"
        yield Finding("rare-steps", f"{side}: {longer}, and the times of steps leave that out")


def _explain_nothing(before: ReducedCapture, after: ReducedCapture, range: str | None) -> str:
    if range is not None:
        return f"range {range!r}: only the kernel times of two traces can be compared by range"
    holdings = [", ".join(_list_holdings(capture)) or "nothing to compare" for capture in (before, after)]
    return f"{before.path} holds {holdings[0]}, {after.path} holds {holdings[1]}: they cannot be compared"


def _list_holdings(capture: ReducedCapture) -> list[str]:
    held = []
    if capture.work is not None:
        held.append("kernel times")
    elif capture.origin.self_check is not None:
        held.append("a trace without GPU kernels")
    if capture.run is not None and summarize_step_times(capture.run.manifest) is not None:
        held.append("unprofiled steps")
    return held + (["a memory snapshot"] if capture.snapshot is not None else [])


# Facts of a run: the first ones disturb a comparison, the others are only stated.
_DISTURBING: dict[str, Callable[[Manifest], object]] = {
    "driver": lambda run: run.driver,
    "torch": lambda run: run.versions.get("torch"),
    "CUDA": lambda run: run.versions.get("cuda"),
    "device": lambda run: run.device,
    "workload": lambda run: _program(run) or None,
    "how many steps are one": lambda run: None if run.first is None else run.first.step_times,
    "batch": lambda run: run.workload.batch,
    "context": lambda run: run.workload.context,
    "contexts": lambda run: run.workload.contexts or None,
    "passes": lambda run: run.workload.passes,
    "precision (autocast)": lambda run: run.workload.dtype or find_condition(run, "autocast_dtypes"),
    "float32 matmul precision (tf32)": lambda run: find_condition(run, "float32_matmul_precision"),
    "cuBLAS tf32": lambda run: find_condition(run, "cuda_matmul_allow_tf32", "cuda_matmul_fp32_precision"),
    "cuDNN tf32": lambda run: find_condition(run, "cudnn_allow_tf32"),
}
_STATED: dict[str, Callable[[Manifest], object]] = {
    "command": lambda run: " ".join(run.argv) or None,
    "torch.compile": lambda run: run.workload.compile_mode or getattr(find_condition(run, "compiled"), "graphs", None),
    "which GPU": lambda run: find_condition(run, "gpu_uuid"),
    "cuDNN benchmark": lambda run: find_condition(run, "cudnn_benchmark"),
    "deterministic algorithms": lambda run: find_condition(run, "deterministic_algorithms"),
    "CPU threads": lambda run: find_condition(run, "cpu_threads"),
    "seed": lambda run: run.workload.seed,
    "annotation": lambda run: run.workload.annotate,
    "annotation depth": lambda run: run.workload.depth,
    "revision of the code": lambda run: run.git_revision,
    "profkit": lambda run: run.versions.get("profkit"),
    "python": lambda run: run.versions.get("python"),
    "state of the run": lambda run: run.status,
}
_SELF_CHECK = "self-check"
_OPERATORS = "CPU operators"
_RECORDED, _NOT_RECORDED = "recorded", "not recorded"


@dataclass(frozen=True)
class Difference:
    """A fact that both captures have, with different values; ``disturbs`` if a comparison then needs force."""

    fact: str
    before: str
    after: str
    disturbs: bool


@dataclass(frozen=True)
class Provenance:
    """What differs, the disturbing first."""

    differences: tuple[Difference, ...]

    @property
    def disturbances(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.disturbs]


@dataclass(frozen=True)
class Origin:
    """Where one capture comes from; ``self_check`` is None without a trace."""

    facts: dict[str, str]
    self_check: SelfCheck | None


def find_origin(capture: OpenedCapture) -> Origin:
    return Origin(_state_facts(capture), None if capture.trace is None else capture.trace.self_check)


def compare_provenance(before: Origin, after: Origin) -> Provenance:
    old, new = before.facts, after.facts
    differences = [
        Difference(fact, old[fact], new[fact], fact not in _STATED and fact != _OPERATORS)
        for fact in old.keys() & new.keys()
        if old[fact] != new[fact]
    ]
    differences += _judge_self_checks(before, after)
    order = {fact: place for place, fact in enumerate([*_DISTURBING, *_STATED])}
    differences.sort(key=lambda change: (not change.disturbs, order.get(change.fact, 0), change.fact))
    return Provenance(tuple(differences))


def _state_facts(capture: OpenedCapture) -> dict[str, str]:
    facts = dict(_state_trace(capture.trace.trace)) if capture.trace is not None else {}
    if capture.run is None:
        return facts
    manifest = capture.run.manifest
    for fact, read in (_DISTURBING | _STATED).items():
        value = read(manifest)
        if value is not None:
            facts[fact] = ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
    if "GPU" not in facts and manifest.gpu is not None:
        facts["GPU"] = manifest.gpu
    steps = summarize_step_times(manifest)
    if steps is not None:
        facts["unprofiled steps"] = steps.label
    return facts


def _state_trace(trace: Trace) -> Iterator[tuple[str, str]]:
    yield "profiler", trace.product.partition("(")[0].rstrip()
    if trace.gpus:
        yield "GPU", ", ".join(sorted(set(trace.gpus)))
    if trace.measure == "gpu-kernel" and len(trace.work):
        processes = rows_by_value(trace.work.process).values()
        yield "GPUs at work", str(sum(len(distinct_values(trace.work.device[rows])) for rows in processes))
        if trace.source == "kineto":
            yield _OPERATORS, _NOT_RECORDED if trace.work.operator is None else _RECORDED
        yield "CUDA graphs", "traced whole" if trace.work.is_graph.any() else "traced by kernel, if any"


def _program(run: Manifest) -> str:
    words = list(run.argv)
    if not words or run.target != " ".join(words):
        return run.target
    script = next((word for word in words if word.endswith(".py")), None)
    module = next((after for flag, after in pairwise(words) if flag == "-m"), None)
    return script or module or words[0]


def _judge_self_checks(before: Origin, after: Origin) -> list[Difference]:
    """Return one difference if a capture failed its self-check, even if both did: they need not have lost the same."""
    checks = [before.self_check, after.self_check]
    if not any(check is not None and check.failed for check in checks):
        return []
    before_result, after_result = (
        "–" if check is None else check.of("failed")[0].message if check.failed else "passed" for check in checks
    )
    return [Difference(_SELF_CHECK, before_result, after_result, True)]
