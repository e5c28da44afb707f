"""``profkit compare``: what changed between two captures."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.analysis.compare.capture import OpenedCapture
from profkit.analysis.compare.comparison import CaptureComparison, compare_captures, refuse_other_measure
from profkit.analysis.compare.provenance import compare_provenance
from profkit.cli.options import output_options
from profkit.cli.outputs import refuse_overwriting, write_result, write_warnings
from profkit.cli.progress import shown_after_a_second
from profkit.reading import open_capture
from profkit.report.compare import TOP, VIEWS, View, render_compare
from profkit.report.formats import Format

_FOR_PEOPLE = ("table", "markdown", "latex")


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--range", "name", metavar="RANGE", help="Only the kernel time under this range.")
@click.option("--by", type=click.Choice(VIEWS), help="One view alone  [default: phase, category and kernel]")
@click.option(
    "--top", type=click.IntRange(min=1), help=f"So many lines of a table, {TOP} unless told; CSV and JSON hold all."
)
@click.option("--force", is_flag=True, help="Compare captures of different provenance too; what differs is said.")
@output_options
def compare(
    before: Path,
    after: Path,
    name: str | None,
    by: View | None,
    top: int | None,
    force: bool,
    style: Format,
    output: Path | None,
    full_names: bool,
) -> None:
    """Say what changed between two captures, per kernel, category and range, and whether it is more than noise.

    BEFORE and AFTER are traces, memory snapshots or run directories. Kernel time is compared per step; each change has
    a bootstrap interval over the steps, if there are five or more on both sides. Of two run directories the unprofiled
    steps and the memory are compared too.

    Captures that differ in profiler, GPU, driver, torch, workload or precision, and lossy ones, are compared only under
    --force; without it that is a wrong request (exit 2).
    """
    refuse_overwriting([before, after], [output])
    old, new = _open(before), _open(after)
    refuse_other_measure(old, new)
    if not force:
        provenance = compare_provenance(old, new)
        write_warnings(f"{one.fact}: {one.before} | {one.after}" for one in provenance.disturbances)
    with shown_after_a_second("comparing"):
        result = compare_captures(old, new, range=name, force=force)
    if top is None and style in _FOR_PEOPLE:
        top = TOP
    _warn(result, style)
    write_result(render_compare(result, style, by=by, top=top, full_names=full_names), output)


def _open(path: Path) -> OpenedCapture:
    with shown_after_a_second(f"reading {path.name}"):
        return open_capture(path)


def _warn(result: CaptureComparison, style: Format) -> None:
    messages = [warning.message for warning in result.warnings]
    if style == "csv":
        messages += [f"{one.fact}: {one.before} | {one.after}" for one in result.provenance.disturbances]
    write_warnings(messages)
