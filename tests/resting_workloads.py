"""Ways to train under hooks that rest in two of three steps, or in none: prints each one's steps as JSON.

``python resting_workloads.py [resting]``: for each way, the numbers of the steps that began in it, those that the hooks
rested in when they ended, the phases of every third step, which is never rested in, and the losses to the bit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from profkit.capture.hooks.hooks import Hooks

IS_RESTING = "resting" in sys.argv[1:]


class Steps:
    """Has the hooks rest, as a session that keeps every third step for its light record."""

    def __init__(self) -> None:
        self.hooks = Hooks(self, depth=1)
        self.begun: list[int] = []
        self.rested: list[int] = []
        self.phases: list[list[str]] = []

    def boundary(self, number: int) -> None:
        hooks = self.hooks
        if hooks.is_resting:
            self.rested.append(number - 1)
        spans = hooks.clock.take()
        if (number - 1) % 3 == 0:
            self.phases.append([span.phase for span in spans])
        self.begun.append(number)
        if number == 1:
            hooks.steps.settle()
        is_kept = number % 3 == 0
        hooks.clock.start() if is_kept else hooks.clock.stop()
        hooks.rest(is_wanted=IS_RESTING and not is_kept)

    def hooks_failed(self, error: Exception) -> None:
        raise error

    def taken(self, losses: list[str]) -> dict[str, Any]:
        """Return what was seen since the last time."""
        found = {"begun": self.begun, "rested": self.rested, "phases": self.phases, "losses": losses}
        self.begun, self.rested, self.phases = [], [], []
        return found


class Model(nn.Module):
    """Two layers, of which the second may be computed again in the backward pass."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.recomputes = nn.Linear(4, 4), nn.Linear(4, 1), recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y = checkpoint(self.second, x, use_reentrant=False) if self.recomputes else self.second(x)
        return y.square().mean()  # type: ignore[no-any-return]


class Trainer(nn.Module):
    """A module whose call is a whole training."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, _x: Tensor) -> list[str]:
        return plain(self.model)


def plain(model: nn.Module, rounds: int = 1) -> list[str]:
    """A loop over batches; a step has ``rounds`` forward and backward passes."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number, x in enumerate(DataLoader(torch.randn(12 * rounds, 4), batch_size=1), 1):
        loss = model(x)
        loss.backward()
        losses.append(loss.item().hex())
        if number % rounds == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def accumulated(model: nn.Module) -> list[str]:
    """Two passes a step."""
    return plain(model, 2)


def with_closure(model: nn.Module) -> list[str]:
    """The passes run in a function that the optimizer calls."""
    optimizer, losses = torch.optim.LBFGS(model.parameters(), max_iter=2), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(1, 4))
        loss.backward()
        losses.append(loss.item().hex())
        return loss

    for _ in range(12):
        optimizer.step(closure)
    return losses


def in_turn(model: nn.Module) -> list[str]:
    """Two optimizers, whose steps are one together."""
    children = list(model.children())
    optimizers, losses = [torch.optim.SGD(child.parameters(), lr=0.1) for child in children], []
    for _ in range(12):
        loss = model(torch.randn(1, 4))
        loss.backward()
        losses.append(loss.item().hex())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def in_a_module(model: nn.Module) -> list[str]:
    """All of it is a call of a module."""
    return Trainer(model)(torch.ones(1))  # type: ignore[no-any-return]


def in_backward(model: nn.Module) -> list[str]:
    """The optimizer works within the backward pass."""
    losses, parameters = [], list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def update(_parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameters[0].register_post_accumulate_grad_hook(update)
    for _ in range(12):
        loss = model(torch.randn(1, 4))
        loss.backward()
        losses.append(loss.item().hex())
    return losses


def main() -> None:
    """Train in each way, after two steps that only show what a step is."""
    torch.manual_seed(0)
    steps = Steps()
    steps.hooks.install()
    ways: dict[str, tuple[Callable[[nn.Module], list[str]], nn.Module]] = {
        "first": (plain, Model()),
        "plain": (plain, Model()),
        "recomputing": (plain, Model(recomputes=True)),
        "accumulated": (accumulated, Model()),
        "closure": (with_closure, Model()),
        "in turn": (in_turn, Model()),
        "in a module": (in_a_module, Model()),
        "in backward": (in_backward, Model()),
        "after that": (plain, Model()),
    }
    found = {name: steps.taken(train(model)) for name, (train, model) in ways.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
