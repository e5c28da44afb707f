"""The command line that all recipes have, and what running one comes down to."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import click

from profkit.errors import ProfkitError, ToolError, UsageError
from profkit.files import write_whole
from profkit.launch.processes import sigterm_raises
from profkit.launch.record import require_torch
from profkit.report.formats import make_visible, render_csv, render_markdown, render_table
from profkit.report.pictures import write_png
from profkit.report.units import format_count
from recipes.common.grid import Effort, describe_end, run_grid
from recipes.common.isolated import CellFailed, run_isolated
from recipes.common.machine import describe_machine
from recipes.common.recipe import DEVICES, GRIDS, NOT_RUN, Cell, Device, GridName, Recipe, Row
from recipes.common.store import Store, open_store
from recipes.common.tables import DASH, build_table

RESULTS = Path("recipes/results")


@dataclass(frozen=True)
class Options:
    """What every recipe is told."""

    grid: GridName
    device: Device
    output: Path | None
    budget_s: float | None
    force: bool
    restart: bool


_OPTIONS = tuple(each.name for each in fields(Options))


def recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every recipe has; the command gets them as one `Options`, its first argument."""

    @functools.wraps(command)
    def gather(**given: Any) -> Any:
        own = {name: given.pop(name) for name in _OPTIONS}
        return command(Options(**own), **given)

    result: Callable[..., Any] = gather
    for option in (
        click.option("--restart", is_flag=True, help="Give up the results that are there and begin anew."),
        click.option("--force", is_flag=True, help="Also try what is predicted not to fit into the memory."),
        click.option(
            "--budget-s",
            type=click.FloatRange(min=0, min_open=True),
            help="Stop after so many seconds; the most telling cells come first, the rest is `not run`.",
        ),
        click.option(
            "-o",
            "output",
            type=click.Path(file_okay=False, path_type=Path),
            help="Where the results go, and where those of an earlier run are  [default: recipes/results/RECIPE]",
        ),
        click.option("--device", type=click.Choice(DEVICES), default="cuda", show_default=True),
        click.option(
            "--grid",
            type=click.Choice(GRIDS),
            default="small",
            show_default=True,
            help="reports: each cell that a write-up prints; small: minutes on a CPU; full: the whole product.",
        ),
    ):
        result = option(result)
    return result


def run_recipe(recipe: Recipe, cells: Sequence[Cell], options: Options) -> int:
    """Run the cells, write the table, the report and the pictures, print the table; return the exit code.

    Results are written however the run ends. 0: all was run or is known not to fit, or the time was over; 1: a cell
    failed.

    Raises:
        UsageError: the device is not there, or the directory holds something else.
        ToolError: torch is not there, or cannot use the device.
        OSError: the results cannot be written.
    """
    effort = Effort(None if options.budget_s is None else time.monotonic() + options.budget_s, options.force)
    machine = _require_device(options.device)
    directory = results_directory(recipe.name, options)
    store = open_store(directory, recipe.name, recipe.cell_keys, machine, restart=options.restart)
    state = "interrupted"
    try:
        with sigterm_raises():
            run_grid(recipe, cells, options.device, store, effort)
        state = describe_end(cells, store)
    finally:
        rows = write_results(recipe, cells, store, machine)
        store.finish(state)
    click.echo(render_table(build_table(recipe.shown_columns, rows, recipe.exact), full=True))
    click.echo(f"\n{directory / recipe.name}.md", err=True)
    return 1 if any(str(row["status"]).startswith("failed(") for row in rows) else 0


def results_directory(recipe: str, options: Options) -> Path:
    """Return where the results of a recipe go, and where those of an earlier run are."""
    return options.output or RESULTS / recipe


def _require_device(device: Device) -> dict[str, object]:
    """Return the facts of the machine, told by a process of its own: this one must not hold any of its memory."""
    require_torch()
    try:
        machine = run_isolated(describe_machine, device)
    except CellFailed as error:
        raise ToolError(f"--device {device}: it cannot be used: {error}") from None
    if machine["missing"] is not None:
        raise UsageError(f"--device {device}: {machine['missing']}; name one that is there")
    return machine


def write_results(recipe: Recipe, cells: Sequence[Cell], store: Store, machine: Mapping[str, object]) -> list[Row]:
    """Write CSV, Markdown and pictures of what there is, and return the rows; a cell without one stands as not run.

    The Markdown has the report first, then the pictures that it does not show itself, and the brief columns of the
    table last; the CSV has all columns.
    """
    missing = [{**cell, "device": machine["device"], "status": NOT_RUN} for cell in cells if store.find(cell) is None]
    rows = _in_order(cells, [*store.rows, *missing], recipe.cell_keys)
    if recipe.derive is not None:
        recipe.derive(rows)
    report = recipe.report(rows, machine)
    for name, figure in report.pictures.items():
        write_png(figure, store.directory / name)
    where = f"{machine['gpu'] or machine['device']}, torch {machine['torch']}"
    pictures = [f"![{Path(name).stem}]({name})" for name in report.pictures if f"({name})" not in report.markdown]
    parts = (f"# {recipe.name}", recipe.question, where, report.markdown.strip(), *pictures, *_all_cells(recipe, rows))
    csv = render_csv(build_table(recipe.columns, rows, recipe.exact))
    write_whole(store.directory / f"{recipe.name}.csv", f"{csv}\n".encode())
    write_whole(store.directory / f"{recipe.name}.md", ("\n\n".join(parts) + "\n").encode())
    return rows


def _all_cells(recipe: Recipe, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the Markdown of the table at the report's end: a line a cell, and where its other columns are."""
    shown = recipe.shown_columns
    left_out = len(recipe.columns) - len(shown)
    more = f" The other {left_out} columns are in [{recipe.name}.csv]({recipe.name}.csv)." if left_out else ""
    head = f"{format_count(len(rows), 'cell')}; {DASH} is no figure.{more}"
    return "## All cells", head, render_markdown(build_table(shown, rows, recipe.exact))


def _in_order(cells: Sequence[Cell], rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Return the rows by their keys: numbers rising, words in the grid's order; the grid runs in another."""
    ranks: dict[str, dict[object, int]] = {key: {} for key in keys}
    for entry in (*cells, *rows):
        for key in keys:
            ranks[key].setdefault(entry[key], len(ranks[key]))

    def place(row: Row) -> list[float]:
        values = [(key, row[key]) for key in keys]
        return [value if isinstance(value, int | float) else ranks[key][value] for key, value in values]

    return sorted(rows, key=place)


def exit_with(command: click.Command) -> NoReturn:
    """Run a recipe's command and exit; errors are one line, as those of ``profkit`` are."""
    try:
        code: Any = command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        _leave("interrupted; what was measured is kept, the same command goes on from there", 130)
    except ProfkitError as error:
        _leave(str(error), error.exit_code)
    except OSError as error:
        _leave(f"{error.filename or 'the result'}: {error.strerror or error}", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(message: str, code: int) -> NoReturn:
    click.echo(f"recipes: {make_visible(message)}", err=True)
    sys.exit(code)
