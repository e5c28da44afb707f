"""The forward pass of the built-in model as allocations: `profkit.models.transformer` line by line, eager.

``low`` is the width in bytes of the operands and results of matrix products: 4, or 2 under bf16 autocast. Autocast on
CUDA casts the operands of ``linear`` and of einsum's batched product down, and those of ``exp``, ``sum`` and
``nll_loss`` up. The cast of a weight is kept until autocast ends, and longer if backward needs it; other casts are made
again for each product. The output of a norm is fp32, and so is that of the rotation, because its tables are.

What is saved is what each operation's derivative needs (tools/autograd/derivatives.yaml): the operands of a product,
the results of ``exp``, ``sigmoid``, ``rsqrt`` and ``log_softmax``, the base of ``pow``, the mask of ``masked_fill``;
nothing for sums, scalings by a number and views, nor the factor whose partner (a rotation's table) is not trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipes.model_memory.tape import (
    AUTOCAST_COPIES,
    HALF_STREAM,
    INDEX_BYTES,
    INNER,
    LOGITS,
    POSITIONS,
    ROWS,
    SCORES,
    SQUARE,
    STREAM,
    VOCABULARY,
    WIDE,
    Block,
    Tape,
)


@dataclass(frozen=True)
class Norm:
    """What the backward of RMSNorm needs."""

    hidden: Block
    scale: Block
    scaled: Block


@dataclass(frozen=True)
class Linear:
    """What the backward of a linear map needs: its input, and its weight if that is a cast copy.

    ``is_cast``: the input was cast, so its gradient is cast back.
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
    """The layers between two checkpoints, or one layer without checkpoints; ``input`` is what a checkpoint keeps.

    ``layers`` returns what their backward needs. With a checkpoint it also records the second forward pass; call it
    once.
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


class ForwardPass:
    """Records the forward pass on a tape."""

    def __init__(self, tape: Tape, num_layers: int, *, is_bf16: bool, checkpoint_layers: int = 0) -> None:
        self._tape = tape
        self._num_layers = num_layers
        self._checkpoint_layers = checkpoint_layers
        self._is_bf16 = is_bf16
        self.low = 2 if is_bf16 else 4
        self._copies: list[Block] = []

    def run(self) -> Forward:
        """Record the pass from the tokens to the logits, up to the end of autocast."""
        tape = self._tape
        indices = tape.new_copy("indices in order", POSITIONS, INDEX_BYTES)
        hidden = tape.new("embedded tokens", STREAM, 4)
        tape.drop(*indices)
        groups = []
        size = self._checkpoint_layers or 1
        for first in range(0, self._num_layers, size):
            hidden, group = self._group(hidden, min(size, self._num_layers - first))
            groups.append(group)
        normed, norm = self._norm(hidden, "final norm")
        logits, head = self._linear(normed, "head", VOCABULARY, LOGITS, "logits")
        tape.drop(normed, hidden)
        return Forward(tuple(groups), norm, head, logits)

    def end_autocast(self) -> None:
        """Free the cast weights that autocast held."""
        self._tape.drop(*self._copies)
        self._copies.clear()

    def _group(self, hidden: Block, count: int) -> tuple[Block, Group]:
        """Record some layers; between two checkpoints only their input is saved."""
        tape = self._tape
        if self._checkpoint_layers:
            tape.save(hidden)
            keeps_graph, tape.keeps_graph = tape.keeps_graph, False
            after, _ = self._layers(hidden, count)
            tape.keeps_graph = keeps_graph
            group = Group(lambda: self._again(hidden, count), hidden)
        else:
            after, layers = self._layers(hidden, count)
            group = Group(lambda: layers)
        assert after is not None
        tape.drop(hidden)
        return after, group

    def _again(self, hidden: Block, count: int) -> tuple[Layer, ...]:
        """Record the second forward pass of a checkpoint, under an autocast of its own.

        It ends before its last product, when backward has all that it needs.
        """
        _, layers = self._layers(hidden, count, ends_early=True)
        self.end_autocast()
        return layers

    def _layers(self, hidden: Block, count: int, *, ends_early: bool = False) -> tuple[Block | None, tuple[Layer, ...]]:
        layers: list[Layer] = []
        after: Block | None = hidden
        while len(layers) < count:
            before = after
            assert before is not None
            after, layer = self._layer(before, ends_early=ends_early and len(layers) == count - 1)
            layers.append(layer)
            self._tape.drop(*[before] * (before is not hidden))
        return after, tuple(layers)

    def _layer(self, hidden: Block, *, ends_early: bool) -> tuple[Block | None, Layer]:
        tape = self._tape
        normed, attention_norm = self._norm(hidden, "attention norm")
        added, attention = self._attention(normed)
        tape.drop(normed)
        middle = tape.new("stream after attention", STREAM, 4)
        tape.drop(added)
        normed, ffn_norm = self._norm(middle, "ffn norm")
        output, ffn = self._ffn(normed, ends_early=ends_early)
        tape.drop(normed)
        after = None if output is None else tape.new("stream after ffn", STREAM, 4)
        tape.drop(*(block for block in (output, middle) if block is not None))
        return after, Layer(attention_norm, attention, ffn_norm, ffn)

    def _norm(self, hidden: Block, name: str) -> tuple[Block, Norm]:
        tape = self._tape
        squares = tape.new(f"{name}: squares", STREAM, 4)
        tape.save(hidden)  # for the square
        mean = tape.new(f"{name}: mean", POSITIONS, 4)
        tape.drop(squares)
        shifted = tape.new(f"{name}: mean + epsilon", POSITIONS, 4)
        tape.drop(mean)
        scale = tape.new(f"{name}: 1 / root mean square", POSITIONS, 4)
        tape.save(scale)  # by rsqrt, as its result
        tape.drop(shifted)
        scaled = tape.new(f"{name}: scaled", STREAM, 4)
        tape.save(hidden, scale)  # for the product
        normed = tape.new(f"{name}: output", STREAM, 4)
        tape.save(scaled)
        tape.drop(scaled, scale)
        return normed, Norm(hidden, scale, scaled)

    def _linear(self, source: Block, name: str, weight_shape: str, shape: str, result: str) -> tuple[Block, Linear]:
        operands = self._operands(source, name, weight_shape)
        output = self._tape.new(result, shape, self.low)
        self._tape.drop(*[operands.input] * operands.is_cast)
        return output, operands

    def _operands(self, source: Block, name: str, weight_shape: str) -> Linear:
        """Record what a linear map takes and saves, before the product itself; the caller drops a cast input."""
        tape, weight = self._tape, None
        is_cast = self._is_bf16 and source.width_bytes == 4
        operand = source
        if self._is_bf16:
            weight = tape.new(f"{name} weight", weight_shape, 2, AUTOCAST_COPIES)
            self._copies.append(weight)
            tape.save(weight)
        if is_cast:
            operand = tape.new(f"{name}: input in bf16", source.shape, 2)
        tape.save(operand)
        return Linear(name, weight_shape, operand, weight, is_cast)

    def _attention(self, normed: Block) -> tuple[Block, Attention]:
        tape = self._tape
        query, query_map = self._linear(normed, "query", SQUARE, STREAM, "query")
        key, key_map = self._linear(normed, "key", SQUARE, STREAM, "key")
        value, value_map = self._linear(normed, "value", SQUARE, STREAM, "value")
        turned_query, turned_key = self._rotate("query"), self._rotate("key")
        scores, operands = self._scores(turned_query, turned_key)
        weights, mask, powers, sums = self._softmax()
        copies = tape.new_copy("value by head", STREAM, self.low)
        values = copies[0] if copies else value
        factor = weights
        if self._is_bf16:
            factor = tape.new("attention weights in bf16", SCORES, 2)
        mixed = tape.new("mixed values", STREAM, self.low)
        tape.save(factor, values)
        if self._is_bf16:
            tape.drop(factor)
        tape.drop(*copies, scores, weights, turned_key, turned_query)
        merged = tape.new("mixed values, heads joined", STREAM, self.low)
        output, output_map = self._linear(merged, "output", SQUARE, STREAM, "attention output")
        tape.drop(merged, query, key, value, mixed)
        parts = (query_map, key_map, value_map, output_map, *operands, mask, powers, sums, factor, values)
        return output, Attention(*parts)

    def _rotate(self, name: str) -> Block:
        tape = self._tape
        halves = []
        for half in ("even", "odd"):
            first = tape.new(f"{name} by cosine", HALF_STREAM, 4)
            second = tape.new(f"{name} by sine", HALF_STREAM, 4)
            halves.append(tape.new(f"rotated {name}, {half} channels", HALF_STREAM, 4))
            tape.drop(first, second)
        rotated = tape.new(f"rotated {name}", STREAM, 4)
        tape.drop(*reversed(halves))
        return rotated

    def _scores(self, query: Block, key: Block) -> tuple[Block, tuple[Block, Block]]:
        tape, operands = self._tape, (query, key)
        if self._is_bf16:
            operands = (
                tape.new("rotated query in bf16", STREAM, 2),
                tape.new("rotated key in bf16", STREAM, 2),
            )
        products = tape.new("scores before scaling", SCORES, self.low)
        tape.save(*operands)
        if self._is_bf16:
            tape.drop(*reversed(operands))
        scores = tape.new("attention scores", SCORES, self.low)
        tape.drop(products)
        return scores, operands

    def _softmax(self) -> tuple[Block, Block, Block, Block]:
        """Record masked_softmax; return the weights, the inverted mask, the exponentials and their sums."""
        tape = self._tape
        mask = tape.new("inverted causal mask", "t t", 1)
        masked = tape.new("masked scores", SCORES, self.low)
        tape.save(mask)
        tape.drop(mask)
        greatest = tape.new("greatest score", ROWS, self.low)
        shifted = tape.new("scores less the greatest", SCORES, self.low)
        tape.drop(greatest)
        exponents = [tape.new("exponents in fp32", SCORES, 4)] if self._is_bf16 else []
        powers = tape.new("exponentials of the scores", SCORES, 4)
        tape.save(powers)  # by exp, as its result
        tape.drop(*exponents, shifted)
        sums = tape.new("sums of the exponentials", ROWS, 4)
        weights = tape.new("attention weights", SCORES, 4)
        tape.save(powers, sums)  # for the quotient
        tape.drop(sums, masked, powers)
        return weights, mask, powers, sums

    def _ffn(self, normed: Block, *, ends_early: bool) -> tuple[Block | None, Ffn]:
        tape = self._tape
        gate, w1 = self._linear(normed, "w1", WIDE, INNER, "gate")
        sigmoid = tape.new("sigmoid of the gate", INNER, self.low)
        tape.save(sigmoid)
        gated = tape.new("gate · sigmoid", INNER, self.low)
        tape.save(gate, sigmoid)
        tape.drop(sigmoid)
        up, w3 = self._linear(normed, "w3", WIDE, INNER, "w3 output")
        product = tape.new("w2: input", INNER, self.low)
        tape.save(gated, up)
        tape.drop(gated, up)
        w2 = self._operands(product, "w2", WIDE)
        output = None if ends_early else tape.new("ffn output", STREAM, self.low)
        tape.drop(product, gate)
        return output, Ffn(w1, w2, w3, gate, sigmoid, gated, up)
