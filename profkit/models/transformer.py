"""The annotated model: a pre-norm transformer language model, to be read from top to bottom.

Dimensions in shapes and in einsum's letters: b batch, p position, q and k the positions of query and key, h head,
c channel of a head; m is d_model, h·c. No matrix has a bias. `annotate` names what a profiler will see; its ``flops``
are worked out in `profkit.models`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from profkit.annotation import annotate
from profkit.models import (
    Preset,
    attention_flops,
    ffn_flops,
    head_flops,
    layer_flops,
    scaled_dot_product_flops,
    scores_flops,
    value_product_flops,
)
from profkit.names import (
    ATTENTION,
    EMBEDDING,
    FFN,
    HEAD,
    SCALED_DOT_PRODUCT,
    SCORES,
    SOFTMAX,
    VALUE_PRODUCT,
    layer_range,
)


class TransformerLM(nn.Module):
    """Tokens ``(batch, position)`` → logits of the next token ``(batch, position, vocabulary)``.

    ``checkpoint_layers`` is that of `profkit.models.TrainingOptions`.
    """

    def __init__(self, preset: Preset, context: int, checkpoint_layers: int = 0) -> None:
        super().__init__()
        self.preset = preset
        self.checkpoint_layers = checkpoint_layers
        self.embedding = nn.Embedding(preset.vocab_size, preset.d_model)
        rotate = RotaryEmbedding(preset.head_dim, context)
        self.layers = nn.ModuleList(Layer(preset, number, rotate) for number in range(preset.num_layers))
        self.norm = RMSNorm(preset.d_model)
        self.head = nn.Linear(preset.d_model, preset.vocab_size, bias=False)
        self.register_buffer("causal", torch.ones(context, context, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = tokens.shape[1]
        mask = self.causal[:positions, :positions]
        with annotate(EMBEDDING):
            hidden = self.embedding(tokens)
        size = self.checkpoint_layers or 1
        for first in range(0, len(self.layers), size):
            group = range(first, min(first + size, len(self.layers)))
            if self.checkpoint_layers:
                # Nothing in a layer is random.
                hidden = checkpoint(self._run, group, hidden, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = self._run(group, hidden, mask)
        return self._logits(hidden)

    @annotate(HEAD, flops=lambda model, hidden: head_flops(hidden, model.preset))
    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))

    def _run(self, group: range, hidden: Tensor, mask: Tensor) -> Tensor:
        for number in group:
            hidden = self.layers[number](hidden, mask)
        return hidden


class Layer(nn.Module):
    """Attention, then SwiGLU, each on the normalised stream and added back to it."""

    def __init__(self, preset: Preset, number: int, rotate: RotaryEmbedding) -> None:
        super().__init__()
        self.preset = preset
        self.number = number
        self.attention_norm = RMSNorm(preset.d_model)
        self.attention = Attention(preset.d_model, preset.num_heads, rotate)
        self.ffn_norm = RMSNorm(preset.d_model)
        self.ffn = SwiGLU(preset.d_model, preset.d_ff)

    @annotate(
        lambda layer, *_: layer_range(layer.number),
        flops=lambda layer, hidden, _mask: layer_flops(hidden, layer.preset),
    )
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), mask)
        return hidden + self.ffn(self.ffn_norm(hidden))


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dimension, in fp32, and scale by a learned gain."""

    def __init__(self, d_model: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d_model))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.gain).to(hidden.dtype)


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions: ``(b, p, m)`` → ``(b, p, m)``."""

    def __init__(self, d_model: int, num_heads: int, rotate: RotaryEmbedding) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.output = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.rotate = rotate

    @annotate(ATTENTION, flops=lambda _self, hidden, _mask: attention_flops(hidden))
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            project(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (b, h, p, c)
            for project in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(self.rotate(query), self.rotate(key), value, mask)
        return self.output(mixed.transpose(1, 2).flatten(-2))


@annotate(SCALED_DOT_PRODUCT, flops=scaled_dot_product_flops)
def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return ``softmax(query keyᵀ / √c) value`` over the keys that ``mask`` ``(q, k)`` admits; ``(b, h, q, c)``."""
    scores = attention_scores(query, key)
    weights = masked_softmax(scores, mask)
    return value_product(weights, value)


@annotate(SCORES, flops=scores_flops)
def attention_scores(query: Tensor, key: Tensor) -> Tensor:
    return torch.einsum("bhqc,bhkc->bhqk", query, key) / math.sqrt(query.shape[-1])


@annotate(SOFTMAX)
def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    scores = scores.masked_fill(~mask, -math.inf)
    # Any constant may be taken off; the greatest keeps exp from overflowing, and needs no gradient.
    powers = torch.exp(scores - scores.detach().amax(dim=-1, keepdim=True))
    return powers / powers.sum(dim=-1, keepdim=True)


@annotate(VALUE_PRODUCT, flops=value_product_flops)
def value_product(weights: Tensor, value: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkc->bhqc", weights, value)


class RotaryEmbedding(nn.Module):
    """RoPE (Su et al. 2021, eq. 34): turn channel pair ``i`` of position ``p`` by ``p θ^(-2i/c)``, with θ = 10,000."""

    def __init__(self, head_dim: int, context: int, theta: float = 10_000.0) -> None:
        super().__init__()
        frequency = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(context), frequency)  # (p, c/2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        positions = heads.shape[-2]
        cos, sin = self.cos[:positions], self.sin[:positions]
        even, odd = heads[..., 0::2], heads[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class SwiGLU(nn.Module):
    """Shazeer 2020: ``w2(silu(w1 x) ⊙ w3 x)``, ``(b, p, m)`` → ``(b, p, m)``."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(d_model, d_ff, bias=False)
        self.w2 = nn.Linear(d_ff, d_model, bias=False)
        self.w3 = nn.Linear(d_model, d_ff, bias=False)

    @annotate(FFN, flops=lambda self, hidden: ffn_flops(hidden, self.w1.out_features))
    def forward(self, hidden: Tensor) -> Tensor:
        gate = self.w1(hidden)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(hidden))
