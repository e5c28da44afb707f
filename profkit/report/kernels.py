"""Print the share table of ``profkit kernels`` with its books under it."""

from __future__ import annotations

from dataclasses import asdict, replace

from profkit.analysis.checks.self_check import SelfCheck
from profkit.analysis.kernels import KernelRow, KernelsResult
from profkit.report.formats import Column, Format, Table, render_csv, render_json
from profkit.report.old_document import Document, render_document
from profkit.report.ranks import (
    are_compared,
    build_rank_table,
    exact_rank_columns,
    rank_books,
    rank_columns,
    rank_lines,
    rank_value,
)
from profkit.report.self_check import check_to_dict, check_warnings, failure_lines
from profkit.report.text import simplify_name
from profkit.report.units import format_count, format_ns, format_share

_SORTS = {"total": "total_ns", "count": "count", "mean": "mean_ns", "min": "min_ns", "max": "max_ns", "name": "name"}
SORTS = tuple(_SORTS)

_RANKS_BESIDE_CATEGORY = 2

_EXACT = tuple(Column(field, field) for field in KernelRow.__dataclass_fields__ if field != "per_rank_ns")


def render_kernels(
    result: KernelsResult,
    check: SelfCheck,
    style: Format = "table",
    *,
    sort: str = "total",
    top: int | None = None,
    full_names: bool = False,
) -> str:
    """Return the result as text: the table, what share is of, the evidence and the ledger, warnings around it.

    CSV is one table: the instances where they were asked for, else the kernels.
    """
    rows = sort_rows(result.kernels, sort)
    shown, rest = rows[:top], rows[top:] if top is not None else []
    if style == "json":
        data = result.to_dict() | {"kernels": [asdict(row) for row in shown], "rest": None}
        if rest:
            data["rest"] = asdict(_sum_rows(result, rest))
        data["warnings"] = [*data["warnings"], *check_warnings(check)]
        return render_json(data | {"self_check": check_to_dict(check)})
    instances = [build_instance_table(result)] if result.per_instance is not None else []
    if style == "csv":
        return render_csv(instances[0] if instances else _exact_table(result, shown))
    tables = [_build_table(result, shown, rest, full_names=full_names), *instances]
    if are_compared(result):
        tables.insert(0, build_rank_table(result))
    document = Document(tables, failure_lines(check), head_lines(result), books(result))
    return render_document(document, style, full_names=full_names)


def sort_rows(rows: tuple[KernelRow, ...], sort: str) -> list[KernelRow]:
    """Return the rows by one column, the largest first; names from A to Z."""
    field = _SORTS[sort]
    return sorted(rows, key=lambda row: getattr(row, field), reverse=sort != "name")


def noun(result: KernelsResult) -> str:
    """Return what the table counts."""
    return "operator" if result.measure == "cpu-operator" else "kernel"


def subject(result: KernelsResult) -> str:
    """Return what the table is of: the capture or a range, and the filters that leave a part of it."""
    if result.range is not None:
        what = f"range {result.range!r}, {format_count(result.instances or 0, 'instance')}"
        what += _of_rank(result)
    else:
        what = f"part of {scope(result)}" if filter_words(result) else f"whole capture{_of_rank(result)}"
    return ", ".join([what, *filter_words(result)])


def scope(result: KernelsResult) -> str:
    """Return what the trace is of: the capture, or one rank of it."""
    return "the capture" if result.filters.rank is None else f"rank {result.filters.rank}"


def _of_rank(result: KernelsResult) -> str:
    return "" if result.filters.rank is None else f" of rank {result.filters.rank}"


def filter_words(result: KernelsResult) -> list[str]:
    """Return the filters that were set, in words."""
    filters = result.filters
    named = (("instance", filters.instance), ("process", filters.process), ("device", filters.device))
    words = [f"{name} {value} only" for name, value in named if value is not None]
    return words + ([f"without {filters.exclude!r}"] if filters.exclude is not None else [])


def count_line(result: KernelsResult) -> str:
    """Return how many kernels (or operators) and graphs the table counts."""
    count = format_count(result.kernel_count, noun(result))
    return count + (f" and {format_count(result.graph_count, 'CUDA graph')}" if result.graph_count else "")


def head_lines(result: KernelsResult) -> list[str]:
    """Return what the table is of, and the three times that must not be taken for one another."""
    time_name = "self time" if result.measure == "cpu-operator" else "kernel time"
    # Without a range there is no wall time of a part: it is from the first to the last thing recorded.
    wall_name = f"wall of {scope(result)}" if result.range is None and filter_words(result) else "wall"
    return [
        f"{subject(result)}: {count_line(result)}",
        f"{time_name} {format_ns(result.total_ns)}   "
        f"busy {format_ns(result.busy_ns)}   {wall_name} {format_ns(result.wall_ns)}",
        *(rank_lines(result) if result.ranks else []),
    ]


def books(result: KernelsResult) -> list[str]:
    """Return the lines that close the books: what share is of, the evidence, the capture's ledger, copies."""
    filters = filter_words(result)
    if result.range is not None:
        of = [] if result.filters.rank is None else [f"{scope(result)} only"]
        whole = ", ".join([f"the {noun(result)} time under {result.range!r}", *of, *filters])
    elif filters:
        whole = f"the {noun(result)} time in this part of {scope(result)} ({', '.join(filters)})"
    else:
        whole = f"all {noun(result)} time {'in' if result.filters.rank is None else 'of'} {scope(result)}"
    lines = [f"share is of {whole}: {result.total_ns:,} ns"]
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
    lines.append(f"{scope(result).removeprefix('the '):<9} {_sum_line(shown, ledger.total_ns)}")
    lines += rank_books(result)
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
    result: KernelsResult, rows: list[KernelRow], rest: list[KernelRow], *, full_names: bool = False
) -> Table:
    named, compared = result.by == "kernel", are_compared(result)
    has_category = named and len(result.ranks) <= _RANKS_BESIDE_CATEGORY
    per_instance = result.instances is not None
    heading = noun(result) if named else result.by
    columns = [
        Column("share", "share"),
        Column("total", "total_ns"),
        # Beside columns of ranks there is no room for these; JSON and CSV have them.
        *(rank_columns(result) if compared else _count_columns(per_instance)),
        *([Column("category", "category", right=False)] if has_category else []),
        Column(heading, "name", right=False, flexible=True),
    ]
    keys = [column.key for column in columns]
    simple = named and not full_names and result.measure == "gpu-kernel"
    shown = [replace(row, name=simplify_name(row.name)) if simple else row for row in rows]
    shown += [_sum_rows(result, rest)] if rest else []
    return Table(tuple(columns), [[_cell(key, _value(result, row, key)) for key in keys] for row in shown], [])


def _count_columns(per_instance: bool) -> list[Column]:
    # A mean over calls says little beside a time per instance; it stays in what is read by programs.
    return [
        Column("count", "count"),
        Column("per inst.", "per_instance_ns") if per_instance else Column("mean", "mean_ns"),
    ]


def _sum_rows(result: KernelsResult, rows: list[KernelRow]) -> KernelRow:
    """Return the rows that are not shown as one."""
    total, count = sum(row.total_ns for row in rows), sum(row.count for row in rows)
    each = [row.per_instance_count for row in rows if row.per_instance_count is not None]
    return KernelRow(
        name=f"({len(rows)} more)",
        category="",
        count=count,
        per_instance_count=sum(each) if each else None,
        total_ns=total,
        share=total / result.total_ns if result.total_ns else 0.0,
        mean_ns=round(total / count),
        min_ns=min(row.min_ns for row in rows),
        max_ns=max(row.max_ns for row in rows),
        per_rank_ns=tuple(map(sum, zip(*(row.per_rank_ns for row in rows), strict=True))),
    )


def _exact_table(result: KernelsResult, rows: list[KernelRow]) -> Table:
    columns = (*_EXACT, *(exact_rank_columns(result) if are_compared(result) else ()))
    return Table(columns, [], [[_value(result, row, column.key) for column in columns] for row in rows])


def _value(result: KernelsResult, row: KernelRow, key: str) -> object:
    if key == "per_instance_ns":
        each = row.per_instance_count
        return round(row.total_ns * each / row.count) if each is not None else None
    if key.startswith("rank_"):
        return rank_value(result, row, key)
    return getattr(row, key)


def build_instance_table(result: KernelsResult) -> Table:
    """Return one line per instance of the range; for people, starts count from the first thing recorded."""
    keys = ["instance", "start_ns", "wall_ns", "kernel_time_ns", "busy_ns", "kernel_count"]
    headings = ["instance", "start", "wall", "kernel time", "busy", "kernels"]
    if are_compared(result):
        keys, headings = [*keys, "rank"], [*headings, "rank"]
    columns = tuple(Column(heading, key) for heading, key in zip(headings, keys, strict=True))
    values = [[getattr(row, key) for key in keys] for row in result.per_instance or ()]
    shown = [replace(row, start_ns=row.start_ns - result.first_ns) for row in result.per_instance or ()]
    return Table(columns, [[_cell(key, getattr(row, key)) for key in keys] for row in shown], values)


def _cell(key: str, value: object) -> str:
    if value is None:
        return "–"
    if key == "share":
        return format_share(float(str(value)))
    if key.endswith("_ns"):
        return format_ns(int(str(value)))
    return f"{value:,}" if isinstance(value, int) else str(value)
