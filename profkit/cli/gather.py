"""``profkit gather``: a job's runs in one directory."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.cli.options import FILE
from profkit.cli.outputs import print_line, quote_path, shown_after_a_second, write_warnings
from profkit.joining import gather as gather_to
from profkit.report.units import format_count


@click.command()
@click.argument("sources", nargs=-1, required=True, type=FILE)
@click.option("-o", "--output", required=True, type=FILE, help="The directory to make.")
def gather(sources: tuple[Path, ...], output: Path) -> None:
    """Put the runs of several machines, copied from their disks, into one directory.

    SOURCES are the run directories of one job's machines, or directories that hold some. Machines that wrote to
    one disk need no gathering. The sources are only read; `profkit ranks OUTPUT` compares all ranks.
    """
    with shown_after_a_second(f"copying {format_count(len(sources), 'run')}"):
        gathered = gather_to(sources, output)
    write_warnings(f"{path}: no file, so it is left out" for path in gathered.left_out)
    held = sum(len(ranks) for _, ranks in gathered.runs)
    missing = ""
    if gathered.expected is not None and gathered.expected > len(gathered.runs):
        missing = f"; the job has {gathered.expected}"
    machines = format_count(len(gathered.runs), "machine")
    print_line(f"{output} holds {format_count(held, 'rank')} of {machines}{missing}.")
    print_line(f"Next:\n  profkit ranks {quote_path(output)}")
