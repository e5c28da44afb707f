"""The cells of attention_sweep: which attention, how wide, over which sequence length. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from recipes.common.recipe import Cell, GridName

KEYS = ("d_model", "seq_len", "implementation", "dtype", "passes")

WRITTEN, WRITTEN_AMAX, FUSED, CAUSAL = "written", "written_amax", "fused_softmax", "causal"
COMPILED, SDPA, CHECKPOINTED = "compiled", "sdpa", "checkpointed"
IMPLEMENTATIONS = (WRITTEN, COMPILED, SDPA, CHECKPOINTED, FUSED, WRITTEN_AMAX, CAUSAL)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ITEM_BYTES = {"fp32": 4, "bf16": 2}
BATCH = 8

Axes = Mapping[str, Sequence[Any]]
"""The values of d_model, seq_len, implementation and dtype."""

D_MODELS, SEQ_LENS = (16, 32, 64, 128), (256, 1024, 4096, 8192, 16384)
GRIDS: Mapping[GridName, Axes] = {
    "reports": {
        "d_model": D_MODELS, "seq_len": SEQ_LENS, "implementation": (WRITTEN, COMPILED), "dtype": ("fp32",)
    },
    "small": {
        "d_model": (16,), "seq_len": (256, 512, 1024), "implementation": IMPLEMENTATIONS, "dtype": ("fp32",)
    },
    "full": {"d_model": D_MODELS, "seq_len": SEQ_LENS, "implementation": IMPLEMENTATIONS, "dtype": tuple(DTYPES)},
}  # fmt: skip
PASSES: Mapping[GridName, int] = {"reports": 100, "small": 5, "full": 100}


def build_cells(axes: Axes, passes: int) -> list[Cell]:
    """Return the cells, the most informative first: by rising width, and for each the whole range of lengths."""
    ordered = product(axes["d_model"], axes["dtype"], axes["implementation"], axes["seq_len"])
    return [
        {"d_model": d_model, "seq_len": seq_len, "implementation": name, "dtype": dtype, "passes": passes}
        for d_model, dtype, name, seq_len in ordered
    ]
