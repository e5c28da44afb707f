"""An eager cell and the compiled one of the same case: how much faster it is, and which kernels replaced which."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from profkit.names import BACKWARD, FORWARD, OPTIMIZER
from recipes.common.recipe import OK, Row, identify
from recipes.compilation.cells import KEYS
from recipes.compilation.work import GENERATED, Kernel, Totals, kernels_of, launchers_of, total
from recipes.whole_model.cells import COMPILED, EAGER

_CASE = tuple(key for key in KEYS if key != "mode")
PHASES = (FORWARD, BACKWARD)
"""The phases with a speedup; loss and optimizer are not compiled."""
_ON_GPU = "gpu-kernel"
_IN_PLACE = re.compile(r"^aten::(\w+?)_?$")
_ZEROS = ("zeros", "zeros_like", "new_zeros", "slice_backward", "select_backward")
# Inductor's names for what these operators launch when they run one by one.
_ALIASES = {
    "copy": ("clone", "_to_copy", "copy", "contiguous"),
    "cat": ("cat", "stack"),
    "index_select": ("embedding", "index_select"),
    "gather": ("embedding", "gather"),
    "fill": ("fill", "full", "full_like", "ones", "ones_like", *_ZEROS),
    "zero": ("full", *_ZEROS),
    # The maximum and the sum of a softmax, in one pass over its row.
    "amax": ("amax", "prepare_softmax_online"),
    "sum": ("sum", "prepare_softmax_online"),
}

_FEWEST, _RESAMPLES = 5, 4000
"""The fewest samples per side that give an interval, and how often they are resampled."""


@dataclass(frozen=True)
class Pair:
    """Two measured rows that differ only in the mode."""

    eager: dict[str, Any]
    compiled: dict[str, Any]


@dataclass(frozen=True)
class Speedup:
    """How many times as fast compiled code is, by medians, and the 95 % interval if there are enough samples."""

    times: float
    low: float | None
    high: float | None

    @property
    def is_measurable(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass(frozen=True)
class Fused:
    """An operator that launches less in compiled code: ``left`` by itself, the rest inside generated ``kernels``."""

    operator: str
    eager: Totals
    left: Totals
    kernels: tuple[Kernel, ...]


def find_pairs(rows: Sequence[Row]) -> list[Pair]:
    """Return the pairs with both rows measured, in the order of the rows."""
    cases: dict[tuple[object, ...], dict[object, Row]] = {}
    for row in rows:
        if row["status"] == OK:
            cases.setdefault(identify(row, _CASE), {})[row["mode"]] = row
    return [Pair(both[EAGER], both[COMPILED]) for both in cases.values() if {EAGER, COMPILED} <= both.keys()]


def add_speedups(rows: Sequence[Row]) -> None:
    """Add the share of the step that kernels fill, and to compiled rows how much faster they are than eager.

    These are the step with its interval, forward, backward, kernel time alone, and for comparison the optimizer, which
    is not compiled.
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
    """Return whether a row counts the kernels of a GPU, not the operators of a CPU."""
    return row.get("measure") == _ON_GPU


def share_of_kernels(row: Mapping[str, Any]) -> float | None:
    """Return the kernel time of one step, with a profiler, over the median step without; None without a GPU.

    It is above 1 if the profiled step was a long one: kernels do not overlap here.
    """
    return row["kernel_ms"] / row["step_ms"] if is_of_gpu(row) and row.get("step_ms") else None


def measure_kernel_speedup(pair: Pair) -> float | None:
    """Return the eager step's kernel time over the compiled one's; None without a GPU or a measurement."""
    if not (is_of_gpu(pair.eager) and is_of_gpu(pair.compiled)) or not pair.compiled["kernel_ms"]:
        return None
    return float(pair.eager["kernel_ms"] / pair.compiled["kernel_ms"])


def measure_speedup(pair: Pair, part: str = "step") -> Speedup | None:
    """Return the eager median over the compiled one; None if the passes lack the part."""
    if not pair.eager.get(f"{part}_samples_ms"):
        return None
    sides = [np.array(row[f"{part}_samples_ms"]) for row in (pair.eager, pair.compiled)]
    low, high = _interval(*sides) or (None, None)
    return Speedup(pair.eager[f"{part}_ms"] / pair.compiled[f"{part}_ms"], low, high)


def _interval(eager: npt.NDArray[np.float64], compiled: npt.NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the 95 % interval of the ratio of the medians, by Efron's percentile bootstrap; None of few samples.

    Both sides are resampled separately, always by the same two sequences of draws. In half of the resamples the sides
    exchange them, so that exchanging the sides inverts the interval exactly.
    """
    if min(len(eager), len(compiled)) < _FEWEST:
        return None

    def medians(samples: npt.NDArray[np.float64], seeds: tuple[int, int]) -> npt.NDArray[np.float64]:
        draws = [
            np.random.default_rng(seed).integers(0, len(samples), (_RESAMPLES // 2, len(samples))) for seed in seeds
        ]
        return np.asarray(np.median(np.log(samples)[np.concatenate(draws)], axis=1))

    differences = medians(eager, (1, 0)) - medians(compiled, (0, 1))
    tail = (1 - 0.95) / 2
    return math.exp(np.quantile(differences, tail)), math.exp(-np.quantile(-differences, tail))


def steps_to_break_even(pair: Pair) -> int | None:
    """Return after how many steps compiled code has made up for its longer first step; None if it is not faster."""
    speedup = measure_speedup(pair)
    saved_ms = pair.eager["step_ms"] - pair.compiled["step_ms"]
    if speedup is None or not speedup.is_measurable or saved_ms <= 0:
        return None
    return max(math.ceil((pair.compiled["first_step_s"] - pair.eager["first_step_s"]) * 1e3 / saved_ms), 0)


def outside_phases(row: Mapping[str, Any]) -> Totals:
    """Return the work between a step's phases; together with theirs it is the whole step's."""
    count, total_ns = total(kernels_of(row))
    return row["kernels"] - count, round(row["kernel_ms"] * 1e6) - total_ns


def list_fused(pair: Pair, phase: str) -> list[Fused]:
    """Return the operators that launch less in compiled code in a phase, those with the most eager time first."""
    before, after = (_by_operator(row, phase) for row in (pair.eager, pair.compiled))
    generated = [each for each in kernels_of(pair.compiled) if each.phase == phase and each.kind == GENERATED]
    found = []
    for operator, eager in before.items():
        left = after.get(operator, (0, 0))
        if left[0] < eager[0]:
            names = set(_ALIASES.get(operator, (operator,)))
            kernels = sorted((each for each in generated if names & set(each.fused)), key=lambda each: -each.total_ns)
            found.append(Fused(operator, eager, left, tuple(kernels)))
    return sorted(found, key=lambda each: -each.eager[1])


def _by_operator(row: Mapping[str, Any], phase: str) -> dict[str, Totals]:
    found: dict[str, Totals] = {}
    for each in launchers_of(row):
        if each.phase == phase:
            name = _IN_PLACE.sub(r"\1", each.name)
            count, total_ns = found.get(name, (0, 0))
            found[name] = (count + each.count, total_ns + each.total_ns)
    return found
