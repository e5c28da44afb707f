"""What a step of a built-in model does, range by range, worked out from its sizes: what the counter is held against.

Matrix products are those of `profkit.models.options`. With N = b t d, F = b t f, S = b h t² and V = b t v elements and
T = b t positions, the other operations of the eager model are, one for each element that an operator makes or reduces
(a softmax or log-softmax is five: the greatest, less it, exp, sum, divide):

=========  =============================  =====================================================================
part       forward                        backward
=========  =============================  =====================================================================
norm       4 N + 2 T                      11 N + 3 T
rotation   3 N, twice                     4.5 N, twice
scores     S                              S
softmax    5 S                            8 S
attention                                 2 N (sums of the gradients of query, key and value)
ffn        3 F                            6 F + N
layer      2 N (added to the stream)      2 N
loss       5 V + T                        4 V
embedding  0                              N
=========  =============================  =====================================================================

AdamW does 14 a parameter (decay 1, m moves towards g 3, v decays and gets g² 4, its root, correction and epsilon 3, the
step 3), and one for each parameter's step count.

Least bytes are by the rule of `profkit.run.work`: what comes from outside, what goes outside, and, in
training, what autograd keeps for the backward pass, which is listed tensor by tensor here for
fp32 and for bf16 autocast on CUDA. What compiled code keeps is the compiler's choice: it is left out there, as is
anything that a compiler adds or leaves out, so that the bytes stay the least. A model's result and its gradients count
as used even where the run drops them.
"""

from __future__ import annotations

from dataclasses import dataclass

from profkit.capture.work.account import Path, Work, summarize_work
from profkit.models.options import Preset, TrainingOptions, backward_flops, forward_flops
from profkit.names import (
    ATTENTION,
    BACKWARD,
    EMBEDDING,
    FFN,
    FORWARD,
    HEAD,
    LOSS,
    OPTIMIZER,
    SCALED_DOT_PRODUCT,
    SCORES,
    SOFTMAX,
    VALUE_PRODUCT,
    layer_range,
)
from profkit.run.work import RunWork


def flops_by_path(preset: Preset, batch: int, context: int) -> dict[str, int]:
    """Return range path → FLOPs of one instance; ``/`` joins a path, ``layer N`` stands for each layer by number."""
    tokens, attention = batch * context, f"{ATTENTION}/{SCALED_DOT_PRODUCT}"
    scores = 2 * tokens * context * preset.d_model
    projections, wide = 8 * tokens * preset.d_model**2, 6 * tokens * preset.d_model * preset.d_ff
    inside_layer = {
        "": projections + 2 * scores + wide,
        f"/{ATTENTION}": projections + 2 * scores,
        f"/{attention}": 2 * scores,
        f"/{attention}/{SCORES}": scores,
        f"/{attention}/{VALUE_PRODUCT}": scores,
        f"/{FFN}": wide,
    }
    layers = (f"{FORWARD}/{layer_range(number)}" for number in range(preset.num_layers))
    return {
        FORWARD: forward_flops(preset, batch, context),
        **{layer + path: flops for layer in layers for path, flops in inside_layer.items()},
        f"{FORWARD}/{HEAD}": 2 * tokens * preset.d_model * preset.vocab_size,
        BACKWARD: backward_flops(preset, batch, context),
    }


_INDEX_BYTES = 8
_ADAMW_FLOPS = 14
# Parameter, gradient and two moments are read; parameter and moments are written.
_ADAMW_BYTES = 4 * (4 + 3)


def model_work(options: TrainingOptions, *, tf32: bool = False) -> RunWork:
    """Return what counting one step is to give; ``tf32``: fp32 products are done in TF32."""
    by_path = StepWork(options, tf32=tf32).ranges()
    model = [by_path[(phase,)] for phase in (FORWARD, BACKWARD) if (phase,) in by_path]
    model_flops = sum(sum(work.flops.values()) for work in model)
    return summarize_work({path: [work] for path, work in by_path.items()}, model_flops, ())


@dataclass(frozen=True)
class _Part:
    """Of a range: other operations, bytes read from outside and given as its result, and bytes kept for backward."""

    other_flops: int
    read: int
    given: int
    kept: int = 0


class StepWork:
    """The work of each range of one step."""

    def __init__(self, options: TrainingOptions, *, tf32: bool = False) -> None:
        preset, b, t = options.preset, options.batch, options.contexts[0]
        self._options = options
        self._preset = preset
        self._is_bf16 = options.dtype == "bf16"
        self._low = 2 if self._is_bf16 else 4
        self._dtype = "bf16" if self._is_bf16 else "tf32" if tf32 else "fp32"
        self._keeps = options.passes != "forward" and options.compile_mode == "none"
        self._positions = b * t
        self._stream = b * t * preset.d_model
        self._inner = b * t * preset.d_ff
        self._scores = b * preset.num_heads * t * t
        self._rows = b * preset.num_heads * t
        self._logits = b * t * preset.vocab_size
        self._mask_bytes = t * t
        self._table_bytes = 2 * t * ((preset.head_dim + 1) // 2) * 4
        self._square = preset.d_model**2
        self._wide = preset.d_model * preset.d_ff
        self._vocabulary = preset.vocab_size * preset.d_model
        self._parameter_tensors = 3 + 9 * preset.num_layers

    def ranges(self) -> dict[Path, Work]:
        """Return path → work of one instance; ``()`` is the step. Compiled code has the phases alone."""
        options = self._options
        flops = flops_by_path(options.preset, options.batch, options.contexts[0])
        found = {
            path: self._work(path, flops.get("/".join(path), 0), part)
            for path, part in self._parts().items()
            if options.compile_mode == "none" or len(path) == 1
        }
        phases = [work for path, work in found.items() if len(path) == 1]
        step = Work(
            flops={self._dtype: sum(sum(work.flops.values()) for work in phases)},
            other_flops=sum(work.other_flops for work in phases),
            masked_flops=sum(work.masked_flops for work in phases),
            least_bytes=self._step_bytes(),
        )
        return {(): step, **found}

    def _work(self, path: Path, flops: int, part: _Part) -> Work:
        masked = self._masked_flops(path)
        moved = part.read + part.given + (part.kept if self._keeps else 0)
        return Work({self._dtype: flops} if flops else {}, part.other_flops, masked, moved)

    def _masked_flops(self, path: Path) -> int:
        """Return what the products with the scores spend on keys that the mask hides: t (t - 1) / 2 of t² each."""
        preset, t = self._preset, self._options.contexts[0]
        hidden = self._rows // t * preset.head_dim * t * (t - 1)  # of one product: 2 b h c t (t - 1) / 2
        if path == (BACKWARD,):
            return 4 * preset.num_layers * hidden
        if path == (FORWARD,):
            return 2 * preset.num_layers * hidden
        return {SCORES: hidden, VALUE_PRODUCT: hidden, SOFTMAX: 0, FFN: 0, EMBEDDING: 0, HEAD: 0}.get(
            path[-1], 2 * hidden if path[1:] else 0
        )

    def _parts(self) -> dict[Path, _Part]:
        """Return path → part, in the order of the step."""
        scores, softmax, value = self._score_part(), self._softmax_part(), self._value_part()
        product = self._product_part(scores, softmax, value)
        attention, ffn = self._attention_part(product), self._ffn_part()
        layer, head = self._layer_part(attention, ffn), self._head_part()
        inside = (ATTENTION, SCALED_DOT_PRODUCT)
        found: dict[Path, _Part] = {(FORWARD,): self._forward_part(layer, head)}
        found |= {(FORWARD, EMBEDDING): self._embedding_part(), (FORWARD, HEAD): head}
        for number in range(self._preset.num_layers):
            at = (FORWARD, layer_range(number))
            found |= {at: layer, (*at, ATTENTION): attention, (*at, *inside): product}
            found |= {(*at, *inside, SCORES): scores, (*at, *inside, SOFTMAX): softmax}
            found |= {(*at, *inside, VALUE_PRODUCT): value, (*at, FFN): ffn}
        if self._options.passes != "forward":
            found |= {(LOSS,): self._loss_part(), (BACKWARD,): self._backward_part(found[(FORWARD,)])}
        if self._options.passes == "train":
            found[(OPTIMIZER,)] = self._optimizer_part()
        return found

    def _score_part(self) -> _Part:
        casts = 2 * self._stream * 2 if self._is_bf16 else 0
        return _Part(self._scores, 2 * self._stream * 4, self._scores * self._low, casts)

    def _softmax_part(self) -> _Part:
        kept = self._mask_bytes + (self._scores + self._rows) * 4  # the inverted mask, the exponentials and their sums
        return _Part(5 * self._scores, self._scores * self._low + self._mask_bytes, self._scores * 4, kept)

    def _value_part(self) -> _Part:
        cast = self._scores * 2 if self._is_bf16 else 0
        copy = self._stream * self._low if self._options.batch > 1 else 0
        return _Part(0, self._scores * 4 + self._stream * self._low, self._stream * self._low, cast + copy)

    def _product_part(self, scores: _Part, softmax: _Part, value: _Part) -> _Part:
        weights = 0 if self._is_bf16 else self._scores * 4
        return _Part(
            scores.other_flops + softmax.other_flops,
            self._stream * (2 * 4 + self._low) + self._mask_bytes,
            self._stream * self._low,
            scores.kept + softmax.kept + value.kept + weights,
        )

    def _attention_part(self, product: _Part) -> _Part:
        own = self._stream * self._low  # the mixed values with their heads joined
        own += self._stream * self._low if self._options.batch == 1 else 0  # the values, of which there is no copy
        own += self._casts(4 * self._square, 3) if self._is_bf16 else 2 * self._stream * 4  # rotated query and key
        return _Part(
            product.other_flops + 6 * self._stream,
            (self._stream + 4 * self._square) * 4 + self._table_bytes + self._mask_bytes,
            self._stream * self._low,
            product.kept + own,
        )

    def _ffn_part(self) -> _Part:
        kept = 5 * self._inner * self._low + (self._casts(3 * self._wide, 2) if self._is_bf16 else 0)
        return _Part(3 * self._inner, (self._stream + 3 * self._wide) * 4, self._stream * self._low, kept)

    def _layer_part(self, attention: _Part, ffn: _Part) -> _Part:
        return _Part(
            attention.other_flops + ffn.other_flops + 2 * self._norm_flops() + 2 * self._stream,
            self._stream * 4 + self._layer_bytes() + self._table_bytes + self._mask_bytes,
            self._stream * 4,
            attention.kept + ffn.kept + 2 * self._norm_kept() + self._stream * 4,  # the stream after attention
        )

    def _embedding_part(self) -> _Part:
        return _Part(0, self._positions * _INDEX_BYTES + self._stream * 4, self._stream * 4)

    def _head_part(self) -> _Part:
        kept = self._norm_kept() + (self._casts(self._vocabulary, 1) if self._is_bf16 else 0)
        read = (self._stream + self._preset.d_model + self._vocabulary) * 4
        return _Part(self._norm_flops(), read, self._logits * self._low, kept)

    def _forward_part(self, layer: _Part, head: _Part) -> _Part:
        layers = self._preset.num_layers
        return _Part(
            layers * layer.other_flops + head.other_flops,
            self._positions * _INDEX_BYTES
            + self._stream * 4  # the rows that are looked up
            + layers * self._layer_bytes()
            + (self._preset.d_model + self._vocabulary) * 4
            + self._table_bytes
            + self._mask_bytes,
            head.given,
            layers * (layer.kept + layer.given) + self._stream * 4 + head.kept,
        )

    def _loss_part(self) -> _Part:
        # The loss is never compiled: what autograd keeps of it is known.
        copy = self._positions * _INDEX_BYTES if self._options.batch > 1 else 0
        given = 4 + self._logits * self._low + 4 + copy
        read = self._logits * self._low + self._positions * _INDEX_BYTES
        return _Part(5 * self._logits + self._positions, read, given)

    def _backward_part(self, forward: _Part) -> _Part:
        preset, stream = self._preset, self._stream
        layer = 36 * stream + 6 * self._positions + 6 * self._inner + 9 * self._scores
        other = preset.num_layers * layer + 12 * stream + 3 * self._positions + 4 * self._logits
        matrices = preset.num_layers * (4 * self._square + 3 * self._wide) + self._vocabulary
        # The loss has its own copy of the targets, unless they lie in a row with the tokens.
        indices = 2 * self._positions if self._options.batch > 1 else self._token_count()
        read = self._logits * self._low + 4 + indices * _INDEX_BYTES
        read += (2 * preset.num_layers + 1) * preset.d_model * 4 + self._table_bytes
        # Under autocast their bf16 copies are read, which forward has kept.
        read += 0 if self._is_bf16 else matrices * 4
        return _Part(other, read, preset.parameter_count * 4, forward.kept)

    def _optimizer_part(self) -> _Part:
        parameters, tensors = self._preset.parameter_count, self._parameter_tensors
        return _Part(_ADAMW_FLOPS * parameters + tensors, _ADAMW_BYTES * parameters + 8 * tensors, 0)

    def _step_bytes(self) -> int:
        """Return the least bytes of a whole step: activations, the loss, and gradients that AdamW takes stay inside."""
        options, parameters = self._options, self._preset.parameter_count * 4
        tables = self._table_bytes + self._mask_bytes
        tokens = self._token_count() * _INDEX_BYTES
        if options.passes == "train":
            return 6 * parameters + 8 * self._parameter_tensors + tables + tokens
        looked_up = self._stream * 4
        read = parameters - self._vocabulary * 4 + looked_up + tables
        if options.passes == "forward":
            return read + self._positions * _INDEX_BYTES + self._logits * self._low
        return read + tokens + parameters

    def _token_count(self) -> int:
        """Return how many tokens inputs and targets are together: of a sequence they overlap but for one."""
        return self._positions + self._options.batch

    def _norm_flops(self) -> int:
        return 4 * self._stream + 2 * self._positions

    def _norm_kept(self) -> int:
        """Return the bytes of a norm's scale, of what it scaled, and of its result, which a cast stands for in bf16."""
        return (self._positions + self._stream * (1 if self._is_bf16 else 2)) * 4

    def _layer_bytes(self) -> int:
        return (4 * self._square + 3 * self._wide + 2 * self._preset.d_model) * 4

    def _casts(self, weights: int, inputs: int) -> int:
        """Return the bytes of weights cast to bf16 and of as many casts of the stream."""
        return (weights + inputs * self._stream) * 2
