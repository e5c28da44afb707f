"""What a graph's code is entered for: with which module, and whether anybody saw the calls that it was compiled of.

A function that is compiled by itself may call a model, or be given a module, and nobody sees a call of either: the
phase of these calls is opened around the code. One graph serves all modules of one shape. Which of them runs stands in
the variables of the function's frame, and a backward pass is known by the parameters that the forward pass was given.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from types import FrameType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from profkit.capture.compiled.dynamo_graphs import TracedGraph
from profkit.capture.hooks.backward_nodes import running_graph
from profkit.capture.hooks.hooks import Hooks
from profkit.capture.hooks.module_calls import outside_dynamo
from profkit.capture.hooks.module_names import unwrap
from profkit.capture.hooks.open_ranges import Call
from profkit.capture.steps.frame_variables import variable_of

_FRAMES = 40
"""The most frames between a compiled function and its generated code."""
_AUTOGRAD = os.path.join("_aot_autograd", "runtime_wrappers.py")


class Entries:
    """Sees each time that one graph's code is entered.

    Args:
        failed: is called with an error of what is done here, which never reaches the program.
    """

    def __init__(
        self, traced: TracedGraph | None, hooks: Hooks, failed: Callable[[Exception], None], *, is_backward: bool
    ) -> None:
        self._traced = traced
        self._hooks = hooks
        self._failed = failed
        self._is_backward = is_backward
        self._on_thread = _OnThread()

    @property
    def module(self) -> ref[nn.Module] | None:
        """The module that the function was called with which runs on this thread; None if it is not known."""
        return self._on_thread.module

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that runs the graph's code, watched."""
        if self._traced is None:
            return call

        @functools.wraps(call)
        def watched(inputs: Sequence[Any]) -> Any:
            begun = outside_dynamo(self._begin, inputs)
            try:
                return call(inputs)
            finally:
                if begun is not None:
                    outside_dynamo(self._hooks.calls_end, begun)

        return watched

    def _begin(self, inputs: Sequence[Any]) -> list[nn.Module] | None:
        """Note the module, open the phase of calls that nobody saw, and return what was called in these."""
        traced, hooks = self._traced, self._hooks
        if traced is None or hooks.has_failed:
            return None
        try:
            is_within_call = self._is_backward or hooks.on_thread.ranges.root is not None or running_graph() != -1
            if not hooks.is_recording and is_within_call:
                return None
            function, has_grad = (None, False) if self._is_backward else _function(traced)
            root = None if traced.root is None else traced.root()
            if self._is_backward:
                self._on_thread.module = _given_before(inputs) if _by_parameter else None
            elif root is not None:
                is_called = _is_called(hooks.on_thread.ranges.call, type(root))
                self._on_thread.module = None if is_called else _given_to(function, traced)
            if is_within_call:
                return None
            models = _outermost(traced, self.module)
        except Exception as error:
            self._failed(error)
            return None
        if models:
            hooks.calls_begin(models, has_grad=has_grad)
        return models or None


class _OnThread(threading.local):
    module: ref[nn.Module] | None = None


_by_parameter: MutableMapping[Tensor, ref[nn.Module]] = WeakIdKeyDictionary()
"""The module that a compiled function was called with, by each of its parameters."""
_with_known_parameters: WeakSet[nn.Module] = WeakSet()


def _function(traced: TracedGraph) -> tuple[FrameType | None, bool]:
    """Return the frame of the function that runs this code, and whether its results get a graph for a backward pass.

    Then autograd calls the code, with gradients switched off.
    """
    frame: FrameType | None = sys._getframe(4)
    has_grad = torch.is_grad_enabled()
    for _ in range(_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if (code.co_filename, code.co_name) == traced.code:
            return frame, has_grad
        has_grad = has_grad or (code.co_name == "forward" and code.co_filename.endswith(_AUTOGRAD))
        frame = frame.f_back
    return None, has_grad


def _is_called(call: Call | None, kind: type[nn.Module]) -> bool:
    """Return whether a module of this class is being called, compiled or not."""
    while call is not None:
        module = None if call.module is None else call.module()
        if module is not None and kind in (type(module), type(unwrap(module))):
            return True
        call = call.around
    return False


def _given_to(function: FrameType | None, traced: TracedGraph) -> ref[nn.Module] | None:
    """Return the module that a function was called with; None if it has none now."""
    module = None if function is None else variable_of(function, traced.variable)
    if not isinstance(module, nn.Module):
        return None
    if module not in _with_known_parameters:
        _with_known_parameters.add(module)
        _by_parameter.update(dict.fromkeys(module.parameters(), ref(module)))
    return ref(module)


def _given_before(inputs: Sequence[Any]) -> ref[nn.Module] | None:
    """Return the module whose parameters a backward pass is given."""
    known = (_by_parameter.get(one) for one in inputs if isinstance(one, nn.Parameter))
    return next((one for one in known if one is not None), None)


def _outermost(traced: TracedGraph, given_with: ref[nn.Module] | None) -> list[nn.Module]:
    """Return the modules that a graph calls within no other, in order."""
    given = None if given_with is None else given_with()
    sources = dict.fromkeys(modules[0] for modules, _ in traced.operators if modules)
    found = (traced.modules.get(source) for source in sources)
    root = None if traced.root is None else traced.root()
    models = [module for one in found if one is not None and (module := one.module()) is not None]
    return list(dict.fromkeys(given if given is not None and one is root else one for one in models))
