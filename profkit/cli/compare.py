"""``profkit compare``: what changed between two captures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from profkit.analysis.compare.comparison import compare_captures, refuse_other_measure
from profkit.analysis.compare.provenance import compare_provenance
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.ranks.comparison import RanksResult, compare_opened
from profkit.cli.options import FILE, POSITIVE, range_option
from profkit.cli.outputs import Output, output_options, refuse_overwriting, shown_after_a_second, write_warnings
from profkit.reading import open_capture
from profkit.report.commands.compare import TOP, VIEWS, View, build_compare_document, describe_difference


@click.command()
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@range_option("Only the kernel time under this range.")
@click.option("--by", type=click.Choice(VIEWS), help="Show one view only  [default: phase, category and kernel]")
@click.option(
    "--top",
    type=POSITIVE,
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
    output: Output,
) -> None:
    """Show what changed between two captures, per kernel, category and range, and whether it is more than noise.

    BEFORE and AFTER are traces, memory snapshots or run directories. Kernel time is compared per step; each change has
    an interval if both sides have five steps or more. With two run directories, unprofiled steps and memory are
    compared too; of two runs of several ranks, each group's collectives and who is late.

    Captures that differ in profiler, GPU, driver, torch, workload or precision, or that lost events, need --force;
    without it the command exits 2.
    """
    refuse_overwriting([before, after], [output.path])
    old, new = open_shown(before), open_shown(after)
    refuse_other_measure(old, new)
    if not force or output.style == "csv":
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
    output.print(document)


def _has_ranks(capture: OpenedCapture) -> bool:
    light = () if capture.run is None else capture.run.light_records
    return len(light) > 1 or (capture.trace is not None and len(capture.trace.ranks.members) > 1)


def _compare_ranks(capture: OpenedCapture) -> RanksResult:
    """Compare the ranks from what is opened already; of ranks that are lost, `read_ranks` says why."""
    from profkit.joining import read_ranks

    return compare_opened(capture.trace, capture.run) or read_ranks(capture.path)


def open_shown(path: Path) -> OpenedCapture:
    with shown_after_a_second(f"reading {path.name}"):
        return open_capture(path)
