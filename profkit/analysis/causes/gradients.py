"""Rows of causes: gradients that nobody reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from statistics import median

from profkit.analysis.causes.changes import NOTHING, By, remove_operations, scale_operations
from profkit.analysis.causes.evidence import WORTH_COMPILING, Cause, Evidence, Interval, Operation, is_part
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.analysis.summary import PRODUCTS
from profkit.names import BACKWARD, OPTIMIZER, kind_of
from profkit.run.manifest import used_optimizers
from profkit.run.work import DenseTable, UnreadGradients

ByModule = dict[str, UnreadGradients]
"""What is unread in the modules of one model, by their kinds."""

_MANY_SLICES, _SUMMED, _MOST_OF_SUM = 8, 0.8, 6
"""So many tensors are filled for slices; such a share of them is added up, in at most so many times a fill's time."""
_SLICES_LEFT: By = {"least": 0.0, "expected": 0.03, "most": 0.2}
_OF_DENSE: By = {"least": 0.02, "expected": 0.1, "most": 0.4}
"""What steps of rows take of the time for a dense gradient's zeros."""
_OF_BACKWARD: By = {"least": 0.05, "expected": 0.3, "most": 0.8}
"""What is left of a table's backward pass: dense gradients sort the indices and sum up rows, sparse ones do later."""


def _unread_gradients(evidence: Evidence) -> Iterator[Cause]:
    """Backward computes gradients of parameters that no optimizer steps, as of a model that was meant to be frozen.

    Or for one optimizer's step those of another's parameters, which are thrown away before that one's, as of a
    generator whose output is not detached. Nothing of backward is needed before the first parameter that is stepped,
    nor the gradient of what comes in there; after it, all but the products for the parameters' own gradients is.
    """
    work = evidence.work
    if evidence.step is None or work is None:
        return
    passes: dict[int | None, dict[str | None, ByModule]] = {}
    for unread in work.unread_gradients:
        passes.setdefault(unread.before, {}).setdefault(unread.model, {})[unread.module] = unread
    for before, models in passes.items():
        cause = _describe_unread(evidence, evidence.step, [*models.values()])
        if cause is not None:
            yield cause if before is None else _of_other_optimizer(cause, models)


def _describe_unread(evidence: Evidence, step: ReplayedStep, models: Sequence[ByModule]) -> Cause | None:
    places = dict[str, int]()
    for by_module in models:
        time_ns = Counter[str]()
        for one in _find_needless(evidence, step, by_module):
            time_ns[kind_of(one.module or "")] += one.duration_ns
        places |= {name: sum(_within(name, time_ns).values()) for name in _outermost(by_module)}
    every = [unread for by_module in models for unread in by_module.values()]
    parameters, held = sum(unread.parameters for unread in every), sum(unread.bytes for unread in every)
    by_cost = sorted((name for name in places if places[name]), key=lambda name: -places[name])
    if not by_cost:
        return None

    def choose(step: ReplayedStep) -> list[int]:
        return [one.at for by_module in models for one in _find_needless(evidence, step, by_module)]

    return Cause(
        code="unread-gradients",
        cause="backward computes gradients that no optimizer reads"
        f", of {parameters:,} parameter{'s' * (parameters > 1)}",
        module=by_cost[0],
        further_modules=by_cost[1:],
        change="parameter.requires_grad_(False) for each of them, before the first step",
        changes=[remove_operations(choose, NOTHING, "which kernels they take")],
        saves_bytes=Interval(held // 2, held, held),
        evidence={
            "parameters": parameters,
            "gradient_bytes": held,
            "time_ns": sum(step.columns.duration_ns[at] for at in choose(step)),
        },
    )


def _of_other_optimizer(cause: Cause, models: Mapping[str | None, ByModule]) -> Cause:
    """Return it as one of gradients that come in before another optimizer's step, and are gone before their own."""
    of_parameters = {model: sum(one.parameters for one in by_module.values()) for model, by_module in models.items()}
    model = max(of_parameters, key=lambda model: of_parameters[model])
    change = f"{model}.requires_grad_(False) while the other optimizer's loss goes backward"
    if any(one.early for one in models[model].values()):
        change = f".detach() of what {model} made, for the other optimizer's loss"
    return replace(
        cause,
        cause=f"backward computes gradients of {model} that are thrown away",
        module=model,
        further_modules=(),
        change=change,
        saves_bytes=None,
    )


def _find_needless(evidence: Evidence, step: ReplayedStep, by_module: ByModule) -> Iterator[Operation]:
    """Yield the operations of backward that only gradients need which nobody reads.

    Of modules of one kind backward comes to the first ones last. Of a product's two gradients that of what comes in is
    the first, and the parameter's the second; that of a bias is a sum.
    """
    some, own = next(iter(by_module.values())), defaultdict[str, list[Operation]](list)
    passes = 1 if some.before is not None else max(1, round(evidence.summary.passes or 1))
    for one in _choose_passes(evidence, step, some):
        if one.phase == BACKWARD and one.module is not None and kind_of(one.module) in by_module:
            own[one.module].append(one)
    for module, operations in own.items():
        unread = by_module[kind_of(module)]
        rest = len(operations) - round(len(operations) * unread.early / unread.instances)
        yield from operations[rest:]
        products = [one for one in operations[:rest] if one.category in PRODUCTS]
        sums = [one for one in operations[:rest] if one.category == "reduction"]
        added = [one for one in operations[:rest] if "CUDAFunctor_add" in one.name]
        share = max(0, unread.unread - unread.early) / max(1, unread.instances - unread.early)
        for part in (products[1::2], sums):
            yield from part[len(part) - round(share * len(part)) :]
        for part in (products[::2], added):
            yield from part[-unread.first * passes :] if unread.first else ()


def _choose_passes(evidence: Evidence, step: ReplayedStep, unread: UnreadGradients) -> Sequence[Operation]:
    """Return the operations in whose passes they are unread: those of a model before an optimizer's step, or all.

    None where optimizers' steps cannot be told apart.
    """
    operations = evidence.operations(step)
    if unread.before is None or unread.model is None or evidence.work is None:
        return operations
    parts: list[list[Operation]] = [[]]
    for one, following in zip_longest(operations, operations[1:]):
        parts[-1].append(one)
        if following is not None and one.phase == OPTIMIZER != following.phase:
            parts.append([])
    steps = sum(any(one.phase == OPTIMIZER for one in part) for part in parts)
    if steps != evidence.work.optimizer_steps:
        return ()
    ranges = evidence.module_ranges.get((BACKWARD, unread.model), ())
    inside = {at for rows in evidence.operations_in(step, ranges) for at in rows}
    return [one for one in parts[unread.before] if one.at in inside]


def _outermost(by_module: ByModule) -> list[str]:
    """Return the outermost modules of which all is early, and those elsewhere whose own gradients nobody reads."""
    early = [name for name, unread in by_module.items() if unread.early == unread.instances]
    whole = [name for name in early if _within(name, by_module) and not any(is_part(name, other) for other in early)]
    others = [name for name, unread in by_module.items() if unread.parameters]
    return [*whole, *(name for name in others if name not in whole and not any(is_part(name, one) for one in whole))]


def _within(module: str, values: Mapping[str, int | UnreadGradients]) -> dict[str, int]:
    """Return of some modules those that lie in one, with what is known of them; gradients by their parameters."""
    inside = {name: value for name, value in values.items() if name == module or is_part(name, module)}
    counts = {name: value if isinstance(value, int) else value.parameters for name, value in inside.items()}
    return {name: count for name, count in counts.items() if count}


def _dense_tables(evidence: Evidence) -> Iterator[Cause]:
    """Embedding tables whose gradients are mostly zeros, which are written, read and stepped like all others."""
    work, optimizers = evidence.work, used_optimizers(evidence.manifest)
    parameter_bytes = sum(used.parameter_bytes for used in optimizers)
    if evidence.step is None or work is None or not parameter_bytes:
        return
    unread = {one.module for one in work.unread_gradients if one.parameters and one.before is None}
    tables = [table for table in work.tables if 2 * table.used < table.rows and table.module not in unread]
    if not tables:
        return
    zeros = {table.module: _count_zeros(table) for table in tables}
    share = min(1.0, sum(zeros.values()) / parameter_bytes)
    left = {world: 1 - share * (1 - kept) for world, kept in _OF_DENSE.items()}
    first, *further = sorted(zeros, key=lambda module: -zeros[module])

    def is_of_table(one: Operation) -> bool:
        return one.phase == BACKWARD and one.module in zeros

    yield Cause(
        code="dense-gradients",
        cause=f"gradients of embedding tables are {_share_of_zeros(tables):.0%} zeros".replace("%", " %"),
        detail=f": {sum(zeros.values()) / 2**20:,.0f} MiB of them a step",
        module=first,
        further_modules=further,
        change="sparse=True for the tables, with SGD or SparseAdam",
        changes=[
            scale_operations(evidence.choose(is_of_table), _OF_BACKWARD, "what sparse ones take"),
            scale_operations(evidence.choose(lambda one: one.phase == OPTIMIZER), left, "what sparse ones take"),
        ],
        costs="rows move only in steps that use them: no weight decay or momentum of the others",
        worth=WORTH_COMPILING,
        evidence={"zero_bytes": sum(zeros.values()), "rows": sum(table.rows for table in tables)},
    )


def _slices(evidence: Evidence) -> Iterator[Cause]:
    """Slices of one tensor, each of whose gradients is as large as all of it: zeros, which are then added up."""
    if evidence.step is None:
        return
    modules = dict.fromkeys(one.module for one in evidence.kernels if one.phase == BACKWARD)
    for module in modules:
        fills, sums = _find_slices(evidence, evidence.step, module)
        if not fills:
            continue

        def choose(step: ReplayedStep, module: str | None = module) -> list[int]:
            fills, sums = _find_slices(evidence, step, module)
            return [one.at for one in (*fills[1:], *sums)]

        yield Cause(
            code="slices",
            cause=f"backward makes a gradient of the whole tensor for each of its {len(fills):,} slices",
            detail=", and adds them up",
            module=module,
            change="x.unbind(dim), or split or chunk, once before the loop: its backward writes each slice once",
            changes=[remove_operations(choose, _SLICES_LEFT, "what writes the gradient once")],
            evidence={"slices": len(fills), "time_ns": sum(one.duration_ns for one in (*fills, *sums))},
        )


def _find_slices(
    evidence: Evidence, step: ReplayedStep, module: str | None
) -> tuple[Sequence[Operation], Sequence[Operation]]:
    """Return what fills as large tensors with zeros in a module's backward passes, and what adds them up, if many do.

    A slice's gradient is copied into each right after. A sum reads two of them and writes one.
    """
    own = [one for one in evidence.operations(step) if one.phase == BACKWARD and one.module == module]
    pairs = pairwise(own)
    fills = [one for one, then in pairs if "FillFunctor" in one.name and then.category in ("copy/cast", "copy")]
    usual_ns = median(one.duration_ns for one in fills) if fills else 0
    fills = [one for one in fills if usual_ns <= 2 * one.duration_ns <= 4 * usual_ns]
    added = [one for one in own if "CUDAFunctor_add" in one.name]
    sums = [one for one in added if usual_ns <= one.duration_ns <= _MOST_OF_SUM * usual_ns]
    is_sliced = len(fills) >= _MANY_SLICES and len(sums) >= _SUMMED * len(fills)
    return (fills, sums) if is_sliced else ((), ())


def _count_zeros(table: DenseTable) -> int:
    return table.bytes * (table.rows - table.used) // table.rows


def _share_of_zeros(tables: Sequence[DenseTable]) -> float:
    return sum(map(_count_zeros, tables)) / max(1, sum(table.bytes for table in tables))


GRADIENTS = (_unread_gradients, _dense_tables, _slices)
