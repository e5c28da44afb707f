"""Ranges for modules' backward work, opened and closed by hooks on the graph's own nodes.

Full backward hooks of modules raise where something changes a module's output in place (pytorch issue 61519). A hook
that runs before a node holds nothing, changes nothing, and fires on the thread that runs the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from profkit.capture.open_ranges import Call

_MARK = "profkit"
_NESTING = 4


def mark_nodes(value: Any, call: Call | None, entered: Callable[[Call | None], None]) -> None:
    """Call ``entered(call)`` before the backward of each node that made a tensor in ``value``.

    A node keeps the first call that it is marked with: the innermost one in whose forward it was made, because
    what a module returns is seen as its output before it is seen as the output of the module around it, or as the
    next one's input.
    """
    for node in _nodes(value, _NESTING):
        if _MARK not in node.metadata:
            _mark(node, call, entered)


def mark_keywords(value: Any, call: Call, entered: Callable[[Call | None], None]) -> None:
    """Mark the nodes of ``call``'s keyword arguments, which torch shows when the call has been made, not before.

    Marks that they got during the call are replaced: these nodes were made before it.
    """
    for node in _nodes(value, _NESTING):
        mark = node.metadata.get(_MARK)
        if mark is None:
            _mark(node, call.around, entered)
        elif _is_within(mark[0], call):
            mark[0] = call.around


def _mark(node: Any, call: Call | None, entered: Callable[[Call | None], None]) -> None:
    mark = [call]
    node.metadata[_MARK] = mark
    node.register_prehook(lambda _gradients: entered(mark[0]))


def _is_within(call: Call | None, around: Call) -> bool:
    while call is not None and call is not around:
        call = call.around
    return call is around


def _nodes(value: Any, nesting: int) -> Iterator[Any]:
    """Yield the nodes that made the tensors in ``value``: itself, or in lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
        return
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in fields(value)]
    if nesting:
        for part in parts:
            yield from _nodes(part, nesting - 1)


def running_graph() -> int:
    """Return the number of the backward pass that this thread runs, -1 if none."""
    return int(torch._C._current_graph_task_id())


def at_graph_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward pass ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
