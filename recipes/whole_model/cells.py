"""The cells of end_to_end, and one step of profkit's transformer as plain data. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from profkit.models import PRESETS, Preset
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
"""The context of the write-ups' tables that have only one."""
_WARM = 5

Axes = Mapping[str, Sequence[Any]]
SMALL: Axes = {
    "size": ("tiny",), "context": (128, 256), "passes": PASSES, "dtype": ("fp32", "bf16"), "mode": MODES,
    "warmup": (0, 1, _WARM),
}  # fmt: skip
FULL: Axes = {**SMALL, "size": _LARGE, "context": _CONTEXTS, "dtype": DTYPES}


@dataclass(frozen=True)
class Work:
    """One step of profkit's transformer: its size, its data, and how it is computed.

    ``dtype`` is fp32, tf32 (fp32 with matrix products in TF32) or bf16 (autocast, fp32 weights). With
    ``checkpoint_layers`` above 0, every that many layers save only their input for backward, which runs them again.
    """

    size: str
    context: int
    batch: int = 4
    passes: str = TRAIN
    dtype: str = "fp32"
    compiled: bool = False
    checkpoint_layers: int = 0

    @property
    def preset(self) -> Preset:
        return PRESETS[self.size]

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products of one step, backward twice those of forward; recomputation not counted."""
        sizes, tokens = self.preset, self.batch * self.context
        layer = 8 * sizes.d_model**2 + 4 * self.context * sizes.d_model + 6 * sizes.d_model * sizes.d_ff
        forward = tokens * (sizes.num_layers * layer + 2 * sizes.d_model * sizes.vocab_size)
        return forward if self.passes == FORWARD_ONLY else 3 * forward


Setting = tuple[str, int, str, str, str, int]
"""A cell without batch and steps, in the order of the keys."""


def of_product(axes: Axes) -> list[Setting]:
    """Return every combination. Only fp32 eager varies the warm-up; the others have the longest."""
    warmups = sorted(axes["warmup"], reverse=True)
    found = []
    for warmup, mode, dtype, passes, size, context in product(
        warmups, axes["mode"], axes["dtype"], axes["passes"], axes["size"], axes["context"]
    ):
        if warmup == warmups[0] or (dtype, mode) == ("fp32", EAGER):
            found.append((size, context, passes, dtype, mode, warmup))
    return found


def of_reports() -> list[Setting]:
    """Return the cells that the write-ups print, each once: forward and backward over the contexts first.

    Compiled cells come last: compiling the largest takes minutes, an eager cell seconds.
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
    """Return the settings with only wanted values; an axis that is not named excludes none."""
    return [
        setting
        for setting in settings
        if all(value in wanted.get(key, (value,)) for key, value in zip(KEYS, setting, strict=False))
    ]


def build_cells(settings: Iterable[Setting], batch: int, steps: int) -> list[Cell]:
    """Return the cells of some settings, in their order."""
    return [dict(zip(KEYS, (*setting, batch, steps), strict=True)) for setting in settings]


def work_of(cell: Cell) -> Work:
    """Return the step that a cell runs."""
    return Work(
        size=str(cell["size"]),
        context=whole(cell["context"]),
        batch=whole(cell["batch"]),
        passes=str(cell["passes"]),
        dtype=str(cell["dtype"]),
        compiled=cell["mode"] == COMPILED,
    )


def leave_out_bounds(rows: Sequence[Row]) -> None:
    """Drop the predictions for compiled code: they are lower bounds, which say what cannot fit, and no peaks."""
    for row in rows:
        if row["mode"] == COMPILED:
            row["predicted_peak_bytes"] = None
