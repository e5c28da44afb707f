"""Where a model generates: around every ``generate`` of a module's class, as ``GenerationMixin`` has it.

The classes are found when they are made at the latest, so that the first call is seen too. The first call of a module
in it reads the prompt (`PREFILL`), each later one adds to the answer (`DECODE`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from profkit.capture.patches import patch
from profkit.names import DECODE, PREFILL

_METHOD = "generate"


class Generation(threading.local):
    """Calls ``begins`` and ``ends`` with the model around each outermost call of ``generate`` on a thread."""

    def __init__(self, begins: Callable[[nn.Module], None], ends: Callable[[nn.Module], None]) -> None:
        self._begins = begins
        self._ends = ends
        self._is_open = False
        self._calls = 0

    def next_phase(self) -> str | None:
        """Return the phase of the outermost module call that begins now; None outside ``generate``."""
        if not self._is_open:
            return None
        self._calls += 1
        return PREFILL if self._calls == 1 else DECODE

    def install(self) -> None:
        """Begin to watch the classes that there are, and those that are made from now on."""

        def made(cls: Any, /, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            self._watch(cls)

        patch("torch.nn.Module.__init_subclass__", lambda _objects: classmethod(made))
        kinds = nn.Module.__subclasses__()
        while kinds:
            kind = kinds.pop()
            self._watch(kind)
            kinds += kind.__subclasses__()

    def remove(self) -> None:
        """Give the classes back the methods that they had."""
        while _watched:
            base, method = _watched.pop()
            setattr(base, _METHOD, method)

    def _watch(self, kind: Any) -> None:
        for base in kind.__mro__:
            method = vars(base).get(_METHOD)
            # TorchScript compiles a method that is marked for it from its source.
            is_compiled = hasattr(method, "_torchscript_modifier")
            if isinstance(method, FunctionType) and not is_compiled and not hasattr(method, _SEEN):
                _watched.append((base, method))
                setattr(base, _METHOD, self._around(method))

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_open or torch.compiler.is_compiling() or not isinstance(model, nn.Module):
                return method(model, *args, **kwargs)
            self._is_open, self._calls = True, 0
            self._begins(model)
            try:
                return method(model, *args, **kwargs)
            finally:
                self._is_open = False
                self._ends(model)

        setattr(generate, _SEEN, True)
        return generate


_SEEN = "__profkit__"
_watched: list[tuple[Any, Callable[..., Any]]] = []
"""The classes whose method is watched, with the method that they had; a `Generation` has values for each thread."""
