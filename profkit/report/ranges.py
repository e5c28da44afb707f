"""Print the tree of ranges."""

from __future__ import annotations

from profkit.analysis.range_tree import RangeRow, RangesResult
from profkit.analysis.self_check import SelfCheck
from profkit.report.formats import (
    Column,
    Format,
    Table,
    render_csv,
    render_json,
    render_latex,
    render_markdown,
    render_table,
)
from profkit.report.self_check import check_to_dict, check_warnings, failure_lines
from profkit.report.units import format_ns, format_share

_COLUMNS = (
    Column("range", "path", right=False, flexible=True),
    Column("count", "instances"),
    Column("wall", "wall_ns"),
    Column("kernel time", "kernel_time_ns"),
    Column("busy", "busy_ns"),
    Column("share", "share"),
    Column("kernels", "kernel_count"),
)


def render_ranges(result: RangesResult, check: SelfCheck, style: Format = "table", *, full_names: bool = False) -> str:
    """Return the tree as text; ``share`` is of all kernel time in the capture."""
    if style == "json":
        data = result.to_dict()
        data["warnings"] = [*data["warnings"], *check_warnings(check)]
        return render_json({**data, "self_check": check_to_dict(check)})
    table = _build_table(result, indented=style == "table")
    if style == "csv":
        return render_csv(table)
    if style == "latex":
        return "\n".join([*(f"% {line}" for line in failure_lines(check)), render_latex(table)])
    if style == "markdown":
        return "\n\n".join([*failure_lines(check), render_markdown(table)])
    kind = "operator self time" if result.measure == "cpu-operator" else "kernel time"
    books = f"share is of all {kind} in the capture: {result.total_ns:,} ns; a nested range counts in those around it"
    if not result.total_ns:
        books = "no GPU work was recorded: wall times alone"
    return "\n\n".join(["\n".join(failure_lines(check))] * check.failed + [render_table(table, full=full_names), books])


def _build_table(result: RangesResult, *, indented: bool) -> Table:
    cells, values = [], []
    for row in result.ranges:
        share = row.kernel_time_ns / result.total_ns if result.total_ns else 0.0
        values.append([getattr(row, column.key, share) for column in _COLUMNS])
        cells.append(
            [
                _label(row) if indented else row.path,
                f"{row.instances:,}",
                format_ns(row.wall_ns),
                format_ns(row.kernel_time_ns),
                format_ns(row.busy_ns),
                format_share(share) if result.total_ns else "–",
                f"{row.kernel_count:,}",
            ]
        )
    return Table(_COLUMNS, cells, values)


def _label(row: RangeRow) -> str:
    depth = row.path.replace("\\/", "").count("/")
    return " " * depth + row.name + (f" [{row.domain}]" if row.domain else "")
