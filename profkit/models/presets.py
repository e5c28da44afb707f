"""The sizes of the built-in transformer language model, by name.

The names are those of the reports that profkit grew from: ``xl`` is the model of two billion parameters and ``2.7B``
the one above it. (Later editions of the course behind those reports call the last one ``xl``.) ``tiny`` is for laptops
and tests.
"""

from __future__ import annotations

from dataclasses import dataclass


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
