"""Trains on the CPU, eagerly or by CUDA graphs of paper, and prints the work that profkit counts in one step.

``python graphed_work.py eager|whole|unseen``: the whole step captured by hand; a graph that was captured before
anybody watched. Every operator makes a node.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.captured_graphs import PaperDriver, PaperGraph, launch


class _Launching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        launch("kernel")
        return result


class _Capture(AbstractContextManager[None]):
    def __init__(self, graph: PaperGraph, **_: Any) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()


class Block(nn.Module):
    """Two products with a parameter, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(self.wide(self.norm(x)).relu())
        return x + torch.softmax(y @ y.T, -1) @ y


def main(way: str) -> None:
    """Print the ranges' work and what is missing in it, and whether hooks failed."""
    torch.manual_seed(0)
    paper: Any = torch.cuda
    paper.CUDAGraph = torch.cuda.graphs.CUDAGraph = PaperGraph  # type: ignore[assignment, misc]
    paper.current_stream = lambda *_: SimpleNamespace(cuda_stream=7)
    paper.synchronize = lambda: None
    paper.Stream, paper.stream = object, lambda _stream: nullcontext()
    from profkit.capture.hooks import graph_nodes
    from profkit.capture.hooks.hooks import Hooks
    from profkit.capture.work.counter import WorkCounter
    from tests.hooked_workloads import Always

    graph_nodes.Driver = PaperDriver  # type: ignore[assignment, misc]
    hooks = Hooks(Always(lambda _number: None), depth=3, keep_graph=lambda _graph: None, counts_work=True)
    if way != "unseen":
        hooks.install()
    model = nn.Sequential(nn.Linear(8, 8), Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)

    def step() -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph = PaperGraph()
    with _Launching():
        if way in ("whole", "unseen"):
            with _Capture(graph):
                held = step()
        if way == "unseen":
            hooks.install()
        hooks.start()
        counter = WorkCounter()
        counter.start()
        if way == "eager":
            held = step()
        else:
            graph.replay()
        counter.stop()
        hooks.stop()
    rows = [
        asdict(one) | {"path": [name for name in one.path if not name.startswith("step ")]}
        for one in counter.content().ranges
    ]
    print(
        json.dumps(
            {
                "rows": rows,
                "model_flops": counter.content().model_flops,
                "missing": counter.content().missing,
                "loss": held.item().hex(),
                "has_failed": hooks.is_over,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
