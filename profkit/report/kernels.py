"""Print the share table of ``profkit kernels`` with its books under it."""

from __future__ import annotations

from dataclasses import asdict, replace

from profkit.analysis.kernels import KernelRow, KernelsResult
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
from profkit.report.kernel_names import simplify_name
from profkit.report.self_check import check_to_dict, check_warnings, failure_lines
from profkit.report.units import format_ns, format_share

_SORTS = {"total": "total_ns", "count": "count", "mean": "mean_ns", "min": "min_ns", "max": "max_ns", "name": "name"}
SORTS = tuple(_SORTS)

_EXACT = tuple(Column(field, field) for field in KernelRow.__dataclass_fields__)


def render_kernels(
    result: KernelsResult,
    check: SelfCheck,
    style: Format = "table",
    *,
    sort: str = "total",
    top: int | None = None,
    full_names: bool = False,
) -> str:
    """Return the result as text: the table, what share is of, the evidence and the ledger, warnings around it."""
    rows = sort_rows(result.kernels, sort)
    if style == "json":
        data = result.to_dict() | {"kernels": [asdict(row) for row in rows[:top]], "self_check": check_to_dict(check)}
        data["warnings"] = [*data["warnings"], *check_warnings(check)]
        return render_json(data)
    if style == "csv":
        keys = [column.key for column in _EXACT]
        return render_csv(Table(_EXACT, [], [[getattr(row, key) for key in keys] for row in rows[:top]]))
    failures = failure_lines(check)
    table = _build_table(result, rows[:top], rest=rows[top:] if top is not None else [], full_names=full_names)
    if style == "latex":
        return "\n".join([*(f"% {line}" for line in failures + books(result)), render_latex(table)])
    instances = [build_instance_table(result)] if result.per_instance else []
    if style == "markdown":
        parts = [*failures, f"**{head_line(result)}**", *map(render_markdown, [table, *instances])]
        return "\n\n".join([*parts, "\n".join(f"- {line}" for line in books(result))])
    tables = [render_table(some, full=full_names) for some in (table, *instances)]
    return "\n\n".join([*["\n".join(failures)] * check.failed, head_line(result), *tables, "\n".join(books(result))])


def sort_rows(rows: tuple[KernelRow, ...], sort: str) -> list[KernelRow]:
    """Return the rows by one column, the largest first; names from A to Z."""
    field = _SORTS[sort]
    return sorted(rows, key=lambda row: getattr(row, field), reverse=sort != "name")


def noun(result: KernelsResult) -> str:
    """Return what the table counts."""
    return "operator" if result.measure == "cpu-operator" else "kernel"


def head_line(result: KernelsResult) -> str:
    """Return the range, its instances and the three times that must not be taken for one another."""
    what = "whole capture" if result.range is None else f"range {result.range!r}, {result.instances} instances"
    count = f"{result.kernel_count:,} {noun(result)}s"
    if result.graph_count:
        count += f" and {result.graph_count:,} CUDA graphs"
    time_name = "self time" if result.measure == "cpu-operator" else "kernel time"
    return (
        f"{what}: {count}\n{time_name} {format_ns(result.total_ns)}   "
        f"busy {format_ns(result.busy_ns)}   wall {format_ns(result.wall_ns)}"
    )


def books(result: KernelsResult) -> list[str]:
    """Return the lines that close the books: what share is of, the evidence, the capture's ledger, copies."""
    whole = "the whole capture's" if result.range is None else f"the {noun(result)} time under {result.range!r}:"
    lines = [f"share is of {whole} {result.total_ns:,} ns"]
    if result.range is None:
        lines[0] = f"share is of all {noun(result)} time in the capture: {result.total_ns:,} ns"
    evidence = result.range_evidence
    if evidence is not None:
        parts = [("direct", evidence.direct_ns), ("inferred", evidence.inferred_ns)]
        parts += [("sequence", evidence.sequence_ns)] if evidence.sequence_ns else []
        lines.append(f"evidence  {_sum_line(parts, result.total_ns)}")
    ledger = result.ledger
    parts = [
        ("direct", ledger.direct_ns),
        ("inferred", ledger.inferred_ns),
        ("ambiguous", ledger.ambiguous_ns),
        ("outside", ledger.outside_ns),
        ("no launch", ledger.no_launch_ns),
    ]
    shown = [part for part in parts if part[1] or part[0] in ("direct", "inferred", "outside")]
    lines.append(f"capture   {_sum_line(shown, ledger.total_ns)}")
    copies = result.copies
    if copies.memcpy_count or copies.memset_count:
        lines.append(
            f"beside it {copies.memcpy_count:,} copies {format_ns(copies.memcpy_ns)},"
            f" {copies.memset_count:,} sets {format_ns(copies.memset_ns)} (not in shares)"
        )
    return lines


def _sum_line(parts: list[tuple[str, int]], total_ns: int) -> str:
    return " + ".join(f"{name} {value:,}" for name, value in parts) + f" = {total_ns:,} ns"


def _build_table(
    result: KernelsResult, rows: list[KernelRow], rest: list[KernelRow] | None = None, *, full_names: bool = False
) -> Table:
    named = result.by == "kernel"
    per_instance = result.instances is not None
    heading = {"kernel": noun(result), "category": "category", "range": "range"}[result.by]
    columns = [
        Column("share", "share"),
        Column("total", "total_ns"),
        Column("count", "count"),
        # A mean over calls says little beside a time per instance; it stays in what is read by programs.
        *([Column("per inst.", "per_instance_ns")] if per_instance else [Column("mean", "mean_ns")]),
        *([Column("category", "category", right=False)] if named else []),
        Column(heading, "name", right=False, flexible=True),
    ]
    keys = [column.key for column in columns]
    simple = named and not full_names and result.measure == "gpu-kernel"
    shown = [replace(row, name=simplify_name(row.name)) if simple else row for row in rows]
    cells = [[_cell(key, _value(result, row, key)) for key in keys] for row in shown]
    if rest:
        total, count = sum(row.total_ns for row in rest), sum(row.count for row in rest)
        other: dict[str, object] = {
            "share": total / result.total_ns if result.total_ns else 0.0,
            "total_ns": total,
            "count": count,
        }
        other |= {"per_instance_ns": round(total / result.instances) if result.instances else None}
        other |= {"mean_ns": round(total / count), "category": "", "name": f"({len(rest)} more)"}
        cells.append([_cell(key, other[key]) for key in keys])
    return Table(tuple(columns), cells, [])


def _value(result: KernelsResult, row: KernelRow, key: str) -> object:
    if key == "per_instance_ns":
        return round(row.total_ns / result.instances) if result.instances else None
    return getattr(row, key)


def build_instance_table(result: KernelsResult) -> Table:
    """Return one line per instance of the range."""
    keys = ("instance", "start_ns", "wall_ns", "kernel_time_ns", "busy_ns", "kernel_count")
    headings = ("instance", "start", "wall", "kernel time", "busy", "kernels")
    columns = tuple(Column(heading, key) for heading, key in zip(headings, keys, strict=True))
    values = [[getattr(row, key) for key in keys] for row in result.per_instance or ()]
    cells = [
        [format_ns(v) if key.endswith("_ns") else f"{v:,}" for key, v in zip(keys, line, strict=True)]
        for line in values
    ]
    return Table(columns, cells, values)


def _cell(key: str, value: object) -> str:
    if value is None:
        return "–"
    if key == "share":
        return format_share(float(str(value)))
    if key.endswith("_ns"):
        return format_ns(int(str(value)))
    return f"{value:,}" if isinstance(value, int) else str(value)
