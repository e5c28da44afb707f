"""Judge a run by budgets: step time, peak memory, idle GPU, MFU, shares of kernel time, and a baseline.

A budget that cannot be judged is broken, with the reason: a check that passes because nothing was measured is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from profkit.analysis.compare.baseline import judge_against, peak_bounds
from profkit.analysis.compare.budget_lines import BudgetLine, broken
from profkit.analysis.compare.budget_shares import MAX_SHARE, judge_share
from profkit.analysis.compare.capture import OpenedCapture
from profkit.analysis.compare.clean_compare import is_whole_step, read_clean_steps
from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.analysis.opened_trace import OpenedTrace
from profkit.analysis.sample_statistics import median
from profkit.errors import RunError, TraceError, UsageError

MAX_STEP, MAX_PEAK, MAX_IDLE, MIN_MFU = "max-step-ms", "max-peak", "max-idle", "min-mfu"


@dataclass(frozen=True)
class Budgets:
    """What is asked of a run; None is no budget. Shares are fractions, by category or range."""

    max_step_ns: int | None = None
    max_peak_bytes: int | None = None
    max_idle: float | None = None
    min_mfu: float | None = None
    max_shares: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class BudgetCheck:
    """The verdict on a run, budget by budget."""

    run: str
    lines: tuple[BudgetLine, ...]

    @property
    def held(self) -> bool:
        """Return whether every budget held."""
        return all(line.held for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {"run": self.run, "held": self.held, "lines": [asdict(line) for line in self.lines]}


def check_budgets(
    run: OpenedCapture,
    budgets: Budgets,
    baseline: OpenedCapture | None = None,
    *,
    allowed_slowdown: float = 0.0,
    force: bool = False,
) -> BudgetCheck:
    """Return whether a run keeps its budgets.

    Args:
        run: a run directory; of a single trace or snapshot fewer budgets can be judged.
        budgets: what is asked of it.
        baseline: an earlier one, than which it must be neither measurably slower nor larger in memory.
        allowed_slowdown: how much slower it may be, as a fraction of the baseline's time.
        force: judge against a baseline of other provenance too.

    Raises:
        UsageError: nothing is asked, or a share's name can mean two things.
    """
    if budgets == Budgets() and baseline is None:
        raise UsageError("nothing to check: give a budget such as --max-step-ms 120, or --baseline RUN")
    lines: list[BudgetLine] = []
    if budgets.max_step_ns is not None:
        lines += _judge_step(run, budgets.max_step_ns)
    if budgets.max_peak_bytes is not None:
        lines.append(_judge_peak(run, budgets.max_peak_bytes))
    lines += _judge_trace(run.trace, budgets)
    if baseline is not None:
        lines += judge_against(run, baseline, allowed_slowdown=allowed_slowdown, force=force)
    return BudgetCheck(str(run.path), tuple(lines))


def _judge_step(run: OpenedCapture, limit_ns: int) -> Iterator[BudgetLine]:
    """Yield whether the median unprofiled step is short enough, of several contexts each."""
    steps = None if run.run is None else read_clean_steps(run.run.manifest)
    times = {} if steps is None else {name: times for name, times in steps.times_ns.items() if is_whole_step(name)}
    if steps is None or not times:
        yield broken(MAX_STEP, "ns", limit_ns, "no unprofiled step times; a run directory of `profkit run` has them")
    for name, samples in times.items():
        found = median(samples)
        detail = f"median of {len(samples)} unprofiled steps" + (f" ({steps.label})" if steps is not None else "")
        yield BudgetLine(MAX_STEP, name, found, limit_ns, "ns", found <= limit_ns, detail)


def _judge_peak(run: OpenedCapture, limit_bytes: int) -> BudgetLine:
    if run.snapshot is None:
        return broken(MAX_PEAK, "bytes", limit_bytes, "no memory snapshot; record one with `profkit run --memory`")
    low, high = peak_bounds(run.snapshot)
    if high is None or low <= limit_bytes < high:
        reason = f"the peak is not proven: {low:,} B or more" + ("" if high is None else f", at most {high:,} B")
        return broken(MAX_PEAK, "bytes", limit_bytes, reason)
    detail = "allocated, by replay: " + ("exact" if low == high else f"at most; the peak is {low:,} B or more")
    return BudgetLine(MAX_PEAK, None, high, limit_bytes, "bytes", high <= limit_bytes, detail)


def _judge_trace(trace: OpenedTrace | None, budgets: Budgets) -> Iterator[BudgetLine]:
    """Yield the budgets that rest on the trace; of one that cannot be trusted none holds."""
    shares = [(MAX_IDLE, None, budgets.max_idle), (MIN_MFU, None, budgets.min_mfu)]
    asked = [(name, subject, limit) for name, subject, limit in shares if limit is not None]
    of_kernels = [(MAX_SHARE, name, limit) for name, limit in budgets.max_shares]
    reason = _why_not(trace)
    if trace is None or reason is not None:
        for budget, subject, limit in (*asked, *of_kernels):
            yield broken(budget, "share", limit, reason or "", subject)
        return
    if asked:
        yield from _judge_efficiency(trace, budgets)
    for name, limit in budgets.max_shares:
        yield judge_share(trace.attribution, name, limit)


def _why_not(trace: OpenedTrace | None) -> str | None:
    """Return why nothing can be said by a trace, None if something can."""
    if trace is None:
        return "no trace was recorded"
    failed = trace.self_check.of("failed")
    return f"the capture failed its self-check: {failed[0].message}" if failed else None


def _judge_efficiency(trace: OpenedTrace, budgets: Budgets) -> Iterator[BudgetLine]:
    """Yield the budgets of idle share and MFU."""
    try:
        found = trace.efficiency()
    except (TraceError, RunError) as error:
        for budget, limit in ((MAX_IDLE, budgets.max_idle), (MIN_MFU, budgets.min_mfu)):
            if limit is not None:
                yield broken(budget, "share", limit, str(error))
        return
    if budgets.max_idle is not None:
        yield _judge_idle(found, budgets.max_idle)
    if budgets.min_mfu is not None:
        yield _judge_mfu(found, budgets.min_mfu)


def _judge_idle(found: EfficiencyResult, limit: float) -> BudgetLine:
    if found.idle_share is None:
        return broken(MAX_IDLE, "share", limit, "the capture has no steps (ranges `step N`)")
    clean = found.clean_idle_share
    share = found.idle_share if clean is None else clean
    how = "profiled" if clean is None else f"without a profiler ({found.idle_share:.1%} with it)"
    detail = f"of the GPUs' time in {len(found.steps)} steps, {how}"
    return BudgetLine(MAX_IDLE, None, share, limit, "share", share <= limit, detail)


def _judge_mfu(found: EfficiencyResult, limit: float) -> BudgetLine:
    if found.mfu is None:
        return broken(MIN_MFU, "share", limit, _explain_no_mfu(found))
    detail = f"{found.model_flops:,} model FLOPs a step over the median unprofiled step and the datasheet's peak"
    return BudgetLine(MIN_MFU, None, found.mfu, limit, "share", found.mfu >= limit, detail)


def _explain_no_mfu(found: EfficiencyResult) -> str:
    if found.model_flops is None:
        return (
            "the FLOPs of a step are not known; `profkit run` of a built-in model records them, --flops counts others"
        )
    if found.twin is None:
        return "no unprofiled step times; a run directory of `profkit run` has them"
    gpu = f"no datasheet peak of {found.gpu or 'this unnamed GPU'} in {found.dtype or 'an unknown precision'}"
    return f"{gpu}, or the steps are of several contexts"
