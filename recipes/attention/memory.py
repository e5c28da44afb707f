"""The memory of one forward and backward pass of attention, tensor by tensor, worked out on torch's meta device.

The implementation itself runs on tensors that have sizes and no contents, and every storage that an operator makes is
followed until it is freed. Sizes are as requested: the allocator rounds up to 512 bytes, and libraries add workspaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.attention.cells import BATCH, CHECKPOINTED
from recipes.attention.implementations import Attention, find_attention

# What the operators make, by phase, operator and how often it ran before in that phase; two tensors have two names.
_NAMES = {
    ("forward", "bmm", 0): "Q·Kᵀ",
    ("forward", "div", 0): "S = Q·Kᵀ/√d",
    ("forward", "max", 0): "row maximum; place of the row maximum",
    ("forward", "amax", 0): "row maximum",
    ("forward", "sub", 0): "S − maximum",
    ("forward", "exp", 0): "exp(S − maximum)",
    ("forward", "sum", 0): "row sum",
    ("forward", "div", 1): "P",
    ("forward", "_softmax", 0): "P",
    ("forward", "bmm", 1): "O",
    ("backward", "bmm", 0): "dV",
    ("backward", "bmm", 1): "dP",
    ("backward", "bmm", 2): "dK",
    ("backward", "bmm", 3): "dQ",
}


@dataclass(frozen=True)
class Live:
    """A storage that exists at a peak."""

    name: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class PassMemory:
    """Bytes of the inputs (Q, K, V, dO) and of what autograd saves; the storages that exist at each phase's peak."""

    input_bytes: int
    saved_bytes: int
    peaks: Mapping[str, tuple[Live, ...]]

    def peak_bytes(self, phase: str) -> int:
        return sum(live.bytes for live in self.peaks[phase])


class _LiveStorages(TorchDispatchMode):
    """Follows storages from the operator that makes them to their end, and remembers which existed at the peak."""

    def __init__(self, *, names_backward: bool) -> None:
        super().__init__()
        self._names_backward = names_backward
        self.phase = "forward"
        self.peaks: dict[str, tuple[Live, ...]] = {}
        self._live: dict[int, tuple[StorageWeakRef, Live]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def follow(self, name: str, tensor: Tensor) -> None:
        """Follow a tensor from now on."""
        storage = tensor.untyped_storage()
        self._live[storage._cdata] = (StorageWeakRef(storage), Live(name, tuple(tensor.shape), storage.nbytes()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        result = func(*args, **(kwargs or {}))
        operator = str(func.overloadpacket).removeprefix("aten.")
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        new = [leaf for leaf in leaves if leaf.untyped_storage()._cdata not in self._live]
        if new:
            number = self._counts[self.phase, operator]
            self._counts[self.phase, operator] += 1
            named = self.phase == "forward" or self._names_backward
            known = _NAMES.get((self.phase, operator, number)) if named else None
            names = (known or f"{self.phase}, {operator}").split("; ")
            for place, tensor in enumerate(new):
                self.follow(names[min(place, len(names) - 1)], tensor)
            live = tuple(live for _, live in self._live.values())
            if sum(each.bytes for each in live) > sum(each.bytes for each in self.peaks.get(self.phase, ())):
                self.peaks[self.phase] = live
        return result


def work_out(name: str, seq_len: int, d_model: int, dtype: torch.dtype) -> PassMemory:
    """Return the memory of one forward and backward pass of an eager implementation that does not choose kernels."""
    attention = find_attention(name)
    shape = (BATCH, seq_len, d_model)
    inputs = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)]
    gradient = torch.empty(shape, dtype=dtype, device="meta")
    # A backward pass that runs forward again makes matrix products that are no gradients.
    storages = _LiveStorages(names_backward=name != CHECKPOINTED)
    for label, tensor in zip(("Q", "K", "V", "dO"), (*inputs, gradient), strict=True):
        storages.follow(label, tensor)
    with storages:
        output = attention(*inputs)
        storages.phase = "backward"
        output.backward(gradient)
    input_bytes = sum(tensor.untyped_storage().nbytes() for tensor in (*inputs, gradient))
    return PassMemory(input_bytes, saved_bytes(attention, inputs), storages.peaks)


def saved_bytes(attention: Attention, inputs: list[Tensor]) -> int:
    """Return the bytes that autograd saves for the backward pass of ``attention(*inputs)``, without the inputs.

    Each storage counts once: two operators may save the same tensor, or a view of it.
    """
    ours = {tensor.untyped_storage()._cdata for tensor in inputs}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ours:
            saved[storage._cdata] = storage.nbytes()
        # Keep the storage, so that no other takes its address. An output saved as it is would hold the node that made
        # it, which holds what is saved: a reference cycle that keeps the memory for ever.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = attention(*inputs)
    del output
    return sum(saved.values())
