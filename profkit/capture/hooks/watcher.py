"""What the hooks tell the one who records memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer


class StepListener(Protocol):
    """Is called at each step's boundary; it may switch the ranges on and off there."""

    def boundary(self, number: int) -> None:
        """Step ``number`` is about to begin; the one before it, if there was one, has ended."""

    def log_is_full(self) -> None:
        """The log of ranges holds as many as it may; called between calls of models, and stops it."""

    def hooks_failed(self, error: Exception) -> None:
        """A hook failed, and all of them have stopped."""


class Watcher:
    """Sees what the script does while the hooks are installed; this one does nothing."""

    follows_modules = False
    """Whether `runs_for` is wanted, also of modules that have no range."""

    def call_begins(self, module: nn.Module, args: Any, name: str | None) -> None:
        """An outermost module call begins; in a backward pass there is none. ``name``: the model's, if known."""

    def call_ends(self, keywords: Any) -> None:
        """An outermost module call has ended, or raised."""

    def backward_begins(self, tensors: Any) -> None:
        """A backward pass of ``tensors`` begins on this thread; within another one it is mostly a checkpoint's."""

    def recompute_ends(self, kept: Callable[[], list[Tensor]]) -> None:
        """A checkpoint's part has been computed again; ``kept`` returns what is kept of it, where no graph does."""

    def runs_for(self, phase: str | None, module: str | None) -> None:
        """From now on this thread works for a phase and a module, None for what does not apply; on leaving one too."""

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """An optimizer's step has ended well."""
