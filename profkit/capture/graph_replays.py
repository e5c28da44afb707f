"""Where a script captures a CUDA graph and where it replays one: around the methods of ``torch.cuda.CUDAGraph``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch


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


def watch_graphs(listener: GraphListener, show: Callable[..., None]) -> None:
    """Begin to watch; what torch does not have under these names is not watched.

    Args:
        listener: what sees them.
        show: calls the listener's method that it is given with the rest of its arguments; it never raises.
    """
    for name, begins, ends in (
        ("capture_begin", partial(show, listener.capture_begins), None),
        ("capture_end", None, lambda _graph: show(listener.capture_ends)),
        ("replay", partial(show, listener.replay_begins), partial(show, listener.replay_ends)),
    ):
        method = getattr(torch.cuda.CUDAGraph, name, None)
        if method is not None:
            setattr(torch.cuda.CUDAGraph, name, _around(method, begins, ends))


def _around(
    method: Callable[..., Any], begins: Callable[[Any], None] | None, ends: Callable[[Any], None] | None
) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(graph: Any, *args: Any, **kwargs: Any) -> Any:
        if begins is not None:
            begins(graph)
        try:
            return method(graph, *args, **kwargs)
        finally:
            if ends is not None:
                ends(graph)

    return watched
