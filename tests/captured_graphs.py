"""Captures training steps into CUDA graphs of paper, under profkit's hooks, and prints what was written down.

A node of the graph is whatever `launch` is called for while a capture runs. Nothing records until the replays.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

NODES: list[str] | None = None
OPENED: list[str] = []


def launch(kind: str) -> None:
    """Add a node to the graph that is being captured."""
    if NODES is not None:
        NODES.append(kind)


class PaperDriver:
    """Answers as `profkit.capture.hooks.graph_nodes.Driver` does."""

    def count(self, _stream: int) -> int | None:
        return None if NODES is None else len(NODES)

    def kinds(self, _stream: int) -> tuple[list[str], bool]:
        return list(NODES or ()), True


class PaperGraph:
    """Has the methods of ``torch.cuda.CUDAGraph`` that are watched."""

    def capture_begin(self) -> None:
        global NODES  # noqa: PLW0603  a process has one capture at a time
        NODES = []

    def capture_end(self) -> None:
        global NODES  # noqa: PLW0603
        NODES = None

    def replay(self) -> None:
        OPENED.append("replayed")


class _Launching(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        launch("kernel")
        return x * 2

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> Tensor:
        launch("kernel")
        launch("kernel")
        return gradients[0] * 2


class Layer(nn.Linear):
    """Launches a kernel forward and two backward, and a fill before."""

    def forward(self, x: Tensor) -> Tensor:
        launch("fill")
        return _Launching.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


class Optimizer(torch.optim.SGD):
    """Launches a kernel a step."""

    def step(self, closure: Any = None) -> Any:
        launch("kernel")
        return super().step(closure)


def main() -> None:
    """Print the captured graphs and the ranges that opened during the replays."""
    torch.manual_seed(0)
    torch.cuda.CUDAGraph = PaperGraph  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=7)  # type: ignore[assignment, return-value]
    from profkit.annotation import RangeObserver, observe_ranges
    from profkit.capture.hooks import graph_nodes
    from profkit.capture.hooks.hooks import Hooks
    from tests.hooked_workloads import Always

    graph_nodes.Driver = PaperDriver  # type: ignore[assignment, misc]
    kept: list[Any] = []
    hooks = Hooks(Always(lambda _number: None), depth=3, keep_graph=kept.append)
    if "plain" not in sys.argv:
        hooks.install()

    class Noted(RangeObserver):
        def opening(self, name: str) -> None:
            OPENED.append(name)

    model = nn.Sequential(Layer(4, 4), nn.Sequential(Layer(4, 4)))
    optimizer = Optimizer(model.parameters(), lr=0.1)

    def step() -> Tensor:
        loss: Tensor = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        return loss

    observe_ranges(Noted())
    losses = [step().item().hex()]
    before = list(OPENED)
    whole, broken, unseen = PaperGraph(), PaperGraph(), PaperGraph()
    whole.capture_begin()
    losses.append(step().item().hex())
    whole.capture_end()
    broken.capture_begin()
    PaperDriver.kinds = lambda *_: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    losses.append(step().item().hex())
    broken.capture_end()
    was_recording = hooks.is_recording
    whole.replay()
    OPENED.clear()
    hooks.start()
    for graph in (whole, broken, unseen):
        graph.replay()
    replays = list(OPENED)
    hooks.stop()
    print(
        json.dumps(
            {
                "before": before,
                "graphs": [asdict(graph) for graph in kept],
                "losses": losses,
                "was_recording": was_recording,
                "has_failed": hooks.is_over,
                "replays": replays,
            }
        )
    )


if __name__ == "__main__":
    main()
