"""A recipe for the tests: its cells log each measurement in a file, and each can fail in a way of its own.

With ``--together`` the cells of one ``how`` are measured at once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from recipes.common.command import Names, Numbers, Options, exit_with, recipe_options, run_recipe
from recipes.common.recipe import OK, Cell, Device, Recipe, Report, Row, Together


def measure(cell: Cell, _device: Device, log: Path) -> Row:
    with log.open("a") as lines:
        lines.write(f"{cell['number']} {cell['how']} {'torch' in sys.modules}\n")
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


def measure_together(cells: Sequence[Cell], device: Device, log: Path) -> list[Row]:
    return [measure(cell, device, log) for cell in cells]


def predict(cell: Cell, _device: Device) -> int | None:
    return 1 << 60 if cell["how"] == "large" else 1


def report(rows: Sequence[Row], _machine: Mapping[str, object]) -> Report:
    return Report([f"measured: {sum(row['status'] == OK for row in rows)}"])


RECIPE = Recipe(
    name="counting",
    question="Does it count?",
    columns=["number", "how", "square", "status"],
    cell_keys=["number", "how"],
    measure=partial(measure, log=Path()),
    report=report,
    predict=predict,
)


@click.command()
@recipe_options
@click.option("--numbers", type=Numbers(), default="1,2,3")
@click.option("--how", type=Names(("well", "slow", "broken", "killed", "large", "endless")), default="well")
@click.option("--together", is_flag=True)
@click.option("--log", type=click.Path(path_type=Path), required=True)
def main(options: Options, numbers: tuple[int, ...], how: tuple[str, ...], together: bool, log: Path) -> int:
    # At most one cell fails: the last one.
    cells = [{"number": number, "how": how[-1] if number == max(numbers) else how[0]} for number in numbers]
    both = Together(("how",), partial(measure_together, log=log))
    return run_recipe(replace(RECIPE, measure=both if together else partial(measure, log=log)), cells, options)


if __name__ == "__main__":
    exit_with(main)
