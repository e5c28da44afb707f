"""The document of ``profkit check``: which budgets held, each with how it was measured or why it was not judged."""

from __future__ import annotations

from typing import Any

from profkit.analysis.compare.budgets import BASELINE, MIN_MFU, BudgetCheck, BudgetLine
from profkit.analysis.ranks.comparison import RanksResult
from profkit.report.commands.late_rank import describe_verdict
from profkit.report.document import UNKNOWN, Column, Document, Lines, Table
from profkit.report.units import BYTES, NS, SHARE, TEXT, Unit

_UNITS = {
    "ns": NS,
    "bytes": Unit(lambda value: BYTES.show(round(value))),
    "share": SHARE,
}
_COLUMNS = (
    Column("verdict", "verdict", TEXT),
    Column("label", "budget", TEXT, flexible=True),
    Column("measured_text", "measured", Unit(str)),
    Column("limit_text", "limit", Unit(str)),
)
_EXACT = ("budget", "subject", "measured", "limit", "unit", "held", "judged", "detail")


def build_check_document(check: BudgetCheck, ranks: RanksResult | None = None, answer: str = "") -> Document:
    """Return the verdict on each budget, and under the table each one's detail.

    ``ranks`` are the ranks that budgets were judged by: which of them is late is said too. ``answer`` is what the
    summary says of the run first.
    """
    table = Table(_COLUMNS, [_row(line) for line in check.lines], exact=_EXACT, is_wrong=lambda row: not row["held"])
    details = [
        f"{budget_label(line)}: {'' if line.judged else 'NOT JUDGED (counts as failed): '}{line.detail}"
        for line in check.lines
    ]
    late = [] if ranks is None else describe_verdict(ranks)[:1]
    return Document(
        "check",
        {**check.to_dict(), **({"answer": answer} if answer else {})},
        [table, Lines([*details, *late, *([answer] if answer else [])])],
        table,
    )


def budget_label(line: BudgetLine) -> str:
    """Return the name of a budget: the option, and what it is about."""
    return line.budget if line.subject is None else f"{line.budget} {line.subject}"


def _row(line: BudgetLine) -> dict[str, Any]:
    sign = "" if line.limit is None or line.budget == BASELINE else "≥ " if line.budget == MIN_MFU else "≤ "
    return {
        **vars(line),
        "verdict": "held" if line.held else "BROKEN" if line.judged else "NOT JUDGED",
        "label": budget_label(line),
        "measured_text": _show(line, line.measured),
        "limit_text": sign + _show(line, line.limit),
    }


def _show(line: BudgetLine, value: float | None) -> str:
    return UNKNOWN if value is None else _UNITS[line.unit].show(value)
