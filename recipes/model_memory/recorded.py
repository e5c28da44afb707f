"""What a recorded cell says of its memory: a run directory read by profkit, as columns of a row; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import profkit
from profkit.analysis.memory.composition import LargeRow, StackRow
from profkit.analysis.memory.result import MemoryResult
from profkit.report.timeline_picture import write_picture
from recipes.common.recipe import Row
from recipes.model_memory.compared import PredictedMemory, compare_prediction, read_prediction

FIRST_STACKS = 5


def read_recorded(path: Path) -> Row:
    """Return the peaks of a snapshot or run directory, the moment they fell into, and what was there.

    ``replay_difference_bytes`` is the replayed peak less the allocator's own; None where no ledger quotes that.
    """
    opened = profkit.read_snapshot(path)
    prediction = read_prediction(path / "predicted.json") if path.is_dir() else None
    predicted = None if prediction is None else compare_prediction(prediction, opened.device())
    return describe_memory(opened.memory(), predicted)


def describe_memory(result: MemoryResult, compared: PredictedMemory | None = None) -> Row:
    """Return the columns of a result, and of its prediction where there is one."""
    totals, peak, check = result.totals, result.composition, result.allocator_check
    return {
        "allocated_peak_bytes": totals.allocated_peak_bytes,
        "reserved_peak_bytes": totals.reserved_peak_bytes,
        "requested_peak_bytes": totals.requested_peak_bytes,
        "peak_phase": peak.phase,
        "replay_difference_bytes": None if check is None else check.allocated_difference_bytes,
        "is_exact": totals.exact,
        "phase_peaks": {phase.name: phase.peak_bytes for phase in result.phases},
        "by_category": {row.category: row.bytes for row in peak.by_category},
        "largest": [_describe_large(row) for row in peak.largest],
        "stacks": [_describe_stack(row) for row in peak.by_stack[:FIRST_STACKS]],
        **_describe_predicted(compared),
        "warnings": [warning.message for warning in result.warnings],
    }


def _describe_predicted(compared: PredictedMemory | None) -> Row:
    """Return each phase's requested bytes beside the predicted ones, and the highest beside the highest.

    ``difference_bytes`` is between the two peaks, be they of one phase or not.
    """
    if compared is None:
        return {}
    phases = compared.phases
    highest = max(phases, key=lambda phase: phase.measured_bytes)
    predicted = max((phase.predicted_bytes for phase in phases if phase.predicted_bytes is not None), default=None)
    return {
        "requested_phases": [
            {
                "phase": phase.name,
                "requested_bytes": phase.measured_bytes,
                "predicted_bytes": phase.predicted_bytes,
                "difference_bytes": phase.difference_bytes,
                "unexplained_bytes": phase.unexplained_bytes,
            }
            for phase in phases
        ],
        "requested_phase": highest.name,
        "difference_bytes": None if predicted is None else highest.measured_bytes - predicted,
        "padding_bytes": highest.padding_bytes,
    }


def _describe_large(row: LargeRow) -> dict[str, object]:
    return {
        "bytes": row.bytes,
        "category": row.category,
        "phase": row.phase,
        "owner": row.owner,
        "label": row.label,
        "stack": _without_folders(row.stack),
    }


def _describe_stack(row: StackRow) -> dict[str, object]:
    return {"bytes": row.bytes, "count": row.count, "label": row.label, "stack": _without_folders(row.stack)}


def _without_folders(frames: Sequence[str]) -> list[str]:
    """Return frames by the names of their files: results are shared, and where the machine keeps them tells nothing."""
    return [frame.rpartition("/")[2] for frame in frames]


def draw_recorded(path: Path, picture: Path, title: str) -> None:
    """Draw the timeline of a snapshot or run directory, as ``profkit memory --timeline`` does."""
    opened = profkit.read_snapshot(path)
    write_picture(picture, opened.device(), replace(opened.memory(), snapshot=title))
