"""Self-check of the launches: those without a kernel, kernels without a launch, and calls that are too few."""

from __future__ import annotations

import re

import numpy as np

from profkit.findings import Finding, Verdict
from profkit.trace.columns import Bools, Calls, Ints, Trace, distinct_values, rows_by_value

_KERNEL_LAUNCH = re.compile(r"(cu|cuda)Launch(Cooperative)?Kernel(ExC?)?(MultiDevice)?(_ptsz)?(_v\d+)?$")
_GRAPH_LAUNCH = re.compile(r"(cu|cuda)GraphLaunch(_ptsz)?(_v\d+)?$")
_BEGIN_CAPTURE = re.compile(r"(cu|cuda)StreamBeginCapture")
_END_CAPTURE = re.compile(r"(cu|cuda)StreamEndCapture")

# Healthy captures hold 12–43 % of their processes' correlation ids, the lossy one measured 0.9 %.
_THIN = 0.03
_FEWEST_CALLS = 1000
# A profiler that starts amid work sees a few kernels without their launches; a lost API table leaves them all.
_UNLAUNCHED_SHARE = 0.05
_FEWEST_UNLAUNCHED = 10


def check_launches(trace: Trace) -> list[Finding]:
    """Look for launches without their kernels, kernels without launches, and calls missing from among the rest."""
    if trace.measure != "gpu-kernel":
        return []
    return [*_check_lost(trace), *_check_unlaunched(trace), *_check_density(trace)]


def is_thin(trace: Trace) -> bool:
    """Return whether calls are missing from among those that were recorded."""
    return bool(_check_density(trace))


def _check_lost(trace: Trace) -> list[Finding]:
    calls = trace.calls
    kernels, graphs = _named(trace, _KERNEL_LAUNCH), _named(trace, _GRAPH_LAUNCH)
    owing = np.flatnonzero((kernels | graphs) & ~calls.has_work & ~calls.failed)
    captured = _in_stream_capture(trace, owing)
    findings, lost = [], owing[~captured]
    if lost_kernels := int(kernels[lost].sum()):
        findings.append(
            Finding(
                "launch-without-kernel",
                f"{lost_kernels:,} of {int(kernels.sum()):,} kernel launches have no kernel: kernels are missing",
                "failed",
            )
        )
    if lost_graphs := int(graphs[lost].sum()):
        findings.append(
            Finding(
                "graph-launch-without-graph",
                f"{lost_graphs:,} of {int(graphs.sum()):,} CUDA graph launches have neither a graph row nor"
                " kernels: the graphs' time is missing; capture with --cuda-graph-trace=node",
                "failed",
            )
        )
    if captured.any():
        findings.append(
            Finding(
                "stream-capture",
                f"{int(captured.sum()):,} launches were recorded into CUDA graphs and not run: they owe no kernel",
                "note",
            )
        )
    return findings


def _named(trace: Trace, pattern: re.Pattern[str]) -> Bools:
    """Return the calls whose name matches."""
    matching = np.zeros(len(trace.names), dtype=np.bool_)
    matching[[i for i in distinct_values(trace.calls.name).tolist() if pattern.match(trace.names[i])]] = True
    return matching[trace.calls.name]


def _in_stream_capture(trace: Trace, rows: Ints) -> Bools:
    """Return which calls fell between the begin and the end of a stream capture, on any thread of their process."""
    calls = trace.calls
    inside = np.zeros(len(rows), dtype=np.bool_)
    if not len(rows):
        return inside
    begins, ends = _named(trace, _BEGIN_CAPTURE) & ~calls.failed, _named(trace, _END_CAPTURE)
    open_since: dict[int, list[int]] = {}
    for call in np.flatnonzero(begins | ends).tolist():
        process = int(calls.process[call])
        if begins[call]:
            open_since.setdefault(process, []).append(int(calls.start_ns[call]))
        elif open_since.get(process):
            begun = open_since[process].pop()
            # Calls are sorted by time.
            low, high = np.searchsorted(calls.start_ns[rows], (begun, calls.end_ns[call]))
            inside[low:high] |= calls.process[rows[low:high]] == process
    return inside


def _check_unlaunched(trace: Trace) -> list[Finding]:
    unlaunched, count = int((trace.work.launch_thread < 0).sum()), len(trace.work)
    if not unlaunched:
        return []
    lost = unlaunched >= _FEWEST_UNLAUNCHED and unlaunched > _UNLAUNCHED_SHARE * count
    message = f"{unlaunched:,} of {count:,} kernels have no launch record and no range"
    # Of a few the result itself warns, with their time.
    verdict: Verdict = "failed" if lost else "note"
    return [Finding("kernel-without-launch", message + (": CUDA API calls are missing" if lost else ""), verdict)]


def _check_density(trace: Trace) -> list[Finding]:
    """Compare the calls recorded with the correlation ids that were handed out meanwhile: a hint, never proof."""
    findings = []
    for process, (count, span) in _call_density(trace.calls).items():
        if count >= _FEWEST_CALLS and count < _THIN * span:
            pid = trace.process_ids.get(process, process)
            findings.append(
                Finding(
                    "thin",
                    f"process {pid}: only {count:,} CUDA calls for {span:,} correlation ids ({count / span:.1%};"
                    " whole captures have over 10 %): events may be missing",
                    "warning",
                )
            )
    return findings


def _call_density(calls: Calls) -> dict[int, tuple[int, int]]:
    """Return per process how many calls were recorded, and over how many correlation ids they spread."""
    found = {}
    for process, rows in rows_by_value(calls.process).items():
        ids = calls.correlation[rows]
        found[process] = (len(ids), int(ids.max() - ids.min()) + 1)
    return found
