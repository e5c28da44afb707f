"""Rows of causes of programs that compute on the CPU.

What a step is without them follows from unprofiled times alone (`CpuStep`): of sampled lines, and of operators by
their share of a phase's recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from profkit.analysis.causes.changes import OF_SAMPLED
from profkit.analysis.causes.data import (
    are_workers_restarted,
    cheapen_batches,
    choose_workers,
    describe_loader,
    describe_padding,
    describe_restarts,
    restarts_elsewhere,
    shares_without_padding,
    wait_for_data,
)
from profkit.analysis.causes.evidence import Cause, CpuStep, Evidence, source_line
from profkit.analysis.causes.host import group_nearby
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.step_replay import WORLDS, World
from profkit.analysis.step_replay.data_waits import FETCH_NS
from profkit.analysis.time_account import mark_work_of_steps
from profkit.analysis.tree.modules import Place, places_of_ranges
from profkit.names import BACKWARD, FORWARD, LOSS
from profkit.run.lines import LineTime
from profkit.trace.columns import Ints, distinct_values, empty_ints

_LEAST_SHARE = 0.01
_LARGEST_ERROR = 0.25
"""What takes a time known less well does not run in each step, as a rollout before several steps of an optimizer."""
_BUSY_THREADS: Mapping[World, float] = {"least": 0.0, "expected": 0.5, "most": 1.0}
"""How many of torch's threads keep a CPU busy, as a power of their number: one, or all."""
_SMALL_NS = 20_000
"""An operator that takes less is mostly what calling it takes."""
_AT_ONCE = "do it for all elements at once, less often, or in a DataLoader's worker"
_MANY = 300
"""A call of a module calls fewer operators; a loop over the elements of a batch more."""
_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATES = "AccumulateGrad"
_NAN_CHECKS = ("aten::isnan", "aten::ne", "aten::any", "aten::is_nonzero")
_KEEPING_STACK_NS: Mapping[World, int] = {"least": 1_000_000, "expected": 450_000, "most": 150_000}
"""What keeping an operation's stack takes: 0.15 ms of Python in a function of a script, 0.5 ms within modules."""
_IN_SINGLE: Mapping[World, float] = {"least": 0.35, "expected": 0.5, "most": 0.75}
"""What operators take of their time in double precision: vector registers hold twice as many numbers, memory moves as
many."""
_CALLED_NS = 5_000
"""What takes less is mostly its call: in single precision `mul` took 84 % of 1.7 us, `addmm` 57 % of 12.9."""


class _Operators:
    """The recorded steps' operators: which of them lie in which phase and module, and which compute something again."""

    def __init__(self, attribution: Attribution, steps: int) -> None:
        trace, places = attribution.trace, [*places_of_ranges(attribution), Place(None)]
        self.names, self.steps = trace.names, max(1, steps)
        self.name, self.time_ns = trace.work.name, trace.work.duration_ns
        self.rows: dict[str | None, dict[str | None, list[int]]] = {}
        self.again: list[int] = []
        self.innermost = innermost = attribution.work.innermost
        for row in np.flatnonzero(mark_work_of_steps(attribution)).tolist():
            place = places[innermost[row]]
            self.rows.setdefault(place.phase, {}).setdefault(next(reversed(place.modules), None), []).append(row)
            if place.is_again:
                self.again.append(row)

    def of_phase(self, phase: str | None) -> list[int]:
        return [row for rows in self.rows.get(phase, {}).values() for row in rows]

    def count(self, rows: Sequence[int], holds: Callable[[str], bool]) -> float:
        return sum(holds(self.names[name]) for name in self.name[rows].tolist()) / self.steps

    def of_loop(self, rows: Sequence[int]) -> Ints:
        """Return those of a place each call of which has as many as only a loop calls; else none."""
        chosen = np.array(rows, dtype=np.int64)
        calls = len(distinct_values(self.innermost[chosen]))
        return chosen if len(chosen) >= _MANY * calls else empty_ints()

    def small(self, rows: Ints) -> Ints:
        return rows[self.time_ns[rows] < _SMALL_NS]

    def large_ns(self, rows: Sequence[int]) -> float:
        times = self.time_ns[rows]
        return float(times[times >= _SMALL_NS].sum()) / self.steps

    def computing_share(self, rows: Sequence[int]) -> float:
        times = self.time_ns[rows]
        return float(times[times >= _CALLED_NS].sum() / max(1, times.sum()))

    def share(self, rows: Sequence[int] | Ints, of: Sequence[int]) -> float:
        return float(self.time_ns[rows].sum() / max(1, self.time_ns[of].sum())) if len(rows) else 0.0


def _loader(evidence: Evidence, step: CpuStep) -> Iterator[Cause]:
    """The program makes its batches itself, or its workers are too slow; they share its CPUs."""
    facts, waited_ns = evidence.facts, wait_for_data(evidence)
    if are_workers_restarted(evidence):
        saved = {world: facts.saved_by_keeping_workers(world) for world in WORLDS}
        yield _answered(describe_restarts(evidence), step, saved)
        return
    yield from restarts_elsewhere(evidence)
    pace_ns = step.now_ns - waited_ns
    cheaper = cheapen_batches(evidence, waited_ns, pace_ns) if waited_ns >= _LEAST_SHARE * step.now_ns else None
    if cheaper is not None:
        cause, every_ns = cheaper
        left = {world: max(pace_ns + FETCH_NS[world], round(every_ns * OF_SAMPLED[world])) for world in WORLDS}
        yield _answered(cause, step, {world: step.now_ns - time_ns for world, time_ns in left.items()})
        return
    workers = choose_workers(evidence, waited_ns, pace_ns)
    if workers is None:
        return
    saved = {}
    for world in WORLDS:
        rest_ns, batch_ns = step.now_ns - waited_ns, facts.batch_in_worker(waited_ns, world) or 0
        at_work = min(workers, batch_ns / max(rest_ns, 1))
        slower = facts.slower_beside(at_work, world) / facts.slower_beside(facts.workers, world)
        ready_ns = rest_ns * max(1.0, slower) + FETCH_NS[world]
        cpus, busy = facts.cpus or workers, facts.threads ** _BUSY_THREADS[world]
        shared_ns = (rest_ns * min(busy, cpus) + batch_ns * facts.worker_cpus) / cpus
        made_ns = max(shared_ns, batch_ns / facts.batches_at_once(workers, world))
        saved[world] = round(step.now_ns - max(ready_ns, made_ns))
    yield _answered(describe_loader(evidence, waited_ns, workers), step, saved)


def _python_lines(evidence: Evidence, step: CpuStep, operators: _Operators) -> Iterator[Cause]:
    """Lines that run outside of the passes and the optimizer: batches, masks, averages and logs made by hand.

    What large operators compute there may have to be computed in any case, or can be left out of most steps. What
    multiplies matrices is a part of the model, whose ``forward`` was called by name.
    """
    if FORWARD not in step.phases:
        return
    outside = [line for line in _own_lines(evidence, step) if line.phase is None and not evidence.computes_loss(line)]
    outside_ns = max(1, step.now_ns - sum(step.phases.values()))
    large_ns = operators.large_ns(operators.of_phase(None))
    counted = () if evidence.work is None else evidence.work.lines
    multiply = {(one.file, one.line) for one in counted if one.flops}
    for lines in group_nearby(outside):
        if any(line.place in multiply for line in lines):
            continue
        line, time_ns, error_ns = _sum(lines)
        saved: dict[World, float] = dict.fromkeys(WORLDS, time_ns)
        saved["most"] *= 1 - min(1.0, large_ns / outside_ns)
        is_at_once = "_foreach_" in (line.called or "")
        cause = Cause(
            code="python",
            cause=f"Python in {line.function}{f' ({line.called})' if line.called else ''} runs in each step",
            detail=", outside of the passes and the optimizer",
            line=source_line(line),
            change="do it less often" if is_at_once else _AT_ONCE,
            evidence={"time_ns": time_ns, "lines": ", ".join(str(one.line) for one in lines)},
        )
        if error_ns < _LARGEST_ERROR * time_ns:
            yield _answered(cause, step, saved, error_ns)


def _loops(evidence: Evidence, step: CpuStep, operators: _Operators) -> Iterator[Cause]:
    """Lines of the forward pass or the loss that call many small operators, which cost what calling them takes."""
    own = list(_own_lines(evidence, step))
    for phase in (FORWARD, LOSS):
        places = operators.rows.get(phase, {})
        small = {module: operators.small(operators.of_loop(rows)) for module, rows in places.items()}
        module = max(small, key=lambda module: len(small[module]), default=None)
        count = len(small.get(module, ())) / operators.steps
        groups = [_sum(group) for group in group_nearby(line for line in own if line.phase == phase)]
        groups = [group for group in groups if group[1] < _SMALL_NS * count]
        if not groups:
            continue
        line, time_ns, error_ns = max(groups, key=lambda group: group[1])
        again = operators.of_loop(operators.rows.get(BACKWARD, {}).get(module, []))
        per_share, whole = step.phases.get(BACKWARD, 0), operators.of_phase(BACKWARD)
        backward_ns, small_ns = (per_share * operators.share(rows, whole) for rows in (again, operators.small(again)))
        cause = Cause(
            code="loop",
            cause=f"a Python loop calls {count:,.0f} small operators a step",
            line=source_line(line),
            module=module,
            change="compute all elements at once; what does not change, once before the loop",
            evidence={"operators": count, "time_ns": time_ns, "backward_ns": backward_ns},
        )
        saved: dict[World, float] = dict.fromkeys(WORLDS, time_ns + backward_ns)
        yield _answered(cause, step, saved | {"most": time_ns + small_ns}, error_ns)


def _anomaly(evidence: Evidence, step: CpuStep, operators: _Operators) -> Iterator[Cause]:
    """Anomaly detection: every gradient is searched for NaN, and every operation keeps its stack."""
    if evidence.condition("anomaly_detection") is not True:
        return
    backward = operators.of_phase(BACKWARD)
    checks = [row for row in backward if operators.names[operators.name[row]] in _NAN_CHECKS]
    checked_ns = operators.share(checks, backward) * step.phases.get(BACKWARD, 0)
    nodes = operators.count(backward, lambda name: name.startswith(_NODE) and not name.endswith(_ACCUMULATES))
    cause = Cause(
        code="anomaly",
        cause="anomaly detection is on: every gradient is searched for NaN, and every operation keeps its stack",
        change="torch.autograd.set_detect_anomaly(False)",
        edit="no-anomaly",
        evidence={"checked_ns": checked_ns, "operations": nodes},
    )
    yield _answered(cause, step, {world: checked_ns + nodes * _KEEPING_STACK_NS[world] for world in WORLDS})


def _double_precision(evidence: Evidence, step: CpuStep, operators: _Operators) -> Iterator[Cause]:
    """The counted products are in double precision, as NumPy's numbers are unless told otherwise."""
    if evidence.work is None or evidence.work.dtype != "float64":
        return
    computing_ns = sum(
        step.phases.get(phase, 0) * operators.computing_share(operators.of_phase(phase))
        for phase in (FORWARD, LOSS, BACKWARD)
    )
    cause = Cause(
        code="float64",
        cause="the model computes in double precision",
        change="model.float(), and inputs in torch.float32",
        costs="digits: 7 rather than 16",
        evidence={"computing_ns": computing_ns},
    )
    yield _answered(cause, step, {world: (1 - _IN_SINGLE[world]) * computing_ns for world in WORLDS})


def _padding(evidence: Evidence, step: CpuStep) -> Iterator[Cause]:
    cause = describe_padding(evidence)
    if cause is not None:
        passes_ns = sum(step.phases.get(phase, 0) for phase in (FORWARD, LOSS, BACKWARD))
        left = shares_without_padding(cause)
        yield _answered(cause, step, {world: (1 - left[world]) * passes_ns for world in WORLDS})


def _needless_checkpoints(evidence: Evidence, step: CpuStep, operators: _Operators) -> Iterator[Cause]:
    """Checkpointed modules are computed again in the backward pass."""
    if not evidence.summary.recomputes:
        return
    time_ns = operators.share(operators.again, operators.of_phase(BACKWARD)) * step.phases.get(BACKWARD, 0)
    cause = Cause(
        code="recompute",
        cause="checkpointed modules are computed again in backward",
        change="no torch.utils.checkpoint where memory holds the activations",
        costs="the memory of their activations",
        evidence={"time_ns": time_ns},
    )
    yield _answered(cause, step, dict.fromkeys(WORLDS, time_ns))


def find_causes_on_cpu(evidence: Evidence) -> Iterator[Cause]:
    """Yield what the rows of this file find, if it takes more than the steps' spread; nothing of programs on a GPU."""
    step = evidence.cpu_step
    if step is not None:
        for cause in _find_causes(evidence, step):
            if cause.answer is not None and step.now_ns - (cause.answer.expected_ns or 0) > step.spread_ns:
                yield cause


def _find_causes(evidence: Evidence, step: CpuStep) -> Iterator[Cause]:
    if evidence.trace is None:
        return
    yield from _loader(evidence, step)
    yield from _padding(evidence, step)
    operators = _Operators(evidence.trace.attribution, evidence.summary.program_steps)
    for row in (_double_precision, _python_lines, _loops, _anomaly, _needless_checkpoints):
        yield from row(evidence, step, operators)


def _own_lines(evidence: Evidence, step: CpuStep) -> Iterator[LineTime]:
    """Yield the lines of the thread that trains, without those that call a trainer, a module or a pass."""
    for line in evidence.lines:
        trains = line.place in evidence.trainer_lines or line.method in ("backward", "step", "zero_grad")
        is_module = line.phase is not None and (line.called or "").startswith(("self.", "F."))
        is_long = line.time_ns >= _LEAST_SHARE * step.now_ns
        if line.file and line.thread == "main" and is_long and not trains and not is_module:
            yield line


def _sum(lines: Sequence[LineTime]) -> tuple[LineTime, int, float]:
    longest = max(lines, key=lambda line: line.time_ns)
    return longest, sum(line.time_ns for line in lines), math.hypot(*(line.error_ns for line in lines))


def _answered(cause: Cause, step: CpuStep, saved_ns: Mapping[World, float], error_ns: float = 0.0) -> Cause:
    return replace(cause, answer=step.without(saved_ns, error_ns))
