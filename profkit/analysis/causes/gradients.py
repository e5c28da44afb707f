"""Rows of causes: gradients that nobody reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from profkit.analysis.causes.changes import NOTHING, By, remove_operations, scale_operations
from profkit.analysis.causes.evidence import WORTH_COMPILING, Cause, Evidence, Interval, Operation, is_part
from profkit.analysis.step_replay.predict import StepChange
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.analysis.summary import PRODUCTS
from profkit.names import BACKWARD, OPTIMIZER, kind_of
from profkit.run.manifest import used_optimizers
from profkit.run.work import DenseTable, UnreadGradients

_OF_DENSE: By = {"least": 0.02, "expected": 0.1, "most": 0.4}
"""What steps of rows take of the time for a dense gradient's zeros."""
_OF_BACKWARD: By = {"least": 0.05, "expected": 0.3, "most": 0.8}
"""What is left of a table's backward pass: dense gradients sort the indices and sum up rows, sparse ones do later."""


def _unread_gradients(evidence: Evidence) -> Iterator[Cause]:
    """Backward computes gradients of parameters that no optimizer steps, as of a model that was meant to be frozen.

    Nothing of backward is needed before the first parameter that is stepped, nor the gradient of what comes in there;
    after it, all but the products for the parameters' own gradients is.
    """
    work = evidence.work
    if evidence.step is None or work is None or not work.unread_gradients:
        return
    by_module = {unread.module: unread for unread in work.unread_gradients}
    time_ns = Counter[str]()
    for one in _find_needless(evidence, evidence.step, by_module):
        time_ns[kind_of(one.module or "")] += one.duration_ns
    parameters = sum(unread.parameters for unread in by_module.values())
    held = sum(unread.bytes for unread in by_module.values())
    costs = {name: sum(_within(name, time_ns).values()) for name in _outermost(by_module)}
    places = sorted((name for name in costs if costs[name]), key=lambda name: -costs[name])
    if not places:
        return
    yield Cause(
        code="unread-gradients",
        cause="backward computes gradients that no optimizer reads"
        f", of {parameters:,} parameter{'s' * (parameters > 1)}",
        module=places[0],
        further_modules=places[1:],
        change="parameter.requires_grad_(False) for each of them, before the first step",
        changes=[_leave_out(evidence, by_module)],
        saves_bytes=Interval(held // 2, held, held),
        evidence={"parameters": parameters, "gradient_bytes": held, "time_ns": time_ns.total()},
    )


def _leave_out(evidence: Evidence, by_module: Mapping[str, UnreadGradients]) -> StepChange:
    def choose(step: ReplayedStep) -> list[int]:
        return [one.at for one in _find_needless(evidence, step, by_module)]

    return remove_operations("no gradients that nobody reads", choose, NOTHING, "which kernels of backward they take")


def _find_needless(
    evidence: Evidence, step: ReplayedStep, by_module: Mapping[str, UnreadGradients]
) -> Iterator[Operation]:
    """Yield the operations of backward that only gradients need which nobody reads.

    Of modules of one kind backward comes to the first ones last. Of a product's two gradients that of what comes in is
    the first, and the parameter's the second; that of a bias is a sum.
    """
    own, passes = defaultdict[str, list[Operation]](list), max(1, round(evidence.summary.passes or 1))
    for one in evidence.operations(step):
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


def _outermost(by_module: Mapping[str, UnreadGradients]) -> list[str]:
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
    unread = {gradients.module for gradients in work.unread_gradients if gradients.parameters}
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
            scale_operations("sparse gradients", evidence.choose(is_of_table), _OF_BACKWARD, "what sparse ones take"),
            scale_operations(
                "sparse steps", evidence.choose(lambda one: one.phase == OPTIMIZER), left, "what sparse ones take"
            ),
        ],
        costs="rows move only in steps that use them: no weight decay or momentum of the others",
        worth=WORTH_COMPILING,
        evidence={"zero_bytes": sum(zeros.values()), "rows": sum(table.rows for table in tables)},
    )


def _count_zeros(table: DenseTable) -> int:
    return table.bytes * (table.rows - table.used) // table.rows


def _share_of_zeros(tables: Sequence[DenseTable]) -> float:
    return sum(map(_count_zeros, tables)) / max(1, sum(table.bytes for table in tables))


GRADIENTS = (_unread_gradients, _dense_tables)
