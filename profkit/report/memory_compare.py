"""Print what explains the difference of two peaks."""

from __future__ import annotations

from pathlib import PurePath

from profkit.analysis.memory.compare import Comparison, Part
from profkit.report.formats import (
    Column,
    Format,
    Table,
    escape_markdown,
    make_visible,
    render_csv,
    render_json,
    render_latex,
    render_markdown,
    render_table,
)
from profkit.report.units import format_bytes, format_count

TOP_PARTS = 15

_COLUMNS = (
    Column("bytes", "bytes"),
    Column("kind", "kind", right=False),
    Column("count", "count"),
    Column("owner or stack", "stack", right=False, flexible=True),
)


def render_comparison(
    comparison: Comparison, style: Format = "table", *, top: int = TOP_PARTS, full_names: bool = False
) -> str:
    """Return the parts of the difference as text, the largest ``top`` of them on a screen and in documents."""
    if style == "json":
        return render_json(comparison.to_dict())
    if style == "csv":
        values = [(part.bytes, part.kind, part.count, _name(part)) for part in comparison.parts]
        return render_csv(Table(_COLUMNS, [], values))
    tables = [] if _is_same(comparison) else [_kind_table(comparison), _part_table(comparison, top)]
    heads = head_lines(comparison)
    if style == "latex":
        return "\n".join([*(f"% {line}" for line in heads), *map(render_latex, tables)])
    if style == "markdown":
        return "\n\n".join(["\n".join(f"- {escape_markdown(line)}" for line in heads), *map(render_markdown, tables)])
    return "\n\n".join(["\n".join(heads), *(render_table(table, full=full_names) for table in tables)])


def head_lines(comparison: Comparison) -> list[str]:
    """Return the two peaks and their difference, or that there is none in any allocation."""
    sign = "+" if comparison.difference_bytes > 0 else ""
    difference = f"{sign}{format_bytes(comparison.difference_bytes)} ({sign}{comparison.difference_bytes:,} B)"
    change = f"the peak changed by {difference}"
    if _is_same(comparison):
        count = format_count(sum(part.count for part in comparison.parts), "allocation")
        change = f"no change in {count}: the same ones make up both peaks"
    lines = [
        f"before {format_bytes(comparison.before_peak_bytes):>11}  {PurePath(comparison.before).name}",
        f"after  {format_bytes(comparison.after_peak_bytes):>11}  {PurePath(comparison.after).name}",
        f"{change}{'' if comparison.exact else '; not both peaks are proven'}",
    ]
    return list(map(make_visible, lines))


def _is_same(comparison: Comparison) -> bool:
    """Whether all that is at one peak is at the other, of the same sizes."""
    return all(part.kind == "same" for part in comparison.parts)


def _kind_table(comparison: Comparison) -> Table:
    cells = [(format_bytes(size), kind) for kind, size in comparison.by_kind.items()]
    cells.append((format_bytes(comparison.difference_bytes), "all"))
    return Table(_COLUMNS[:2], cells, [])


def _part_table(comparison: Comparison, top: int) -> Table:
    changed = [part for part in comparison.parts if part.bytes]
    cells = [_cells(part) for part in changed[:top]]
    if rest := changed[top:]:
        total, count = sum(part.bytes for part in rest), sum(part.count for part in rest)
        cells.append((format_bytes(total), "", f"{count:,}", f"({len(rest)} more)"))
    return Table(_COLUMNS, cells, [])


def _cells(part: Part) -> tuple[str, str, str, str]:
    return format_bytes(part.bytes), part.kind, f"{part.count:,}", _name(part)


def _name(part: Part) -> str:
    return f"{part.label} and {part.owner_count - 1:,} more" if part.owner_count > 1 else part.label
