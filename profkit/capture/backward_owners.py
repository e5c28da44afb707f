"""Say, on the autograd thread, which module's backward is running, so that the allocator writes it beside each block.

The autograd thread has no Python stack, so more than half of the bytes of a training step carry no frames. The
allocator keeps a text per thread (``torch.cuda.memory._set_memory_metadata``, torch 2.10 and later) and writes it into
each event. Hooks on the graph's own nodes set it: the node that made a module's output runs first of its backward, and
the node that made its input runs right after. Full backward hooks of modules would do too, but raise where something
changes a module's output in place (pytorch issue 61519).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from profkit.names import LOSS

PREFIX = "profkit:backward:"


def knows_owners() -> bool:
    """Return whether this torch can write a text beside each allocation."""
    return hasattr(torch.cuda.memory, "_get_memory_metadata") and hasattr(torch._C, "_cuda_setMemoryMetadata")


def set_owner(name: str) -> None:
    """Have the allocator write beside each block that this thread asks for from now on that ``name``'s backward runs.

    "" is what runs in the backward pass outside every module.
    """
    torch.cuda.memory._set_memory_metadata(PREFIX + name)


def clear_owner() -> None:
    """Have the allocator write nothing any more, unless it is the script's own text that it writes."""
    if torch.cuda.memory._get_memory_metadata().startswith(PREFIX):
        torch.cuda.memory._set_memory_metadata("")


def name_loss(loss: Tensor) -> None:
    """Name what the autograd thread allocates until it enters a module's backward: the loss's own.

    Without this the thread would still carry the name of the module that the last backward ended in.
    """
    if knows_owners() and loss.grad_fn is not None:
        loss.grad_fn.register_prehook(_set(LOSS))


@contextmanager
def backward_owners(module: nn.Module, on: bool) -> Iterator[None]:
    """Name the running module in the metadata of whatever the autograd thread allocates within the block."""
    if not on or not knows_owners():
        yield
        return
    handles = []
    for name, part in module.named_modules():
        around = name.rpartition(".")[0]
        handles.append(part.register_forward_pre_hook(_on_inputs(_set(around)), with_kwargs=True))
        handles.append(part.register_forward_hook(_on_outputs(_set(name)), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _set(name: str) -> Callable[[Any], None]:
    return lambda _gradients: set_owner(name)


def _on_inputs(hook: Callable[[Any], None]) -> Callable[..., None]:
    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        _hook_nodes((args, kwargs), hook)

    return before


def _on_outputs(hook: Callable[[Any], None]) -> Callable[..., None]:
    def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        _hook_nodes(output, hook)

    return after


def _hook_nodes(value: Any, hook: Callable[[Any], None]) -> None:
    """Run ``hook`` before the backward of each node that made a tensor in ``value``."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            value.grad_fn.register_prehook(hook)
    elif isinstance(value, dict):
        for part in value.values():
            _hook_nodes(part, hook)
    elif isinstance(value, list | tuple):
        for part in value:
            _hook_nodes(part, hook)
