"""How far from the true sum does it end, adding a small number many times, by the dtypes of sum and addend?

``python -m recipes.mixed_precision_accumulation --device cpu``. The sums are exact: the same on every machine that
rounds as IEEE 754 says, so they are checked to the last digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise

import click

from profkit.report.formats import Column
from recipes.common.command import Options, exit_with, recipe_options, run_recipe
from recipes.common.pictures import new_figure
from recipes.common.recipe import Cell, Device, Recipe, Report, Row, whole
from recipes.common.sentences import list_sentences

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
    """Add the addend again and again; return the sum and where it stopped growing, if it did.

    ``stored_addend`` is what the addend's dtype makes of it: even an exact addition of that misses the true sum by
    ``additions × (stored − true)``, the error of representation. The rest is the error of the additions themselves.
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
            # Nothing changes any more: each further addition is this one again.
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
    """Add to every row what its sum is too much, as its two parts say it: below 0 where it is too little."""
    for row in rows:
        known = row.get("result") is not None
        row["error"] = float(str(row["result"])) - float(str(row["true_sum"])) if known else None


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    """Say what each sum shows, from its numbers alone."""
    measured = [row for row in rows if row.get("result") is not None]
    sentences = [_conclude(row) for row in measured]
    for one, other in pairwise(measured):
        if {one["cast"], other["cast"]} == {"implicit", "explicit"}:
            same = "the same to the last bit" if one["result"] == other["result"] else "not the same"
            sentences.append(
                f"Casting the addend by hand or leaving it to the addition is {same} ({other['result']!r})."
            )
    figure = new_figure("Distance from the true sum")
    axes = figure.subplots()
    labels = [f"{row['case']}: {row['additions']:,} × {row['addend']}, {_dtypes(row)}" for row in measured]
    axes.barh(labels, [abs(float(str(row["error"]))) for row in measured], color="#0072B2")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("absolute error")
    return Report("## What the numbers say\n\n" + list_sentences(sentences), {"errors.png": figure})


def _conclude(row: Row) -> str:
    representation, addition = float(str(row["representation_error"])), float(str(row["addition_error"]))
    larger = "the addend's own rounding" if abs(representation) > abs(addition) else "rounding after each addition"
    total, stored, added = split_error(float(str(row["error"])), representation, addition)
    text = (
        f"Case {row['case']}, {_dtypes(row)}: {row['result']!r} for {row['true_sum']:g}, off by {total}: {stored} "
        f"because the addend is stored as {row['stored_addend']!r}, {added} from the additions; {larger} weighs more."
    )
    if row["stuck_after"] is not None:
        share = f"{row['stuck_after']:,} of {row['additions']:,}"
        text += f" After {share} additions the sum stands still: the addend is at most half of the sum's last digit."
    return text


def split_error(error: float, representation: float, addition: float) -> tuple[str, str, str]:
    """Return an error and its two parts with their signs, with digits enough that the parts as printed add up to it.

    The smaller part that is not 0 has three digits or four, the others as many decimals.
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
        Column(key, key, right=key not in ("case", "sum_dtype", "addend_dtype", "cast", "status"))
        for key in (
            *("case", "additions", "addend", "sum_dtype", "addend_dtype", "cast", "result", "true_sum", "error"),
            *("stored_addend", "representation_error", "addition_error", "stuck_after", "status"),
        )
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
