"""``profkit check``: hold a run to budgets, for CI."""

from __future__ import annotations

from pathlib import Path

import click

from profkit.analysis.compare.budgets import Budgets, check_budgets
from profkit.analysis.compare.capture import OpenedCapture
from profkit.cli.options import output_options
from profkit.cli.outputs import refuse_overwriting, write_result
from profkit.cli.progress import shown_after_a_second
from profkit.cli.quantities import Milliseconds, Percent, Share, Size
from profkit.errors import CheckError, UsageError
from profkit.reading import open_capture
from profkit.report.check import label, render_check
from profkit.report.formats import Format


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--max-step-ms", type=Milliseconds(), help="The median unprofiled step, in milliseconds, at most.")
@click.option("--max-peak", type=Size(), help="Allocated memory at its peak, at most: 40GiB, 40GB or bytes.")
@click.option(
    "--max-idle",
    type=Percent(),
    help="The GPUs' idle share of the steps, at most, such as 10%; without a profiler where that was timed.",
)
@click.option("--min-mfu", type=Percent(), help="Model FLOPs utilization, at least, such as 30%.")
@click.option(
    "--max-share",
    "max_shares",
    type=Share(),
    multiple=True,
    help="A category's or a range's share of the steps' kernel time, at most, such as softmax=15%; write "
    "category:NAME or range:NAME where a capture has both. May be given several times.",
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="RUN0",
    help="No measurable slowdown against this run, and no higher peak of requested memory.",
)
@click.option("--max-slowdown", type=Percent(), help="So much slower than the baseline is let through  [default: 0%]")
@click.option("--force", is_flag=True, help="Take a baseline of other provenance (GPU, driver, precision, …) too.")
@output_options
def check(
    run: Path,
    max_step_ms: int | None,
    max_peak: int | None,
    max_idle: float | None,
    min_mfu: float | None,
    max_shares: tuple[tuple[str, float], ...],
    baseline: Path | None,
    max_slowdown: float | None,
    force: bool,
    style: Format,
    output: Path | None,
    full_names: bool,
) -> None:
    """Hold a run to budgets: exit 0 with those that held, or 3 if any is broken.

    RUN is a run directory; of a trace or a snapshot alone fewer budgets can be judged. A budget that cannot be judged
    is broken, with the reason.
    """
    if baseline is None and (force or max_slowdown is not None):
        raise UsageError(f"{'--force' if force else '--max-slowdown'} is about a baseline: give --baseline RUN0")
    refuse_overwriting([run, *([] if baseline is None else [baseline])], [output])
    budgets = Budgets(max_step_ms, max_peak, max_idle, min_mfu, max_shares)
    if budgets == Budgets() and baseline is None:
        raise UsageError("nothing to check: give a budget such as --max-step-ms 120, or --baseline RUN0")
    opened, earlier = _open(run), None if baseline is None else _open(baseline)
    with shown_after_a_second("judging"):
        result = check_budgets(opened, budgets, earlier, allowed_slowdown=max_slowdown or 0.0, force=force)
    write_result(render_check(result, style, full_names=full_names), output)
    broken = [label(line) for line in result.lines if not line.held]
    if broken:
        raise CheckError(f"{run}: {len(broken)} of {len(result.lines)} budgets broken: {', '.join(broken)}")


def _open(path: Path) -> OpenedCapture:
    with shown_after_a_second(f"reading {path.name}"):
        return open_capture(path)
