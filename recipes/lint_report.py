"""What do the numbers of a benchmark's table give away about how it was made?

``python -m recipes.lint_report REPORT.md RESULTS.csv`` reads the tables of anybody's Markdown and CSV files and runs
the detectors on each, and on all together. Exit code 3 if one finds a mistake; a note is no mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from profkit.files import write_whole
from recipes.common.command import exit_with
from recipes.common.tables import Table, csv_text, markdown
from recipes.detectors import Finding, inspect_tables
from recipes.detectors.tables import read_tables

MISTAKES = 3


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "-o", "output", type=click.Path(file_okay=False, path_type=Path), help="Also write Markdown and CSV here."
)
def main(files: tuple[Path, ...], output: Path | None) -> int:
    tables = [table for file in files for table in read_tables(file)]
    findings = inspect_tables(tables)
    mistakes = sum(not finding.is_note for finding in findings)
    for finding in findings:
        click.echo(f"{_kind(finding)}: {finding.code}: {finding.table}: {finding.message}")
    counts = ((len(tables), "table"), (mistakes, "mistake"), (len(findings) - mistakes, "note"))
    click.echo(", ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in counts), err=True)
    if output is not None:
        write_findings(findings, output)
    return MISTAKES if mistakes else 0


def write_findings(findings: Sequence[Finding], directory: Path) -> None:
    """Write the findings as ``lint_report.md`` and ``lint_report.csv``."""
    lines = [[_kind(each), each.code, each.table, each.message] for each in findings]
    table = Table(["kind", "code", "table", "message"], lines)
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / "lint_report.md", (markdown(table) + "\n").encode())
    write_whole(directory / "lint_report.csv", csv_text(table).encode())


def _kind(finding: Finding) -> str:
    return "note" if finding.is_note else "mistake"


if __name__ == "__main__":
    exit_with(main)
