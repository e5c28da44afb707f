"""Options that the analyzers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from profkit.report.document import FORMATS

Command = TypeVar("Command", bound=Callable[..., Any])


def output_options(command: Command) -> Command:
    """Add ``--format``, ``-o`` and ``--full-names``."""
    for option in (
        click.option("--full-names", is_flag=True, help="Do not shorten names, or paths in JSON."),
        click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the result to this file."),
        click.option("--format", "style", type=click.Choice(FORMATS), default="table", show_default=True),
    ):
        command = option(command)
    return command
