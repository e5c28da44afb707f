"""``profkit compare``: what changed between two captures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from profkit.analysis.compare.comparison import compare_captures, refuse_other_measure
from profkit.analysis.compare.provenance import compare_provenance
from profkit.analysis.opened import OpenedCapture
from profkit.cli.options import complete_ranges, output_options
from profkit.cli.outputs import print_document, refuse_overwriting, shown_after_a_second, write_warnings
from profkit.reading import open_capture
from profkit.report.commands.compare import TOP, VIEWS, View, build_compare_document, describe_difference
from profkit.report.document import Format

if TYPE_CHECKING:
    from profkit.analysis.ranks.comparison import RanksResult


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--range", "name", metavar="RANGE", shell_complete=complete_ranges, help="Only the kernel time under this range."
)
@click.option("--by", type=click.Choice(VIEWS), help="Show one view only  [default: phase, category and kernel]")
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Show at most N lines of a table (default {TOP}); CSV and JSON hold all.",
)
@click.option("--force", is_flag=True, help="Compare captures of different origin too, and print what differs.")
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
    """Show what changed between two captures, per kernel, category and range, and whether it is more than noise.

    BEFORE and AFTER are traces, memory snapshots or run directories. Kernel time is compared per step; each change has
    an interval if both sides have five steps or more. With two run directories, unprofiled steps and memory are
    compared too; of two runs of several ranks, each group's collectives and who is late.

    Captures that differ in profiler, GPU, driver, torch, workload or precision, or that lost events, need --force;
    without it the command exits 2.
    """
    refuse_overwriting([before, after], [output])
    old, new = _open(before), _open(after)
    refuse_other_measure(old, new)
    if not force or style == "csv":
        disturbances = compare_provenance(old, new).disturbances
        write_warnings(f"changed: {describe_difference(difference)}" for difference in disturbances)
    with shown_after_a_second("comparing"):
        has_ranks = by is None and name is None and _has_ranks(old) and _has_ranks(new)
        result = compare_captures(old, new, range=name, force=force, may_be_empty=has_ranks)
    document = build_compare_document(result, by=by, top=top)
    if has_ranks:
        from profkit.report.commands.ranks import compare_groups

        with shown_after_a_second("comparing ranks"):
            groups, lines, data = compare_groups(_compare_ranks(old), _compare_ranks(new))
        csv = document.csv if document.csv.rows else groups
        document = replace(document, parts=[*document.parts, groups, lines], data={**document.data, **data}, csv=csv)
    print_document(document, style, output, full_names=full_names)


def _has_ranks(capture: OpenedCapture) -> bool:
    light = () if capture.run is None else capture.run.light_records
    return len(light) > 1 or (capture.trace is not None and len(capture.trace.ranks.members) > 1)


def _compare_ranks(capture: OpenedCapture) -> RanksResult:
    """Compare the ranks from what is opened already; of ranks that are lost, `read_ranks` says why."""
    from profkit.analysis.ranks.comparison import compare_opened
    from profkit.joining import read_ranks

    return compare_opened(capture.trace, capture.run) or read_ranks(capture.path)


def _open(path: Path) -> OpenedCapture:
    with shown_after_a_second(f"reading {path.name}"):
        return open_capture(path)
