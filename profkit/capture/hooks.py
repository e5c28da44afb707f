"""Ranges for steps, phases and modules of any training script, without a change to it.

Forward hooks of all modules open and close them, wrappers around ``torch.autograd.backward`` (which ``Tensor.backward``
calls) and around what torch itself puts around every optimizer's ``step``, and hooks on the graph's nodes for what runs
on the autograd thread. They change no value, keep no tensor and raise nothing. While Dynamo traces they do nothing: of
a compiled model the module that was compiled is annotated as a whole, forward and backward. Dynamo guards on the hooks
of all modules that it found while it traced, and would compile anew without them: so where it compiled they stay. What
was compiled without them is not compiled again when they come (seen with torch 2.4 and 2.13).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer

from profkit.capture.backward_nodes import at_graph_end, mark_keywords, mark_nodes, running_graph
from profkit.capture.closures import with_closure
from profkit.capture.conditions import autocast_dtypes, count_compiled_graphs
from profkit.capture.module_names import ROOT, ModuleNames
from profkit.capture.open_ranges import Call, OpenRanges
from profkit.capture.phase_clock import PhaseClock
from profkit.names import BACKWARD, FORWARD, LOSS, OPTIMIZER, step_range

# Before torch 2.6 a hook of all modules is not shown their keyword arguments.
_KEYWORDS = {"with_kwargs": True} if "with_kwargs" in signature(register_module_forward_hook).parameters else {}


class StepListener(Protocol):
    """Is told of the steps' boundaries; it may switch the ranges on and off there."""

    def boundary(self, number: int) -> None:
        """Step ``number`` is about to begin; the one before it, if there was one, has ended."""


class Watcher:
    """Is told what the script does while the hooks are installed; this one does nothing. It must raise nothing."""

    def call_begins(self, module: nn.Module, args: Any) -> None:
        """An outermost module call begins; in a backward pass there is none."""

    def call_ends(self, keywords: Any) -> None:
        """An outermost module call has come to its end, or raised."""

    def backward_begins(self, tensors: Any) -> None:
        """The backward pass of ``tensors`` begins on this thread; this and what follows only while ranges are open."""

    def backward_enters(self, name: str | None) -> None:
        """On this thread the backward work of the module of this range begins; None: work outside every module."""

    def backward_ends(self) -> None:
        """A backward pass has been gone through, or raised."""

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """An optimizer's step has ended well."""


class Hooks:
    """The hooks of this process. `install` once; ranges appear between `start` and `stop`.

    A step ends when an optimizer's step has: of several optimizers the first that made a step counts, or the one whose
    class is named ``step_on``. In a script that has made no optimizer a step begins with each outermost module call.

    Args:
        listener: None where somebody else knows the steps: they are not counted then, and have no ranges.
        depth: modules with at most this many parts in their dotted names get a range; 0: the outermost alone.
    """

    def __init__(
        self, listener: StepListener | None, depth: int, step_on: str | None = None, watcher: Watcher | None = None
    ) -> None:
        self._listener = listener
        self._watcher = watcher or Watcher()
        self._step_on = step_on
        self._names = ModuleNames(depth)
        self._open = OpenRanges()
        self._counting_optimizer: ref[Optimizer] | None = None
        self._forward_handles: list[Any] = []
        self._recording = False
        self.clock = PhaseClock()
        """The time of backward passes and optimizers' steps, once it is started."""
        self.autocast_dtypes: set[str] = set()
        """The types that autocast computed in around the modules called while ranges were open."""
        self.begun = -1
        """The number of the step that runs now, counted from 0; -1 before the first."""

    def install(self) -> None:
        """Begin to count steps. The forward hooks stay until the first optimizer's step: then that is what counts.

        They stay longer in a script that has compiled something by then.
        """
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        around_step = Optimizer.profile_hook_step
        Optimizer.profile_hook_step = staticmethod(
            lambda step: self._around_step(self.clock.timed(OPTIMIZER, around_step(step)))
        )
        torch.autograd.backward = self._around_backward(self.clock.timed(BACKWARD, torch.autograd.backward))
        self._hook_forward()

    def start(self) -> None:
        """Open ranges from now on, that of the step which is about to begin first."""
        self._recording = True
        self._hook_forward()

    def stop(self) -> None:
        """Close what is open on this thread, and open no more."""
        self._open.close_all()
        self._recording = False
        self.clock.stop()

    @contextmanager
    def enclosing(self, name: str) -> Iterator[None]:
        """Have the range ``name`` open around the block; whatever is left open within it ends with it."""
        key = object()
        self._open.open(key, name)
        try:
            yield
        finally:
            self._open.close(key)

    @property
    def counts_calls(self) -> bool:
        """Whether a step is an outermost module call: no optimizer has made one."""
        return self._counting_optimizer is None

    def _hook_forward(self) -> None:
        if not self._forward_handles:
            self._forward_handles = [
                register_module_forward_pre_hook(self._before_module),
                register_module_forward_hook(self._after_module, always_call=True, **_KEYWORDS),
            ]

    def _unhook_forward(self) -> None:
        """Take the forward hooks away, unless something was compiled with them; never from within one."""
        if count_compiled_graphs():
            return
        for handle in self._forward_handles:
            handle.remove()
        self._forward_handles = []

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        around = self._open.innermost_call()
        if around is None and running_graph() == -1:
            self._begin_outermost(module)
            self._watcher.call_begins(module, args)
        if not self._recording:
            # Only which call is outermost matters now.
            if around is None:
                self._open.open(module, None, Call(None, None))
            return
        self.autocast_dtypes |= autocast_dtypes()
        name = self._names.range_name(module)
        if name is not None or around is None:
            mark_nodes(args, around, self._enter_backward)
            self._open.open(module, name, Call(name, around))

    def _after_module(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Close the module's range; ``rest`` is its keyword arguments and output, after an exception the latter."""
        if torch.compiler.is_compiling() or not self._open.has(module):
            return
        call = self._open.innermost_call()
        if self._recording and call is not None:
            *keywords, output = rest
            mark_keywords(keywords, call, self._enter_backward)
            mark_nodes(output, call, self._enter_backward)
        self._open.close(module)
        if self._open.innermost_call() is None:
            self._open.close(FORWARD)
            if running_graph() == -1:
                self._watcher.call_ends(rest[:-1])

    def _begin_outermost(self, module: nn.Module) -> None:
        """Count a step if outermost calls are what counts, and open the phase."""
        is_loss = isinstance(module, _Loss)
        if self.begun < 0 or (not is_loss and not _has_optimizer() and self._counting_optimizer is None):
            self._boundary()
        if not self._recording:
            return
        self._names.name_root(module, type(module).__name__ if is_loss else ROOT)
        if module.training and torch.is_grad_enabled():
            self._open.open(FORWARD, LOSS if is_loss else FORWARD)

    def _around_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def annotated(*args: Any, **kwargs: Any) -> None:
            if not self._recording or torch.compiler.is_compiling():
                return backward(*args, **kwargs)
            # Within a backward pass it is a checkpoint's: no phase of its own, but ranges that end with it.
            outermost = running_graph() == -1
            key = object()
            self._open.open(key, BACKWARD if outermost else None)
            if outermost:
                self._watcher.backward_begins(args[:1])
            try:
                return backward(*args, **kwargs)
            finally:
                self._open.close(key)
                if outermost:
                    self._watcher.backward_ends()

        return annotated

    def _enter_backward(self, call: Call | None) -> None:
        if not self._recording or torch.compiler.is_compiling():
            return
        task = running_graph()
        if self._open.graph_task != task:
            self._open.graph_task = task
            at_graph_end(self._leave_backward)
        self._open.enter_backward_of(call)
        while call is not None and call.name is None:
            call = call.around
        self._watcher.backward_enters(None if call is None else call.name)

    def _leave_backward(self) -> None:
        self._open.graph_task = -1
        self._open.leave_backward()
        self._watcher.backward_ends()

    def _around_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return an optimizer's ``step`` with the range around it; a step of the script ends where it returns.

        Optimizers' post hooks run within torch's own range of the step, and not at all if it raises.
        """

        @functools.wraps(step)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._open.has(OPTIMIZER):  # one optimizer may call another
                return step(*args, **kwargs)
            self._watcher.optimizer_begins(args[0])
            args, kwargs, has_closure = with_closure(args, kwargs, self._begin_update)
            self._open.open(OPTIMIZER, OPTIMIZER if self._recording and not has_closure else None)
            try:
                result = step(*args, **kwargs)
            finally:
                self._open.close(OPTIMIZER)
            self._watcher.optimizer_ends(args[0])
            if self._counts(args[0]):
                if not self._recording:
                    self._unhook_forward()
                self._boundary()
            return result

        return annotated

    def _begin_update(self) -> None:
        """An optimizer's closure has returned: the forward and backward passes in it are no part of this phase."""
        self._open.close(OPTIMIZER)
        self._open.open(OPTIMIZER, OPTIMIZER if self._recording else None)

    def _counts(self, optimizer: Optimizer) -> bool:
        if self._step_on is not None:
            return type(optimizer).__name__ == self._step_on
        counting = None if self._counting_optimizer is None else self._counting_optimizer()
        if counting is None:  # none yet, or the script is done with it
            self._counting_optimizer = ref(optimizer)
        return counting is None or counting is optimizer

    def _boundary(self) -> None:
        if self._listener is None:
            return
        self._open.close(_STEP)
        self.begun += 1
        self._listener.boundary(self.begun)
        if self._recording:
            self._open.open(_STEP, step_range(self.begun))


_STEP = object()


def _has_optimizer() -> bool:
    """Return whether an optimizer has been made: torch marks the step of its class then."""
    classes = list(Optimizer.__subclasses__())
    while classes:
        one = classes.pop()
        if getattr(one.step, "hooked", False):
            return True
        classes += one.__subclasses__()
    return False
