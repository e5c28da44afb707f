"""Rows of causes: recurrent networks whose time steps a loop of Python makes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from profkit.analysis.causes.changes import By, call_once, fuse, remove_operations, scale_operations
from profkit.analysis.causes.evidence import Cause, Evidence, Operation, is_part, name_times
from profkit.analysis.step_replay.facts import World
from profkit.analysis.step_replay.kernel_edits import is_convolution
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
_OF_SHORTEST: By = {"least": 1, "expected": 2, "most": 6}
"""How many times as long as the shortest kernel of a cell that is written out one kernel takes for all of it."""
_CALLS_LEFT: By = {"least": 0.2, "expected": 0.4, "most": 1.0}
"""What is left of the time of launches: in an LSTM of two layers and 70 time steps cuDNN made 0.4 as many."""

_LONGEST_CELL = 32
_ALIKE = 0.9
"""Of kernels of equal time steps so many have the name of the one a time step before."""

_Holds = Callable[[Operation], bool]


def _loops_of_cells(evidence: Evidence) -> Iterator[Cause]:
    """Cells that Python calls one after another, for each time step and layer, where cuDNN has whole layers.

    They are torch's own, or written out. No layer makes what else a loop does between time steps, such as attention,
    nor a choice for which it waits.
    """
    step = evidence.step
    if step is None or evidence.is_debugged:
        return
    forward = [one for one in evidence.kernels if one.phase == FORWARD]
    modules = dict.fromkeys(one.module for one in forward if one.module and (_is_cell(one) or _is_tanh(one)))
    for module in modules:
        own = [one for one in forward if _is_within(one.module, module)]
        kind, count = _find_cells(own)
        calls, layers = _find_calls(evidence, step, module, FORWARD), _count_modules(evidence, module)
        inside = sum(one.call in calls for one in forward)
        is_plain = len(own) >= _PLAIN * inside and not step.columns.waits_among(calls)
        if kind is None or count < _MANY_STEPS * layers or not is_plain:
            continue
        is_fused = any(map(_is_cell, own))
        yield Cause(
            code="loop",
            cause=f"a loop calls {kind} cells",
            detail=f", {name_times(count)}: {inside / count:.1f} kernels each in forward",
            module=module,
            change=f"nn.{kind} over the whole sequence, which cuDNN computes",
            changes=_make_layers(evidence, module, layers, is_fused=is_fused),
            costs="saved parameters have other names" + ("" if is_fused else "; the cell must be the usual one"),
            evidence={"cells": count, "layers": layers, "time_ns": sum(one.duration_ns for one in own)},
        )


def _find_cells(own: Sequence[Operation]) -> tuple[str | None, int]:
    """Return which cells the operations of a module are, None if none, and how many: torch's own, or equal ones that
    are written out.

    An LSTM takes the hyperbolic tangent twice, of a gate and of its state.
    """
    kinds = Counter(match[1].upper() for match in (_CELL.search(one.name) for one in own) if match)
    if kinds:
        return max(kinds, key=lambda kind: kinds[kind]), kinds.total()
    length = _find_period([one.name for one in own])
    cell = own[:length]
    tangents, sigmoids, products = (sum(map(holds, cell)) for holds in (_is_tanh, _is_sigmoid, _is_product))
    if not length or not tangents or not products:
        return None, 0
    if sigmoids:
        return "LSTM" if tangents > 1 else "GRU", len(own) // length
    # Between the products of other networks stands an activation.
    is_simple = tangents == 1 and _is_product(cell[0]) and _is_product(cell[1]) and _is_tanh(cell[-1])
    return ("RNN", len(own) // length) if is_simple else (None, 0)


def _find_period(names: Sequence[str]) -> int:
    """Return after how many names nearly all of them come again, 0 if they do not."""
    for length in range(2, min(_LONGEST_CELL, len(names) // 2) + 1):
        pairs = list(zip(names, names[length:], strict=False))
        if sum(one == other for one, other in pairs) >= _ALIKE * len(pairs):
            return length
    return 0


def _is_within(module: str | None, outer: str) -> bool:
    return module == outer or is_part(module, outer)


def _is_cell(operation: Operation) -> bool:
    return _CELL.search(operation.name) is not None


def _is_tanh(operation: Operation) -> bool:
    return "tanh" in operation.name and operation.category == "elementwise"


def _is_sigmoid(operation: Operation) -> bool:
    return "sigmoid" in operation.name and operation.category == "elementwise"


def _is_product(operation: Operation) -> bool:
    return operation.category == "gemm" and not is_convolution(operation.name)


def _is_sum(operation: Operation) -> bool:
    return not _is_product(operation) and not _is_cell(operation)


def _find_calls(evidence: Evidence, step: ReplayedStep, module: str, phase: str) -> range:
    calls = [one.call for one in evidence.operations(step) if one.phase == phase and _is_within(one.module, module)]
    return range(min(calls), max(calls) + 1) if calls else range(0)


def _count_modules(evidence: Evidence, kind: str) -> int:
    names = () if evidence.trace is None else evidence.trace.trace.names
    return max(1, len({name for name in names if kind_of(name) == kind}))


def _make_layers(evidence: Evidence, module: str, layers: int, *, is_fused: bool) -> list[StepChange]:
    """Return the changes that make whole layers of a loop of cells.

    Products that need no other time step become large ones; the other products and the cells still follow one another,
    but each layer's may run beside those of the others. What is written out of a cell becomes one kernel.
    """
    beside: By = {"least": 1 / layers, "expected": (1 + 1 / layers) / 2, "most": 1.0}

    def choose(phase: str, holds: _Holds) -> Callable[[ReplayedStep], list[int]]:
        return evidence.choose(lambda one: one.phase == phase and _is_within(one.module, module) and holds(one))

    def find_written(step: ReplayedStep, phase: str) -> list[list[int]]:
        def is_written(one: Operation) -> bool:
            return one.phase == phase and _is_within(one.module, module) and not _is_product(one)

        return [[one.at for one in run] for fits, run in groupby(evidence.operations(step), is_written) if fits]

    def size(world: World, durations: Sequence[int]) -> float:
        return beside[world] * min(_OF_SHORTEST[world] * min(durations), sum(durations))

    def make_layers(phase: str) -> Iterator[StepChange]:
        joint = _JOINT_PRODUCTS[phase]
        products: By = {
            world: joint * large + (1 - joint) * beside[world] for world, large in _IN_LARGE_PRODUCT.items()
        }
        yield scale_operations("loop", choose(phase, _is_product), products, "how fast cuDNN's layers are")
        if is_fused:
            yield scale_operations("loop", choose(phase, _is_cell), beside, "which layers run side by side")
            yield remove_operations("loop", choose(phase, _is_sum), _SUMS_LEFT, "which sums are left")
        else:
            yield fuse("loop", lambda step: find_written(step, phase), size)
        yield call_once("loop", lambda step: _find_calls(evidence, step, module, phase), _CALLS_LEFT)

    return [change for phase in _JOINT_PRODUCTS for change in make_layers(phase)]


RECURRENT = (_loops_of_cells,)
