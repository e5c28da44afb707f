"""Where the figures of a `Summary` come from: the analyses that the other commands show, each asked once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.analysis.kernels import categorize
from profkit.analysis.kernels.compiled_code import find_compilations, read_run_compilations
from profkit.analysis.lines import choose_lines, describe_later_step, find_later_step, find_lines, find_rare_steps_of
from profkit.analysis.memory import find_capacity
from profkit.analysis.memory.opened_snapshot import MemoryResult, OpenedSnapshot
from profkit.analysis.memory.places import fold
from profkit.analysis.opened import OpenedCapture, OpenedTrace
from profkit.analysis.placing.attribution import Attribution, mark_members
from profkit.analysis.ranks.comparison import compare_opened
from profkit.analysis.summary import (
    EXPANDABLE,
    RUN_WARNING,
    WORTH,
    GpuUse,
    Head,
    MemoryUse,
    OptimizerUse,
    StepUse,
    Summary,
    WorkUse,
    divide_step,
)
from profkit.analysis.time_account import is_step, is_warmup, mark_work_of_steps, measured_ranges
from profkit.analysis.time_account.account import TimeAccount, divide_idle, recorded_idle
from profkit.analysis.time_account.gpu_time import DataWait
from profkit.analysis.time_account.step_times import (
    StepTimes,
    find_timing_doubts,
    measure_memory_cost,
    summarize_step_times,
)
from profkit.analysis.tree import split_path
from profkit.analysis.tree.modules import ModuleTime, find_costliest, time_kernels_by_module, time_modules
from profkit.errors import Finding, ProfkitError
from profkit.names import BACKWARD, DATA, FORWARD, OPTIMIZER, RECOMPUTE, STEP, phase_of
from profkit.run.manifest import RECORDED_FASTER, Compiled, Manifest, Process, find_condition
from profkit.run.recording import COMMAND_WARMUP, describe_step
from profkit.trace.columns import Bools, Ints, distinct_values, empty_ints

_MUCH = 0.05
"""Matrix products of a type that take a smaller share of all products' time at the peaks are not named."""
_MOST_SIMULATED = 400_000
"""Events; `profkit whatif` simulates longer histories, at 25 µs an event."""
_SAID_ELSEWHERE = ("no-clean-twin", "uncounted")
"""The line of the step time says if the unprofiled one is unknown; the summary names no FLOPs that may lack some."""
_TF32 = ("high", "medium", True, "tf32")
"""What torch's settings of fp32 products are where they allow TF32."""


def summarize_capture(capture: OpenedCapture) -> Summary:
    manifest = capture.manifest
    compared = compare_opened(capture.trace, capture.run)
    summary = Summary(str(capture.path), _head(capture, manifest), compared=compared)
    findings = [Finding(RUN_WARNING, text) for text in manifest.warnings]
    if capture.trace is not None:
        summary, doubts = _add_time(summary, capture.trace, manifest.uncounted)
        findings += doubts
    else:
        summary = replace(summary, steps=tuple(_steps(summarize_step_times(manifest))))
    if capture.snapshot is not None:
        summary, doubts = _add_memory(summary, capture.snapshot, manifest)
        findings += doubts
    findings += find_compilations(capture.run)
    found = None if capture.run is None else capture.run.lines()
    if capture.run is not None and found is not None:
        lines = choose_lines(find_lines(capture.run))
        summary = replace(summary, lines=lines, rare_steps=find_rare_steps_of(capture.run))
        later_ns = find_later_step(found, summary.without_waits_ns)
        if later_ns is not None:
            summary = replace(summary, later_step_ns=later_ns)
            # They had become shorter by then.
            findings = [finding for finding in findings if not finding.message.startswith(RECORDED_FASTER)]
            findings.append(describe_later_step(later_ns, summary.without_waits_ns))
    summary = replace(
        summary,
        compilations=read_run_compilations(capture.run),
        missing=tuple(_missing(capture)),
        why_missing=why_left_out(manifest),
    )
    kept = {
        finding.message: finding
        for finding in findings
        if finding.verdict != "note" and finding.code not in _SAID_ELSEWHERE
    }
    summary = replace(summary, findings=tuple(kept.values()))
    # Steps of several contexts have no step in common.
    if capture.trace is None or summary.step_ns is None or len(summary.steps) != 1 or summary.has_failed:
        return summary
    tree = divide_step(capture.trace.account, summary.limits, summary.lines, summary.step_ns)
    if tree is not None and tree.basis == "phases" and summary.head.rank_count > 1:
        tree = replace(tree, rank=manifest.first_rank)
    return replace(summary, tree=tree)


def _describe_iteration(process: Process | None) -> str | None:
    if process is None or process.step is None or process.step_times == 1:
        return None
    return describe_step(process.step, process.step_names, process.step_times)


def _missing(capture: OpenedCapture) -> Iterator[str]:
    if capture.run is None or capture.trace is None or not len(capture.trace.account.steps):
        return
    if not capture.run.manifest.argv:
        return
    if capture.run.lines() is None:
        yield "lines of source"
    if capture.run.manifest.unprofiled is None:
        yield "unprofiled step times"


def why_left_out(manifest: Manifest) -> str | None:
    """Return why `profkit run` of the same command would again leave lines and unprofiled times out; None if not so.

    It chose itself to record fewer steps than usual, or the whole program, which shows none.
    """
    program, target = list(manifest.command), list(manifest.argv)
    while program and target and program[-1] == target[-1]:
        del program[-1], target[-1]
    options = {word.partition("=")[0] for word in program if word.startswith("--")}
    workload = manifest.workload
    if workload.step_on == "whole" and "--step-on" not in options:
        return "the program shows no step; `profkit help scripts` says what makes one"
    is_short = workload.warmup_steps is not None and workload.warmup_steps < COMMAND_WARMUP
    if manifest.kind == "command" and is_short and not options & {"--warmup", "--steps", "--step-on"}:
        return "the program makes too few steps for that"
    return None


def _head(capture: OpenedCapture, manifest: Manifest) -> Head:
    trace = None if capture.trace is None else capture.trace.trace
    work = None if capture.run is None else capture.run.work
    compiled = find_condition(manifest, "compiled")
    is_compiled = None
    if manifest.workload.compile_mode is not None:
        is_compiled = manifest.workload.compile_mode != "none"
    elif isinstance(compiled, Compiled):
        is_compiled = compiled.graphs > 0
    if trace is not None and any(_is_inductors(name) for name in trace.names):
        is_compiled = True
    on_gpu = trace is not None and trace.measure == "gpu-kernel"
    gpus = sorted(set(trace.gpus)) if trace is not None else []
    process = manifest.processes[0] if manifest.processes else None
    steps = None
    if capture.trace is not None:
        attribution = capture.trace.attribution
        measured = measured_ranges(attribution).get(STEP, empty_ints())
        each = set(np.unique(attribution.trace.ranges.process[measured], return_counts=True)[1].tolist())
        steps = each.pop() if len(each) == 1 else None
    return Head(
        command=manifest.argv or ((manifest.target,) if manifest.target else ()),
        iteration=_describe_iteration(process),
        gpu=manifest.gpu or (gpus[0] if len(gpus) == 1 else None) or (None if process is None else process.gpu),
        gpu_count=len(distinct_values(trace.work.device)) if trace is not None and on_gpu else 0,
        rank_count=0 if capture.trace is None else len(capture.trace.ranks.members),
        torch=manifest.versions.get("torch"),
        precision=_precision(manifest, None if work is None else work.dtype),
        dtype=(None if work is None else work.dtype) or manifest.workload.dtype,
        is_compiled=is_compiled,
        ending=manifest.ending if capture.run is not None and manifest.status != "complete" else None,
        steps=steps,
        drained_steps=0 if trace is None or manifest.loading is None else manifest.loading.drained_steps,
    )


def _precision(manifest: Manifest, counted: str | None) -> str | None:
    autocast = find_condition(manifest, "autocast_dtypes")
    if isinstance(autocast, tuple) and autocast:
        return f"{', '.join(autocast)} autocast".replace("bfloat16", "bf16").replace("float16", "fp16")
    products = find_condition(
        manifest, "float32_matmul_precision", "cuda_matmul_fp32_precision", "cuda_matmul_allow_tf32"
    )
    dtype = counted or manifest.workload.dtype
    convolutions = find_condition(manifest, "cudnn_conv_fp32_precision", "cudnn_allow_tf32")
    if dtype == "tf32" and products not in _TF32 and convolutions in _TF32:
        dtype = "fp32"  # most FLOPs are convolutions', and other products run in fp32
    if products is None or manifest.device == "cpu" or dtype not in (None, "fp32"):
        return dtype
    return f"{dtype or 'no autocast'}, {_say_tf32(products in _TF32, convolutions)}"


def _say_tf32(in_products: bool, convolutions: object) -> str:
    """Return where TF32 is on: cuDNN has a switch of its own, ``convolutions``, which is None if it is not known."""
    words = "TF32 on" if in_products else "TF32 off"
    if convolutions is None:
        return f"{words} in matrix products"
    in_convolutions = convolutions in _TF32
    if in_convolutions == in_products:
        return words
    return f"{words} in matrix products, {'on' if in_convolutions else 'off'} in convolutions"


def _add_time(summary: Summary, opened: OpenedTrace, uncounted: str | None) -> tuple[Summary, list[Finding]]:
    attribution, account = opened.attribution, opened.account
    measured = measured_ranges(attribution)
    passes = measured.get(BACKWARD, measured.get(FORWARD, empty_ints()))
    rows = mark_work_of_steps(attribution)
    has_work = opened.trace.measure == "gpu-kernel" and len(opened.trace.work)
    result = opened.efficiency() if has_work else None
    doubts = find_timing_doubts(account.timed) if result is None else result.warnings
    modules = time_modules(attribution)
    costliest = find_costliest(modules)
    summary = replace(
        summary,
        has_trace=True,
        step_count=len(account) or len(account.steps) or 1,
        program_steps=len(account.steps) or 1,
        steps=tuple(_steps(account.timed, account)),
        gpu=None if result is None else _gpu(account, result),
        limits=opened.step_limits if has_work else None,
        work=_work(attribution, rows, measured.get(OPTIMIZER, empty_ints()), result, uncounted),
        optimizer=None if result is None else _optimizer(account, result),
        modules=modules,
        costliest_module=costliest,
        costliest_kinds=_by_kind(attribution, costliest),
        recomputes=any(name == RECOMPUTE for name in opened.trace.names),
        passes=len(passes) / len(account.steps) if len(account.steps) and len(passes) else None,
        ledger=attribution.ledger if len(opened.trace.work) else None,
    )
    return summary, [*opened.self_check.findings, *doubts]


def _by_kind(attribution: Attribution, module: ModuleTime | None) -> dict[str, int]:
    kinds: dict[str, int] = {}
    kernels = {} if module is None else time_kernels_by_module(attribution, {module.module})[module.module]
    for name, kernel in kernels.items():
        kind = categorize(name, attribution.trace.measure).name
        kinds[kind] = kinds.get(kind, 0) + kernel.total_ns
    return kinds


def _steps(timed: StepTimes | None, recorded: TimeAccount | None = None) -> Iterator[StepUse]:
    steps = [] if timed is None else [times for times in timed.phases if times.phase == STEP]
    recorded_ns = None if recorded is None else recorded.recorded_step_ns()
    if not steps and recorded_ns is not None:
        yield StepUse(None, None, 0, None, None, recorded_ns)
    for step in steps:
        waits = None if timed is None else timed.find(DATA, step.context)
        is_of_all = waits is not None and waits.clean.count == step.clean.count
        waited_ns = None if timed is None or waits is None else timed.waited_ns
        yield StepUse(
            step.context,
            step.clean_ns,
            step.clean.count,
            step.usual.p10,
            step.usual.p90,
            None if recorded is None else recorded.recorded_step_ns(step.context),
            (waits.clean_ns or None) if waits is not None and is_of_all else None,
            None if waits is None or waited_ns is None else waits.clean_ns - waited_ns,
            step.rare_count,
            0 if step.recorded is None else int((~step.recorded.is_usual).sum()),
        )


def _gpu(account: TimeAccount, result: EfficiencyResult) -> GpuUse:
    parts, data = account.sum_parts() if len(account) else (result.capture, DataWait())
    trace = account.attribution.trace
    graphs = [index for index, name in enumerate(trace.names) if "GraphLaunch" in name]
    return GpuUse(
        parts=parts,
        causes=divide_idle(parts, data, parts.idle_ns),
        idle=account.idle_time() if len(account) else recorded_idle(parts, data),
        graph_launches=int(np.isin(trace.calls.name, graphs).sum()) + int(trace.work.is_graph.sum()),
    )


def _work(
    attribution: Attribution, rows: Bools, optimizers: Ints, result: EfficiencyResult | None, uncounted: str | None
) -> WorkUse | None:
    trace = attribution.trace
    work = trace.work
    if not len(work):
        return None
    optimized = rows & mark_members(len(work), attribution.work.under(optimizers).rows)
    at_peak = [
        row.ceiling_share * row.busy_ns
        for row in (() if result is None else result.ranges)
        if is_step(row.name) and row.ceiling_share is not None
    ]
    return WorkUse(
        measure=trace.measure,
        kernel_time_ns=int(work.duration_ns[rows].sum()),
        by_category=_by_category(attribution, rows),
        in_optimizer=_by_category(attribution, optimized),
        at_peak_ns=sum(at_peak) if at_peak else None,
        peaks=None if result is None else result.peaks,
        uncounted=uncounted,
        dtypes=() if result is None else tuple(_dtypes_at_peak(result)),
    )


def _dtypes_at_peak(result: EfficiencyResult) -> Iterator[str]:
    if result.peaks is None:
        return
    times = {dtype: result.product_flops[dtype] / result.peaks.flops_per_s[dtype] for dtype in result.dtypes}
    yield from (dtype for dtype, time in times.items() if time >= _MUCH * sum(times.values()))


def _by_category(attribution: Attribution, rows: Bools) -> dict[str, int]:
    trace = attribution.trace
    totals: dict[str, int] = {}
    sums = np.zeros(len(trace.names), dtype=np.int64)
    np.add.at(sums, trace.work.name[rows], trace.work.duration_ns[rows])
    for index in distinct_values(trace.work.name[rows]).tolist():
        category = categorize(trace.names[index], trace.measure).name
        totals[category] = totals.get(category, 0) + int(sums[index])
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _is_inductors(name: str) -> bool:
    return name.startswith("triton_") and categorize(name).rule.startswith("inductor")


def _optimizer(account: TimeAccount, result: EfficiencyResult) -> OptimizerUse | None:
    attribution = account.attribution
    rows = []
    for row in result.ranges:
        parts = split_path(row.path)
        is_measured = any(map(is_step, parts)) and not any(map(is_warmup, parts))
        if is_measured and phase_of(row.name) == OPTIMIZER and row.gpu is not None:
            rows.append(row)
    members = measured_ranges(attribution).get(OPTIMIZER, empty_ints())
    if not rows or not len(members):
        return None
    trace = attribution.trace
    names = [trace.names[i] for i in distinct_values(trace.work.name[attribution.work.under(members).rows]).tolist()]
    kind = "single tensor"
    if any(_is_inductors(name) for name in names):
        kind = "compiled"
    elif any("multi_tensor_apply" in name for name in names):
        kind = "fused" if any("Fused" in name for name in names) else "foreach"
    return OptimizerUse(
        kind,
        sum(row.gpu.span_ns for row in rows if row.gpu is not None),
        sum(row.launch_count for row in rows),
    )


def _simulate_expandable(opened: OpenedSnapshot, result: MemoryResult) -> int | None:
    """None where the simulator is not proved, they could not save enough, or the history takes long to simulate."""
    settings, totals = opened.snapshot.settings, result.totals
    spare = totals.reserved_peak_bytes - totals.requested_peak_bytes
    if settings.expandable_segments or spare < WORTH * totals.allocated_peak_bytes:
        return None
    if not totals.reserved_peak_bytes or result.history.events > _MOST_SIMULATED:
        return None
    try:
        simulated = opened.whatif(allocators=[",".join(filter(None, (settings.text, EXPANDABLE)))])
    except ProfkitError:
        return None
    return simulated.cases[-1].reserved_range_bytes[1] if simulated.identity.exact else None


def _add_memory(summary: Summary, opened: OpenedSnapshot, manifest: Manifest) -> tuple[Summary, list[Finding]]:
    result, memory = opened.memory(), opened.device()
    at, check = result.composition, result.allocator_check
    use = MemoryUse(
        device=result.totals.device,
        peak_bytes=result.totals.allocated_peak_bytes,
        exact=result.totals.exact,
        phase=at.phase,
        by_category={row.category: row.bytes for row in at.by_category},
        reserved_peak_bytes=result.totals.reserved_peak_bytes,
        capacity_bytes=find_capacity(memory.recorded, memory.device.index),
        expandable_reserved_bytes=_simulate_expandable(opened, result),
        modules=fold(at.by_module),
        failure=None if result.oom is None else result.oom.message,
        failed_request_bytes=None if result.oom is None else result.oom.requested_bytes,
        agrees=None if check is None or check.is_from_before else check.agrees,
        recording_cost=measure_memory_cost(manifest),
    )
    return replace(summary, memory=use), list(result.warnings)
