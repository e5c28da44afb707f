"""The command line that all recipes share: options, axes of a grid, running the grid, writing the results."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click

from profkit.errors import ProfkitError, ToolError, UsageError
from profkit.files import write_whole
from recipes.common.grid import CellFailed, describe_end, run_grid, run_isolated, sigterm_raises
from recipes.common.measuring import describe_machine
from recipes.common.pictures import png_bytes
from recipes.common.recipe import DEVICES, GRIDS, NOT_RUN, Cell, Device, GridName, Recipe, Row
from recipes.common.store import Store, open_store
from recipes.common.tables import DASH, csv_text, markdown, screen, select

RESULTS = Path("recipes/results")


class Numbers(click.ParamType):
    """``256,1024,4096``: whole numbers from ``least`` up, in rising order."""

    name = "N,N,…"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and int(part) >= self._least for part in parts):
            bound = f"above {self._least - 1}" if self._least else "from 0"
            self.fail(f"{value}: not whole numbers {bound} separated by commas", param, ctx)
        numbers = tuple(int(part) for part in parts)
        if list(numbers) != sorted(set(numbers)):
            rising = ",".join(map(str, sorted(set(numbers))))
            self.fail(f"{value}: list each value once, in rising order: {rising}", param, ctx)
        return numbers


class Names(click.ParamType):
    """``eager,compiled``: some of the known names, each once."""

    name = "NAME,…"

    def __init__(self, choices: Sequence[str]) -> None:
        self._choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in str(value).split(","))
        for name in names:
            if name not in self._choices:
                self.fail(f"{name}: choose from {', '.join(self._choices)}", param, ctx)
        if len(set(names)) < len(names):
            self.fail(f"{value}: list each value once: {','.join(dict.fromkeys(names))}", param, ctx)
        return names


@dataclass(frozen=True)
class Options:
    """The options of every recipe."""

    grid: GridName
    device: Device
    output: Path | None
    budget_s: float | None
    restart: bool


def recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every recipe; the command gets them as one `Options`, its first argument."""

    @functools.wraps(command)
    def gather(**given: Any) -> Any:
        shared = {each.name: given.pop(each.name) for each in fields(Options)}
        return command(Options(**shared), **given)

    result: Callable[..., Any] = gather
    for option in (
        click.option("--restart", is_flag=True, help="Discard the results in the directory and begin anew."),
        click.option(
            "--budget-s",
            type=click.FloatRange(min=0, min_open=True),
            help="Stop after this many seconds. The most informative cells come first; the rest is `not run`.",
        ),
        click.option(
            "-o",
            "output",
            type=click.Path(file_okay=False, path_type=Path),
            help="Directory of the results, also of an earlier run  [default: recipes/results/RECIPE]",
        ),
        click.option("--device", type=click.Choice(DEVICES), default="cuda", show_default=True),
        click.option(
            "--grid",
            type=click.Choice(GRIDS),
            default="small",
            show_default=True,
            help="small: minutes on a CPU; reports: the cells that published write-ups print; full: the whole product.",
        ),
    ):
        result = option(result)
    return result


def run_recipe(recipe: Recipe, cells: Sequence[Cell], options: Options) -> int:
    """Run the cells, write the table, the report and the pictures, print the table; return the exit code.

    Results are written however the run ends. 0: every cell was measured or is known not to fit, or the time was over;
    1: a cell failed.

    Raises:
        UsageError: the device is missing, or the directory holds something else.
        ToolError: torch is missing, or cannot use the device.
        OSError: the results cannot be written.
    """
    machine = _require_device(options.device)
    directory = results_directory(recipe.name, options)
    store = open_store(directory, recipe.name, recipe.cell_keys, machine, restart=options.restart)
    state = "interrupted"
    try:
        with sigterm_raises():
            run_grid(recipe, cells, options.device, store, options.budget_s)
        state = describe_end(cells, store)
    finally:
        rows = write_results(recipe, cells, store, machine)
        store.finish(state)
    click.echo(screen(select(rows, recipe.shown_columns, recipe.exact)))
    click.echo(f"\n{directory / recipe.name}.md", err=True)
    return 1 if any(str(row["status"]).startswith("failed(") for row in rows) else 0


def results_directory(recipe: str, options: Options) -> Path:
    """Return where the results of a recipe go, and where those of an earlier run are."""
    return options.output or RESULTS / recipe


def _require_device(device: Device) -> dict[str, object]:
    """Return the facts of the machine, read by another process: this one must not hold any of the device's memory."""
    if find_spec("torch") is None:
        raise ToolError("torch is not installed here: pip install 'profkit[cpu]', or the CUDA build for your driver")
    try:
        machine = run_isolated(describe_machine, device)
    except CellFailed as error:
        raise ToolError(f"--device {device}: it cannot be used: {error}") from None
    if machine["missing"] is not None:
        raise UsageError(f"--device {device}: {machine['missing']}; choose another one")
    return machine


def write_results(recipe: Recipe, cells: Sequence[Cell], store: Store, machine: Mapping[str, object]) -> list[Row]:
    """Write CSV, Markdown and pictures of the rows in ``store``, and return them; a cell without a row is not run.

    The Markdown has the report, then pictures that the report does not show itself, then the brief columns; the CSV has
    all columns.
    """
    missing = [{**cell, "device": machine["device"], "status": NOT_RUN} for cell in cells if store.find(cell) is None]
    rows = _in_order(cells, [*store.rows, *missing], recipe.cell_keys)
    if recipe.derive is not None:
        recipe.derive(rows)
    report = recipe.report(rows, machine)
    for name, figure in report.pictures.items():
        write_whole(store.directory / name, png_bytes(figure))
    pictures = [f"![{Path(name).stem}]({name})" for name in report.pictures if f"({name})" not in report.markdown]
    columns = recipe.shown_columns
    left_out = len(recipe.columns) - len(columns)
    more = f" {left_out} more columns are in [{recipe.name}.csv]({recipe.name}.csv)." if left_out else ""
    parts = (
        f"# {recipe.name}",
        recipe.question,
        f"{machine['gpu'] or machine['device']}, torch {machine['torch']}",
        *report.blocks,
        *pictures,
        "## All cells",
        f"{DASH}: not measured.{more}",
        markdown(select(rows, columns, recipe.exact)),
    )
    write_whole(store.directory / f"{recipe.name}.csv", csv_text(select(rows, recipe.columns)).encode())
    write_whole(store.directory / f"{recipe.name}.md", ("\n\n".join(filter(None, parts)) + "\n").encode())
    return rows


def _in_order(cells: Sequence[Cell], rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Return the rows by their keys, numbers rising and words in the grid's order; the grid runs in another order."""
    ranks: dict[str, dict[object, int]] = {key: {} for key in keys}
    for entry in (*cells, *rows):
        for key in keys:
            ranks[key].setdefault(entry[key], len(ranks[key]))

    def place(row: Row) -> list[float]:
        values = [(key, row[key]) for key in keys]
        return [value if isinstance(value, int | float) else ranks[key][value] for key, value in values]

    return sorted(rows, key=place)


def exit_with(command: click.Command) -> NoReturn:
    """Run a recipe's command and exit; an error is one line."""
    try:
        code: Any = command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        _leave("interrupted; finished cells are kept, and the same command goes on from there", 130)
    except ProfkitError as error:
        _leave(str(error), error.exit_code)
    except OSError as error:
        _leave(f"{error.filename or 'the result'}: {error.strerror or error}", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(message: str, code: int) -> NoReturn:
    click.echo(f"recipes: {message}", err=True)
    sys.exit(code)
