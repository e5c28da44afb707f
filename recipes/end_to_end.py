"""What do forward, backward and optimizer of a whole model cost, by size, context, precision, compilation and warm-up?

``python -m recipes.end_to_end --device cpu``. profkit's transformer, batch 4. Each phase is timed by itself, never
computed as a difference. A cell without warm-up runs in a process of its own in which nothing ran before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from profkit.errors import UsageError
from recipes.common.command import Names, Numbers, Options, exit_with, recipe_options, run_recipe
from recipes.common.recipe import Device, GridName, Recipe, late
from recipes.whole_model.cells import (
    DTYPES,
    FULL,
    KEYS,
    MODES,
    PASSES,
    SIZES,
    SMALL,
    Setting,
    build_cells,
    leave_out_bounds,
    of_product,
    of_reports,
    restrict,
)
from recipes.whole_model.report import PARTS, report

STEPS: dict[GridName, int] = {"reports": 10, "small": 5, "full": 10}
BRIEF = frozenset(
    {*KEYS[:6], "parameters", "forward_ms", "backward_ms", "optimizer_ms", "step_ms", "peak_MiB", "mfu", "status"}
)
MEASURED = (
    "parameters",
    *(f"{part}{statistic}_ms" for part in PARTS for statistic in ("", "_mean", "_std", "_min")),
    *("tokens_per_s", "mfu", "peak_MiB", "predicted_peak_bytes", "compiled_graphs", "allocator_retries"),
    *("requested_bytes", "free_bytes"),
)


def choose_settings(grid: GridName, device: Device, given: dict[str, Sequence[Any]]) -> list[Setting]:
    """Return the settings to measure: the write-ups' cells with the given values, or their product.

    Raises:
        UsageError: the device has no TF32, or no setting is left.
    """
    if device != "cuda":
        if "tf32" in given.get("dtype", ()):
            raise UsageError(f"--dtype tf32: only CUDA GPUs have it, not --device {device}; leave it out")
        given = {"dtype": [dtype for dtype in DTYPES if dtype != "tf32"], **given} if grid == "full" else given
    if grid == "reports":
        settings = restrict(of_reports(), given)
        if not settings:
            raise UsageError("--grid reports: the write-ups print no such cell; take --grid full with the same values")
        return settings
    return of_product({**(FULL if grid == "full" else SMALL), **given})


RECIPE = Recipe(
    name="end_to_end",
    question="What do forward, backward and optimizer of a whole model cost, by size, context, precision, compilation "
    "and warm-up?",
    columns=[*KEYS, "device", *MEASURED, "status", "reason"],
    cell_keys=KEYS,
    measure=late("recipes.whole_model.measure:measure_cell"),
    predict=late("recipes.whole_model.measure:predict_bytes"),
    derive=leave_out_bounds,
    report=report,
    brief=BRIEF,
)


@click.command(help=__doc__)
@recipe_options
@click.option("--size", type=Names(SIZES), help="Sizes of the model, instead of the grid's.")
@click.option("--context", type=Numbers(), help="Lengths of the context, instead of the grid's.")
@click.option("--passes", type=Names(PASSES), help="How much of a training step, instead of the grid's.")
@click.option("--dtype", type=Names(DTYPES), help="fp32, tf32, or bf16 autocast, instead of the grid's.")
@click.option("--mode", type=Names(MODES), help="eager, compiled, instead of the grid's.")
@click.option("--warmup", type=Numbers(least=0), help="Steps before the timed ones; only fp32 eager varies them.")
@click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(min=3), help="Timed steps per cell  [default: 10; 5 with --grid small]")
def main(options: Options, batch: int, steps: int | None, **given: Sequence[int] | Sequence[str] | None) -> int:
    axes = {axis: values for axis, values in given.items() if values is not None}
    settings = choose_settings(options.grid, options.device, axes)
    return run_recipe(RECIPE, build_cells(settings, batch, steps or STEPS[options.grid]), options)


if __name__ == "__main__":
    exit_with(main)
