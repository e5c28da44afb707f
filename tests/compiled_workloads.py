"""Compiles small models in many ways and prints what Dynamo made of each: ``python compiled_workloads.py [hooked]``.

Hooked, profkit's hooks come after Dynamo was loaded and has compiled one model, and open ranges from then on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

_ANEW = 1
"""How often Dynamo compiles a frame anew here; by itself 8 times, which takes long."""


class Block(nn.Module):
    """A linear layer called twice, with a break of the graph between, and with a forward hook of its own, or not."""

    def __init__(self, breaks: bool, has_hook: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.breaks = breaks
        if has_hook:
            self.linear.register_forward_hook(lambda _module, _args, _output: None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.linear(x).sigmoid()  # type: ignore[no-any-return]


class Model(nn.Module):
    """More blocks than Dynamo compiles a frame anew here."""

    def __init__(self, breaks: bool, has_hook: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks, has_hook) for _ in range(_ANEW + 2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _whole(model: Model, compile_: Callable[..., Any]) -> Any:
    return compile_(model)


def _function(model: Model, compile_: Callable[..., Any]) -> Any:
    return compile_(lambda x: model(x) * 2)


def _in_place(model: Model, compile_: Callable[..., Any]) -> Any:
    model.compile(backend=_backend)
    return model


def _blocks(model: Model, compile_: Callable[..., Any]) -> Any:
    model.blocks = nn.ModuleList(map(compile_, model.blocks))
    return model


def _optimizer(model: Model, compile_: Callable[..., Any]) -> Any:
    """Return the model as it is, with a compiled function that is only an optimizer's step after each call of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = compile_(lambda: optimizer.step())  # noqa: PLW0108  as programs write it; the method compiles otherwise

    def called(x: Tensor) -> Tensor:
        if next(model.parameters()).grad is not None:
            step()
            optimizer.zero_grad()
        output: Tensor = model(x)
        return output

    return called


def _step(model: Model, compile_: Callable[..., Any]) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    compiled = compile_(step)
    return lambda x: compiled(x).requires_grad_()


_graphs: list[int] = []


def _backend(graph: Any, _inputs: Any) -> Any:
    _graphs.append(len(graph.graph.nodes))
    return graph.forward


def _train(called: Any) -> list[Any]:
    """Return the losses, the nodes of each graph, and how many graphs were broken and frames looked at."""
    torch._dynamo.utils.counters.clear()
    _graphs.clear()
    losses = []
    for _ in range(3):
        loss = called(torch.ones(2, 4)).sum()
        loss.backward()
        losses.append(loss.item().hex())
    counters = torch._dynamo.utils.counters
    return [losses, list(_graphs), sum(counters["graph_break"].values()), counters["frames"]["total"]]


def _install() -> None:
    from profkit.capture.hooks.hooks import Hooks
    from tests.hooked_workloads import Always

    hooks = Hooks(Always(lambda _number: hooks.start()), depth=9)
    hooks.install()


def main() -> None:
    """Print a line for each way."""
    torch._dynamo.config.recompile_limit = _ANEW
    torch.manual_seed(0)
    first = torch.compile(Model(breaks=False, has_hook=False), backend=_backend)
    found = {"first": _train(first)}
    if "hooked" in sys.argv:
        _install()
    found["first again"] = _train(first)
    for way in (_whole, _function, _in_place, _blocks, _optimizer, _step):
        for breaks, has_hook in ((False, False), (True, True)):
            torch._dynamo.reset()
            torch.manual_seed(0)
            called = way(Model(breaks, has_hook), partial(torch.compile, backend=_backend))
            found[f"{way.__name__}, breaks={breaks}, has_hook={has_hook}"] = _train(called)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
