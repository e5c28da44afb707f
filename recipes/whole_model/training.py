"""A training step of profkit's transformer, each phase timed alone; also a script that `profkit run` can record.

``python -m recipes.whole_model.training '{"size": "tiny", "context": 128, …}'`` runs the steps of one `Work`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from profkit import annotate
from profkit.models.transformer import TransformerLM
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER, step_range
from recipes.common.measuring import run_short, synchronize
from recipes.common.recipe import Device
from recipes.whole_model.cells import FORWARD_ONLY, TRAIN, Work

BUILDING = "model"
"""The phase before the first step: parameters, tables and the batch."""


class Training:
    """A model, its optimizer and one batch of random tokens. Every step sees the same batch and copies no input."""

    def __init__(self, work: Work, device: Device) -> None:
        self.work, self.device = work, device
        self.phase = BUILDING
        """The phase that is running, or that ran last."""

    def build(self) -> None:
        """Make the model and the batch; nothing runs yet."""
        work = self.work
        torch.manual_seed(0)
        if work.dtype == "tf32":
            torch.set_float32_matmul_precision("high")
        with torch.device(self.device):
            self.module = TransformerLM(work.preset, work.context, work.checkpoint_layers)
            tokens = torch.randint(work.preset.vocab_size, (work.batch, work.context + 1))
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]
        self.optimizer = torch.optim.AdamW(self.module.parameters()) if work.passes == TRAIN else None
        self.model = torch.compile(self.module, dynamic=False) if work.compiled else self.module

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def run(self) -> dict[str, float]:
        """Run one step; return the milliseconds of its phases, of forward, loss and backward together, and of all."""
        times: dict[str, float] = {}
        began = time.perf_counter()
        if self.work.passes == FORWARD_ONLY:
            with torch.no_grad(), self._timed(FORWARD, times), self.autocast():
                self.model(self.inputs)
            return {**times, "step": (time.perf_counter() - began) * 1e3}
        with self._timed(FORWARD, times), self.autocast():
            logits = self.model(self.inputs)
        with self._timed(LOSS, times), self.autocast():
            loss = cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        with self._timed(BACKWARD, times):
            loss.backward()
        both = {"forward_backward": sum(times.values())}
        if self.optimizer is None:
            self.module.zero_grad(set_to_none=True)
        else:
            with self._timed(OPTIMIZER, times):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        return {**times, **both, "step": (time.perf_counter() - began) * 1e3}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.work.dtype == "bf16")

    @contextmanager
    def _timed(self, phase: str, times: dict[str, float]) -> Iterator[None]:
        """Time a phase in its range; at its end wait for the device, so that its time holds all of its work."""
        self.phase = phase
        began = time.perf_counter()
        with annotate(phase):
            yield
            synchronize(self.device)
        times[phase] = (time.perf_counter() - began) * 1e3


def main(setting: str) -> None:
    """Run the steps of a `Work` given as JSON, with ``device``, ``steps`` and the file ``result`` added.

    The result is JSON: null, or the phase in which memory ran out with the bytes that were requested and free.
    """
    given = json.loads(setting)
    device, steps, result = (given.pop(key) for key in ("device", "steps", "result"))
    training = Training(Work(**given), device)

    def run() -> None:
        training.build()
        for number in range(steps):
            with annotate(step_range(number)):
                training.run()

    shortage = run_short(run, device)
    Path(result).write_text(json.dumps(shortage and {"phase": training.phase, **shortage}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
