"""What autograd saves for the backward pass of each transformer block, counted as it is saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NODE = re.compile(r"(?P<operator>\w+?)Backward\d*$")
_VIEWS = frozenset(
    {"View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Expand", "Unsqueeze", "Squeeze", "Slice"}
)
_CAST = "ToCopy"


@dataclass(frozen=True)
class Part:
    """A saved tensor: the operator that made it, the part of the block that saved it first, its size."""

    made_by: str
    saved_in: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class BlockAccount:
    """One block: the tensors saved for its backward, and its output.

    A block's input counts as its own, because its norm saves it; its output is the next block's input.
    """

    parts: tuple[Part, ...]
    output_shape: tuple[int, ...]
    output_dtype: str
    output_bytes: int

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class SavedAccount:
    """What a forward pass saves, by block and outside of the blocks.

    Each storage counts once, where it is saved first. Parameters, buffers and inputs do not count: they exist anyway.
    """

    blocks: tuple[BlockAccount, ...]
    outside_bytes: int

    @property
    def bytes(self) -> int:
        return sum(block.bytes for block in self.blocks) + self.outside_bytes


def count_saved(
    module: nn.Module, blocks: nn.ModuleList, inputs: Iterable[Tensor], forward: Callable[[], object]
) -> SavedAccount:
    """Return what ``forward()`` saves for backward; it runs ``module`` with its ``blocks`` on ``inputs``."""
    counter = _Counter(blocks, (*module.parameters(), *module.buffers(), *inputs))
    with counter.watching(), torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda tensor: tensor):
        result = forward()
    del result
    return counter.account()


class _Counter:
    """Follows which part of which block is running, and notes what is saved there."""

    def __init__(self, blocks: nn.ModuleList, standing: Iterable[Tensor]) -> None:
        self._blocks = blocks
        self._running: list[tuple[int, str]] = []
        self._parts: list[list[Part]] = [[] for _ in blocks]
        self._outputs: dict[int, Tensor] = {}
        self._seen = {tensor.untyped_storage()._cdata for tensor in standing}
        self._outside_bytes = 0

    def account(self) -> SavedAccount:
        """Return what was noted."""
        blocks = (self._account(parts, self._outputs[number]) for number, parts in enumerate(self._parts))
        return SavedAccount(tuple(blocks), self._outside_bytes)

    @staticmethod
    def _account(parts: list[Part], output: Tensor) -> BlockAccount:
        return BlockAccount(tuple(parts), tuple(output.shape), _name(output.dtype), output.untyped_storage().nbytes())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the blocks' modules as they begin and end."""
        handles: list[Any] = []
        for number, block in enumerate(self._blocks):
            for name, module in block.named_modules():
                handles.append(module.register_forward_pre_hook(self._begin(number, name)))
                handles.append(module.register_forward_hook(self._end(number, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, number: int, name: str) -> Callable[..., None]:
        return lambda *_: self._running.append((number, name))

    def _end(self, number: int, name: str) -> Callable[..., None]:
        def end(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            self._running.pop()
            if not name:
                self._outputs[number] = output.detach()

        return end

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a saved tensor, unless its storage is noted already."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            if self._running:
                number, name = self._running[-1]
                part = Part(_maker(tensor), name, tuple(tensor.shape), _name(tensor.dtype), storage.nbytes())
                self._parts[number].append(part)
            else:
                self._outside_bytes += storage.nbytes()
        # Keep the storage, so that no other takes its address; but not the node, which would hold its results.
        return tensor.detach()


def _maker(tensor: Tensor) -> str:
    """Return the operator that made a tensor, ignoring views; unknown for tensors without a gradient."""
    node: Any = tensor.grad_fn
    names: list[str] = []
    while node is not None and len(names) < 2:
        found = _NODE.search(node.name())
        name = found["operator"] if found else ""
        if name not in _VIEWS:
            names.append(name)
        node = node.next_functions[0][0] if node.next_functions else None
    if not names:
        return "without a gradient"
    if names[0] == _CAST:
        return "cast of a weight" if names[1:] == [""] else "cast"
    return re.sub(r"(?<!^)(?=[A-Z])", "_", names[0]).lower()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
