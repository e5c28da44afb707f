"""A capture is on trial until it passes its self-check.

nsys exits 0 with 94 % of the kernels missing; what it says of itself stands in its diagnostics, and what it does not
say shows in the data: launches without kernels, graph launches without graphs, ranges without ends, instances of one
range with unequal work. Of a run of profkit's own, what was run is known too. Each check is a `Finding`: `failed` (the
capture must not be trusted as a whole), `warning` (odd, and named) or `note` (what every healthy capture of this kind
carries).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from profkit.analysis.attribution import Attribution
from profkit.analysis.checks.launch_check import check_launches
from profkit.analysis.checks.run_check import UNKNOWN_RUN, KnownRun, check_run
from profkit.analysis.checks.step_check import check_idle_instances, check_steps
from profkit.analysis.range_paths import explain_no_ranges
from profkit.findings import Finding, Verdict
from profkit.trace.columns import Trace

# Said by every capture between cudaProfilerStart and cudaProfilerStop, whole ones among them.
_USUAL_DIAGNOSTICS = re.compile(
    r"might have been collected|No \w+ events collected|was launched by the profiler|nvtxDomainDestroy|"
    r"IP samples|backtrace|sampling period|API was ignored",
    re.IGNORECASE,
)
_WHAT = r"\b(?:events?|CUDA|CUPTI)\b"
_HOW = r"\b(?:lost|drop(?:ped)?|discard(?:ed)?|overflow(?:ed)?|incomplete|missing|failed to)\b"
# Samples or strings may be lost without harm to what is counted here.
_LOSS_DIAGNOSTICS = re.compile(rf"{_WHAT}[^.;\n]*{_HOW}|{_HOW}[^.;\n]*{_WHAT}", re.IGNORECASE)
LOSS_IN_LOG = re.compile(r"Errors? occurred while processing the raw events|events? (were|was) (lost|dropped)", re.I)

_CLOCK_TOLERANCE_NS = 1_000_000
# A kernel may outlast the calls that were recorded, but not by ten times and a minute.
_LONGER_THAN_CALLS = 10
_LONGEST_BESIDE_NS = 60_000_000_000


@dataclass(frozen=True)
class SelfCheck:
    """The verdict on a capture."""

    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Return whether any check failed."""
        return any(finding.verdict == "failed" for finding in self.findings)

    def of(self, verdict: Verdict) -> list[Finding]:
        """Return the findings of one verdict."""
        return [finding for finding in self.findings if finding.verdict == verdict]


def check_capture(attribution: Attribution, log: str = "", run: KnownRun = UNKNOWN_RUN) -> SelfCheck:
    """Return what can be said for and against trusting a capture.

    Args:
        attribution: the trace with its work placed.
        log: what the profiler printed while it recorded and imported, where a run directory kept it.
        run: what the run's manifest says of its steps.
    """
    trace = attribution.trace
    findings = [
        *_check_log(log),
        *_check_diagnostics(trace, run),
        *_check_values(trace),
        *check_launches(trace),
        *_check_ranges(trace),
        *check_idle_instances(attribution),
        *check_steps(attribution, even=run.even),
        *check_run(attribution, run),
    ]
    order = {"failed": 0, "warning": 1, "note": 2}
    return SelfCheck(tuple(sorted(findings, key=lambda finding: order[finding.verdict])))


def _check_log(log: str) -> list[Finding]:
    match = LOSS_IN_LOG.search(log)
    if not match:
        return []
    return [Finding("log", f"the profiler's log says “{match[0]}”: events are missing", "failed")]


def _check_diagnostics(trace: Trace, run: KnownRun) -> list[Finding]:
    """Judge what the profiler says of itself.

    Of a process that left nothing in the capture it cannot be told whether it had anything to leave; but a run that
    knows its steps finds those of all its processes counted, and any other is a helper, such as Inductor's compilers.
    """
    findings = []
    for text in dict.fromkeys(d.text.strip() for d in trace.diagnostics if d.severity == "error"):
        findings.append(Finding("diagnostic", f"the profiler reports an error: {text}", "failed"))
    warnings = [d for d in trace.diagnostics if d.severity == "warning"]
    for text, is_silent in dict.fromkeys((d.text.strip(), d.silent_pid is not None) for d in warnings):
        verdict: Verdict = "warning"
        if _LOSS_DIAGNOSTICS.search(text):
            verdict = "failed"
        elif _USUAL_DIAGNOSTICS.search(text) or (is_silent and run.steps is not None):
            verdict = "note"
        pids = {d.silent_pid for d in warnings if d.text.strip() == text} - {None}
        of = f"process {pids.pop()}" if len(pids) == 1 else f"{len(pids)} processes"
        whose = f" of {of}, of which nothing was recorded" if is_silent else ""
        findings.append(Finding("diagnostic", f"the profiler says{whose}: {text}", verdict))
    return findings


def _check_values(trace: Trace) -> list[Finding]:
    """Look for what cannot be: work that ends before it starts, outlasts the capture, or starts before its launch."""
    work, findings = trace.work, []
    backwards = int((work.end_ns < work.start_ns).sum())
    backwards += int((trace.copies.end_ns < trace.copies.start_ns).sum())
    backwards += int((trace.ranges.end_ns < trace.ranges.start_ns).sum())
    if backwards:
        findings.append(Finding("negative-time", f"{backwards:,} rows end before they start", "failed"))
    too_long = _count_too_long(trace)
    if too_long:
        findings.append(Finding("impossible-duration", f"{too_long:,} kernels outlast the capture itself", "failed"))
    launched = work.launch_thread >= 0
    early = int((launched & (work.start_ns < work.launch_ns - _CLOCK_TOLERANCE_NS)).sum())
    if early and trace.measure == "gpu-kernel":
        findings.append(
            Finding("before-launch", f"{early:,} kernels start over 1 ms before the call that launched them", "failed")
        )
    return findings


def _count_too_long(trace: Trace) -> int:
    """Count the kernels that are by far longer than the time in which CUDA calls were recorded."""
    calls, work = trace.calls, trace.work
    if not len(calls) or not len(work):
        return 0
    span_ns = int(calls.end_ns.max()) - int(calls.start_ns.min())
    return int((work.end_ns - work.start_ns > _LONGER_THAN_CALLS * span_ns + _LONGEST_BESIDE_NS).sum())


def _check_ranges(trace: Trace) -> list[Finding]:
    findings = []
    open_ranges = np.flatnonzero(trace.ranges.is_open)
    if len(open_ranges):
        names = dict.fromkeys(trace.names[int(trace.ranges.name[i])] for i in open_ranges)
        some = ", ".join(repr(name) for name in list(names)[:3])
        findings.append(
            Finding("open-range", f"{len(open_ranges):,} ranges never ended ({some}); they count to the end", "warning")
        )
    if trace.has_invisible_ranges:
        findings.append(Finding("invisible-ranges", explain_no_ranges(trace), "warning"))
    return findings
