"""Ranges for modules' backward work, opened and closed by hooks on the graph's own nodes.

Full backward hooks of modules raise where something changes a module's output in place (pytorch issue 61519). A hook
that runs before a node holds nothing, changes nothing, and fires on the thread that runs the node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from profkit.capture.open_ranges import Call

_MARK = "profkit"
_NESTING = 4


def mark_nodes(value: Any, call: Call | None, entered: Callable[[Call | None], None], nesting: int = _NESTING) -> None:
    """Have ``entered(call)`` run before the backward of each node that made a tensor in ``value``.

    A node keeps the first call that it is marked with: the innermost one in whose forward it was made, because
    what a module returns is seen as its output before it is seen as the output of the module around it, or as the
    next one's input. ``value`` is looked into through lists, tuples, dicts and dataclasses.
    """
    if isinstance(value, Tensor):
        node = value.grad_fn
        if node is not None and _MARK not in node.metadata:
            node.metadata[_MARK] = True
            node.register_prehook(lambda _gradients: entered(call))
    elif nesting == 0:
        return
    elif isinstance(value, dict):
        for part in value.values():
            mark_nodes(part, call, entered, nesting - 1)
    elif isinstance(value, list | tuple):
        for part in value:
            mark_nodes(part, call, entered, nesting - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            mark_nodes(getattr(value, field.name, None), call, entered, nesting - 1)


def running_graph() -> int:
    """Return the number of the backward pass that this thread is at work for, -1 if none."""
    return int(torch._C._current_graph_task_id())


def at_graph_end(callback: Callable[[], None]) -> None:
    """Have ``callback`` run when the backward pass that is running now has been gone through."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
