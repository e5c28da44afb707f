"""What a recipe is: one question, the cells of its grid, how a cell is measured, what the report shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal

from matplotlib.figure import Figure

Value = str | int | float | bool | None
Cell = Mapping[str, Value]
"""One configuration: what identifies it, and nothing that was measured."""
Row = dict[str, object]
"""A cell with what was measured. None stands for a value that was not measured, never 0."""

Device = Literal["cuda", "cpu", "mps"]
DEVICES: tuple[Device, ...] = ("cuda", "cpu", "mps")
GridName = Literal["reports", "small", "full"]
GRIDS: tuple[GridName, ...] = ("reports", "small", "full")

OK = "ok"
NOT_RUN = "not run"
LAUNCH_BOUND = 0.85
"""Below this share of kernel time in its unprofiled time a step waits for its launches: the host's speed decides."""


@dataclass(frozen=True)
class Report:
    """What the report shows of the rows: blocks of Markdown, and pictures by file name."""

    blocks: Sequence[str]
    pictures: Mapping[str, Figure] = field(default_factory=dict)

    @property
    def markdown(self) -> str:
        return "\n\n".join(self.blocks)


@dataclass(frozen=True)
class Together:
    """How cells are measured several at once: those that agree in ``keys``, in one process.

    ``measure(cells, device)`` returns a row for each cell. It gets no cell that has been measured before.
    """

    keys: Sequence[str]
    measure: Callable[[Sequence[Cell], Device], Sequence[Row]]


@dataclass(frozen=True)
class Recipe:
    """One question and how it is answered.

    ``measure(cell, device)`` runs in a process of the cell's own and returns what it measured; what is in no column
    (raw samples) is kept with the cell and left out of the tables. It may set ``status``, which is ``ok`` otherwise. It
    is `Together` where one measurement covers several cells. ``predict(cell, device)`` returns the bytes that the cell
    needs at its peak, or None if unknown; a cell that cannot fit is not tried. Both must be functions of a module,
    because another process finds them by name. ``columns`` are the keys of the CSV; those in ``brief`` (all if it is
    empty) stand on the screen and in the Markdown. Floats in ``exact`` columns keep their last digit. ``derive(rows)``
    adds columns that depend on several rows.
    """

    name: str
    question: str
    columns: Sequence[str]
    cell_keys: Sequence[str]
    measure: Callable[[Cell, Device], Row] | Together
    report: Callable[[Sequence[Row], Mapping[str, object]], Report]
    predict: Callable[[Cell, Device], int | None] | None = None
    exact: frozenset[str] = frozenset()
    brief: frozenset[str] = frozenset()
    derive: Callable[[Sequence[Row]], None] | None = None

    @property
    def shown_columns(self) -> list[str]:
        """The columns for people, in their order."""
        return [column for column in self.columns if not self.brief or column in self.brief]


def late(path: str) -> Callable[..., Any]:
    """Return the function ``package.module:name``, imported when it is called: only a cell's process loads torch."""
    return partial(_call, path)


def _call(path: str, *arguments: object, **named: object) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)(*arguments, **named)


def whole(value: object) -> int:
    """Return the value of a cell or row as the whole number that it is known to be.

    Raises:
        ValueError: it is not a whole number.
    """
    return int(str(value))


def identify(cell: Mapping[str, object], keys: Sequence[str]) -> tuple[object, ...]:
    """Return what distinguishes a cell, or the row of one, from all others."""
    return tuple(cell[key] for key in keys)


def failed(reason: str) -> str:
    """Return the status of a cell that broke."""
    return f"failed({reason})"


def out_of_memory(phase: str) -> str:
    """Return the status of a cell that ran out of memory in ``phase``."""
    return f"OOM({phase})"


def is_settled(row: Mapping[str, object]) -> bool:
    """Return whether a row's cell need not run again: it was measured, or it is known not to fit."""
    status = str(row["status"])
    return status == OK or status.startswith("OOM(")
