"""In which dtype does each part of a model run under autocast, and what of LayerNorm would break there?

``python -m recipes.autocast_dtypes --device cpu``. Nothing is recited: dtypes are read by hooks on the modules, and
operator by operator below autocast. Devices differ, for autocast has a list of operators for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from profkit.report.formats import Column, render_markdown
from recipes.common.command import Options, exit_with, recipe_options, run_recipe
from recipes.common.recipe import Cell, Device, Recipe, Report, Row
from recipes.common.sentences import list_sentences
from recipes.common.tables import build_table
from recipes.precision.inputs import FLOAT32, KEEPS, LOWER, MIXED
from recipes.precision.limits import LIMITS, describe_limits, draw_errors

# float32 is the run without autocast, to compare with.
CELLS: list[Cell] = [{"dtype": dtype} for dtype in ("float16", "bfloat16", "float32")]
PARTS = (
    *("parameters", "fc1_output", "relu_output", "ln_output", "fc2_output", "logits", "loss"),
    *("logits_gradient", "parameter_gradients"),
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
    parts = [{"what": part, **{str(row["dtype"]): row.get(part) for row in there}} for part in PARTS]
    sections = [
        f"## The toy model on {machine['device']}",
        render_markdown(build_table([Column("", "what", right=False), *_by_dtype(there)], parts)),
        "## Operators by what autocast does with them",
        *answer_classes(there),
        "## LayerNorm in one dtype alone",
        *describe_limits(there),
        "## Operators of the step, as they ran below autocast",
        *_steps([row for row in there if row["classes"]]),
    ]
    return Report("\n\n".join(sections), {"layer_norm.png": draw_errors(there)} if there else {})


def answer_classes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield which operators run in which dtype; of rows that were judged by their outputs alone, no more than that."""
    lists: dict[str, list[str]] = {}
    for row in rows:
        for line in _classes(row):
            lists.setdefault(line, []).append(str(row["dtype"]))
    yield list_sentences(f"Autocast to {' and '.join(dtypes)}, {line}." for line, dtypes in lists.items())
    if any("ran_low" not in entry for row in rows for entry in row["classes"]):
        yield "These were judged by the dtype of what came out; in which dtype each ran within is not known."
    else:
        yield "Told from the operators that ran below autocast for inputs in float32 and in the lower precision."


_WHERE = {LOWER: LOWER, FLOAT32: FLOAT32, KEEPS: "their input's dtype", MIXED: "several dtypes"}


def _classes(row: Mapping[str, Any]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for entry in row["classes"]:
        within = ""
        if entry["runs_in"] == MIXED:
            each = ", ".join(f"`{name}` in {_name(dtype, row)}" for name, dtype in entry["ran_low"])
            within = f" ({each}, for an input in lower precision)"
        does = "run in" if "ran_low" in entry else "come out in"
        found.setdefault(f"{does} {_WHERE[entry['runs_in']]}", []).append(entry["operator"] + within)
    for which, operators in found.items():
        yield f"{which}: {', '.join(operators)}"


def _name(dtypes: str, row: Mapping[str, Any]) -> str:
    return ", ".join(LOWER if each == row["dtype"] else each for each in dtypes.split(", "))


def _steps(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the operators of each row, those of rows that differ in the lower dtype alone once."""
    keys = ("phase", "operator", "inputs", "output", "count")
    steps: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        lines = [
            {**entry, **{key: _name(entry[key], row) for key in ("inputs", "output")}} for entry in row["operators"]
        ]
        table = build_table([Column(key, key, right=key == "count") for key in keys], lines)
        steps.setdefault(render_markdown(table), []).append(row)
    for shown, here in steps.items():
        yield f"Autocast to {' and '.join(str(row['dtype']) for row in here)}, called {LOWER} here:"
        yield shown


def _by_dtype(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    return [Column(str(row["dtype"]), str(row["dtype"])) for row in rows]


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
