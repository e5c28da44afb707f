"""Show why each kernel has its category."""

from __future__ import annotations

from profkit.analysis.categories import categorize
from profkit.analysis.kernels import KernelsResult
from profkit.report.formats import Column, Table, render_table
from profkit.report.kernel_names import simplify_name

_COLUMNS = (
    Column("category", "category", right=False),
    Column("rule", "rule", right=False, flexible=True),
    Column("kernel", "name", right=False, flexible=True),
)


def render_explanation(result: KernelsResult, top: int | None, *, full_names: bool = False) -> str:
    """Return one line per kernel of the table with the rule that fired on its full name."""
    found = [(row, categorize(row.name, result.measure)) for row in result.kernels[:top]]
    cells = [
        [match.name, match.rule, simplify_name(row.name) if result.measure == "gpu-kernel" else row.name]
        for row, match in found
    ]
    return "why each has its category: the first rule that fits its full name\n\n" + render_table(
        Table(_COLUMNS, cells, cells), full=full_names
    )
