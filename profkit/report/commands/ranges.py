"""The document of ``profkit ranges``: the tree of ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from profkit.analysis.tree.range_tree import RangesResult
from profkit.findings import Finding
from profkit.report.document import UNKNOWN, Column, Document, Lines, Row, Table
from profkit.report.units import NS, SHARE, TEXT, Unit, count_over, format_count, ns_over


def build_ranges_document(
    result: RangesResult, self_check: Sequence[Finding], *, numbered: bool = True, totals: bool = False
) -> Document:
    """Return the tree.

    Args:
        result: what to show.
        self_check: what was found about the capture.
        numbered: how the tree was made; False if names that differ only in a number share a line. People then read
            averages per step where the steps are known (`RangesResult.steps`).
        totals: show sums over the recorded steps instead.
    """
    steps = None if numbered or totals else result.steps
    rows: list[dict[str, Any]] = [
        {**asdict(row), "share_of_capture": row.kernel_time_ns / result.total_ns if result.total_ns else None}
        for row in result.ranges
    ]
    each = ns_over(steps)
    of_operators = result.measure == "cpu-operator"
    # Ranges that stand for operator links were never open.
    python_time = Unit(lambda value: each.show(value) if value else UNKNOWN)
    columns = (
        Column("path", "range", TEXT, flexible=True, on_screen=tree_name),
        *([Column("domain", "domain", TEXT, wide=True)] if any(row["domain"] for row in rows) else []),
        Column("instances", "times", count_over(steps)),
        Column("wall_ns", "Python time", python_time),
        Column("kernel_time_ns", "self time" if of_operators else "kernel time", each),
        Column("busy_ns", "busy" if of_operators else "GPU busy", each),
        Column("share_of_capture", "share", SHARE),
        Column("kernel_count", "operators" if of_operators else "kernels", count_over(steps)),
    )
    exact = ("path", "domain", "instances", "wall_ns", "kernel_time_ns", "busy_ns", "share_of_capture", "kernel_count")
    table = Table(columns, rows, exact=exact)
    parts = (table, Lines(_notes(result, numbered, steps)))
    return Document("ranges", result.to_dict(), parts, table, result.warnings, self_check)


def tree_name(row: Row) -> str:
    """Return a range's name as a tree shows it: indented by its depth, followed by its domain."""
    depth = str(row["path"]).replace("\\/", "").count("/")
    return f"{' ' * depth}{row['name']}" + (f" [{row['domain']}]" if row["domain"] else "")


def _notes(result: RangesResult, numbered: bool, steps: int | None) -> list[str]:
    lines = ["no GPU work was recorded: only Python times are shown"]
    if result.total_ns:
        kind = "operator self time" if result.measure == "cpu-operator" else "kernels"
        whole = "in this capture" if result.rank is None else f"of rank {result.rank}"
        whole += f" in {format_count(steps, 'step')}" if steps is not None else ""
        lines = [f"100 % = {NS.show(result.total_ns)} of {kind} {whole}; a range includes the ranges inside it"]
    if steps is not None:
        lines.append(f"all other figures are averages per step ({format_count(steps, 'step')}); --totals shows sums")
    else:
        lines.append("all other figures are sums over the recording")
    if any(row.wall_ns is None for row in result.ranges):
        lines.append("– in Python time: no Python runs when a CUDA graph is replayed")
    if any(row.kernel_count and row.wall_ns == 0 for row in result.ranges):
        lines.append("– in Python time: no range was open; its kernels were found by torch.profiler's operator links")
    if not numbered and any("*" in row.name for row in result.ranges):
        lines.append("* stands for a number: one line for all such ranges; --numbered shows each of them")
    return lines
