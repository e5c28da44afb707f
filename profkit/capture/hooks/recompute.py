"""Sees where a backward pass computes activations again: both variants of ``torch.utils.checkpoint``.

The variant without reentrance keeps a function that computes again what the graph's nodes ask for; the reentrant one is
a node that runs the block again and then the backward pass of what it got. In both, only the function that runs again
is wrapped: what it computes, and when, stays the same. Of others' checkpoints (DeepSpeed, Megatron) a module that is
called in a backward pass with gradients on is what shows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from profkit.capture.hooks.backward_nodes import is_creating_graph, running_graph
from profkit.capture.hooks.open_ranges import Call
from profkit.capture.patches import patch


class RecomputeListener(Protocol):
    """Is called around what a backward pass computes again, on the thread that does it."""

    def call_to_recompute(self) -> Call | None:
        """Return the call in whose forward pass a part begins that will be computed again."""

    def recompute_begins(self, key: object, call: Call | None) -> None:
        """What ran in ``call`` is about to be computed again; ``key`` is the same where it ends."""

    def recompute_ends(self, key: object, kept: Callable[[], list[Tensor]]) -> None:
        """It has been computed again, or has been stopped early, or raised.

        ``kept`` returns the tensors that are kept for the backward pass now, where no graph does that.
        """


def watch_recompute(listener: RecomputeListener) -> None:
    """Call ``listener`` for each checkpoint that is made from now on, until the process ends."""
    patch("torch.utils.checkpoint._CheckpointFrame.__init__", lambda init: _with_watched_frame(init, listener))
    patch("torch.utils.checkpoint.CheckpointFunction.forward", lambda run: _with_watched_function(run, listener))


def is_recomputing() -> bool:
    """Return whether a checkpoint that is watched computes something again on this thread."""
    return _running.depth > 0


def is_computed_again() -> bool:
    """Return whether somebody else's checkpoint computes something again on this thread."""
    is_in_backward = running_graph() != -1
    return is_in_backward and torch.is_grad_enabled() and not is_creating_graph() and not is_recomputing()


def is_first_pass() -> bool:
    """Return whether torch's reentrant checkpoint runs its first forward pass, which it does with gradients off."""
    return _running.first_passes > 0


class _Running(threading.local):
    depth = 0
    first_passes = 0


_running = _Running()


def _with_watched_frame(init: Callable[..., None], listener: RecomputeListener) -> Callable[..., None]:
    def watched(frame: Any, *args: Any, **kwargs: Any) -> None:
        init(frame, *args, **kwargs)
        if not torch.compiler.is_compiling() and hasattr(frame, "recompute_fn"):
            # The frame must not hold itself.
            kept = functools.partial(_kept_by, ref(frame))
            frame.recompute_fn = _watched(frame.recompute_fn, listener, kept)

    return watched


def _with_watched_function(forward: Callable[..., Any], listener: RecomputeListener) -> Callable[..., Any]:
    def watched(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        trains = any(ctx.needs_input_grad)
        _running.first_passes += trains
        try:
            return forward(ctx, _watched(function, listener), *args)
        finally:
            _running.first_passes -= trains

    return watched


def _kept_by(reference: ref[Any]) -> list[Tensor]:
    """Return what has been computed again for a checkpoint's frame and is not used yet."""
    frame = reference()
    if frame is None:
        return []
    groups = list(getattr(frame, "recomputed", {}).values())
    return [tensor for group in groups for tensor in list(group.values()) if isinstance(tensor, Tensor)]


def _watched(
    function: Callable[..., Any], listener: RecomputeListener, kept: Callable[[], list[Tensor]] = list
) -> Callable[..., Any]:
    """Return ``function`` so that the listener sees each time that it runs again, which is with gradients on."""
    call = listener.call_to_recompute()

    def watched(*args: Any, **kwargs: Any) -> Any:
        # The reentrant variant also runs its first forward pass through here, with gradients off.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        key = object()
        listener.recompute_begins(key, call)
        _running.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _running.depth -= 1
            listener.recompute_ends(key, kept)

    return watched
