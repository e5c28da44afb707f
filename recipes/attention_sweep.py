"""What do time and memory of attention cost by sequence length, and at which length does this GPU run out?

``python -m recipes.attention_sweep --device cpu``. Batch 8, one head. Written-out attention, the same compiled and
checkpointed, and torch's own; fp32 and bf16. What autograd saves does not depend on the device and is counted exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from recipes.attention.cells import DTYPES, GRIDS, IMPLEMENTATIONS, KEYS, PASSES, build_cells
from recipes.attention.report import add_columns, report
from recipes.common.command import Names, Numbers, Options, exit_with, recipe_options, run_recipe
from recipes.common.recipe import Recipe, late

MEASURED = (
    *(
        f"{part}{statistic}_ms"
        for part in ("forward", "backward", "forward_backward")
        for statistic in ("", "_mean", "_std")
    ),
    *("mem_after_inputs_MiB", "mem_before_backward_MiB", "mem_after_backward_MiB", "saved_activations_MiB"),
    *("forward_peak_MiB", "backward_peak_MiB", "predicted_peak_bytes", "bytes_per_seq2", "growth_factor"),
    *("requested_bytes", "free_bytes"),
)


RECIPE = Recipe(
    name="attention_sweep",
    question="What do time and memory of attention cost by sequence length, and at which length does this GPU run out?",
    columns=[*KEYS, "device", *MEASURED, "status", "reason"],
    cell_keys=KEYS,
    measure=late("recipes.attention.measure:measure_cell"),
    predict=late("recipes.attention.measure:predict_bytes"),
    derive=add_columns,
    report=report,
    brief=frozenset({*KEYS[:4], "forward_ms", "backward_ms", "saved_activations_MiB", "backward_peak_MiB", "status"}),
)


@click.command(help=__doc__)
@recipe_options
@click.option("--d-model", type=Numbers(), help="Widths of the head, instead of the grid's.")
@click.option("--seq-len", type=Numbers(), help="Sequence lengths, instead of the grid's.")
@click.option("--implementation", type=Names(IMPLEMENTATIONS), help="Ways to write attention, instead of the grid's.")
@click.option("--dtype", type=Names(tuple(DTYPES)), help="Type of the inputs, instead of the grid's.")
@click.option("--passes", type=click.IntRange(min=1), help="Timed passes per cell  [default: 100; 5 with --grid small]")
def main(options: Options, passes: int | None, **given: Sequence[int] | Sequence[str] | None) -> int:
    axes = {**GRIDS[options.grid], **{axis: values for axis, values in given.items() if values is not None}}
    return run_recipe(RECIPE, build_cells(axes, passes or PASSES[options.grid]), options)


if __name__ == "__main__":
    exit_with(main)
