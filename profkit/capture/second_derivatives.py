"""Marks the nodes of a second derivative, which autograd makes while it works out the first one.

No module's forward made them, so that nothing else marks them: their backward would run in the range of whichever
module was entered last. They are what the graph behind the first derivative has more than the graph before it had.
``torch.func`` always asks for such a graph, and mostly drops it: within its transforms nothing is marked.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from profkit.capture.backward_calls import is_creating_graph
from profkit.capture.backward_nodes import Entered, mark_node
from profkit.capture.open_ranges import Call

_LEAF = "torch::autograd::AccumulateGrad"


class SecondDerivatives:
    """Is told of backward calls; those that make no graph cost nothing."""

    def __init__(self, entered: Entered) -> None:
        self._entered = entered
        self._before: dict[object, set[Any]] = {}

    def first_begins(self, key: object, tensors: Sequence[Any]) -> None:
        """A backward call begins; ``tensors`` holds what it differentiates."""
        if is_creating_graph() and torch._C._functorch.peek_interpreter_stack() is None:
            self._before[key] = _nodes_behind(tensors[0])

    def first_ended(self, key: object, gradients: Any, call: Call | None) -> None:
        """It has ended: what was made meanwhile is the work of ``call``, or of none."""
        before = self._before.pop(key, None)
        if before is not None:
            for node in _nodes_behind(gradients, before):
                mark_node(node, call, self._entered)


def _nodes_behind(value: Any, known: Set[Any] = frozenset()) -> set[Any]:
    """Return the nodes that made the tensors in ``value``, but none that is known, nor what is behind it.

    Leaves' own nodes are left out: they stay from step to step.
    """
    tensors = value if isinstance(value, list | tuple) else [value]
    waiting = [one.grad_fn for one in tensors if isinstance(one, Tensor)]
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known and node not in found and node.name() != _LEAF:
            found.add(node)
            waiting += [behind for behind, _ in node.next_functions]
    return found
