"""An eager cell and the compiled one of the same case: how much faster, and what took the place of what."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profkit.analysis.compare.bootstrap import bootstrap_differences
from profkit.names import BACKWARD, FORWARD, OPTIMIZER
from recipes.common.recipe import LAUNCH_BOUND as BUSY
from recipes.common.recipe import OK, Row, identify
from recipes.compilation.cells import KEYS
from recipes.compilation.work import Kernel, kernels_of, launchers_of, total
from recipes.whole_model.cells import COMPILED, EAGER

_CASE = tuple(key for key in KEYS if key != "mode")
PHASES = (FORWARD, BACKWARD)
"""Those that speedups are told of; loss and optimizer are outside of what is compiled."""
_ON_GPU = "gpu-kernel"
_IN_PLACE = re.compile(r"^aten::(\w+?)_?$")
_ZEROS = ("zeros", "zeros_like", "new_zeros", "slice_backward", "select_backward")
# How Inductor calls what these operators launch when they run one by one.
_ALIASES = {
    "copy": ("clone", "_to_copy", "copy", "contiguous"),
    "cat": ("cat", "stack"),
    "index_select": ("embedding", "index_select"),
    "gather": ("embedding", "gather"),
    # Zeros are filled too.
    "fill": ("fill", "full", "full_like", "ones", "ones_like", *_ZEROS),
    "zero": ("full", *_ZEROS),
    # The maximum and the sum of a softmax, in one pass over its row.
    "amax": ("amax", "prepare_softmax_online"),
    "sum": ("sum", "prepare_softmax_online"),
}

Totals = tuple[int, int]
"""Launches, and their nanoseconds."""


@dataclass(frozen=True)
class Pair:
    """Two rows that differ in the mode alone, both measured."""

    eager: dict[str, Any]
    compiled: dict[str, Any]


@dataclass(frozen=True)
class Speedup:
    """How many times as fast compiled code is, by medians, and the 95 % interval, if there are samples enough."""

    times: float
    low: float | None
    high: float | None

    @property
    def is_measurable(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass(frozen=True)
class PhaseChange:
    """The work of one phase of a step, before and after; matrix products and the rest sum to the whole."""

    phase: str
    eager: Totals
    compiled: Totals
    eager_products: Totals
    compiled_products: Totals
    eager_rest: Totals
    generated: Totals
    compiled_rest: Totals


@dataclass(frozen=True)
class Fused:
    """An operator of which compiled code launches less: ``left`` of it still by itself, the rest within ``kernels``."""

    operator: str
    eager: Totals
    left: Totals
    kernels: tuple[Kernel, ...]


def find_pairs(rows: Sequence[Row]) -> list[Pair]:
    """Return the pairs of which both rows were measured, in the order of the rows."""
    cases: dict[tuple[object, ...], dict[object, Row]] = {}
    for row in rows:
        if row["status"] == OK:
            cases.setdefault(identify(row, _CASE), {})[row["mode"]] = row
    return [Pair(both[EAGER], both[COMPILED]) for both in cases.values() if {EAGER, COMPILED} <= both.keys()]


def add_speedups(rows: Sequence[Row]) -> None:
    """Add to each row how much of its step kernels fill, and to the compiled row of each pair how much faster it is.

    That is the step with its interval, forward and backward, the time of its kernels alone; and, for comparison, the
    optimizer, which is not compiled.
    """
    for row in rows:
        row["kernel_share"] = share_of_kernels(row)
    for pair in find_pairs(rows):
        whole = measure_speedup(pair)
        assert whole is not None
        pair.compiled.update({"speedup": whole.times, "speedup_low": whole.low, "speedup_high": whole.high})
        pair.compiled["kernel_speedup"] = measure_kernel_speedup(pair)
        for part, key in ((FORWARD, "forward_speedup"), (BACKWARD, "backward_speedup"), (OPTIMIZER, "optimizer_ratio")):
            speedup = measure_speedup(pair, part)
            pair.compiled[key] = None if speedup is None else speedup.times


def is_of_gpu(row: Mapping[str, Any]) -> bool:
    """Return whether a row counts a GPU's kernels, and not a CPU's operators."""
    return row.get("measure") == _ON_GPU


def share_of_kernels(row: Mapping[str, Any]) -> float | None:
    """Return the kernel time of one step, with a profiler, over the median step without; None without a GPU.

    It is over 1 where the profiled step was a long one: kernels do not overlap here.
    """
    return row["kernel_ms"] / row["step_ms"] if is_of_gpu(row) and row.get("step_ms") else None


def measure_kernel_speedup(pair: Pair) -> float | None:
    """Return the eager step's kernel time over the compiled one's; None without a GPU, or where it was not measured."""
    if not (is_of_gpu(pair.eager) and is_of_gpu(pair.compiled)) or not pair.compiled["kernel_ms"]:
        return None
    return float(pair.eager["kernel_ms"] / pair.compiled["kernel_ms"])


def is_launch_bound(row: Mapping[str, Any]) -> bool:
    """Return whether kernels are known to fill too little of a step for its wall time to be theirs."""
    share = share_of_kernels(row)
    return share is not None and share < BUSY


def measure_speedup(pair: Pair, part: str = "step") -> Speedup | None:
    """Return the eager median over the compiled one; None where the passes lack the part.

    The interval is of the difference of the medians' logarithms, by bootstrap.
    """
    if not pair.eager.get(f"{part}_samples_ms"):
        return None
    sides = [np.log(np.array(row[f"{part}_samples_ms"]))[:, None] for row in (pair.compiled, pair.eager)]
    interval = bootstrap_differences(sides[0], sides[1], "median")
    low, high = (None, None) if interval is None else (math.exp(float(end[0])) for end in interval)
    return Speedup(pair.eager[f"{part}_ms"] / pair.compiled[f"{part}_ms"], low, high)


def steps_to_break_even(pair: Pair) -> int | None:
    """Return after how many steps compiled code has made up for its longer first one; None if it is not faster."""
    speedup = measure_speedup(pair)
    saved_ms = pair.eager["step_ms"] - pair.compiled["step_ms"]
    if speedup is None or not speedup.is_measurable or saved_ms <= 0:
        return None
    return max(math.ceil((pair.compiled["first_step_s"] - pair.eager["first_step_s"]) * 1e3 / saved_ms), 0)


def compare_phases(pair: Pair) -> list[PhaseChange]:
    """Return what each phase of a step ran, before and after."""
    before, after = kernels_of(pair.eager), kernels_of(pair.compiled)
    return [
        _compare_phase(phase, [each for each in before if each.phase == phase], [e for e in after if e.phase == phase])
        for phase in dict.fromkeys(each.phase for each in (*before, *after))
    ]


def outside_phases(row: Mapping[str, Any]) -> Totals:
    """Return what a step ran between its phases: with theirs it is all that ran."""
    count, total_ns = total(kernels_of(row))
    return row["kernels"] - count, round(row["kernel_ms"] * 1e6) - total_ns


def _compare_phase(phase: str, before: Sequence[Kernel], after: Sequence[Kernel]) -> PhaseChange:
    return PhaseChange(
        phase=phase,
        eager=total(before),
        compiled=total(after),
        eager_products=total(each for each in before if each.is_matrix_product),
        compiled_products=total(each for each in after if each.is_matrix_product),
        eager_rest=total(each for each in before if not each.is_matrix_product),
        generated=total(each for each in after if each.is_generated),
        compiled_rest=total(each for each in after if not (each.is_matrix_product or each.is_generated)),
    )


def list_fused(pair: Pair, phase: str) -> list[Fused]:
    """Return the operators of which compiled code launches less in a phase, those of the most eager time first."""
    before, after = (_by_operator(row, phase) for row in (pair.eager, pair.compiled))
    generated = [each for each in kernels_of(pair.compiled) if each.phase == phase and each.is_generated]
    found = []
    for operator, eager in before.items():
        left = after.get(operator, (0, 0))
        if left[0] < eager[0]:
            names = set(_ALIASES.get(operator, (operator,)))
            kernels = sorted((each for each in generated if names & set(each.fused)), key=lambda each: -each.total_ns)
            found.append(Fused(operator, eager, left, tuple(kernels)))
    return sorted(found, key=lambda each: -each.eager[1])


def _by_operator(row: Mapping[str, Any], phase: str) -> dict[str, Totals]:
    """Return what each operator launched in a phase; one in place counts as the one that is not."""
    found: dict[str, Totals] = {}
    for each in launchers_of(row):
        if each.phase == phase:
            name = _IN_PLACE.sub(r"\1", each.name)
            count, total_ns = found.get(name, (0, 0))
            found[name] = (count + each.count, total_ns + each.total_ns)
    return found
