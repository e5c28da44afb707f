"""Backward passes: the calls that begin them, and ranges for modules' backward work by hooks on the graph's own nodes.

Full backward hooks of modules raise where something changes a module's output in place (pytorch issue 61519). A hook
that runs before a node holds nothing, changes nothing, and fires on the thread that runs the node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from profkit.capture.compilations import is_compiling
from profkit.capture.patches import outside_dynamo, patch

MARK = "profkit"
"""What the notes on a marked node hold."""
_NESTING = 4


NodeHook = Callable[[Any], None]
"""Is called with a gradient or nothing before a node runs: the call that made the node."""


class Carrier:
    """What carries hooks to nodes: each thread needs one of its own.

    ``newest`` is the highest sequence number of the nodes that were marked with it since somebody last set it to -1.
    ``passed`` is the number of the first node that was made since its thread's calls last passed anything on.
    """

    __slots__ = ("newest", "passed", "tensor")

    def __init__(self) -> None:
        self.newest = -1
        self.passed = 0
        with torch.inference_mode(False):
            self.tensor = torch.empty(0, device="cpu")


def mark_nodes(value: Any, hook: NodeHook, carrier: Carrier, nesting: int = _NESTING) -> None:
    """Call ``hook`` before the backward of each node that made a tensor in ``value``.

    ``value`` is a tensor, or holds some: a list, tuple, dict or dataclass. A node keeps the first hook that it is
    marked with: that of the innermost call in whose forward it was made, because what a module returns is seen as its
    output before it is seen as the output of the module around it, or as the next one's input.

    Args:
        carrier: this thread's.
    """
    if isinstance(value, Tensor):
        node = value.grad_fn
        if node is not None:
            mark_node(node, hook, carrier)
    elif not nesting or value is None:
        return
    elif isinstance(value, list | tuple):
        for part in value:
            mark_nodes(part, hook, carrier, nesting - 1)
    elif isinstance(value, dict):
        for part in value.values():
            mark_nodes(part, hook, carrier, nesting - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            mark_nodes(getattr(value, field.name, None), hook, carrier, nesting - 1)


def mark_node(node: Any, hook: NodeHook, carrier: Carrier) -> None:
    """Mark one node, as `mark_nodes` does."""
    notes = node.metadata
    if MARK in notes:
        return
    notes[MARK] = True
    # As `Tensor.register_hook` does: what the carrier has for hooks is what the node takes over.
    # `Node.register_prehook` makes a handle for each, which takes longer than all the rest of a range.
    carrier.tensor._backward_hooks = {0: hook}
    node._register_hook_dict(carrier.tensor)
    number = node._sequence_nr()
    if number > carrier.newest:  # noqa: PLR1730  a call of max takes longer
        carrier.newest = number


def is_marked(node: Any) -> bool:
    """Return whether a node is marked."""
    return MARK in node.metadata


running_graph: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread runs, -1 if none."""


def watch_graph_end(
    tensors: Iterable[Any], callback: Callable[[], None], carrier: Carrier
) -> Callable[[], None] | None:
    """Call ``callback`` once the backward pass of ``tensors`` that begins now has run all its nodes.

    It comes before what was to be called at the pass's end by nodes that ran, such as DDP's and FSDP's waits for
    reductions. Return what ends the watch; None where there is nothing to watch, or Dynamo compiles backward passes.

    Args:
        carrier: this thread's.
    """
    if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False):
        return None
    for one in tensors:
        node = one.grad_fn if isinstance(one, Tensor) else None
        if node is not None:
            hooks = {0: lambda _gradient: at_graph_end(callback)}
            carrier.tensor._backward_hooks = hooks
            node._register_hook_dict(carrier.tensor)
            return hooks.clear
    return None


def at_graph_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward pass ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


Begins = Callable[[object, Sequence[Any]], None]
Ends = Callable[[object, Any], None]


def watch_backward_calls(begins: Begins, ends: Ends) -> None:
    """Call ``begins(key, tensors)`` before each backward call of this process and ``ends(key, result)`` after it.

    ``tensors`` holds what is differentiated: a tensor, or a sequence of them. ``result`` is what the call returns, None
    if it raised. ``key`` is another object for each call.
    """
    for target in ("torch.autograd.backward", "torch.autograd.grad"):
        patch(target, lambda backward: _watched(backward, begins, ends))


def is_creating_graph() -> bool:
    """Return whether a backward call runs, or is beginning or ending, that makes a graph for a second derivative."""
    return _creating_graph.count > 0


def _watched(backward: Callable[..., Any], begins: Begins, ends: Ends) -> Callable[..., Any]:
    names = list(signature(backward).parameters)
    place = names.index("create_graph")

    def begun(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, bool] | None:
        if is_compiling():
            return None
        key, tensors = object(), args[0] if args else kwargs.get(names[0])
        creates_graph = bool(args[place] if len(args) > place else kwargs.get("create_graph"))
        _creating_graph.count += creates_graph
        begins(key, (tensors,))
        return key, creates_graph

    def ended(key: object, creates_graph: bool, result: Any) -> None:
        ends(key, result)
        _creating_graph.count -= creates_graph

    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(*args, **kwargs)
        call = outside_dynamo(begun, args, kwargs)
        if call is None:
            return backward(*args, **kwargs)
        result = None
        try:
            result = backward(*args, **kwargs)
            return result
        finally:
            outside_dynamo(ended, *call, result)

    return watched


class _Creating:
    """How many calls that make a graph run now: autograd's threads do not say for which call they work."""

    count = 0


_creating_graph = _Creating()
