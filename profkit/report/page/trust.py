"""The section on trust: the self-check, what torch.compile did, what recording cost, and what was not recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from profkit.analysis.checks.self_check import SelfCheck
from profkit.analysis.kernels.compiled_code import RunCompilations
from profkit.report.commands.clean_times import clean_times_parts
from profkit.report.document import Column, Row, Table
from profkit.report.page.markup import view_parts, view_table
from profkit.report.page.results import Results
from profkit.report.units import NS, TEXT, format_count


def build_trust(results: Results) -> dict[str, Any]:
    """Return the self-check, what torch.compile did, what recording cost and what was not recorded."""
    capture = results.capture
    check = None if capture.trace is None else capture.trace.self_check
    costs = [] if capture.run is None else clean_times_parts(capture.run.manifest)
    known = results.summary.compilations
    compiled = None if known is None else _compilations(known)
    return {
        "verdict": "" if check is None else _verdict_line(check),
        "findings": [] if check is None else [(finding.verdict, finding.message) for finding in check.findings],
        "compilations": None if compiled is None or not compiled.rows else view_table(compiled),
        "costs": view_parts(costs),
        "missing": [{"what": what, "command": command} for what, command in find_missing(results)],
    }


def find_missing(results: Results) -> Iterator[tuple[str, str]]:
    """Yield what was not recorded and the command that records it."""
    capture, again = results.capture, results.record_again
    run, trace = capture.run, capture.trace
    if trace is None:
        yield "time: kernels, ranges, steps", again("--nsys")
    if capture.snapshot is None:
        yield "memory", again("--memory")
    if run is None or run.manifest.unprofiled is None:
        yield "step times without a profiler", again("--nsys")
    if trace is not None and (run is None or run.work is None):
        yield "FLOPs of each module", again("--flops")
    if trace is not None and (run is None or run.ceilings is None):
        yield "what this GPU reaches at most (a datasheet is used if one is known)", "profkit ceilings"


def _verdict_line(check: SelfCheck) -> str:
    failed, warned = len(check.of("failed")), len(check.of("warning"))
    if failed:
        return f"self-check FAILED ({format_count(failed, 'check')})"
    return "self-check passed" + (f" with {format_count(warned, 'warning')}" if warned else "")


def _compilations(known: RunCompilations) -> Table:
    columns = (
        Column("when", "when", TEXT),
        Column("what", "what", TEXT),
        Column("line", "line", TEXT),
        Column("why", "why", TEXT),
        Column("time", "time", NS),
    )
    rows: list[Row] = []
    for step in known.steps:
        for what, compiled in (("compiled again", step.again), ("compiled", step.first_time)):
            rows += [
                _compilation(
                    f"step {step.step}", what, graph.line or "a backward pass", graph.reason, graph.duration_ns
                )
                for graph in compiled
                if graph.what != "at run time"
            ]
    for place in known.breaks:
        when = "recorded steps too" if place.in_recorded_steps else "before them"
        rows.append(
            _compilation(when, "graph break", place.line, place.hint or place.explanation or place.reason, None)
        )
    for graph in known.not_compiled:
        rows.append(_compilation("", "not compiled", graph.line or graph.failed_line or "", graph.failure, None))
    for graph in known.without_graphs:
        rows.append(
            _compilation("", "without CUDA graphs", graph.line or "a backward pass", graph.cudagraphs_skipped, None)
        )
    return Table(columns, rows)


def _compilation(when: str, what: str, line: str, why: str | None, time_ns: int | None) -> Row:
    return {"when": when, "what": what, "line": line, "why": why or "", "time": time_ns}
