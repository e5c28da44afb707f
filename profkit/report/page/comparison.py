"""The comparison with an earlier run: its document's tables, with the change in per cent next to each change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from profkit.analysis.compare.comparison import CaptureComparison, compare_captures
from profkit.analysis.opened import OpenedCapture
from profkit.findings import Finding
from profkit.report.commands.compare import build_compare_document, describe_difference
from profkit.report.document import Column, Lines, Table
from profkit.report.page.markup import view_parts
from profkit.report.units import Unit

PERCENT = Unit(lambda value: f"{value:+.1%}" if isinstance(value, float) else str(value))
_MOST = 200


def compare_runs(before: OpenedCapture, after: OpenedCapture) -> tuple[CaptureComparison, list[Finding]]:
    """Return what changed, and a caution for each difference that may change times by itself.

    Raises:
        UsageError: the two have nothing that could be compared.
    """
    result = compare_captures(before, after, force=True)
    cautions = [
        Finding("provenance", f"compared with another {describe_difference(one)}: this may change times by itself")
        for one in result.provenance.disturbances
    ]
    return result, [*cautions, *result.warnings]


def build_comparison(result: CaptureComparison) -> dict[str, Any]:
    """Return the tables and sentences of ``profkit compare``, each change in per cent too."""
    document = build_compare_document(result, top=_MOST)
    heads = [next(iter(part.lines)) for part in document.parts if isinstance(part, Lines) and part.role == "head"]
    return {
        "headline": heads[0],
        "parts": view_parts(_with_percent(part) if isinstance(part, Table) else part for part in document.parts),
    }


def _with_percent(table: Table) -> Table:
    """Return a table of changes with a column that says what part of the value before each is."""
    keys = [column.key for column in table.columns]
    pairs = {"change_ns": "before_ns", "change_bytes": "before_bytes"}
    change = next((key for key in pairs if key in keys and pairs[key] in keys), None)
    if change is None:
        return table
    rows = [{**row, "percent": _part(row.get(change), row.get(pairs[change]))} for row in table.rows]
    at = keys.index(change) + 1
    columns = [*table.columns[:at], Column("percent", "%", PERCENT), *table.columns[at:]]
    return replace(table, columns=columns, rows=rows)


def _part(change: Any, before: Any) -> float | str | None:
    """Return a change as a part of what was there; None where nothing was, and nothing in a row without numbers."""
    if not isinstance(change, int | float) or not isinstance(before, int | float):
        return ""
    return change / before if before else None
