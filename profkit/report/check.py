"""Print which budgets of a run held and which broke, each with how it was measured or why it could not be."""

from __future__ import annotations

from textwrap import fill

from profkit.analysis.compare.baseline import BASELINE
from profkit.analysis.compare.budget_lines import BudgetLine, Unit
from profkit.analysis.compare.budgets import MIN_MFU, BudgetCheck
from profkit.report.formats import Column, Format, Table, make_visible, render_csv, render_json, screen_width
from profkit.report.old_document import Document, render_document
from profkit.report.units import format_bytes, format_ns, format_share

_COLUMNS = (
    Column("verdict", "held", right=False),
    Column("budget", "budget", right=False, flexible=True),
    Column("measured", "measured"),
    Column("limit", "limit"),
)
_KEYS = ("budget", "subject", "measured", "limit", "unit", "held", "detail")


def render_check(check: BudgetCheck, style: Format = "table", *, full_names: bool = False) -> str:
    """Return the budgets as a table, and under it each one's detail."""
    if style == "json":
        return render_json(check.to_dict())
    if style == "csv":
        values = [[getattr(line, key) for key in _KEYS] for line in check.lines]
        return render_csv(Table(tuple(Column(key, key) for key in _KEYS), [], values))
    table = Table(_COLUMNS, [_cells(line) for line in check.lines], [])
    details = [f"{label(line)}: {line.detail}" for line in check.lines]
    if style == "table":
        details = [fill(make_visible(line), screen_width(), subsequent_indent="  ") for line in details]
    return render_document(Document([table], notes=details), style, full_names=full_names)


def label(line: BudgetLine) -> str:
    """Return what a budget is called: the option, and what it is about."""
    return line.budget if line.subject is None else f"{line.budget} {line.subject}"


def _cells(line: BudgetLine) -> list[str]:
    limit = "–" if line.limit is None else _format(line.limit, line.unit)
    sign = "" if line.limit is None or line.budget == BASELINE else "≥ " if line.budget == MIN_MFU else "≤ "
    measured = "–" if line.measured is None else _format(line.measured, line.unit)
    return ["held" if line.held else "BROKEN", label(line), measured, sign + limit]


def _format(value: float, unit: Unit) -> str:
    if unit == "share":
        return format_share(value)
    return format_ns(round(value)) if unit == "ns" else format_bytes(round(value))
