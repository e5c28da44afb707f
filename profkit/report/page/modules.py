"""The sections of modules, each with its time and its memory, and of memory over time.

A module's time and memory come from two processes of the same program, so they are joined by the module's name and the
phase, never by the clock. A row of time stands for modules that differ in a number; the memory of all of them is added
up for it. What the page shows of a chosen module closes: its kernels add up to its times, its lines and categories to
its bytes.

The data of memory over time are packed: sizes are differences from sample to sample, in the largest unit that divides
them all (usually 512 bytes), texts are numbers, and all of it is gzipped. uPlot, whose code and licence are in the
page, draws the chart; without it there is a picture.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup

from profkit.analysis.efficiency.summary import EfficiencyResult, EfficiencyRow
from profkit.analysis.kernels.categories import categorize
from profkit.analysis.memory.bins import Bins, Series, Shape, bin_history
from profkit.analysis.memory.device import DeviceMemory, Filter, piece_of
from profkit.analysis.memory.opened_snapshot import MemoryResult
from profkit.analysis.memory.places import PartRow, Piece, sum_by_module
from profkit.analysis.step_replay.limits import StepLimits
from profkit.analysis.time_account.steps import find_warmup
from profkit.analysis.tree.modules import PASSES, ModuleKernel, ModuleTime, time_kernels_by_module
from profkit.analysis.tree.selection import split_path
from profkit.names import BACKWARD, FORWARD, MODEL, kind_of, phase_of
from profkit.report import colours
from profkit.report.commands.memory import EVIDENCE_WORDS, By, build_memory_document
from profkit.report.commands.steps import name_limits
from profkit.report.document import Column, Lines, Table
from profkit.report.page.markup import Interned, Results, pack, view_parts, view_table
from profkit.report.text import make_visible, simplify_name
from profkit.report.units import BYTES, SHARE, TEXT, Unit, count_over, format_bytes, format_flops, ns_over
from profkit.snapshot.columns import Ints

_HELD = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
}
"""Column → category of memory."""

_PHASES = (FORWARD, BACKWARD)


def build_modules(run: Results) -> dict[str, Any]:
    """Return the tree of modules, depth first."""
    times, steps = run.summary.modules, run.steps
    parts = () if run.memory is None else run.memory.composition.by_module
    limits = None if run.capture.trace is None else run.capture.trace.step_limits
    rows = tree_of(times, parts, run.efficiency, limits)
    table = view_table(Table(_columns(run), rows))
    count = run.summary.head.gpu_count
    together = f", of all {count} GPUs together" if count > 1 else ""
    for view, row in zip(table["rows"], rows, strict=False):
        # Under its parent a module needs only the rest of its name; the whole one is in the title, and in CSV.
        parent = row["parent"] or ""
        view[0] |= {"depth": row["depth"], "number": row["number"], "title": view[0]["text"]}
        view[0]["text"] = view[0]["text"].removeprefix(f"{parent}.").removeprefix(f"{parent} ")
    return {
        "table": table,
        "choices": _pack_choices(run, rows[: len(table["rows"])]),
        "is_joined": bool(times) and bool(parts),
        "per": ("summed over the recording" if steps is None else f"per step, averages over {steps}") + together,
        "moment": None if run.memory is None else run.memory.composition.what,
    }


def tree_of(
    times: Sequence[ModuleTime],
    parts: Sequence[PartRow],
    efficiency: EfficiencyResult | None = None,
    limits: StepLimits | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each module with its depth in the tree, depth first; what is unknown is absent or None.

    A row holds those below it. One of memory alone stands in the module that its dotted name lies in, and around those
    that lie in it: a list of blocks is never called, so that no range says that it holds them.
    """
    timed = list(_time_rows(times, efficiency, parts, limits))
    others = list(_other_rows(times, parts))
    alone = {kind_of(row["name"]): row["name"] for row in others}
    kinds = {kind_of(row["name"]) for row in timed}
    for row in timed:
        around = map(kind_of, _prefixes(row["name"]))
        nearest = next((kind for kind in around if kind in kinds or kind in alone), None)
        if nearest is not None and nearest not in kinds:
            row["parent"] = alone[nearest]
    return _in_order([*timed, *others])


def _time_rows(
    times: Sequence[ModuleTime],
    efficiency: EfficiencyResult | None,
    parts: Sequence[PartRow],
    limits: StepLimits | None,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each module that has time, with what its ranges in both passes do and the memory of its name."""
    words = {} if efficiency is None else name_limits(efficiency.ranges, limits)
    ranges_of = {} if efficiency is None else _by_module(efficiency.ranges)
    held = _match([module.module for module in times], parts)
    for module in times:
        passes = ranges_of.get(module.module, {})
        flops = [row.flops for row in passes.values() if row.flops is not None]
        yield {
            "name": module.module,
            "parent": module.parent,
            "number": module.number,
            "forward_ns": module.forward_ns,
            "backward_ns": module.backward_ns,
            "recompute_ns": module.recompute_ns or None,
            "inference_ns": module.inference_ns or None,
            "kernel_count": sum(row.kernel_count for row in passes.values()) if passes else None,
            "flops": sum(flops) if flops else None,
            **{f"{phase}_peak": passes[phase].roof_share if phase in passes else None for phase in _PHASES},
            "limited_by": _limits(passes, words),
            **_held(held.get(module.module, [])),
        }


def _other_rows(times: Sequence[ModuleTime], parts: Sequence[PartRow]) -> Iterator[dict[str, Any]]:
    """Yield a row for what has memory alone, names that differ in a number as one."""
    known = [module.module for module in times]
    timed = {id(part) for matched in _match(known, parts).values() for part in matched}
    # What only holds modules that have rows of their own, as ``transformer`` does ``transformer.h``, has none.
    containers = {above for name in known for above in _prefixes(name)}
    groups: dict[str, list[PartRow]] = {}
    for part in parts:
        if id(part) not in timed and (part.own_bytes or part.name not in containers):
            # What lies outside the modules is split by phase one level below: names there are no modules.
            is_module = not part.path[0].startswith("(")
            groups.setdefault(kind_of(part.name) if is_module else " ".join(part.path), []).append(part)
    names = {kind_of(name): name for name in (*groups, *known)}
    for name, grouped in groups.items():
        path = grouped[0].path
        parent = path[0] if len(path) > 1 and path[0].startswith("(") else _module_around(name, names)
        yield {"name": name, "parent": parent, "number": len(grouped), **_held(grouped)}


def _match(known: Sequence[str], parts: Sequence[PartRow]) -> dict[str, list[PartRow]]:
    """Return the modules' memory by the rows of time that stand for them: ``h.*.mlp`` stands for ``h.0.mlp``."""
    by_kind: dict[str, list[str]] = {}
    for name in known:
        by_kind.setdefault(kind_of(name), []).append(name)
    matched: dict[str, list[PartRow]] = {}
    for part in parts:
        for name in by_kind.get(kind_of(part.name), ()):
            if name == part.name or re.fullmatch(re.escape(name).replace(r"\*", r"\d{1,9}"), part.name):
                matched.setdefault(name, []).append(part)
                break
    return matched


def _prefixes(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _module_around(name: str, names: Mapping[str, str]) -> str | None:
    """Return the module around one that has a row, by its dotted name; ``names`` are the rows by their kind."""
    near = next((names[kind_of(above)] for above in _prefixes(name) if kind_of(above) in names), None)
    if near is not None:
        return near
    return MODEL if name != MODEL and not name.startswith("(") and MODEL in names else None


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows depth first, each with its depth; one whose parent has no row stands at the top."""
    by_name = {row["name"]: row for row in rows}
    children: dict[str | None, list[dict[str, Any]]] = {}
    for row in rows:
        parent = row["parent"] if row["parent"] in by_name and row["parent"] != row["name"] else None
        children.setdefault(parent, []).append(row)
    ordered: list[dict[str, Any]] = []
    waiting = [(row, 0) for row in reversed(children.get(None, []))]
    while waiting:
        row, depth = waiting.pop()
        ordered.append(row | {"depth": depth})
        waiting += [(child, depth + 1) for child in reversed(children.get(row["name"], []))]
    return ordered


def _by_module(ranges: Iterable[EfficiencyRow]) -> dict[str, dict[str, EfficiencyRow]]:
    """Return module → pass → its range; of several paths the one with the most time."""
    by_module: dict[str, dict[str, EfficiencyRow]] = {}
    for row in ranges:
        phase = next((phase for part in split_path(row.path) if (phase := phase_of(part)) in _PHASES), None)
        if phase is not None:
            passes = by_module.setdefault(row.name, {})
            if phase not in passes or row.busy_ns > passes[phase].busy_ns:
                passes[phase] = row
    return by_module


def _limits(passes: Mapping[str, EfficiencyRow], words: Mapping[str, str | None]) -> str | None:
    """Return what limits a module, each pass by itself where they differ; ``words`` are those of the ranges' paths."""
    of_passes = {phase: words[row.path] for phase, row in passes.items()}
    known = {phase: text for phase, text in of_passes.items() if text is not None}
    if len(set(of_passes.values())) == 1 and known:
        return next(iter(known.values()))
    return "; ".join(f"{phase}: {text}" for phase, text in known.items()) or None


def _held(parts: Sequence[PartRow]) -> dict[str, Any]:
    """Return the bytes of some modules together, those of each use, and whose they are; nothing where none is known."""
    if not parts:
        return {}
    uses = {key: sum(part.categories.get(category, 0) for part in parts) for key, category in _HELD.items()}
    return {"bytes": sum(part.bytes for part in parts), "paths": tuple(part.path for part in parts), **uses}


def _columns(run: Results) -> list[Column]:
    """Return all columns that some program has; `view_table` leaves out those that nothing is known of."""
    steps = run.steps
    each = ns_over(steps)
    flops = Unit(lambda value: format_flops(value / (steps or 1)).removesuffix("FLOP").rstrip())
    columns = [
        Column("forward_ns", "forward", each),
        Column("backward_ns", "backward", each),
        Column("recompute_ns", "recompute", each),
        Column("inference_ns", "inference", each),
        Column("kernel_count", "kernels", count_over(steps)),
        Column("flops", "FLOP", flops),
        Column("forward_peak", "forward % of peak", SHARE),
        Column("backward_peak", "backward % of peak", SHARE),
        Column("limited_by", "limited by", TEXT),
        Column("bytes", "memory at the peak", BYTES),
        *(Column(key, heading, BYTES) for key, heading in _HELD.items()),
    ]
    return [Column("name", "module", TEXT), *columns]


def _pack_choices(run: Results, rows: Sequence[Mapping[str, Any]]) -> Markup:
    texts = Interned()
    data = {
        "steps": run.steps,
        "run": run.name,
        "kernels": _pack_kernels(run, rows, texts),
        "memory": _pack_memory(run, rows, texts),
    }
    return pack({**data, "texts": texts.texts})


def _pack_kernels(run: Results, rows: Sequence[Mapping[str, Any]], texts: Interned) -> dict[str, Any] | None:
    """Return, for each module, its kernels as rows: full name, name, category, the four times, count."""
    opened = run.capture.trace
    if opened is None or not len(opened.trace.work):
        return None
    measure = opened.trace.measure

    def pack_row(name: str, kernel: ModuleKernel) -> list[int]:
        shown = simplify_name(name) if measure == "gpu-kernel" else name
        words = [texts.number(word) for word in (name, shown, categorize(name, measure).name)]
        return [*words, *(getattr(kernel, part) for part in PASSES), kernel.count]

    by_module = time_kernels_by_module(opened.attribution, {row["name"] for row in rows})
    return {
        "modules": {
            module: [pack_row(*item) for item in sorted(kernels.items(), key=lambda item: (-item[1].total_ns, item[0]))]
            for module, kernels in by_module.items()
        },
        "exclude": find_warmup(opened.trace),
        # Where no range was open in the backward pass, a module's name alone means its forward pass.
        "forward_alone": bool(opened.attribution.is_mirror.any()),
    }


def _pack_memory(run: Results, rows: Sequence[Mapping[str, Any]], texts: Interned) -> dict[str, Any] | None:
    if run.capture.snapshot is None or run.memory is None:
        return None
    composition = run.memory.composition
    row_of = {path: row["name"] for row in rows for path in row.get("paths", ())}
    sizes, counts = defaultdict[str, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
    memory = run.capture.snapshot.device()
    by_line = defaultdict[str, list[Piece]](list)
    for row in memory.live_rows(composition.moment):
        label = memory.stack_of(row, composition.moment).label
        by_line[label].append(piece_of(memory, row, composition.moment))
    for label, pieces in by_line.items():
        for part in sum_by_module(pieces, composition.allocated_bytes, ()):
            if part.path in row_of:
                sizes[row_of[part.path]][label] += part.bytes
                counts[row_of[part.path]][label] += part.count
    categories = defaultdict[str, Counter[str]](Counter)
    for part in composition.by_module:
        if part.path in row_of:
            categories[row_of[part.path]].update(part.categories)
    return {
        "lines": {
            name: [
                [texts.number(label), size, counts[name][label]]
                for label, size in sorted(by_label.items(), key=lambda item: (-item[1], item[0]))
            ]
            for name, by_label in sizes.items()
        },
        "categories": {
            name: [[texts.number(category), size] for category, size in held.most_common() if size]
            for name, held in categories.items()
        },
    }


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
        "picture": _picture(bins),
        "at": result.composition.what,
        "peak": format_bytes(int(bins.allocated[bins.peak])),
        "peak_bytes": int(bins.allocated[bins.peak]),
        "tables": {
            "module": modules,
            "line": view_table(_table_by(result, "stack")),
            "category": view_table(_table_by(result, "category")),
        },
    }


def _table_by(result: MemoryResult, by: By) -> Table:
    document = build_memory_document(
        result, by=by, top=len(result.composition.by_stack) + len(result.composition.by_module)
    )
    return next(part for part in document.parts if isinstance(part, Table))


def build_data(bins: Bins, memory: DeviceMemory) -> dict[str, Any]:
    """Return what the page's script reads."""
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
    """Return the phases by time and by moment; if there are very many, only the longest."""
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
    """Return the categories as stacked areas on a canvas of 1000 × 300; the highest sample of each column stands."""
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
                    "at_peak": int(category.bytes[bins.peak]),
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
