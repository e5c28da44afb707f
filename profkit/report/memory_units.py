"""Bytes for people: binary units, four digits; exact values stay in JSON and CSV."""

from __future__ import annotations

from profkit.report.units import four_digits


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


def format_after(time_us: int | None, start_us: int | None) -> str:
    """Return a moment as the time since the first event: ``3.822 s``; a dash where there are no times."""
    if time_us is None or start_us is None:
        return "—"
    passed = time_us - start_us
    return f"{passed / 1e6:.3f} s" if passed >= 1_000_000 else f"{passed / 1e3:.3f} ms"
