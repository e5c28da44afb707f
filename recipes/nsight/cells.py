"""The cells of nsight_questions: a size at a context, in training and in inference; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import cast

from profkit.models.presets import PRESETS
from profkit.models.workload import Passes, Workload
from recipes.common.recipe import Cell, GridName, whole

KEYS = ("size", "context", "passes", "batch", "steps", "profiler")
TOGETHER = ("size", "passes", "batch", "steps", "profiler")
"""One capture holds every context of these."""

TRAIN, INFERENCE = "train", "forward"
"""As `profkit run --passes` calls them."""
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
    """Return the cells, the most telling first: all of the first size, the other sizes' training, their inference."""
    first, *others = sizes
    order = [(first, TRAIN), (first, INFERENCE), *product(others, [TRAIN]), *product(others, [INFERENCE])]
    return [
        {"size": size, "context": context, "passes": passes, "batch": batch, "steps": steps, "profiler": profiler}
        for size, passes in order
        for context in contexts
    ]


def workload_of(cell: Cell) -> Workload:
    """Return what profkit's built-in model does in a cell: in fp32, eager."""
    return Workload(
        preset_name=str(cell["size"]),
        batch=whole(cell["batch"]),
        context=whole(cell["context"]),
        steps=whole(cell["steps"]),
        passes=cast("Passes", cell["passes"]),
    )
