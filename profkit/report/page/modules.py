"""Section 4: the modules, each with its time and its memory.

The two come from two processes of the same program, so they are joined by the module's name and the phase, never by the
clock. A row of time stands for modules that differ in a number; the memory of all of them is added up for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from profkit.analysis.efficiency.summary import EfficiencyResult, EfficiencyRow
from profkit.analysis.memory.parts import PartRow
from profkit.analysis.tree.modules import ModuleTime
from profkit.analysis.tree.selection import split_path
from profkit.names import BACKWARD, FORWARD, MODEL, kind_of
from profkit.report.commands.efficiency import limit_words
from profkit.report.document import Column, Table
from profkit.report.page.markup import view_table
from profkit.report.page.module_choice import pack_choices
from profkit.report.page.results import PERCENT, Results
from profkit.report.units import BYTES, SHARE, TEXT, Unit, count_over, four_digits, ns_over

_HELD = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
}
"""Column → category of memory."""

_COMPARED = ("forward_ns", "backward_ns", "bytes")

_PHASES = {FORWARD: "forward", BACKWARD: "backward"}


def build_modules(run: Results, before: Results | None = None) -> dict[str, Any]:
    """Return the tree of modules, depth first; with an earlier run, how each figure changed since."""
    times, parts, steps = run.summary.modules, _parts(run), run.steps
    rows = tree_of(times, parts, run.efficiency)
    if before is not None:
        _add_changes(rows, steps, tree_of(before.summary.modules, _parts(before)), before.steps)
    table = view_table(Table(_columns(run, rows), rows))
    for view, row in zip(table["rows"], rows, strict=False):
        # Under its parent a module needs only the rest of its name; the whole one is in the title, and in CSV.
        parent = row["parent"] or ""
        view[0] |= {"depth": row["depth"], "number": row["number"], "title": view[0]["text"]}
        view[0]["text"] = view[0]["text"].removeprefix(f"{parent}.").removeprefix(f"{parent} ")
    return {
        "table": table,
        "choices": pack_choices(run, rows[: len(table["rows"])]),
        "missing": list(_missing(run, rows)),
        "is_joined": bool(times) and bool(parts),
        "per": ("summed over the recording" if steps is None else f"per step, averages over {steps}") + _of_gpus(run),
        "moment": None if run.memory is None else run.memory.composition.what,
    }


def _missing(run: Results, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield which columns were not recorded, and the command that records them."""
    if not run.summary.modules:
        yield "The times of modules", run.record_again("--nsys")
    elif run.efficiency is not None and all(row.get("flops") is None for row in rows):
        yield "FLOP and % of peak, and what limits most modules,", run.record_again("--flops")
    if run.memory is None:
        yield "The bytes of modules", run.record_again("--memory")


def _of_gpus(run: Results) -> str:
    count = run.summary.head.gpu_count
    return f", of all {count} GPUs together" if count > 1 else ""


def _parts(run: Results) -> Sequence[PartRow]:
    """Return what each module held at the peak."""
    return () if run.memory is None else run.memory.composition.by_module


def _add_changes(
    rows: Sequence[dict[str, Any]], steps: int | None, before: Sequence[dict[str, Any]], steps_before: int | None
) -> None:
    """Note in each row by which part its figures changed; times are compared per step."""
    old_rows = {row["name"]: row for row in before}
    for row in rows:
        for key in _COMPARED:
            new, old = row.get(key), old_rows.get(row["name"], {}).get(key)
            if key != "bytes":
                new, old = (
                    None if value is None or count is None else value / count
                    for value, count in ((new, steps), (old, steps_before))
                )
            row[f"{key}_change"] = new / old - 1 if new is not None and old else None


def tree_of(
    times: Sequence[ModuleTime], parts: Sequence[PartRow], efficiency: EfficiencyResult | None = None
) -> list[dict[str, Any]]:
    """Return a row for each module with its depth in the tree, depth first; what is unknown is absent or None."""
    return _in_order([*_time_rows(times, efficiency, parts), *_other_rows(times, parts)])


def _time_rows(
    times: Sequence[ModuleTime], efficiency: EfficiencyResult | None, parts: Sequence[PartRow]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each module that has time, with what its ranges in both passes do and the memory of its name."""
    found = {} if efficiency is None else _by_module(efficiency.ranges)
    held = _match([one.module for one in times], parts)
    for one in times:
        passes = found.get(one.module, {})
        flops = [row.flops for row in passes.values() if row.flops is not None]
        yield {
            "name": one.module,
            "parent": one.parent,
            "number": one.number,
            "forward_ns": one.forward_ns,
            "backward_ns": one.backward_ns,
            "recompute_ns": one.recompute_ns or None,
            "inference_ns": one.inference_ns or None,
            "kernel_count": sum(row.kernel_count for row in passes.values()) if passes else None,
            "flops": sum(flops) if flops else None,
            **{f"{phase}_peak": None if row is None else row.roof_share for phase, row in _of_phases(passes)},
            "limited_by": _limits(passes),
            **_held(held.get(one.module, [])),
        }


def _other_rows(times: Sequence[ModuleTime], parts: Sequence[PartRow]) -> Iterator[dict[str, Any]]:
    """Yield a row for what has memory alone, names that differ in a number as one."""
    known = [one.module for one in times]
    timed = {id(part) for _, some in _match(known, parts).items() for part in some}
    # What only holds modules that have rows of their own, as ``transformer`` does ``transformer.h``, has none.
    containers = {above for name in known for above in _prefixes(name)}
    groups: dict[str, list[PartRow]] = {}
    for part in parts:
        if id(part) not in timed and (part.own_bytes or part.name not in containers):
            # What lies outside the modules is split by phase one level below: names there are no modules.
            is_module = not part.path[0].startswith("(")
            groups.setdefault(kind_of(part.name) if is_module else " ".join(part.path), []).append(part)
    names = {kind_of(name): name for name in (*groups, *known)}
    for name, some in groups.items():
        inner = len(some[0].path) > 1 and some[0].path[0].startswith("(")
        parent = some[0].path[0] if inner else _around(name, names)
        yield {"name": name, "parent": parent, "number": len(some), **_held(some)}


def _match(known: Sequence[str], parts: Sequence[PartRow]) -> dict[str, list[PartRow]]:
    """Return the modules' memory by the rows of time that stand for them: ``h.*.mlp`` stands for ``h.0.mlp``."""
    by_kind: dict[str, list[str]] = {}
    for name in known:
        by_kind.setdefault(kind_of(name), []).append(name)
    found: dict[str, list[PartRow]] = {}
    for part in parts:
        for name in by_kind.get(kind_of(part.name), ()):
            if name == part.name or re.fullmatch(re.escape(name).replace(r"\*", r"\d{1,9}"), part.name):
                found.setdefault(name, []).append(part)
                break
    return found


def _prefixes(name: str) -> Iterator[str]:
    """Yield the dotted names around a module's, the nearest first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _around(name: str, names: Mapping[str, str]) -> str | None:
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
    found: list[dict[str, Any]] = []
    waiting = [(row, 0) for row in reversed(children.get(None, []))]
    while waiting:
        row, depth = waiting.pop()
        found.append(row | {"depth": depth})
        waiting += [(child, depth + 1) for child in reversed(children.get(row["name"], []))]
    return found


def _by_module(ranges: Iterable[EfficiencyRow]) -> dict[str, dict[str, EfficiencyRow]]:
    """Return module → pass → its range; of several paths the one with the most time."""
    found: dict[str, dict[str, EfficiencyRow]] = {}
    for row in ranges:
        phase = next((part for part in split_path(row.path) if part in _PHASES), None)
        if phase is not None:
            passes = found.setdefault(row.name, {})
            if phase not in passes or row.busy_ns > passes[phase].busy_ns:
                passes[phase] = row
    return found


def _of_phases(passes: Mapping[str, EfficiencyRow]) -> Iterator[tuple[str, EfficiencyRow | None]]:
    return ((phase, passes.get(phase)) for phase in _PHASES)


def _limits(passes: Mapping[str, EfficiencyRow]) -> str | None:
    """Return what limits a module, each pass by itself where they differ."""
    words = {_PHASES[phase]: limit_words(row) for phase, row in passes.items()}
    known = {phase: text for phase, text in words.items() if text is not None}
    if len(set(words.values())) == 1 and known:
        return next(iter(known.values()))
    return "; ".join(f"{phase}: {text}" for phase, text in known.items()) or None


def _held(parts: Sequence[PartRow]) -> dict[str, Any]:
    """Return the bytes of some modules together, those of each use, and whose they are; nothing where none is known."""
    if not parts:
        return {}
    uses = {key: sum(part.categories.get(category, 0) for part in parts) for key, category in _HELD.items()}
    return {"bytes": sum(part.bytes for part in parts), "paths": tuple(part.path for part in parts), **uses}


def _flops(value: float) -> str:
    power, prefix = next(((p, x) for p, x in ((12, "T"), (9, "G"), (6, "M")) if value >= 10**p), (0, ""))
    return f"{four_digits(value / 10**power)} {prefix}"


def _columns(run: Results, rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns; what was not recorded keeps its column, and `_missing` says how to record it.

    What no program has but some (recomputation, an earlier run) has a column only where there is any.
    """
    steps = run.steps
    each = ns_over(steps)
    flops = Unit(lambda value: _flops(value / (steps or 1)))
    seldom = ("recompute_ns", "inference_ns", *(f"{key}_change" for key in _COMPARED))
    some = [key for key in seldom if _any_has(rows, key)]
    of_gpu = ("kernel_count", "flops", "forward_peak", "backward_peak", "limited_by")
    some += [key for key in of_gpu if run.efficiency is not None or _any_has(rows, key)]
    columns = [
        Column("forward_ns", "forward", each),
        Column("backward_ns", "backward", each),
        Column("forward_ns_change", "forward ±", PERCENT),
        Column("backward_ns_change", "backward ±", PERCENT),
        Column("recompute_ns", "recompute", each),
        Column("inference_ns", "inference", each),
        Column("kernel_count", "kernels", count_over(steps)),
        Column("flops", "FLOP", flops),
        Column("forward_peak", "forward % of peak", SHARE),
        Column("backward_peak", "backward % of peak", SHARE),
        Column("limited_by", "limited by", TEXT),
        Column("bytes", "memory at the peak", BYTES),
        Column("bytes_change", "memory ±", PERCENT),
        *(Column(key, heading, BYTES) for key, heading in _HELD.items()),
    ]
    always = ("forward_ns", "backward_ns", "bytes", *_HELD)
    return [Column("name", "module", TEXT), *(one for one in columns if one.key in always or one.key in some)]


def _any_has(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(row.get(key) is not None for row in rows)
