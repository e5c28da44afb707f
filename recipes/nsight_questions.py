"""What does Nsight Systems say of a training step: which kernels have the time, and does it agree with Python's clock?

``python -m recipes.nsight_questions --device cpu``. profkit's transformer in fp32; one capture of all contexts for each
size, in training and in inference. Five questions, each answered by tables, with commands that show the figures.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import click

from profkit.errors import UsageError
from recipes.common.command import Names, Numbers, Options, exit_with, recipe_options, results_directory, run_recipe
from recipes.common.recipe import Device, Recipe, Together, late
from recipes.nsight.cells import CAPTURES, GRIDS, KEYS, KINETO, NSYS, PROFILERS, SIZES, STEPS, TOGETHER, build_cells
from recipes.nsight.report import report

BRIEF = frozenset({*KEYS[:3], "profiler", "forward_recorded_ms", "forward_clean_ms", "backward_recorded_ms",
                   "backward_clean_ms", "top_share", "gemm_step_share", "status"})  # fmt: skip
MEASURED = (
    *(f"{phase}_{kind}" for phase in ("forward", "backward")
      for kind in ("recorded_ms", "python_ms", "clean_ms", "ratio")),
    *("forward_kernel_ms", "backward_kernel_ms", "top_kernel", "top_share", "top_calls"),
    *("both_top_kernel", "both_top_share", "both_top_calls", "same_kernel"),
    *("gemm_forward_share", "gemm_step_share"),
    *(f"{part}_{kind}" for part in ("softmax", "scores", "values") for kind in ("us", "flops")),
    "softmax_ratio",
    *("predicted_peak_bytes", "self_check"),
)  # fmt: skip

MEASURE = late("recipes.nsight.measure:measure_cells")

RECIPE = Recipe(
    name="nsight_questions",
    question="What does Nsight Systems say of a training step: which kernels have the time, and does it agree with "
    "Python's clock?",
    columns=[*KEYS, "device", *MEASURED, "status", "reason"],
    cell_keys=KEYS,
    measure=Together(TOGETHER, partial(MEASURE, captures=Path(CAPTURES))),
    predict=late("recipes.nsight.measure:predict_bytes"),
    report=report,
    brief=BRIEF,
)


def choose_profiler(wanted: str | None, device: Device) -> str:
    """Return the profiler to record with: the wanted one, otherwise nsys for a GPU if PATH or $NSYS has it.

    Raises:
        UsageError: ``profkit run`` cannot record the device.
    """
    if device == "mps":
        raise UsageError("--device mps: neither Nsight Systems nor profkit run records it; choose cuda or cpu")
    if wanted is not None or device == "cpu":
        return wanted or KINETO
    if "NSYS" in os.environ or which("nsys"):
        return NSYS
    click.echo("recipes: no nsys on PATH nor in $NSYS; torch.profiler records instead", err=True)
    return KINETO


@click.command(help=__doc__)
@recipe_options
@click.option("--size", type=Names(SIZES), help="Sizes of the model, instead of the grid's.")
@click.option("--context", type=Numbers(), help="Lengths of the context, instead of the grid's; one capture holds all.")
@click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Recorded steps  [default: 3; 2 with --grid small]")
@click.option("--profiler", type=click.Choice(PROFILERS), help="[default: nsys on a GPU, else kineto]")
def main(options: Options, batch: int, steps: int | None, profiler: str | None, **given: Any) -> int:
    sizes, contexts = GRIDS[options.grid]
    sizes, contexts = given["size"] or sizes, given["context"] or contexts
    chosen = choose_profiler(profiler, options.device)
    cells = build_cells(sizes, contexts, batch, steps or STEPS[options.grid], chosen)
    captures = results_directory(RECIPE.name, options) / CAPTURES
    recipe = replace(RECIPE, measure=Together(TOGETHER, partial(MEASURE, captures=captures)))
    return run_recipe(recipe, cells, options)


if __name__ == "__main__":
    exit_with(main)
