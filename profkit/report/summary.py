"""What a person sees first: the phases of a training step, and after a run its whole result."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from profkit.analysis.checks.self_check import SelfCheck
from profkit.analysis.kernels import KernelsResult
from profkit.analysis.opened_trace import OpenedTrace
from profkit.analysis.range_paths import split_path
from profkit.names import PHASES, STEP, WARMUP, context_range
from profkit.reading import open_trace
from profkit.report.document import render
from profkit.report.formats import Column, Table, render_table
from profkit.report.kernels import render_kernels
from profkit.report.ranges import build_ranges_document
from profkit.report.self_check import verdict_line, warning_lines
from profkit.report.units import format_ns, format_share
from profkit.run.directory import Run

_COLUMNS = (
    Column("phase", "phase", right=False),
    Column("count", "instances"),
    Column("wall", "wall_ns"),
    Column("kernel time", "total_ns"),
    Column("busy", "busy_ns"),
    Column("share", "share"),
    Column("kernels", "kernel_count"),
    Column("per inst.", "each_ns"),
)
_SUMMARY_TOP = 12

_ANY_WARMUP = "".join(f"[{letter.upper()}{letter}]" for letter in WARMUP)
"""A glob for the name, written large or small."""


def render_phases(opened: OpenedTrace, contexts: Iterable[int] = ()) -> str:
    """Return the table of phases (those that the trace has), what lies in ``warmup`` left out; "" if it has none.

    Args:
        contexts: of a run with several, each gets a table of its own.
    """
    whole = opened.attribution.ledger.total_ns
    warm = " (without warmup)" if _has_warmup(opened) else ""
    whose = "the capture" if opened.rank is None else f"rank {opened.rank}"
    note = f"phases{warm}; share is of all {whose}'s {format_ns(whole)}"
    titles = {context_range(context): f"{context_range(context)}/{STEP} */" for context in contexts} or {"": ""}
    parts = []
    for title, within in titles.items():
        results = summarize_phases(opened, within)
        if results:
            parts.append(f"{title}\n{_render_table(opened, results, whole)}".lstrip("\n"))
    return "\n\n".join([note, *parts]) if parts else ""


def _render_table(opened: OpenedTrace, results: list[KernelsResult], whole: int) -> str:
    cells = [
        [
            split_path(str(result.range))[-1],
            f"{result.instances:,}",
            format_ns(result.wall_ns),
            format_ns(result.total_ns),
            format_ns(result.busy_ns),
            format_share(result.total_ns / whole) if whole else "–",
            f"{result.kernel_count + result.graph_count:,}",
            format_ns(round(result.total_ns / result.outermost_instances)) if result.outermost_instances else "–",
        ]
        for result in results
    ]
    columns: tuple[Column, ...] = _COLUMNS
    if opened.trace.measure == "cpu-operator":
        renamed = {"kernel time": "self time", "kernels": "operators"}
        columns = tuple(Column(renamed.get(c.heading, c.heading), c.key, c.right) for c in _COLUMNS)
    return render_table(Table(columns, cells, cells))


def summarize_phases(opened: OpenedTrace, within: str = "") -> list[KernelsResult]:
    """Return one result per standard phase that the trace has, what lies in ``warmup`` left out.

    Args:
        within: the beginning of a range path (``context 128/step */``), to take those under it alone.
    """
    names = {opened.trace.names[i] for i in set(opened.trace.ranges.name.tolist())}
    exclude = _ANY_WARMUP if _has_warmup(opened) else None
    results = [opened.kernels(within + phase, exclude=exclude) for phase in PHASES if phase in names]
    return [result for result in results if result.instances]


def render_run_summary(run: Path) -> str:
    """Return what a finished run says: its self-check, phases, and kernels; of an NVTX-only capture its ranges."""
    from profkit.report.clean_times import render_clean_times

    opened = open_trace(run)
    manifest = Run(run).manifest
    clean = render_clean_times(manifest)
    verdict = verdict_line(opened.self_check)
    if not len(opened.trace.work):
        found = opened.ranges(numbered=False)
        tree = render(build_ranges_document(found, opened.self_check.findings, numbered=False), "table")
        tree = "\n\n".join(part for part in (tree, clean) if part)
        verdict += "; no GPU work was recorded (no GPU, or no CUDA), so there are no kernel times"
        return "\n".join((f"{tree}\n\n{verdict}", *warning_lines(opened.self_check)))
    table = render_kernels(opened.kernels(), opened.self_check, top=_SUMMARY_TOP)
    phases = render_phases(opened, manifest.workload.contexts)
    table = beside_phases(table, phases, opened.self_check)
    verdict = "\n".join((verdict, *warning_lines(opened.self_check)))
    return "\n\n".join(part for part in (table, clean, verdict) if part)


def beside_phases(table: str, phases: str, check: SelfCheck) -> str:
    """Return the phases before the table of kernels, or after it where that is headed by a failed self-check."""
    parts = (table, phases) if check.failed else (phases, table)
    return "\n\n".join(part for part in parts if part)


def _has_warmup(opened: OpenedTrace) -> bool:
    return any(opened.trace.names[i].lower() == WARMUP for i in set(opened.trace.ranges.name.tolist()))
