"""Predicted memory next to measured: what the run's arithmetic foresaw, and what the allocator was asked for.

``predicted.json`` in the run's folder holds each phase's peak in requested bytes, and the tensors that make it up.
Each phase is compared at the moment at which the measured requested bytes stood highest in it; what the allocator lost
to rounding at that moment is a line of its own.

Tensors are matched one to one by size, with one of the same category where there is one. So a difference in a category
is either another name for the same bytes (a category guessed from lifetime may differ from the one meant) or bytes that
only one side has: those are unexplained, with their sign, positive where more was measured.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profkit.analysis.memory.composition import DeviceMemory
from profkit.errors import RunError
from profkit.snapshot.columns import OOM

VERSION = 1

_WORKSPACE = "workspace"
# What is measured of these beyond the prediction has a reason that no arithmetic of the model's foresees.
_REASONS = {
    _WORKSPACE: "cuBLAS was given another workspace than Hopper's default",
    "communication": "what ranks exchange, such as DistributedDataParallel's buckets, is not predicted",
}
_CUT_SHORT = "of a whole step, but memory ran out: what was measured ends there"
_LEFT_TO_COMPILER = "not predicted: left to the compiler"

# What stands outside compiled code, and can be foretold beside it: gradients only once all have been made.
_OUTSIDE = frozenset({"parameters", "gradients", "optimizer state", "buffers", "inputs", _WORKSPACE})

Sizes = Counter[tuple[str, int]]
"""How many tensors there are of a category and a size."""


@dataclass(frozen=True)
class PredictedLine:
    """Tensors of one kind that are predicted to be alive; ``formula`` is that of each."""

    category: str
    name: str
    bytes: int
    count: int
    formula: str


@dataclass(frozen=True)
class PredictedPhase:
    """A phase's predicted peak, in requested bytes, and the tensor whose making is the moment of it."""

    name: str
    bytes: int
    moment: str
    lines: tuple[PredictedLine, ...]


@dataclass(frozen=True)
class Prediction:
    """The content of ``predicted.json``; without ``is_whole`` the peaks lack what compiled code holds."""

    is_whole: bool
    lengths: dict[str, int]
    phases: tuple[PredictedPhase, ...]
    saved: tuple[PredictedLine, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class CategoryComparison:
    """Requested bytes of one category at a phase's peak; ``predicted_bytes`` is None where none can be told.

    ``difference_bytes`` is what was measured less what was predicted, ``unexplained_bytes`` the part of it that no
    other category's difference accounts for.
    """

    category: str
    predicted_bytes: int | None
    measured_bytes: int
    difference_bytes: int | None
    unexplained_bytes: int
    explanation: str


@dataclass(frozen=True)
class PhaseComparison:
    """One phase's peak: requested bytes predicted and measured, and the padding that makes them what was allocated."""

    name: str
    predicted_bytes: int | None
    measured_bytes: int
    difference_bytes: int | None
    unexplained_bytes: int
    padding_bytes: int
    allocated_bytes: int
    moment: str
    categories: tuple[CategoryComparison, ...]
    lines: tuple[PredictedLine, ...]


@dataclass(frozen=True)
class PredictedMemory:
    """All phases beside their prediction; ``peak_phase`` is where most was requested, as measured."""

    peak_phase: str
    predicted_peak_phase: str | None
    lengths: dict[str, int]
    """What the letters in formulas stand for."""
    phases: tuple[PhaseComparison, ...]
    saved: tuple[PredictedLine, ...]
    notes: tuple[str, ...]


def read_prediction(path: Path) -> Prediction | None:
    """Return the prediction of a run; None where it has none.

    Raises:
        RunError: the file cannot be read, is damaged, or of a newer version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] > VERSION:
            raise RunError(f"{path}: a prediction of version {content['version']}, written by a newer profkit")
        phases = tuple(
            PredictedPhase(str(one["phase"]), int(one["bytes"]), str(one["moment"]), _lines(one["lines"]))
            for one in content["phases"]
        )
        notes = tuple(str(note) for note in content["notes"])
        lengths = {str(name): int(length) for name, length in content["lengths"].items()}
        return Prediction(bool(content["is_whole"]), lengths, phases, _lines(content["saved"]), notes)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RunError(f"{path}: not a prediction of memory; was the file edited?") from None


def compare_prediction(prediction: Prediction, memory: DeviceMemory) -> PredictedMemory | None:
    """Return the prediction beside what one device's history shows; None where no predicted phase was recorded."""
    moments = _requested_peaks(memory)
    found = tuple(
        _compare_phase(phase, memory, moments[phase.name], prediction.is_whole)
        for phase in prediction.phases
        if phase.name in moments
    )
    if not found:
        return None
    notes = prediction.notes
    if (memory.device.events.action == OOM).any():
        notes = (*notes, _CUT_SHORT)
    measured = max(found, key=lambda phase: phase.measured_bytes).name
    predicted = max(prediction.phases, key=lambda phase: phase.bytes).name if prediction.is_whole else None
    return PredictedMemory(measured, predicted, prediction.lengths, found, prediction.saved, notes)


def _lines(rows: list[dict[str, Any]]) -> tuple[PredictedLine, ...]:
    lines = tuple(
        PredictedLine(str(row["category"]), str(row["name"]), int(row["bytes"]), int(row["count"]), str(row["formula"]))
        for row in rows
    )
    if any(line.count < 1 or line.bytes < 0 for line in lines):
        raise ValueError("a line of no tensors")
    return lines


def _requested_peaks(memory: DeviceMemory) -> dict[str, int]:
    """Return of each phase the moment at which the requested bytes stood highest in any instance of it."""
    requested = memory.history.curves.requested
    found: dict[str, int] = {}
    for phase in memory.timeline.phases:
        first, last = memory.timeline.moments_of(phase)
        moment = first + int(np.argmax(requested[first : last + 1]))
        if phase.name not in found or requested[moment] > requested[found[phase.name]]:
            found[phase.name] = moment
    return found


def _compare_phase(phase: PredictedPhase, memory: DeviceMemory, moment: int, is_whole: bool) -> PhaseComparison:
    measured = _measured_sizes(memory, moment)
    predicted: Sizes = Counter()
    for line in phase.lines:
        predicted[line.category, line.bytes // line.count] += line.count
    rows = _compare_categories(predicted, measured, is_whole)
    total = sum(row.measured_bytes for row in rows)
    allocated = int(memory.history.curves.allocated[moment])
    return PhaseComparison(
        name=phase.name,
        predicted_bytes=phase.bytes if is_whole else None,
        measured_bytes=total,
        difference_bytes=total - phase.bytes if is_whole else None,
        unexplained_bytes=sum(row.unexplained_bytes for row in rows),
        padding_bytes=allocated - total,
        allocated_bytes=allocated,
        moment=phase.moment,
        categories=rows,
        lines=phase.lines,
    )


def _measured_sizes(memory: DeviceMemory, moment: int) -> Sizes:
    requested = memory.history.replay.requested_bytes
    rows = memory.live_rows(moment)
    return Counter((memory.classifier.claim_of(row).category, int(requested[row])) for row in rows)


def _compare_categories(predicted: Sizes, measured: Sizes, is_whole: bool) -> tuple[CategoryComparison, ...]:
    same = predicted & measured
    unmet, extra = predicted - same, measured - same
    renamed = _match_by_size(unmet, extra)
    rows = []
    for category in dict.fromkeys(name for name, _ in [*measured, *predicted]):
        before, after = _bytes(predicted, category), _bytes(measured, category)
        if not is_whole and (category not in _OUTSIDE or (category == "gradients" and not before)):
            rows.append(CategoryComparison(category, None, after, None, 0, _LEFT_TO_COMPILER))
            continue
        alone = _bytes(extra, category) - _bytes(unmet, category)
        parts = _explain(category, renamed)
        if category in _REASONS and alone and _bytes(extra, category):
            parts, alone = [*parts, _REASONS[category]], 0
        if alone:
            parts.append("unexplained")
        rows.append(CategoryComparison(category, before, after, after - before, alone, "; ".join(parts)))
    return tuple(sorted(rows, key=lambda row: (-row.measured_bytes, row.category)))


def _match_by_size(unmet: Sizes, extra: Sizes) -> dict[tuple[str, str], int]:
    """Match what is left on both sides by size alone, taking it off; return bytes by (predicted, measured) category."""
    renamed: dict[tuple[str, str], int] = {}
    for meant, size in sorted(unmet):
        for found, other in sorted(extra):
            count = min(unmet[meant, size], extra[found, other]) if size == other else 0
            if count:
                unmet[meant, size] -= count
                extra[found, size] -= count
                renamed[meant, found] = renamed.get((meant, found), 0) + count * size
    return renamed


def _explain(category: str, renamed: dict[tuple[str, str], int]) -> list[str]:
    """Return what a category's difference owes to the same bytes under another name."""
    into = [f"{size:,} B predicted as {meant}" for (meant, found), size in renamed.items() if found == category]
    return into + [f"{size:,} B counted as {found}" for (meant, found), size in renamed.items() if meant == category]


def _bytes(sizes: Sizes, category: str) -> int:
    return sum(size * count for (name, size), count in sizes.items() if name == category)
