"""What a recipe is: one question, the cells of its grid, how a cell is measured, what is written about all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from matplotlib.figure import Figure

from profkit.report.formats import Column

Value = str | int | float | bool | None
Cell = Mapping[str, Value]
"""One configuration: what identifies it, and nothing that was measured."""
Row = dict[str, object]
"""A cell with what was measured. None is what was not measured, never 0."""

Device = Literal["cuda", "cpu", "mps"]
DEVICES: tuple[Device, ...] = ("cuda", "cpu", "mps")
GridName = Literal["reports", "small", "full"]
GRIDS: tuple[GridName, ...] = ("reports", "small", "full")

OK = "ok"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Report:
    """What is said about the rows: Markdown, and pictures by file name."""

    markdown: str
    pictures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True)
class Together:
    """How cells are measured several at once: those that agree in ``keys``, in one process.

    ``measure(cells, device)`` returns a row for each. Of cells that are there already none is measured again.
    """

    keys: Sequence[str]
    measure: Callable[[Sequence[Cell], Device], Sequence[Row]]


@dataclass(frozen=True)
class Recipe:
    """One question and how it is answered.

    ``measure(cell, device)`` runs in a process of the cell's own and returns the columns that it measured; what it
    returns beside them (raw samples) is kept with the cell and left out of the tables. It may set ``status``, else that
    is ``ok``. It is `Together` where one measurement is of several cells. ``predict(cell)`` returns the bytes that the
    cell will need at its peak, or None where that is unknown; a cell that cannot fit is not tried. Both must be
    functions of a module, for another process finds them by name. Floats of the columns in ``exact`` are printed to
    their last digit; those in ``brief``, or all if there are none, are shown on the screen and in the Markdown; the
    CSV has all. ``derive(rows)`` adds columns that take several rows to work out.
    """

    name: str
    question: str
    columns: Sequence[Column]
    cell_keys: Sequence[str]
    measure: Callable[[Cell, Device], Row] | Together
    report: Callable[[Sequence[Row], Mapping[str, object]], Report]
    predict: Callable[[Cell, Device], int | None] | None = None
    exact: frozenset[str] = frozenset()
    brief: frozenset[str] = frozenset()
    derive: Callable[[Sequence[Row]], None] | None = None

    @property
    def shown_columns(self) -> list[Column]:
        """Return the columns for people, in their order."""
        return [column for column in self.columns if not self.brief or column.key in self.brief]


def whole(value: object) -> int:
    """Return a cell's or a row's value as the whole number that it is known to be.

    Raises:
        ValueError: it is none.
    """
    return int(str(value))


def identify(cell: Mapping[str, object], keys: Sequence[str]) -> tuple[object, ...]:
    """Return what tells a cell, or the row of one, from all others."""
    return tuple(cell[key] for key in keys)


def failed(reason: str) -> str:
    """Return the status of a cell that broke."""
    return f"failed({reason})"


def out_of_memory(phase: str) -> str:
    """Return the status of a cell that ran out of memory in ``phase``."""
    return f"OOM({phase})"


def is_settled(row: Mapping[str, object]) -> bool:
    """Return whether a row's cell need not be run again: it was measured, or it is known not to fit."""
    status = str(row["status"])
    return status == OK or status.startswith("OOM(")
