"""The self-check of a capture: whether its totals can be trusted.

nsys can exit 0 with 94 % of the kernels missing. Some losses it reports in its diagnostics; others show only in the
data: launches without kernels, graph launches without graphs, ranges without ends, instances of one range with unequal
work. What lost the same part of every step looks even: so the capture of a run is also compared with its manifest, how
many steps it made and how many matrix products a model makes. Each check gives a `Finding`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profkit.analysis import NotebookResult
from profkit.analysis.kernels import OTHER, categorize
from profkit.analysis.placing.attribution import Attribution, mark_members
from profkit.analysis.time_account import find_contexts, find_steps, measured_ranges, number_in_step
from profkit.analysis.time_account.gpu_time import calls_named
from profkit.analysis.tree import explain_no_ranges
from profkit.errors import Finding, Verdict
from profkit.names import BACKWARD, DATA, FORWARD, STEP, phase_of
from profkit.trace.columns import Bools, Ints, Trace, distinct_values, rows_by_value
from profkit.trace.nesting import NO_RANGE

if TYPE_CHECKING:
    from profkit.run.manifest import Manifest

# Every capture between cudaProfilerStart and cudaProfilerStop says this, whole ones too.
_USUAL_DIAGNOSTICS = re.compile(
    r"might have been collected|No \w{1,40} events collected|was launched by the profiler|nvtxDomainDestroy|"
    r"IP samples|backtrace|sampling period|API was ignored",
    re.IGNORECASE,
)
_SENTENCE_ENDS = re.compile(r"[.;\n]")
_COUNTED = re.compile(r"\b(?:events?|CUDA|CUPTI)\b", re.IGNORECASE)
_LOST = re.compile(
    r"\b(?:lost|drop(?:ped)?|discard(?:ed)?|overflow(?:ed)?|incomplete|missing|failed to)\b", re.IGNORECASE
)
LOSS_IN_LOG = re.compile(r"Errors? occurred while processing the raw events|events? (were|was) (lost|dropped)", re.I)

_KERNEL_LAUNCH = re.compile(r"(cu|cuda)Launch(Cooperative)?Kernel(ExC?)?(MultiDevice)?(_ptsz)?(_v\d+)?$")
_GRAPH_LAUNCH = re.compile(r"(cu|cuda)GraphLaunch(_ptsz)?(_v\d+)?$")
_BEGIN_CAPTURE = re.compile(r"(cu|cuda)StreamBeginCapture")
_END_CAPTURE = re.compile(r"(cu|cuda)StreamEndCapture")

# Healthy captures hold 12–43 % of their processes' correlation ids, the lossy one measured 0.9 %.
_THIN = 0.03
_FEWEST_CALLS = 1000
# A profiler that starts during work sees a few kernels without their launches; if the API table was lost, all are.
_UNLAUNCHED_SHARE = 0.05
_FEWEST_UNLAUNCHED = 10

# A step without work is not possible. An optimizer may skip steps, as it does while gradients accumulate.
_NEVER_EMPTY = (STEP, FORWARD, BACKWARD)
_PHASES = (FORWARD, BACKWARD)

_CLOCK_TOLERANCE_NS = 1_000_000
# A kernel may outlast the calls that were recorded, but not by ten times and a minute.
_LONGER_THAN_CALLS = 10
_LONGEST_BESIDE_NS = 60_000_000_000


@dataclass(frozen=True)
class KnownRun:
    """What a run's manifest says of its steps.

    ``steps`` is how many step ranges the process that counts must have; None if that is not known (no ranges were
    asked for, or the script was cut short). ``layers`` is of a built-in model, None for a command. ``even`` says that
    each step must launch as many kernels as any other. ``pids`` are the processes each of which made all of the steps,
    where there were several.
    """

    steps: int | None
    layers: int | None
    even: bool
    pids: tuple[int, ...] = ()


UNKNOWN_RUN = KnownRun(steps=None, layers=None, even=False)


@dataclass(frozen=True, repr=False)
class SelfCheck(NotebookResult, rows="findings", row_type=Finding):
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        return any(finding.verdict == "failed" for finding in self.findings)

    def of(self, verdict: Verdict) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == verdict]


def check_capture(attribution: Attribution, log: str = "", run: KnownRun = UNKNOWN_RUN) -> SelfCheck:
    """Return what can be said for and against trusting a capture; ``log`` is what the profiler printed meanwhile."""
    trace = attribution.trace
    of_launches = (_check_lost, _check_unlaunched, _check_density) if trace.measure == "gpu-kernel" else ()
    loss = LOSS_IN_LOG.search(log)
    findings = [
        *([Finding("log", f"the profiler's log says “{loss[0]}”: events are missing", "failed")] if loss else []),
        *_check_diagnostics(trace, run),
        *_check_values(trace),
        *(finding for check in of_launches for finding in check(trace)),
        *_check_ranges(trace),
        *_check_threads(attribution),
        *_check_idle_instances(attribution),
        *_check_steps(attribution, even=run.even),
        *_check_step_count(attribution, run),
        *_check_products(attribution, run),
    ]
    order = {"failed": 0, "warning": 1, "note": 2}
    return SelfCheck(tuple(sorted(findings, key=lambda finding: order[finding.verdict])))


def _check_diagnostics(trace: Trace, run: KnownRun) -> Iterator[Finding]:
    """A process without any event may have lost them or never had any. If the run knows its steps, `_check_step_count`
    counts those of all its processes, and a silent process is a helper, such as Inductor's compilers.
    """
    for text in dict.fromkeys(d.text.strip() for d in trace.diagnostics if d.severity == "error"):
        yield Finding("diagnostic", f"the profiler reports an error: {text}", "failed")
    warnings = [d for d in trace.diagnostics if d.severity == "warning"]
    pids_of: dict[str, set[int | None]] = {}
    for diagnostic in warnings:
        pids_of.setdefault(diagnostic.text.strip(), set()).add(diagnostic.silent_pid)
    for text, is_silent in dict.fromkeys((d.text.strip(), d.silent_pid is not None) for d in warnings):
        verdict: Verdict = "warning"
        # A loss is told in one sentence. Samples or strings may be lost without harm to what is counted here.
        if any(_COUNTED.search(part) and _LOST.search(part) for part in _SENTENCE_ENDS.split(text)):
            verdict = "failed"
        elif _USUAL_DIAGNOSTICS.search(text) or (is_silent and run.steps is not None):
            verdict = "note"
        pids = pids_of[text] - {None}
        of = f"process {pids.pop()}" if len(pids) == 1 else f"{len(pids)} processes"
        about = f" about {of}, where nothing was recorded" if is_silent else ""
        yield Finding("diagnostic", f"the profiler says{about}: {text}", verdict)


def _check_values(trace: Trace) -> Iterator[Finding]:
    """Look for impossible times: work that outlasts the capture, or starts before its launch."""
    work, calls = trace.work, trace.calls
    if len(calls) and len(work):
        span_ns = int(calls.end_ns.max()) - int(calls.start_ns.min())
        too_long = int((work.end_ns - work.start_ns > _LONGER_THAN_CALLS * span_ns + _LONGEST_BESIDE_NS).sum())
        if too_long:
            yield Finding("impossible-duration", f"{too_long:,} kernels last longer than the whole capture", "failed")
    launched = work.launch_thread >= 0
    early = int((launched & (work.start_ns < work.launch_ns - _CLOCK_TOLERANCE_NS)).sum())
    if early and trace.measure == "gpu-kernel":
        yield Finding(
            "before-launch", f"{early:,} kernels start over 1 ms before the call that launched them", "failed"
        )


def _check_ranges(trace: Trace) -> Iterator[Finding]:
    open_ranges = np.flatnonzero(trace.ranges.is_open)
    if len(open_ranges):
        names = dict.fromkeys(trace.names[int(trace.ranges.name[i])] for i in open_ranges)
        some = ", ".join(repr(name) for name in list(names)[:3])
        message = f"{len(open_ranges):,} ranges never ended ({some}); they count to the end"
        yield Finding("open-range", message, "warning")
    if trace.has_invisible_ranges:
        yield Finding("invisible-ranges", explain_no_ranges(trace), "warning")


def _check_threads(attribution: Attribution) -> Iterator[Finding]:
    """Look for phases under which nothing lies though kernels were launched meanwhile: threads that do not match."""
    trace, ledger = attribution.trace, attribution.ledger
    ranges, work = trace.ranges, trace.work
    if trace.measure != "gpu-kernel" or ledger.outside_ns + ledger.no_launch_ns < ledger.total_ns:
        return
    is_phase = np.array([phase_of(name) in _PHASES for name in trace.names] or [False], dtype=np.bool_)
    phases = np.flatnonzero(is_phase[ranges.name])
    launched = np.sort(work.launch_ns[work.launch_thread >= 0])
    begun, ended = (np.searchsorted(launched, edges[phases]) for edges in (ranges.start_ns, ranges.end_ns))
    if (begun < ended).any():
        text = "kernels were launched while phases were open, and none lies in any range: their threads do not match"
        yield Finding("unmatched-threads", text, "failed")


def _check_lost(trace: Trace) -> Iterator[Finding]:
    calls = trace.calls
    kernels, graphs = calls_named(trace, _KERNEL_LAUNCH), calls_named(trace, _GRAPH_LAUNCH)
    without = np.flatnonzero((kernels | graphs) & ~calls.has_work & ~calls.failed)
    lost = without[~_in_stream_capture(trace, without)]
    if lost_kernels := int(kernels[lost].sum()):
        yield Finding(
            "launch-without-kernel",
            f"{lost_kernels:,} of {int(kernels.sum()):,} kernel launches have no kernel: kernels are missing",
            "failed",
        )
    if lost_graphs := int(graphs[lost].sum()):
        yield Finding(
            "graph-launch-without-graph",
            f"{lost_graphs:,} of {int(graphs.sum()):,} CUDA graph launches have neither a graph row nor"
            " kernels: the graphs' time is missing; capture with --cuda-graph-trace=node",
            "failed",
        )


def _in_stream_capture(trace: Trace, rows: Ints) -> Bools:
    calls = trace.calls
    inside = np.zeros(len(rows), dtype=np.bool_)
    if not len(rows):
        return inside
    begins, ends = calls_named(trace, _BEGIN_CAPTURE) & ~calls.failed, calls_named(trace, _END_CAPTURE)
    open_since: dict[int, list[int]] = {}
    captures: dict[int, list[tuple[int, int]]] = {}
    for call in np.flatnonzero(begins | ends).tolist():
        process = int(calls.process[call])
        if begins[call]:
            open_since.setdefault(process, []).append(int(calls.start_ns[call]))
        elif open_since.get(process):
            captures.setdefault(process, []).append((open_since[process].pop(), int(calls.end_ns[call])))
    mine = rows_by_value(calls.process[rows])
    for process, spans in captures.items():
        if process in mine:
            # Calls are sorted by time.
            edges = np.searchsorted(calls.start_ns[rows[mine[process]]], np.array(spans, dtype=np.int64))
            change = np.zeros(len(mine[process]) + 1, dtype=np.int64)
            np.add.at(change, edges[:, 0], 1)
            np.subtract.at(change, edges[:, 1], 1)
            inside[mine[process]] = np.cumsum(change)[:-1] > 0
    return inside


def _check_unlaunched(trace: Trace) -> Iterator[Finding]:
    unlaunched, count = int((trace.work.launch_thread < 0).sum()), len(trace.work)
    # If they are few, the result itself warns and gives their time.
    if unlaunched >= _FEWEST_UNLAUNCHED and unlaunched > _UNLAUNCHED_SHARE * count:
        message = f"{unlaunched:,} of {count:,} kernels have no launch record and no range: CUDA API calls are missing"
        yield Finding("kernel-without-launch", message, "failed")


def _check_density(trace: Trace) -> Iterator[Finding]:
    """Compare the number of recorded calls with the correlation ids used in that time: a hint, never proof."""
    for process, rows in rows_by_value(trace.calls.process).items():
        ids = trace.calls.correlation[rows]
        count, span = len(ids), int(ids.max()) - int(ids.min()) + 1
        if count >= _FEWEST_CALLS and count < _THIN * span:
            pid = trace.process_ids.get(process, process)
            yield Finding(
                "thin",
                f"process {pid}: only {count:,} CUDA calls for {span:,} correlation ids ({count / span:.1%};"
                " healthy captures have over 10 %): events may be missing",
                "warning",
            )


def _check_idle_instances(attribution: Attribution) -> Iterator[Finding]:
    """Find range names where some instances launched work and the same ones in other steps made no CUDA call.

    A whole capture may have such names too (a branch not taken); in a thin capture it means loss. Waiting for data
    calls CUDA now and then: while the loader pins memory, or another thread launches.
    """
    trace = attribution.trace
    was_open = ~attribution.is_mirror & trace.ranges.was_open & ~_waits_for_data(trace)
    opened = np.flatnonzero(was_open)
    if trace.measure != "gpu-kernel" or not len(trace.calls) or not len(opened):
        return
    name, silent = trace.ranges.name[opened], _without_calls(trace)[opened]
    number = number_in_step(attribution, opened, name)
    _, alike = np.unique(name * (number.max() + 1) + number, return_inverse=True)
    count, without = np.bincount(alike), np.bincount(alike[silent], minlength=int(alike.max()) + 1)
    is_mixed = (without > 0) & (without < count)
    every, idle = (np.bincount(which, minlength=len(trace.names)) for which in (name, name[silent & is_mixed[alike]]))
    if not idle.any():
        return
    worst = min(np.flatnonzero(idle == idle.max()).tolist(), key=lambda at: trace.names[at])
    thin = any(_check_density(trace))
    yield Finding(
        "idle-instances",
        f"{idle[worst]:,} of {every[worst]:,} instances of {trace.names[worst]!r} hold no CUDA call, while the"
        " others do" + (": most CUDA calls are missing, so events were lost" if thin else ""),
        "failed" if thin else "warning",
    )


def _check_steps(attribution: Attribution, *, even: bool) -> Iterator[Finding]:
    """Compare the kernel counts of steps and phases outside ``warmup``, of each process and each context apart.

    The first backward call of a step is compared with the first ones of the other steps, the second with the second:
    steps of several micro-batches, models or optimizers are alike as wholes, but their parts are not. If every step is
    known to do the same work (``even``), a difference is loss.
    """
    trace = attribution.trace
    of_gpu = trace.measure == "gpu-kernel"
    measured = measured_ranges(attribution)
    for label, members in measured.items():
        counts = _count_outside_data(attribution, members)
        uneven: dict[int, list[tuple[bool, int, Ints, int]]] = {}
        kinds = _kinds_of_steps(attribution, measured) if label == STEP and not even else np.zeros_like(members)
        for process, number, which in _alike(attribution, members, kinds):
            some = counts[which]
            if some.min() == some.max():
                continue
            empty = members[which][some == 0]
            is_empty = of_gpu and label in _NEVER_EMPTY and _has_any_without_launches(trace, empty)
            uneven.setdefault(process, []).append((is_empty, int(some.max() - some.min()), some, number))
        for process, counted in uneven.items():
            is_empty, _, some, number = max(counted, key=lambda entry: entry[:2])
            pid = trace.process_ids.get(process, process)
            which_of_step = f" (number {number + 1} in its step)" if number else ""
            lost = is_empty or (of_gpu and even)
            work = "kernels" if of_gpu else "operators"
            yield Finding(
                "empty-steps" if is_empty else "unequal-steps",
                f"{label}{which_of_step}: from {some.min():,} to {some.max():,} {work} each time ({len(some)} times,"
                f" process {pid})" + (": kernels are missing" if lost else ""),
                "failed" if lost else "warning",
            )


def _count_outside_data(attribution: Attribution, members: Ints) -> Ints:
    """Return how much work each range holds outside ``data``: a loader rebuilds batches in the order they come in."""
    data = np.flatnonzero(_waits_for_data(attribution.trace))
    if not len(data):
        return attribution.work.count(members)
    loads = mark_members(len(attribution.trace.work), attribution.work.under(data).rows)
    under = attribution.work.under(members, np.arange(len(members)))
    return np.bincount(under.member[~loads[under.rows]], minlength=len(members))


def _waits_for_data(trace: Trace) -> Bools:
    names = np.array([text == DATA for text in trace.names] or [False], dtype=np.bool_)
    waits: Bools = names[trace.ranges.name]
    return waits


def _kinds_of_steps(attribution: Attribution, measured: Mapping[str, Ints]) -> Ints:
    """Steps with as many of each phase are of one kind: one that skips its update, or evaluates, does other work."""
    steps, around = measured[STEP], find_steps(attribution)
    phases = [around[members] for label, members in measured.items() if label != STEP]
    if not phases:
        return np.zeros_like(steps)
    counts = [np.bincount(phase[phase != NO_RANGE], minlength=len(around))[steps] for phase in phases]
    kinds: Ints = np.unique(np.stack(counts, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    return kinds


def _alike(attribution: Attribution, members: Ints, kinds: Ints) -> Iterator[tuple[int, int, Ints]]:
    """They are of one process, one context and one of ``kinds``, and each is the k-th in its step."""
    ranges, context = attribution.trace.ranges, find_contexts(attribution)[members]
    number = number_in_step(attribution, members, np.zeros(len(members), dtype=np.int64))
    for process, mine in rows_by_value(ranges.process[members]).items():
        for together in rows_by_value(context[mine]).values():
            for k, some in rows_by_value(number[mine[together]]).items():
                which = mine[together[some]]
                for alike in rows_by_value(kinds[which]).values():
                    yield process, k, which[alike]


def _without_calls(trace: Trace) -> Bools:
    calls, ranges = trace.calls, trace.ranges
    silent = np.ones(len(ranges), dtype=np.bool_)
    mine = rows_by_value(ranges.process)
    for process, rows in rows_by_value(calls.process).items():
        members = mine.get(process)
        if members is not None:
            times = calls.start_ns if len(rows) == len(calls) else calls.start_ns[rows]
            low, high = (np.searchsorted(times, edge[members]) for edge in (ranges.start_ns, ranges.end_ns))
            silent[members] = low >= high
    return silent


def _has_any_without_launches(trace: Trace, members: Ints) -> bool:
    ranges, placed_ns = trace.ranges, trace.work.placed_ns
    for index in members.tolist():
        within = (placed_ns >= ranges.start_ns[index]) & (placed_ns < ranges.end_ns[index])
        if not (within & (trace.work.process == ranges.process[index])).any():
            return True
    return False


_LINEARS_PER_LAYER = 7
"""Query, key, value and output of attention, three of SwiGLU."""
_BATCHED_PER_LAYER = 2
"""Attention scores, and the values weighted by them."""

_COMPLETE, _CUT_SHORT = "complete", "cut short"

# cuBLAS adds up the parts of a product that was split along its inner dimension in a kernel of its own.
_ADDS_SPLIT_PARTS = re.compile(r"splitKreduce|execute_split_k_kernel", re.IGNORECASE)


def know_run(manifest: Manifest) -> KnownRun:
    """Return what the manifest of a run says of its steps; manifests of older versions say less."""
    workload = manifest.workload
    if manifest.status != "complete":
        return UNKNOWN_RUN
    pids = _pids_of_whole(manifest)
    if workload.preset_name is None:
        steps = workload.steps
        recorded = [process for process in manifest.processes if process.is_recorded]
        if steps is not None and len(recorded) == 1 and recorded[0].state == _CUT_SHORT:
            steps = min(steps, len(recorded[0].profiled))
        return KnownRun(steps if workload.annotate else None, None, even=False, pids=pids)
    # The first step makes the optimizer's state; CUDA graphs of compiled code run from the third.
    settled = 3 if workload.compile_mode == "reduce-overhead" else 1
    layers = (manifest.preset or {}).get("num_layers")
    return KnownRun(
        steps=None if workload.steps is None else workload.steps * max(len(workload.contexts), 1),
        layers=layers if isinstance(layers, int) else None,
        even=(workload.warmup_steps or 0) >= settled,
        pids=pids,
    )


def _pids_of_whole(manifest: Manifest) -> tuple[int, ...]:
    """Return the processes that recorded every step, where there were several: not those left out by ``--ranks``."""
    if len(manifest.processes) < 2:
        return ()
    return tuple(
        process.pid
        for process in manifest.processes
        if process.pid is not None and process.state == _COMPLETE and process.is_recorded and not process.failure
    )


def products_per_forward(layers: int) -> int:
    """Return how many matrix products a forward pass of the built-in model makes: nine a layer and the head."""
    return (_LINEARS_PER_LAYER + _BATCHED_PER_LAYER) * layers + 1


def _check_step_count(attribution: Attribution, run: KnownRun) -> Iterator[Finding]:
    if run.steps is None or attribution.trace.has_invisible_ranges:
        return
    steps = measured_ranges(attribution).get(STEP, np.empty(0, dtype=np.int64))
    trace = attribution.trace
    rows = rows_by_value(trace.ranges.process[steps])
    counts = {process: len(own) for process, own in rows.items()}
    ours = {pid: process for process, pid in trace.process_ids.items() if pid in run.pids}
    if ours:  # else the numbers are of another namespace
        made = min(counts.get(ours[pid], 0) if pid in ours else 0 for pid in run.pids)
        where = " of one of its processes" if len(run.pids) > 1 else ""
    else:
        made, where = max(counts.values(), default=0), ""
    # A script may have ranges of its own under the same name.
    if made < run.steps or (run.layers is not None and made > run.steps):
        message = f"the run made {run.steps:,} step{'s' * (run.steps != 1)}, and the capture holds {made:,}{where}"
        yield Finding("step-count", message, "failed")


def _check_products(attribution: Attribution, run: KnownRun) -> Iterator[Finding]:
    trace = attribution.trace
    members = measured_ranges(attribution).get(FORWARD)
    if run.layers is None or members is None or trace.measure != "gpu-kernel" or not len(trace.work):
        return
    under = attribution.work.under(members, np.arange(len(members)))
    rows, instance = under.rows, under.member
    if trace.work.is_graph[rows].any():  # a graph traced whole does not show its kernels
        return
    is_product, is_nameless = _products_and_nameless(attribution)
    made, nameless = (
        np.bincount(instance[marked[trace.work.name[rows]]], minlength=len(members))
        for marked in (is_product, is_nameless)
    )
    due = products_per_forward(run.layers)
    said = f"a forward pass of this model makes {due:,} matrix products"
    missing = due - made
    lost = np.flatnonzero(missing > nameless)  # kernels of unknown kinds may be products too
    if len(lost):
        worst = int(made[lost].min())
        message = f"{said}; {len(lost):,} of {len(made):,} hold fewer, down to {worst:,}: kernels are missing"
        yield Finding("missing-products", message, "failed")
    elif missing.any():
        message = f"{said}, and by their kernels' names they hold {made.min():,} to {made.max():,}"
        yield Finding("unknown-products", f"{message}: some kernel names are unknown or ambiguous", "warning")


def _products_and_nameless(attribution: Attribution) -> tuple[Bools, Bools]:
    names = attribution.trace.names
    products, nameless = np.zeros((2, len(names)), dtype=np.bool_)
    for index in distinct_values(attribution.trace.work.name).tolist():
        category = categorize(names[index])
        products[index] = category.name == "gemm" and not _ADDS_SPLIT_PARTS.search(names[index])
        nameless[index] = category == OTHER
    return products, nameless
