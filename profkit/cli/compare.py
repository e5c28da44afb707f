"""``profkit compare`` and ``profkit check``: what changed between two captures, and a run against budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from profkit.analysis.compare.budgets import Budgets, check_budgets
from profkit.analysis.compare.comparison import (
    ReducedCapture,
    compare_captures,
    compare_provenance,
    reduce_capture,
    refuse_other_measure,
)
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.ranks.comparison import RanksResult, compare_opened
from profkit.cli.options import FILE, MILLISECONDS, PERCENT, POSITIVE, SHARE, SIZE, range_option
from profkit.cli.outputs import Output, output_options, refuse_overwriting, shown_after_a_second, write_warnings
from profkit.errors import CheckError, UsageError
from profkit.reading import open_capture
from profkit.report.commands.answer import answer_capture
from profkit.report.commands.compare import (
    TOP,
    VIEWS,
    View,
    budget_label,
    build_check_document,
    build_compare_document,
    describe_difference,
)


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
    (old, old_ranks), (new, new_ranks) = (_read_reduced(path, name, by) for path in (before, after))
    refuse_other_measure(old, new)
    if not force or output.style == "csv":
        disturbances = compare_provenance(old.origin, new.origin).disturbances
        write_warnings(f"changed: {describe_difference(difference)}" for difference in disturbances)
    with shown_after_a_second("comparing"):
        has_ranks = old_ranks is not None and new_ranks is not None
        result = compare_captures(old, new, force=force, may_be_empty=has_ranks)
    document = build_compare_document(result, by=by, top=top)
    if old_ranks is not None and new_ranks is not None:
        from profkit.report.commands.ranks import compare_groups

        with shown_after_a_second("comparing ranks"):
            groups, lines, data = compare_groups(_compare_ranks(old_ranks), _compare_ranks(new_ranks))
        csv = document.csv if document.csv.rows else groups
        document = replace(document, parts=[*document.parts, groups, lines], data={**document.data, **data}, csv=csv)
    output.print(document)


def _read_reduced(path: Path, name: str | None, by: View | None) -> tuple[ReducedCapture, OpenedCapture | None]:
    """Return what is compared of a capture; and the capture itself, whose trace stays open, if its ranks are too."""
    with shown_after_a_second(f"reading {path.name}"):
        capture = open_capture(path)
        has_ranks = by is None and name is None and _has_ranks(capture)
        return reduce_capture(capture, name), capture if has_ranks else None


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


@click.command()
@click.argument("run", type=FILE)
@click.option("--max-step-ms", "max_step_ns", type=MILLISECONDS, help="Longest unprofiled step, in milliseconds.")
@click.option(
    "--max-peak", "max_peak_bytes", type=SIZE, help="Highest peak of allocated memory, with its unit: 40GiB or 40GB."
)
@click.option(
    "--max-idle",
    type=PERCENT,
    help="Largest idle share of the GPUs in the steps, such as 10%; scaled to the unprofiled steps if timed.",
)
@click.option("--min-mfu", type=PERCENT, help="Smallest model FLOPs utilization, such as 30%.")
@click.option(
    "--max-share",
    "max_shares",
    type=SHARE,
    multiple=True,
    help="Largest share of the steps' kernel time for a category or a range, such as softmax=15%; write category:NAME "
    "or range:NAME if a capture has both. May be given several times.",
)
@click.option(
    "--max-wait",
    type=PERCENT,
    help="Largest share of a step that ranks may wait for each other in collectives, hidden behind computing or not.",
)
@click.option("--max-skew", type=PERCENT, help="Largest share of a step that the latest rank may cost the others.")
@click.option(
    "--baseline",
    type=FILE,
    metavar="RUN0",
    help="Allow no measurable slowdown against this run, and no higher peak of requested memory.",
)
@click.option("--force", is_flag=True, help="Accept a baseline of different origin (GPU, driver, precision, …).")
@output_options
def check(
    run: Path,
    baseline: Path | None,
    force: bool,
    output: Output,
    **limits: Any,
) -> None:
    """Check a run against budgets: exit 0 if all held, 3 if any did not.

    RUN is a run directory; fewer budgets can be judged with a trace or a snapshot alone. A budget that cannot be judged
    counts as failed, and the reason is printed.
    """
    if baseline is None and force:
        raise UsageError("--force needs a baseline: give --baseline RUN0")
    refuse_overwriting([run, baseline], [output.path])
    budgets = Budgets(**limits)
    if budgets == Budgets() and baseline is None:
        raise UsageError("nothing to check: give a budget such as --max-step-ms 120, or --baseline RUN0")
    # A directory of several nodes holds nothing that one capture could be: its ranks alone are compared.
    only_ranks = budgets == Budgets(max_wait=budgets.max_wait, max_skew=budgets.max_skew) and baseline is None
    opened = OpenedCapture(run, None, None, None) if only_ranks else open_shown(run)
    earlier = None if baseline is None else open_shown(baseline)
    with shown_after_a_second("judging"):
        ranks = _compare_ranks_of(run) if budgets.of_ranks else ""
        result = check_budgets(opened, budgets, earlier, force=force, ranks=ranks)
        answer = answer_capture(opened)
    output.print(build_check_document(result, None if isinstance(ranks, str) else ranks, answer))
    failed = [budget_label(line) for line in result.lines if not line.held]
    if failed:
        raise CheckError(f"{run}: {len(failed)} of {len(result.lines)} budgets failed: {', '.join(failed)}")


def _compare_ranks_of(run: Path) -> RanksResult | str:
    from profkit.joining import read_ranks

    try:
        return read_ranks(run)
    except UsageError as error:
        return str(error).removeprefix(f"{run}: ").partition(";")[0]
