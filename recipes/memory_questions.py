"""Who holds the memory of a model, by context, precision and how much of a step; and what do checkpoints save?

``python -m recipes.memory_questions --device cpu``. profkit's transformer, batch 4. Each cell records CUDA's allocator
from before the model is made through two steps, and replays it. What a block saves is counted tensor by tensor, and
every peak stands next to the one that arithmetic predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import click

from profkit.errors import UsageError
from profkit.names import FORWARD, LOSS
from recipes.common.command import Names, Numbers, Options, exit_with, recipe_options, results_directory, run_recipe
from recipes.common.recipe import Cell, Device, Recipe, late
from recipes.model_memory.cells import (
    BATCH,
    DTYPES,
    GRIDS,
    KEYS,
    SIZES,
    build_cells,
    choose_timelines,
    name_of,
    work_of,
)
from recipes.model_memory.predict import predict_memory
from recipes.model_memory.report import add_columns, report
from recipes.whole_model.cells import FORWARD_BACKWARD, FORWARD_ONLY, PASSES

MEASURED = (
    *("parameters", "peak_GiB", "peak_phase", "reserved_GiB", "requested_GiB", "predicted_GiB"),
    *("allocated_peak_bytes", "reserved_peak_bytes", "replay_difference_bytes"),
    *("requested_peak_bytes", "predicted_peak_bytes", "difference_bytes", "predicted_phase", "added_up_bytes"),
    *("residual_MiB", "saved_block_MiB", "saved_bytes", "predicted_saved_bytes", "requested_bytes", "free_bytes"),
)
BRIEF = frozenset(
    {
        *(*KEYS[:5], "peak_GiB", "peak_phase", "reserved_GiB", "requested_GiB", "predicted_GiB", "difference_bytes"),
        *("saved_block_MiB", "status"),
    }
)


def predict(cell: Cell, device: Device) -> int:
    """Return the bytes that measuring a cell needs: for its steps on CUDA, elsewhere for one forward pass alone."""
    work = work_of(cell)
    if device == "cuda":
        return predict_memory(work).peak.bytes
    forward = replace(work, passes=FORWARD_ONLY if work.passes == FORWARD_ONLY else FORWARD_BACKWARD)
    return max(peak.bytes for peak in predict_memory(forward, device).peaks if peak.phase in (FORWARD, LOSS))


MEASURE = late("recipes.model_memory.measure:measure_cell")

RECIPE = Recipe(
    name="memory_questions",
    question="Who holds the memory of a model, by context, precision and how much of a step; and what do checkpoints "
    "save?",
    columns=[*KEYS, "device", *MEASURED, "status", "reason"],
    cell_keys=KEYS,
    measure=partial(MEASURE, timelines={}),
    predict=predict,
    report=report,
    derive=add_columns,
    brief=BRIEF,
)


def _require_checkpoints(cells: Sequence[Cell], wanted: Sequence[object]) -> None:
    there = {cell["checkpoint_layers"] for cell in cells}
    for layers in wanted:
        if layers not in there:
            raise UsageError(
                f"--checkpoint-layers {layers}: no cell has it; at most a size's layers, and none for forward alone"
            )


@click.command(help=__doc__)
@recipe_options
@click.option("--size", type=Names(SIZES), help="Sizes of the model, instead of the grid's.")
@click.option("--context", type=Numbers(), help="Lengths of the context, instead of the grid's.")
@click.option("--passes", type=Names(PASSES), help="How much of a training step, instead of the grid's.")
@click.option("--dtype", type=Names(DTYPES), help="fp32, or bf16 autocast, instead of the grid's.")
@click.option(
    "--checkpoint-layers", type=Numbers(least=0), help="Layers per checkpoint, instead of the grid's; 0: none."
)
@click.option("--batch", type=click.IntRange(min=1), default=BATCH, show_default=True)
def main(options: Options, batch: int, **given: Sequence[int] | Sequence[str] | None) -> int:
    axes = {**GRIDS[options.grid], **{axis: values for axis, values in given.items() if values is not None}}
    cells = build_cells(axes, batch)
    _require_checkpoints(cells, given["checkpoint_layers"] or ())
    directory = results_directory(RECIPE.name, options)
    timelines = {name: directory / f"timeline-{name}.png" for name in map(name_of, choose_timelines(cells))}
    return run_recipe(replace(RECIPE, measure=partial(MEASURE, timelines=timelines)), cells, options)


if __name__ == "__main__":
    exit_with(main)
