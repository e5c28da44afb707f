"""What the forward pass leaves to the backward pass of the built-in model, part by part, and the shapes of tensors.

Lengths in shapes are b batch, t context, d width, f inner width, h heads, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from profkit.models.memory_tape import Block

AUTOCAST_COPIES = "autocast copies"

STREAM = "b t d"
INNER = "b t f"
SCORES = "b h t t"
ROWS = "b h t"
POSITIONS = "b t"
LOGITS = "b t v"
SQUARE = "d d"
WIDE = "d f"
VOCABULARY = "v d"
HALF_STREAM = "b t d /2"

INDEX_BYTES = 8


@dataclass(frozen=True)
class Norm:
    """What the backward of RMSNorm needs."""

    hidden: Block
    scale: Block
    scaled: Block


@dataclass(frozen=True)
class Linear:
    """What the backward of a linear map needs: its input, and its weight where that is a cast copy.

    ``is_cast`` says that the input was cast, so that its gradient is cast back.
    """

    name: str
    weight_shape: str
    input: Block
    weight: Block | None
    is_cast: bool


@dataclass(frozen=True)
class Attention:
    """What the backward of attention needs."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    rotated_query: Block
    rotated_key: Block
    mask: Block
    powers: Block
    sums: Block
    weights: Block
    values: Block


@dataclass(frozen=True)
class Ffn:
    """What the backward of SwiGLU needs."""

    w1: Linear
    w2: Linear
    w3: Linear
    gate: Block
    sigmoid: Block
    gated: Block
    up: Block


@dataclass(frozen=True)
class Layer:
    """What the backward of one layer needs."""

    attention_norm: Norm
    attention: Attention
    ffn_norm: Norm
    ffn: Ffn


@dataclass(frozen=True)
class Group:
    """Layers between two checkpoints, or one where there are none; ``input`` is what a checkpoint keeps.

    ``layers`` has what their backward needs. Of a checkpoint it writes the second forward pass when it is called, and
    is called once.
    """

    layers: Callable[[], tuple[Layer, ...]]
    input: Block | None = None


@dataclass(frozen=True)
class Forward:
    """What the forward pass left behind."""

    groups: tuple[Group, ...]
    norm: Norm
    head: Linear
    logits: Block
