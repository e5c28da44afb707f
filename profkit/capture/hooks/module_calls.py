"""Every call of a module, seen by one wrapper around ``nn.Module.__call__``; and every ``generate`` of a module.

Hooks of all modules would see calls too, but with one of those torch takes a slow way through every call. A ``forward``
replaced on a module would break copying and pickling it.

While Dynamo traces, the wrapper is not there: it compiles what it would without profkit. Nor is it there while
``torch.jit.trace`` does, whose graph would hold the ranges. Where Dynamo compiles a model in part, the modules that it
did not compile are still called: they have their ranges, and Dynamo does not see what opens them."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from profkit.annotation import Range
from profkit.capture.hooks import Call, RangeHooks
from profkit.capture.hooks.open_ranges import OpenRanges
from profkit.capture.patches import call_first, patch
from profkit.names import DECODE, PREFILL


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


class CallObserver(RangeHooks, Protocol):
    """Sees each call of a module begin and end, on the thread that makes it. It must not raise.

    While ``is_recording`` is False it sees only the outermost calls.
    """

    def enter(
        self, opened: OpenRanges, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """A call is about to begin where ``opened`` is open; None: its end does not matter."""

    def leave(self, opened: OpenRanges, call: Call, module: nn.Module, output: Any, kwargs: dict[str, Any]) -> None:
        """A call has ended; ``output`` is None if it raised."""


def observe_module_calls(observer: CallObserver) -> None:
    """Show ``observer`` every call of a module in this process from now on, until the process ends.

    Dynamo guards on how modules are called: what the program has compiled would be compiled anew without the wrapper.
    """
    patch("torch.nn.Module.__call__", lambda plain: _shown_to(observer, plain), stays=True)
    patch("torch.compile", _compile_around, stays=True)
    _skip_hooks()


def _shown_to(observer: CallObserver, plain: Callable[..., Any]) -> Callable[..., Any]:
    is_torchs_own = plain is getattr(nn.Module, "_wrapped_call_impl", None)
    enter, leave, on_thread = observer.enter, observer.leave, observer.on_thread
    is_dynamo_tracing = torch.compiler.is_dynamo_compiling
    is_tracing = torch._C._is_tracing
    # The callback with which Dynamo compiles what this thread runs, or None; torch 2.4 has no way to ask for it.
    in_compiled_code = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
    compile_with = torch._C._dynamo.eval_frame.set_eval_frame

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_tracing():
            return plain(self, *args, **kwargs)
        opened = on_thread.ranges
        if opened.root is not None and not observer.is_recording:
            # As torch's own does, in its place: no further frame around each of a model's modules.
            if is_torchs_own and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)
            return plain(self, *args, **kwargs)
        callback = in_compiled_code()
        if is_tracing():
            return plain(self, *args, **kwargs)
        if callback is not None:
            compile_with(None)
        entered = enter(opened, self, args, kwargs)
        if callback is not None:
            compile_with(callback)
        if entered is None:
            return plain(self, *args, **kwargs)
        try:
            if is_torchs_own and self._compiled_call_impl is None:
                output = self._call_impl(*args, **kwargs)
            else:
                output = plain(self, *args, **kwargs)
        except BaseException as error:
            if callback is not None:
                compile_with(None)
            leave(opened, entered, self, None, kwargs)
            _hide_frames(code, error)
            if callback is not None:
                compile_with(callback)
            raise
        if callback is not None:
            compile_with(None)
        leave(opened, entered, self, output, kwargs)
        if callback is not None:
            compile_with(callback)
        return output

    code = call.__code__
    return call


def _hide_frames(code: CodeType, error: BaseException) -> None:
    """Take the frames of ``code`` out of a traceback, all but the outermost: there would be one for each module."""
    entry = error.__traceback__
    while entry is not None:
        while entry.tb_next is not None and entry.tb_next.tb_frame.f_code is code:
            entry.tb_next = entry.tb_next.tb_next
        entry = entry.tb_next


def _compile_around(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """All modules' calls share the code of their wrapper, all optimizers' steps that of theirs: compiled, it would soon
    have been compiled more often than Dynamo allows.
    """

    def compiled(*args: Any, **kwargs: Any) -> Any:
        result = compile_(*args, **kwargs)
        _skip_hooks()
        return result

    return compiled


def _skip_hooks() -> None:
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        for code in _code_of_hooks():
            skip(code)


def _code_of_hooks() -> set[CodeType]:
    found: set[CodeType] = set()
    values = [
        value for name in list(sys.modules) if name.startswith(_CAPTURE) for value in vars(sys.modules[name]).values()
    ]
    waiting: list[Any] = [value for value in values if str(getattr(value, "__module__", "")).startswith(_CAPTURE)]
    waiting += [Range.open, Range.close, Range.__enter__, Range.__exit__]
    while waiting:
        one = waiting.pop()
        if isinstance(one, CodeType):
            if one not in found and one.co_filename.startswith(_PROFKIT):  # named tuples share the methods of theirs
                found.add(one)
                waiting += one.co_consts
        elif isinstance(one, type):
            waiting += vars(one).values()
        elif one is not None:
            one = getattr(one, "fget", None) or getattr(one, "__func__", one)
            waiting += [getattr(one, "__code__", None), getattr(one, "__wrapped__", None)]
    return found


_CAPTURE = "profkit.capture."
_PROFKIT = str(Path(__file__).parents[2])


class ReplicaCall(Call):
    """The call of a replica, within the call of the model that it is a copy of."""

    __slots__ = ()


def watch_replicas(begin: Callable[[nn.Module, Sequence[nn.Module]], None]) -> None:
    """Call ``begin`` with a model and its replicas by DataParallel: copies, each of which works on its own thread."""

    def applied(model: Any, replicas: Any, *_: Any, **__: Any) -> None:
        if len(replicas) > 1:  # torch calls a single one on this thread
            begin(model.module, replicas)

    patch("torch.nn.DataParallel.parallel_apply", call_first(applied))


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
