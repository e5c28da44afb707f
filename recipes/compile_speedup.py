"""How much faster is compiled code, how many fewer kernels does it launch, and what was fused into what?

``python -m recipes.compile_speedup --device cpu``. Written-out attention and profkit's transformer, forward
alone and the full step, eager against compiled: timed without a profiler, then one more step with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from profkit.errors import UsageError
from recipes.common.command import Names, Numbers, Options, exit_with, recipe_options, run_recipe
from recipes.common.recipe import GridName, Recipe, Row, late
from recipes.compilation.cells import (
    ALL_PASSES,
    DTYPES,
    FULL,
    KEYS,
    SMALL,
    WHATS,
    Case,
    build_cells,
    of_product,
    of_reports,
    restrict,
)
from recipes.compilation.pairs import add_speedups
from recipes.compilation.report import report
from recipes.whole_model.cells import SIZES, leave_out_bounds

STEPS: dict[GridName, int] = {"reports": 10, "small": 5, "full": 10}
BRIEF = frozenset({*KEYS[:7], "step_ms", "speedup", "kernel_ms", "kernel_speedup", "kernel_share", "kernels", "status"})
MEASURED = (
    *("step_ms", "step_mean_ms", "step_std_ms", "forward_ms", "backward_ms", "optimizer_ms"),
    *("speedup", "speedup_low", "speedup_high", "forward_speedup", "backward_speedup", "optimizer_ratio"),
    *("first_step_s", "compiled_graphs", "allocator_retries"),
    *("measure", "kernels", "generated_kernels", "kernel_ms", "kernel_speedup", "kernel_share"),
    *("predicted_peak_bytes", "requested_bytes", "free_bytes"),
)


def choose_cases(grid: GridName, given: dict[str, Sequence[Any]]) -> list[Case]:
    """Return the cases to measure: the write-ups' cases with the given values, or their product.

    Raises:
        UsageError: no case is left.
    """
    axes = FULL if grid == "full" else SMALL
    cases = restrict(of_reports(), given) if grid == "reports" else of_product({**axes, **given})
    if not cases:
        raise UsageError(
            f"--grid {grid}: no case has all of these values; attention has passes forward and forward-backward, the "
            "model has forward and train, and --grid reports has only fp32"
        )
    return cases


def derive(rows: Sequence[Row]) -> None:
    """Add how much faster compiled rows are, and drop predictions that are only lower bounds."""
    add_speedups(rows)
    leave_out_bounds(rows)


RECIPE = Recipe(
    name="compile_speedup",
    question="How much faster is compiled code, how many fewer kernels does it launch, and what was fused into what?",
    columns=[*KEYS, "device", *MEASURED, "status", "reason"],
    cell_keys=KEYS,
    measure=late("recipes.compilation.measure:measure_cell"),
    predict=late("recipes.compilation.measure:predict_bytes"),
    derive=derive,
    report=report,
    brief=BRIEF,
)


@click.command(help=__doc__)
@recipe_options
@click.option("--what", type=Names(WHATS), help="attention, model, instead of both.")
@click.option("--passes", type=Names(ALL_PASSES), help="How much of a step, instead of the grid's.")
@click.option("--dtype", type=Names(DTYPES), help="fp32 or bf16 (the model's by autocast), instead of the grid's.")
@click.option("--d-model", type=Numbers(), help="Attention's widths, instead of the grid's.")
@click.option("--seq-len", type=Numbers(), help="Attention's sequence lengths, instead of the grid's.")
@click.option("--size", type=Names(SIZES), help="Sizes of the model, instead of the grid's.")
@click.option("--context", type=Numbers(), help="The model's contexts, instead of the grid's.")
@click.option("--steps", type=click.IntRange(min=2), help="Timed steps per cell  [default: 10; 5 with --grid small]")
def main(options: Options, steps: int | None, **given: Sequence[int] | Sequence[str] | None) -> int:
    axes = {axis: values for axis, values in given.items() if values is not None}
    cases = choose_cases(options.grid, axes)
    return run_recipe(RECIPE, build_cells(cases, steps or STEPS[options.grid]), options)


if __name__ == "__main__":
    exit_with(main)
