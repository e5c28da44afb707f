"""Running a grid: one cell after another, each in a process of its own, until all are done or the time is over."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import FrameType
from typing import NoReturn, TypeVar

import click

from recipes.common.measuring import free_bytes
from recipes.common.recipe import NOT_RUN, OK, Cell, Device, Recipe, Row, Together, failed, identify, is_settled
from recipes.common.store import Store
from recipes.common.tables import show_bytes

Result = TypeVar("Result")

TIME_OVER = "the time was over"
_GRACE_S = 5.0


class CellFailed(Exception):
    """The function raised, or its process died; ``str(error)`` is one line, ``details`` a traceback if there is one."""

    def __init__(self, reason: str, details: str | None = None) -> None:
        super().__init__(reason)
        self.details = details


class OutOfTime(Exception):
    """The function was still running when its time was over; its process was ended."""


def run_grid(recipe: Recipe, cells: Sequence[Cell], device: Device, store: Store, budget_s: float | None) -> None:
    """Measure the cells that ``store`` lacks, in the given order, and keep each row as it comes.

    Cells left when the seconds of the budget are over get the status ``not run``; a cell that was running then is given
    up.
    """
    deadline = None if budget_s is None else time.monotonic() + budget_s
    waiting = [cell for cell in cells if (row := store.find(cell)) is None or not is_settled(row)]
    done = len(cells) - len(waiting)
    if done:
        click.echo(f"{done} of {len(cells)} cells were measured before", err=True)
    for group in _group(waiting, recipe):
        began = time.monotonic()
        rows = _measure(recipe, group, device, None if deadline is None else deadline - began)
        seconds = (time.monotonic() - began) / len(group)
        for cell, row in zip(group, rows, strict=True):
            store.add({**cell, "device": device, **row})
            done += 1
            label = " ".join(f"{key}={value}" for key, value in cell.items())
            why = f" ({row['reason']})" if row.get("reason") and row["status"] == NOT_RUN else ""
            click.echo(f"{done} of {len(cells)}: {label}: {row['status']}{why}, {seconds:.1f} s", err=True)


def describe_end(cells: Sequence[Cell], store: Store) -> str:
    """Return how a run over all cells ended: ``complete``, or ``time over`` if some are left for the next run."""
    found = [store.find(cell) for cell in cells]
    return "time over" if any(row is not None and row.get("reason") == TIME_OVER for row in found) else "complete"


def _group(cells: Sequence[Cell], recipe: Recipe) -> list[list[Cell]]:
    keys = recipe.measure.keys if isinstance(recipe.measure, Together) else recipe.cell_keys
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(identify(cell, keys), []).append(cell)
    return list(groups.values())


def _measure(recipe: Recipe, cells: Sequence[Cell], device: Device, limit_s: float | None) -> Sequence[Row]:
    try:
        if limit_s is not None and limit_s <= 0:
            raise OutOfTime
        return run_isolated(measure_cells, recipe.measure, recipe.predict, cells, device, limit_s=limit_s)
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
) -> list[Row]:
    """Measure some cells, except those that are predicted not to fit; runs in the cells' process."""
    needed = [None if predict is None else predict(cell, device) for cell in cells]
    free = None
    if any(needed):
        # Asking makes a CUDA context. A measurement of several cells starts programs of its own; a context that this
        # process held meanwhile would take their memory and be a second process on their GPU.
        free = run_isolated(free_bytes, device) if isinstance(measure, Together) else free_bytes(device)
    refused = [_refuse(size, free) for size in needed]
    fitting = [cell for cell, row in zip(cells, refused, strict=True) if row is None]
    if isinstance(measure, Together):
        measured = iter(measure.measure(fitting, device) if fitting else ())
    else:
        measured = iter([measure(cell, device) for cell in fitting])
    rows = [
        {"predicted_peak_bytes": size, **(row or {"status": OK, "reason": None, **next(measured)})}
        for size, row in zip(needed, refused, strict=True)
    ]
    json.dumps(rows, allow_nan=False)  # A row that cannot be stored fails here, as this cell's own error.
    return rows


def _refuse(needed: int | None, free: int | None) -> Row | None:
    if needed is None or free is None or needed <= free:
        return None
    reason = f"predicted {show_bytes(needed)}, free {show_bytes(free)}"
    return {"status": NOT_RUN, "reason": reason}


def run_isolated(function: Callable[..., Result], *arguments: object, limit_s: float | None = None) -> Result:
    """Return what ``function(*arguments)`` returns, run in a process of its own, which has ended afterwards.

    What one cell left behind cannot reach the next. The processes are forked from a server that has imported torch and
    has done nothing with it: no CUDA context, no thread, no allocation. So each begins as a fresh process would,
    without the seconds that the import takes. The function must be one of a module, and arguments and result picklable.

    Raises:
        CellFailed: the function raised, or the process was killed.
        OutOfTime: it took longer than ``limit_s``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "recipes.common.command"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise OutOfTime
        succeeded, value, details = ours.recv()
        process.join(_GRACE_S)
    except EOFError:
        process.join()
        raise CellFailed(_describe_exit(process.exitcode)) from None
    finally:
        ours.close()
        _end(process)
    if not succeeded:
        raise CellFailed(value, details)
    result: Result = value
    return result


def _serve(pipe: Connection, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    # Ctrl-C goes to every process of the terminal's group. The parent ends this one, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pipe.send((True, function(*arguments), None))
    except Exception as error:
        message = next(iter(str(error).strip().splitlines()), "")
        line = f"{type(error).__name__}: {message}" if message else type(error).__name__
        pipe.send((False, line, traceback.format_exc()))


def _describe_exit(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return "killed: perhaps the memory of the host was full"
    if exit_code is not None and exit_code < 0:
        return f"ended by signal {-exit_code}"
    return f"its process exited with status {exit_code}"


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Ask the process to end, then force it. A process with children of its own ends them when it is asked."""
    for ask in (process.terminate, process.kill):
        if not process.is_alive():
            break
        ask()
        process.join(_GRACE_S)
    process.close()


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within this block SIGTERM raises SystemExit, so that files are removed and children ended before we are."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
