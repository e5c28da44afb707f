"""How a row, its times and its kernels are called in the report; what one question's section of it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profkit.report.formats import Column, Table, render_markdown
from profkit.report.units import format_ns
from recipes.nsight.cells import INFERENCE, NSYS, TRAIN
from recipes.nsight.read import show_name

Measured = Mapping[str, Any]
"""A row that was measured."""

DOING = {TRAIN: "training", INFERENCE: "inference"}

_PROFILER_NAMES = {True: "Nsight Systems", False: "torch.profiler"}


@dataclass(frozen=True)
class Answer:
    """What is said to one question: in short, then as Markdown blocks, and the commands that print it for one cell."""

    short: Sequence[str]
    blocks: Sequence[str]
    commands: Sequence[str]


def describe(row: Measured) -> str:
    """Return which cell it is."""
    return f"{row['size']}, context {row['context']}"


def measure_noun(row: Measured) -> str:
    """Return what the times are of: GPU kernels, or the CPU's operators."""
    return "operator" if row["measure"] == "cpu-operator" else "kernel"


def profiler_name(row: Measured) -> str:
    """Return the profiler of a row in full."""
    return _PROFILER_NAMES[row["profiler"] == NSYS]


def pair_rows(rows: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Return inference and training of the same, where both have their shares."""
    shared = ("size", "context", "batch", "steps", "profiler")
    inference = {tuple(row[key] for key in shared): row for row in rows if row["passes"] == INFERENCE}
    pairs = [(inference.get(tuple(row[key] for key in shared), {}), row) for row in rows if row["passes"] == TRAIN]
    return [(one, other) for one, other in pairs if one.get("step") and other.get("step")]


def tell_extent(
    rows: Sequence[Measured], value: Callable[[Measured], float], form: str, name: Callable[[Measured], str] = describe
) -> str:
    """Return the least and the most of what rows have, each with its cell; of one row its value."""
    least, most = (choose(rows, key=value) for choose in (min, max))
    low, high = (f"{form.format(value(row))} ({name(row)})" for row in (least, most))
    return low if len(rows) == 1 else f"{low} to {high}"


def render_lines(headings: Sequence[str], lines: Sequence[Sequence[str]], words: Sequence[str] = ("size",)) -> str:
    """Return a Markdown table of texts; the columns in ``words`` stand at the left, the others are numbers."""
    return render_markdown(Table(tuple(Column(name, name, right=name not in words) for name in headings), lines, lines))


def tell_calls(line: Mapping[str, Any]) -> str:
    """Return how often a kernel is called an instance: ``84 calls``."""
    count = line["per_instance_count"]
    return f"{count:g} call{'s' * (count != 1)}"


def code(line: Mapping[str, Any], row: Measured) -> str:
    """Return a kernel's name as code."""
    return f"`{show_name(line['name'], row['measure'])}`"


def ms(value: float) -> str:
    """Return milliseconds with their unit."""
    return format_ns(round(value * 1e6))


def us(value: float) -> str:
    """Return microseconds with their unit."""
    return format_ns(round(value * 1e3))
