"""In which dtype does each part of a model run under autocast, and what of LayerNorm would break there?

``python -m recipes.autocast_dtypes --device cpu``. Nothing is recited: dtypes are read by hooks on the modules, and
operator by operator below autocast. Devices differ, for autocast has a list of operators for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from profkit.report.formats import Column, Table, render_markdown
from recipes.common.command import Options, exit_with, recipe_options, run_recipe
from recipes.common.pictures import COLOURS, new_figure
from recipes.common.recipe import Cell, Device, Recipe, Report, Row
from recipes.common.tables import build_table

# float32 is the run without autocast, to compare with.
CELLS: list[Cell] = [{"dtype": dtype} for dtype in ("float16", "bfloat16", "float32")]
PARTS = (
    *("parameters", "fc1_output", "relu_output", "ln_output", "fc2_output", "logits", "loss"),
    *("logits_gradient", "parameter_gradients"),
)
LIMITS = (
    *("square_overflows_from", "ones_add_up_to", "epsilon_1e-5", "epsilon_1e-8", "constant_row_with_epsilon_1e-8"),
    *(f"error_{data}{how}" for data in ("usual", "large", "small") for how in ("", "_summed_one_by_one")),
)


def observe(cell: Cell, device: Device) -> Row:
    """Run one training step of the toy model, then each operator, then LayerNorm in the cell's dtype alone."""
    import torch

    from recipes.precision.layer_norm import find_limits
    from recipes.precision.operators import classify_operators
    from recipes.precision.toy_model import observe_step

    torch.manual_seed(0)
    dtype = getattr(torch, str(cell["dtype"]))
    with_autocast = dtype != torch.float32
    return {
        **observe_step(device, dtype),
        "classes": classify_operators(device, dtype) if with_autocast else [],
        **find_limits(device, dtype),
    }


def report(rows: Sequence[Row], machine: Mapping[str, object]) -> Report:
    """Put the dtypes side by side, and say of LayerNorm what its numbers show."""
    there: list[dict[str, Any]] = [row for row in rows if row["status"] == "ok"]
    sections = [
        f"## The toy model on {machine['device']}",
        render_markdown(_side_by_side(there, PARTS)),
        "## Operators of the step, as they ran below autocast",
        *(f"Autocast to {row['dtype']}:\n\n{_operators(row['operators'])}" for row in there if row["classes"]),
        "## Operators by what autocast does with them",
        *(f"- {row['dtype']}, run in {name}: {names}." for row in there for name, names in _classes(row).items()),
        "## LayerNorm in one dtype alone",
        render_markdown(_side_by_side(there, LIMITS)),
        "An error is the greatest distance from the float64 result, as a share of the greatest value.",
        *(f"- {line}" for row in there for line in conclude(row)),
    ]
    by_dtype = {row["dtype"]: row for row in there}
    if {"float16", "bfloat16"} <= by_dtype.keys():
        sections.append(f"- {compare(by_dtype['float16'], by_dtype['bfloat16'])}")
    return Report("\n\n".join(sections).replace(".\n\n- ", ".\n- "), {"layer_norm.png": _draw(there)} if there else {})


def conclude(row: Mapping[str, Any]) -> list[str]:
    """Return a sentence on each of LayerNorm's weak places, from the numbers of one dtype."""
    dtype, overflow = row["dtype"], row["square_overflows_from"]
    square = f"squares overflow from {overflow} on" if overflow else "no square overflows up to 10,000"
    constant = "finite" if row["constant_row_with_epsilon_1e-8"] else "not finite"
    return [
        f"{dtype}, the square: {square}; LayerNorm of large data {_error(row, 'large')}.",
        f"{dtype}, the sum: 10,000 ones, added one by one in {dtype}, come to {row['ones_add_up_to']:,.0f}; LayerNorm "
        f"with such sums {_error(row, 'usual_summed_one_by_one')}, with sums in float32 it {_error(row, 'usual')}.",
        f"{dtype}, epsilon: 1e-5 is stored as {row['epsilon_1e-5']:.6g}, 1e-8 as {row['epsilon_1e-8']:.3g}, and with "
        f"the latter LayerNorm of a constant row is {constant}; of small data, with 1e-5, it {_error(row, 'small')}.",
    ]


def compare(fp16: Mapping[str, Any], bf16: Mapping[str, Any]) -> str:
    """Return whether LayerNorm needs other care in bfloat16 than in float16, from the numbers of both."""
    gone = fp16["square_overflows_from"] and not bf16["square_overflows_from"]
    sums = bf16["error_usual_summed_one_by_one"] / fp16["error_usual_summed_one_by_one"]
    epsilon = fp16["constant_row_with_epsilon_1e-8"] != bf16["constant_row_with_epsilon_1e-8"]
    return (
        f"bfloat16 beside float16: the overflow of the square is {'gone' if gone else 'no other'}, a small epsilon "
        f"{'survives' if epsilon else 'fares no better'}, and the sums are {sums:.0f} times as far off: "
        f"{'these still want float32' if sums > 1 else 'these too are better'}."
    )


def _error(row: Mapping[str, Any], data: str) -> str:
    error = row[f"error_{data}"]
    return "is not finite" if error is None else f"is off by {error:.2g}"


def _side_by_side(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Table:
    columns = [Column("", "what", right=False)] + [Column(str(row["dtype"]), str(row["dtype"])) for row in rows]
    lines = [{"what": key, **{str(row["dtype"]): row.get(key) for row in rows}} for key in keys]
    return build_table(columns, lines)


def _operators(operators: Sequence[Mapping[str, object]]) -> str:
    keys = ("phase", "operator", "inputs", "output", "count")
    return render_markdown(build_table([Column(key, key, right=key == "count") for key in keys], operators))


def _classes(row: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for entry in row["classes"]:
        found.setdefault(entry["runs_in"], []).append(entry["operator"])
    return {name: ", ".join(operators) for name, operators in found.items()}


def _draw(rows: Sequence[Mapping[str, Any]]) -> Any:
    figure = new_figure("LayerNorm computed in one dtype: greatest error, as a share of its greatest value")
    axes = figure.subplots()
    names = [key.removeprefix("error_").replace("_", " ") for key in LIMITS if key.startswith("error_")]
    for place, row in enumerate(rows):
        errors = [row[key] for key in LIMITS if key.startswith("error_")]
        ys = [line + 0.27 * (place - 1) for line in range(len(names))]
        axes.barh(ys, [error or 0 for error in errors], height=0.25, color=COLOURS[place], label=str(row["dtype"]))
        for y, error in zip(ys, errors, strict=True):
            if error is None:
                axes.annotate("not finite", (0, y), xycoords=("axes fraction", "data"), xytext=(4, 0),
                              textcoords="offset points", va="center", fontsize=8, color=COLOURS[place])  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("error")
    axes.legend(frameon=False)
    return figure


RECIPE = Recipe(
    name="autocast_dtypes",
    question="In which dtype does each part of a model run under autocast, and what of LayerNorm would break there?",
    columns=[Column(key, key, right=False) for key in ("dtype", *PARTS, *LIMITS, "status")],
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
