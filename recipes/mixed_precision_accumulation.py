"""How far from the true sum does it end, adding a small number many times, by the dtypes of sum and addend?

``python -m recipes.mixed_precision_accumulation --device cpu``. The sums are the same to the last
digit on every machine that rounds as IEEE 754 says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

import click

from recipes.common.command import Options, exit_with, recipe_options, run_recipe
from recipes.common.pictures import COLOURS, new_figure
from recipes.common.recipe import Cell, Device, Recipe, Report, Row, whole
from recipes.common.tables import Table, markdown

CELLS: list[Cell] = [
    {"case": case, "additions": additions, "addend": addend, "sum_dtype": total, "addend_dtype": added, "cast": cast}
    for case, additions, addend, total, added, cast in (
        ("1", 1_000, 0.01, "float32", "float32", "none"),
        ("2", 1_000, 0.01, "float16", "float16", "none"),
        ("3", 1_000, 0.01, "float32", "float16", "implicit"),
        ("4", 1_000, 0.01, "float32", "float16", "explicit"),
        ("5", 1_000, 0.01, "bfloat16", "bfloat16", "none"),
        ("6", 1_000, 0.01, "float32", "bfloat16", "implicit"),
        ("7a", 10_000, 0.001, "float32", "float32", "none"),
        ("7b", 10_000, 0.001, "float16", "float16", "none"),
        ("7c", 10_000, 0.001, "bfloat16", "bfloat16", "none"),
    )
]


def accumulate(cell: Cell, device: Device) -> Row:
    """Add the addend again and again; return the sum, and after how many additions it stopped growing, if it did.

    ``stored_addend`` is the addend in its dtype: even an exact addition of it misses the true sum by
    ``additions × (stored − true)``, the error of representation. The rest is the error of the additions.
    """
    import torch

    total = torch.zeros((), dtype=getattr(torch, str(cell["sum_dtype"])), device=device)
    addend = torch.tensor(cell["addend"], dtype=getattr(torch, str(cell["addend_dtype"])), device=device)
    stored = addend.double().cpu().item() if device != "mps" else addend.cpu().double().item()
    additions = whole(cell["additions"])
    stuck_after = None
    for number in range(additions):
        before = total.clone()
        total += addend.to(total.dtype) if cell["cast"] == "explicit" else addend
        if torch.equal(before, total):
            # Each further addition would be this one again.
            stuck_after = number
            break
    true = additions * float(str(cell["addend"]))
    result = total.item()
    return {
        "result": result,
        "true_sum": true,
        "stored_addend": stored,
        "representation_error": additions * stored - true,
        "addition_error": result - additions * stored,
        "stuck_after": stuck_after,
    }


def add_error(rows: Sequence[Row]) -> None:
    """Add to every row the error of its sum; it is negative where the sum is too small."""
    for row in rows:
        known = row.get("result") is not None
        row["error"] = float(str(row["result"])) - float(str(row["true_sum"])) if known else None


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    """Return how the error divides between storing the addend and adding it, and a picture of the errors."""
    measured = [row for row in rows if row.get("result") is not None]
    lines = []
    for row in measured:
        parts = (float(str(row[f"{part}error"])) for part in ("", "representation_", "addition_"))
        still = None if row["stuck_after"] is None else f"{row['stuck_after']:,} of {row['additions']:,}"
        lines.append([row["case"], _dtypes(row), row["result"], row["true_sum"], *split_error(*parts), still])
    headings = ["case", "dtypes", "sum", "true sum", "error", "from storing the addend", "from the additions"]
    table = Table([*headings, "stands still after"], lines, exact={"sum"})
    figure = new_figure("Distance from the true sum")
    axes = figure.subplots()
    labels = [f"{row['case']}: {row['additions']:,} × {row['addend']}, {_dtypes(row)}" for row in measured]
    axes.barh(labels, [abs(float(str(row["error"]))) for row in measured], color=COLOURS[0])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("absolute error")
    still = "A sum stands still when the addend is at most half of the sum's last digit."
    return Report(["## Where the errors come from", markdown(table), still], {"errors.png": figure})


def split_error(error: float, representation: float, addition: float) -> tuple[str, str, str]:
    """Return an error and its two parts, signed, with enough digits that the printed parts add up to it.

    The smaller part that is not 0 has three or four digits, the others as many decimals.
    """
    least = min((abs(part) for part in (representation, addition) if part), default=1.0)
    places = Decimal(1).scaleb(Decimal(least).adjusted() - 3)
    total, stored = (Decimal(value).quantize(places) for value in (error, representation))
    if not addition:
        return f"{stored:+f}", f"{stored:+f}", "0"
    return f"{total:+f}", f"{stored:+f}", f"{total - stored:+f}"


def _dtypes(row: Row) -> str:
    if row["sum_dtype"] == row["addend_dtype"]:
        return str(row["sum_dtype"])
    return f"{row['sum_dtype']} += {row['addend_dtype']} ({row['cast']} cast)"


RECIPE = Recipe(
    name="mixed_precision_accumulation",
    question="How far from the true sum does it end, adding a small number many times, by the dtypes?",
    columns=[
        *("case", "additions", "addend", "sum_dtype", "addend_dtype", "cast", "result", "true_sum", "error"),
        *("stored_addend", "representation_error", "addition_error", "stuck_after", "status"),
    ],
    cell_keys=list(CELLS[0]),
    measure=accumulate,
    report=report,
    exact=frozenset({"result", "stored_addend"}),
    derive=add_error,
)


@click.command(help=__doc__)
@recipe_options
def main(options: Options) -> int:
    return run_recipe(RECIPE, CELLS, options)


if __name__ == "__main__":
    exit_with(main)
