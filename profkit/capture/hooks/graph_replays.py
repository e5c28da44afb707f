"""Where a script captures a CUDA graph and where it replays one: around the methods of ``torch.cuda.CUDAGraph``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from profkit.capture.hooks.graph_nodes import GraphNodes


class GraphListener(Protocol):
    """Sees captures and replays, on the thread that makes them; it returns the step that begins there, if any."""

    def capture_begins(self, graph: Any) -> int | None:
        """What follows is captured into ``graph``."""

    def capture_ends(self) -> int | None:
        """The capture has ended, or failed."""

    def replay_begins(self, graph: Any) -> int | None:
        """``graph`` is about to be replayed."""

    def replay_ends(self, graph: Any) -> int | None:
        """``graph`` has been launched, or this failed."""


_Event = Callable[[Any], None]


def watch_graphs(listener: GraphListener, show: Callable[..., None], nodes: GraphNodes) -> None:
    """Begin to watch; what torch does not have under these names is not watched.

    Args:
        listener: what sees them.
        show: calls the listener's method that it is given with the rest of its arguments; it never raises.
        nodes: what notes the nodes of the graphs, while a capture runs and within a step.
    """
    steps: dict[str, tuple[list[_Event], list[_Event]]] = {
        "capture_begin": ([partial(show, listener.capture_begins)], [nodes.capture_began]),
        "capture_end": ([lambda _graph: nodes.capture_ends()], [lambda _graph: show(listener.capture_ends)]),
        "replay": (
            [partial(show, listener.replay_begins), nodes.replay_begins],
            [nodes.replay_ends, partial(show, listener.replay_ends)],
        ),
    }
    for name, (begins, ends) in steps.items():
        method = getattr(torch.cuda.CUDAGraph, name, None)
        if method is not None:
            setattr(torch.cuda.CUDAGraph, name, _around(method, begins, ends))


def _around(method: Callable[..., Any], begins: Sequence[_Event], ends: Sequence[_Event]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(graph: Any, *args: Any, **kwargs: Any) -> Any:
        for event in begins:
            event(graph)
        try:
            return method(graph, *args, **kwargs)
        finally:
            for event in ends:
                event(graph)

    return watched
