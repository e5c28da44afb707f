"""The ranks of a distributed run beside each other: a table, which of them is slow, and the books over them."""

from __future__ import annotations

from profkit.analysis.kernels import KernelRow, KernelsResult
from profkit.analysis.ranks import RankRow
from profkit.report.formats import Column, Table
from profkit.report.units import format_ns, format_share

MOST_COLUMNS = 4
"""So many ranks get a column each in the table of kernels; of more it has the least, the median and the most."""


def are_compared(result: KernelsResult) -> bool:
    """Return whether there are ranks to put beside each other."""
    return len(result.ranks) > 1


def build_rank_table(result: KernelsResult) -> Table:
    """Return one line a rank; under a range, wall time is that of one instance."""
    of_gpu = result.measure == "gpu-kernel"
    columns = (
        Column("rank", "rank"),
        Column("GPU", "device") if of_gpu else Column("pid", "process"),
        Column("wall" if result.range is None else "wall/inst.", "wall_ns"),
        Column("kernel time" if of_gpu else "self time", "kernel_time_ns"),
        Column("busy", "busy_ns"),
        Column("communication", "communication_ns"),
        Column("the rest", "own_ns"),
        Column("kernels" if of_gpu else "operators", "kernel_count"),
    )
    cells = [
        [
            str(row.rank),
            str(row.process if not of_gpu else "–" if row.device is None else row.device),
            format_ns(row.wall_ns // (row.instances or 1)),
            *map(format_ns, (row.kernel_time_ns, row.busy_ns, row.communication_ns, row.own_ns)),
            f"{row.kernel_count:,}",
        ]
        for row in result.ranks
    ]
    return Table(columns, cells, [])


def rank_lines(result: KernelsResult) -> list[str]:
    """Return how the ranks are known, which of them is slow and by what rule."""
    lines = [f"ranks are {result.rank_evidence}"]
    slowest = _slowest(result)
    if slowest is None:
        return lines
    least = min(result.ranks, key=lambda row: row.own_ns)
    kind = "kernel time" if result.measure == "gpu-kernel" else "self time"
    more = f"{format_share(slowest.own_ns / least.own_ns - 1)} more" if least.own_ns else "more"
    lines.append(
        f"slowest is rank {slowest.rank}: {format_ns(slowest.own_ns)} outside communication,"
        f" {more} than rank {least.rank}"
    )
    lines.append(f"the rule: most {kind} outside communication, where the other ranks wait")
    awaited = min(result.ranks, key=lambda row: row.communication_ns)
    # Kernels beside a collective that waits are slowed by it: who lags less than it waits is no straggler.
    if slowest.own_ns - awaited.own_ns < slowest.communication_ns - awaited.communication_ns:
        shortest = format_ns(awaited.communication_ns)
        lines.append(f"yet the others wait for rank {awaited.rank}: it is the least in communication, {shortest}")
    return lines


def rank_books(result: KernelsResult) -> list[str]:
    """Return the line that closes the books over the ranks, in nanoseconds."""
    if not are_compared(result):
        return []
    total = sum(row.kernel_time_ns for row in result.ranks)
    other = result.total_ns - total
    rest = f" + other processes {other:,}" if other else ""
    if len(result.ranks) > MOST_COLUMNS:
        return [f"ranks     {len(result.ranks)} ranks {total:,}{rest} = {result.total_ns:,} ns"]
    each = " + ".join(f"rank {row.rank} {row.kernel_time_ns:,}" for row in result.ranks)
    return [f"ranks     {each}{rest} = {result.total_ns:,} ns"]


def rank_columns(result: KernelsResult) -> list[Column]:
    """Return the columns of the table of kernels that compare ranks."""
    if len(result.ranks) <= MOST_COLUMNS:
        return [Column(f"rank {row.rank}", f"rank_{row.rank}_ns") for row in result.ranks]
    slowest = _slowest(result)
    some = [Column("least", "rank_least_ns"), Column("median", "rank_median_ns"), Column("most", "rank_most_ns")]
    return some + ([Column(f"rank {slowest.rank}", f"rank_{slowest.rank}_ns")] if slowest is not None else [])


def rank_value(result: KernelsResult, row: KernelRow, key: str) -> int:
    """Return what a column of `rank_columns` or `exact_rank_columns` says of a line."""
    from statistics import median  # for a start this slow, only where there are ranks

    each = row.per_rank_ns
    found = {"rank_least_ns": min(each), "rank_median_ns": round(median(each)), "rank_most_ns": max(each)}
    found |= {f"rank_{rank.rank}_ns": time for rank, time in zip(result.ranks, each, strict=True)}
    return found[key]


def exact_rank_columns(result: KernelsResult) -> list[Column]:
    """Return a column a rank, however many there are."""
    return [Column(f"rank {row.rank}", f"rank_{row.rank}_ns") for row in result.ranks]


def _slowest(result: KernelsResult) -> RankRow | None:
    return next((row for row in result.ranks if row.rank == result.slowest_rank), None)
