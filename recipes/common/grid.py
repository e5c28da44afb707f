"""Running a grid: cell after cell, each in a process of its own, until all are there or the time is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from profkit.report.memory_units import format_bytes
from recipes.common.isolated import CellFailed, OutOfTime, run_isolated
from recipes.common.machine import free_bytes
from recipes.common.recipe import NOT_RUN, OK, Cell, Device, Recipe, Row, failed, is_settled
from recipes.common.store import Store


@dataclass(frozen=True)
class Effort:
    """How much to try: ``deadline`` on the monotonic clock, or None; ``force`` also tries what cannot fit."""

    deadline: float | None = None
    force: bool = False

    def left_s(self) -> float | None:
        """Return the seconds left, or None where there is no deadline."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)


def run_grid(recipe: Recipe, cells: Sequence[Cell], device: Device, store: Store, effort: Effort) -> None:
    """Measure the cells that ``store`` does not hold yet, in the order given, and keep each row as it comes.

    Cells left when the time is over get the status ``not run``; one that was under way then is given up.
    """
    waiting = [cell for cell in cells if not _is_done(store, cell)]
    with _progress(len(waiting), len(cells)) as tell:
        for cell in waiting:
            left_s = effort.left_s()
            began = time.monotonic()
            if left_s == 0.0:
                row: Row = {"status": NOT_RUN, "reason": "the time was over"}
            else:
                row = _measure(recipe, cell, device, left_s, effort.force)
            store.add({**cell, "device": device, **row})
            tell(cell, row, time.monotonic() - began)


def _is_done(store: Store, cell: Cell) -> bool:
    row = store.find(cell)
    return row is not None and is_settled(row)


def _measure(recipe: Recipe, cell: Cell, device: Device, limit_s: float | None, force: bool) -> Row:
    try:
        return run_isolated(measure_cell, recipe.measure, recipe.predict, dict(cell), device, force, limit_s=limit_s)
    except OutOfTime:
        return {"status": NOT_RUN, "reason": "the time was over"}
    except CellFailed as error:
        return {"status": failed(str(error)), "reason": str(error), "traceback": error.details}


def measure_cell(
    measure: Callable[[Cell, Device], Row],
    predict: Callable[[Cell, Device], int | None] | None,
    cell: Cell,
    device: Device,
    force: bool,
) -> Row:
    """Measure one cell, unless it is known that it cannot fit; runs in the cell's process."""
    needed = None if predict is None else predict(cell, device)
    free = None if needed is None else free_bytes(device)
    if not force and needed is not None and free is not None and needed > free:
        reason = f"predicted {format_bytes(needed)}, free {format_bytes(free)}; --force tries it"
        return {"status": NOT_RUN, "reason": reason, "predicted_peak_bytes": needed}
    row = {"status": OK, "reason": None, "predicted_peak_bytes": needed, **measure(cell, device)}
    # What cannot be kept breaks this cell here, and not the grid.
    json.dumps(row, allow_nan=False)
    return row


@contextmanager
def _progress(waiting: int, total: int) -> Iterator[Callable[[Cell, Row, float], None]]:
    """Yield a function that tells of a cell that is done: a line each on standard error, and a bar on a terminal."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if waiting < total:
        console.print(f"{total - waiting} of {total} cells are there already")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("cells", total=waiting)

        def tell(cell: Cell, row: Row, seconds: float) -> None:
            progress.advance(task)
            label = " ".join(f"{key}={value}" for key, value in cell.items())
            why = f" ({row['reason']})" if row.get("reason") and row["status"] == NOT_RUN else ""
            progress.console.print(escape(f"{label}: {row['status']}{why}, {seconds:.1f} s"))

        yield tell
