"""Section 8: how far to trust the page: how the sums close, the self-check, what recording cost, what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from profkit.analysis.checks.self_check import SelfCheck
from profkit.analysis.kernels.compiled_code import RunCompilations, read_run_compilations
from profkit.analysis.kernels.summary import KernelsResult
from profkit.analysis.memory.result import MemoryResult
from profkit.report.commands.clean_times import clean_times_parts
from profkit.report.document import Column, Row, Table
from profkit.report.page.markup import view_parts, view_table
from profkit.report.page.results import Results
from profkit.report.units import BYTES, COUNT, NS, SHARE, TEXT, format_count, format_exactly
from profkit.run.manifest import Manifest, Samples

_PLACED = {
    "direct_ns": "placed by the launching thread",
    "inferred_ns": "placed by the thread that waited for it (backward)",
    "outside_ns": "in no range",
    "ambiguous_ns": "not placed: two threads may have waited",
    "no_launch_ns": "not placed: no launch was recorded",
}


def build_trust(results: Results) -> dict[str, Any]:
    """Return the books of time and memory, the self-check, what recording cost and what was not recorded."""
    capture, kernels, memory = results.capture, results.kernels, results.memory
    check = None if capture.trace is None else capture.trace.self_check
    costs = [] if capture.run is None else clean_times_parts(capture.run.manifest)
    known = read_run_compilations(capture.run)
    compiled = None if known is None else _compilations(known)
    return {
        "verdict": "" if check is None else _verdict_line(check),
        "findings": [] if check is None else [(one.verdict, one.message) for one in check.findings],
        "time_books": None if kernels is None else view_table(_time_books(kernels)),
        "memory_books": None if memory is None else view_table(_memory_books(memory)),
        "memory_proof": "" if memory is None else _proof(memory),
        "compilations": None if compiled is None or not compiled.rows else view_table(compiled),
        "costs": view_parts(costs),
        "memory_cost": "" if capture.run is None else _memory_cost(capture.run.manifest),
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
    """Return the verdict in one line."""
    failed, warned = len(check.of("failed")), len(check.of("warning"))
    if failed:
        return f"self-check FAILED ({format_count(failed, 'check')})"
    return "self-check passed" + (f" with {format_count(warned, 'warning')}" if warned else "")


def _time_books(result: KernelsResult) -> Table:
    """Return how all kernel time is placed; the rows add up to the last one."""
    ledger = result.ledger
    columns = (
        Column("words", "kernel time", TEXT),
        Column("ns", "exactly, ns", COUNT),
        Column("time", "time", NS),
        Column("share", "share", SHARE),
    )
    sizes = {words: getattr(ledger, name) for name, words in _PLACED.items()}
    rows = [_share_row(words, size, ledger.total_ns) for words, size in sizes.items() if size]
    return Table(columns, rows, rest=_share_row("all", ledger.total_ns, ledger.total_ns))


def _compilations(known: RunCompilations) -> Table:
    """Return what torch.compile did in recorded steps, and each line that breaks a graph or was not compiled."""
    columns = (
        Column("when", "when", TEXT),
        Column("what", "what", TEXT),
        Column("line", "line", TEXT),
        Column("why", "why", TEXT),
        Column("time", "time", NS),
    )
    rows: list[Row] = []
    for step in known.steps:
        for what, some in (("compiled again", step.again), ("compiled", step.first_time)):
            rows += [
                _compilation(f"step {step.step}", what, one.line or "a backward pass", one.reason, one.duration_ns)
                for one in some
                if one.what != "at run time"
            ]
    for place in known.breaks:
        when = "recorded steps too" if place.in_recorded_steps else "before them"
        rows.append(
            _compilation(when, "graph break", place.line, place.hint or place.explanation or place.reason, None)
        )
    for one in known.not_compiled:
        rows.append(_compilation("", "not compiled", one.line or one.failed_line or "", one.failure, None))
    for one in known.without_graphs:
        rows.append(
            _compilation("", "without CUDA graphs", one.line or "a backward pass", one.cudagraphs_skipped, None)
        )
    return Table(columns, rows)


def _compilation(when: str, what: str, line: str, why: str | None, time_ns: int | None) -> Row:
    return {"when": when, "what": what, "line": line, "why": why or "", "time": time_ns}


def _share_row(words: str, size: int, whole: int) -> dict[str, Any]:
    return {"words": words, "ns": size, "time": size, "share": size / whole if whole else None}


def _memory_books(result: MemoryResult) -> Table:
    """Return what the peak is made of; the rows add up to the last one."""
    at = result.composition
    columns = (
        Column("words", "at the peak", TEXT),
        Column("bytes", "exactly, B", COUNT),
        Column("size", "size", BYTES),
        Column("share", "share", SHARE),
    )
    rows = [
        {"words": row.category, "bytes": row.bytes, "size": row.bytes, "share": row.share} for row in at.by_category
    ]
    total = at.allocated_bytes
    return Table(columns, rows, rest={"words": "all", "bytes": total, "size": total, "share": 1.0})


def _proof(result: MemoryResult) -> str:
    totals, check = result.totals, result.allocator_check
    peak = format_exactly(totals.allocated_peak_bytes)
    if totals.bounds is not None:
        low, high = totals.bounds
        upper = "unknown" if high is None else f"{high:,} B"
        return f"Allocated peak {peak}: not proven; at least {low:,} B, at most {upper}."
    agrees = " PyTorch's own peaks, recorded by the run, agree to the byte." if check and check.agrees else ""
    return f"Allocated peak {peak}: exact, replayed from the allocator's history.{agrees}"


def _memory_cost(manifest: Manifest) -> str:
    """Return how much longer steps took while the allocator was recorded, if both were timed."""
    recorded = [] if manifest.memory is None else Samples(manifest.memory.steps).step_ns()
    clean = [] if manifest.unprofiled is None else manifest.unprofiled.step_ns()
    if not recorded or not clean:
        return ""
    cost = median(recorded) / median(clean) - 1
    return f"Recording the allocator changed the step time by {cost:+.1%}."
