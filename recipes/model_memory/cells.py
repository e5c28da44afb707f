"""The cells of memory_questions: size, data, how much of a step, how many layers per checkpoint. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from profkit.models import PRESETS
from recipes.common.recipe import Cell, GridName, whole
from recipes.whole_model.cells import FORWARD_BACKWARD, FORWARD_ONLY, PASSES, TRAIN, Work

KEYS = ("size", "context", "passes", "dtype", "checkpoint_layers", "batch")
SIZES = tuple(PRESETS)
BATCH = 4
"""The batch of the write-ups; names of cells leave it out."""
DTYPES = ("fp32", "bf16")

Axes = Mapping[str, Sequence[Any]]
_WRITE_UPS: Axes = {
    "size": ("2.7B",), "context": (128, 256, 512), "passes": PASSES, "dtype": DTYPES,
    "checkpoint_layers": (1, 2, 4, 8, 16, 32),
}  # fmt: skip
GRIDS: Mapping[GridName, Axes] = {
    "reports": _WRITE_UPS,
    "small": {**_WRITE_UPS, "size": ("tiny",), "context": (128, 256), "checkpoint_layers": (1, 2)},
    "full": {**_WRITE_UPS, "size": ("small", "medium", "large", "xl", "2.7B"), "context": (128, 256, 512, 1024)},
}

_TELLING = (TRAIN, FORWARD_ONLY, FORWARD_BACKWARD)


def build_cells(axes: Axes, batch: int) -> list[Cell]:
    """Return the cells, the most informative first: the largest size at its longest context.

    Checkpoints vary where activations are largest: with backward, at the longest context, in the first dtype. 0 means
    none, and is always there. With AdamW they come last, because then the peak is often the optimizer's.
    """
    sizes = sorted(axes["size"], key=lambda size: -PRESETS[size].parameter_count)
    contexts = sorted(axes["context"], reverse=True)
    found: list[tuple[Any, ...]] = []
    for context, size in product(contexts, sizes):
        found += ((size, context, passes, dtype, 0) for dtype, passes in product(axes["dtype"], _extents(axes)))
        if context == contexts[0]:
            found += _checkpointed(axes, size, context, FORWARD_BACKWARD)
    for size in sizes:
        found += _checkpointed(axes, size, contexts[0], TRAIN)
    return [dict(zip(KEYS, (*setting, batch), strict=True)) for setting in found]


def _extents(axes: Axes) -> list[str]:
    return [passes for passes in _TELLING if passes in axes["passes"]]


def _checkpointed(axes: Axes, size: str, context: int, passes: str) -> Iterator[tuple[Any, ...]]:
    for layers in axes["checkpoint_layers"]:
        if passes in axes["passes"] and 0 < layers <= PRESETS[size].num_layers:
            yield size, context, passes, axes["dtype"][0], layers


def choose_timelines(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with a timeline: the first of forward alone, and the first of the whole step."""
    plain = [cell for cell in cells if not cell["checkpoint_layers"]]
    firsts = {passes: next((cell for cell in plain if cell["passes"] == passes), None) for passes in _TELLING}
    return [cell for passes in (FORWARD_ONLY, TRAIN) if (cell := firsts[passes]) is not None]


def name_of(cell: Mapping[str, object]) -> str:
    """Return a cell's name, fit for a file."""
    layers, batch = cell["checkpoint_layers"], cell["batch"]
    name = f"{cell['size']}-{cell['context']}-{cell['passes']}-{cell['dtype']}"
    return name + f"-checkpoint{layers}" * bool(layers) + f"-batch{batch}" * (batch != BATCH)


def describe_cell(cell: Mapping[str, object]) -> str:
    """Return a cell's name in words."""
    more = f", a checkpoint every {describe_layers(cell)}" * bool(cell["checkpoint_layers"])
    batch = f", batch {cell['batch']}" * (cell["batch"] != BATCH)
    return f"{cell['size']}, context {cell['context']}, {cell['passes']}, {cell['dtype']}{batch}{more}"


def describe_layers(cell: Mapping[str, object]) -> str:
    """Return how far a cell's checkpoints are apart: ``layer``, ``2 layers``."""
    layers = cell["checkpoint_layers"]
    return "layer" if layers == 1 else f"{layers} layers"


def work_of(cell: Mapping[str, object]) -> Work:
    """Return the step that a cell runs."""
    return Work(
        size=str(cell["size"]),
        context=whole(cell["context"]),
        batch=whole(cell["batch"]),
        passes=str(cell["passes"]),
        dtype=str(cell["dtype"]),
        checkpoint_layers=whole(cell["checkpoint_layers"]),
    )
