"""In which dtype does each part of a model run under autocast, and what of LayerNorm would break there?

``python -m recipes.autocast_dtypes --device cpu``. Every dtype is observed: by hooks on the modules, and operator by
operator below autocast. Devices differ, because autocast has a list of operators for each.
"""

from __future__ import annotations

import click

from recipes.common.command import Options, exit_with, recipe_options, run_recipe
from recipes.common.recipe import Cell, Device, Recipe, Row
from recipes.precision.report import LIMITS, PARTS, report

# float32 is the run without autocast, for comparison.
CELLS: list[Cell] = [{"dtype": dtype} for dtype in ("float16", "bfloat16", "float32")]


def observe(cell: Cell, device: Device) -> Row:
    """Run one training step of the toy model, then each operator, then LayerNorm in the cell's dtype alone."""
    import torch

    from recipes.precision.observe import classify_operators, find_limits, observe_step

    torch.manual_seed(0)
    dtype = getattr(torch, str(cell["dtype"]))
    return {
        **observe_step(device, dtype),
        "classes": [] if dtype == torch.float32 else classify_operators(device, dtype),
        **find_limits(device, dtype),
    }


RECIPE = Recipe(
    name="autocast_dtypes",
    question="In which dtype does each part of a model run under autocast, and what of LayerNorm would break there?",
    columns=["dtype", *PARTS, *LIMITS, "status"],
    cell_keys=["dtype"],
    measure=observe,
    report=report,
    brief=frozenset({"dtype", *PARTS, "status"}),
)


@click.command(help=__doc__)
@recipe_options
def main(options: Options) -> int:
    return run_recipe(RECIPE, CELLS, options)


if __name__ == "__main__":
    exit_with(main)
