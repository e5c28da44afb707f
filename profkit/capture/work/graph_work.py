"""What a CUDA graph computes: noted operator by operator while it is captured, and done again by each replay.

A replay runs no Python, so nobody sees operators in it. It does what was captured: the operators that made nodes of the
graph, in the ranges of the capture. What ran meanwhile without a node, on the CPU, is no part of a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from profkit.capture.work.operator_work import Buffers, OperatorMode, OperatorWork, describe_call


@dataclass(frozen=True)
class GraphPart:
    """Nodes of a graph that were made one after another in the same ``ranges``, and what made them."""

    node_count: int
    ranges: tuple[str, ...]
    operators: tuple[OperatorWork, ...] = ()


@dataclass(frozen=True)
class GraphWork:
    """What a replay does, in order; ``buffers`` is the memory that it touches."""

    parts: tuple[GraphPart, ...]
    buffers: Buffers


ReplayObserver = Callable[[GraphWork | None], None]

replay_observers: list[ReplayObserver] = []
"""They are called on the thread of each replay, within its range, with what it does; None: that is not known."""


class CapturedOperators(OperatorMode):
    """Notes what is captured.

    Args:
        count_nodes: says how many nodes the graph has so far.
        fail: is called with what went wrong; nothing is noted any more then.
    """

    def __init__(self, count_nodes: Callable[[], int | None], fail: Callable[[Exception], None]) -> None:
        super().__init__()
        self._count_nodes = count_nodes
        self._fail = fail
        self.buffers: Buffers = {}
        self.since: list[OperatorWork] = []
        """What made nodes since somebody last took it."""

    def begins(self) -> int | None:
        return self._count_nodes()

    def ended(self, begun: int | None, func: Any, args: Sequence[Any], kwargs: dict[str, Any], returned: Any) -> None:
        try:
            if self._count_nodes() != begun:
                work = describe_call(func, args, kwargs, returned, self.buffers)
                self.since += [] if work is None else [work]
        except Exception as error:  # the script's capture goes on
            self._fail(error)
