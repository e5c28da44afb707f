"""Numbers for people: exact values stay in JSON and CSV."""

from __future__ import annotations

_NEARLY_ALL = 1 - 1e-9
"""Shares that were summed in floating point and are as good as the whole."""


def format_ns(value: int) -> str:
    """Return a duration with four digits in the unit that fits: ``34.50 ms``."""
    if abs(value) < 1000:
        return f"{value} ns"
    for divisor, unit in ((10**3, "µs"), (10**6, "ms")):
        # Rounded to four digits, 999,960 ns is a millisecond and not a thousand microseconds.
        if round(abs(value) / divisor, 1) < 1000:
            return f"{four_digits(value / divisor)} {unit}"
    return f"{four_digits(value / 10**9)} s"


def format_signed_ns(value: int) -> str:
    """Return a change as `format_ns` does a duration, with its sign: ``+34.50 ms``."""
    return f"{'+' if value > 0 else ''}{format_ns(value)}"


def format_interval(low_ns: int, high_ns: int) -> str:
    """Return both ends of an interval in the unit that fits the one farther from 0: ``-17.66 … -12.94 µs``."""
    farther = max(abs(low_ns), abs(high_ns))
    unit = format_ns(farther).rpartition(" ")[2]
    divisor = {"ns": 1, "µs": 10**3, "ms": 10**6, "s": 10**9}[unit]
    decimals = 0 if divisor == 1 else next((d for d, limit in ((3, 10), (2, 100)) if farther / divisor < limit), 1)
    return f"{low_ns / divisor:+,.{decimals}f} … {high_ns / divisor:+,.{decimals}f} {unit}"


def format_share(value: float) -> str:
    """Return a fraction as per cent with one decimal; what is not nothing never shows as nothing, nor a part as all."""
    if 0 < value < 0.0005:
        return "<0.1%"
    if 0.9995 <= value < _NEARLY_ALL:
        return ">99.9%"
    return f"{value:.1%}"


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 kernel``, ``2,422 kernels``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def four_digits(value: float) -> str:
    """Return a number rounded to four digits, or to a whole number if it has more."""
    decimals = next(
        (digits for digits, limit in ((3, 10), (2, 100), (1, 1000)) if round(abs(value), digits) < limit), 0
    )
    return f"{value:,.{decimals}f}"
