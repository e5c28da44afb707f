"""The closure that an optimizer's step may be given: it holds a forward and a backward pass.

LBFGS calls it several times a step; Lightning gives one to every optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], returned: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments of ``Optimizer.step`` so that ``returned`` is called after each call of the closure.

    And whether there is a closure at all; without one they are as they were.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs, False

    def watched() -> Any:
        result = closure()
        returned()
        return result

    if len(args) > 1:
        return (args[0], watched, *args[2:]), kwargs, True
    return args, {**kwargs, "closure": watched}, True
