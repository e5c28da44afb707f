"""Judge a run against an earlier one: no measurable slowdown, and no higher peak of requested memory."""

from __future__ import annotations

from collections.abc import Iterator

from profkit.analysis.compare.bootstrap import FEWEST, Verdict
from profkit.analysis.compare.budget_lines import BudgetLine, broken
from profkit.analysis.compare.capture import OpenedCapture
from profkit.analysis.compare.comparison import CaptureComparison, compare_captures
from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.errors import UsageError

BASELINE = "baseline"


def judge_against(
    run: OpenedCapture, baseline: OpenedCapture, *, allowed_slowdown: float = 0.0, force: bool = False
) -> Iterator[BudgetLine]:
    """Yield whether a run is no slower than its baseline, and needs no more memory; what neither recorded is left out.

    Slower are the unprofiled steps if both runs have them, else the kernel time per step: measurably, that is if the
    whole bootstrap interval of the change lies above 0 (above ``allowed_slowdown`` of the baseline's time). Memory is
    the peak of requested bytes; if a replay is not exact, the bounds of the allocated ones.
    """
    try:
        compared = compare_captures(baseline, run, force=force)
    except UsageError as error:
        yield broken(BASELINE, "ns", None, str(error))
        return
    if compared.clean is not None or run.trace is not None or baseline.trace is not None:
        yield from _judge_time(compared, allowed_slowdown)
    if run.snapshot is not None and baseline.snapshot is not None:
        yield _judge_peak(run.snapshot, baseline.snapshot)
    elif (run.snapshot is None) != (baseline.snapshot is None):
        yield broken(BASELINE, "bytes", None, "only one of the two recorded memory", "peak")


def peak_bounds(snapshot: OpenedSnapshot) -> tuple[int, int | None]:
    """Return between what the highest allocated peak of all devices lies; the upper end may be unknown."""
    histories = [memory.history for memory in snapshot.devices.values()]
    bounds = [history.bounds or (history.allocated_peak_bytes, history.allocated_peak_bytes) for history in histories]
    highs = [high for _, high in bounds if high is not None]
    return max(low for low, _ in bounds), max(highs) if len(highs) == len(bounds) else None


def _requested_peak(snapshot: OpenedSnapshot) -> int:
    return max(int(memory.history.curves.requested.max()) for memory in snapshot.devices.values())


def _judge_time(compared: CaptureComparison, allowed: float) -> Iterator[BudgetLine]:
    if compared.clean is not None and compared.clean.changes:
        counts = f"medians of {compared.clean.samples[0]} and {compared.clean.samples[1]} unprofiled steps"
        for change in compared.clean.changes:
            if change.is_whole_step:
                sizes = (change.before_ns, change.after_ns, change.change_ns, change.low_ns)
                yield _judge_change(change.name, sizes, change.verdict, counts, allowed)
    elif compared.time is not None and compared.time.unit == "step":
        whole, samples = compared.time.kernel_time, compared.time.samples
        before, after = round(whole.before_ns / samples[0]), round(whole.after_ns / samples[1])
        counts = f"means of {samples[0]} and {samples[1]} profiled steps"
        sizes = (before, after, whole.change_ns, whole.low_ns)
        yield _judge_change("kernel time", sizes, whole.verdict, counts, allowed)
    else:
        yield broken(BASELINE, "ns", None, "the two have no steps to compare, neither unprofiled nor profiled")


def _judge_change(
    name: str, sizes: tuple[int, int, int, int | None], verdict: Verdict, counts: str, allowed: float
) -> BudgetLine:
    before, after, change, low = sizes
    limit = round((1 + allowed) * before)
    if verdict == "unknown":
        return broken(BASELINE, "ns", limit, f"{counts}: an interval needs {FEWEST} a side", name)
    slower = verdict == "more" and low is not None and low > allowed * before
    said = {"more": "measurably slower", "less": "measurably faster"}.get(verdict, verdict)
    detail = f"{said} by {abs(change):,} ns" if verdict in ("more", "less") else said
    if allowed:
        detail += f"; {allowed:.1%} over {before:,} ns is let through"
    return BudgetLine(BASELINE, name, after, limit, "ns", not slower, f"{detail}; {counts}")


def _judge_peak(run: OpenedSnapshot, baseline: OpenedSnapshot) -> BudgetLine:
    (low, high), (base_low, base_high) = peak_bounds(run), peak_bounds(baseline)
    if low == high and base_low == base_high:
        # Which of two free blocks is taken goes by their addresses, and those are the driver's: the same program may
        # hold a larger block, and have a higher allocated peak, in another process. What it requests is its own.
        before, after = _requested_peak(baseline), _requested_peak(run)
        detail = (
            f"requested, by replay: {after:,} B against {before:,} B ({after - before:+,} B);"
            f" allocated, which placement changes too: {high:,} B against {base_low:,} B"
        )
        return BudgetLine(BASELINE, "peak", after, before, "bytes", after <= before, detail)
    if high is None or base_high is None or (high > base_low and low <= base_high):
        return broken(BASELINE, "bytes", base_low, "the peaks are not proven, and their bounds overlap", "peak")
    return BudgetLine(BASELINE, "peak", high, base_low, "bytes", high <= base_low, "allocated, by replay")
