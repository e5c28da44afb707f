"""The cells of compile_speedup: attention or the whole model, each eager and compiled, side by side. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from profkit.models import PRESETS
from recipes.attention.cells import BATCH, WRITTEN
from recipes.attention.cells import COMPILED as COMPILED_ATTENTION
from recipes.common.recipe import Cell
from recipes.whole_model.cells import COMPILED, FORWARD_BACKWARD, FORWARD_ONLY, MODES, TRAIN

ATTENTION, MODEL = "attention", "model"
WHATS = (ATTENTION, MODEL)
PASSES = {ATTENTION: (FORWARD_ONLY, FORWARD_BACKWARD), MODEL: (FORWARD_ONLY, TRAIN)}
ALL_PASSES = (FORWARD_ONLY, FORWARD_BACKWARD, TRAIN)
DTYPES = ("fp32", "bf16")
MODEL_BATCH = 4

KEYS = ("what", "d_model", "size", "length", "passes", "dtype", "mode", "batch", "steps")
"""``size`` is the model's alone; ``length`` is its context, or attention's sequence length."""

Axes = Mapping[str, Sequence[Any]]
Case = tuple[str, int, str | None, int, str, str]
"""What the two cells of a pair share: the first six keys."""

_LARGE = ("small", "medium", "large", "xl", "2.7B")
_PRINTED_AT = 256
"""The context of the write-ups' tables."""

SMALL: Axes = {
    "what": WHATS, "passes": (FORWARD_BACKWARD, TRAIN), "dtype": ("fp32",),
    "d_model": (16,), "seq_len": (256,), "size": ("tiny",), "context": (128,),
}  # fmt: skip
FULL: Axes = {
    "what": WHATS, "passes": ALL_PASSES, "dtype": DTYPES,
    "d_model": (16, 32, 64, 128), "seq_len": (256, 1024, 4096, 8192, 16384),
    "size": _LARGE, "context": (128, 256, 512, 1024),
}  # fmt: skip


def of_product(axes: Axes) -> list[Case]:
    """Return every combination: attention, then the model."""
    cases: list[Case] = []
    for what, dtype in product(axes["what"], axes["dtype"]):
        passes = [each for each in PASSES[what] if each in axes["passes"]]
        if what == ATTENTION:
            sizes = product(axes["d_model"], axes["seq_len"], passes)
            cases += [_of_attention(*size, dtype) for size in sizes]
        else:
            cases += [_of_model(*size, dtype) for size in product(axes["size"], axes["context"], passes)]
    return cases


def of_reports() -> list[Case]:
    """Return the cases that stand for the write-ups' tables, the most informative first.

    Of attention's table the corners and the middle; ``attention_sweep`` measures all of it.
    """
    return list(_printed())


def _printed() -> Iterator[Case]:
    yield from _of_sizes(("small",))
    for d_model, seq_len in ((16, 16384), (64, 4096), (128, 16384), (16, 1024)):
        yield _of_attention(d_model, seq_len, FORWARD_BACKWARD)
    yield from _of_sizes(("xl",))
    for d_model, seq_len in ((128, 1024), (16, 4096), (128, 4096), (64, 1024), (64, 16384)):
        yield _of_attention(d_model, seq_len, FORWARD_BACKWARD)
    yield from _of_sizes(("medium", "large", "2.7B"))


def _of_sizes(sizes: Iterable[str]) -> Iterator[Case]:
    for size, passes in product(sizes, (TRAIN, FORWARD_ONLY)):
        yield _of_model(size, _PRINTED_AT, passes)


def _of_attention(d_model: int, seq_len: int, passes: str, dtype: str = "fp32") -> Case:
    return (ATTENTION, d_model, None, seq_len, passes, dtype)


def _of_model(size: str, context: int, passes: str, dtype: str = "fp32") -> Case:
    return (MODEL, PRESETS[size].d_model, size, context, passes, dtype)


def restrict(cases: Iterable[Case], wanted: Axes) -> list[Case]:
    """Return the cases with only wanted values; an axis that is not named excludes none."""

    def keeps(case: Case) -> bool:
        what, d_model, size, length, passes, dtype = case
        shared = {"what": what, "passes": passes, "dtype": dtype}
        own = {"d_model": d_model, "seq_len": length} if what == ATTENTION else {"size": size, "context": length}
        return all(value in wanted.get(axis, (value,)) for axis, value in (shared | own).items())

    return [case for case in cases if keeps(case)]


def build_cells(cases: Iterable[Case], steps: int) -> list[Cell]:
    """Return the cells of some cases in their order, both modes of a case together."""
    cells: list[Cell] = []
    for case, mode in product(cases, MODES):
        batch = BATCH if case[0] == ATTENTION else MODEL_BATCH
        cells.append(dict(zip(KEYS, (*case, mode, batch, steps), strict=True)))
    return cells


def as_attention_cell(cell: Cell) -> Cell:
    """Return the cell of attention_sweep that measures the same attention."""
    name = COMPILED_ATTENTION if cell["mode"] == COMPILED else WRITTEN
    own = {key: cell[key] for key in ("d_model", "dtype")}
    return {**own, "seq_len": cell["length"], "implementation": name, "passes": cell["steps"]}


def as_model_cell(cell: Cell) -> Cell:
    """Return the cell of end_to_end that runs the same step, once and without warm-up."""
    own = {key: cell[key] for key in ("size", "passes", "dtype", "mode", "batch")}
    return {**own, "context": cell["length"], "warmup": 0, "steps": 1}
