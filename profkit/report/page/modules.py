"""The sections of modules, each with its time and its memory, and of memory over time.

A module's time and memory come from two processes of the same program, so they are joined by the module's name, those
that differ in a number as one, never by the clock. What lies in no module that has time stands in the memory's own
table. What the page shows of a chosen module closes: its kernels add up to its times, its lines and categories to its
bytes.

The data of memory over time are packed: sizes are differences from sample to sample, in the largest unit that divides
them all (usually 512 bytes), texts are numbers, and all of it is gzipped. uPlot, whose code and licence are in the
page, draws the chart; without it there is a picture.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup

from profkit.analysis.efficiency.summary import EfficiencyRow
from profkit.analysis.kernels import categorize
from profkit.analysis.memory.bins import Bins, Series, Shape, bin_history
from profkit.analysis.memory.device import Composition, DeviceMemory, Filter, piece_of
from profkit.analysis.memory.opened_snapshot import MemoryResult
from profkit.analysis.memory.places import PartRow, Piece, sum_by_module
from profkit.analysis.time_account import find_warmup
from profkit.analysis.tree import split_path
from profkit.analysis.tree.modules import PASSES, ModuleKernel, ModuleTime, time_kernels_by_module
from profkit.names import BACKWARD, FORWARD, kind_of, phase_of
from profkit.report import colours, make_visible, simplify_name
from profkit.report.commands.memory import EVIDENCE_WORDS, By, build_memory_document
from profkit.report.commands.steps import name_limits
from profkit.report.document import Column, Lines, Table
from profkit.report.page import Interned, Results, pack, view_parts, view_table
from profkit.report.units import BYTES, SHARE, TEXT, Unit, count_over, format_bytes, format_flops, ns_over
from profkit.snapshot.columns import Ints

_HELD = ("parameters", "gradients", "optimizer state", "activations")
"""The categories of memory that have a column."""

_PHASES = (FORWARD, BACKWARD)


def build_modules(run: Results) -> dict[str, Any]:
    steps, rows = run.steps, list(module_rows(run))
    table = view_table(Table(_columns(steps), rows))
    count = run.summary.head.gpu_count
    together = f", of all {count} GPUs together" if count > 1 else ""
    for view, row in zip(table["rows"], rows, strict=False):
        # Under its parent a module needs only the rest of its name; the whole one is in the title, and in CSV.
        view[0] |= {"depth": row["depth"], "number": row["number"], "title": view[0]["text"]}
        view[0]["text"] = view[0]["text"].removeprefix(f"{row['parent']}.")
    return {
        "table": table,
        "kernels": _pack_kernels(run),
        "per": ("summed over the recording" if steps is None else f"per step, averages over {steps}") + together,
        "moment": None if run.memory is None else run.memory.composition.what,
    }


def module_rows(run: Results) -> Iterator[dict[str, Any]]:
    ranges = () if run.efficiency is None else run.efficiency.ranges
    limits = None if run.capture.trace is None else run.capture.trace.step_limits
    parts = () if run.memory is None else run.memory.composition.by_module
    late_rank = None if run.summary.compared is None else run.summary.compared.late_rank
    words, ranges_of, held = name_limits(ranges, limits, late_rank), _by_module(ranges), _categories_by_kind(parts)
    for depth, module in _depth_first(run.summary.modules):
        passes, sizes = ranges_of.get(module.module, {}), held.get(kind_of(module.module))
        flops = [row.flops for row in passes.values() if row.flops is not None]
        yield {
            **vars(module),
            "depth": depth,
            "recompute_ns": module.recompute_ns or None,
            "inference_ns": module.inference_ns or None,
            "kernel_count": sum(row.kernel_count for row in passes.values()) if passes else None,
            "flops": sum(flops) if flops else None,
            **{f"{phase}_peak": row.roof_share for phase, row in passes.items()},
            "limited_by": _limits({phase: words[row.path] for phase, row in passes.items()}),
            **({} if sizes is None else {"bytes": sizes.total(), **{use: sizes[use] for use in _HELD}}),
        }


def _depth_first(modules: Sequence[ModuleTime]) -> Iterator[tuple[int, ModuleTime]]:
    within: dict[str | None, list[ModuleTime]] = {}
    for module in reversed(modules):
        within.setdefault(module.parent, []).append(module)
    waiting = [(0, module) for module in within.get(None, ())]
    while waiting:
        depth, module = waiting.pop()
        yield depth, module
        waiting += [(depth + 1, inner) for inner in within.get(module.module, ())]


def _by_module(ranges: Sequence[EfficiencyRow]) -> dict[str, dict[str, EfficiencyRow]]:
    by_module: dict[str, dict[str, EfficiencyRow]] = {}
    for row in ranges:
        phase = next((phase for part in split_path(row.path) if (phase := phase_of(part)) in _PHASES), None)
        if phase is not None:
            passes = by_module.setdefault(row.name, {})
            passes[phase] = max(passes.get(phase, row), row, key=lambda each: each.busy_ns)
    return by_module


def _limits(words: Mapping[str, str | None]) -> str | None:
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{phase}: {text}" for phase, text in words.items() if text is not None) or None


def _categories_by_kind(parts: Iterable[PartRow]) -> dict[str, Counter[str]]:
    by_kind = defaultdict[str, Counter[str]](Counter)
    for part in parts:
        by_kind[kind_of(part.name)].update(part.categories)
    return by_kind


def _columns(steps: int | None) -> list[Column]:
    flops = Unit(lambda value: format_flops(value / (steps or 1)).removesuffix("FLOP").rstrip())
    times = [Column(name, name.removesuffix("_ns"), ns_over(steps)) for name in PASSES]
    return [
        Column("module", "module", TEXT),
        *times,
        Column("kernel_count", "kernels", count_over(steps)),
        Column("flops", "FLOP", flops),
        *(Column(f"{phase}_peak", f"{phase} % of peak", SHARE) for phase in _PHASES),
        Column("limited_by", "limited by", TEXT),
        Column("bytes", "memory at the peak", BYTES),
        *(Column(use, use, BYTES) for use in _HELD),
    ]


def _pack_kernels(run: Results) -> Markup:
    opened, texts = run.capture.trace, Interned()
    assert opened is not None
    measure = opened.trace.measure

    def pack_row(name: str, kernel: ModuleKernel) -> list[int]:
        shown = simplify_name(name) if measure == "gpu-kernel" else name
        words = [texts.number(word) for word in (name, shown, categorize(name, measure).name)]
        return [*words, *(getattr(kernel, part) for part in PASSES), kernel.count]

    by_module = time_kernels_by_module(opened.attribution, {module.module for module in run.summary.modules})
    data = {
        "steps": run.steps,
        "run": run.name,
        "modules": {
            module: [pack_row(*item) for item in sorted(kernels.items(), key=lambda item: (-item[1].total_ns, item[0]))]
            for module, kernels in by_module.items()
        },
        "exclude": find_warmup(opened.trace),
        # Where no range was open in the backward pass, a module's name alone means its forward pass.
        "forward_alone": bool(opened.attribution.is_mirror.any()),
    }
    return pack({**data, "texts": texts.texts})


_MAX_PHASES = 4000
_FRAMES_KEPT = 20
_PICTURE_COLUMNS = 360
_SHAPE_NUMBERS = ("bytes", "requested_bytes", "first", "end", "born_us", "freed_us", "born_event", "freed_event")
_SHAPE_TEXTS = ("category", "owner", "module", "label")


def build_memory(memory: DeviceMemory, result: MemoryResult, wanted: Filter | None = None) -> dict[str, Any]:
    """Return what the section shows of a device and its account; allocations that are not ``wanted`` are one in it."""
    bins = bin_history(memory, wanted)
    document = build_memory_document(result, by="category", leaks=True)
    head, *others = [part for part in document.parts if isinstance(part, Lines)]
    by_module = _table_by(result, "module")
    modules = view_table(by_module)
    for cells, row in zip(modules["rows"], by_module.rows, strict=False):
        cells[0] |= {"depth": len(row["path"]) - 1, "number": row["number"]}
    return {
        "facts": [" ".join(line.split()) for line in head.lines],
        "notes": view_parts(others),
        "data": pack(build_data(bins, memory)),
        "chosen": _pack_chosen(memory, result.composition),
        "picture": _picture(bins),
        "at": result.composition.what,
        "peak": format_bytes(int(bins.allocated[bins.peak])),
        "tables": {
            "module": modules,
            "line": view_table(_table_by(result, "stack")),
            "category": view_table(_table_by(result, "category")),
        },
    }


def _pack_chosen(memory: DeviceMemory, composition: Composition) -> Markup:
    texts, by_line = Interned(), defaultdict[str, list[Piece]](list)
    for row in memory.live_rows(composition.moment):
        label = memory.stack_of(row, composition.moment).label
        by_line[label].append(piece_of(memory, row, composition.moment))
    sizes, counts = defaultdict[str, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
    for label, pieces in sorted(by_line.items()):
        for part in sum_by_module(pieces, composition.allocated_bytes, ()):
            sizes[kind_of(part.name)][label] += part.bytes
            counts[kind_of(part.name)][label] += part.count
    data = {
        "lines": {
            kind: [[texts.number(label), size, counts[kind][label]] for label, size in by_label.most_common()]
            for kind, by_label in sizes.items()
        },
        "categories": {
            kind: [[texts.number(category), size] for category, size in held.most_common() if size]
            for kind, held in _categories_by_kind(composition.by_module).items()
        },
    }
    return pack({**data, "texts": texts.texts})


def _table_by(result: MemoryResult, by: By) -> Table:
    document = build_memory_document(
        result, by=by, top=len(result.composition.by_stack) + len(result.composition.by_module)
    )
    return next(part for part in document.parts if isinstance(part, Table))


def build_data(bins: Bins, memory: DeviceMemory) -> dict[str, Any]:
    texts = Interned()
    groups = {"category": bins.by_category, "module": bins.by_module, "stack": bins.by_stack}
    columns = [bins.allocated, bins.lowest, bins.reserved]
    columns += [series.bytes for group in groups.values() for series in group]
    unit = int(np.gcd.reduce([int(np.gcd.reduce(column)) for column in columns])) or 1
    frames: dict[tuple[str, ...], int] = {}
    return {
        "has_times": bins.has_times,
        "prefers_events": bins.prefers_events,
        "unit": unit,
        "peak": bins.peak,
        "moments": _deltas(bins.moments, 1),
        "times_us": _deltas(bins.times_us, 1),
        "allocated": _deltas(bins.allocated, unit),
        "lowest": _deltas(bins.lowest, unit),
        "reserved": _deltas(bins.reserved, unit),
        "series": {
            key: [_series(part, unit, texts, frames) for part in group] for key, group in groups.items() if group
        },
        "phases": _phases(memory, texts),
        "shapes": _shapes(bins.shapes, texts, frames),
        "stacks": [[texts.number(frame) for frame in stack[:_FRAMES_KEPT]] for stack in frames],
        "colours": {
            "categories": colours.MEMORY,
            "stacks": colours.STACKS,
            "rest": colours.REST_OF_MEMORY,
            "phases": colours.PHASES,
            "phase": colours.OTHER_PHASE,
        },
        # Last, when all of them have their numbers.
        "texts": texts.texts,
    }


def _series(series: Series, unit: int, texts: Interned, frames: dict[tuple[str, ...], int]) -> dict[str, Any]:
    return {
        "name": texts.number(series.name),
        "values": _deltas(series.bytes, unit),
        "stack": frames.setdefault(series.stack, len(frames)),
        "stack_count": series.stack_count,
    }


def _shapes(shapes: tuple[Shape, ...], texts: Interned, frames: dict[tuple[str, ...], int]) -> dict[str, Any]:
    columns: dict[str, Any] = {name: [getattr(shape, name) for shape in shapes] for name in _SHAPE_NUMBERS}
    for name in _SHAPE_TEXTS:
        columns[name] = [-1 if getattr(shape, name) is None else texts.number(getattr(shape, name)) for shape in shapes]
    columns["evidence"] = [texts.number(EVIDENCE_WORDS[shape.evidence]) for shape in shapes]
    columns["stack"] = [frames.setdefault(shape.stack, len(frames)) for shape in shapes]
    return columns


def _phases(memory: DeviceMemory, texts: Interned) -> list[dict[str, int]]:
    timeline = memory.timeline
    longest = sorted(timeline.phases, key=lambda phase: phase.start_us - phase.end_us)[:_MAX_PHASES]
    spans = []
    for phase in sorted(longest, key=lambda phase: phase.start_us):
        first, last = timeline.moments_of(phase)
        start = memory.device.zero_us
        times = {"start_us": phase.start_us - start, "end_us": phase.end_us - start}
        spans.append({"name": texts.number(phase.name), "first": first, "last": last, **times})
    return spans


def _picture(bins: Bins) -> dict[str, Any]:
    count = len(bins.allocated)
    edges = np.unique(np.linspace(0, count, min(_PICTURE_COLUMNS, count) + 1).astype(np.int64))
    picked = np.array([low + int(np.argmax(bins.allocated[low:high])) for low, high in pairwise(edges.tolist())])
    x = 1000 * np.arange(len(picked) + 1) / len(picked)
    top = max(int(bins.reserved.max()), 1)
    below = np.zeros(len(picked), dtype=np.int64)
    layers: list[dict[str, Any]] = []
    for category in bins.by_category:
        above = below + category.bytes[picked]
        if category.bytes.any():
            upper, lower = _line(x, 300 - 300 * above / top), _line(x[::-1], (300 - 300 * below / top)[::-1])
            layers.append(
                {
                    "name": category.name,
                    "colour": colours.MEMORY[category.name],
                    "path": f"{upper}L{lower[1:]}Z",
                    "shown": format_bytes(int(category.bytes[bins.peak])),
                }
            )
        below = above
    peak_at = int(np.argmax(bins.allocated[picked]))
    return {
        "layers": layers,
        "reserved": _line(x, 300 - 300 * bins.reserved[picked] / top),
        "peak_x": round(float(x[peak_at]), 1),
        "top": format_bytes(top),
        "label": ", ".join(f"{make_visible(layer['name'])} {layer['shown']}" for layer in layers),
    }


def _line(x: Any, y: Any) -> str:
    steps = [f"{x[at]:.0f},{y[at]:.1f}L{x[at + 1]:.0f},{y[at]:.1f}" for at in range(len(y))]
    return "M" + "L".join(steps)


def _deltas(values: Ints, unit: int) -> list[int]:
    deltas: list[int] = np.diff(values // unit, prepend=0).tolist()
    return deltas
