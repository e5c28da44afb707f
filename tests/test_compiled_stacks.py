"""Stacks in compiled code as the installed torch writes them: its generated frame, then the line it was made from."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from profkit.analysis.memory.stacks import StackFacts

pytestmark = pytest.mark.slow

STACKS: list[StackFacts] = []


def noted(x: Tensor) -> Tensor:
    """Note the stack as the allocator's history does, without the frames within this operation."""
    taken = torch._C._profiler.gather_traceback(True, False, False)
    (frames,) = torch._C._profiler.symbolize_tracebacks([taken])
    stack = tuple((frame["name"], frame["filename"], frame["line"]) for frame in frames)
    generated = [index for index, (_, file, _) in enumerate(stack) if "torchinductor" in file]
    STACKS.append(StackFacts(stack[generated[0] :] if generated else stack))
    return x.clone()


class Block(nn.Module):
    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.operation(torch.relu(x))


def test_compiled_code_bears_the_line_that_inductor_recorded_forward_and_backward() -> None:
    operation = torch.library.custom_op("profkit_test::noted", noted, mutates_args=())
    operation.register_fake(torch.empty_like)
    operation.register_autograd(lambda _context, gradient: operation(gradient))
    torch.compile(Block(operation))(torch.ones(4, requires_grad=True)).sum().backward()
    line = Block.forward.__code__.co_firstlineno + 1
    forward, backward = STACKS
    for stack in (forward, backward):
        assert stack.is_compiled
        assert stack.label.startswith(f"test_compiled_stacks.py:{line} forward (compiled code)")
