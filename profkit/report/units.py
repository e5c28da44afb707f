"""Numbers for people: exact values stay in JSON and CSV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_NEARLY_ALL = 1 - 1e-9
"""Shares that were summed in floating point and are as good as the whole."""

_MOST_SHOWN = 9.99
"""A ratio above 999 % says that its base is next to nothing, so its digits say nothing."""


NS_IN = {"ns": 1, "µs": 10**3, "ms": 10**6, "s": 10**9}


def format_ns(value: float) -> str:
    """Return a duration with four digits in the unit that fits: ``34.50 ms``."""
    value = round(value)
    if abs(value) < 1000:
        return f"{value} ns"
    for unit in ("µs", "ms"):
        # Rounded to four digits, 999,960 ns is a millisecond and not a thousand microseconds.
        if round(abs(value) / NS_IN[unit], 1) < 1000:
            return f"{four_digits(value / NS_IN[unit])} {unit}"
    return f"{four_digits(value / 10**9)} s"


def format_signed_ns(value: int) -> str:
    """Return a change as `format_ns` does a duration, with its sign: ``+34.50 ms``."""
    return f"{'+' if value > 0 else ''}{format_ns(value)}"


def format_interval(low_ns: int, high_ns: int) -> str:
    """Return both ends of an interval in the unit that fits the one farther from 0: ``-17.66 … -12.94 µs``."""
    farther = max(abs(low_ns), abs(high_ns))
    unit = format_ns(farther).rpartition(" ")[2]
    divisor = NS_IN[unit]
    decimals = 0 if divisor == 1 else next((d for d, limit in ((3, 10), (2, 100)) if farther / divisor < limit), 1)
    return f"{low_ns / divisor:+,.{decimals}f} … {high_ns / divisor:+,.{decimals}f} {unit}"


def format_share(value: float) -> str:
    """Return a fraction as per cent with one decimal; what is not nothing never shows as nothing, nor a part as all.

    What is more than 999 % shows as ``>999%``: the base is next to nothing.
    """
    if 0 < value < 0.0005:
        return "<0.1%"
    if 0.9995 <= value < _NEARLY_ALL:
        return ">99.9%"
    return ">999%" if value > _MOST_SHOWN else f"{value:.1%}"


def format_change(value: float, decimals: int = 0) -> str:
    """Return a change as per cent of what was there, with its sign: ``+12%``, or ``>+999%`` from next to nothing."""
    return ">+999%" if value > _MOST_SHOWN else f"{value:+.{decimals}%}"


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 kernel``, ``2,422 kernels``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def four_digits(value: float) -> str:
    """Return a number rounded to four digits, or to a whole number if it has more."""
    decimals = next(
        (digits for digits, limit in ((3, 10), (2, 100), (1, 1000)) if round(abs(value), digits) < limit), 0
    )
    return f"{value:,.{decimals}f}"


def format_flops(value: float) -> str:
    """Return operations in the unit that fits: ``15.78 TFLOP``."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{four_digits(value / 10**power)} {prefix}FLOP"
    return f"{value:,.0f} FLOP"


def format_bytes(value: int) -> str:
    """Return bytes in the unit that fits: ``2.863 GiB``; GiB is 2³⁰."""
    size = abs(value)
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1000 * 2 ** (power - 10):
            return f"{four_digits(value / 2**power)} {unit}"
    return f"{value} B"


def format_exactly(value: int) -> str:
    """Return bytes for people with all their digits behind: ``1.500 KiB (1,536 B)``."""
    return f"{format_bytes(value)} ({value:,} B)" if value >= 1024 else f"{value} B"


def format_after(time_us: int | None, start_us: int) -> str:
    """Return a moment as the time since the first event: ``3.822 s``; a dash where there are no times."""
    if time_us is None:
        return "—"
    passed = time_us - start_us
    return f"{passed / 1e6:.3f} s" if passed >= 1_000_000 else f"{passed / 1e3:.3f} ms"


@dataclass(frozen=True)
class Unit:
    """How people read the values of a column; numbers stand at its right side."""

    show: Callable[[Any], str]
    right: bool = True


TEXT = Unit(str, right=False)
PLAIN = Unit(str)
"""Numbers that are names, such as a rank, and texts of numbers."""
COUNT = Unit(lambda value: f"{value:,}" if isinstance(value, int) else str(value))
NUMBER = Unit(four_digits)
NS = Unit(format_ns)
SIGNED_NS = Unit(format_signed_ns)
SHARE = Unit(format_share)
BYTES = Unit(format_bytes)
SIGNED_BYTES = Unit(lambda value: f"{'+' if value > 0 else ''}{format_bytes(value)}")


def format_gigabytes(value: float) -> str:
    """Return 10⁹ bytes with one decimal, and with two digits if that is less than one: ``326.9``, ``0.034``."""
    size = value / 1e9
    decimals = next((digits for digits in range(1, 6) if size >= 0.95 * 10.0 ** (1 - digits)), 6)
    return f"{size:,.{decimals}f}"


GIGABYTES = Unit(format_gigabytes)
"""Bytes a second, in 10⁹: the column's heading says so, as in nccl-tests."""


def ns_over(steps: int | None) -> Unit:
    """Return the unit of durations that are sums over ``steps`` steps and are read per step; plain ones for None."""
    return NS if steps is None else Unit(lambda value: format_ns(value / steps))


def count_over(steps: int | None) -> Unit:
    """Return the unit of counts over ``steps`` steps that are read per step: ``12``, ``2.5``; plain ones for None."""
    if steps is None:
        return COUNT
    return Unit(lambda value: f"{value // steps:,}" if value % steps == 0 else f"{value / steps:,.1f}")
