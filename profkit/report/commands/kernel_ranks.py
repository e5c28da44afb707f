"""The ranks of a distributed run next to each other in `profkit kernels`, and how their times add up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from profkit.analysis.kernels.summary import KernelRow, KernelsResult
from profkit.report.document import Column, Table
from profkit.report.units import Unit, count_over, ns_over

if TYPE_CHECKING:
    from profkit.analysis.ranks.comparison import RanksResult

MOST_COLUMNS = 4
"""Up to this many ranks get a column each in the table of kernels; of more it shows the least, median and most."""

_PLAIN = Unit(str)
"""For numbers that count nothing: ranks, devices, process ids."""


def are_compared(result: KernelsResult) -> bool:
    """Return whether there are several ranks to compare."""
    return len(result.ranks) > 1


def rank_table(result: KernelsResult, steps: int | None) -> Table:
    """Return one line per rank; times are per step if ``steps`` is given."""
    on_gpu = result.measure == "gpu-kernel"
    columns = (
        Column("rank", "rank", _PLAIN),
        Column("device", "GPU", _PLAIN) if on_gpu else Column("process", "pid", _PLAIN),
        Column("wall_ns", "recorded" if result.range is None else "Python time", ns_over(steps)),
        Column("kernel_time_ns", "kernel time" if on_gpu else "self time", ns_over(steps)),
        Column("busy_ns", "GPU busy" if on_gpu else "busy", ns_over(steps)),
        Column("communication_ns", "communicating", ns_over(steps)),
        Column("own_ns", "computing", ns_over(steps)),
        Column("kernel_count", "kernels" if on_gpu else "operators", count_over(steps)),
    )
    return Table(columns, [{**vars(row), "own_ns": row.own_ns} for row in result.ranks])


def rank_head(result: KernelsResult, compared: RanksResult | None) -> list[str]:
    """Return which rank is late, and how the ranks are known if that was a guess."""
    is_guess = result.rank_evidence is not None and result.rank_evidence.startswith("guessed")
    lines = [f"ranks are {result.rank_evidence}"] * is_guess
    if compared is not None:
        from profkit.report.commands.late_rank import describe_verdict  # few captures are of several ranks

        lines += describe_verdict(compared)[:1]
    return lines


def sum_ranks(result: KernelsResult) -> list[str]:
    """Return the line that adds up the ranks, in nanoseconds."""
    if not are_compared(result):
        return []
    total = sum(row.kernel_time_ns for row in result.ranks)
    parts = [f"rank {row.rank} {row.kernel_time_ns:,}" for row in result.ranks]
    if len(parts) > MOST_COLUMNS:
        parts = [f"{len(parts)} ranks {total:,}"]
    if result.total_ns > total:
        parts.append(f"other processes {result.total_ns - total:,}")
    return [f"Ranks: {result.total_ns:,} ns = {' + '.join(parts)}"]


def rank_columns(result: KernelsResult, steps: int | None, late: int | None) -> list[Column]:
    """Return the columns of the table of kernels that compare ranks; ``late`` is the rank that is, if one is."""
    unit = ns_over(steps)
    if len(result.ranks) <= MOST_COLUMNS:
        return [Column(f"rank_{row.rank}_ns", f"rank {row.rank}", unit) for row in result.ranks]
    some = [Column(f"rank_{word}_ns", word, unit) for word in ("least", "median", "most")]
    return some + ([] if late is None else [Column(f"rank_{late}_ns", f"rank {late}", unit)])


def rank_cells(result: KernelsResult, row: KernelRow) -> dict[str, Any]:
    """Return the values of a line that `rank_columns` may show."""
    from statistics import median  # slow to load, and needed only where there are ranks

    each = row.per_rank_ns
    cells = {f"rank_{rank.rank}_ns": time for rank, time in zip(result.ranks, each, strict=True)}
    return {**cells, "rank_least_ns": min(each), "rank_median_ns": round(median(each)), "rank_most_ns": max(each)}
