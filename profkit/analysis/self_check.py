"""A capture is on trial until it passes its self-check.

nsys exits 0 with 94 % of the kernels missing; what it says of itself stands in its diagnostics, and what it does not
say shows in the data: launches without kernels, graph launches without graphs, ranges without ends, instances of one
range with unequal work. Each check is a `Finding`: `failed` (the capture must not be trusted as a whole), `warning`
(odd, and named) or `note` (what every healthy capture of this kind carries).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from profkit.analysis.attribution import Attribution
from profkit.analysis.nesting import NO_RANGE
from profkit.analysis.selection import explain_no_ranges
from profkit.ranges import PHASES, STEP, WARMUP
from profkit.trace.columns import Bools, Calls, Trace, distinct_values

Verdict = Literal["failed", "warning", "note"]

# Said by every capture between cudaProfilerStart and cudaProfilerStop, whole ones among them.
_USUAL_DIAGNOSTICS = re.compile(
    r"might have been collected|No \w+ events collected|was launched by the profiler|nvtxDomainDestroy|"
    r"IP samples|backtrace|sampling period|API was ignored",
    re.IGNORECASE,
)
_LOSS_DIAGNOSTICS = re.compile(r"\b(lost|drop(ped)?|discard(ed)?|overflow(ed)?|incomplete|missing|failed to)\b", re.I)
LOSS_IN_LOG = re.compile(r"Errors? occurred while processing the raw events|events? (were|was) (lost|dropped)", re.I)

_KERNEL_LAUNCH = re.compile(r"^(cu|cuda)Launch(Cooperative)?Kernel(ExC?)?(MultiDevice)?(_ptsz)?(_v\d+)?$")
_GRAPH_LAUNCH = re.compile(r"^(cu|cuda)GraphLaunch(_ptsz)?(_v\d+)?$")

# Healthy captures hold 12–43 % of their processes' correlation ids, the lossy one measured 0.9 %.
_THIN = 0.03
_FEWEST_CALLS = 1000
_CLOCK_TOLERANCE_NS = 1_000_000


@dataclass(frozen=True)
class Finding:
    """One thing that the self-check has to say; ``code`` is stable, ``message`` one sentence with its numbers."""

    verdict: Verdict
    code: str
    message: str


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


def check_capture(attribution: Attribution, log: str = "") -> SelfCheck:
    """Return what can be said for and against trusting a capture.

    Args:
        attribution: the trace with its work placed.
        log: what the profiler printed while it recorded and imported, where a run directory kept it.
    """
    trace = attribution.trace
    findings = [
        *_check_log(log),
        *_check_diagnostics(trace),
        *_check_values(trace),
        *_check_launches(trace),
        *_check_ranges(trace),
        *_check_idle_instances(attribution),
        *_check_steps(attribution),
    ]
    order = {"failed": 0, "warning": 1, "note": 2}
    return SelfCheck(tuple(sorted(findings, key=lambda finding: order[finding.verdict])))


def _check_log(log: str) -> list[Finding]:
    match = LOSS_IN_LOG.search(log)
    if not match:
        return []
    return [Finding("failed", "log", f"the profiler's log says “{match[0]}”: events are missing")]


def _check_diagnostics(trace: Trace) -> list[Finding]:
    findings = []
    for text in dict.fromkeys(d.text.strip() for d in trace.diagnostics if d.severity == "error"):
        findings.append(Finding("failed", "diagnostic", f"the profiler reports an error: {text}"))
    for text in dict.fromkeys(d.text.strip() for d in trace.diagnostics if d.severity == "warning"):
        verdict: Verdict = "warning"
        if _USUAL_DIAGNOSTICS.search(text):
            verdict = "note"
        elif _LOSS_DIAGNOSTICS.search(text):
            verdict = "failed"
        findings.append(Finding(verdict, "diagnostic", f"the profiler says: {text}"))
    return findings


def _check_values(trace: Trace) -> list[Finding]:
    """Look for what cannot be: work that ends before it starts, or starts before it was launched."""
    work, findings = trace.work, []
    backwards = int((work.end_ns < work.start_ns).sum())
    backwards += int((trace.copies.end_ns < trace.copies.start_ns).sum())
    backwards += int((trace.ranges.end_ns < trace.ranges.start_ns).sum())
    if backwards:
        findings.append(Finding("failed", "negative-time", f"{backwards:,} rows end before they start"))
    launched = work.launch_thread >= 0
    early = int((launched & (work.start_ns < work.launch_ns - _CLOCK_TOLERANCE_NS)).sum())
    if early and trace.measure == "gpu-kernel":
        findings.append(
            Finding("failed", "before-launch", f"{early:,} kernels start over 1 ms before the call that launched them")
        )
    return findings


def _check_launches(trace: Trace) -> list[Finding]:
    if trace.measure != "gpu-kernel":
        return []
    calls, findings = trace.calls, []
    kernels, graphs = _named(trace, _KERNEL_LAUNCH), _named(trace, _GRAPH_LAUNCH)
    lost = kernels & ~calls.has_work & ~calls.failed
    if lost.any():
        findings.append(
            Finding(
                "failed",
                "launch-without-kernel",
                f"{int(lost.sum()):,} of {int(kernels.sum()):,} kernel launches have no kernel: kernels are missing",
            )
        )
    lost = graphs & ~calls.has_work & ~calls.failed
    if lost.any():
        findings.append(
            Finding(
                "failed",
                "graph-launch-without-graph",
                f"{int(lost.sum()):,} of {int(graphs.sum()):,} CUDA graph launches have neither a graph row nor"
                " kernels: the graphs' time is missing; capture with --cuda-graph-trace=node",
            )
        )
    unlaunched = int((trace.work.launch_thread < 0).sum())
    if unlaunched:
        findings.append(
            Finding("warning", "kernel-without-launch", f"{unlaunched:,} kernels have no launch record and no range")
        )
    return findings + _check_density(trace)


def _named(trace: Trace, pattern: re.Pattern[str]) -> Bools:
    """Return the calls whose name matches."""
    used = distinct_values(trace.calls.name).tolist()
    return np.asarray(np.isin(trace.calls.name, [i for i in used if pattern.match(trace.names[i])]))


def _check_density(trace: Trace) -> list[Finding]:
    """Compare the calls recorded with the correlation ids that were handed out meanwhile: a hint, never proof."""
    findings = []
    for process, (count, span) in _call_density(trace.calls).items():
        if count >= _FEWEST_CALLS and count < _THIN * span:
            pid = trace.process_ids.get(process, process)
            findings.append(
                Finding(
                    "warning",
                    "thin",
                    f"process {pid}: only {count:,} CUDA calls for {span:,} correlation ids ({count / span:.1%};"
                    " whole captures have over 10 %): events may be missing",
                )
            )
    return findings


def _call_density(calls: Calls) -> dict[int, tuple[int, int]]:
    """Return per process how many calls were recorded, and over how many correlation ids they spread."""
    found = {}
    for process in distinct_values(calls.process).tolist():
        ids = calls.correlation[calls.process == process]
        found[process] = (len(ids), int(ids.max() - ids.min()) + 1)
    return found


def _check_ranges(trace: Trace) -> list[Finding]:
    findings = []
    open_ranges = np.flatnonzero(trace.ranges.is_open)
    if len(open_ranges):
        names = dict.fromkeys(trace.names[int(trace.ranges.name[i])] for i in open_ranges)
        some = ", ".join(repr(name) for name in list(names)[:3])
        findings.append(
            Finding("warning", "open-range", f"{len(open_ranges):,} ranges never ended ({some}); they count to the end")
        )
    if trace.has_invisible_ranges:
        findings.append(Finding("warning", "invisible-ranges", explain_no_ranges(trace)))
    return findings


def _check_idle_instances(attribution: Attribution) -> list[Finding]:
    """Find names of which some instances launched work and others made not one CUDA call.

    A whole capture has such names too (a branch not taken); together with a thin one it is loss.
    """
    trace = attribution.trace
    if trace.measure != "gpu-kernel" or not len(trace.calls):
        return []
    idle, total, worst = 0, 0, ("", 0, 0)
    calls = np.sort(trace.calls.start_ns)
    lo = np.searchsorted(calls, trace.ranges.start_ns)
    hi = np.searchsorted(calls, trace.ranges.end_ns)
    for name in distinct_values(trace.ranges.name).tolist():
        members = trace.ranges.name == name
        silent = int((hi[members] == lo[members]).sum())
        if 0 < silent < members.sum():
            idle, total = idle + silent, total + int(members.sum())
            worst = max(worst, (trace.names[name], silent, int(members.sum())), key=lambda item: item[1])
    if not idle:
        return []
    thin = bool(_check_density(trace))
    return [
        Finding(
            "failed" if thin else "warning",
            "idle-instances",
            f"{worst[1]:,} of {worst[2]:,} instances of {worst[0]!r} hold not one CUDA call while the others do"
            + (": in a capture this thin, events were lost" if thin else ""),
        )
    ]


def _check_steps(attribution: Attribution) -> list[Finding]:
    """Compare the kernel counts of steps and phases outside ``warmup``, of each process apart."""
    trace = attribution.trace
    counts = _kernels_per_range(attribution)
    warm = _inside_warmup(attribution)
    findings = []
    for label in (STEP, *PHASES):
        pattern = re.compile(rf"{label}( \d+)?$", re.I)
        named = np.isin(
            trace.ranges.name, [i for i in distinct_values(trace.ranges.name) if pattern.match(trace.names[i])]
        )
        for process in distinct_values(trace.ranges.process[named & ~warm]).tolist():
            some = counts[named & ~warm & (trace.ranges.process == process)]
            if len(some) > 1 and some.min() != some.max():
                findings.append(
                    Finding(
                        "warning",
                        "unequal-steps",
                        f"{label}: kernels per instance range from {some.min():,} to {some.max():,} over {len(some)}"
                        f" instances of process {trace.process_ids.get(process, process)}",
                    )
                )
    return findings


def _kernels_per_range(attribution: Attribution) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    placed = attribution.work
    node = np.where(placed.own >= 0, placed.own, np.maximum(placed.host, NO_RANGE))
    node = node[node != NO_RANGE]
    parents = np.append(attribution.parent, NO_RANGE)
    counts = np.zeros(len(attribution.trace.ranges), dtype=np.int64)
    while len(node):
        np.add.at(counts, node, 1)
        node = parents[node]
        node = node[node != NO_RANGE]
    return counts


def _inside_warmup(attribution: Attribution) -> Bools:
    trace = attribution.trace
    warm = np.array([name.lower() == WARMUP for name in trace.names], dtype=np.bool_)
    inside = warm[trace.ranges.name] if len(trace.ranges) else np.zeros(0, dtype=np.bool_)
    above = attribution.parent
    while (above != NO_RANGE).any():
        inside = inside | ((above != NO_RANGE) & inside[above])
        above = np.where(above != NO_RANGE, attribution.parent[above], NO_RANGE)
    return inside
