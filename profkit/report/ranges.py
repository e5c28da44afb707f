"""Print the tree of ranges."""

from __future__ import annotations

from profkit.analysis.checks.self_check import SelfCheck
from profkit.analysis.range_tree import RangeRow, RangesResult
from profkit.report.document import Document, render_document
from profkit.report.formats import Column, Format, Table, render_csv, render_json
from profkit.report.self_check import check_to_dict, check_warnings, failure_lines
from profkit.report.units import format_ns, format_share

_SHARE = "share_of_capture"

_COLUMNS = (
    Column("range", "path", right=False, flexible=True),
    Column("count", "instances"),
    Column("wall", "wall_ns"),
    Column("kernel time", "kernel_time_ns"),
    Column("busy", "busy_ns"),
    Column("share", _SHARE),
    Column("kernels", "kernel_count"),
)


def render_ranges(
    result: RangesResult,
    check: SelfCheck,
    style: Format = "table",
    *,
    numbered: bool = True,
    full_names: bool = False,
) -> str:
    """Return the tree as text; ``share`` is of all kernel time in the capture.

    ``numbered`` is what the tree was made with: without it, names that differ in a number are one line.
    """
    if style == "json":
        data = result.to_dict()
        data["warnings"] = [*data["warnings"], *check_warnings(check)]
        return render_json({**data, "self_check": check_to_dict(check)})
    if style == "csv":
        return render_csv(_build_table(result, with_domain=True))
    table = _build_table(result, indented=style == "table", with_domain=any(row.domain for row in result.ranges))
    document = Document([table], failure_lines(check), notes=books(result, numbered))
    return render_document(document, style, full_names=full_names)


def books(result: RangesResult, numbered: bool) -> list[str]:
    """Return the lines that say what share is of, and what a line with an asterisk is."""
    lines = ["no GPU work was recorded: wall times alone"]
    if result.total_ns:
        kind = "operator self time" if result.measure == "cpu-operator" else "kernel time"
        whole = "in the capture" if result.rank is None else f"of rank {result.rank}"
        lines = [f"share is of all {kind} {whole}: {result.total_ns:,} ns; a nested range counts in those around it"]
    if not numbered and any("*" in row.name for row in result.ranges):
        lines.append("* stands for a number: one line for all its ranges; --numbered shows each name by itself")
    return lines


def _build_table(result: RangesResult, *, with_domain: bool, indented: bool = False) -> Table:
    """Return the table; on a screen the domain stands beside the name, elsewhere in a column of its own."""
    domain = (Column("domain", "domain", right=False),) if with_domain and not indented else ()
    columns = (_COLUMNS[0], *domain, *_COLUMNS[1:])
    rows = [[_value(result, row, column.key) for column in columns] for row in result.ranges]
    cells = [[_cell(column.key, value) for column, value in zip(columns, values, strict=True)] for values in rows]
    if indented:
        cells = [
            [indent_name(row.path, row.name, row.domain), *line[1:]]
            for row, line in zip(result.ranges, cells, strict=True)
        ]
    return Table(columns, cells, rows)


def _value(result: RangesResult, row: RangeRow, key: str) -> object:
    if key == _SHARE:
        return row.kernel_time_ns / result.total_ns if result.total_ns else None
    return getattr(row, key)


def _cell(key: str, value: object) -> str:
    if key == _SHARE:
        return "–" if value is None else format_share(float(str(value)))
    if key.endswith("_ns"):
        return format_ns(int(str(value)))
    return f"{value:,}" if isinstance(value, int) else str(value)


def indent_name(path: str, name: str, domain: str) -> str:
    """Return a range's name as the tree shows it: moved in by its depth, its domain behind it."""
    depth = path.replace("\\/", "").count("/")
    return " " * depth + name + (f" [{domain}]" if domain else "")
