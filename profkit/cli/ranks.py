"""``profkit ranks``: who is late, why, and what communication costs."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.options import POSITIVE, capture_argument
from profkit.cli.outputs import Output, output_options, refuse_overwriting, shown_after_a_second
from profkit.joining import read_ranks
from profkit.report.commands.ranks import build_ranks_document

_DEFAULT_TOP = 16


@click.command()
@capture_argument("run")
@click.option("--top", type=POSITIVE, metavar="N", help=f"Show at most N ranks (default {_DEFAULT_TOP}).")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Read with N processes (default: all cores).")
@output_options
def ranks(run: Path, top: int | None, workers: int | None, output: Output) -> None:
    """Say which rank the others wait for, why, and what each group's communication costs.

    RUN is a run directory of several ranks, a directory that holds one for each node, or one trace of several ranks.
    Each rank is read by itself: from its trace, else from the light record that it left.
    """
    refuse_overwriting([run], [output.path])
    with shown_after_a_second(f"reading {run.name}"):
        result = read_ranks(run, workers=workers)
    if top is None and output.is_for_people:
        top = _DEFAULT_TOP
    output.print(build_ranks_document(result, str(run), top=top))
