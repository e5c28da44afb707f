"""Rows of a table that differ in one size alone: the sequence length, the width, the batch, or the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recipes.detectors.tables import BenchmarkTable

_NAMES_OF_MODELS = {"size", "model", "preset", "layers", "heads", "ff", "hidden", "depth"}
"""Words of headings of what a model is called and of what goes with its size."""


@dataclass(frozen=True)
class Line:
    """Rows that agree in all labels but ``heading``, and in what goes with it: sizes and rows, by rising size."""

    heading: str
    points: tuple[tuple[float, int], ...]
    named_by: str
    """The column that calls the sizes: a model's name where ``heading`` counts its parameters."""


def lines_by_size(table: BenchmarkTable) -> Iterator[Line]:
    """Yield the rows that differ in one size alone, a line each, where there are two sizes and more.

    Models differ in their name, width and number of layers at once: they are in the order of their parameters, or of
    their width where these are not told.
    """
    roles = table.roles
    models = [name for name, role in roles.items() if role.quantity == "width" or _names_model(table, name)]
    by_model = table.columns("parameters") or table.columns("width")
    batches = [name for name, role in roles.items() if role.quantity == "label" and "batch" in role.base]
    for heading in (*by_model, *table.columns("length"), *batches):
        aside = [*models, heading] if heading in by_model else [heading]
        named_by = next((name for name in models if heading in by_model and _names_model(table, name)), heading)
        found: dict[tuple[str, ...], list[tuple[float, int]]] = {}
        for row, size in enumerate(table.values(heading)):
            if size is not None and size > 0:
                found.setdefault(tuple(table.labels(row, without=aside).values()), []).append((size, row))
        for points in found.values():
            if len({size for size, _ in points}) > 1:
                yield Line(heading, tuple(sorted(points)), named_by)


def _names_model(table: BenchmarkTable, heading: str) -> bool:
    role = table.roles[heading]
    return role.quantity == "label" and bool(_NAMES_OF_MODELS & set(role.base))
