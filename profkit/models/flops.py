"""How many floating-point operations the model does, by range; worked out from its sizes, without torch.

Only matrix products count, as in the field's usual reckoning: one of ``(m, k)`` by ``(k, n)`` takes ``2 m n k`` (a
multiplication and an addition for each). The mask is applied to a full score matrix, so causality saves nothing. The
embedding is a look-up, and norms, softmax, rotations and the loss do no matrix product: 0.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

from profkit.models.options import Preset


class HasShape(Protocol):
    """A tensor, as far as this module cares."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def forward_flops(preset: Preset, batch: int, context: int) -> int:
    """Return the FLOPs of one forward pass."""
    tokens = batch * context
    return preset.num_layers * _layer(preset, tokens, context) + 2 * tokens * preset.d_model * preset.vocab_size


def backward_flops(preset: Preset, batch: int, context: int) -> int:
    """Return the FLOPs of one backward pass: every product ``C = A B`` needs ``dA = dC Bᵀ`` and ``dB = Aᵀ dC``.

    Both are always wanted here: the first layer's input is the embedding, which is trained.
    """
    return 2 * forward_flops(preset, batch, context)


def scores_flops(query: HasShape, key: HasShape) -> int:
    """Return the FLOPs of ``query keyᵀ``, both ``(batch, heads, position, head_dim)``."""
    return 2 * prod(query.shape) * key.shape[-2]


def value_product_flops(weights: HasShape, value: HasShape) -> int:
    """Return the FLOPs of ``weights value``; ``weights`` is ``(batch, heads, query, key)``."""
    return 2 * prod(weights.shape) * value.shape[-1]


def scaled_dot_product_flops(query: HasShape, key: HasShape, value: HasShape, _mask: HasShape) -> int:
    """Return the FLOPs of attention between the projections; a mask spares none."""
    return scores_flops(query, key) + 2 * prod(query.shape[:-1]) * prod(value.shape[-2:])


def attention_flops(hidden: HasShape) -> int:
    """Return the FLOPs of attention on ``hidden`` ``(batch, position, d_model)``, its four projections included."""
    batch, context, d_model = hidden.shape
    return _attention(batch * context, context, d_model)


def ffn_flops(hidden: HasShape, d_ff: int) -> int:
    """Return the FLOPs of SwiGLU on ``hidden`` ``(batch, position, d_model)``."""
    return 6 * prod(hidden.shape) * d_ff


def layer_flops(hidden: HasShape, preset: Preset) -> int:
    """Return the FLOPs of one layer on ``hidden`` ``(batch, position, d_model)``."""
    batch, context, _ = hidden.shape
    return _layer(preset, batch * context, context)


def head_flops(hidden: HasShape, preset: Preset) -> int:
    """Return the FLOPs of the logits of ``hidden`` ``(batch, position, d_model)``."""
    return 2 * prod(hidden.shape) * preset.vocab_size


def _layer(preset: Preset, tokens: int, context: int) -> int:
    return _attention(tokens, context, preset.d_model) + 6 * tokens * preset.d_model * preset.d_ff


def _attention(tokens: int, context: int, d_model: int) -> int:
    return 8 * tokens * d_model**2 + 4 * tokens * context * d_model
