"""Rules on the memory of one table, and on units that do not convert."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from statistics import linear_regression, median

from recipes.detectors.tables import BINARY_BYTES, BYTES, DECIMAL_BYTES, SECONDS, BenchmarkTable, Number

_LINE_FITS = 1e-3
_CARRIED = 0.05
_SHRINKS = 0.02


def find_zero_memory(table: BenchmarkTable) -> Iterator[str]:
    """Yield columns of memory that are 0 in every row: memory that was not measured."""
    zero = [name for name in _memory(table) if len(table.rows) > 1 and set(table.values(name)) == {0.0}]
    if zero:
        yield f"{', '.join(zero)}: 0 in every row, which is no measurement; leave the cells empty"


def find_negative_memory(table: BenchmarkTable) -> Iterator[str]:
    """Yield columns of memory that fall below zero."""
    for heading in _memory(table):
        values = [(row, value) for row, value in enumerate(table.values(heading)) if value is not None]
        below = [row for row, value in values if value < 0]
        if below:
            yield (
                f"{heading} is negative in {len(below)} of {len(values)} rows, as at {table.describe(below[0])}: "
                "a difference of two readings, between which more was freed than allocated"
            )


def find_carried_over(table: BenchmarkTable) -> Iterator[str]:
    """Yield memory of an earlier cell that is still allocated in later ones.

    Either the first cell lies below the line through all later cells, which fit a line; or memory falls where a size
    grows.
    """
    axes = [*table.columns("length"), *table.columns("width")]
    for heading in _memory(table):
        if all(value is None or value >= 0 for value in table.values(heading)):
            found = (_first_lies_low(table, heading, axis) or _shrinks(table, heading, axis) for axis in axes)
            yield from list(filter(None, found))[:1]


def find_swapped_axes(table: BenchmarkTable) -> Iterator[str]:
    """Yield memory that grows with the square of the width, and hardly with the sequence length.

    In attention it grows with the square of the length. Sizes show it too: sequences are longer than a head is wide.
    """
    lengths, widths = table.columns("length"), table.columns("width")
    if not lengths or not widths or _greatest(table, lengths[0]) >= _greatest(table, widths[0]):
        return
    for heading in _memory(table):
        by_width, by_length = (last_exponent(table, heading, axis) for axis in (widths[0], lengths[0]))
        if by_width is not None and by_length is not None and by_width > 1.5 and by_length < 0.5:
            yield (
                f"{heading} grows with {widths[0]} to the power of {by_width:.2f}, with {lengths[0]} to the power of "
                f"{by_length:.2f}; in attention it grows with the square of the length: the two axes are swapped"
            )
            return


def last_exponent(table: BenchmarkTable, heading: str, axis: str) -> float | None:
    """Return the power of ``axis`` that ``heading`` follows between its two greatest values, the median of all lines.

    Between the two greatest, because constants weigh least there.
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
    """Return lines of rows that differ only in ``axis``, by rising ``axis``: (size, number, row)."""
    found: dict[tuple[str, ...], list[tuple[float, Number, int]]] = {}
    for row, (size, number) in enumerate(zip(table.values(axis), table.numbers[heading], strict=True)):
        if size is not None and number is not None:
            key = tuple(table.labels(row, without=[axis]).values())
            found.setdefault(key, []).append((size, number, row))
    return [sorted(line, key=lambda point: point[0]) for line in found.values()]


def _first_lies_low(table: BenchmarkTable, heading: str, axis: str) -> str | None:
    line = next((line for line in _lines(table, heading, axis) if any(row == 0 for *_, row in line)), [])
    others = [(size, number) for size, number, row in line if row != 0]
    if len(others) < 3:
        return None
    size, first = next((size, number.value) for size, number, row in line if row == 0)
    expected = _on_line(others, size)
    if expected is None or expected - first <= _CARRIED * expected:
        return None
    return (
        f"{heading} begins with {first:g} at {table.describe(0)}, then follows a line on which {expected:.4g} "
        f"would be expected there: about {expected - first:.4g} of the first cell is left in all later ones"
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


_EXACT = 2e-3
_EIGHTH = 8


def find_binary_under_decimal_label(table: BenchmarkTable) -> Iterator[str]:
    """Yield columns labelled MB (10⁶) with whole eighths far too often: they are MiB (2²⁰)."""
    for heading in table.columns("memory"):
        unit = table.roles[heading].unit
        if unit in DECIMAL_BYTES and is_binary(table, heading):
            yield f"{heading}: these are {unit.upper()[0]}iB, as their eighths show"


def find_wrong_factor(table: BenchmarkTable) -> Iterator[str]:
    """Yield a column of memory over squared length that was computed with 10⁶ for 2²⁰, or the other way round."""
    columns = (table.columns("memory per square"), table.columns("memory"), table.columns("length")[:1])
    for heading, memory, length in product(*columns):
        said = _compare_factor(table, heading, memory, length)
        if said:
            yield said


def find_pairs_that_do_not_convert(table: BenchmarkTable) -> Iterator[str]:
    """Yield two columns of one quantity in two units that are not the same values."""
    scales = {**BYTES, **SECONDS}
    measured = [(heading, role) for heading, role in table.roles.items() if role.unit in scales]
    for (one, role), (other, second) in combinations(measured, 2):
        alike = (role.base, role.quantity, role.statistic) == (second.base, second.quantity, second.statistic)
        if not alike or role.unit == second.unit:
            continue
        factor = scales[str(role.unit)] / scales[str(second.unit)]
        for row, (left, right) in enumerate(zip(table.numbers[one], table.numbers[other], strict=True)):
            if left is None or right is None:
                continue
            due = left.value * factor
            if abs(due - right.value) > 0.5 * (right.ulp + left.ulp * factor) + _EXACT * abs(due):
                said = f"{one} {left.value:g} is {due:g} in {second.unit}, and {other} says {right.value:g}"
                yield f"{said} ({table.describe(row)})"
                break


def is_binary(table: BenchmarkTable, heading: str) -> bool:
    """Return whether a column's values are binary multiples whatever their label says.

    Sizes of tensors are multiples of powers of two. Of values printed with two decimals 8 in 100 are whole eighths by
    chance, with three 8 in 1000; a column is binary if five times as many are, and four at least.
    """
    numbers = [number for number in table.numbers[heading] if number is not None and number.decimals >= 2]
    expected = sum(_EIGHTH * number.ulp for number in numbers)
    found = sum(
        abs(number.value - round(number.value * _EIGHTH) / _EIGHTH) <= 0.5 * number.ulp * (1 + 1e-9)
        for number in numbers
    )
    return found >= max(4, 5 * expected)


def _compare_factor(table: BenchmarkTable, heading: str, memory: str, length: str) -> str | None:
    unit = table.roles[memory].unit
    if unit not in {*BINARY_BYTES, *DECIMAL_BYTES}:
        return None
    binary = unit in BINARY_BYTES or is_binary(table, memory)
    power = "kmgt".index(unit[0]) + 1
    due, wrong = (1024**power, 1000**power) if binary else (1000**power, 1024**power)
    rows = zip(table.values(heading), table.values(memory), table.values(length), strict=True)
    factors = [
        (ratio * size**2 / amount, amount * due / size**2, row, size)
        for row, (ratio, amount, size) in enumerate(rows)
        if ratio and amount and size
    ]
    if not factors or any(abs(factor / wrong - 1) > _EXACT for factor, *_ in factors):
        return None
    shown = max(range(len(factors)), key=lambda place: factors[place][3])
    factor, right, row, _ = factors[shown]
    what = f"computed with {factor:,.0f} bytes where one of {memory} is {due:,}"
    return f"{heading} was {what}: {table.rows[row][heading]} should be {right:.6g} ({table.describe(row)})"
