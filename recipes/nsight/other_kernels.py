"""(c): the kernels of forward that are no matrix products, by category and one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from profkit.report.units import format_count, format_share
from recipes.nsight.cells import INFERENCE, TRAIN
from recipes.nsight.commands import find_templates, show_kernels
from recipes.nsight.read import GEMM, MATTERS
from recipes.nsight.words import (
    DOING,
    Answer,
    Measured,
    code,
    describe,
    measure_noun,
    render_lines,
    tell_calls,
    tell_extent,
)


def answer_others(rows: Sequence[Measured]) -> Answer:
    """Return what is said to (c)."""
    forwards = choose_forwards(rows)
    if not forwards:
        return Answer([], [], [])
    noun = measure_noun(forwards[0])
    names = _rank_categories(forwards)
    products, *others = (tell_extent(forwards, partial(_share, category=name), "{:.1%}") for name in (GEMM, *names))
    parts = [f"{name} has {extent}" for name, extent in zip(names, others, strict=True)]
    seen = " and ".join(dict.fromkeys(DOING[row["passes"]] for row in forwards))
    return Answer(
        short=[
            f"Matrix products have {products} of forward's {noun} time; beside them "
            f"{', '.join(parts) or 'no category matters'}.",
            *_tell_leaders(forwards, noun),
        ],
        blocks=[
            f"Shares of the {noun} time of forward, in {seen}; and then each {noun} beside products with "
            f"{MATTERS:.0%} or more of some cell's; what reads alike is added up.",
            _tabulate_others(forwards, names),
            *_list_others(forwards),
        ],
        commands=find_templates(
            forwards,
            lambda row: [
                show_kernels(row, categorize_forward(row), "--by", "category"),
                show_kernels(row, row["forward"]),
            ],
        ),
    )


def _share(row: Measured, category: str) -> float:
    found: float = sum(line["share"] for line in categorize_forward(row)["rows"] if line["name"] == category)
    return found


def _rank_categories(rows: Sequence[Measured]) -> list[str]:
    """Return the categories beside products that matter in some row, the largest first."""
    most: dict[str, float] = {}
    for row in rows:
        for line in categorize_forward(row)["rows"]:
            most[line["name"]] = max(most.get(line["name"], 0.0), line["share"])
    return sorted((name for name in most if name != GEMM and most[name] >= MATTERS), key=lambda name: -most[name])


def _first_other(row: Measured) -> Mapping[str, Any] | None:
    """Return the kernel with most time among those that are no matrix products and matter."""
    found = (line for line in row["forward"]["rows"] if line["category"] != GEMM and line["share"] >= MATTERS)
    return next(found, None)


def _tell_leaders(rows: Sequence[Measured], noun: str) -> Iterator[str]:
    """Name the kernels that have the most time beside products, those of the most cells first."""
    led: dict[str, list[tuple[Measured, Mapping[str, Any]]]] = {}
    for row in rows:
        line = _first_other(row)
        if line:
            led.setdefault(code(line, row), []).append((row, line))
    parts = []
    for name, cells in sorted(led.items(), key=lambda item: -len(item[1])):
        row, line = max(cells, key=lambda cell: cell[1]["share"])
        parts.append(
            f"{name} in {len(cells)}, up to {format_share(line['share'])} ({describe(row)}, {tell_calls(line)})"
        )
    if parts:
        of_all = format_count(len(rows), "cell")
        yield f"The {noun} with the most time beside products is, of {of_all}: {'; '.join(parts)}."


def _tabulate_others(rows: Sequence[Measured], names: Sequence[str]) -> str:
    lines = []
    for row in rows:
        shares = [_share(row, name) for name in (GEMM, *names)]
        shown = [format_share(share) for share in (*shares, max(1 - sum(shares), 0.0))]
        lines.append([row["size"], str(row["context"]), *shown])
    return render_lines(["size", "context", "products", *names, "all others"], lines)


def _list_others(rows: Sequence[Measured]) -> Iterator[str]:
    """Yield the kernels that matter in some cell, those with the most of one first; what reads alike is added up."""
    found: dict[tuple[str, str], list[tuple[float, float, Measured]]] = {}
    for row in rows:
        for key, (share, calls) in _add_others(row).items():
            found.setdefault(key, []).append((share, calls, row))
    if not found:
        return
    noun = measure_noun(rows[0])
    headings = [noun, "category", f"cells of {len(rows)}", "share at most", "there in", "calls there"]
    most = {key: max(cells, key=lambda cell: cell[0]) for key, cells in found.items()}
    lines = [
        [name, category, str(len(found[name, category])), format_share(share), describe(row), f"{calls:g}"]
        for (name, category), (share, calls, row) in sorted(most.items(), key=lambda item: -item[1][0])
    ]
    yield render_lines(headings, lines, (noun, "category", "there in"))


def _add_others(row: Measured) -> dict[tuple[str, str], tuple[float, float]]:
    """Return by name and category the share and calls a forward of the kernels beside products that matter."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for line in row["forward"]["rows"]:
        if line["category"] != GEMM and line["share"] >= MATTERS:
            key = code(line, row).strip("`"), line["category"]
            share, calls = found.get(key, (0.0, 0.0))
            found[key] = share + line["share"], calls + line["per_instance_count"]
    return found


def categorize_forward(row: Measured) -> Mapping[str, Any]:
    """Return the categories of a row's forward; those of an inference's step are the same. Empty if not known."""
    step = row["step"] if row["passes"] == INFERENCE else {}
    found: Mapping[str, Any] = row.get("forward_categories") or step
    return found


def choose_forwards(rows: Sequence[Measured]) -> list[Measured]:
    """Return for each size and context the row whose forward is known by category: training's, else inference's."""
    found: dict[tuple[object, ...], Measured] = {}
    for passes in (TRAIN, INFERENCE):
        for row in rows:
            if row["passes"] == passes and row.get("forward") and categorize_forward(row):
                found.setdefault((row["size"], row["context"]), row)
    return list(found.values())
