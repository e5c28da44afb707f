"""DataParallel's replicas: copies of a model that work for one call of it, each on a thread of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from profkit.capture.hooks.open_ranges import Call


class ReplicaCall(Call):
    """The call of a replica, within the call of the model that it is a copy of."""

    __slots__ = ()


class ReplicaListener(Protocol):
    """Is called on the thread that calls the model."""

    def replicas_begin(self, model: nn.Module, replicas: Sequence[nn.Module]) -> None:
        """Each of ``replicas``, copies of ``model``, is about to be called on another thread."""


def watch_replicas(listener: ReplicaListener) -> None:
    """Tell ``listener`` of all replicas that are called from now on, until the process ends."""
    apply = nn.DataParallel.parallel_apply

    @functools.wraps(apply)
    def watched(self: Any, replicas: Any, *args: Any, **kwargs: Any) -> Any:
        if len(replicas) > 1:  # torch calls a single one on this thread
            listener.replicas_begin(self.module, replicas)
        return apply(self, replicas, *args, **kwargs)

    nn.DataParallel.parallel_apply = watched
