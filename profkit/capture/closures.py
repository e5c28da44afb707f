"""The closure that an optimizer's ``step`` may be given: a forward and a backward pass that it calls itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether there is a closure among the arguments of ``Optimizer.step``."""
    return callable(args[1] if len(args) > 1 else kwargs.get("closure"))


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], called: Callable[[], None], returned: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``Optimizer.step`` with each call of the closure between ``called`` and ``returned``.

    LBFGS calls the closure, which holds a forward and a backward pass, several times a step; Lightning gives one to
    every optimizer. Without one the arguments are as they were.
    """
    if not has_closure(args, kwargs):
        return args, kwargs
    closure = args[1] if len(args) > 1 else kwargs["closure"]

    def watched() -> Any:
        called()
        result = closure()
        returned()
        return result

    if len(args) > 1:
        return (args[0], watched, *args[2:]), kwargs
    return args, {**kwargs, "closure": watched}
