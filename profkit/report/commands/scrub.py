"""The document of ``profkit scrub``: what was removed from a copy of an export."""

from __future__ import annotations

from dataclasses import asdict

from profkit.findings import Finding
from profkit.report.document import Column, Document, Lines, Table
from profkit.report.units import TEXT, format_count
from profkit.trace.scrub import ScrubResult

_COLUMNS = (Column("what", "removed", TEXT), Column("table", "from", TEXT), Column("row_count", "rows"))


def build_scrub_document(result: ScrubResult) -> Document:
    """Return what was removed, from which table of the export, and what a person must look at before they share it."""
    table = Table(_COLUMNS, [asdict(taken) for taken in result.taken])
    last = f"{result.output} holds the recorded events and nothing of the above"
    if not result.taken:
        last = f"nothing had to be removed; {result.output} is a copy"
    findings = []
    if result.kept_path_count:
        names = format_count(result.kept_path_count, "name")
        text = f"{names} of ranges or kernels look like a path; the copy keeps them, so check them before you share it"
        findings.append(Finding("kept-paths", text))
    parts: list[Table | Lines] = [table] if result.taken else []
    return Document("scrub", asdict(result), [*parts, Lines([last])], table, findings)
