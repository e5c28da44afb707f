"""Options that commands share, and the quantities that options accept."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from profkit.errors import CheckError, UsageError
from profkit.report import make_visible
from profkit.run.directory import find_newest_run

if TYPE_CHECKING:
    from fractions import Fraction

    from profkit.analysis.self_check import SelfCheck

Command = TypeVar("Command", bound=Callable[..., Any])

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_PERCENT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<sign>%?)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)

FILE = click.Path(path_type=Path)
POSITIVE = click.IntRange(min=1)

rank_option = click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Only this rank of a distributed run."
)


def plot_option(text: str) -> Callable[[Command], Command]:
    """Add ``--plot``, the name of a picture, which must end in ``.png``."""
    return click.option("--plot", type=FILE, metavar="FILE.png", callback=_require_png, help=text)


def _require_png(_context: click.Context, _parameter: click.Parameter, plot: Path | None) -> Path | None:
    if plot is not None and plot.suffix.lower() != ".png":
        raise UsageError(f"--plot {plot}: the picture is a PNG file; end its name in .png")
    return plot


def range_option(text: str) -> Callable[[Command], Command]:
    return click.option("--range", "name", metavar="RANGE", help=text)


def capture_argument(name: str, shown: str | None = None) -> Callable[[Command], Command]:
    """Add the capture to be read, as the parameter ``name``: if it is left out, the newest complete run here."""
    metavar = f"[{shown or name.upper()}]"
    return click.argument(name, type=FILE, metavar=metavar, required=False, callback=_capture_or_newest_run)


def _capture_or_newest_run(context: click.Context, parameter: click.Parameter, capture: Path | None) -> Path | None:
    if capture is not None:
        return capture
    newest = find_newest_run(Path())
    if context.resilient_parsing:  # a shell completes a word
        return newest
    name = str(parameter.metavar).strip("[]")
    if newest is None:
        raise UsageError(f"{name} was left out, and there is no complete run here or in runs/: `profkit run` makes one")
    click.echo(make_visible(f"profkit: {name} was left out: {newest} is the newest complete run here"), err=True)
    return newest


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return what adds several options to a command, to be shown in their order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


trace_options = together(
    click.option("--totals", is_flag=True, help="Show sums over the recorded steps instead of averages per step."),
    click.option("--thread-only", is_flag=True, help="Place work by its launching thread only, as other tools do."),
    click.option("--strict", is_flag=True, help="Exit 3 if the capture fails its self-check."),
)


def obey_strict(trace: Path, check: SelfCheck, *, strict: bool) -> None:
    """Raise `CheckError` if ``--strict`` was given and the capture failed its self-check."""
    if strict and check.failed:
        raise CheckError(f"{trace}: the capture failed its self-check")


peak_options = together(
    click.option("--device", type=int, metavar="N", help="Show this GPU (default: the one with the highest peak)."),
    click.option(
        "--rank",
        type=click.IntRange(min=0),
        metavar="N",
        help="Show this rank (default: the one with the highest peak).",
    ),
)


def _exact(number: str) -> Fraction:
    from fractions import Fraction  # few commands read numbers

    return Fraction(number.strip())


# Each of the following raises ValueError for a text that is nothing of the kind, and says how to write it.


def parse_bytes(text: str) -> int:
    """Return the bytes that ``10MiB``, ``1.5 GB`` or ``512 B`` mean: MiB is 2²⁰, MB is 10⁶, and a bare M is 2²⁰.

    A number alone is refused: it could be meant as GiB.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512B, 10MiB or 1.5GB")
    unit, number = match["unit"].lower(), _exact(match["number"])
    if not unit:
        units = ("GiB", "MiB", "B") if number.denominator == 1 else ("GiB", "MiB", "KiB")
        *first, last = [f"{match['number']}{one}" for one in units]
        raise ValueError(f"{match['number']} has no unit; write {', '.join(first)} or {last}")
    if unit == "b":
        if number.denominator != 1:
            raise ValueError(f"{text!r} is not a size: a byte cannot be divided")
        return int(number)
    power: int | None = _POWERS.get(unit[0])
    if power is None or unit[1:] not in ("", "b", "ib"):
        raise ValueError(f"{text!r}: {match['unit']} is not a unit of size; use KiB, MiB, GiB, TiB, kB, MB, GB or TB")
    base = 1000 if unit[1:] == "b" else 1024
    return round(number * int(base**power))


def parse_percent(text: str) -> float:
    """Return the fraction that ``10%`` or ``10`` means; below 1 the sign is needed, as 0.1 may mean a tenth."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None or _exact(match["number"]) > 100:
        raise ValueError(f"{text!r} is not a percentage from 0% to 100%, such as 10%")
    if not match["sign"] and 0 < _exact(match["number"]) < 1:
        raise ValueError(f"{text!r} is ambiguous; write {match['number']}% or {100 * float(match['number']):g}%")
    return float(_exact(match["number"]) / 100)


def parse_milliseconds(text: str) -> int:
    number = _exact(text) if _NUMBER.fullmatch(text.strip()) else 0
    if number <= 0:
        raise ValueError(f"{text!r} is not a number of milliseconds above 0, such as 120 or 0.5")
    return round(number * 1_000_000)


def parse_share(text: str) -> tuple[str, float]:
    name, _, percent = text.rpartition("=")
    if not name.strip():
        raise ValueError(f"{text!r} is not NAME=PERCENT, such as softmax=15%")
    return name.strip(), parse_percent(percent)


class Quantity(click.ParamType[Any]):
    """The type of an option whose text ``parse`` turns into a number; what it refuses is a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = Quantity("SIZE", parse_bytes)
PERCENT = Quantity("PERCENT", parse_percent)
MILLISECONDS = Quantity("MS", parse_milliseconds)
SHARE = Quantity("NAME=PERCENT", parse_share)
