"""Judge a run by budgets: step time, peak memory, idle GPU, MFU, shares of kernel time, and an earlier run.

A budget that cannot be judged counts as failed, with the reason: a check must not pass because nothing was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from profkit.analysis import NotebookResult
from profkit.analysis.compare import StepSamples, has_measured_steps, sample_steps
from profkit.analysis.compare.comparison import CaptureComparison, CleanChange, compare_captures, reduce_capture
from profkit.analysis.compare.kernel_changes import Change
from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.analysis.kernels import CATEGORIES
from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.analysis.opened import OpenedCapture, OpenedTrace
from profkit.analysis.placing.attribution import Attribution
from profkit.analysis.statistics import FEWEST
from profkit.analysis.time_account.account import TimeAccount
from profkit.analysis.time_account.step_times import is_whole_step, name_statistic, summarize_step_times
from profkit.analysis.tree import find_near_names, select_ranges
from profkit.errors import RunError, TraceError, UsageError
from profkit.trace.columns import distinct_values

if TYPE_CHECKING:
    from profkit.analysis.ranks.comparison import RanksResult
Unit = Literal["ns", "bytes", "share"]


@dataclass(frozen=True)
class Budgets:
    """The limits that a run must keep; None means no limit. ``max_shares`` are (category or range, fraction)."""

    max_step_ns: int | None = None
    max_peak_bytes: int | None = None
    max_idle: float | None = None
    min_mfu: float | None = None
    max_shares: tuple[tuple[str, float], ...] = ()
    max_wait: float | None = None
    max_skew: float | None = None

    @property
    def of_ranks(self) -> bool:
        return self.max_wait is not None or self.max_skew is not None


@dataclass(frozen=True)
class BudgetLine:
    """What a budget allows and what was measured, None if there is none; ``detail`` says how, or why it was not judged.

    ``budget`` is the option's name; ``subject`` is the range, phase or context that the line is about, if any.
    ``judged`` is False if nothing could be measured; then ``held`` is False too.
    """

    budget: str
    subject: str | None
    measured: float | None
    limit: float | None
    unit: Unit
    held: bool
    detail: str
    judged: bool = True


def not_judged(budget: str, unit: Unit, limit: float | None, reason: str, subject: str | None = None) -> BudgetLine:
    return BudgetLine(budget, subject, None, limit, unit, False, reason, judged=False)


MAX_STEP, MAX_PEAK, MAX_IDLE, MIN_MFU, MAX_SHARE = "max-step-ms", "max-peak", "max-idle", "min-mfu", "max-share"
MAX_WAIT, MAX_SKEW = "max-wait", "max-skew"
BASELINE = "baseline"
_NO_STEP_TIMES = "no unprofiled step times; a run directory of `profkit run` has them"

_Kind = Literal["category", "range"]


@dataclass(frozen=True, repr=False)
class BudgetCheck(NotebookResult, rows="lines", row_type=BudgetLine):
    run: str
    lines: tuple[BudgetLine, ...]

    @property
    def held(self) -> bool:
        return all(line.held for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        return {"run": self.run, "held": self.held, "lines": [asdict(line) for line in self.lines]}


def check_budgets(
    run: OpenedCapture,
    budgets: Budgets,
    baseline: OpenedCapture | None = None,
    *,
    force: bool = False,
    ranks: RanksResult | str = "the ranks were not read",
) -> BudgetCheck:
    """Return whether a run keeps its budgets; fewer can be judged of a single trace or snapshot.

    It must be neither measurably slower than the ``baseline`` nor need more memory; ``force`` accepts one of other
    provenance. ``ranks`` are compared, or the reason why they are not.

    Raises:
        UsageError: there is no budget, or a share's name can mean two things, or nothing.
    """
    if budgets == Budgets() and baseline is None:
        raise UsageError("nothing to check: give a budget such as --max-step-ms 120, or --baseline RUN")
    lines: list[BudgetLine] = []
    if budgets.max_step_ns is not None:
        lines += _judge_step(run, budgets.max_step_ns)
    if budgets.max_peak_bytes is not None:
        lines.append(_judge_peak(run, budgets.max_peak_bytes))
    lines += _judge_trace(run.trace, budgets)
    if budgets.of_ranks:
        lines += _judge_ranks(budgets, ranks)
    if baseline is not None:
        lines += _judge_against(run, baseline, force=force)
    return BudgetCheck(str(run.path), tuple(lines))


def _judge_step(run: OpenedCapture, limit_ns: int) -> Iterator[BudgetLine]:
    steps = None if run.run is None else summarize_step_times(run.run.manifest)
    times = {} if steps is None else {name: samples for name, samples in steps.samples.items() if is_whole_step(name)}
    if steps is None or not times:
        yield not_judged(MAX_STEP, "ns", limit_ns, _NO_STEP_TIMES)
        return
    for name, samples in times.items():
        how, count = name_statistic(waits=samples.waits), len(samples.rest_ns)
        detail = f"{how} of {count:,} unprofiled step{'s' * (count != 1)} ({steps.label})"
        yield BudgetLine(MAX_STEP, name, samples.time_ns, limit_ns, "ns", samples.time_ns <= limit_ns, detail)


def _judge_peak(run: OpenedCapture, limit_bytes: int) -> BudgetLine:
    if run.snapshot is None:
        return not_judged(MAX_PEAK, "bytes", limit_bytes, "no memory snapshot; record one with `profkit run --memory`")
    low, high = _peak_bounds(run.snapshot)
    if high is None or low <= limit_bytes < high:
        upper = "its upper bound is unknown" if high is None else f"at most {high:,} B"
        reason = f"the peak is at least {low:,} B and {upper}"
        return not_judged(MAX_PEAK, "bytes", limit_bytes, reason)
    detail = "allocated, by replay: " + ("exact" if low == high else f"an upper bound; the peak is at least {low:,} B")
    return BudgetLine(MAX_PEAK, None, high, limit_bytes, "bytes", high <= limit_bytes, detail)


def _judge_trace(trace: OpenedTrace | None, budgets: Budgets) -> Iterator[BudgetLine]:
    of_steps = [(MAX_IDLE, budgets.max_idle), (MIN_MFU, budgets.min_mfu)]
    asked = [(budget, None, limit) for budget, limit in of_steps if limit is not None]
    failed = [] if trace is None else trace.self_check.of("failed")
    if trace is None or failed:
        reason = f"the capture failed its self-check: {failed[0].message}" if failed else "no trace was recorded"
        for budget, subject, limit in (*asked, *((MAX_SHARE, name, limit) for name, limit in budgets.max_shares)):
            yield not_judged(budget, "share", limit, reason, subject)
        return
    try:
        efficiency = trace.efficiency() if asked else None
    except (TraceError, RunError) as error:
        efficiency = None
        for budget, _, limit in asked:
            yield not_judged(budget, "share", limit, str(error).removeprefix(f"{trace.trace.path}: "))
    if efficiency is not None and budgets.max_idle is not None:
        yield _judge_idle(trace.account, budgets.max_idle)
    if efficiency is not None and budgets.min_mfu is not None:
        yield _judge_mfu(efficiency, budgets.min_mfu)
    for name, limit in budgets.max_shares:
        yield _judge_share(trace.attribution, name, limit)


def _judge_idle(account: TimeAccount, limit: float) -> BudgetLine:
    if not len(account):
        return not_judged(MAX_IDLE, "share", limit, "the capture has no steps (ranges `step N`)")
    idle, recorded = account.idle_time(), account.sum_parts()[0].idle_share
    how = f"scaled to the unprofiled steps ({recorded:.1%} with the profiler)" if idle.is_unprofiled else "profiled"
    detail = f"of the GPUs' time in {_count_steps(len(account.recorded_steps_ns()))}, {how}"
    return BudgetLine(MAX_IDLE, None, idle.share, limit, "share", idle.share <= limit, detail)


def _count_steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _judge_mfu(efficiency: EfficiencyResult, limit: float) -> BudgetLine:
    if efficiency.mfu is None:
        return not_judged(MIN_MFU, "share", limit, _explain_no_mfu(efficiency))
    detail = f"{efficiency.model_flops:,} model FLOPs per step over the unprofiled step and the datasheet's peak"
    return BudgetLine(MIN_MFU, None, efficiency.mfu, limit, "share", efficiency.mfu >= limit, detail)


def _explain_no_mfu(efficiency: EfficiencyResult) -> str:
    if efficiency.model_flops is None:
        return f"the FLOPs of a step are unknown: {efficiency.uncounted or 'the counted steps differ'}"
    if efficiency.twin is None:
        return _NO_STEP_TIMES
    gpu, dtype = efficiency.gpu or "this unnamed GPU", efficiency.dtype or "an unknown precision"
    return f"no datasheet peak for {gpu} in {dtype}, or the steps have several contexts"


def _judge_share(attribution: Attribution, name: str, limit: float) -> BudgetLine:
    """``name`` is a category or a range, whichever the capture has; ``category:`` or ``range:`` before it decides."""
    by_step = has_measured_steps(attribution)
    whole = sample_steps(attribution, by_step=by_step)
    kind, bare = _find_kind(attribution, whole, name)
    if not whole.total_ns:
        return not_judged(MAX_SHARE, "share", limit, "no kernel time was recorded in the steps", name)
    if kind is None:
        reason = f"no kernel has category {bare!r}, and no range has this name"
        return not_judged(MAX_SHARE, "share", limit, reason, name)
    if kind == "range":
        part_ns = sample_steps(attribution, bare, by_step=by_step).total_ns
    else:
        mine = [column for column, key in enumerate(whole.keys) if key.category == bare]
        part_ns = int(whole.kernel_ns[:, mine].sum())
    share = part_ns / whole.total_ns
    where = _count_steps(whole.size) if by_step else "the whole capture (it has no steps)"
    work = "kernel time" if attribution.trace.measure == "gpu-kernel" else "operator time"
    detail = f"{kind} {bare!r}: {part_ns:,} of {whole.total_ns:,} ns of {work} in {where}"
    if kind == "category":
        detail += _name_similar_ranges(attribution, bare)
    return BudgetLine(MAX_SHARE, name, share, limit, "share", share <= limit, detail)


def _find_kind(attribution: Attribution, whole: StepSamples, name: str) -> tuple[_Kind | None, str]:
    """The kind is None for a category of profkit's that no kernel here has."""
    prefix, _, rest = name.partition(":")
    asked: tuple[_Kind, ...] = ("category", "range")
    bare = name
    if rest and prefix in asked:
        asked, bare = tuple(kind for kind in asked if kind == prefix), rest
    there: list[_Kind] = []
    if "category" in asked and any(key.category == bare for key in whole.keys):
        there.append("category")
    if "range" in asked and _has_range(attribution, bare):
        there.append("range")
    if len(there) > 1:
        raise UsageError(
            f"--max-share {name}: this capture has a category and a range of that name; write category:{name} or"
            f" range:{name}"
        )
    if not there and not ("category" in asked and bare in CATEGORIES):
        raise UsageError(_explain_no_share(attribution, name, bare, asked))
    return (there[0] if there else None), bare


def _has_range(attribution: Attribution, name: str) -> bool:
    try:
        return bool(len(select_ranges(attribution, name)))
    except (TraceError, UsageError):
        return False


def _name_similar_ranges(attribution: Attribution, category: str) -> str:
    """A kernel's category follows from its name alone. An eager softmax is a chain of elementwise kernels and
    reductions: its time is in its range, not in the category softmax.
    """
    trace = attribution.trace
    names = {trace.names[i] for i in distinct_values(trace.ranges.name).tolist()} - {category}
    alike = sorted(name for name in names if category in name)
    return f"; only kernels with such names; see also range:{alike[0]}" if alike else ""


def _explain_no_share(attribution: Attribution, name: str, bare: str, asked: tuple[_Kind, ...]) -> str:
    trace = attribution.trace
    ranges = {trace.names[i] for i in distinct_values(trace.ranges.name).tolist()}
    known = {"category": set(CATEGORIES), "range": ranges}
    near = find_near_names(bare, sorted(set().union(*(known[kind] for kind in asked))))
    hint = f"nearest: {', '.join(map(repr, near))}" if near else f"categories are {', '.join(CATEGORIES)}"
    return f"--max-share {name}: no {' and no '.join(asked)} is named {bare!r}; {hint} (`profkit ranges` lists ranges)"


def _judge_against(run: OpenedCapture, baseline: OpenedCapture, *, force: bool) -> Iterator[BudgetLine]:
    """Yield whether a run is as fast as its baseline and needs no more memory, for what at least one of them recorded.

    Time is that of the unprofiled steps if both runs have them, else the kernel time per step. A run is slower if the
    whole interval of the change lies above 0. Memory is the peak of requested bytes; if a replay is not exact, the
    bounds of the allocated peak.
    """
    try:
        compared = compare_captures(reduce_capture(baseline), reduce_capture(run), force=force)
    except UsageError as error:
        yield not_judged(BASELINE, "ns", None, str(error))
        return
    if compared.clean is not None or run.trace is not None or baseline.trace is not None:
        yield from _judge_time_against(compared)
    if run.snapshot is not None and baseline.snapshot is not None:
        yield _judge_peak_against(run.snapshot, baseline.snapshot)
    elif (run.snapshot is None) != (baseline.snapshot is None):
        yield not_judged(BASELINE, "bytes", None, "only one of the two runs recorded memory", "peak")


def _peak_bounds(snapshot: OpenedSnapshot) -> tuple[int, int | None]:
    histories = [memory.history for memory in snapshot.devices.values()]
    bounds = [history.bounds or (history.allocated_peak_bytes, history.allocated_peak_bytes) for history in histories]
    highs = [high for _, high in bounds if high is not None]
    return max(low for low, _ in bounds), max(highs) if len(highs) == len(bounds) else None


def _judge_time_against(compared: CaptureComparison) -> Iterator[BudgetLine]:
    if compared.clean is not None and compared.clean.changes:
        for change in compared.clean.changes:
            if change.is_whole_step:
                counts = compared.clean.describe_samples(change)
                times = change.before_ns, change.after_ns
                yield _judge_change(change.name, times, change, counts)
    elif compared.time is not None and compared.time.unit == "step":
        whole, samples = compared.time.kernel_time, compared.time.samples
        counts = f"means of {samples[0]} and {samples[1]} profiled steps"
        times = whole.before_per_sample_ns, whole.after_per_sample_ns
        yield _judge_change("kernel time", times, whole, counts)
    else:
        yield not_judged(BASELINE, "ns", None, "the two runs have no steps in common, unprofiled or profiled")


def _judge_change(name: str, times_ns: tuple[int, int], change: Change | CleanChange, counts: str) -> BudgetLine:
    (before, after), verdict = times_ns, change.verdict
    if verdict == "unknown":
        return not_judged(BASELINE, "ns", before, f"{counts}: an interval needs {FEWEST} on each side", name)
    words = {"more": "measurably slower", "less": "measurably faster"}.get(verdict, verdict)
    detail = f"{words} by {abs(change.change_ns):,} ns" if verdict in ("more", "less") else words
    return BudgetLine(BASELINE, name, after, before, "ns", verdict != "more", f"{detail}; {counts}")


def _judge_peak_against(run: OpenedSnapshot, baseline: OpenedSnapshot) -> BudgetLine:
    (low, high), (base_low, base_high) = _peak_bounds(run), _peak_bounds(baseline)
    if low == high and base_low == base_high:
        # The allocator chooses between free blocks by address, and the driver chooses addresses. So one program may
        # have a higher allocated peak in another process; what it requests does not change.
        before, after = (
            max(int(memory.history.curves.requested.max()) for memory in snapshot.devices.values())
            for snapshot in (baseline, run)
        )
        detail = (
            f"requested, by replay: {after:,} B, baseline {before:,} B ({after - before:+,} B);"
            f" allocated (depends on addresses too): {high:,} B, baseline {base_low:,} B"
        )
        return BudgetLine(BASELINE, "peak", after, before, "bytes", after <= before, detail)
    if high is None or base_high is None or (high > base_low and low <= base_high):
        return not_judged(BASELINE, "bytes", base_low, "the bounds of the two peaks overlap", "peak")
    return BudgetLine(BASELINE, "peak", high, base_low, "bytes", high <= base_low, "allocated, by replay")


def _judge_ranks(budgets: Budgets, ranks: RanksResult | str) -> Iterator[BudgetLine]:
    asked = [(MAX_WAIT, budgets.max_wait), (MAX_SKEW, budgets.max_skew)]
    for budget, limit in asked:
        if limit is None:
            continue
        if isinstance(ranks, str):
            yield not_judged(budget, "share", limit, ranks)
        elif ranks.why_unknown is not None:
            yield not_judged(budget, "share", limit, ranks.why_unknown)
        elif ranks.verdict.doubt == "untimed":
            yield not_judged(budget, "share", limit, "nobody timed all collectives (TORCH_NCCL_ENABLE_TIMING=1 does)")
        elif budget == MAX_WAIT:
            share = ranks.waiting_ns / max(ranks.step_ns, 1)
            compared = sum(rank.waiting_ns is not None for rank in ranks.ranks)
            detail = f"the mean of {compared} ranks in collectives, from their arrival to that of the last"
            yield BudgetLine(budget, None, share, limit, "share", share <= limit, detail)
        else:
            share = ranks.verdict.most_ns / max(ranks.step_ns, 1)
            detail = f"rank {ranks.verdict.most_rank} costs the others most in the median step"
            yield BudgetLine(budget, None, share, limit, "share", share <= limit, detail)
