"""Options that the analyzers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from profkit.report.document import FORMATS

Command = TypeVar("Command", bound=Callable[..., Any])

_CSV_SAFE = "profkit.csv_safe"


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
        click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True),
    ):
        command = option(command)
    return command


def wants_safe_csv() -> bool:
    """Return whether the command that runs was given ``--csv-safe``."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_CSV_SAFE))


def _note_safe_csv(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[_CSV_SAFE] = value
