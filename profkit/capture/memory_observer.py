"""Write the owners of a built-in model's memory into the ledger as its steps and phases pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from profkit.capture.backward_owners import name_loss
from profkit.capture.owners import OwnerLedger, now_us, when_saved
from profkit.capture.step import StepObserver, TrainingStep
from profkit.names import BACKWARD, OPTIMIZER


class MemoryObserver(StepObserver):
    """Notes parameters, buffers and inputs at once, gradients after backward, the optimizer's state after its step.

    Gradients live from backward to the end of the optimizer's step, so a look at the step's end would miss them.
    """

    def __init__(self, owners: OwnerLedger, step: TrainingStep, *, saved: bool) -> None:
        self._owners = owners
        self._step = step
        self._saved = saved
        owners.note_module(step.module)
        owners.note_inputs([("tokens", step.inputs)])

    @contextmanager
    def step(self, name: str, number: int | None) -> Iterator[None]:
        start_us = now_us()
        self._owners.begin_step(number)
        yield
        self._owners.note_step(name, start_us)

    def forward(self) -> AbstractContextManager[object]:
        return when_saved(self._owners.note_saved) if self._saved else nullcontext()

    def loss_made(self, loss: Tensor) -> None:
        name_loss(loss)

    def phase_done(self, name: str) -> None:
        if name == BACKWARD:
            self._owners.note_gradients(self._step.module.named_parameters())
        if name == OPTIMIZER and self._step.optimizer is not None:
            names = {parameter: name for name, parameter in self._step.module.named_parameters()}
            self._owners.note_optimizer(self._step.optimizer, names)
