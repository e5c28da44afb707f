"""What is said of ranks whose record is lost, ends early, or is of another time than those of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profkit.analysis.ranks.comparison import RanksResult
from profkit.findings import Finding
from profkit.report.units import format_count


def find_lost(result: RanksResult) -> Iterator[Finding]:
    """Yield which ranks are lost and why, and which have a record that ends before those of the others."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(result.lost.items()):
        by_reason.setdefault(reason, []).append(rank)
    for reason, ranks in by_reason.items():
        yield Finding("lost-rank", f"{_name_ranks(ranks)}: {reason}")
    if result.apart:
        what = "recorded more than a minute before or after the others: a machine's clock is off, or it is another run"
        yield Finding("recorded-apart", f"{_name_ranks(result.apart)}: {what}")
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(result.short.items()):
        by_count.setdefault(count, []).append(rank)
    for count, ranks in by_count.items():
        held = f"the record holds {format_count(count, 'step')}, others up to {result.recorded_step_count:,}"
        lost = {one.rank for one in result.ranks if one.waiting_ns is None}
        left_out = "; too few to compare" if lost.issuperset(ranks) else ""
        yield Finding("short-record", f"{_name_ranks(ranks)}: {held}{left_out}")


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks, those in a row as their first and last: ``ranks 3, 8-63``."""
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1][1:] = [rank]
        else:
            rows.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join('-'.join(map(str, row)) for row in rows)}"
