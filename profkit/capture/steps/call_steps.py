"""A step that the user's own callable makes, called as often as asked: ``python -m profkit.capture.steps.call_steps``.

The command line is the callable (``package.module:name``), the warm-up steps, the steps, ``count`` or ``-`` (whether
the last warm-up step's work is counted), and a file to leave the losses in. The module is imported from the working
directory, as ``python -m`` would; the callable is called once. What a step returns is its loss, if it is one number.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from profkit.annotation import annotate
from profkit.errors import UsageError
from profkit.names import COUNTED, WARMUP, step_range

_PACKAGE = Path(__file__).parent.parent


class _TheirsError(Exception):
    """The user's own code raised ``original``."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


def call_steps(target: str, warmup_steps: int, steps: int, *, count: bool) -> list[float]:
    """Make the target's step, call it, and return the losses of the steps after the warm-up, where they have any.

    Raises:
        UsageError: there is no such module or name, or it makes no step.
    """
    step = _made_step(target)
    for number in range(warmup_steps):
        is_last = number == warmup_steps - 1
        with annotate(WARMUP), annotate(COUNTED) if count and is_last else nullcontext():
            _call(step)
    losses = []
    for number in range(steps):
        with annotate(step_range(number)):
            result = _call(step)
        losses.append(_as_loss(result))
    return [loss for loss in losses if loss is not None]


def _call(step: Callable[[], Any]) -> Any:
    with _their_code():
        result = step()
        # A step's range is open until the device has done its work.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return result


def _made_step(target: str) -> Callable[[], Any]:
    module_name, _, path = target.partition(":")
    make_step = _found(_imported(module_name, target), path, target)
    if not _takes_no_arguments(make_step):
        what = "wants arguments" if callable(make_step) else f"is of type {type(make_step).__name__}, not callable"
        raise UsageError(f"{target} {what}; name a callable without arguments that returns the step")
    with _their_code():
        step: Callable[[], Any] = make_step()
    if not _takes_no_arguments(step):
        what = "a callable that needs arguments" if callable(step) else f"{type(step).__name__}, not a callable"
        raise UsageError(f"{target} returned {what}; it must return the step, a callable without arguments")
    return step


def _imported(name: str, target: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # One that their module looks for in vain is another matter.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _TheirsError(error) from error
        raise UsageError(f"{target}: no module {error.name} in {os.getcwd()} or on Python's path") from None
    except Exception as error:
        raise _TheirsError(error) from error


def _found(module: Any, path: str, target: str) -> Any:
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        names = [name for name in dir(module) if callable(getattr(module, name))]
        nearest = difflib.get_close_matches(path, names, n=1)
        hint = f"did you mean {module.__name__}:{nearest[0]}?" if nearest else f"it is looked for in {module.__file__}"
        raise UsageError(f"{target}: no {path} in {module.__name__}; {hint}") from None


def _takes_no_arguments(value: Any) -> bool:
    """Return whether ``value`` can be called without arguments, as far as it says."""
    if not callable(value):
        return False
    try:
        signature(value).bind()
    except TypeError:
        return False
    except ValueError:  # some callables written in C do not say
        return True
    return True


def _as_loss(result: Any) -> float | None:
    if isinstance(result, Tensor) and result.numel() == 1 and not result.is_complex():
        return float(result.detach())
    return float(result) if isinstance(result, int | float) else None


@contextmanager
def _their_code() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _TheirsError(error) from error


def main() -> None:
    target, warmup_steps, steps, count, losses = sys.argv[1:]
    try:
        found = call_steps(target, int(warmup_steps), int(steps), count=count == "count")
        Path(losses).write_text(json.dumps(found), encoding="utf-8")
    except UsageError as error:
        _end(error, f"profkit: {error}\n", error.exit_code)
    except _TheirsError as error:
        _end(error.original, _their_traceback(error.original), 1)


def _their_traceback(error: Exception) -> str:
    """Return the traceback from where the user's code begins."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _is_ours(file: str) -> bool:
    """Return whether a frame belongs to profkit or to the import system, not to the user."""
    return file.startswith("<frozen importlib") or Path(file).is_relative_to(_PACKAGE) or file == importlib.__file__


def _end(error: Exception, text: str, status: int) -> NoReturn:
    sys.stderr.write(text)
    # As Python itself keeps an exception that nobody catches: what records this process reads it.
    sys.last_value = error
    sys.exit(status)


if __name__ == "__main__":
    main()
