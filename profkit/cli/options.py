"""Options that commands share, the quantities that options accept, and the ranges that a shell offers."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from profkit.errors import CheckError, ProfkitError, UsageError
from profkit.names import kind_of
from profkit.report.document import FORMATS
from profkit.report.text import make_visible
from profkit.run.directory import find_newest_run

if TYPE_CHECKING:
    from profkit.analysis.checks.self_check import SelfCheck

Command = TypeVar("Command", bound=Callable[..., Any])

_CSV_SAFE = "profkit.csv_safe"
_SPECIAL_IN_BASH = re.compile(r"([^\w./:@%+=-])")
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_PERCENT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<sign>%?)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)

format_option = click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True)
rank_option = click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Only this rank of a distributed run."
)


def capture_argument(name: str, shown: str | None = None) -> Callable[[Command], Command]:
    """Add the capture to be read, as the parameter ``name``: if it is left out, the newest complete run here.

    The line on standard error says which that is. Commands that judge or copy a run do without: theirs is named.
    """
    metavar = f"[{shown or name.upper()}]"
    kind = click.Path(path_type=Path)
    return click.argument(name, type=kind, metavar=metavar, required=False, callback=_capture_or_newest_run)


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


def trace_options(command: Command) -> Command:
    """Add ``--totals``, ``--thread-only`` and ``--strict`` (which `obey_strict` carries out)."""
    for option in (
        click.option("--strict", is_flag=True, help="Exit 3 if the capture fails its self-check."),
        click.option("--thread-only", is_flag=True, help="Place work by its launching thread only, as other tools do."),
        click.option("--totals", is_flag=True, help="Show sums over the recorded steps instead of averages per step."),
    ):
        command = option(command)
    return command


def obey_strict(trace: Path, check: SelfCheck, *, strict: bool) -> None:
    """Raise `CheckError` if ``--strict`` was given and the capture failed its self-check."""
    if strict and check.failed:
        raise CheckError(f"{trace}: the capture failed its self-check")


def peak_options(command: Command) -> Command:
    """Add the choice of one GPU and rank among those that recorded memory."""
    for option in (
        click.option(
            "--rank",
            type=click.IntRange(min=0),
            metavar="N",
            help="Show this rank (default: the one with the highest peak).",
        ),
        click.option("--device", type=int, metavar="N", help="Show this GPU (default: the one with the highest peak)."),
    ):
        command = option(command)
    return command


def output_options(command: Command) -> Command:
    """Add ``--format``, ``-o``, ``--full-names`` and ``--csv-safe`` (which `wants_safe_csv` tells)."""
    for option in (
        click.option(
            "--csv-safe",
            is_flag=True,
            expose_value=False,
            callback=_note_safe_csv,
            help="In CSV, put ' before text that a spreadsheet would take for a formula.",
        ),
        click.option("--full-names", is_flag=True, help="Do not shorten names, or paths in JSON."),
        click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result to this file."),
        format_option,
    ):
        command = option(command)
    return command


def wants_safe_csv() -> bool:
    """Return whether the command that runs was given ``--csv-safe``."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_CSV_SAFE))


def _note_safe_csv(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[_CSV_SAFE] = value


def complete_ranges(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the names, and kinds such as ``layer *``, that begin with ``incomplete``, in the order of first opening.

    A capture that cannot be read offers nothing: what is wrong with it is said when the command runs.
    """
    # An option without its value, which is being typed, ends click's parsing: the arguments before it are left over.
    said = [*context.args, *(str(value) for value in context.params.values() if isinstance(value, Path))]
    capture = next((text for text in said if Path(text).exists()), None)
    if capture is None:
        return []
    from profkit.reading import open_trace

    try:
        trace = open_trace(Path(capture)).trace
    except (ProfkitError, OSError):
        return []
    names = [trace.names[name] for name in trace.ranges.name[trace.ranges.start_ns.argsort(kind="stable")].tolist()]
    members = Counter(kind_of(name) for name in dict.fromkeys(names))
    kinds = [kind for kind, count in members.items() if count > 1]  # as in the tree: a single conv2 is no conv*
    offered = [name for name in dict.fromkeys([*kinds, *names]) if name.startswith(incomplete) and name.isprintable()]
    # Other shells escape what they insert.
    is_bash = os.environ.get("_PROFKIT_COMPLETE", "").startswith("bash")
    return [_SPECIAL_IN_BASH.sub(r"\\\1", name) for name in offered] if is_bash else offered


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


def parse_limit(text: str) -> int:
    """Return the bytes of a size with its unit: ``40GiB``, ``512 B``.

    Raises:
        ValueError: it is no size, or a number without a unit, which could be meant as GiB.
    """
    size = parse_bytes(text)
    if text.strip().isdigit():
        raise ValueError(f"{text.strip()} has no unit; write {text.strip()}GiB, {text.strip()}MiB or {text.strip()}B")
    return size


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
LIMIT = Quantity("SIZE", parse_limit)
PERCENT = Quantity("PERCENT", parse_percent)
MILLISECONDS = Quantity("MS", parse_milliseconds)
SHARE = Quantity("NAME=PERCENT", parse_share)
