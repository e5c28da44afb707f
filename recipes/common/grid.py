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

from profkit.report.units import format_bytes
from recipes.common.isolated import CellFailed, OutOfTime, run_isolated
from recipes.common.machine import free_bytes
from recipes.common.recipe import NOT_RUN, OK, Cell, Device, Recipe, Row, Together, failed, identify, is_settled
from recipes.common.store import Store

TIME_OVER = "the time was over"


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
        for group in _group(waiting, recipe):
            left_s = effort.left_s()
            began = time.monotonic()
            if left_s == 0.0:
                rows: Sequence[Row] = [{"status": NOT_RUN, "reason": TIME_OVER}] * len(group)
            else:
                rows = _measure(recipe, group, device, left_s, effort.force)
            for cell, row in zip(group, rows, strict=True):
                store.add({**cell, "device": device, **row})
                tell(cell, row, (time.monotonic() - began) / len(group))


def describe_end(cells: Sequence[Cell], store: Store) -> str:
    """Return how a run over all of the cells ended: ``complete``, or ``time over`` where some are left for the next."""
    found = [store.find(cell) for cell in cells]
    return "time over" if any(row is not None and row.get("reason") == TIME_OVER for row in found) else "complete"


def _group(cells: Sequence[Cell], recipe: Recipe) -> list[list[Cell]]:
    """Return the cells that are measured at once, where each group's first one stands."""
    keys = recipe.measure.keys if isinstance(recipe.measure, Together) else recipe.cell_keys
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(identify(cell, keys), []).append(cell)
    return list(groups.values())


def _is_done(store: Store, cell: Cell) -> bool:
    row = store.find(cell)
    return row is not None and is_settled(row)


def _measure(
    recipe: Recipe, cells: Sequence[Cell], device: Device, limit_s: float | None, force: bool
) -> Sequence[Row]:
    given = [dict(cell) for cell in cells]
    try:
        return run_isolated(measure_cells, recipe.measure, recipe.predict, given, device, force, limit_s=limit_s)
    except OutOfTime:
        row: Row = {"status": NOT_RUN, "reason": TIME_OVER}
    except CellFailed as error:
        row = {"status": failed(str(error)), "reason": str(error), "traceback": error.details}
    return [row] * len(cells)


def measure_cells(
    measure: Callable[[Cell, Device], Row] | Together,
    predict: Callable[[Cell, Device], int | None] | None,
    cells: Sequence[Cell],
    device: Device,
    force: bool,
) -> list[Row]:
    """Measure some cells, but for those that are known not to fit; runs in the cells' process."""
    needed = [None if predict is None else predict(cell, device) for cell in cells]
    free = _free_bytes(measure, device) if any(needed) else None
    refused = [None if force else _refuse(size, free) for size in needed]
    fitting = [cell for cell, row in zip(cells, refused, strict=True) if row is None]
    if isinstance(measure, Together):
        measured = iter(measure.measure(fitting, device) if fitting else ())
    else:
        measured = iter([measure(cell, device) for cell in fitting])
    rows = [
        {"predicted_peak_bytes": size, **(row or {"status": OK, "reason": None, **next(measured)})}
        for size, row in zip(needed, refused, strict=True)
    ]
    # What cannot be kept breaks these cells here, and not the grid.
    json.dumps(rows, allow_nan=False)
    return rows


def _free_bytes(measure: object, device: Device) -> int | None:
    """Return how much memory is free, told so that what is measured next finds the device as it was."""
    # Asking makes a CUDA context. What measures many at once starts programs of its own, and a context that this
    # process held beside them would take their memory, and be another process on their GPU.
    return run_isolated(free_bytes, device) if isinstance(measure, Together) else free_bytes(device)


def _refuse(needed: int | None, free: int | None) -> Row | None:
    """Return the row of a cell that is known not to fit, or None."""
    if needed is None or free is None or needed <= free:
        return None
    reason = f"predicted {format_bytes(needed)}, free {format_bytes(free)}; --force tries it"
    return {"status": NOT_RUN, "reason": reason}


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
