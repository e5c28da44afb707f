"""Pure functions on the columns of a trace or a snapshot; nothing here draws, formats or needs torch.

A result looks in a notebook as a notebook needs it: one short line as text, its table as HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pandas as pd
    from _typeshed import DataclassInstance

_LONGEST_TEXT = 50
_MOST_ROWS = 40


class NotebookResult:
    """A result: a dataclass with a table. ``repr`` is one line, however many rows the table has.

    The table's rows, dataclasses of ``row_type``, stand in the field ``rows``; any other table `to_pandas` makes.
    """

    _table: ClassVar[tuple[str, type[DataclassInstance]]]

    def __init_subclass__(cls, *, rows: str | None = None, row_type: type[DataclassInstance] | None = None) -> None:
        if rows is not None and row_type is not None:
            cls._table = rows, row_type

    def to_pandas(self) -> pd.DataFrame:
        """Return the result's table."""
        rows, row_type = self._table
        return table_of(getattr(self, rows), row_type)

    def __repr__(self) -> str:
        """Return the plain values, and of each list how long it is; unknown values are left out."""
        return f"{type(self).__name__}({', '.join(self._values())})"

    def _repr_html_(self) -> str:
        """Return the table, shortened in its middle, for Jupyter."""
        return self.to_pandas().to_html(max_rows=_MOST_ROWS, escape=True)

    def _values(self) -> Iterator[str]:
        for field in fields(self):  # type: ignore[arg-type]
            value: Any = getattr(self, field.name)
            if isinstance(value, str) and value:
                text = value if len(value) <= _LONGEST_TEXT else f"…{value[1 - _LONGEST_TEXT :]}"
                yield f"{field.name}={text!r}"
            elif isinstance(value, bool | int | float):
                yield f"{field.name}={value!r}"
            elif isinstance(value, tuple | list | dict) and value:
                yield f"{field.name}=<{len(value)}>"


def table_of(rows: Sequence[DataclassInstance], row_type: type[DataclassInstance]) -> pd.DataFrame:
    """Return rows as a DataFrame with the columns of their dataclass, also if there are none."""
    import pandas as pd

    return pd.DataFrame([asdict(row) for row in rows], columns=[field.name for field in fields(row_type)])
