"""Numbers for people: exact values stay in JSON and CSV."""

from __future__ import annotations


def format_ns(value: int) -> str:
    """Return a duration with four digits in the unit that fits: ``34.50 ms``."""
    for limit, divisor, unit in ((10**6, 10**3, "µs"), (10**9, 10**6, "ms")):
        if abs(value) < 1000:
            return f"{value} ns"
        if abs(value) < limit:
            return _four_digits(value / divisor, unit)
    return _four_digits(value / 10**9, "s")


def format_share(value: float) -> str:
    """Return a fraction as per cent with one decimal; what is not nothing never shows as nothing."""
    if 0 < value < 0.0005:
        return "<0.1%"
    return f"{value:.1%}"


def _four_digits(value: float, unit: str) -> str:
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{decimals}f} {unit}"
