"""What explains the difference of two peaks: the parts that ``profkit compare`` shows."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from profkit.analysis.memory.compare import Comparison, Part
from profkit.report.document import Column, Lines, Table
from profkit.report.units import COUNT, TEXT, Unit, format_bytes, format_count

TOP_PARTS = 15

_SIZE = Unit(lambda value: f"{'+' if value > 0 else ''}{format_bytes(value)}")
_KIND = Unit(lambda kind: "lost to rounding" if kind == "padding" else kind, right=False)
_COLUMNS = (
    Column("bytes", "change", _SIZE),
    Column("kind", "kind", _KIND),
    Column("count", "count", COUNT),
    Column("stack", "tensor, or your line", TEXT, flexible=True),
)


def memory_parts(comparison: Comparison, top: int = TOP_PARTS) -> list[Table | Lines]:
    """Return the two peaks, and the ``top`` largest parts of their difference."""
    if _is_same(comparison):
        return [_head(comparison)]
    kinds = [{"bytes": size, "kind": kind} for kind, size in comparison.by_kind.items()]
    kinds.append({"bytes": comparison.difference_bytes, "kind": "all"})
    changed = [part for part in comparison.parts if part.bytes]
    rest: dict[str, Any] | None = None
    if hidden := changed[top:]:
        rest = {
            "bytes": sum(part.bytes for part in hidden),
            "count": sum(part.count for part in hidden),
            "stack": format_count(len(hidden), "smaller place"),
        }
    parts = Table(_COLUMNS, [_row(part) for part in changed[:top]], rest=rest)
    return [_head(comparison), Table(_COLUMNS[:2], kinds), parts]


def memory_table(comparison: Comparison) -> Table:
    """Return every part of the difference, for CSV."""
    return Table(_COLUMNS, [_row(part) for part in comparison.parts])


def _head(comparison: Comparison) -> Lines:
    difference = f"{_SIZE.show(comparison.difference_bytes)} ({comparison.difference_bytes:+,} B)"
    change = f"the peak changed by {difference}"
    if _is_same(comparison):
        count = format_count(sum(part.count for part in comparison.parts), "allocation")
        change = f"no change in {count}: both peaks consist of the same ones"
    return Lines(
        [
            f"before {format_bytes(comparison.before_peak_bytes):>11}  {PurePath(comparison.before).name}",
            f"after  {format_bytes(comparison.after_peak_bytes):>11}  {PurePath(comparison.after).name}",
            f"{change}{'' if comparison.exact else '; at least one of the peaks is not proven'}",
        ],
        "head",
    )


def _is_same(comparison: Comparison) -> bool:
    return all(part.kind == "same" for part in comparison.parts)


def _row(part: Part) -> dict[str, Any]:
    name = f"{part.label} and {part.owner_count - 1:,} more" if part.owner_count > 1 else part.label
    return {"bytes": part.bytes, "kind": part.kind, "count": part.count, "stack": name}
