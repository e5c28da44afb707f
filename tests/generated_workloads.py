"""Trains small compiled models: ``python generated_workloads.py [hooked]``, with Inductor's cache in the environment.

It prints the losses, what Dynamo counted and, hooked, the ranges of one recorded step of each case as JSON. A model is
small and a part often repeated, because a C++ compiler takes seconds for each fused kernel that no cache has.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HOOKED = "hooked" in sys.argv


class Block(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).sin()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(hidden) + x


class Model(nn.Module):
    def __init__(self, breaks: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(breaks) for _ in range(2))
        self.head = nn.Linear(8, 4)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x).sum()


class Twin(nn.Module):
    """Computes what `Model` does, by other names: Inductor's cache has its code already."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return self.out(x).sum()


class GivenBlocks(Model):
    """Has each of its blocks run by one compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.run = torch.compile(lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = self.run(block, x)
        return self.head(x).sum()


def _compile_blocks(model: Any) -> Any:
    model.h = nn.ModuleList(map(torch.compile, model.h))
    return model


def _compile_in_place(model: Any) -> Any:
    model.compile()
    return model


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "eager": (Model, lambda model: model),
    "whole": (Model, torch.compile),
    "twin": (Twin, torch.compile),
    "in place": (Model, _compile_in_place),
    "blocks": (Model, _compile_blocks),
    "function": (Model, lambda model: torch.compile(lambda x: model(x) * 2)),
    "given": (GivenBlocks, lambda model: model),
    "nested": (Model, lambda model: torch.compile(_compile_blocks(model))),
    "breaks": (lambda: Model(breaks=True), torch.compile),
    "checkpointed": (lambda: Model(checkpointed=True), torch.compile),
    "dynamic": (Model, lambda model: torch.compile(model, dynamic=True)),
}
"""A model, and what makes of it what is called."""


def _step(model: nn.Module, called: Callable[[Tensor], Tensor], update: Callable[[], None], x: Tensor) -> str:
    loss = called(x)
    loss.backward()
    update()
    model.zero_grad()
    return float(loss).hex()


def _run(case: str, record: Callable[[], Any]) -> dict[str, Any]:
    gc.collect()  # models of the same class have names that tell them apart
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    make, compiled = CASES[case]
    model = make()
    called = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = optimizer.step
    if case == "whole":

        @torch.compile
        def update() -> None:
            optimizer.step()

    losses = [_step(model, called, update, torch.randn(3, 8)) for _ in range(2)]
    with record() as ranges:
        losses.append(_step(model, called, update, torch.randn(5 if case == "dynamic" else 3, 8)))
    counters = torch._dynamo.utils.counters
    return {
        "losses": losses,
        "dynamo": {name: dict(counters[name]) for name in ("frames", "stats", "graph_break", "recompiles")},
        "ranges": ranges,
    }


def _hooked(file: Path) -> Any:
    from profkit.capture.compiled.watch import CompiledCode
    from profkit.capture.hooks.hooks import Hooks
    from tests.hooked_workloads import Always
    from tests.observed_ranges import observed_ranges

    hooks = Hooks(Always(lambda _number: None), 9)
    hooks.install()
    compiled = CompiledCode(hooks, file)
    compiled.install()

    @contextmanager
    def record() -> Iterator[list[list[str]]]:
        with observed_ranges() as observed:
            hooks.start()
            yield observed.stacks
            hooks.stop()

    return record, compiled


@contextmanager
def _not_hooked() -> Iterator[None]:
    yield None


def main() -> None:
    record, compiled = _hooked(Path(sys.argv[-1])) if HOOKED else (_not_hooked, None)
    wanted = [name for name in CASES if name in sys.argv] or CASES
    found = {name: _run(name, record) for name in wanted}
    print(json.dumps({**found, "failure": None if compiled is None else compiled.failure}))


main()
