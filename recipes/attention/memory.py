"""The memory of one forward and backward pass of attention, tensor by tensor, worked out on torch's meta device.

The implementation itself runs on tensors that have sizes and no contents, and every storage that an operator makes is
followed until it is freed. Sizes are as requested: the allocator rounds up to 512 bytes, and libraries add workspaces.

Attention without heads is written in several ways: query, key, value ``(batch, seq, d)`` → output ``(batch, seq, d)``.
All but ``causal`` compute the same function. They save different tensors for backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from recipes.attention.cells import BATCH, CAUSAL, CHECKPOINTED, COMPILED, FUSED, SDPA, WRITTEN, WRITTEN_AMAX

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def written(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax step by step; ``max`` also returns the maximum's place, which its backward would need."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    shifted = scores - scores.max(dim=-1, keepdim=True).values
    powers = torch.exp(shifted)
    weights = powers / powers.sum(dim=-1, keepdim=True)
    return weights @ value


def written_amax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax step by step; ``amax`` saves scores and maximum, to divide the gradient among equal maxima."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    powers = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    weights = powers / powers.sum(dim=-1, keepdim=True)
    return weights @ value


def fused_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's own softmax: one operator, which saves only its output."""
    return functional.softmax(query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]), dim=-1) @ value


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Like ``written``, but each position sees only those up to itself; the mask is saved too, one byte per entry."""
    length = query.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])).masked_fill(hidden, -math.inf)
    powers = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    weights = powers / powers.sum(dim=-1, keepdim=True)
    return weights @ value


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's fused attention, with one head: its fast kernels need a dimension for heads."""
    return functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]


def checkpointed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Like ``written``, which backward runs again instead of saving anything."""
    output: Tensor = checkpoint(written, query, key, value, use_reentrant=False)
    return output


def find_attention(name: str) -> Attention:
    """Return an implementation by its name; the compiled one compiles when it is called first."""
    if name == COMPILED:
        compiled: Attention = torch.compile(written)
        return compiled
    return {
        WRITTEN: written,
        WRITTEN_AMAX: written_amax,
        FUSED: fused_softmax,
        CAUSAL: causal,
        CHECKPOINTED: checkpointed,
        SDPA: sdpa,
    }[name]


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
