"""The cells of nsight_questions: a size at a context, in training and in inference. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from profkit.models.options import PRESETS
from recipes.common.recipe import Cell, GridName, whole
from recipes.whole_model.cells import Work

KEYS = ("size", "context", "passes", "batch", "steps", "profiler")
TOGETHER = ("size", "passes", "batch", "steps", "profiler")
"""One capture holds every context of these."""

TRAIN, INFERENCE = "train", "forward"
"""The names of `profkit run --passes`."""
CAPTURES = "captures"
"""The folder of the recordings in a directory of results. An nsys export holds the environment: do not share it."""
DOING = {TRAIN: "training", INFERENCE: "inference"}
MATTERS = 0.01
"""A kernel matters from this share of the kernel time on."""
GEMM = "gemm"
"""profkit's category of matrix products."""
Measured = Mapping[str, Any]
"""A row that was measured."""
NSYS, KINETO = "nsys", "kineto"
PROFILERS = (NSYS, KINETO)
SIZES = tuple(PRESETS)

_REPORTS = (("small", "medium", "large", "xl", "2.7B"), (128, 256, 512, 1024))
GRIDS: Mapping[GridName, tuple[Sequence[str], Sequence[int]]] = {
    "reports": _REPORTS,
    "small": (("tiny",), (64, 128)),
    "full": _REPORTS,
}
"""Sizes and contexts."""
STEPS: Mapping[GridName, int] = {"reports": 3, "small": 2, "full": 3}


def build_cells(sizes: Sequence[str], contexts: Sequence[int], batch: int, steps: int, profiler: str) -> list[Cell]:
    """Return the cells, the most informative first: the first size, then the others' training, then their inference."""
    first, *others = sizes
    order = [(first, TRAIN), (first, INFERENCE), *product(others, [TRAIN]), *product(others, [INFERENCE])]
    return [
        {"size": size, "context": context, "passes": passes, "batch": batch, "steps": steps, "profiler": profiler}
        for size, passes in order
        for context in contexts
    ]


def work_of(cell: Cell) -> Work:
    """Return the step that a cell records: fp32, eager."""
    return Work(str(cell["size"]), whole(cell["context"]), whole(cell["batch"]), str(cell["passes"]))


def pair_rows(rows: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Return inference and training of the same size and context, where both have their categories."""
    shared = ("size", "context", "batch", "steps", "profiler")
    inference = {tuple(row[key] for key in shared): row for row in rows if row["passes"] == INFERENCE}
    pairs = [(inference.get(tuple(row[key] for key in shared), {}), row) for row in rows if row["passes"] == TRAIN]
    return [(one, other) for one, other in pairs if one.get("step") and other.get("step")]
