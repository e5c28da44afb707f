"""What a block keeps for backward: by hand, tensor by tensor, and as the model's own prediction has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from profkit.models.presets import PRESETS
from profkit.models.transformer import TransformerLM
from recipes.model_memory.cells import Files
from recipes.model_memory.measure import group_parts, measure_cell
from recipes.model_memory.predicted import describe_prediction
from recipes.model_memory.saved import Part, count_saved

BATCH, CONTEXT = 2, 24


def _cell(size: str = "tiny", **changed: Any) -> dict[str, Any]:
    cell = {"size": size, "context": CONTEXT, "passes": "train", "dtype": "fp32", "checkpoint_layers": 0}
    return {**cell, "batch": BATCH, **changed}


@pytest.mark.parametrize(
    ("context", "block_bytes", "all_bytes"),
    [(128, 174_149_632, 5_609_003_012), (256, 381_886_464, 12_292_796_420), (512, 898_121_728, 28_884_754_436)],
)
def test_the_figures_of_the_readme(context: int, block_bytes: int, all_bytes: int) -> None:
    """Of the largest size at batch 4, on tensors without memory."""
    with torch.device("meta"):
        model = TransformerLM(PRESETS["2.7B"], context)
        tokens = torch.randint(10_000, (4, context + 1))

    def forward() -> torch.Tensor:
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    saved = count_saved(model, model.layers, [tokens], forward)
    assert ({block.bytes for block in saved.blocks}, saved.bytes) == ({block_bytes}, all_bytes)
    cell = _cell("2.7B", context=context, batch=4)
    assert describe_prediction(cell, "cpu")["predicted_saved_bytes"] == all_bytes


def test_a_block_by_hand() -> None:
    """In fp32: ten tensors of the stream, five of the inner width, exponentials and weights of the scores; small ones.

    The stream's: the input, both norms' scaled and output, rotated query and key, values by head, mixed values, the
    stream after attention. The inner width's: gate, sigmoid, their product, w3's output, w2's input.
    """
    row: dict[str, Any] = measure_cell(_cell(), "cpu", Files())
    preset, rows = PRESETS["tiny"], BATCH * CONTEXT
    scores = BATCH * preset.num_heads * CONTEXT**2
    large = 10 * rows * preset.d_model + 5 * rows * preset.d_ff + 2 * scores
    small = scores // CONTEXT + 2 * rows  # the sums of the exponentials, 1 / root mean square
    mask_bytes = CONTEXT**2
    assert row["saved_bytes_by_block"] == [4 * (large + small) + mask_bytes] * preset.num_layers
    assert sum(part["bytes"] for part in row["saved_parts"]) == row["saved_block_bytes"]
    first = row["saved_parts"][0]
    assert (first["made_by"], first["saved_in"], first["count"]) == ("mm", "ffn", 2)
    assert first["bytes"] == 2 * 4 * rows * preset.d_ff
    assert (row["residual_shape"], row["residual_dtype"]) == ([BATCH, CONTEXT, preset.d_model], "float32")


@pytest.mark.parametrize("passes", ["forward", "forward-backward", "train"])
def test_all_that_is_kept_is_what_is_predicted(passes: str) -> None:
    cell = _cell(passes=passes)
    counted = measure_cell(cell, "cpu", Files())["saved_bytes"]
    assert counted == describe_prediction(cell, "cpu")["predicted_saved_bytes"]
    assert (counted == 0) == (passes == "forward")


def test_autocasts_copies_of_the_weights_are_kept() -> None:
    row: dict[str, Any] = measure_cell(_cell(dtype="bf16"), "cpu", Files())
    preset = PRESETS["tiny"]
    weights = {part["bytes"]: part for part in row["saved_parts"] if part["made_by"] == "cast of a weight"}
    of_ffn = 2 * preset.d_model * preset.d_ff
    assert weights[of_ffn]["dtype"] == "bfloat16"
    assert weights[of_ffn]["saved_in"].startswith("ffn.w")
    assert row["residual_dtype"] == "float32"


class Twice(nn.Module):
    """Saves one storage twice, by a view too, a parameter, and what its input already is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        powers = torch.exp(hidden)
        return (powers @ self.weight) * powers.T.T


def test_a_storage_counts_once_and_where_it_is_first() -> None:
    blocks = nn.ModuleList([Twice(), Twice()])
    given = torch.ones(3, 3)

    def forward() -> torch.Tensor:
        result = given
        for block in blocks:
            result = block(result)
        return torch.exp(result)

    saved = count_saved(blocks, blocks, [given], forward)
    first, second = saved.blocks
    # The first block's exponentials take no gradient; its product is kept by the multiplication.
    assert [part.made_by for part in first.parts] == ["without a gradient"]
    assert [part.made_by for part in second.parts] == ["exp", "mm"]
    assert (first.bytes, second.bytes, saved.outside_bytes) == (36, 72, 36)
    assert saved.bytes == 36 * 4
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in blocks.modules())


def test_parts_alike_stand_together_and_the_books_close() -> None:
    parts = [Part("exp", "attention", (size, size), "float32", 4 * size**2) for size in range(1, 9)]
    lines: list[dict[str, Any]] = group_parts([*parts, parts[6], parts[7]])
    assert [line["count"] for line in lines] == [2, 2, 1, 1, 1, 3]
    assert sum(line["bytes"] for line in lines) == sum(part.bytes for part in (*parts, *parts[6:]))
    assert lines[-1]["made_by"] is None
    assert group_parts(parts[:1])[0]["count"] == 1
