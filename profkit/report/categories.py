"""Show why each kernel has its category."""

from __future__ import annotations

from profkit.analysis.categories import categorize
from profkit.analysis.kernels import KernelsResult
from profkit.report.formats import Column, Format, Table, render_markdown, render_table
from profkit.report.kernels import sort_rows
from profkit.report.text import simplify_name

_COLUMNS = (
    Column("category", "category", right=False),
    Column("rule", "rule", right=False, flexible=True),
    Column("kernel", "name", right=False, flexible=True),
)


def render_explanation(
    result: KernelsResult, style: Format = "table", *, sort: str = "total", top: int | None, full_names: bool = False
) -> str:
    """Return one line per kernel of the table, in its order, with the rule that fired on the kernel's full name."""
    rows = sort_rows(result.kernels, sort)[:top]
    found = [(row, categorize(row.name, result.measure)) for row in rows]
    cells = [
        [match.name, match.rule, simplify_name(row.name) if result.measure == "gpu-kernel" else row.name]
        for row, match in found
    ]
    table = Table(_COLUMNS, cells, cells)
    drawn = render_markdown(table) if style == "markdown" else render_table(table, full=full_names)
    return f"why each has its category: the first rule that fits its full name\n\n{drawn}"
