"""Rows of causes: recurrent networks whose time steps a loop of Python makes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from profkit.analysis.causes.changes import By, call_once, remove_operations, scale_operations
from profkit.analysis.causes.evidence import Cause, Evidence, Operation, name_times
from profkit.analysis.step_replay.predict import StepChange
from profkit.analysis.step_replay.steps import ReplayedStep
from profkit.names import BACKWARD, FORWARD, kind_of

_CELL = re.compile(r"(lstm|gru)_cell")
"""torch's kernels of all that a cell does but its products."""
_MANY_STEPS = 16
"""A sequence has so many time steps."""
_PLAIN = 0.7
"""A loop over time steps that does nothing else has at least this share of its kernels in cells; dropout is little."""
_JOINT_PRODUCTS = {FORWARD: 1 / 2, BACKWARD: 3 / 4}
"""Which share of a cell's products needs no other time step: those of inputs, and in backward those of weights, too."""
_IN_LARGE_PRODUCT: By = {"least": 0.25, "expected": 0.5, "most": 1.0}
"""What products take of their time if one large one makes them for all time steps."""
_SUMS_LEFT: By = {"least": 0.0, "expected": 0.1, "most": 0.3}
"""What is left of the sums of weights' gradients over time steps, which the large products make."""
_CALLS_LEFT: By = {"least": 0.2, "expected": 0.4, "most": 1.0}
"""What is left of the time of launches: in an LSTM of two layers and 70 time steps cuDNN made 0.4 as many."""

_Chooses = Callable[[Operation], bool]


def _loops_of_cells(evidence: Evidence) -> Iterator[Cause]:
    """Cells that Python calls one after another, for each time step and layer, where cuDNN has whole layers.

    No layer makes what else a loop does between time steps, such as attention, nor a choice for which it waits.
    """
    step = evidence.step
    if step is None or evidence.is_debugged:
        return
    counts = Counter(one.module for one in evidence.kernels if one.phase == FORWARD and _is_cell(one))
    for module, count in counts.items():
        calls, layers = _find_calls(evidence, step, module, FORWARD), _count_modules(evidence, module)
        inside = [one for one in evidence.kernels if one.call in calls]
        own = [one for one in inside if one.module == module]
        is_plain = len(own) >= _PLAIN * len(inside) and not step.columns.waits_among(calls)
        if count < _MANY_STEPS * layers or not is_plain:
            continue
        kinds = {match[1].upper() for match in (_CELL.search(one.name) for one in own) if match}
        kind = " and ".join(sorted(kinds))
        yield Cause(
            code="loop",
            cause=f"a loop calls {kind} cells",
            detail=f", {name_times(count)}: {len(inside) / count:.1f} kernels each in forward",
            module=module,
            change=f"nn.{kind} over the whole sequence, which cuDNN computes",
            changes=_make_layers(evidence, module, layers),
            costs="saved parameters have other names",
            evidence={"cells": count, "layers": layers, "time_ns": sum(one.duration_ns for one in own)},
        )


def _is_cell(operation: Operation) -> bool:
    return _CELL.search(operation.name) is not None


def _find_calls(evidence: Evidence, step: ReplayedStep, module: str | None, phase: str) -> range:
    """Return the calls from the first launch of a module in a phase to its last."""
    calls = [one.call for one in evidence.operations(step) if (one.module, one.phase) == (module, phase)]
    return range(min(calls), max(calls) + 1) if calls else range(0)


def _count_modules(evidence: Evidence, kind: str | None) -> int:
    """Return how many modules are of a kind: ``cells.0`` and ``cells.1`` are of ``cells.*``."""
    names = () if evidence.trace is None else evidence.trace.trace.names
    return max(1, len({name for name in names if kind_of(name) == kind}))


def _make_layers(evidence: Evidence, module: str | None, layers: int) -> list[StepChange]:
    """Return the changes that make whole layers of a loop of cells.

    Products that need no other time step become large ones; the other products and the cells still follow one another,
    but each layer's may run beside those of the others.
    """
    beside: By = {"least": 1 / layers, "expected": (1 + 1 / layers) / 2, "most": 1.0}

    def choose(phase: str, holds: _Chooses) -> Callable[[ReplayedStep], list[int]]:
        return evidence.choose(lambda one: (one.module, one.phase) == (module, phase) and holds(one))

    def make_layers(phase: str) -> Iterator[StepChange]:
        joint = _JOINT_PRODUCTS[phase]
        products: By = {
            world: joint * large + (1 - joint) * beside[world] for world, large in _IN_LARGE_PRODUCT.items()
        }
        yield scale_operations("loop", choose(phase, _is_product), products, "how fast cuDNN's layers are")
        yield scale_operations("loop", choose(phase, _is_cell), beside, "which layers run side by side")
        yield remove_operations("loop", choose(phase, _is_sum), _SUMS_LEFT, "which sums are left")
        yield call_once("loop", lambda step: _find_calls(evidence, step, module, phase), _CALLS_LEFT)

    return [change for phase in _JOINT_PRODUCTS for change in make_layers(phase)]


def _is_product(operation: Operation) -> bool:
    return operation.category == "gemm"


def _is_sum(operation: Operation) -> bool:
    return not _is_product(operation) and not _is_cell(operation)


RECURRENT = (_loops_of_cells,)
