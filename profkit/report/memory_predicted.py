"""Print predicted memory beside measured: a line a phase, and on request category by category and tensor by tensor."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from profkit.analysis.memory.predicted import CategoryComparison, PhaseComparison, PredictedLine, PredictedMemory
from profkit.report.formats import WIDTH, Column, Table, render_table
from profkit.report.units import format_bytes, format_exactly

_UNTOLD = "—"

_STANDING = ("parameters", "optimizer state")
"""Categories of which a screen shows the sum alone; their tensors are in the JSON."""


def predicted_table(predicted: PredictedMemory) -> Table:
    """Return requested bytes by phase: predicted, measured, what only one side has, and the padding on top."""
    columns = (
        Column("requested peak", "phase", right=False),
        Column("predicted", "predicted_bytes"),
        Column("measured", "measured_bytes"),
        Column("difference", "difference_bytes"),
        Column("unexplained", "unexplained_bytes"),
        Column("padding then", "padding_bytes"),
    )
    return Table(columns, [_phase_cells(phase) for phase in predicted.phases], [])


def render_predicted(predicted: PredictedMemory, *, full_names: bool = False) -> str:
    """Return every phase's categories and tensors, and what autograd saves."""
    lengths = ", ".join(f"{name} {length:,}" for name, length in predicted.lengths.items())
    parts = ["\n".join(textwrap.fill(line, WIDTH) for line in (*_facts(predicted), f"lengths: {lengths}"))]
    for phase in predicted.phases:
        heading = f"{phase.name}: predicted {_told(phase.predicted_bytes)}, with {phase.moment} new"
        parts.append(f"{textwrap.fill(heading, WIDTH)}\n{render_table(_category_table(phase), full=full_names)}")
        of_step = [line for line in phase.lines if line.category not in _STANDING]
        parts += [render_table(_tensor_table(of_step), full=full_names)] * bool(of_step)
    if predicted.saved:
        total = sum(line.bytes for line in predicted.saved)
        heading = f"saved for backward: predicted {format_exactly(total)}"
        parts.append(f"{heading}\n{render_table(_tensor_table(predicted.saved), full=full_names)}")
    return "\n\n".join(parts)


def predicted_rows(predicted: PredictedMemory) -> list[tuple[object, ...]]:
    """Return the exact rows for CSV: section, category, predicted, share, count, measured, phase, explanation."""
    return [
        ("predicted", row.category, row.predicted_bytes, "", "", row.measured_bytes, phase.name, row.explanation)
        for phase in predicted.phases
        for row in phase.categories
    ]


def _facts(predicted: PredictedMemory) -> list[str]:
    facts = [f"prediction {note}" for note in predicted.notes]
    if predicted.predicted_peak_phase not in (None, predicted.peak_phase):
        facts.append(
            f"the peak was predicted in {predicted.predicted_peak_phase}, and measured in {predicted.peak_phase}"
        )
    return facts


def _phase_cells(phase: PhaseComparison) -> tuple[str, ...]:
    return (
        phase.name,
        _short(phase.predicted_bytes),
        format_bytes(phase.measured_bytes),
        _signed(phase.difference_bytes),
        _signed(phase.unexplained_bytes),
        format_bytes(phase.padding_bytes),
    )


def _category_table(phase: PhaseComparison) -> Table:
    columns = (
        Column("category", "category", right=False),
        Column("predicted", "predicted_bytes"),
        Column("measured", "measured_bytes"),
        Column("difference", "difference_bytes"),
        Column("explanation", "explanation", right=False, flexible=True),
    )
    cells = [_category_cells(row) for row in phase.categories]
    cells.append(("padding", "", format_bytes(phase.padding_bytes), "", "rounding and rests of the allocator's blocks"))
    cells.append(("all", _short(phase.predicted_bytes), format_bytes(phase.allocated_bytes), "", ""))
    return Table(columns, cells, [])


def _category_cells(row: CategoryComparison) -> tuple[str, ...]:
    return (
        row.category,
        _short(row.predicted_bytes),
        format_bytes(row.measured_bytes),
        _signed(row.difference_bytes),
        row.explanation,
    )


def _tensor_table(lines: Sequence[PredictedLine]) -> Table:
    columns = (
        Column("bytes", "bytes"),
        Column("count", "count"),
        Column("of each", "formula", right=False),
        Column("category", "category", right=False),
        Column("tensor", "name", right=False, flexible=True),
    )
    cells = [(format_bytes(line.bytes), f"{line.count:,}", line.formula, line.category, line.name) for line in lines]
    return Table(columns, cells, [])


def _short(value: int | None) -> str:
    return _UNTOLD if value is None else format_bytes(value)


def _told(value: int | None) -> str:
    return "in part" if value is None else format_exactly(value)


def _signed(value: int | None) -> str:
    if value is None:
        return _UNTOLD
    return f"+{format_bytes(value)}" if value > 0 else format_bytes(value)
