"""Marks nodes of the graph by who made them, where no module's inputs and outputs show it: their backward must not run
in the range of whichever module was entered last.

- What the script computes between calls of modules, down to the modules' outputs: a node's sequence number says whether
  it was made while an outermost call ran.
- A second derivative's nodes, which autograd makes while it works out the first one: what the graph behind the first
  derivative has more than the graph before it had. ``torch.func`` always asks for such a graph, and mostly drops it:
  within its transforms nothing is marked.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from profkit.capture.hooks.backward_nodes import (
    Carrier,
    NodeHook,
    is_creating_graph,
    is_marked,
    mark_node,
    mark_nodes,
)
from profkit.capture.hooks.open_ranges import Call

_LEAF = "torch::autograd::AccumulateGrad"
_CALLS = 1000
"""Of how many of the last outermost calls the numbers are kept."""


class OutsideNodes:
    """Sees outermost calls and backward calls, on the threads that make them."""

    def __init__(self) -> None:
        self._calls = _Calls()
        self._before: dict[object, set[Any]] = {}

    def call_begins(self, carrier: Carrier) -> None:
        """An outermost call of a module begins."""
        self._calls.begin = carrier.passed = next_number()

    def call_ended(self) -> None:
        """It has ended."""
        self._calls.spans.append((self._calls.begin, next_number()))

    def passes(self, values: Iterable[Any], hook: NodeHook, call: Call | None, carrier: Carrier) -> None:
        """``call`` calls another module or ends, and passes on ``values``, which are marked with ``hook``.

        Of the nodes that it made itself since the last such moment, backward runs the last one first.
        """
        for value in values:
            # As `mark_nodes` does of a tensor, twice for each call of a module: here it costs no further call.
            if not isinstance(value, Tensor):
                mark_nodes(value, hook, carrier)
            elif (node := value.grad_fn) is not None:
                mark_node(node, hook, carrier)
        end = next_number()
        if end != carrier.passed:
            if call is not None and carrier.newest != end - 1:
                self._calls.own.append((carrier.passed, end, call))
            carrier.passed = end
        carrier.newest = -1

    def backward_begins(self, key: object, tensors: Sequence[Any], mark: Callable[[Any, Call | None], None]) -> None:
        """A backward call begins; ``tensors`` holds what it differentiates.

        ``mark`` marks a node as made by a call, None for none.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if self._calls.spans:
            for node in self._made_between_calls(_nodes_of(tensors[0])):
                mark(node, None)
        if self._calls.own:
            for node, call in self._made_by_calls(_nodes_behind(tensors[0])):
                mark(node, call)
        if is_creating_graph():
            self._before[key] = _nodes_behind(tensors[0])

    def awaits_end(self, key: object) -> bool:
        """Return whether `backward_ended` has anything to do for a backward call that has ended."""
        return key in self._before

    def backward_ended(self, key: object, gradients: Any, mark: Callable[[Any, Call | None], None]) -> None:
        """It has ended, and returned ``gradients``; ``mark`` is for the second derivative's work."""
        before = self._before.pop(key, None)
        if before is not None:
            for node in _nodes_behind(gradients, before):
                mark(node, None)

    def _made_between_calls(self, nodes: Iterable[Any]) -> Iterator[Any]:
        """Yield ``nodes`` and those behind them, but none that a module's call made, nor what is behind that."""
        waiting, seen = list(nodes), set()
        spans = list(self._calls.spans)
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or is_marked(node) or node.name() == _LEAF:
                continue
            seen.add(node)
            number = node._sequence_nr()
            at = bisect_right(spans, (number, number)) - 1
            if at < 0 or number >= spans[at][1]:
                waiting += [behind for behind, _ in node.next_functions]
                yield node

    def _made_by_calls(self, nodes: Iterable[Any]) -> Iterator[tuple[Any, Call]]:
        """Yield of ``nodes`` those that calls made and passed on to nobody."""
        own = list(self._calls.own)
        ends = [end for _, end, _ in own]
        for node in nodes:
            number = node._sequence_nr()
            at = bisect_right(ends, number)
            if at < len(own) and own[at][0] <= number:
                yield node, own[at][2]


class _Calls(threading.local):
    """What this thread's calls made, by sequence numbers, in order.

    ``spans`` are the first of each outermost call and the first after it. ``own`` are the first of what a call made
    itself and passed on to nobody, the first after that, and the call.
    """

    def __init__(self) -> None:
        self.begin = 0
        self.spans: deque[tuple[int, int]] = deque(maxlen=_CALLS)
        self.own: deque[tuple[int, int, Call]] = deque(maxlen=_CALLS)


next_number: Callable[[], int] = torch.autograd._get_sequence_nr
"""Returns the sequence number of the node that this thread makes next."""


def _nodes_of(value: Any) -> list[Any]:
    """Return the nodes that made a tensor, or a sequence of them."""
    tensors = value if isinstance(value, list | tuple) else [value]
    return [one.grad_fn for one in tensors if isinstance(one, Tensor)]


def _nodes_behind(value: Any, known: Set[Any] = frozenset()) -> set[Any]:
    """Return the nodes that made the tensors in ``value``, but none that is known, nor what is behind it.

    Leaves' own nodes are left out: they stay from step to step.
    """
    waiting = _nodes_of(value)
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known and node not in found and node.name() != _LEAF:
            found.add(node)
            waiting += [behind for behind, _ in node.next_functions]
    return found
