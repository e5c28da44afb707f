"""Detectors of units that do not convert."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from recipes.detectors.columns import BINARY_BYTES, BYTES, DECIMAL_BYTES, SECONDS
from recipes.detectors.finding import Finding
from recipes.detectors.tables import BenchmarkTable

_EXACT = 2e-3
_EIGHTH = 8


def find_binary_under_decimal_label(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield columns labelled MB (10⁶) whose values are whole eighths far too often: they are MiB (2²⁰)."""
    for heading in table.columns("memory"):
        unit = table.roles[heading].unit
        if unit in DECIMAL_BYTES and is_binary(table, heading):
            right = unit.upper()[0] + "iB"
            yield Finding("unit-label", table.name, f"{heading}: these are {right}, for they fall on eighths of one")


def find_wrong_factor(table: BenchmarkTable) -> Iterator[Finding]:
    """Yield a column of memory over squared length that was computed with 10⁶ for 2²⁰, or the other way round."""
    lengths = table.columns("length")
    for heading in table.columns("memory per square"):
        for memory in table.columns("memory"):
            said = lengths and _compare_factor(table, heading, memory, lengths[0])
            if said:
                yield Finding("unit-factor", table.name, said)


def find_pairs_that_do_not_convert(table: BenchmarkTable) -> Iterator[Finding]:
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
                yield Finding("unit-conversion", table.name, f"{said} ({table.describe(row)})")
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
