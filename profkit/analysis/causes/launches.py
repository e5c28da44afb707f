"""Rows of causes: more launches than the work needs, of optimizers and of what is not compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from profkit.analysis.causes.changes import (
    By,
    compile_optimizer,
    drop_some_launches,
    merge_groups,
    scale_operations,
    stop_chosen_waits,
)
from profkit.analysis.causes.evidence import (
    OF_CHAINS,
    WORTH_COMPILING,
    Cause,
    Evidence,
    Operation,
    edits,
    name_times,
    source_line,
    sums_by_index,
)
from profkit.analysis.causes.waits import waits_itself
from profkit.analysis.step_replay.edits import find_zeroed_gradients
from profkit.analysis.step_replay.kernel_edits import COMPILED_PHASES, find_fusable, has_recurrent_layers
from profkit.analysis.step_replay.limits import Limit, LimitPart
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.names import FORWARD, OPTIMIZER, kind_of
from profkit.run.manifest import UsedOptimizer, can_all_be_fused, used_optimizers

_LATE = 0.3
"""A step that waits for launches for this share of it is limited by them."""
_TORCHS_FILLS: By = {"least": 1.0, "expected": 0.95, "most": 0.6}
"""Which share of fills is torch's own, in a program that lets it fill what it allocates."""
_FILLS_PYTHON: By = {"least": 1.0, "expected": 0.5, "most": 0.0}
"""Which share of Python before the launch of a fill goes with it; the rest is that of the operation that allocates."""
_IN_ANY_ORDER: By = {"least": 0.02, "expected": 0.1, "most": 0.6}
"""What sums by index take of their time where rows are added in any order, or by an operation's own kernel."""
_MANY = 4
"""Launches of an optimizer's step from which on fewer are worth looking at."""
_MANY_PARAMETERS = 16
_SMALL_NS = 20_000
_MOSTLY = 0.8
"""An optimizer of small kernels has so many of them: one that multiplies matrices is not much faster compiled."""
_MANY_GROUPS, _FEWER = 8, 4
"""So many groups of parameters are worth looking at, if that many times fewer would do."""
_MORE_THAN_LAYERS = 128
"""Groups that were not counted are taken to have the same options if they are more than a model has layers, twice."""
_WITH_DECAY_AND_WITHOUT = 2
_IN_ONE_LAUNCH: By = {"least": 110, "expected": 36, "most": 12}
"""How many parameters one launch takes: 30 to 110, by how many tensors belong to each (MultiTensorApply.cuh)."""


def _optimizer(evidence: Evidence) -> Iterator[Cause]:
    """An optimizer that launches kernels for each parameter, where torch has one for all of them."""
    optimizer, optimizers = evidence.summary.optimizer, used_optimizers(evidence.manifest)
    if optimizer is None or optimizer.kind not in ("foreach", "single tensor"):
        return
    launches = optimizer.launch_count / evidence.summary.program_steps
    has_fused = can_all_be_fused(evidence.manifest)
    has_foreach = bool(optimizers) and all(used.can_be_foreach for used in optimizers)
    names = _name_all(optimizers) or "the optimizer"
    if launches < _MANY or not (has_fused or (optimizer.kind == "single tensor" and has_foreach)):
        return
    better = "fused" if has_fused else "foreach"
    kind = "in a loop over parameters" if optimizer.kind == "single tensor" else "in groups of parameters"
    yield Cause(
        code="optimizer",
        cause=f"{names} steps {kind}",
        detail=f"{' (foreach)' if optimizer.kind == 'foreach' else ''}: {launches:,.0f} launches a step",
        module=OPTIMIZER,
        change=f"{names}(…, {better}=True)",
        changes=edits(f"optimizer:{better}"),
        edit=f"optimizer:{better}",
        evidence={"launches": launches, "span_ns": evidence.summary.per_step(optimizer.span_ns)},
    )


def _written_optimizer(evidence: Evidence) -> Iterator[Cause]:
    """An optimizer that is not torch's, and makes several small operations for each parameter in a loop of Python."""
    optimizer, optimizers = evidence.summary.optimizer, used_optimizers(evidence.manifest)
    # Gradients that are clipped one by one in it are kernels over lists of tensors.
    if optimizer is None or optimizer.kind == "fused" or not optimizers or _communicates(evidence):
        return
    parameters = sum(used.parameters for used in optimizers)
    kernels = [one for one in evidence.kernels if one.phase == OPTIMIZER]
    small = [one for one in kernels if one.category in OF_CHAINS and one.duration_ns < _SMALL_NS]
    if any(used.is_torchs or not used.parameters for used in optimizers) or len(small) < _MOSTLY * len(kernels):
        return
    each = len(kernels) / parameters
    if parameters < _MANY_PARAMETERS or each < _MANY:
        return
    calls = [line for line in (*evidence.lines, *evidence.facts.callers) if line.phase == OPTIMIZER and line.file]
    steps = [
        line for line in calls if (line.called or "").endswith(".step") and line.place not in evidence.trainer_lines
    ]
    line = max(steps, key=lambda line: line.time_ns, default=None)
    yield Cause(
        code="optimizer",
        cause=f"{_name_all(optimizers)} steps in a loop over parameters",
        detail=f": {len(kernels):,} launches a step, {each:.0f} for each parameter",
        line=None if line is None else source_line(line),
        module=OPTIMIZER,
        change="torch.compile(optimizer.step), or an optimizer that is fused",
        changes=[compile_optimizer(sum(used.fused_step_bytes for used in optimizers))],
        costs="compiling at the start",
        worth=WORTH_COMPILING,
        evidence={
            "launches": len(kernels),
            "parameters": parameters,
            "span_ns": evidence.summary.per_step(optimizer.span_ns),
        },
    )


def _small_groups(evidence: Evidence) -> Iterator[Cause]:
    """An optimizer that calls its kernels for each of many groups of parameters, most of them with the same options."""
    optimizer, optimizers = evidence.summary.optimizer, used_optimizers(evidence.manifest)
    if optimizer is None or optimizer.kind not in ("fused", "foreach") or not optimizers:
        return
    if not all(used.can_be_foreach for used in optimizers) or _communicates(evidence):
        return
    is_counted = all(used.groups for used in optimizers)
    groups = sum(used.groups for used in optimizers) if is_counted else _count_equal_calls(evidence)
    unlike = sum(used.unlike_groups for used in optimizers) if is_counted else _WITH_DECAY_AND_WITHOUT
    in_group = sum(used.parameters for used in optimizers) / groups if is_counted else 1.0
    launches = optimizer.launch_count / evidence.summary.program_steps
    if not max(_MANY_GROUPS, _FEWER * unlike) <= groups <= launches:
        return
    left = {world: min(1.0, max(unlike / groups, in_group / most)) for world, most in _IN_ONE_LAUNCH.items()}
    moved_bytes = sum(used.fused_step_bytes for used in optimizers) if optimizer.kind == "fused" else None
    yield Cause(
        code="optimizer",
        cause=f"{_name_all(optimizers)} steps in {groups:,} groups of parameters",
        detail=f": {launches:,.0f} launches a step",
        module=OPTIMIZER,
        change="parameters with the same options in one group"
        + (f": {unlike} in place of {groups}" if is_counted else " (with weight decay and without: two groups)"),
        changes=[merge_groups(left, moved_bytes)],
        costs="saved states of the optimizer fit the old groups",
        evidence={
            "launches": launches,
            "groups": groups,
            "span_ns": evidence.summary.per_step(optimizer.span_ns),
        },
    )


def _name_all(optimizers: Sequence[UsedOptimizer]) -> str:
    return ", ".join(dict.fromkeys(used.name for used in optimizers))


def _communicates(evidence: Evidence) -> bool:
    return any(one.phase == OPTIMIZER and one.category == "communication" for one in evidence.kernels)


def _count_equal_calls(evidence: Evidence) -> int:
    """Return how often a fused optimizer is called if it launches each of several kernels as often, and too often for
    groups by layer; else 0.

    A call of many parameters launches some kernels more often than others: they take fewer parameters.
    """
    counts = Counter(one.name for one in evidence.kernels if one.phase == OPTIMIZER)
    is_fused = any("Fused" in name for name in counts)
    each = set(counts.values())
    return each.pop() if is_fused and len(counts) > 1 and len(each) == 1 and min(each) >= _MORE_THAN_LAYERS else 0


def _zeroed_gradients(evidence: Evidence) -> Iterator[Cause]:
    """Gradients that are filled with zeros in every step, where dropping them costs nothing."""
    step = evidence.step
    if step is None:
        return
    zeroed = set(find_zeroed_gradients(step))
    filled = [one for one in evidence.kernels if one.at in zeroed]
    if filled:
        yield Cause(
            code="zero-grad",
            cause="gradients are filled with zeros",
            detail=f", {name_times(len(filled))}",
            module=filled[0].module or None,
            change="optimizer.zero_grad(set_to_none=True)",
            changes=edits("zero-grad:none"),
            edit="zero-grad:none",
            evidence={"launches": len(filled)},
        )


def _deterministic(evidence: Evidence) -> Iterator[Cause]:
    """Deterministic algorithms fill each tensor that torch allocates, so that nothing reads what nobody wrote.

    Where a program fills tensors itself, too, its fills follow on torch's: they are not known apart. What is gathered
    by an index, or interpolated, has its gradients summed up one row after another.
    """
    is_on = evidence.condition("deterministic_algorithms") is True
    fills = evidence.condition("fills_uninitialized_memory") is not False
    filling = [one for one in evidence.kernels if _is_fill(one)] if is_on and fills else []
    summing = [one for one in evidence.kernels if sums_by_index(one)] if is_on else []
    if not filling and not summing:
        return
    changes, what, settings = [], [], ["torch.use_deterministic_algorithms(False)"]
    if filling:
        choose = evidence.choose(_is_fill)
        changes.append(drop_some_launches(choose, _TORCHS_FILLS, _FILLS_PYTHON, "which fills torch adds"))
        what.append("fill all memory that torch allocates")
    if summing:
        choose = evidence.choose(sums_by_index)
        changes.append(scale_operations(choose, _IN_ANY_ORDER, "how fast sums in any order are"))
        what.append("sum up gradients by index in order")
    else:
        settings.insert(0, "torch.utils.deterministic.fill_uninitialized_memory = False")
    yield Cause(
        code="deterministic",
        cause=f"deterministic algorithms {' and '.join(what)}",
        detail=f", by {len(filling) + len(summing):,} of the step's launches",
        change=", or ".join(settings),
        changes=changes,
        costs="results may differ from run to run"
        + (": with the first, only where memory is read that nothing wrote" if len(settings) > 1 else ""),
        evidence={
            "launches": len(filling) + len(summing),
            "fill_ns": sum(one.duration_ns for one in filling),
            "sum_ns": sum(one.duration_ns for one in summing),
        },
    )


def _is_fill(operation: Operation) -> bool:
    return "FillFunctor" in operation.name and operation.phase != OPTIMIZER and operation.is_alone


def _compile(evidence: Evidence) -> Iterator[Cause]:
    """A model that is not compiled: where launches limit the step, graphs replay them; else small kernels are fused."""
    summary, step, limits = evidence.summary, evidence.step, evidence.limits
    replays = summary.gpu is not None and summary.gpu.graph_launches
    if step is None or replays or evidence.is_debugged:
        return
    if summary.head.is_compiled or summary.recomputes:
        return
    of_phases = [] if limits is None else limits.parts_of(Limit.PREPARING)
    preparing = [part for part in of_phases if part.phase in COMPILED_PHASES]
    preparing_ns = sum(part.time_ns for part in preparing)
    is_late = limits is not None and preparing_ns > _LATE * limits.step_ns and _can_be_captured(evidence)
    operations = [one for one in evidence.kernels if one.phase in COMPILED_PHASES]
    fusable = set(find_fusable(step))
    small = [one for one in operations if one.at in fusable]
    mode = "reduce-overhead" if is_late else None
    lines = [line for line in evidence.lines if line.file and line.phase in COMPILED_PHASES and line.waits >= 1]
    lines = lines if is_late and _find_waits(step) else []
    if not all(map(waits_itself, lines)):
        return
    waiting = max(lines, key=lambda line: line.waits, default=None)
    edit = f"compile:{mode}" if mode else "compile"
    no_waits = [] if waiting is None else [stop_chosen_waits(_find_waits)]
    yield Cause(
        code="launches" if is_late else "compile",
        cause="the GPU waits for Python" if is_late else "small kernels read and write memory",
        detail=f", which makes {len(operations):,} launches a step in forward and backward"
        if is_late
        else f" between products, {len(small):,} a step",
        line=None if waiting is None else source_line(waiting),
        module=_find_module(preparing) if is_late and waiting is None else None,
        change=(
            f"no wait at {PurePath(waiting.file or '').name}:{waiting.line}, which graphs forbid; then "
            if waiting
            else ""
        )
        + (f'model.compile(mode="{mode}")' if mode else "model.compile()"),
        changes=[*no_waits, *edits(edit)],
        edit=edit,
        costs="compiling at the start; constant shapes" + (", memory of its own" if is_late else ""),
        evidence={
            "launches": len(operations),
            "small_ns": sum(one.duration_ns for one in small),
            "preparing_ns": preparing_ns,
        },
        worth=WORTH_COMPILING,
    )


def _find_module(preparing: Sequence[LimitPart]) -> str | None:
    times: Counter[str | None] = Counter()
    for part in preparing:
        times[part.module and kind_of(part.module)] += part.time_ns
    module = max(times, key=lambda module: times[module], default=None)
    return module if 2 * times[module] > times.total() else None


def _can_be_captured(evidence: Evidence) -> bool:
    """Return whether all recorded steps run the same kernels, and one thread launches those of the forward pass."""
    steps = () if evidence.replay is None else evidence.replay.steps
    kernels = {
        tuple(sorted(one.name for one in evidence.operations(step) if one.phase in COMPILED_PHASES)) for step in steps
    }
    threads = {
        step.columns.thread[one.call] for step in steps for one in evidence.operations(step) if one.phase == FORWARD
    }
    return len(kernels) == 1 and len(threads) <= 1 and not any(map(has_recurrent_layers, steps))


def _find_waits(step: ReplayedStep) -> list[int]:
    return step.columns.waits_among(step.calls_in(COMPILED_PHASES))


LAUNCHES = (_optimizer, _written_optimizer, _small_groups, _zeroed_gradients, _deterministic, _compile)
