"""Detectors of mistakes in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import linear_regression

from profkit.analysis.sample_statistics import median
from recipes.detectors.finding import Finding
from recipes.detectors.tables import BenchmarkTable, Number

_LINE_FITS = 1e-3
_CARRIED = 0.05
_SHRINKS = 0.02


def find_zero_memory(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield columns of memory that are 0 in every row: not measured, and printed as if it were."""
    zero = [name for name in _memory(table) if len(table.rows) > 1 and set(table.values(name)) == {0.0}]
    if zero:
        said = f"{', '.join(zero)}: 0 in every row, which is no measurement; leave it empty"
        yield Finding("zero-memory", table.name, said)


def find_negative_memory(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield columns of memory that fall below zero."""
    for heading in _memory(table):
        values = [(row, value) for row, value in enumerate(table.values(heading)) if value is not None]
        below = [row for row, value in values if value < 0]
        if below:
            yield Finding(
                "negative-memory",
                table.name,
                f"{heading} is negative in {len(below)} of {len(values)} rows, as at {table.describe(below[0])}: "
                "a difference of two readings between which more was freed than taken",
            )


def find_carried_over(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield memory of an earlier cell that is still there in later ones.

    Either the first cell alone has less than the line through the cells after it says, which are on one line; or memory
    falls where a size grows.
    """
    axes = [*table.columns("length"), *table.columns("width")]
    for heading in _memory(table):
        if any(value is not None and value < 0 for value in table.values(heading)):
            continue
        for axis in axes:
            said = _first_lies_low(table, heading, axis) or _shrinks(table, heading, axis)
            if said:
                yield Finding("carried-over", table.name, said)
                break


def find_swapped_axes(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield memory that follows the square of the width, and hardly the sequence length.

    In attention it is the length that squares. Sizes tell too: sequences are longer than a head is wide.
    """
    lengths, widths = table.columns("length"), table.columns("width")
    if not lengths or not widths or _greatest(table, lengths[0]) >= _greatest(table, widths[0]):
        return
    for heading in _memory(table):
        by_width, by_length = (last_exponent(table, heading, axis) for axis in (widths[0], lengths[0]))
        if by_width is not None and by_length is not None and by_width > 1.5 and by_length < 0.5:
            yield Finding(
                "swapped-axes",
                table.name,
                f"{heading} grows with {widths[0]} to the power of {by_width:.2f}, with {lengths[0]} to the power of "
                f"{by_length:.2f}; in attention it is the sequence length that squares: the two axes are swapped",
            )
            return


def last_exponent(table: BenchmarkTable, heading: str, axis: str) -> float | None:
    """Return the power of ``axis`` that ``heading`` follows between its two greatest values, the median over the rest.

    The two greatest, because what is constant weighs least there.
    """
    slopes = []
    for line in _lines(table, heading, axis):
        points = [(x, number.value) for x, number, _ in line if x > 0 and number.value > 0]
        if len(points) > 1 and points[-1][0] > points[-2][0]:
            (x0, y0), (x1, y1) = points[-2:]
            slopes.append(math.log(y1 / y0) / math.log(x1 / x0))
    return median(slopes) if slopes else None


def _memory(table: BenchmarkTable) -> list[str]:
    return [name for name in table.columns("memory") if "free" not in table.roles[name].base]


def _greatest(table: BenchmarkTable, heading: str) -> float:
    return max((value for value in table.values(heading) if value is not None), default=0.0)


def _lines(table: BenchmarkTable, heading: str, axis: str) -> list[list[tuple[float, Number, int]]]:
    """Return the rows that differ in ``axis`` alone, line by line, by rising ``axis``: (size, number, row)."""
    found: dict[tuple[str, ...], list[tuple[float, Number, int]]] = {}
    for row, (size, number) in enumerate(zip(table.values(axis), table.numbers[heading], strict=True)):
        if size is not None and number is not None:
            key = tuple(table.labels(row, without=[axis]).values())
            found.setdefault(key, []).append((size, number, row))
    return [sorted(line, key=lambda point: point[0]) for line in found.values()]


def _first_lies_low(table: BenchmarkTable, heading: str, axis: str) -> str | None:
    line = next((line for line in _lines(table, heading, axis) if any(row == 0 for *_, row in line)), [])
    others = [(size, number) for size, number, row in line if row != 0]
    first = next(((size, number) for size, number, row in line if row == 0), None)
    if first is None or len(others) < 3:
        return None
    expected = _on_line(others, first[0])
    if expected is None or expected - first[1].value <= _CARRIED * expected:
        return None
    return (
        f"{heading} begins with {first[1].value:g} at {table.describe(0)}, then follows a line on which {expected:.4g} "
        f"would be due there: about {expected - first[1].value:.4g} of the first cell is left in all the next ones"
    )


def _on_line(points: Sequence[tuple[float, Number]], at: float) -> float | None:
    """Return the value at ``at`` of the line through ``points``, or None if they are not on one within rounding."""
    sizes, values = [size for size, _ in points], [number.value for _, number in points]
    if len(set(sizes)) < 3:
        return None
    slope, offset = linear_regression(sizes, values)
    off = max(abs(slope * size + offset - value) for size, value in zip(sizes, values, strict=True))
    rounding = max(number.ulp for _, number in points)
    return slope * at + offset if off <= max(rounding, _LINE_FITS * max(values)) else None


def _shrinks(table: BenchmarkTable, heading: str, axis: str) -> str | None:
    for line in _lines(table, heading, axis):
        for (size, number, row), (next_size, next_number, _) in pairwise(line):
            if next_size > size and number.value - next_number.value > max(_SHRINKS * number.value, number.ulp):
                return (
                    f"{heading} falls from {number.value:g} at {table.describe(row)} to {next_number.value:g} at "
                    f"{axis} {next_size:g}: something of an earlier cell was still there"
                )
    return None
