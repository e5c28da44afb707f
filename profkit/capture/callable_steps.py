"""A step that the user's own callable makes, run like a built-in model's."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
from torch import Tensor

from profkit.annotation import annotate
from profkit.capture.hooks import Hooks
from profkit.capture.script_memory import ScriptMemory
from profkit.errors import UsageError
from profkit.models.workload import CallableWorkload
from profkit.names import WARMUP, step_range

T = TypeVar("T")


class TargetRaisedError(Exception):
    """The user's own code raised ``original``."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


class CallableSteps:
    """What ``package.module:name`` returns, called step by step.

    The module is imported from the working directory, as ``python -m`` would; the callable is called once. A step's
    time ends when the device has done its work. What a step returns is its loss, if it is one number.

    `work` is what the last warm-up step did, if that is to be counted: the content of ``work.json``.

    Args:
        hooked: this process is recorded; have ranges for phases and modules appear by themselves
            (`profkit.capture.hooks`), if the workload wants them; the steps' own appear in any case.
        memory: what records the allocator meanwhile, if anything does.

    Raises:
        UsageError: there is no such module or name, or it makes no step.
        TargetRaisedError: the user's code raised.
    """

    parameter_count = None

    def __init__(self, workload: CallableWorkload, *, hooked: bool, memory: ScriptMemory | None = None) -> None:
        self.losses: list[float] = []
        self.work: dict[str, Any] | None = None
        self._workload = workload
        self._counts = hooked and workload.flops and memory is None
        self._memory = memory
        self._range: Callable[[str], AbstractContextManager[object]] = annotate
        self.autocast_dtypes: set[str] = set()
        has_ranges = hooked and workload.annotate
        hooks = Hooks(None, workload.depth, watcher=memory) if has_ranges or memory is not None else None
        if hooks is not None:
            # Before the user's code is imported: an optimizer is hooked when it is made.
            hooks.install()
            self._range = hooks.enclosing
            self.autocast_dtypes = hooks.autocast_dtypes
        self._step = _made_step(workload.target)
        if hooks is not None and has_ranges:
            hooks.start()

    def run_warmup(self) -> None:
        """Run the warm-up steps inside one ``warmup`` range, without step ranges of their own."""
        with self._range(WARMUP):
            for number in range(self._workload.warmup_steps):
                if self._counts and number == self._workload.warmup_steps - 1:
                    self.work = self._count_step()
                else:
                    self._run_step()

    def run_measured(self) -> list[dict[str, int]]:
        """Run the measured steps and return each one's time, ``step_ns``."""
        times = []
        for number in range(self._workload.steps):
            self._tell_memory(number)
            start_ns = perf_counter_ns()
            with self._range(step_range(number)):
                result = self._run_step()
            times.append({"step_ns": perf_counter_ns() - start_ns})
            loss = _as_loss(result)
            if loss is not None:
                self.losses.append(loss)
        self._tell_memory(self._workload.steps)
        return times

    def _count_step(self) -> dict[str, Any]:
        from profkit.capture.work_counter import WorkCounter  # it loads more of torch

        counter = WorkCounter()
        counter.start()
        try:
            self._run_step()
        finally:
            counter.stop()
        return counter.content()

    def _tell_memory(self, number: int) -> None:
        """Tell what records the allocator that this step begins, and the one before it has ended."""
        if self._memory is not None:
            self._memory.boundary(number)

    def _run_step(self) -> Any:
        with _their_code():
            result = self._step()
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
        what = "a callable that wants arguments" if callable(step) else f"{type(step).__name__}, not a callable"
        raise UsageError(f"{target} returned {what}; it is to return the step, a callable without arguments")
    return step


def _imported(name: str, target: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # One that their module looks for in vain is another matter.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise TargetRaisedError(error) from error
        raise UsageError(f"{target}: no module {error.name} in {os.getcwd()} or on Python's path") from None
    except Exception as error:
        raise TargetRaisedError(error) from error


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
        raise TargetRaisedError(error) from error
