"""Sees the calls that begin a backward pass: ``torch.autograd.backward``, which ``Tensor.backward`` calls, and
``torch.autograd.grad``, which ``torch.func``'s transforms call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch

from profkit.capture.compilations import is_compiling
from profkit.capture.patches import outside_dynamo, patch

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
