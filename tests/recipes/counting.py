"""A recipe for the tests: its cells count how often they were measured, and each can go wrong in a way of its own.

With ``--together`` those of one ``how`` are measured at once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from profkit.report.formats import Column
from recipes.common.axes import Names, Numbers
from recipes.common.command import Options, exit_with, recipe_options, run_recipe
from recipes.common.recipe import OK, Cell, Device, Recipe, Report, Row, Together

COUNTS = "COUNTING_LOG"


def measure(cell: Cell, _device: Device) -> Row:
    with Path(os.environ[COUNTS]).open("a") as log:
        log.write(f"{cell['number']} {cell['how']} {'torch' in sys.modules}\n")
    how = cell["how"]
    if how == "slow":
        time.sleep(60)
    if how == "broken":
        raise ValueError("two\nlines")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "endless":
        return {"square": math.inf}
    return {"square": int(str(cell["number"])) ** 2, "process": os.getpid()}


def measure_together(cells: Sequence[Cell], device: Device) -> list[Row]:
    return [measure(cell, device) for cell in cells]


def predict(cell: Cell, _device: Device) -> int | None:
    return 1 << 60 if cell["how"] == "large" else 1


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    return Report(f"measured: {sum(row['status'] == OK for row in rows)}")


RECIPE = Recipe(
    name="counting",
    question="Does it count?",
    columns=[Column(key, key) for key in ("number", "how", "square", "status")],
    cell_keys=["number", "how"],
    measure=measure,
    report=report,
    predict=predict,
)


@click.command()
@recipe_options
@click.option("--numbers", type=Numbers(), default="1,2,3")
@click.option("--how", type=Names(("well", "slow", "broken", "killed", "large", "endless")), default="well")
@click.option("--together", is_flag=True)
def main(options: Options, numbers: tuple[int, ...], how: tuple[str, ...], together: bool) -> int:
    # One cell goes wrong at most: the last one.
    cells = [{"number": number, "how": how[-1] if number == max(numbers) else how[0]} for number in numbers]
    recipe = replace(RECIPE, measure=Together(("how",), measure_together)) if together else RECIPE
    return run_recipe(recipe, cells, options)


if __name__ == "__main__":
    exit_with(main)
