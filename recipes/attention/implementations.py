"""Ways to write attention without heads: query, key, value ``(batch, seq, d)`` → output ``(batch, seq, d)``.

All but ``causal`` compute the same function. They save different tensors for backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from recipes.attention.cells import CAUSAL, CHECKPOINTED, COMPILED, FUSED, SDPA, WRITTEN, WRITTEN_AMAX

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def written(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax step by step; ``max`` also returns the maximum's place, which its backward would need."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    shifted = scores - scores.max(dim=-1, keepdim=True).values
    powers = torch.exp(shifted)
    weights = powers / powers.sum(dim=-1, keepdim=True)
    return weights @ value


def written_amax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax step by step; ``amax`` saves scores and maximum, to divide the gradient among equal maxima."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    powers = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    weights = powers / powers.sum(dim=-1, keepdim=True)
    return weights @ value


def fused_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's own softmax: one operator, which saves only its output."""
    return functional.softmax(query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]), dim=-1) @ value


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Like ``written``, but each position sees only those up to itself; the mask is saved too, one byte per entry."""
    length = query.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])).masked_fill(hidden, -math.inf)
    powers = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    weights = powers / powers.sum(dim=-1, keepdim=True)
    return weights @ value


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's fused attention, with one head: its fast kernels need a dimension for heads."""
    return functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]


def checkpointed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Like ``written``, which backward runs again instead of saving anything."""
    output: Tensor = checkpoint(written, query, key, value, use_reentrant=False)
    return output


def find_attention(name: str) -> Attention:
    """Return an implementation by its name; the compiled one compiles when it is called first."""
    if name == COMPILED:
        compiled: Attention = torch.compile(written)
        return compiled
    return {
        WRITTEN: written,
        WRITTEN_AMAX: written_amax,
        FUSED: fused_softmax,
        CAUSAL: causal,
        CHECKPOINTED: checkpointed,
        SDPA: sdpa,
    }[name]
