"""`annotate`: a named range around code, seen by Nsight Systems (NVTX) and by torch.profiler (``record_function``)."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import nvtx

P = ParamSpec("P")
R = TypeVar("R")


def annotate(name: str | Callable[..., str], *, flops: int | Callable[..., int] | None = None) -> Range:
    """Return a named range to put around a block or a function: ``with annotate("x"):`` or ``@annotate("x")``.

    It goes to NVTX (the default domain) and, while torch.profiler records on this thread or `record_in_torch` is on,
    to torch's ``record_function`` too. It closes when the code raises. While Dynamo traces it does nothing, so that a
    compiled model keeps its full graph; of compiled code only a module whose ``forward`` is decorated has such a range.

    A decorated function has a range in the backward pass too while ``profkit run`` records: ``backward/x``.

    Args:
        name: what the range is called; for a decorator it may be a function of the decorated call's arguments.
        flops: the floating-point operations of the work inside; they become the NVTX payload (Kineto's ranges have
            none). For a decorator it may be a function of the decorated call's arguments.
    """
    if _is_compiling():
        # Dynamo of torch 2.4 accepts no other context manager that is made while it traces.
        return contextlib.nullcontext()  # type: ignore[return-value]
    return Range(name, flops)


@functools.cache
def own_kind(kind: Any) -> Any:
    """Return a class of context managers with the methods that it has at the first call.

    Whoever watches a script's ranges by replacing these methods later does not see those that are opened here.
    """
    return type(kind.__name__, (kind,), {name: getattr(kind, name) for name in ("__enter__", "__exit__")})


_RANGE = "_profkit_range"


def method_range(of: object, method: str) -> str | None:
    """Return the name of the range that a call of an object's decorated method opens.

    None if the method is not decorated, or the name depends on more than the object.
    """
    opened = getattr(getattr(type(of), method, None), _RANGE, None)
    if not isinstance(opened, Range):
        return None
    if not callable(opened._name):
        return opened._name
    try:
        return str(opened._name(of))
    except Exception:  # the program's own function, made for a whole call
        return None


class Range:
    """What `annotate` returns. It may be used again, nested in itself, and from several threads.

    Dynamo enters no context manager that was made outside the code it compiles: there, write ``with annotate(...):``.
    """

    __slots__ = ("_flops", "_marker", "_name", "attributes", "domain", "pop", "push")

    def __init__(self, name: str | Callable[..., str], flops: int | Callable[..., int] | None) -> None:
        self._name = name
        self._flops = flops
        self._marker: Any = None if callable(flops) or callable(name) else own_kind(nvtx.annotate)(name, payload=flops)
        marker: Any = self._marker
        # NVTX's own functions: by the methods of an nvtx.annotate a range takes twice as long.
        try:
            self.push, self.pop = nvtx._lib.push_range, nvtx._lib.pop_range
            self.attributes, self.domain = marker.attributes, marker.domain.handle
        except AttributeError:  # another nvtx, or one that is switched off
            self.push, self.pop = _enter, _exit
            self.attributes = self.domain = marker

    def open(self, shown_to: Sequence[RangeObserver]) -> Any:
        """Open the range, of which these observers are told, and return what `close` needs."""
        if shown_to:
            for observer in shown_to:
                observer.opening(self.name)
        self.push(self.attributes, self.domain)
        if _always_in_torch or (_is_profiling() and not _leaves_profiler_out):
            return own_kind(sys.modules["torch.autograd"].profiler.record_function)(self.name).__enter__()
        return None

    def close(self, record: Any, shown_to: Sequence[RangeObserver]) -> None:
        """Close the range, this thread's innermost; ``record`` is what `open` returned."""
        if shown_to:
            for observer in shown_to:
                observer.closing()
        if record is not None:
            record.__exit__(None, None, None)
        self.pop(self.domain)
        if shown_to:
            for observer in shown_to:
                observer.closed()

    def __enter__(self) -> Range:
        if self._marker is None:
            raise TypeError("a name or flops given as a function needs a decorated call; give `with` a value")
        _open_in_torch.records.append(self.open(_observers))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_open_in_torch.records.pop(), _observers)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` with the range around every call."""

        @functools.wraps(function)
        def annotated(*args: P.args, **kwargs: P.kwargs) -> R:
            if _is_compiling():
                return function(*args, **kwargs)
            called = self._of_call(args, kwargs)
            for observer in _observers:
                observer.calling(called.name)
            with called:
                for observer in _observers:
                    observer.called((args, kwargs))
                result = function(*args, **kwargs)
                for observer in _observers:
                    observer.returned(result)
            for observer in _observers:
                observer.has_returned(called.name)
            return result

        vars(annotated)[_RANGE] = self
        return annotated

    @property
    def name(self) -> str:
        """What the range is called.

        Raises:
            TypeError: only a decorated call tells it.
        """
        if callable(self._name):
            raise TypeError("a name given as a function needs a decorated call")
        return self._name

    def _of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Range:
        if self._marker is not None:
            return self
        name = self._name(*args, **kwargs) if callable(self._name) else self._name
        return Range(name, self._flops(*args, **kwargs) if callable(self._flops) else self._flops)


def _enter(marker: Any, _marker: Any) -> None:
    marker.__enter__()


def _exit(marker: Any) -> None:
    marker.__exit__(None, None, None)


def record_in_torch(on: bool) -> None:
    """Have every range of this process also open a ``record_function`` while no profiler runs, or stop that.

    The allocator's memory history keeps them as its annotations. It costs some ten microseconds a range.
    """
    global _always_in_torch  # noqa: PLW0603  a switch of the process
    _always_in_torch = on
    _update_others()


_always_in_torch = False


def leave_profiler_out(on: bool) -> None:
    """Have ranges open no ``record_function`` though torch.profiler records, for it keeps none, or stop that."""
    global _leaves_profiler_out  # noqa: PLW0603  a switch of the process
    _leaves_profiler_out = on


_leaves_profiler_out = False


class RangeObserver:
    """Sees ranges on the thread on which they open and close; this one does nothing."""

    def opening(self, name: str) -> None:
        """A range is about to open inside those that are open on this thread."""

    def closing(self) -> None:
        """This thread's innermost range is about to close."""

    def closed(self) -> None:
        """This thread's innermost range has closed."""

    def calling(self, name: str) -> None:
        """A decorated function is about to be called; its range opens next."""

    def called(self, arguments: Any) -> None:
        """The range that has just opened is a decorated function's, called with these arguments."""

    def returned(self, result: Any) -> None:
        """That function returned; its range is still open."""

    def has_returned(self, name: str) -> None:
        """A decorated function has returned, and its range is closed."""


def observe_ranges(observer: RangeObserver) -> None:
    """Show ``observer`` every range of this process from now on."""
    _observers.append(observer)
    _update_others()


def ignore_ranges(observer: RangeObserver) -> None:
    """Show ``observer`` no more ranges."""
    _others.pop(observer, None)
    if observer in _observers:
        _observers.remove(observer)
        _update_others()


def observers_but(opener: RangeObserver) -> Sequence[RangeObserver]:
    """Return who is shown the ranges that ``opener`` opens: all observers but itself, now and later.

    While there is nobody, and torch.profiler records nothing, `Range.push` does what `Range.open` does.
    """
    others = _others.setdefault(opener, [])
    _update_others()
    return others


def _update_others() -> None:
    for opener, others in _others.items():
        others[:] = [observer for observer in _observers if observer is not opener] + [
            RangeObserver()
        ] * _always_in_torch


_observers: list[RangeObserver] = []
_others: dict[RangeObserver, list[RangeObserver]] = {}


class _OpenInTorch(threading.local):
    """Of each range that this thread has open, innermost last, its record_function, or None if it has none."""

    def __init__(self) -> None:
        self.records: list[Any] = []


_open_in_torch = _OpenInTorch()


def _is_compiling() -> bool:
    compiler = sys.modules.get("torch.compiler")
    return compiler is not None and compiler.is_compiling()


def _look_for_torch() -> bool:
    """Return whether torch.profiler records; once torch is there, the same question without a search takes over."""
    global _is_profiling  # noqa: PLW0603  looking for a module costs more than all the rest of a range
    torch, profiler = sys.modules.get("torch.autograd"), sys.modules.get("torch.autograd.profiler")
    if profiler is None or not hasattr(torch, "_profiler_enabled"):  # not there, or only half imported
        return False
    is_enabled_here = torch._profiler_enabled  # type: ignore[union-attr]
    # The second knows this thread alone: other threads may be recorded too.
    _is_profiling = lambda: bool(getattr(profiler, "_is_profiler_enabled", False)) or is_enabled_here()  # noqa: E731
    return _is_profiling()


_is_profiling: Callable[[], bool] = _look_for_torch
