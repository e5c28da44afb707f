"""Options that the analyzers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from profkit.errors import CheckError
from profkit.report.document import FORMATS

if TYPE_CHECKING:
    from profkit.analysis.checks.self_check import SelfCheck

Command = TypeVar("Command", bound=Callable[..., Any])

_CSV_SAFE = "profkit.csv_safe"

format_option = click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True)
rank_option = click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Only this rank of a distributed run."
)


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
