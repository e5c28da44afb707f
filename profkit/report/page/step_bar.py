"""Section 3: one step as a bar per rank, its parts closing in nanoseconds, and every step as a dot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from profkit.analysis.efficiency.summary import EfficiencyResult
from profkit.analysis.time_account.gpu_steps import GpuStep
from profkit.analysis.time_account.steps import is_step
from profkit.report.document import Column, Table
from profkit.report.page.markup import view_table
from profkit.report.units import NS, SHARE, TEXT, Unit, format_count, format_ns, format_share
from profkit.run.manifest import Manifest

_IDLE = ("data", "launching", "synchronising", "outside")

_ROUNDED = Unit(lambda value: format_ns(round(value)))


def build_step_bar(result: EfficiencyResult, manifest: Manifest | None) -> dict[str, Any]:
    """Return a bar per rank and GPU: the average of its steps, idle scaled to an unprofiled step where that is known.

    A scaled part is an estimate: the page hatches it and says so.
    """
    factor = next((row.idle_factor for row in result.ranges if is_step(row.name)), None)
    by_gpu = sorted(result.steps, key=lambda one: (-1 if one.rank is None else one.rank, one.device))
    bars = [_bar(list(steps), factor) for _, steps in groupby(by_gpu, lambda one: (one.rank, one.process, one.device))]
    longest = max((bar["whole_ns"] for bar in bars), default=0) or 1
    for bar in bars:
        _place(bar["parts"], longest)
    return {
        "bars": bars,
        "is_scaled": factor is not None,
        "table": view_table(_table(bars)),
        "dots": list(_dots(result, manifest)),
        "steps": format_count(max((bar["step_count"] for bar in bars), default=0), "step"),
    }


def _bar(steps: Sequence[GpuStep], factor: float | None) -> dict[str, Any]:
    first, count = steps[0], len(steps)
    sums: dict[str, int] = {}
    for step in steps:
        for name, value in _parts(step).items():
            sums[name] = sums.get(name, 0) + value
    # Sums of several steps are exact; what is shown is their average, and idle scaled to a step without a profiler.
    scale = {name: (1.0 if factor is None or name not in _IDLE else factor) / count for name in sums}
    sizes = {name: value * scale[name] for name, value in sums.items()}
    awaited = {step.waiting_for for step in steps if step.waiting_for is not None}
    words = _WORDS | {"waiting": f"waiting for rank {', '.join(map(str, sorted(awaited)))}"}
    whole = sum(sizes.values())
    parts = [
        {
            "name": name,
            "words": words[name],
            "sum_ns": sums[name],
            "ns": size,
            "share": size / whole if whole else 0.0,
            "text": f"{words[name]} {format_ns(round(size))} ({format_share(size / whole)})",
            "is_estimate": factor is not None and name in _IDLE,
        }
        for name, size in sizes.items()
        if size
    ]
    return {
        "label": f"GPU {first.device}" if first.rank is None else f"rank {first.rank}, GPU {first.device}",
        "step_count": count,
        "whole_ns": whole,
        "whole": format_ns(round(whole)),
        "parts": parts,
    }


_WORDS = {
    "matmul": "matrix products",
    "attention": "attention kernels",
    "other": "other kernels",
    "communication": "communication not hidden",
    "waiting": "waiting for other ranks",
    "copies": "copies and fills",
    "data": "idle: waiting for data",
    "launching": "idle: Python prepares kernels",
    "synchronising": "idle: Python waits for the GPU",
    "outside": "idle: Python without CUDA calls",
}


def _parts(step: GpuStep) -> dict[str, int]:
    """Return the parts of one step; they add up to its span on the GPU."""
    gpu, data = step.gpu, step.data
    return {
        "matmul": step.matmul_ns,
        "attention": step.attention_ns,
        "other": gpu.computing_ns - step.matmul_ns - step.attention_ns,
        "communication": gpu.exposed_communication_ns - step.exposed_waiting_ns,
        "waiting": step.exposed_waiting_ns,
        "copies": gpu.exposed_copy_ns,
        "data": data.idle_ns,
        "launching": gpu.launching_ns - data.launching_ns,
        "synchronising": gpu.synchronising_ns - data.synchronising_ns,
        "outside": gpu.outside_cuda_ns - data.outside_cuda_ns,
    }


def _place(parts: list[dict[str, Any]], longest: float) -> None:
    """Note where each part of a bar begins and how wide it is, in per cent of the longest bar."""
    at = 0.0
    for part in parts:
        part["left"], part["width"] = round(100 * at / longest, 3), round(100 * part["ns"] / longest, 3)
        at += part["ns"]


def _table(bars: Sequence[dict[str, Any]]) -> Table:
    columns = (
        Column("label", "GPU", TEXT),
        Column("words", "part of the step", TEXT),
        Column("ns", "time", _ROUNDED),
        Column("share", "share", SHARE),
        Column("sum_ns", "recorded, all steps", NS),
    )
    return Table(columns, [{"label": bar["label"], **part} for bar in bars for part in bar["parts"]])


def _dots(result: EfficiencyResult, manifest: Manifest | None) -> Iterator[dict[str, Any]]:
    """Yield a row of dots for the unprofiled steps and one for the recorded ones, on one scale that begins at 0."""
    unprofiled = None if manifest is None else manifest.unprofiled
    recorded = None if manifest is None else manifest.profiled
    rows = {
        "unprofiled": [] if unprofiled is None else unprofiled.step_ns(),
        "recorded": [] if recorded is None else recorded.step_ns(),
    }
    if not rows["recorded"]:
        # No run noted when its steps began: what is known is each step's time on the GPU.
        rows["recorded"] = [one.gpu.span_ns for one in result.steps]
    longest = max((value for times in rows.values() for value in times), default=1)
    for name, times in rows.items():
        if times:
            dots = [{"left": round(98 * one / longest, 2), "text": format_ns(one)} for one in times]
            span = f"{format_ns(min(times))} to {format_ns(max(times))}" if len(times) > 1 else format_ns(times[0])
            yield {"name": name, "dots": dots, "words": f"{format_count(len(times), 'step')}, {span}"}
