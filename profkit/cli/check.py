"""``profkit check``: a run against budgets."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.analysis.compare.budgets import Budgets, check_budgets
from profkit.analysis.opened import OpenedCapture
from profkit.analysis.ranks.comparison import RanksResult
from profkit.cli.compare import open_shown
from profkit.cli.options import FILE, LIMIT, MILLISECONDS, PERCENT, SHARE
from profkit.cli.outputs import Output, output_options, refuse_overwriting, shown_after_a_second
from profkit.errors import CheckError, UsageError
from profkit.report.commands.answer import answer_capture
from profkit.report.commands.compare import budget_label, build_check_document


@click.command()
@click.argument("run", type=FILE)
@click.option("--max-step-ms", type=MILLISECONDS, help="Longest unprofiled step, in milliseconds.")
@click.option("--max-peak", type=LIMIT, help="Highest peak of allocated memory, with its unit: 40GiB or 40GB.")
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
@click.option("--max-slowdown", type=PERCENT, help="Allow this much slowdown against the baseline  [default: 0%]")
@click.option("--force", is_flag=True, help="Accept a baseline of different origin (GPU, driver, precision, …).")
@output_options
def check(
    run: Path,
    max_step_ms: int | None,
    max_peak: int | None,
    max_idle: float | None,
    min_mfu: float | None,
    max_shares: tuple[tuple[str, float], ...],
    max_wait: float | None,
    max_skew: float | None,
    baseline: Path | None,
    max_slowdown: float | None,
    force: bool,
    output: Output,
) -> None:
    """Check a run against budgets: exit 0 if all held, 3 if any did not.

    RUN is a run directory; fewer budgets can be judged with a trace or a snapshot alone. A budget that cannot be judged
    counts as failed, and the reason is printed.
    """
    if baseline is None and (force or max_slowdown is not None):
        raise UsageError(f"{'--force' if force else '--max-slowdown'} needs a baseline: give --baseline RUN0")
    refuse_overwriting([run, baseline], [output.path])
    budgets = Budgets(max_step_ms, max_peak, max_idle, min_mfu, max_shares, max_wait, max_skew)
    if budgets == Budgets() and baseline is None:
        raise UsageError("nothing to check: give a budget such as --max-step-ms 120, or --baseline RUN0")
    # A directory of several nodes holds nothing that one capture could be: its ranks alone are compared.
    only_ranks = budgets == Budgets(max_wait=max_wait, max_skew=max_skew) and baseline is None
    opened = OpenedCapture(run, None, None, None) if only_ranks else open_shown(run)
    earlier = None if baseline is None else open_shown(baseline)
    with shown_after_a_second("judging"):
        ranks = _compare_ranks_of(run) if budgets.of_ranks else ""
        result = check_budgets(opened, budgets, earlier, allowed_slowdown=max_slowdown or 0.0, force=force, ranks=ranks)
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
