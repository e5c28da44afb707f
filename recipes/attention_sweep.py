"""What do time and memory of attention cost by sequence length, and at which length does this GPU run out?

``python -m recipes.attention_sweep --device cpu``. Batch 8, one head. Written-out attention, the same compiled and
checkpointed, torch's own; fp32 and bf16. What autograd keeps does not depend on the device, and is counted exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import click

from profkit.report.formats import Column
from recipes.attention.names import COMPILED, DTYPES, IMPLEMENTATIONS, WRITTEN
from recipes.attention.report import add_growth, leave_out_bounds, report
from recipes.common.axes import Names, Numbers
from recipes.common.command import Options, exit_with, recipe_options, run_recipe
from recipes.common.recipe import Cell, Device, GridName, Recipe, Row

Axes = Mapping[str, Sequence[Any]]
"""The values of d_model, seq_len, implementation and dtype."""

D_MODELS, SEQ_LENS = (16, 32, 64, 128), (256, 1024, 4096, 8192, 16384)
GRIDS: Mapping[GridName, Axes] = {
    "reports": {
        "d_model": D_MODELS, "seq_len": SEQ_LENS, "implementation": (WRITTEN, COMPILED), "dtype": ("fp32",)
    },
    "small": {
        "d_model": (16,), "seq_len": (256, 512, 1024), "implementation": IMPLEMENTATIONS, "dtype": ("fp32",)
    },
    "full": {"d_model": D_MODELS, "seq_len": SEQ_LENS, "implementation": IMPLEMENTATIONS, "dtype": tuple(DTYPES)},
}  # fmt: skip
PASSES: Mapping[GridName, int] = {"reports": 100, "small": 5, "full": 100}

KEYS = ("d_model", "seq_len", "implementation", "dtype", "passes")
BRIEF = frozenset({*KEYS[:4], "forward_ms", "backward_ms", "saved_activations_MiB", "backward_peak_MiB", "status"})
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


def measure(cell: Cell, device: Device) -> Row:
    """Measure a cell; torch is loaded in its process alone."""
    from recipes.attention.measure import measure_cell

    return measure_cell(cell, device)


def predict(cell: Cell, device: Device) -> int:
    """Return the bytes that a cell asks for at its peak, or a lower bound."""
    from recipes.attention.measure import predict_bytes

    return predict_bytes(cell, device)


def build_cells(axes: Axes, passes: int) -> list[Cell]:
    """Return the cells, the most telling first: by rising width, and for each the whole range of lengths."""
    ordered = product(axes["d_model"], axes["dtype"], axes["implementation"], axes["seq_len"])
    return [
        {"d_model": d_model, "seq_len": seq_len, "implementation": name, "dtype": dtype, "passes": passes}
        for d_model, dtype, name, seq_len in ordered
    ]


def derive(rows: Sequence[Row]) -> None:
    """Add how memory grows, and leave out what was predicted and is no prediction."""
    add_growth(rows)
    leave_out_bounds(rows)


RECIPE = Recipe(
    name="attention_sweep",
    question="What do time and memory of attention cost by sequence length, and at which length does this GPU run out?",
    columns=[
        Column(key, key, right=key not in ("implementation", "dtype", "device", "status", "reason"))
        for key in (*KEYS, "device", *MEASURED, "status", "reason")
    ],
    cell_keys=KEYS,
    measure=measure,
    predict=predict,
    derive=derive,
    report=report,
    brief=BRIEF,
)


@click.command(help=__doc__)
@recipe_options
@click.option("--d-model", type=Numbers(), help="Widths of the head, instead of the grid's.")
@click.option("--seq-len", type=Numbers(), help="Sequence lengths, instead of the grid's.")
@click.option("--implementation", type=Names(IMPLEMENTATIONS), help="Ways to write attention, instead of the grid's.")
@click.option("--dtype", type=Names(tuple(DTYPES)), help="Of the inputs, instead of the grid's.")
@click.option("--passes", type=click.IntRange(min=1), help="Timed passes a cell  [default: 100; 5 with --grid small]")
def main(options: Options, passes: int | None, **given: Sequence[int] | Sequence[str] | None) -> int:
    axes = {**GRIDS[options.grid], **{axis: values for axis, values in given.items() if values is not None}}
    return run_recipe(RECIPE, build_cells(axes, passes or PASSES[options.grid]), options)


if __name__ == "__main__":
    exit_with(main)
