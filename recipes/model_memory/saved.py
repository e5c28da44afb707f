"""What autograd saves for the backward pass of each transformer block, counted as it is saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
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
    running: list[tuple[int, str]] = []  # The block's number and the part's name, the innermost last.
    parts: list[list[Part]] = [[] for _ in blocks]
    outputs: dict[int, Tensor] = {}
    outside: list[int] = []
    seen = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers(), *inputs)}

    def begin(place: tuple[int, str], *_: object) -> None:
        running.append(place)

    def end(place: tuple[int, str], _module: nn.Module, _inputs: object, output: Tensor) -> None:
        running.pop()
        number, name = place
        if not name:
            outputs[number] = output.detach()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            if running:
                number, name = running[-1]
                part = Part(_maker(tensor), name, tuple(tensor.shape), _name(tensor.dtype), storage.nbytes())
                parts[number].append(part)
            else:
                outside.append(storage.nbytes())
        # Keep the storage, so that no other takes its address; but not the node, which would hold its results.
        return tensor.detach()

    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            for name, part in block.named_modules():
                hooks.enter_context(part.register_forward_pre_hook(partial(begin, (number, name))))
                hooks.enter_context(part.register_forward_hook(partial(end, (number, name))))
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        forward()
    accounts = [
        BlockAccount(tuple(saved), tuple(output.shape), _name(output.dtype), output.untyped_storage().nbytes())
        for saved, (_, output) in zip(parts, sorted(outputs.items()), strict=True)
    ]
    return SavedAccount(tuple(accounts), sum(outside))


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
