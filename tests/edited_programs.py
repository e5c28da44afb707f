"""A made training run with blocks, a loss and Adam, small enough that its peaks are counted by hand. Sizes in MiB.

Without state: parameters 8, the batch 2. Each of two blocks allocates a temporary of 1, what it keeps for backward (8)
and its output (2); the loss keeps 20. So a step stands at 8 + 2 + 2 × 10 + 20 = 50 before backward, and its first node
adds 2: 52. From the second step on Adam's state adds 16: 68. The optimizer's step makes temporaries of 8.
"""

from __future__ import annotations

from typing import Any

from profkit.analysis.memory.opened_snapshot import OpenedSnapshot
from profkit.analysis.whatif import Program
from profkit.reading import open_snapshot
from tests.allocator_reference import MIB, Block
from tests.memory_captures import STACKS, Training

STACKS["loss"] = [("cross_entropy", "/x/site-packages/torch/nn/functional.py", 5), ("<module>", "train.py", 42)]
STACKS["step"] = [("adamw", "/x/site-packages/torch/optim/adamw.py", 9), ("<module>", "train.py", 43)]


class Blocks(Training):
    """A program of two blocks; ``keeps_gradients``: ``zero_grad(set_to_none=False)``."""

    def __init__(self, *, steps: int = 3, keeps_gradients: bool = False) -> None:
        self.gradients: list[Block] = []
        self.keeps_gradients = keeps_gradients
        super().__init__(steps=steps)

    def step(self, number: int, leaks: bool) -> None:
        self.mark("START", f"step {number}")
        given = [self.malloc(2 * MIB, "data", ("input", "x"))]
        kept = []
        self.mark("START", "forward")
        for block in range(2):
            self.mark("START", f"h.{block}")
            temporary = self.malloc(1 * MIB, "forward")
            kept.append(self.malloc(8 * MIB, "forward"))
            self.allocator.free(temporary)
            given.append(self.malloc(2 * MIB, "forward"))
            self.mark("END", f"h.{block}")
        self.mark("END", "forward")
        logits = self.malloc(20 * MIB, "loss")
        self.mark("START", "backward")
        self._backward(given, kept, logits)
        self.mark("END", "backward")
        self.mark("START", "Optimizer.step#AdamW.step")
        self._optimize()
        self.mark("END", "Optimizer.step#AdamW.step")
        self.mark("END", f"step {number}")

    def _backward(self, given: list[Block], kept: list[Block], logits: Block) -> None:
        above = self.malloc(2 * MIB, "backward")
        self.allocator.free(logits)
        self.allocator.free(given[2])
        made = []
        for block in (1, 0):
            name = ("gradient", f"w{block}")
            made.append(self.malloc(4 * MIB, "backward", None if self.gradients else name))
            below = self.malloc(2 * MIB, "backward")
            self.allocator.free(kept[block])
            self.allocator.free(above)
            self.allocator.free(given[block])
            above = below
            if self.gradients:
                self.allocator.free(made.pop())
        self.allocator.free(above)
        self.gradients = self.gradients or made

    def _optimize(self) -> None:
        if not self.states:
            names = [f"w{block}.{state}" for block in range(2) for state in ("exp_avg", "exp_avg_sq")]
            self.states = [self.malloc(4 * MIB, "state", ("optimizer_state", name)) for name in names]
        for temporary in [self.malloc(4 * MIB, "step") for _ in range(2)]:
            self.allocator.free(temporary)
        if not self.keeps_gradients:
            for gradient in self.gradients:
                self.allocator.free(gradient)
            self.gradients = []


def program_of(training: Training, folder: Any) -> Program:
    """Return a made run as edits see it."""
    return Program(opened(training, folder).device())


def opened(training: Training, folder: Any) -> OpenedSnapshot:
    """Write a made run and open it."""
    folder.mkdir(exist_ok=True)
    return open_snapshot(training.write_run(folder))
