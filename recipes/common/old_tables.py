"""Rows as tables: what is not there is a dash for people and empty in CSV, never 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from profkit.report.formats import Column, Table

DASH = "—"


def build_table(columns: Sequence[Column], rows: Sequence[Mapping[str, object]], exact: Collection[str] = ()) -> Table:
    """Return the table of some rows; a key that a row lacks is as good as None.

    Floats of the columns in ``exact`` keep their last digit.
    """
    values = [[row.get(column.key) for column in columns] for row in rows]
    cells = [
        [format_value(value, exact=column.key in exact) for value, column in zip(line, columns, strict=True)]
        for line in values
    ]
    return Table(tuple(columns), cells, values)


def build_pivot(
    rows: Sequence[Mapping[str, object]], down: str, across: Sequence[str], value: str, *, digits: int | None = None
) -> Table:
    """Return ``value`` by the key ``down`` in lines and the keys ``across``, taken together, in columns.

    A cell without a value shows its status where that is not ``ok``. With ``digits``, so many significant ones of each.
    """
    heads = list(dict.fromkeys(tuple(row[key] for key in across) for row in rows))
    lines = sorted({row[down] for row in rows}, key=lambda entry: (isinstance(entry, str), entry))
    found = {(row[down], tuple(row[key] for key in across)): row for row in rows}
    columns = [Column(down, down)] + [Column(text, text) for text in (" ".join(map(str, head)) for head in heads)]
    cells, values = [], []
    for line in lines:
        here = [found.get((line, head), {}) for head in heads]
        values.append([line, *(row.get(value) for row in here)])
        cells.append([str(line), *(_show(row, value, digits) for row in here)])
    return Table(tuple(columns), cells, values)


def format_value(value: object, *, exact: bool = False) -> str:
    """Return a value for people: six digits of a float, as the write-ups print them, or all that it has."""
    if value is None:
        return DASH
    return f"{value:.6g}" if isinstance(value, float) and not exact else str(value)


def format_digits(value: float, digits: int) -> str:
    """Return a number with so many significant digits, or to a whole number if it has more: 8.900, 14.66, 1410."""
    text = f"{value:#.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text.rstrip(".")


def _show(row: Mapping[str, object], key: str, digits: int | None) -> str:
    value = row.get(key)
    if value is None and row.get("status") not in (None, "ok"):
        return str(row["status"])
    return format_digits(value, digits) if isinstance(value, float) and digits is not None else format_value(value)
