"""Quantities on the command line: sizes, percentages, times and shares, each in one form, nonsense refused."""

from __future__ import annotations

import re
from fractions import Fraction

import click

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_PERCENT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<sign>%?)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


def parse_bytes(text: str) -> int:
    """Return the bytes that ``10MiB``, ``1.5 GB`` or ``4096`` mean: MiB is 2²⁰, MB is 10⁶, and a bare M is 2²⁰.

    Raises:
        ValueError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512, 10MiB or 1.5GB")
    unit, number = match["unit"].lower(), Fraction(match["number"])
    if unit in ("", "b"):
        if number.denominator != 1:
            raise ValueError(f"{text!r} is not a size: a byte cannot be divided")
        return int(number)
    power: int | None = _POWERS.get(unit[0])
    if power is None or unit[1:] not in ("", "b", "ib"):
        raise ValueError(f"{text!r}: {match['unit']} is not a unit of size; use KiB, MiB, GiB, TiB, kB, MB, GB or TB")
    base = 1000 if unit[1:] == "b" else 1024
    return round(number * int(base**power))


def parse_percent(text: str) -> float:
    """Return the fraction that ``10%`` or ``10`` means; below 1 the sign is needed, as 0.1 may mean a tenth.

    Raises:
        ValueError: it is not a percentage from 0 to 100.
    """
    match = _PERCENT.fullmatch(text.strip())
    if match is None or Fraction(match["number"]) > 100:
        raise ValueError(f"{text!r} is not a percentage from 0% to 100%, such as 10%")
    if not match["sign"] and 0 < Fraction(match["number"]) < 1:
        raise ValueError(f"{text!r} is ambiguous; write {match['number']}% or {100 * float(match['number']):g}%")
    return float(Fraction(match["number"]) / 100)


def parse_milliseconds(text: str) -> int:
    """Return the nanoseconds of a number of milliseconds.

    Raises:
        ValueError: it is no positive number.
    """
    number = Fraction(text.strip()) if _NUMBER.fullmatch(text.strip()) else Fraction(0)
    if number <= 0:
        raise ValueError(f"{text!r} is not a number of milliseconds above 0, such as 120 or 0.5")
    return round(number * 1_000_000)


def parse_share(text: str) -> tuple[str, float]:
    """Return the name and the fraction of ``softmax=15%``.

    Raises:
        ValueError: it is not of that form.
    """
    name, _, percent = text.rpartition("=")
    if not name.strip():
        raise ValueError(f"{text!r} is not NAME=PERCENT, such as softmax=15%")
    return name.strip(), parse_percent(percent)


class Size(click.ParamType[int]):
    """Bytes, by `parse_bytes`."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Percent(click.ParamType[float]):
    """A fraction, by `parse_percent`."""

    name = "PERCENT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else parse_percent(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Milliseconds(click.ParamType[int]):
    """Nanoseconds, by `parse_milliseconds`."""

    name = "MS"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_milliseconds(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Share(click.ParamType[tuple[str, float]]):
    """A name and a fraction, by `parse_share`."""

    name = "NAME=PERCENT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        try:
            return value if isinstance(value, tuple) else parse_share(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
