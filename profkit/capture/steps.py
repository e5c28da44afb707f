"""What ends a step: the policy alone. `Hooks` reports what the script does, and makes a boundary where one is due."""

from __future__ import annotations

from weakref import ref

from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim.optimizer import Optimizer


class StepPolicy:
    """Decides when a step ends.

    A step ends when an optimizer's step has: of several optimizers the first that made a step counts, or the one whose
    class is named ``step_on``. In a script that has made no optimizer a step begins with each outermost module call.

    Each method reports one thing that the script does, and returns whether a boundary is due: the step that runs ends
    there and the next one begins.

    Args:
        step_on: the class of the optimizer that counts.
        counts: False where somebody else knows the steps: no boundary is ever due then.
    """

    def __init__(self, step_on: str | None = None, *, counts: bool = True) -> None:
        self._step_on = step_on
        self._counts = counts
        self._has_begun = False
        self._counting_optimizer: ref[Optimizer] | None = None

    @property
    def counts_calls(self) -> bool:
        """Whether outermost module calls are the steps, because no optimizer has made a step."""
        return self._counting_optimizer is None

    def call_begins(self, module: nn.Module) -> bool:
        """An outermost module call is about to begin; in a backward pass there is none."""
        is_step = not isinstance(module, _Loss) and not has_optimizer() and self._counting_optimizer is None
        return self._due(is_step or not self._has_begun)

    def call_ends(self, module: nn.Module) -> bool:
        """An outermost module call has ended, or raised; its ranges are closed."""
        return False

    def backward_begins(self) -> bool:
        """A backward pass is about to begin on this thread, and not within another one."""
        return False

    def backward_ends(self) -> bool:
        """That backward pass has ended, or raised; its range is closed."""
        return False

    def optimizer_begins(self, optimizer: Optimizer) -> bool:
        """An optimizer's step is about to begin, and not within another one's."""
        return False

    def optimizer_ends(self, optimizer: Optimizer) -> bool:
        """An optimizer's step has ended well; its range is closed."""
        return self._due(self._is_last(optimizer))

    def _is_last(self, optimizer: Optimizer) -> bool:
        if self._step_on is not None:
            return type(optimizer).__name__ == self._step_on
        counting = None if self._counting_optimizer is None else self._counting_optimizer()
        if counting is None:  # none yet, or the script is done with it
            self._counting_optimizer = ref(optimizer)
        return counting is None or counting is optimizer

    def _due(self, is_boundary: bool) -> bool:
        if is_boundary and self._counts:
            self._has_begun = True
        return is_boundary and self._counts


def has_optimizer() -> bool:
    """Return whether an optimizer has been made: torch marks the step of its class then."""
    classes = list(Optimizer.__subclasses__())
    while classes:
        one = classes.pop()
        if getattr(one.step, "hooked", False):
            return True
        classes += one.__subclasses__()
    return False
