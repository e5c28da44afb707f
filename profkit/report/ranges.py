"""The document of ``profkit ranges``: the tree of ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from profkit.analysis.range_tree import RangesResult
from profkit.findings import Finding
from profkit.report.document import Column, Document, Lines, Row, Table
from profkit.report.units import COUNT, NS, SHARE, TEXT


def build_ranges_document(result: RangesResult, self_check: Sequence[Finding], *, numbered: bool = True) -> Document:
    """Return the tree; without ``numbered``, as it was made, names that differ in a number share a line."""
    rows: list[dict[str, Any]] = [
        {**asdict(row), "share_of_capture": row.kernel_time_ns / result.total_ns if result.total_ns else None}
        for row in result.ranges
    ]
    columns = (
        Column("path", "range", TEXT, flexible=True, on_screen=tree_name),
        *([Column("domain", "domain", TEXT, wide=True)] if any(row["domain"] for row in rows) else []),
        Column("instances", "times"),
        Column("wall_ns", "Python time", NS, on_screen=_python_time),
        Column("kernel_time_ns", "kernel time", NS),
        Column("busy_ns", "GPU busy", NS),
        Column("share_of_capture", "share", SHARE),
        Column("kernel_count", "kernels", COUNT),
    )
    exact = ("path", "domain", "instances", "wall_ns", "kernel_time_ns", "busy_ns", "share_of_capture", "kernel_count")
    table = Table(columns, rows, exact=exact)
    data = result.to_dict()
    del data["warnings"]
    return Document("ranges", data, (table, Lines(_notes(result, numbered))), table, result.warnings, self_check)


def tree_name(row: Row) -> str:
    """Return a range's name as a tree shows it: moved in by its depth, its domain behind it."""
    depth = str(row["path"]).replace("\\/", "").count("/")
    return f"{' ' * depth}{row['name']}" + (f" [{row['domain']}]" if row["domain"] else "")


def _python_time(row: Row) -> str:
    return NS.show(row["wall_ns"]) if row["wall_ns"] else "–"


def _notes(result: RangesResult, numbered: bool) -> list[str]:
    lines = ["no GPU work was recorded: Python times alone"]
    if result.total_ns:
        kind = "operator self time" if result.measure == "cpu-operator" else "kernels"
        whole = "in this capture" if result.rank is None else f"of rank {result.rank}"
        lines = [f"100 % = {NS.show(result.total_ns)} of {kind} {whole}; a range holds those within it"]
    if any(row.kernel_count and not row.wall_ns for row in result.ranges):
        lines.append("– in Python time: no range was open; its kernels were found by torch.profiler's operator links")
    if not numbered and any("*" in row.name for row in result.ranges):
        lines.append("* stands for a number: one line for all its ranges; --numbered shows each by itself")
    return lines
