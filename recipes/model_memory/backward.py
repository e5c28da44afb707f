"""The backward pass of the built-in model as allocations: autograd's nodes in the reverse order of the forward pass.

A node makes the gradients of its inputs; then its own input and the tensors saved for it are freed. Where two gradients
of one tensor meet, the second is added into the first in place; only where the first is a view of another tensor, like
that of a linear map in fp32, a third is made (torch/csrc/autograd/input_buffer.cpp). A sum over rows that is divided
among blocks of threads goes through a buffer (aten/src/ATen/native/cuda/Reduce.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from recipes.model_memory.forward import Attention, Ffn, Forward, Group, Linear, Norm
from recipes.model_memory.tape import (
    GRADIENTS,
    HALF_STREAM,
    INDEX_BYTES,
    INNER,
    LOGITS,
    POSITIONS,
    ROWS,
    SCORES,
    STREAM,
    TEMPORARIES,
    VOCABULARY,
    Block,
    Tape,
)

# Of Reduce.cuh, for a column sum of fp32: 4 outputs a thread, blocks of 32 × 4 threads; 132 multiprocessors (H100,
# H200) of 2,048 threads. Rows are divided among blocks when a thread would add 256 or more, at least 16 to each.
_BLOCK_THREADS, _BLOCK_ROWS, _OUTPUTS_A_BLOCK = 128, 4, 128
_RESIDENT_BLOCKS = 132 * 2048 // _BLOCK_THREADS
_MIN_VALUES, _MAX_VALUES = 16, 256

_SUM = "gradient of a norm's output"


@dataclass(frozen=True)
class Loss:
    """What the backward of cross-entropy needs: log-softmax's result, nll_loss's input, the targets, their weight."""

    softmax: Block
    given: Block
    targets: tuple[Block, ...]
    weight: Block


class BackwardPass:
    """Records the backward pass on a tape; `gradients` are those of the parameters, which stay."""

    def __init__(self, tape: Tape, *, rows: int, d_model: int, is_bf16: bool) -> None:
        self._tape = tape
        self._rows = rows
        self._d_model = d_model
        self._is_bf16 = is_bf16
        self._low = 2 if is_bf16 else 4
        self._is_again = False
        self.gradients: list[Block] = []

    def run(self, forward: Forward, loss: Loss) -> None:
        """Record the whole pass."""
        tape = self._tape
        seed = tape.new("gradient of the loss", "", 4, GRADIENTS)
        gradient = self._loss(loss)
        gradient = self._linear(forward.head, gradient)
        stream = self._norm(forward.norm, gradient, None, "final norm")
        for group in reversed(forward.groups):
            stream = self._group(group, stream)
        indices = tape.new_copy("indices in order", POSITIONS, INDEX_BYTES)
        self.gradients.append(tape.new("embedding", VOCABULARY, 4, GRADIENTS))
        tape.drop(*indices, stream, seed)

    def _group(self, group: Group, stream: Block) -> Block:
        """Return the gradient of some layers' input; behind a checkpoint they run again at the first saved tensor."""
        branch = self._enter_branch(stream, "ffn output")
        self._is_again = group.input is not None
        layers = group.layers()
        for layer in reversed(layers):
            if layer is not layers[-1]:
                branch = self._enter_branch(stream, "ffn output")
            gradient = self._ffn(layer.ffn, branch)
            stream = self._norm(layer.ffn_norm, gradient, stream, "ffn norm")
            gradient = self._attention(layer.attention, self._enter_branch(stream, "attention output"))
            stream = self._norm(layer.attention_norm, gradient, stream, "attention norm")
        if group.input is not None:
            self._tape.drop(group.input)
        self._is_again = False
        return stream

    @contextmanager
    def _node(self, *saved: Block) -> Iterator[None]:
        """Enclose the sums that bring a node's gradients into its inputs' shapes; drop the node's saved tensors.

        They are freed after the sums, with the node; behind a checkpoint before them, with the node's function.
        """
        self._tape.drop(*saved * self._is_again)
        yield
        self._tape.drop(*saved * (not self._is_again))

    def _enter_branch(self, stream: Block, output: str) -> Block:
        return self._tape.new(f"gradient of {output}, bf16", STREAM, 2) if self._is_bf16 else stream

    def _loss(self, loss: Loss) -> Block:
        tape = self._tape
        gradient = tape.new("gradient of nll_loss's input", LOGITS, 4)
        tape.drop(loss.given, *loss.targets, loss.weight)
        gradient = self._cast(gradient, "gradient of log-softmax", LOGITS, self._low)
        result = tape.new("gradient of the logits", LOGITS, self._low)
        tape.drop(gradient, loss.softmax)
        return result

    def _cast(self, block: Block, name: str, shape: str, width_bytes: int) -> Block:
        if block.width_bytes == width_bytes:
            return block
        cast = self._tape.new(name, shape, width_bytes)
        self._tape.drop(block)
        return cast

    def _linear(self, of: Linear, gradient: Block, *, free: bool = True, met: Block | None = None) -> Block:
        """Return the gradient of the input, added to ``met`` if given.

        ``free``: the gradient of the output ends here; in fp32 the stream's continues around the branch.
        """
        tape, is_low = self._tape, of.weight is not None
        category = TEMPORARIES if is_low else GRADIENTS
        weight = tape.new(f"{of.name} weight", of.weight_shape, self._low, category)
        result = tape.new(f"gradient of {of.name}'s input", of.input.shape, self._low)
        tape.drop(*[gradient] * free, *([of.weight] if of.weight else []), of.input)
        if of.is_cast:
            result = self._cast(result, f"gradient of {of.name}'s input, fp32", of.input.shape, 4)
        if met is not None:
            result = self._meet(met, result, of)
        if is_low:
            wide = tape.new(f"{of.name} weight", of.weight_shape, 4, GRADIENTS)
            tape.drop(weight)
            weight = wide
        self.gradients.append(weight)
        return result

    def _meet(self, first: Block, second: Block, of: Linear) -> Block:
        """Return the sum of two gradients of a linear map's input; in fp32 the first two are views."""
        if of.is_cast or first.name == _SUM:
            self._tape.drop(second)
            return first
        total = self._tape.new(_SUM, of.input.shape, first.width_bytes)
        self._tape.drop(first, second)
        return total

    def _norm(self, norm: Norm, gradient: Block, stream: Block | None, name: str) -> Block:
        """Return the gradient of the stream: that which passed around the norm (``stream``) and that through it."""
        tape = self._tape
        by_gain = tape.new(f"{name}: gradient by the gain", STREAM, 4)
        scaled = tape.new(f"{name}: gradient of the scaled", STREAM, 4)
        with self._node(norm.scaled):
            self.gradients.append(tape.new(f"{name} gain", "d", 4, GRADIENTS))
            self._sum_rows()
        tape.drop(by_gain, gradient)
        by_scale = tape.new(f"{name}: gradient by the scale", STREAM, 4)
        hidden = tape.new("gradient of the stream", STREAM, 4)
        with self._node(norm.hidden, norm.scale):
            scale = tape.new(f"{name}: gradient of the scale", POSITIONS, 4)
        tape.drop(by_scale, scaled)
        stream = self._add(stream, hidden)
        powers = [tape.new(f"{name}: rsqrt's derivative", POSITIONS, 4) for _ in range(3)]
        tape.drop(powers[1], powers[0], scale, norm.scale)
        mean = tape.new(f"{name}: gradient of the squares", STREAM, 4)
        tape.drop(powers[2])
        parts = [tape.new(f"{name}: the square's derivative", STREAM, 4) for _ in range(3)]
        tape.drop(parts[1], parts[0], mean, norm.hidden)
        return self._add(stream, parts[2])

    def _add(self, first: Block | None, second: Block) -> Block:
        if first is None:
            return second
        self._tape.drop(second)
        return first

    def _sum_rows(self) -> None:
        """Sum ``(rows, d)`` over its rows: the buffer between blocks, and a counter for each column of blocks."""
        values = -(-self._rows // _BLOCK_ROWS)
        columns = -(-self._d_model // _OUTPUTS_A_BLOCK)
        if values < _MAX_VALUES:
            return
        shares = max(min(-(-_RESIDENT_BLOCKS // columns), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
        if shares > 1:
            buffer = self._tape.new("buffer of a sum over rows", f"d {shares} {_BLOCK_THREADS}", 4)
            counters = self._tape.new("counters of a sum over rows", f"{columns}", 4)
            self._tape.drop(counters, buffer)

    def _ffn(self, ffn: Ffn, gradient: Block) -> Block:
        tape, low = self._tape, self._low
        product = self._linear(ffn.w2, gradient, free=self._is_bf16)
        up = tape.new("gradient of w3 output", INNER, low)
        gated = tape.new("gradient of gate · sigmoid", INNER, low)
        tape.drop(product, ffn.up, ffn.gated)
        normed = self._linear(ffn.w3, up)
        by_sigmoid = tape.new("gradient of the sigmoid", INNER, low)
        gate = tape.new("gradient of the gate", INNER, low)
        tape.drop(gated, ffn.gate, ffn.sigmoid)
        through = tape.new("gradient through the sigmoid", INNER, low)
        tape.drop(by_sigmoid, ffn.sigmoid, through)
        return self._linear(ffn.w1, gate, met=normed)

    def _attention(self, of: Attention, gradient: Block) -> Block:
        tape, low = self._tape, self._low
        merged = self._linear(of.output, gradient, free=self._is_bf16)
        copies = tape.new_copy("gradient of the mixed values", STREAM, low)
        mixed = copies[0] if copies else merged
        tape.drop(*[merged] * len(copies))
        value = tape.new("gradient of value by head", STREAM, low)
        weights = tape.new("gradient of the attention weights", SCORES, low)
        tape.drop(mixed, of.values, of.weights)
        scores = self._softmax(of, self._cast(weights, "gradient of the attention weights, fp32", SCORES, 4))
        key = tape.new("gradient of the rotated key", STREAM, low)
        query = tape.new("gradient of the rotated query", STREAM, low)
        tape.drop(scores, of.rotated_key, of.rotated_query)
        query = self._cast(query, "gradient of the rotated query, fp32", STREAM, 4)
        key = self._cast(key, "gradient of the rotated key, fp32", STREAM, 4)
        key, query = self._rotate(key, "key"), self._rotate(query, "query")
        normed = None
        for part, through in ((value, of.value), (key, of.key), (query, of.query)):
            joined = tape.new(f"gradient of {through.name}, heads joined", STREAM, low)
            tape.drop(part)
            normed = self._linear(through, joined, met=normed)
        assert normed is not None
        return normed

    def _softmax(self, of: Attention, weights: Block) -> Block:
        tape = self._tape
        parts = [tape.new("the quotient's derivative", SCORES, 4) for _ in range(4)]
        tape.drop(parts[2], parts[1], parts[0])
        powers = tape.new("gradient of the exponentials", SCORES, 4)
        with self._node(of.powers, of.sums):
            sums = tape.new("gradient of their sums", ROWS, 4)
        tape.drop(parts[3], weights, sums)
        exponents = tape.new("gradient of the exponents", SCORES, 4)
        tape.drop(powers, of.powers)
        exponents = self._cast(exponents, "gradient of the shifted scores", SCORES, self._low)
        masked = tape.new("gradient of the masked scores", SCORES, self._low)
        tape.drop(exponents, of.mask)
        scaled = tape.new("gradient of the scores", SCORES, self._low)
        tape.drop(masked)
        return scaled

    def _rotate(self, gradient: Block, name: str) -> Block:
        tape, low = self._tape, self._low
        even, odd = self._half(name), self._half(name)
        negative = tape.new(f"gradient of half of {name}", HALF_STREAM, 4)
        tape.drop(self._half(name, negative))
        last = self._half(name)
        tape.drop(gradient, last)
        whole = tape.new(f"gradient of {name}", STREAM, low)
        tape.drop(even)
        other = tape.new(f"gradient of {name}", STREAM, low)
        tape.drop(odd, other)
        return whole

    def _half(self, name: str, *before: Block) -> Block:
        """Return the product of half of the channels' gradient with a table; ``before`` ends with it."""
        product = self._tape.new(f"gradient of half of {name}", HALF_STREAM, 4)
        product = self._cast(product, f"gradient of half of {name}, bf16", HALF_STREAM, self._low)
        self._tape.drop(*before)
        return product
