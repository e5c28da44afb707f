"""How many floating-point operations the model does, by range; worked out from its sizes, without torch.

Only matrix products count, as in the field's usual reckoning: one of ``(m, k)`` by ``(k, n)`` takes ``2 m n k`` (a
multiplication and an addition for each). For batch ``b``, context ``t``, width ``d``, inner width ``f``, vocabulary
``v`` and ``L`` layers, whatever the number of heads:

=============================  =======================================
range                          forward FLOPs
=============================  =======================================
computing attention scores     2 b t² d
final matmul                   2 b t² d
scaled dot product attention   4 b t² d
attention                      8 b t d² + 4 b t² d
ffn                            6 b t d f
layer N                        attention + ffn
head                           2 b t d v
forward                        L layers + head
=============================  =======================================

The mask is applied to a full score matrix, so causality saves nothing. The embedding is a look-up, and norms, softmax,
rotations and the loss do no matrix product: 0. Backward, every product ``C = A B`` needs ``dA = dC Bᵀ`` and
``dB = Aᵀ dC``. Both are always wanted here: the first layer's input is the embedding, which is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from profkit.models.options import Preset
from profkit.names import (
    ATTENTION,
    BACKWARD,
    FFN,
    FORWARD,
    HEAD,
    SCALED_DOT_PRODUCT,
    SCORES,
    VALUE_PRODUCT,
    layer_range,
)


@dataclass(frozen=True)
class Matmul:
    """``count`` products of ``(rows, inner)`` by ``(inner, columns)``."""

    rows: int
    inner: int
    columns: int
    count: int = 1

    @property
    def forward_flops(self) -> int:
        return 2 * self.count * self.rows * self.inner * self.columns

    @property
    def backward_flops(self) -> int:
        left = Matmul(self.rows, self.columns, self.inner, self.count)
        right = Matmul(self.inner, self.rows, self.columns, self.count)
        return left.forward_flops + right.forward_flops


def forward_flops(preset: Preset, batch: int, context: int) -> int:
    """Return the FLOPs of one forward pass."""
    return sum(product.forward_flops for product in _model(preset, batch, context))


def backward_flops(preset: Preset, batch: int, context: int) -> int:
    """Return the FLOPs of one backward pass: the sum over every forward product of its two."""
    return sum(product.backward_flops for product in _model(preset, batch, context))


def flops_by_path(preset: Preset, batch: int, context: int) -> dict[str, int]:
    """Return range path → FLOPs of one instance; ``/`` joins a path, ``layer N`` stands for each layer by number."""
    attention = f"{ATTENTION}/{SCALED_DOT_PRODUCT}"
    score = _scores(batch, preset.num_heads, context, preset.head_dim)
    value = _value_product(batch, preset.num_heads, context, preset.head_dim)
    inside_layer = {
        "": _layer(preset, batch, context),
        f"/{ATTENTION}": _attention(batch, context, preset.d_model, preset.num_heads),
        f"/{attention}": [score, value],
        f"/{attention}/{SCORES}": [score],
        f"/{attention}/{VALUE_PRODUCT}": [value],
        f"/{FFN}": _ffn(batch * context, preset.d_model, preset.d_ff),
    }
    paths = {FORWARD: forward_flops(preset, batch, context)}
    for number in range(preset.num_layers):
        layer = f"{FORWARD}/{layer_range(number)}"
        paths |= {layer + path: _forward(products) for path, products in inside_layer.items()}
    paths[f"{FORWARD}/{HEAD}"] = _head(preset, batch * context).forward_flops
    paths[BACKWARD] = backward_flops(preset, batch, context)
    return paths


class HasShape(Protocol):
    """A tensor, as far as this module cares."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def scores_flops(query: HasShape, key: HasShape) -> int:
    """Return the FLOPs of ``query keyᵀ``, both ``(batch, heads, position, head_dim)``."""
    batch, num_heads, queries, head_dim = query.shape
    return Matmul(queries, head_dim, key.shape[-2], batch * num_heads).forward_flops


def value_product_flops(weights: HasShape, value: HasShape) -> int:
    """Return the FLOPs of ``weights value``; ``weights`` is ``(batch, heads, query, key)``."""
    batch, num_heads, queries, keys = weights.shape
    return Matmul(queries, keys, value.shape[-1], batch * num_heads).forward_flops


def scaled_dot_product_flops(query: HasShape, key: HasShape, value: HasShape, _mask: HasShape) -> int:
    """Return the FLOPs of attention between the projections; a mask spares none."""
    batch, num_heads, queries, _ = query.shape
    products = Matmul(queries, key.shape[-2], value.shape[-1], batch * num_heads)
    return scores_flops(query, key) + products.forward_flops


def attention_flops(hidden: HasShape, num_heads: int) -> int:
    """Return the FLOPs of multi-head attention on ``hidden`` ``(batch, position, d_model)``, projections included."""
    batch, context, d_model = hidden.shape
    return _forward(_attention(batch, context, d_model, num_heads))


def ffn_flops(hidden: HasShape, d_ff: int) -> int:
    """Return the FLOPs of SwiGLU on ``hidden`` ``(batch, position, d_model)``."""
    batch, context, d_model = hidden.shape
    return _forward(_ffn(batch * context, d_model, d_ff))


def layer_flops(hidden: HasShape, preset: Preset) -> int:
    """Return the FLOPs of one layer on ``hidden`` ``(batch, position, d_model)``."""
    batch, context, _ = hidden.shape
    return _forward(_layer(preset, batch, context))


def head_flops(hidden: HasShape, preset: Preset) -> int:
    """Return the FLOPs of the logits of ``hidden`` ``(batch, position, d_model)``."""
    batch, context, _ = hidden.shape
    return _head(preset, batch * context).forward_flops


def _forward(products: list[Matmul]) -> int:
    return sum(product.forward_flops for product in products)


def _scores(batch: int, num_heads: int, context: int, head_dim: int) -> Matmul:
    return Matmul(context, head_dim, context, batch * num_heads)


def _value_product(batch: int, num_heads: int, context: int, head_dim: int) -> Matmul:
    return Matmul(context, context, head_dim, batch * num_heads)


def _attention(batch: int, context: int, d_model: int, num_heads: int) -> list[Matmul]:
    heads = (batch, num_heads, context, d_model // num_heads)
    projections = [Matmul(batch * context, d_model, d_model)] * 4  # query, key, value, output
    return [*projections, _scores(*heads), _value_product(*heads)]


def _ffn(tokens: int, d_model: int, d_ff: int) -> list[Matmul]:
    return [Matmul(tokens, d_model, d_ff), Matmul(tokens, d_ff, d_model), Matmul(tokens, d_model, d_ff)]


def _layer(preset: Preset, batch: int, context: int) -> list[Matmul]:
    attention = _attention(batch, context, preset.d_model, preset.num_heads)
    return [*attention, *_ffn(batch * context, preset.d_model, preset.d_ff)]


def _head(preset: Preset, tokens: int) -> Matmul:
    return Matmul(tokens, preset.d_model, preset.vocab_size)


def _model(preset: Preset, batch: int, context: int) -> list[Matmul]:
    return [*_layer(preset, batch, context) * preset.num_layers, _head(preset, batch * context)]
