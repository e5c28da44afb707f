"""What autograd saved for a backward pass, read from its graph before that begins. Nothing is unpacked or changed.

A node of the graph keeps each saved tensor in a ``SavedTensor``. Newer torch shows what that keeps. Older torch has
only the unpacked tensor, and unpacking is harmless unless a hook packed it
(`torch.autograd.graph.saved_tensors_hooks`): a checkpoint's hook computes the tensor again. There nothing is read any
more once hooks were used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from profkit.capture.patches import call_between, patch
from profkit.capture.steps.variable_names import variables_at_hand

_MOST_NODES = 200_000
_NESTING = 3
_RAW = "_raw_saved_"
_SHOWS_CONTENT = hasattr(getattr(torch._C._autograd, "SavedTensor", None), "unpack_hook")


# What a hook may have put in a tensor's place: a checkpoint's mark, or the name of a file.
_HOLDS_NO_TENSOR = {"NoneType", "_Holder", "str", "PosixPath"}


def read_saved(roots: Any, note: Callable[[Tensor], None]) -> int:
    """Call ``note`` with each tensor that is saved for the backward pass of ``roots``; some come several times.

    Parameters and views of them are left out. What a checkpoint keeps, to compute a part again, is among them.

    Returns:
        How many could not be read, at least: they lie in an object of a hook's own, this torch does not show them, or
        the graph has more nodes than are visited.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return _Walk(note).from_roots(roots)


def tensors_at_hand() -> list[Tensor]:
    """Return the tensors with a graph in the variables of this thread's running functions, the innermost first.

    In the middle of a forward pass they lead to what it has saved so far.
    """
    found: list[Tensor] = []
    for value in variables_at_hand():
        parts = value if type(value) in (tuple, list) else (value,)
        found += [one for one in parts if issubclass(type(one), Tensor) and one.grad_fn is not None]
    return found


def is_cast_of_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is autocast's copy of a parameter, or a view of one."""
    node = _base(tensor).grad_fn
    if node is None or type(node).__name__ != "ToCopyBackward0":
        return False
    return all(type(one).__name__ == "AccumulateGrad" for one, _ in node.next_functions)


def watch_hooks() -> None:
    """Note from now on whether hooks for saved tensors are used, where torch does not show what they packed."""
    if not _SHOWS_CONTENT:
        note_use = call_between(partial(setattr, _hooks, "were_used", True), None)
        patch("torch._C._autograd._push_saved_tensors_default_hooks", note_use)


class _Hooks:
    were_used = False


_hooks = _Hooks()


class _Walk:
    """One visit of a graph's nodes."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        self._note = note
        self._unread = 0
        self._names: dict[type, list[str]] = {}
        self._frames: set[int] = set()

    def from_roots(self, roots: Any) -> int:
        """Visit every node that ``roots`` lead to, and return how many tensors could not be read."""
        waiting = list(_nodes(roots))
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            if len(seen) == _MOST_NODES:
                return self._unread + len(waiting) + 1
            seen.add(node)
            self._visit(node)
            waiting.extend(one for one, _ in node.next_functions if one is not None)
        return self._unread

    def _visit(self, node: Any) -> None:
        kind = type(node)
        if kind not in self._names:
            self._names[kind] = [name for name in dir(kind) if name.startswith(_RAW)]
        for name in self._names[kind]:
            try:
                self._read(node, name)
            except RuntimeError:
                self._unread += 1
        # What a Python function put onto its context is kept too.
        self._note_tensors(list(getattr(node, "__dict__", {}).values()))

    def _read(self, node: Any, name: str) -> None:
        if _SHOWS_CONTENT:
            for saved in _each(getattr(node, name)):
                self._read_content(saved)
        elif _hooks.were_used:
            self._unread += 1
        else:
            # C++ nodes have `_saved_result` beside `_raw_saved_result`, Python functions `saved_tensors`.
            is_cpp = hasattr(type(node), name.replace("_raw", "", 1))
            self._note_tensors(getattr(node, name.replace("_raw", "", 1) if is_cpp else name.removeprefix("_raw_")))

    def _read_content(self, saved: Any) -> None:
        """Note what a ``SavedTensor`` keeps; where a checkpoint's hook packed it, what the checkpoint's frame keeps."""
        if saved is None:
            return
        content = saved.data
        if not self._note_tensors(content) and type(content).__name__ not in _HOLDS_NO_TENSOR:
            self._unread += 1
        for cell in getattr(saved.unpack_hook, "__closure__", None) or ():
            frame = cell.cell_contents
            if type(frame).__name__ == "_CheckpointFrame" and id(frame) not in self._frames:
                self._frames.add(id(frame))
                for one in _inputs_of(frame):
                    self._read_content(one)

    def _note_tensors(self, value: Any, nesting: int = _NESTING) -> bool:
        """Note the tensors in a value, and return whether there are any."""
        if isinstance(value, Tensor):
            if not isinstance(_base(value), nn.Parameter):
                self._note(value)
            return True
        parts = value if nesting and isinstance(value, tuple | list) else ()
        are_noted = [self._note_tensors(one, nesting - 1) for one in parts]
        return any(are_noted)


def _inputs_of(frame: Any) -> list[Any]:
    """Return what a checkpoint's frame saves of its inputs; where, differs between versions of torch."""
    if hasattr(frame, "saved_args"):
        return [one for one in frame.saved_args if hasattr(one, "unpack_hook")]
    return list(_each(getattr(getattr(frame, "input_saver", None), "_raw_saved_tensors", ())))


def _nodes(value: Any, nesting: int = _NESTING) -> Iterator[Any]:
    """Yield the nodes in what a backward call differentiates: tensors, or edges of the graph."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif hasattr(value, "next_functions"):
        yield value
    elif nesting and isinstance(value, tuple | list):
        for one in value:
            yield from _nodes(one, nesting - 1)


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
