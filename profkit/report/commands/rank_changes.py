"""What changed between the ranks of two runs: each group's collectives, and who is late."""

from __future__ import annotations

from typing import Any

from profkit.analysis.ranks.bandwidth import GroupRow
from profkit.analysis.ranks.comparison import RanksResult
from profkit.report.commands.late_rank import describe_ranks
from profkit.report.document import Column, Lines, Table
from profkit.report.units import NS, NUMBER, TEXT

_SENTENCES = 3
"""The step, who is late, and why."""

_Key = tuple[str, int, str, str | None]


def compare_groups(before: RanksResult, after: RanksResult) -> tuple[Table, Lines, dict[str, Any]]:
    """Return what stands under a comparison of two runs of several ranks, and the same for JSON; per step."""
    sides = [{_key(row): row for row in one.groups} for one in (before, after)]
    rows, shown = [], []
    for key in sorted(sides[0].keys() | sides[1].keys(), key=str):
        was, now = (_per_step(side.get(key), one) for side, one in zip(sides, (before, after), strict=True))
        named = dict(zip(("group", "rank_count", "kind", "dtype"), key, strict=True))
        rows.append({**named, "before": was, "after": now})
        cells = {f"{name}_before": (was or {}).get(name) for name in _SHOWN}
        sizes = {size for group, size, *_ in (*sides[0], *sides[1]) if group == key[0]}
        label = f"{key[0]} ({key[1]})" if len(sizes) > 1 else key[0]
        shown.append({**named, "group": label, **cells, **{f"{name}_after": (now or {}).get(name) for name in _SHOWN}})
    table = Table(_COLUMNS, shown, title="Collectives by group, per step")
    lines = [f"before: {line}" for line in describe_ranks(before)[:_SENTENCES]]
    lines += [f"after: {line}" for line in describe_ranks(after)[:_SENTENCES]]
    return table, Lines(lines, title="Ranks"), {"groups": rows}


_SHOWN = ("count", "wire_ns", "waiting_ns")
_COLUMNS = (
    Column("group", "group", TEXT),
    Column("kind", "collective", TEXT),
    Column("count_before", "times", NUMBER),
    Column("count_after", "→", NUMBER),
    Column("wire_ns_before", "at the wire", NS),
    Column("wire_ns_after", "→", NS),
    Column("waiting_ns_before", "waiting", NS),
    Column("waiting_ns_after", "→", NS),
)


def _key(row: GroupRow) -> _Key:
    return row.group, row.rank_count, row.kind, row.dtype


def _per_step(row: GroupRow | None, ranks: RanksResult) -> dict[str, float | int | None] | None:
    if row is None:
        return None
    steps = max(ranks.step_count, 1)
    return {
        "count": row.count / steps,
        "byte_count": None if row.byte_count is None else round(row.byte_count / steps),
        "wire_ns": None if row.wire_ns is None else round(row.wire_ns / steps),
        "bus_bandwidth": row.bus_bandwidth,
        "exposed_ns": None if row.exposed_ns is None else round(row.exposed_ns / steps),
        "waiting_ns": round(row.waiting_ns / steps),
    }
