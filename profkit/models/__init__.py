"""The command line of a built-in model's training script, ``python -m profkit.models``; the sizes of the model, and its
floating-point operations by range, worked out from the sizes. Nothing here needs torch.

The names of sizes are those of the reports that profkit grew from: ``xl`` is the model of two billion parameters and
``2.7B`` the one above it. (Later editions of the course behind those reports call the last one ``xl``.) ``tiny`` is for
laptops and tests.

Of operations only matrix products count, as in the field's usual reckoning: one of ``(m, k)`` by ``(k, n)`` takes
``2 m n k`` (a multiplication and an addition for each). The mask is applied to a full score matrix, so causality saves
nothing. The embedding is a look-up, and norms, softmax, rotations and the loss do no matrix product: 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol, get_args


@dataclass(frozen=True)
class Preset:
    """One size of the model; ``d_model`` is split evenly among ``num_heads``."""

    name: str
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = 10_000

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def parameter_count(self) -> int:
        """Embedding and untied head, four attention and three SwiGLU matrices a layer, RMSNorm gains; no biases."""
        layer = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return 2 * self.vocab_size * self.d_model + self.num_layers * layer + self.d_model


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("tiny", 128, 512, 2, 4),
        Preset("small", 768, 3072, 12, 12),
        Preset("medium", 1024, 4096, 24, 16),
        Preset("large", 1280, 5120, 36, 20),
        Preset("xl", 1600, 6400, 48, 25),
        Preset("2.7B", 2560, 10240, 32, 32),
    )
}


Passes = Literal["forward", "forward-backward", "train"]
Dtype = Literal["fp32", "tf32", "bf16"]
CompileMode = Literal["none", "default", "reduce-overhead"]
Device = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True)
class TrainingOptions:
    """Which model to train, on what, and how often.

    ``tf32``: fp32 with matrix products in TF32; ``bf16``: autocast with fp32 weights; ``auto`` takes CUDA where it is.
    With several ``contexts`` the steps run with each of them in turn. ``checkpoint_layers`` is how many layers at a
    time keep only their input for backward, which runs them again; 0: each keeps all that its backward needs.
    ``rounds``: all steps are repeated up to so often, as long as that takes less than five seconds. ``count`` makes one
    more step at the end, uncompiled, in the range `profkit.names.COUNTED`.
    """

    preset_name: str
    batch: int = 4
    contexts: tuple[int, ...] = (256,)
    passes: Passes = "train"
    dtype: Dtype = "fp32"
    compile_mode: CompileMode = "none"
    seed: int = 0
    device: Device = "auto"
    warmup_steps: int = 2
    steps: int = 3
    checkpoint_layers: int = 0
    rounds: int = 1
    count: bool = False

    @property
    def preset(self) -> Preset:
        return PRESETS[self.preset_name]

    def to_argv(self) -> list[str]:
        """Return the command line that `parse_options` reads these options from."""
        words = [self.preset_name]
        for name, value in vars(self).items():
            if name == "contexts":
                words += ["--context", ",".join(map(str, value))]
            elif name == "count":
                words += ["--count"] if value else []
            elif name != "preset_name":
                words += [f"--{name.removesuffix('_steps').removesuffix('_mode').replace('_', '-')}", str(value)]
        return words


def parse_options(argv: Sequence[str]) -> TrainingOptions:
    """Return the options of a command line; end the process with a usage error where it is wrong."""
    # What is left out has the default of `TrainingOptions`.
    parser = argparse.ArgumentParser(
        "python -m profkit.models", description="Train a built-in transformer.", argument_default=argparse.SUPPRESS
    )
    parser.add_argument("preset_name", metavar="PRESET", choices=PRESETS, help=", ".join(PRESETS))
    parser.add_argument("--context", dest="contexts", type=_numbers, help="tokens in a sequence: 256,512")
    parser.add_argument("--passes", choices=get_args(Passes))
    parser.add_argument("--dtype", choices=get_args(Dtype))
    parser.add_argument("--compile", dest="compile_mode", choices=get_args(CompileMode))
    parser.add_argument("--device", choices=get_args(Device))
    parser.add_argument("--warmup", dest="warmup_steps", type=int)
    parser.add_argument("--batch", type=int, help="sequences in a batch")
    parser.add_argument("--seed", type=int, help="of the weights and the tokens")
    for name in ("steps", "checkpoint-layers", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--count", action="store_true")
    return TrainingOptions(**vars(parser.parse_args(argv)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


class HasShape(Protocol):
    """A tensor, as far as this module cares."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def forward_flops(preset: Preset, batch: int, context: int) -> int:
    tokens = batch * context
    return preset.num_layers * _layer(preset, tokens, context) + 2 * tokens * preset.d_model * preset.vocab_size


def backward_flops(preset: Preset, batch: int, context: int) -> int:
    """Return the FLOPs of one backward pass: every product ``C = A B`` needs ``dA = dC Bᵀ`` and ``dB = Aᵀ dC``."""
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
