"""How well the GPUs' time was used, range by range: idle and why, FLOPs and bytes against the peaks, the verdict."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profkit.analysis.attribution import Attribution, mark_members
from profkit.analysis.checks.limits import refuse_impossible_times
from profkit.analysis.efficiency.gpu_steps import summarize_steps
from profkit.analysis.efficiency.gpu_time import (
    GpuParts,
    GpuTime,
    build_gpu_times,
    category_rows,
    communication_rows,
    sum_parts,
)
from profkit.analysis.efficiency.inflation import Inflations
from profkit.analysis.efficiency.model_flops import ModelFlops
from profkit.analysis.efficiency.range_work import Amount, RangeWorks, is_step
from profkit.analysis.efficiency.result import EfficiencyResult, EfficiencyRow
from profkit.analysis.efficiency.run_facts import RunFacts
from profkit.analysis.efficiency.verdicts import MOVERS, build_roofline, judge, product_ns
from profkit.analysis.efficiency.warnings import warn_of_efficiency
from profkit.analysis.efficiency.windows import find_windows
from profkit.analysis.kernels import explain_no_work, extent_ns
from profkit.analysis.nesting import mark_nested
from profkit.analysis.range_paths import NodePath, RangeNodes, build_nodes, select_ranges
from profkit.analysis.range_tree import sum_wall, sum_work, work_by_node
from profkit.analysis.ranks import Ranks
from profkit.errors import TraceError
from profkit.trace.columns import Ints, Trace, rows_by_value


@dataclass(frozen=True, eq=False)
class _Columns:
    """What was summed per node."""

    instances: Ints
    wall_ns: Ints
    kernel_time_ns: Ints
    busy_ns: Ints
    kernel_count: Ints
    launch_count: Ints
    own_computing_ns: Ints
    moving_ns: Ints
    parts: dict[int, GpuParts]


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of a trace beside its own rows."""

    facts: RunFacts
    works: RangeWorks
    models: ModelFlops
    inflations: Inflations


def measure_efficiency(
    attribution: Attribution, facts: RunFacts, ranks: Ranks, range: str | None = None, *, numbered: bool = False
) -> EfficiencyResult:
    """Return how well the GPUs' time was used under each range.

    Args:
        attribution: the trace with its work placed.
        facts: what is known beside it.
        ranks: which process is which.
        range: only these ranges and those within them, as ``--range`` names them.
        numbered: keep ``step 0`` and ``step 1`` apart.

    Raises:
        TraceError: no GPU work was recorded, or times are impossible, or a range is asked of a trace without ranges.
        UsageError: an unknown range.
    """
    trace = attribution.trace
    _refuse_without_work(trace)
    times = build_gpu_times(trace)
    members = chosen_ranges(attribution, range)
    known = _know(attribution, times, facts)
    rows = _build_rows(attribution, build_nodes(attribution, numbered=numbered), members, times, known)
    steps = summarize_steps(attribution, ranks, times)
    span_ns = sum(step.gpu.span_ns for step in steps)
    return EfficiencyResult(
        trace=trace.path,
        gpu=facts.gpu,
        dtype=facts.dtype,
        work_source=known.works.source(members),
        peaks=facts.peaks,
        capture=_whole_capture(trace, times),
        ranges=rows,
        steps=steps,
        twin=facts.step_times.twin if facts.step_times is not None else None,
        inflation=known.inflations.table,
        model_flops=known.models.of_all,
        mfu=known.models.mfu_of_all,
        idle_share=sum(step.gpu.idle_ns for step in steps) / span_ns if span_ns else None,
        clean_idle_share=known.inflations.clean_idle_share,
        warnings=tuple(warn_of_efficiency(attribution, range, rows, facts)),
    )


def chosen_ranges(attribution: Attribution, range: str | None) -> Ints:
    """Return the ranges to report: all, or those asked for and what lies within them."""
    trace = attribution.trace
    if range is None:
        return np.arange(len(trace.ranges))
    chosen = mark_members(len(trace.ranges), select_ranges(attribution, range))
    return np.flatnonzero(mark_nested(attribution.parent, chosen))


def _refuse_without_work(trace: Trace) -> None:
    if trace.measure != "gpu-kernel":
        raise TraceError(f"{trace.path}: recorded no GPU work, whose efficiency this is; see `profkit kernels`")
    if not len(trace.work):
        raise TraceError(explain_no_work(trace))
    refuse_impossible_times(trace)


def _know(attribution: Attribution, times: dict[int, GpuTime], facts: RunFacts) -> _Known:
    nodes = build_nodes(attribution, numbered=True)
    works = RangeWorks(attribution.trace, nodes, facts)
    models = ModelFlops(attribution, nodes, works, facts)
    return _Known(facts, works, models, Inflations(attribution, times, nodes, facts))


def _build_rows(
    attribution: Attribution, nodes: RangeNodes, members: Ints, times: dict[int, GpuTime], known: _Known
) -> tuple[EfficiencyRow, ...]:
    columns = _sum_columns(attribution, nodes, members, times)
    ranges_of = rows_by_value(nodes.of_range[members])
    names = nodes.names_above()
    rows = []
    for at in nodes.depth_first():
        if at.node in ranges_of:
            mine = members[ranges_of[at.node]]
            factor = known.inflations.idle_factor(names[at.node])
            mfu = known.models.mfu(mine) if is_step(at.name) else None
            rows.append(_build_row(at, columns, known.works.total(mine), known.facts, idle_factor=factor, mfu=mfu))
    return tuple(rows)


def _sum_columns(attribution: Attribution, nodes: RangeNodes, members: Ints, times: dict[int, GpuTime]) -> _Columns:
    kernel_time, busy, count = sum_work(attribution, nodes, members)
    windows = find_windows(attribution, members, times)
    node = nodes.of_range[members]
    launches, own_computing, moving = _count_launches(attribution, nodes, members)
    return _Columns(
        instances=np.bincount(node, minlength=len(nodes)),
        wall_ns=sum_wall(attribution, nodes, members),
        kernel_time_ns=kernel_time,
        busy_ns=busy,
        kernel_count=count,
        launch_count=launches,
        own_computing_ns=own_computing,
        moving_ns=moving,
        parts=sum_parts(times, node[windows.member], windows.device, windows.start_ns, windows.end_ns),
    )


def _count_launches(attribution: Attribution, nodes: RangeNodes, members: Ints) -> tuple[Ints, Ints, Ints]:
    """Return how many calls launched each node's work, and the time of its kernels: all but communication, and movers'.

    The kernels of a CUDA graph share one launch.
    """
    work = attribution.trace.work
    order = np.lexsort((work.launch_ns, work.launch_thread))
    same = (np.diff(work.launch_ns[order]) == 0) & (np.diff(work.launch_thread[order]) == 0)
    is_first = np.ones(len(work), dtype=np.int64)
    is_first[order[1:][same]] = 0
    computing_ns = np.where(communication_rows(attribution.trace), 0, work.duration_ns)
    moving_ns = np.where(category_rows(attribution.trace, MOVERS), work.duration_ns, 0)
    launches, own_computing, moving = (np.zeros(len(nodes), dtype=np.int64) for _ in range(3))
    for rows, node in work_by_node(attribution, nodes, members):
        np.add.at(launches, node, is_first[rows])
        np.add.at(own_computing, node, computing_ns[rows])
        np.add.at(moving, node, moving_ns[rows])
    return launches, own_computing, moving


def _build_row(
    at: NodePath, columns: _Columns, amount: Amount, facts: RunFacts, *, idle_factor: float | None, mfu: float | None
) -> EfficiencyRow:
    busy_ns = int(columns.busy_ns[at.node])
    parts = columns.parts.get(at.node)
    roofline = build_roofline(amount, facts.peaks)
    own_ns = int(columns.own_computing_ns[at.node])
    verdict = judge(
        parts,
        busy_ns,
        roofline,
        idle_factor=idle_factor,
        only_communicates=busy_ns > 0 and not own_ns,
        mover_share=int(columns.moving_ns[at.node]) / own_ns if own_ns else 0.0,
    )
    at_peak = product_ns(amount, facts.peaks)
    operations = None if amount.flops is None or amount.other_flops is None else amount.flops + amount.other_flops
    return EfficiencyRow(
        path=at.path,
        name=at.name,
        domain=at.domain,
        instances=int(columns.instances[at.node]),
        wall_ns=int(columns.wall_ns[at.node]),
        kernel_time_ns=int(columns.kernel_time_ns[at.node]),
        busy_ns=busy_ns,
        kernel_count=int(columns.kernel_count[at.node]),
        launch_count=int(columns.launch_count[at.node]),
        gpu=parts,
        idle_share=None if parts is None else parts.idle_share,
        clean_idle_share=None if parts is None or idle_factor is None else parts.idle_share_at(idle_factor),
        flops=amount.flops,
        other_flops=amount.other_flops,
        needed_flops=amount.needed_flops,
        least_bytes=amount.least_bytes,
        flops_per_s=_ratio(amount.flops, busy_ns / 1e9),
        ceiling_share=_ratio(at_peak, busy_ns),
        # Products take longer at their peak than the bytes in some ranges that by their kernels wait for memory.
        roof_share=_ratio(roofline.memory_ns if verdict.word == "memory-bound" else roofline.bound_ns, busy_ns),
        bytes_per_s=_ratio(amount.least_bytes, busy_ns / 1e9),
        intensity=_ratio(operations, amount.least_bytes),
        mfu=mfu,
        idle_factor=idle_factor,
        verdict=verdict.word,
        rule=verdict.rule,
    )


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _whole_capture(trace: Trace, times: dict[int, GpuTime]) -> GpuParts:
    """Return the GPUs' time from the first to the last thing recorded."""
    device = np.array(list(times), dtype=np.int64)
    first, last = (np.full(len(device), edge) for edge in extent_ns(trace))
    return sum_parts(times, np.zeros(len(device), dtype=np.int64), device, first, last)[0]
