"""What a finished run says about its time: phases, kernels, unprofiled steps, and the verdict of its self-check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from profkit.analysis.kernels import KernelsResult
from profkit.analysis.opened_trace import OpenedTrace
from profkit.names import STEP, context_range
from profkit.reading import open_trace
from profkit.report.clean_times import clean_times_parts
from profkit.report.document import render
from profkit.report.kernels import build_kernels_document
from profkit.report.ranges import build_ranges_document
from profkit.report.self_check import verdict_line, warning_lines
from profkit.run.directory import Run

_TOP = 12


def render_run_summary(path: Path) -> str:
    """Return the phases and kernels of a run; of a capture without GPU work its ranges."""
    opened, manifest = open_trace(path), Run(path).manifest
    check = opened.self_check
    verdict = verdict_line(check)
    if len(opened.trace.work):
        phases = _phases(opened, manifest.workload.contexts)
        document = build_kernels_document(opened.kernels(), check.findings, top=_TOP, phases=phases)
    else:
        document = build_ranges_document(opened.ranges(numbered=False), check.findings, numbered=False)
        verdict += "; no GPU work was recorded (no GPU, or no CUDA), so there are no kernel times"
    document = replace(document, parts=[*document.parts, *clean_times_parts(manifest)])
    parts = (
        render(document, "table", with_warnings=False),
        "\n".join((verdict, *warning_lines(check))),
    )
    return "\n\n".join(filter(None, parts))


def _phases(opened: OpenedTrace, contexts: tuple[int, ...]) -> dict[str, list[KernelsResult]]:
    """Return the phases; in a run of several contexts, each context's."""
    within = {context_range(context): f"{context_range(context)}/{STEP} */" for context in contexts} or {"": ""}
    found = {title: opened.phases(path) for title, path in within.items()}
    return {title: results for title, results in found.items() if results}
