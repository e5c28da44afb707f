"""Detectors that compare tables with each other: the same cell measured twice, shares of two ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from profkit.analysis.sample_statistics import median
from recipes.detectors.finding import Finding
from recipes.detectors.tables import BenchmarkTable
from recipes.detectors.times import LAUNCH_BOUND_S, ratios_by_row

_ABOUT_ONE = (0.7, 1.3)


def find_forward_in_backward(tables: Sequence[BenchmarkTable]) -> Iterator[Finding]:
    """Yield tables whose backward holds the forward pass: backward over forward is by 1 higher than elsewhere.

    Compared are cells of the same length and width with a forward pass of 1 ms and more; eager where a table says so.
    """
    by_cell = [_ratios_by_cell(table) for table in tables]
    for (table, mine), (other, theirs) in permutations(zip(tables, by_cell, strict=True), 2):
        shared = [cell for cell in mine if cell in theirs]
        if len(shared) < 3:
            continue
        more = median([mine[cell] - theirs[cell] for cell in shared])
        if _ABOUT_ONE[0] <= more <= _ABOUT_ONE[1]:
            last = shared[-1]
            yield Finding(
                "forward-in-backward",
                table.name,
                f"backward over forward is {mine[last]:.2f} at width {last[0]:g} and length {last[1]:g}, where "
                f"{other.name} has {theirs[last]:.2f} ({more:.2f} more, median of {len(shared)} cells): forward was "
                "timed inside backward",
            )
            return


def find_borrowed_shares(tables: Sequence[BenchmarkTable]) -> Iterator[Finding]:
    """Yield shares of forward that are those of forward and backward together, to the last digit, kernel by kernel."""
    shares = [(table, _phases(table), _shares(table)) for table in tables]
    for (table, phases, mine), (other, other_phases, theirs) in permutations(shares, 2):
        if phases != {"forward"} or other_phases != {"forward", "backward"}:
            continue
        same = [name for name, share in mine.items() if theirs.get(name) == share]
        if len(same) >= 2 and len(same) > len(mine) / 2:
            yield Finding(
                "borrowed-shares",
                table.name,
                f"{len(same)} of {len(mine)} shares of forward are those of {other.name}, forward and backward, to the "
                f"last digit (such as {same[0]}: {mine[same[0]]:g} %): they were read off the wrong range",
            )


def _ratios_by_cell(table: BenchmarkTable) -> dict[tuple[float, float], float]:
    lengths, widths = table.columns("length"), table.columns("width")
    if not lengths or not widths:
        return {}
    found = {}
    for row, (ratio, forward_s) in ratios_by_row(table).items():
        width, length = table.values(widths[0])[row], table.values(lengths[0])[row]
        if forward_s >= LAUNCH_BOUND_S and width and length and _is_eager(table.rows[row]):
            found[width, length] = ratio
    return found


def _is_eager(row: Mapping[str, str]) -> bool:
    compiled = next((value for key, value in row.items() if key.lower() in ("compile", "compiled", "mode")), "False")
    return compiled.strip().lower() in ("false", "no", "none", "eager", "0")


def _phases(table: BenchmarkTable) -> set[str]:
    words = set(re.findall(r"[a-z]+", table.caption.lower()))
    return words & {"forward", "backward"}


def _shares(table: BenchmarkTable) -> dict[str, float]:
    columns = table.columns("share")
    names = [heading for heading, role in table.roles.items() if role.quantity == "label"]
    if not columns or not names:
        return {}
    pairs = zip(table.rows, table.values(columns[0]), strict=True)
    return {row[names[0]]: share for row, share in pairs if share is not None}
