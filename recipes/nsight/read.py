"""What one context of a capture says, as the columns and the raw figures of its row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from profkit import read_step_times
from profkit.analysis.efficiency.attention import AttentionPart
from profkit.analysis.kernels import KernelRow, KernelsResult
from profkit.analysis.opened_trace import OpenedTrace
from profkit.analysis.step_times import unprofiled_times_ns
from profkit.names import BACKWARD, FORWARD, OPTIMIZER, SCORES, SOFTMAX, VALUE_PRODUCT, context_range
from profkit.report.kernel_names import simplify_name
from profkit.report.self_check import verdict_line
from profkit.run.directory import Run
from recipes.common.recipe import Row, failed

MATTERS = 0.01
"""A kernel matters from this share of the kernel time on."""
GEMM = "gemm"
"""profkit's category of matrix products."""
ATTENTION = {"scores": SCORES, "softmax": SOFTMAX, "values": VALUE_PRODUCT}
"""The parts of attention by the columns' name for them."""

_STEPS = "step *"


def read_row(opened: OpenedTrace, run: Path, context: int | None) -> Row:
    """Return what a run says of one context; ``context`` is None where it has one alone, and no range for it.

    A capture that failed its self-check answers nothing.
    """
    manifest = Run(run).manifest
    row: Row = {
        "capture": f"{run.parent.name}/{run.name}",
        "self_check": verdict_line(opened.self_check),
        "self_check_warnings": [each.message for each in opened.self_check.of("warning")],
        "versions": manifest.versions,
        "recorder_warnings": list(manifest.warnings),
    }
    if opened.self_check.failed:
        reason = f"self-check: {opened.self_check.of('failed')[0].message}"
        return {**row, "status": failed(reason), "reason": reason}
    row |= read_times(opened, run, context)
    if not len(opened.trace.work):
        return {**row, "reason": "the profiler saw no GPU work: there are times of ranges alone"}
    return {**row, **read_kernels(opened, context), **read_attention(opened, context)}


def name_range(context: int | None, *inner: str) -> str:
    """Return the path of ranges within a context: ``context 256/step */forward``."""
    return "/".join([*([] if context is None else [context_range(context)]), *inner])


def read_times(opened: OpenedTrace, run: Path, context: int | None) -> Row:
    """Return forward and backward in ms, medians and samples: by the trace, and by Python with and without a profiler.

    ``ratio`` is the trace's over Python's without.
    """
    times = read_step_times(run)
    by_python = {} if times is None else {one.phase: one for one in times.phases if one.context == context}
    samples = Run(run).manifest.unprofiled
    clean_ns = {} if samples is None else unprofiled_times_ns(samples, context)
    row: Row = {}
    for phase in (FORWARD, BACKWARD):
        walls_ns = measure_walls(opened, context, phase)
        told = by_python.get(phase)
        if not walls_ns or told is None or told.profiled is None:
            continue
        row |= {
            f"{phase}_recorded_ms": median(walls_ns) / 1e6,
            f"{phase}_python_ms": told.profiled.median / 1e6,
            f"{phase}_clean_ms": told.clean.median / 1e6,
            f"{phase}_ratio": median(walls_ns) / told.clean.median,
            f"{phase}_recorded_samples_ms": [each / 1e6 for each in walls_ns],
            f"{phase}_clean_samples_ms": [each / 1e6 for each in clean_ns[phase][1]],
        }
    return row


def measure_walls(opened: OpenedTrace, context: int | None, phase: str) -> list[int]:
    """Return how long each step's range of a phase was open, in ns."""
    path = re.compile(re.escape(name_range(context, "step ")) + rf"\d+/{phase}")
    return [row.wall_ns for row in opened.ranges().ranges if path.fullmatch(row.path)]


def read_kernels(opened: OpenedTrace, context: int | None) -> Row:
    """Return the kernels with most time in forward, and over forward, loss and backward; categories; kernel times."""
    forward = opened.kernels(name_range(context, _STEPS, FORWARD))
    step = opened.kernels(name_range(context, _STEPS), by="category")
    row: Row = {
        "measure": forward.measure,
        "forward": keep(forward),
        "forward_categories": keep(opened.kernels(name_range(context, _STEPS, FORWARD), by="category")),
        "step": keep(step),
        "forward_kernel_ms": forward.total_ns / _instances(forward) / 1e6,
        "gemm_forward_share": _share_of(forward.kernels, GEMM),
        "gemm_step_share": _share_of(step.kernels, GEMM),
        **_top(forward, "top"),
    }
    if not measure_walls(opened, context, BACKWARD):
        return row
    backward = opened.kernels(name_range(context, _STEPS, BACKWARD))
    row["backward_kernel_ms"] = backward.total_ns / _instances(backward) / 1e6
    both = opened.kernels(name_range(context, _STEPS), exclude=OPTIMIZER)
    names = [each.name for each in both.kernels]
    place = names.index(forward.kernels[0].name)
    there = {"place": place + 1, "share": both.kernels[place].share}
    row |= {"forward_backward": {**keep(both), "forwards_top": there}, "same_kernel": place == 0}
    return {**row, **_top(both, "both_top")}


def keep(result: KernelsResult) -> dict[str, Any]:
    """Return what is kept of a table: its range, its whole, and the lines that matter."""
    return {
        "range": result.range,
        "exclude": result.filters.exclude,
        "instances": result.outermost_instances,
        "count": result.kernel_count + result.graph_count,
        "total_ns": result.total_ns,
        "tied": sum(row.total_ns == result.kernels[0].total_ns for row in result.kernels),
        "rows": [
            {key: getattr(row, key) for key in ("name", "category", "count", "per_instance_count", "total_ns", "share")}
            for place, row in enumerate(result.kernels)
            if row.share >= MATTERS or place == 0 or result.by == "category"
        ],
    }


def show_name(name: str, measure: object) -> str:
    """Return what tells a kernel from others; an operator's name is short as it is."""
    return name if measure == "cpu-operator" else simplify_name(name)


def _top(result: KernelsResult, prefix: str) -> Row:
    first = result.kernels[0]
    return {
        f"{prefix}_kernel": show_name(first.name, result.measure),
        f"{prefix}_share": first.share,
        f"{prefix}_calls": first.per_instance_count,
    }


def _instances(result: KernelsResult) -> int:
    assert result.outermost_instances
    return result.outermost_instances


def _share_of(rows: Sequence[KernelRow], category: str) -> float:
    return sum(row.share for row in rows if row.category == category)


def read_attention(opened: OpenedTrace, context: int | None) -> Row:
    """Return what a layer's softmax and the two products around it take in forward: kernel time in µs, and FLOPs.

    ``softmax_ratio`` is its time over that of the scores.
    """
    result = opened.attention(name_range(context) or None)
    parts: dict[str, AttentionPart] = {part.part: part for part in result.parts if part.layer is None}
    row: Row = {"attention": {"range": result.range, "work_source": result.work_source}}
    for column, name in ATTENTION.items():
        part = parts[name]
        row[f"{column}_us"] = part.kernel_time_ns / part.instances / 1e3
        row[f"{column}_flops"] = None if part.operations is None else part.operations // part.instances
        row[f"{column}_instances"] = part.instances
    row["softmax_ratio"] = parts[SOFTMAX].time_ratio
    return row
