"""(b): the kernel with the most time in forward, how often it is called, and whether it leads with backward too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from profkit.analysis.checks.run_check import products_per_forward
from profkit.models.presets import PRESETS
from profkit.report.units import format_count, format_share
from recipes.nsight.cells import TRAIN
from recipes.nsight.commands import find_templates, show_kernels
from recipes.nsight.other_kernels import categorize_forward, choose_forwards
from recipes.nsight.read import GEMM
from recipes.nsight.words import (
    Answer,
    Measured,
    code,
    describe,
    measure_noun,
    ms,
    render_lines,
    tell_calls,
    tell_extent,
)

_NEAR_TIE = 0.01
"""Shares that differ by less are as good as equal."""


def answer_top(rows: Sequence[Measured]) -> Answer:
    """Return what is said to (b)."""
    trained = [row for row in rows if row["passes"] == TRAIN and row.get("forward_backward")]
    if not trained:
        return Answer([], [], [])
    noun = measure_noun(trained[0])
    others = [row for row in trained if not row["same_kernel"]]
    ties = sum(is_near_tie(row) for row in others)
    extent = tell_extent(trained, lambda row: row["top_share"], "{:.1%}")
    short = (
        f"The {noun} with the most time in forward has {extent} of forward's {noun} time. Over forward, loss and "
        f"backward the same one leads in {len(trained) - len(others)} of {format_count(len(trained), 'cell')}"
    )
    if others:
        short += f"; in {ties} of the {len(others)} others it is behind by less than 1 percentage point, a near tie"
    ends = {id(row): row for row in (choose(trained, key=lambda row: row["top_share"]) for choose in (max, min))}
    return Answer(
        short=[f"{short}."],
        blocks=[
            f"Shares of the {noun} time of forward, and of that of forward, loss and backward together; where another "
            "one leads there, its share stands against that of forward's.",
            _tabulate_top(trained),
            *(name_top(row) for row in ends.values()),
            *_count_products(rows),
        ],
        commands=find_templates(
            trained, lambda row: [show_kernels(row, row["forward"]), show_kernels(row, row["forward_backward"])]
        ),
    )


def is_near_tie(row: Measured) -> bool:
    """Return whether forward's first kernel is as good as first with backward too, where another one leads."""
    both = row["forward_backward"]
    return not row["same_kernel"] and both["rows"][0]["share"] - both["forwards_top"]["share"] < _NEAR_TIE


def name_top(row: Measured) -> str:
    """Return the kernel with most time in forward, and over forward, loss and backward."""
    noun, forward, both = measure_noun(row), row["forward"], row["forward_backward"]
    first, there, other = forward["rows"][0], both["forwards_top"], both["rows"][0]
    name, others = _names(row)
    said = (
        f"{describe(row)}: {name} has the most {noun} time of forward, {_part(first, forward)} a forward "
        f"({format_share(first['share'])} of the {noun} time under `{forward['range']}`), in {tell_calls(first)} a "
        f"forward{_ties(forward)}. Over forward, loss and backward it is "
        f"{'the same' if row['same_kernel'] else f'another: {others}'}, {_part(other, both)} a step "
        f"({format_share(other['share'])} of the {noun} time under `{both['range']}` without `{both['exclude']}`), in "
        f"{tell_calls(other)}{_ties(both)}"
    )
    if not row["same_kernel"]:
        said += f"; {name} has {format_share(there['share'])} there, place {there['place']}"
        said += ", a near tie" if is_near_tie(row) else ""
    return f"{said}."


def _names(row: Measured) -> tuple[str, str]:
    """Return the first kernels of forward and with backward; in full if they read alike and are not the same."""
    first, other = (row[table]["rows"][0] for table in ("forward", "forward_backward"))
    short = code(first, row), code(other, row)
    if short[0] == short[1] and not row["same_kernel"]:
        return f"`{first['name']}`", f"`{other['name']}`"
    return short


def _tabulate_top(rows: Sequence[Measured]) -> str:
    noun = measure_noun(rows[0])
    headings = [
        "size",
        "context",
        f"{noun} of forward",
        "share",
        "calls a forward",
        "with loss and backward",
        "its share",
        "calls a step",
    ]
    lines = []
    for row in rows:
        first, both = row["forward"]["rows"][0], row["forward_backward"]
        name, other = (each.strip("`") for each in _names(row))
        there = both["rows"][0]
        line = [
            row["size"],
            str(row["context"]),
            name,
            format_share(first["share"]),
            f"{first['per_instance_count']:g}",
        ]
        share = format_share(there["share"])
        if not row["same_kernel"]:
            share += f" against {format_share(both['forwards_top']['share'])}"
            share += ", near tie" if is_near_tie(row) else ""
        other = "the same" if row["same_kernel"] else other
        lines.append([*line, other, share, f"{there['per_instance_count']:g}"])
    return render_lines(headings, lines, ("size", headings[2], headings[5], headings[6]))


def _count_products(rows: Sequence[Measured]) -> Iterator[str]:
    """Say how many kernels of category gemm a forward has for its matrix products."""
    counted = [row for row in choose_forwards(rows) if row["measure"] == "gpu-kernel"]
    if counted:
        extent = tell_extent(counted, lambda row: _gemm_kernels(row) / _products(row), "{:.2f}", _tell_products)
        yield (
            "Calls are of kernels. For each matrix product of a forward (nine a layer, one for the head) there are "
            f"{extent} kernels of category gemm: a product that is split along its inner dimension needs another one, "
            "which adds up its parts (`…_split_k`, `splitKreduce`)."
        )


def _gemm_kernels(row: Measured) -> float:
    lines = categorize_forward(row)["rows"]
    return sum(line["per_instance_count"] for line in lines if line["name"] == GEMM)


def _products(row: Measured) -> int:
    return products_per_forward(PRESETS[row["size"]].num_layers)


def _tell_products(row: Measured) -> str:
    return f"{describe(row)}: {_gemm_kernels(row):g} for {_products(row)}"


def _part(line: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    each, whole = (total / table["instances"] / 1e6 for total in (line["total_ns"], table["total_ns"]))
    return f"{ms(each)} of {ms(whole)}"


def _ties(table: Mapping[str, Any]) -> str:
    return f" (with as much time: {table['tied'] - 1} more)" if table["tied"] > 1 else ""
