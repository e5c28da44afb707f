"""Ranges of an unedited script: what is hooked or patched, and what is open on each thread.

All files here speak of calls of modules and functions: each knows the one around it, and is the hook of the graph's
nodes that it made.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

from torch import nn

from profkit.capture.hooks.backward_nodes import running_graph


class Call:
    """One call of a module or of a function that the script annotated.

    A call is itself the hook of the graph's nodes that it made: it is called before their backward work runs.

    Args:
        name: that of its range; None: it has none.
        owner: what the memory of the called module is named.
    """

    __slots__ = ("around", "depth", "hooks", "module", "name", "owner")

    def __init__(
        self,
        name: str | None,
        around: Call | None,
        hooks: RangeHooks,
        owner: str | None = None,
        module: ref[nn.Module] | None = None,
    ) -> None:
        self.name = name
        self.around = around
        self.depth: int = 0 if around is None else around.depth + 1
        self.hooks = hooks
        self.owner = owner
        self.module = module

    def __call__(self, _gradient: Any) -> None:
        hooks = self.hooks
        if not hooks.is_recording:
            return
        try:
            opened = hooks.on_thread.ranges
            if opened.graph_task != running_graph():
                hooks.enter_graph(opened)
            opened.enter_backward_of(self)
        except Exception as error:
            hooks.fail(error)


class NoCall(Call):
    """Stands for no call, as the hook of nodes that no call made."""

    __slots__ = ()

    def __init__(self, hooks: RangeHooks) -> None:
        super().__init__(None, None, hooks)
        self.depth = -1


class RangeHooks(Protocol):
    """What opens the ranges of this process."""

    is_recording: bool
    on_thread: Any
    """Its ``ranges`` are those that are open on the thread that looks."""

    def capture_runs(self, runs: bool) -> None:
        """The capture of a CUDA graph has begun, during which ranges are wanted, or has ended."""

    def enter_graph(self, opened: Any) -> None:
        """A backward pass runs on this thread, of which nothing is known yet."""

    def fail(self, error: Exception) -> None:
        """A hook failed."""


def change_between(last: Call | None, call: Call | None) -> tuple[int, list[str]]:
    """Return what changes where ``last`` is left for ``call``: how many ranges close, and which open, outermost last.

    A call's range lies within those of the calls around it. None: outside of all calls.
    """
    closing, opening = 0, []
    while last is not call:
        if call is None or (last is not None and last.depth >= call.depth):
            assert last is not None
            if last.name is not None:
                closing += 1
            last = last.around
        else:
            if call.name is not None:
                opening.append(call.name)
            call = call.around
    return closing, opening
