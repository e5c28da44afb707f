"""The cells of end_to_end: which size, on what, how; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, cast

from profkit.models.presets import PRESETS
from profkit.models.workload import Dtype, Passes, Workload
from recipes.common.recipe import Cell, Row, whole

KEYS = ("size", "context", "passes", "dtype", "mode", "warmup", "batch", "steps")

FORWARD_ONLY, FORWARD_BACKWARD, TRAIN = "forward", "forward-backward", "train"
PASSES = (FORWARD_ONLY, FORWARD_BACKWARD, TRAIN)
DTYPES = ("fp32", "tf32", "bf16")
EAGER, COMPILED = "eager", "compiled"
MODES = (EAGER, COMPILED)
SIZES = tuple(PRESETS)

_LARGE = ("small", "medium", "large", "xl", "2.7B")
_CONTEXTS = (128, 256, 512, 1024)
_PRINTED_AT = 256
"""The context of the write-ups' tables that have one alone."""
_WARM = 5

Axes = Mapping[str, Sequence[Any]]
SMALL: Axes = {
    "size": ("tiny",), "context": (128, 256), "passes": PASSES, "dtype": ("fp32", "bf16"), "mode": MODES,
    "warmup": (0, 1, _WARM),
}  # fmt: skip
FULL: Axes = {**SMALL, "size": _LARGE, "context": _CONTEXTS, "dtype": DTYPES}

Setting = tuple[str, int, str, str, str, int]
"""A cell without batch and steps, in the order of the keys."""


def of_product(axes: Axes) -> list[Setting]:
    """Return every combination, warm-up varied for fp32 eager alone; the others have the longest."""
    warmups = sorted(axes["warmup"], reverse=True)
    found = []
    for warmup, mode, dtype, passes, size, context in product(
        warmups, axes["mode"], axes["dtype"], axes["passes"], axes["size"], axes["context"]
    ):
        if warmup == warmups[0] or (dtype, mode) == ("fp32", EAGER):
            found.append((size, context, passes, dtype, mode, warmup))
    return found


def of_reports() -> list[Setting]:
    """Return what the write-ups print, each once: forward and backward over the contexts first.

    What is compiled comes last: compiling the largest takes minutes, and each eager cell seconds.
    """
    return sorted(dict.fromkeys(_printed()), key=lambda setting: setting[KEYS.index("mode")] == COMPILED)


def _printed() -> Iterator[Setting]:
    for context, size in product((_PRINTED_AT, *_CONTEXTS), _LARGE):
        yield size, context, FORWARD_BACKWARD, "fp32", EAGER, _WARM
    for dtype, mode, size in (*product(("bf16",), MODES, _LARGE), *product(("fp32",), (COMPILED,), _LARGE)):
        yield size, _PRINTED_AT, FORWARD_BACKWARD, dtype, mode, _WARM
    for warmup, size in product((0, 1), _LARGE):
        yield size, _PRINTED_AT, FORWARD_BACKWARD, "fp32", EAGER, warmup
    for passes, mode, size in product((FORWARD_ONLY, TRAIN), MODES, _LARGE):
        yield size, _PRINTED_AT, passes, "fp32", mode, _WARM
    for size, contexts in (("large", _CONTEXTS), ("2.7B", _CONTEXTS[:3])):
        for passes, context in product((FORWARD_BACKWARD, TRAIN), contexts):
            yield size, context, passes, "bf16", EAGER, _WARM


def restrict(settings: Iterable[Setting], wanted: Axes) -> list[Setting]:
    """Return the settings whose values are all among the wanted ones; an axis that is not there excludes none."""
    return [
        setting
        for setting in settings
        if all(value in wanted.get(key, (value,)) for key, value in zip(KEYS, setting, strict=False))
    ]


def build_cells(settings: Iterable[Setting], batch: int, steps: int) -> list[Cell]:
    """Return the cells of some settings, in their order."""
    return [dict(zip(KEYS, (*setting, batch, steps), strict=True)) for setting in settings]


def workload_of(cell: Cell) -> Workload:
    """Return what profkit's built-in model is to do for a cell."""
    return Workload(
        preset_name=str(cell["size"]),
        batch=whole(cell["batch"]),
        context=whole(cell["context"]),
        warmup_steps=whole(cell["warmup"]),
        steps=whole(cell["steps"]),
        dtype=cast("Dtype", cell["dtype"]),
        compile_mode="default" if cell["mode"] == COMPILED else "none",
        passes=cast("Passes", cell["passes"]),
    )


def leave_out_bounds(rows: Sequence[Row]) -> None:
    """Leave out what was predicted of compiled code: a lower bound, that says what cannot fit, and no peak."""
    for row in rows:
        if row["mode"] == COMPILED:
            row["predicted_peak_bytes"] = None
