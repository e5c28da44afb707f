"""Where two captures come from, and which differences could be mistaken for a change of the program.

Some differences disturb a comparison: another profiler, GPU, driver, library, workload or precision changes times for
its own reasons, and a capture that fails its self-check lacks times. The workload is the program. Other differences are
only stated, because they are what one wants to compare: the program's arguments, how the model was compiled, the
revision of the code, what was annotated, whether CPU operators were recorded. A fact that only one capture
has is unknown, not different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from profkit.analysis.opened import OpenedCapture
from profkit.analysis.self_check import SelfCheck
from profkit.analysis.time_account.step_times import summarize_step_times
from profkit.run.manifest import Manifest, find_condition
from profkit.trace.columns import Trace, distinct_values, rows_by_value

# Facts of a run: the first ones disturb a comparison, the others are only stated.
_DISTURBING: dict[str, Callable[[Manifest], object]] = {
    "driver": lambda run: run.driver,
    "torch": lambda run: run.versions.get("torch"),
    "CUDA": lambda run: run.versions.get("cuda"),
    "device": lambda run: run.device,
    "workload": lambda run: _program(run) or None,
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
