"""Section 5: one median step, thread by thread and stream by stream: data for the script, and a picture without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from profkit.analysis.kernels.categories import categorize
from profkit.analysis.placing.attribution import (
    AMBIGUOUS_HOST,
    DIRECT,
    INFERRED,
    NO_LAUNCH_RECORD,
    OUTSIDE,
    SEQUENCE,
    Attribution,
)
from profkit.analysis.time_account.step_slices import Lane, StepSlices
from profkit.analysis.tree.range_paths import kind_paths
from profkit.report.page.markup import Interned, pack
from profkit.report.text import make_visible, simplify_name
from profkit.report.units import format_count, format_ns
from profkit.trace.columns import Ints

EVIDENCE = {
    DIRECT: "placed by its own thread",
    INFERRED: "placed by the thread that waited for it",
    SEQUENCE: "placed by operator links",
    OUTSIDE: "in no range",
    AMBIGUOUS_HOST: "not placed: two threads may have waited",
    NO_LAUNCH_RECORD: "not placed: no launch was recorded",
}

_COLUMNS = 1000
"""The picture without a script merges what lies in one thousandth of the step."""

_DEEPEST_PICTURED = 1
"""The step, and the phases in it."""

_KINDS = {"gemm": "matmul", "attention": "attention", "communication": "communication"}
"""Category → colour; kernels of every other category share one."""


def build_timeline(attribution: Attribution, step: StepSlices) -> dict[str, Any]:
    """Return the packed slices, a picture of the lanes, and what each lane adds up to."""
    texts = Interned()
    paths = kind_paths(attribution)
    lanes = [_pack_lane(attribution, lane, step.start_ns, texts, paths) for lane in step.lanes]
    kernels = [lane for lane in step.lanes if lane.kind == "kernels"]
    kernel_ns = sum(int(lane.busy_ns.sum()) for lane in kernels)
    return {
        "data": pack({"span": step.end_ns - step.start_ns, "lanes": lanes, "texts": texts.texts}),
        "name": step.name,
        "span": format_ns(step.end_ns - step.start_ns),
        "kernel_ns": kernel_ns,
        "kernels": format_count(sum(int(lane.count.sum()) for lane in kernels), "kernel"),
        "kernel_time": format_ns(kernel_ns),
        "merged": step.merged,
        "pictures": [
            _picture(attribution, lane, step)
            for lane in step.lanes
            if lane.kind != "calls" and lane.depth <= _DEEPEST_PICTURED
        ],
    }


def _pack_lane(attribution: Attribution, lane: Lane, zero_ns: int, texts: Interned, paths: list[str]) -> dict[str, Any]:
    """Return a lane's columns; starts are differences, and texts are numbers."""
    packed = {
        "name": lane.name,
        "kind": lane.kind,
        "depth": lane.depth,
        "start": _deltas(lane.start_ns - zero_ns),
        "length": (lane.end_ns - lane.start_ns).tolist(),
        "text": [texts.number(name) for name in _names(attribution, lane)],
    }
    if (lane.count > 1).any():
        packed |= {"count": lane.count.tolist(), "busy": lane.busy_ns.tolist()}
    if lane.kind in ("kernels", "copies"):
        placed = attribution.work if lane.kind == "kernels" else attribution.copies
        table = attribution.trace.work if lane.kind == "kernels" else attribution.trace.copies
        innermost = placed.innermost[lane.row].tolist()
        known = table.launch_thread[lane.row] >= 0
        gaps = np.where(known, table.start_ns[lane.row] - table.launch_ns[lane.row], -1)
        packed |= {
            "place": [texts.number(paths[one]) if one >= 0 else -1 for one in innermost],
            "gap": gaps.tolist(),
            "evidence": [texts.number(EVIDENCE[one]) for one in placed.verdict[lane.row].tolist()],
        }
    if lane.kind == "kernels":
        packed["category"] = [texts.number(one) for one in _categories(attribution, lane)]
    return packed


def _deltas(values: Ints) -> list[int]:
    found: list[int] = np.diff(values, prepend=0).tolist()
    return found


def _names(attribution: Attribution, lane: Lane) -> Iterator[str]:
    trace = attribution.trace
    if lane.kind == "copies":
        for fills, size in zip(
            trace.copies.is_memset[lane.row].tolist(), trace.copies.byte_count[lane.row].tolist(), strict=True
        ):
            yield f"{'fill' if fills else 'copy'} of {size:,} B"
        return
    names = {"ranges": trace.ranges.name, "calls": trace.calls.name, "kernels": trace.work.name}[lane.kind]
    shown: dict[int, str] = {}
    for name in names[lane.row].tolist():
        if name not in shown:
            shown[name] = simplify_name(trace.names[name]) if lane.kind == "kernels" else trace.names[name]
        yield shown[name]


def _categories(attribution: Attribution, lane: Lane) -> list[str]:
    trace = attribution.trace
    return [categorize(trace.names[name], trace.measure).name for name in trace.work.name[lane.row].tolist()]


def _picture(attribution: Attribution, lane: Lane, step: StepSlices) -> dict[str, Any]:
    """Return a lane as bars in per cent of the step: neighbours of one kind that nobody could tell apart are one."""
    kinds = ["range"] * len(lane.row)
    if lane.kind == "kernels":
        kinds = [_KINDS.get(one, "other") for one in _categories(attribution, lane)]
    elif lane.kind == "copies":
        kinds = ["copies"] * len(lane.row)
    unit = (step.end_ns - step.start_ns) / _COLUMNS or 1
    bars: list[list[Any]] = []
    for kind, start, end in zip(kinds, lane.start_ns.tolist(), lane.end_ns.tolist(), strict=True):
        left, right = round((start - step.start_ns) / unit), round((end - step.start_ns) / unit)
        if bars and left <= bars[-1][2] and (bars[-1][0] == kind or right <= bars[-1][2]):
            bars[-1][2] = max(bars[-1][2], right)
        else:
            bars.append([kind, left, max(right, left + 1)])
    label = f"{make_visible(lane.name)}: {format_ns(int(lane.busy_ns.sum()))} in {int(lane.count.sum()):,}"
    return {
        "label": label,
        "bars": [{"kind": kind, "left": left / 10, "width": (right - left) / 10} for kind, left, right in bars],
    }
