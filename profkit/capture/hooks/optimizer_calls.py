"""Every step of an optimizer, seen from around torch's own range of it, and the closures that it calls within.

A closure holds a forward and a backward pass, which are no part of the optimizer's own work: LBFGS calls it several
times a step, and Lightning gives one to every optimizer.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer

from profkit.capture.patches import outside_dynamo, patch

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, by position and by name."""


class OptimizerListener(Protocol):
    """Sees an optimizer's steps, on the thread that makes them."""

    @property
    def is_in_optimizer(self) -> bool:
        """Whether a step runs already: one optimizer may call another."""

    def optimizer_begins(self, optimizer: Optimizer, *, is_update: bool) -> None:
        """A step begins; its update begins with it, unless a closure comes first."""

    def update_ends(self, optimizer: Optimizer) -> None:
        """The optimizer calls its closure, or has made the last update of this step."""

    def update_begins(self, optimizer: Optimizer) -> None:
        """The closure has returned."""

    def optimizer_ends(self, optimizer: Optimizer, *, is_well: bool) -> None:
        """The step has ended well, or raised."""


def watch_optimizers(listener: OptimizerListener) -> None:
    """Begin to watch, also optimizers that have been made already.

    Optimizers' post hooks run within torch's own range of the step, and not at all if it raises: they would not do.
    """

    def around(profiled: Callable[..., Any]) -> Callable[..., Any]:
        def profiled_and_watched(step: Callable[..., Any]) -> Callable[..., Any]:
            watched = _around(profiled(_within(step, listener)), listener)
            vars(watched)[_UNWATCHED] = lambda: profiled(step)
            return watched

        return profiled_and_watched

    patch("torch.optim.optimizer.Optimizer.profile_hook_step", around)
    _watch_made_before(listener)


_UNWATCHED = "_profkit_unwatched"
"""The attribute of a watched step that gives the step that torch alone would have given the class."""

_unwatch_own: list[Callable[[], None]] = []
"""What gives back the steps that optimizers had themselves, not their classes, before they were watched."""


def _watch_made_before(listener: OptimizerListener) -> None:
    """Watch the classes whose optimizers exist, and optimizers whose own ``step`` a scheduler, say, has replaced."""
    made = [kind for kind in optimizer_classes() if getattr(vars(kind).get("step"), "hooked", False)]
    for kind in made:
        before = vars(kind)["step"]
        kind.step = Optimizer.profile_hook_step(before.__wrapped__)
        kind.step.hooked = True
        vars(kind.step)[_UNWATCHED] = lambda before=before: before
    for optimizer in [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)] if made else ():
        if "step" in vars(optimizer):
            _unwatch_own.append(_watch_own_step(optimizer, listener))


def _watch_own_step(optimizer: Any, listener: OptimizerListener) -> Callable[[], None]:
    before = optimizer.step
    watched = MethodType(_around(_without_self(before), listener), optimizer)
    optimizer.step = watched

    def update_ends(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _has_closure(args, kwargs):
            listener.update_ends(optimizer)

    within = optimizer.register_step_post_hook(update_ends)

    def unwatch() -> None:
        within.remove()
        if vars(optimizer).get("step") is watched:
            optimizer.step = before

    return unwatch


def _without_self(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def called(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return called


def unwatch_steps() -> None:
    """Give optimizers and their classes the steps that they would have without profkit."""
    for kind in optimizer_classes():
        unwatched = getattr(vars(kind).get("step"), _UNWATCHED, None)
        if unwatched is not None:
            kind.step = unwatched()
            kind.step.hooked = True
    while _unwatch_own:
        _unwatch_own.pop()()


def optimizer_classes() -> Iterator[Any]:
    classes: list[Any] = list(Optimizer.__subclasses__())
    while classes:
        kind = classes.pop()
        yield kind
        classes += kind.__subclasses__()


def _around(step: Callable[..., Any], listener: OptimizerListener) -> Callable[..., Any]:
    def begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        if listener.is_in_optimizer:
            return None
        listener.optimizer_begins(args[0], is_update=not _has_closure(args, kwargs))
        return _with_closure(args, kwargs, listener)

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return step(*args, **kwargs)
        begun = outside_dynamo(begins, args, kwargs)
        if begun is None:
            return step(*args, **kwargs)
        args, kwargs = begun
        try:
            result = step(*args, **kwargs)
        except BaseException:
            outside_dynamo(listener.optimizer_ends, args[0], is_well=False)
            raise
        outside_dynamo(listener.optimizer_ends, args[0], is_well=True)
        return result

    return watched


def _within(step: Callable[..., Any], listener: OptimizerListener) -> Callable[..., Any]:
    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        finally:
            may_have_closure = len(args) > 1 or kwargs
            if may_have_closure and not torch.compiler.is_compiling() and outside_dynamo(_has_closure, args, kwargs):
                outside_dynamo(listener.update_ends, args[0])

    return watched


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return callable(args[1] if len(args) > 1 else kwargs.get("closure"))


def _with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], listener: OptimizerListener) -> Call:
    if not _has_closure(args, kwargs):
        return args, kwargs
    closure = args[1] if len(args) > 1 else kwargs["closure"]

    def watched() -> Any:
        listener.update_ends(args[0])
        result = closure()
        listener.update_begins(args[0])
        return result

    if len(args) > 1:
        return (args[0], watched, *args[2:]), kwargs
    return args, {**kwargs, "closure": watched}
