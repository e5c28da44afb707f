"""Options and habits that the analyzers share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from profkit.report.files import write_whole
from profkit.report.formats import FORMATS

Command = TypeVar("Command", bound=Callable[..., Any])


def output_options(command: Command) -> Command:
    """Add ``--format``, ``-o`` and ``--full-names``."""
    for option in (
        click.option("--full-names", is_flag=True, help="Do not shorten names to fit 80 columns."),
        click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result to this file."),
        click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True),
    ):
        command = option(command)
    return command


def write_result(text: str, output: Path | None) -> None:
    """Print the result, or write it to a file that is whole or not there."""
    if output is None:
        click.echo(text)
        return
    write_whole(output, (text + "\n").encode())


def write_warnings(messages: Iterable[str]) -> None:
    """Print warnings to stderr, one line each."""
    for message in messages:
        click.echo(f"warning: {message}", file=sys.stderr)
