"""What arithmetic says of a cell: profkit's prediction of each phase, as columns of a row; no torch."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from profkit.models.memory import HOPPER_WORKSPACE_BYTES, MemoryPrediction, predict_memory
from profkit.names import FORWARD, LOSS
from recipes.common.recipe import Cell, Device, Row
from recipes.model_memory.cells import workload_of
from recipes.whole_model.cells import FORWARD_BACKWARD, FORWARD_ONLY, TRAIN

KINDS = ("parameters", "optimizer state", "gradients", "activations", "autocast copies", "temporaries", "workspace")
REST = "the rest"

_WIDTH_BYTES = 4
_COPIES = {FORWARD_ONLY: 1, FORWARD_BACKWARD: 2, TRAIN: 4}
"""How many times the parameters are there: themselves, their gradients, AdamW's two moments."""


def predict(cell: Cell, device: Device) -> MemoryPrediction:
    """Return what the second step needs; elsewhere than on CUDA without the workspaces of its libraries."""
    return predict_memory(workload_of(cell), HOPPER_WORKSPACE_BYTES if device == "cuda" else 0)


def needed_bytes(cell: Cell, device: Device) -> int:
    """Return the bytes that measuring a cell asks for: of its steps on CUDA, elsewhere of one forward pass alone."""
    if device == "cuda":
        return predict(cell, device).peak.bytes
    passes = FORWARD_ONLY if cell["passes"] == FORWARD_ONLY else FORWARD_BACKWARD
    peaks = predict({**cell, "passes": passes}, device).peaks
    return max(peak.bytes for peak in peaks if peak.phase in (FORWARD, LOSS))


def describe_prediction(cell: Cell, device: Device) -> Row:
    """Return the predicted peaks by phase and category.

    ``added_up_bytes`` is the usual sum: 4 N of parameters, as much of gradients, twice as much for AdamW, and what is
    kept for backward, as if all of each were there at once; it has no autocast copies, temporaries or workspaces.
    """
    prediction = predict(cell, device)
    parameters = workload_of(cell).preset.parameter_count
    saved = sum(line.bytes for line in prediction.saved)
    phases = []
    for peak in prediction.peaks:
        kinds = Counter[str]()
        for line in peak.lines:
            kinds[line.category] += line.bytes
        phases.append({"phase": peak.phase, "bytes": peak.bytes, "moment": peak.moment, "by_category": dict(kinds)})
    return {
        "parameters": parameters,
        "predicted_peak_bytes": prediction.peak.bytes,
        "predicted_phase": prediction.peak.phase,
        "predicted_phases": phases,
        "predicted_saved_bytes": saved,
        "added_up_bytes": _COPIES[str(cell["passes"])] * _WIDTH_BYTES * parameters + saved,
    }


def kinds_at_peak(row: Row) -> dict[str, int]:
    """Return the predicted bytes of each of the `KINDS` at the peak of a described row, and of all others."""
    phases = cast("list[dict[str, Any]]", row["predicted_phases"])
    kinds: dict[str, int] = max(phases, key=lambda phase: int(phase["bytes"]))["by_category"]
    rest = sum(size for kind, size in kinds.items() if kind not in KINDS)
    return {**{kind: kinds.get(kind, 0) for kind in KINDS}, REST: rest}
