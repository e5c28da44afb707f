"""The cells of one capture: `profkit run` records it, and each context's row is read from it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from profkit import read_step_times, read_trace, simplify_name
from profkit.errors import RunError
from profkit.names import BACKWARD, FORWARD, OPTIMIZER, SCORES, SOFTMAX, VALUE_PRODUCT, context_range
from recipes.common.grid import sigterm_raises
from recipes.common.recipe import OK, Cell, Device, Row, failed, out_of_memory, whole
from recipes.model_memory.predict import predict_memory
from recipes.nsight.cells import GEMM, MATTERS, NSYS, work_of

ATTENTION = {"scores": SCORES, "softmax": SOFTMAX, "values": VALUE_PRODUCT}
"""The parts of attention by the columns' names for them."""

_STEPS = "step *"
_FULL = "memory is full"


class MemoryFull(Exception):
    """The steps did not fit into memory; ``str(error)`` is one line."""


def predict_bytes(cell: Cell, device: Device) -> int:
    """Return the bytes that a step needs at its peak."""
    return predict_memory(work_of(cell), device).peak.bytes


def measure_cells(cells: Sequence[Cell], device: Device, captures: Path) -> list[Row]:
    """Return the rows of cells that differ only in their context, from one capture.

    If memory is too small for all of them, the longest context is left out and the others are recorded again.
    """
    contexts = sorted(whole(cell["context"]) for cell in cells)
    found: dict[int, Row] = {}
    while contexts:
        try:
            run = record(cells[0], contexts, device, captures)
        except MemoryFull as error:
            found[contexts.pop()] = {"status": out_of_memory("step"), "reason": str(error)}
            continue
        opened = read_trace(run)
        words = ["profkit", "run", *build_arguments(cells[0], contexts, device), "-o", f"{captures.name}/{run.name}"]
        for context in contexts:
            row = read_row(opened, run, context if len(contexts) > 1 else None)
            found[context] = {"status": OK, "made_by": shlex.join(words), **row}
        break
    return [found[whole(cell["context"])] for cell in cells]


def build_arguments(cell: Cell, contexts: Sequence[int], device: Device) -> list[str]:
    """Return the arguments of ``profkit run`` for a cell, with all its contexts in one capture."""
    recorder = ["--nsys", "--no-keep-report"] if cell["profiler"] == NSYS else ["--kineto"]
    options = {"--context": ",".join(map(str, contexts)), "--device": device}
    options |= {f"--{key}": str(cell[key]) for key in ("passes", "batch", "steps")}
    return [*recorder, *(word for pair in options.items() for word in pair), f"model.{cell['size']}"]


def name_capture(cell: Cell, contexts: Sequence[int]) -> str:
    """Return a capture's name: ``small-train-nsys-4x128-256-3steps``."""
    sizes = "-".join(map(str, contexts))
    return f"{cell['size']}-{cell['passes']}-{cell['profiler']}-{cell['batch']}x{sizes}-{cell['steps']}steps"


def record(cell: Cell, contexts: Sequence[int], device: Device, captures: Path) -> Path:
    """Record the cell's steps at some contexts and return the run directory; it replaces one of that name.

    Raises:
        MemoryFull: they do not fit.
        RunError: ``profkit run`` failed.
    """
    run = captures / name_capture(cell, contexts)
    manifest = run / "manifest.json"
    if manifest.exists():
        shutil.rmtree(run)
    words = ["run", *build_arguments(cell, contexts, device), "-o", str(run)]
    with sigterm_raises():
        command = [sys.executable, "-m", "profkit", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        reason = json.loads(manifest.read_text()).get("reason") if manifest.exists() else None
        if reason and _FULL in reason:
            raise MemoryFull(reason)
        last = (done.stdout.strip() or "no message").splitlines()[-1]
        raise RunError(f"profkit run ended with status {done.returncode}: {reason or last}")
    return run


def read_row(opened: Any, run: Path, context: int | None) -> Row:
    """Return what a run says of one context; ``context`` is None if the run has only one, and no range for it.

    A capture that failed its self-check gives no figures.
    """
    manifest = opened.run.manifest
    failures, warnings = opened.self_check.of("failed"), opened.self_check.of("warning")
    row: Row = {
        "capture": f"{run.parent.name}/{run.name}",
        "self_check": f"{len(failures)} failed, {len(warnings)} warnings" if failures or warnings else "passed",
        "self_check_warnings": [each.message for each in warnings],
        "versions": manifest.versions,
        "recorder_warnings": list(manifest.warnings),
    }
    if failures:
        reason = f"self-check: {failures[0].message}"
        return {**row, "status": failed(reason), "reason": reason}
    row |= read_times(opened, run, context)
    if not len(opened.trace.work):
        return {**row, "reason": "the profiler saw no GPU work: only the times of ranges are known"}
    return {**row, **read_kernels(opened, context), **read_attention(opened, context)}


def name_range(context: int | None, *inner: str) -> str:
    """Return the path of ranges within a context: ``context 256/step */forward``."""
    return "/".join([*([] if context is None else [context_range(context)]), *inner])


def read_times(opened: Any, run: Path, context: int | None) -> Row:
    """Return forward and backward in ms, medians and samples: by the trace, and by Python with and without a profiler.

    ``ratio`` is the trace's time over Python's without a profiler.
    """
    times = read_step_times(run)
    by_python = {} if times is None else {one.phase: one for one in times.phases if one.context == context}
    samples = opened.run.manifest.unprofiled
    row: Row = {}
    for phase in (FORWARD, BACKWARD):
        walls_ns = measure_walls(opened, context, phase)
        python = by_python.get(phase)
        if walls_ns and python is not None and python.profiled is not None:
            row |= {
                f"{phase}_recorded_ms": median(walls_ns) / 1e6,
                f"{phase}_python_ms": python.profiled.median / 1e6,
                f"{phase}_clean_ms": python.clean.median / 1e6,
                f"{phase}_ratio": median(walls_ns) / python.clean.median,
                f"{phase}_recorded_samples_ms": [each / 1e6 for each in walls_ns],
                f"{phase}_clean_samples_ms": [each / 1e6 for each in samples.times_ns(python.clock, context)[phase]],
            }
    return row


def measure_walls(opened: Any, context: int | None, phase: str) -> list[int]:
    """Return how long each step's range of a phase was open, in ns."""
    path = re.compile(re.escape(name_range(context, "step ")) + rf"\d+/{phase}")
    return [row.wall_ns for row in opened.ranges().ranges if path.fullmatch(row.path)]


def read_kernels(opened: Any, context: int | None) -> Row:
    """Return the kernels with most time in forward, and over forward, loss and backward; categories; kernel times."""
    forward = opened.kernels(name_range(context, _STEPS, FORWARD))
    by_category = opened.kernels(name_range(context, _STEPS, FORWARD), by="category")
    step = opened.kernels(name_range(context, _STEPS), by="category")
    row: Row = {
        "measure": forward.measure,
        "forward": _keep(forward),
        "forward_categories": _keep(by_category),
        "step": _keep(step),
        "forward_kernel_ms": forward.total_ns / forward.outermost_instances / 1e6,
        "gemm_forward_share": sum(each.share for each in forward.kernels if each.category == GEMM),
        "gemm_step_share": sum(each.share for each in step.kernels if each.category == GEMM),
        **_top(forward, "top"),
    }
    if not measure_walls(opened, context, BACKWARD):
        return row
    backward = opened.kernels(name_range(context, _STEPS, BACKWARD))
    row["backward_kernel_ms"] = backward.total_ns / backward.outermost_instances / 1e6
    both = opened.kernels(name_range(context, _STEPS), exclude=OPTIMIZER)
    place = [each.name for each in both.kernels].index(forward.kernels[0].name)
    there = {"place": place + 1, "share": both.kernels[place].share}
    row |= {"forward_backward": {**_keep(both), "forwards_top": there}, "same_kernel": place == 0}
    return {**row, **_top(both, "both_top")}


def _keep(result: Any) -> dict[str, Any]:
    return {
        "range": result.range,
        "exclude": result.filters.exclude,
        "instances": result.outermost_instances,
        "count": result.kernel_count + result.graph_count,
        "total_ns": result.total_ns,
        "rows": [
            {key: getattr(row, key) for key in ("name", "category", "count", "per_instance_count", "total_ns", "share")}
            for place, row in enumerate(result.kernels)
            if row.share >= MATTERS or place == 0 or result.by == "category"
        ],
    }


def _top(result: Any, prefix: str) -> Row:
    first = result.kernels[0]
    name = first.name if result.measure == "cpu-operator" else simplify_name(first.name)
    return {
        f"{prefix}_kernel": name,
        f"{prefix}_share": first.share,
        f"{prefix}_calls": first.per_instance_count,
    }


def read_attention(opened: Any, context: int | None) -> Row:
    """Return kernel time in µs and FLOPs of a layer's softmax and of the two products around it in forward.

    FLOPs are all operations: matrix products and everything else; they are known of work on a GPU. ``softmax_ratio`` is
    the softmax's time over that of the scores.
    """
    on_gpu = opened.trace.measure == "gpu-kernel"
    rows = opened.efficiency(numbered=True).ranges if on_gpu else opened.ranges().ranges
    row: dict[str, Any] = {}
    for column, name in ATTENTION.items():
        path = re.compile(re.escape(name_range(context, "step ")) + rf"\d+/{FORWARD}/.*/{re.escape(name)}")
        parts = [each for each in rows if path.fullmatch(each.path)]
        count = sum(part.instances for part in parts)
        flops = [part.flops for part in parts] if on_gpu else [None]
        row[f"{column}_us"] = sum(part.kernel_time_ns for part in parts) / count / 1e3
        row[f"{column}_flops"] = None if None in flops else sum(map(count_operations, parts)) // count
        row[f"{column}_instances"] = count
    row["softmax_ratio"] = row["softmax_us"] / row["scores_us"]
    return row


def count_operations(part: Any) -> int:
    """Return the operations of a range of ``profkit efficiency``: matrix products and, where counted, all others."""
    return int(part.flops + (part.other_flops or 0))
