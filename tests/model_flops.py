"""The FLOPs of the built-in model's matrix products, worked out by hand from its sizes."""

from __future__ import annotations

from profkit.models import Preset


def forward_flops(preset: Preset, batch: int, context: int) -> int:
    """Of a layer four projections, two products with the scores and three of the inner width; then the logits."""
    tokens, width = batch * context, preset.d_model
    layer = 8 * tokens * width**2 + 4 * tokens * context * width + 6 * tokens * width * preset.d_ff
    return preset.num_layers * layer + 2 * tokens * width * preset.vocab_size


def backward_flops(preset: Preset, batch: int, context: int) -> int:
    """Every product ``C = A B`` needs ``dA = dC Bᵀ`` and ``dB = Aᵀ dC``: the embedding is trained."""
    return 2 * forward_flops(preset, batch, context)
