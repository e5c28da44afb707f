"""How a pair of cells, and what it launched, is called in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profkit.report.units import format_count, format_ns
from recipes.compilation.cells import ATTENTION
from recipes.compilation.pairs import Pair, Totals, is_of_gpu


def name_pair(pair: Pair) -> str:
    """Return what a pair is of."""
    return name_case(pair.eager)


def name_case(row: Mapping[str, Any]) -> str:
    """Return what a row is of, eager or compiled."""
    if row["what"] == ATTENTION:
        size = f"d_model {row['d_model']}, sequence {row['length']}"
    else:
        size = f"{row['size']}, context {row['length']}"
    return f"{row['what']} {size}, batch {row['batch']}, {row['passes']}, {row['dtype']}"


def name_row(row: Mapping[str, Any]) -> str:
    """Return which row it is."""
    return f"{name_case(row)}, {row['mode']}"


def noun_of(pair: Pair) -> str:
    """Return what is counted: with both sides measured on one device it is the same."""
    return "kernel" if is_of_gpu(pair.eager) else "operator"


def show_totals(totals: Totals, noun: str | None = None) -> str:
    """Return a count, if told of what, and its time."""
    if not totals[0]:
        return "none"
    count = f"{totals[0]:,}" if noun is None else format_count(totals[0], noun)
    return f"{count}, {format_ns(totals[1])}"
