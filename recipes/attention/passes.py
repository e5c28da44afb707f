"""Forward and backward passes of attention, each timed on its own between two synchronisations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from profkit.annotation import annotate
from profkit.names import BACKWARD, FORWARD
from recipes.attention.implementations import Attention
from recipes.common.recipe import Device

MAKING = "inputs"
"""The phase before the first pass."""


class Passes:
    """Inputs and their gradient of ``shape`` (batch, seq, d), the passes over them, and the times so far by phase."""

    def __init__(self, attention: Attention, shape: tuple[int, int, int], dtype: torch.dtype, device: Device) -> None:
        self.attention, self.shape, self.dtype, self.device = attention, shape, dtype, device
        self.phase = MAKING
        self.samples_ms: dict[str, list[float]] = {}

    def make_inputs(self) -> None:
        """Make query, key, value and the output's gradient, of random numbers."""
        made = [torch.randn(self.shape, device=self.device, dtype=self.dtype) for _ in range(4)]
        self.inputs, self.gradient = [each.requires_grad_() for each in made[:3]], made[3]

    def time_forward(self) -> None:
        """Time one forward pass; what it kept for backward is dropped."""
        with self._timed(FORWARD):
            output = self.forward()
        del output

    def time_both(self) -> None:
        """Time one forward and one backward pass."""
        self.drop_gradients()
        with self._timed(FORWARD):
            output = self.forward()
        with self._timed(BACKWARD):
            self.backward(output)
        del output

    def forward(self) -> Tensor:
        return self.attention(*self.inputs)

    def backward(self, output: Tensor) -> None:
        output.backward(self.gradient)

    def drop_gradients(self) -> None:
        for each in self.inputs:
            each.grad = None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        elif self.device == "mps":
            torch.mps.synchronize()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        self.phase = phase
        # The range is around the waiting, so that neither it nor what a profiler makes of it is timed.
        with annotate(phase):
            self.synchronize()
            began = time.perf_counter()
            yield
            self.synchronize()
            self.samples_ms.setdefault(phase, []).append((time.perf_counter() - began) * 1e3)
