"""What a chosen module shows in the sections below: its kernels, and what it held by line and by category.

Each choice closes: the times of its kernels add up to the module's times, its lines and categories to its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from profkit.analysis.kernels.categories import categorize
from profkit.analysis.memory.composition import piece_of
from profkit.analysis.memory.parts import Piece, sum_by_module
from profkit.analysis.time_account.steps import find_warmup
from profkit.analysis.tree.modules import ModuleKernel, time_kernels_by_module
from profkit.report.page.markup import Interned, pack
from profkit.report.page.results import Results
from profkit.report.text import simplify_name


def pack_choices(run: Results, rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return what the page's script needs to show one module, for the rows of the tree that the page shows."""
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
    trace = run.capture.trace
    if trace is None or not len(trace.trace.work):
        return None
    found = time_kernels_by_module(trace.attribution, {row["name"] for row in rows})
    measure = trace.trace.measure

    def row_of(name: str, one: ModuleKernel) -> list[int]:
        shown = simplify_name(name) if measure == "gpu-kernel" else name
        words = [texts.number(word) for word in (name, shown, categorize(name, measure).name)]
        return [*words, one.forward_ns, one.backward_ns, one.recompute_ns, one.inference_ns, one.count]

    return {
        "modules": {
            module: [row_of(name, one) for name, one in sorted(kernels.items(), key=_by_time)]
            for module, kernels in found.items()
        },
        "exclude": find_warmup(trace.trace),
        # Where no range was open in the backward pass, a module's name alone means its forward pass.
        "forward_alone": bool(trace.attribution.is_mirror.any()),
    }


def _by_time(item: tuple[str, ModuleKernel]) -> tuple[int, str]:
    name, one = item
    return -(one.forward_ns + one.backward_ns + one.recompute_ns + one.inference_ns), name


def _pack_memory(run: Results, rows: Sequence[Mapping[str, Any]], texts: Interned) -> dict[str, Any] | None:
    """Return, for each module, its bytes by line and by category."""
    memory, result = run.device, run.memory
    if memory is None or result is None:
        return None
    row_of = {path: row["name"] for row in rows for path in row.get("paths", ())}
    lines: dict[str, dict[str, tuple[int, int]]] = {}
    for label, pieces in _pieces_by_line(run).items():
        for part in sum_by_module(pieces, result.composition.allocated_bytes, ()):
            if part.path in row_of:
                mine = lines.setdefault(row_of[part.path], {})
                size, count = mine.get(label, (0, 0))
                mine[label] = size + part.bytes, count + part.count
    categories: dict[str, Counter[str]] = {}
    for part in result.composition.by_module:
        if part.path in row_of:
            categories.setdefault(row_of[part.path], Counter()).update(part.categories)
    return {
        "lines": {
            name: [[texts.number(label), size, count] for label, (size, count) in sorted(mine.items(), key=_by_size)]
            for name, mine in lines.items()
        },
        "categories": {
            name: [[texts.number(category), size] for category, size in mine.most_common() if size]
            for name, mine in categories.items()
        },
    }


def _by_size(item: tuple[str, tuple[int, int]]) -> tuple[int, str]:
    return -item[1][0], item[0]


def _pieces_by_line(run: Results) -> dict[str, list[Piece]]:
    """Return what was allocated at the moment, by the line that allocated it."""
    assert run.device is not None
    assert run.memory is not None
    memory, found = run.device, dict[str, list[Piece]]()
    moment = run.memory.composition.moment
    for row in memory.live_rows(moment):
        found.setdefault(memory.stack_of(row, moment).label, []).append(piece_of(memory, row, moment))
    return found
