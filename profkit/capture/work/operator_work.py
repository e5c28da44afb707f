"""What one call of an operator does: FLOPs by formula, and which parts of which memory it reads and writes.

A ``TorchDispatchMode`` sees each operator below autograd, on the autograd threads too: a backward pass takes the modes
of the thread that began it along (``at::ThreadLocalState``). It computes nothing itself and changes no operator, so
results are the same to the bit, but for the gradients that `profkit.capture.work.operators.has_other_gradient` names.
Other threads of the script are not seen.

What a CUDA graph computes is noted operator by operator while it is captured, and done again by each replay. A replay
runs no Python, so nobody sees operators in it. It does what was captured: the operators that made nodes of the graph,
in the ranges of the capture. What ran meanwhile without a node, on the CPU, is no part of a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from profkit.capture.hooks.backward_nodes import is_computed_again, is_recomputing
from profkit.capture.work import Access, Products
from profkit.capture.work.operators import (
    BLANK,
    LOOKED_UP,
    OVERWRITING,
    QUERIES,
    UNREAD,
    WRITTEN_IF,
    base_name,
    dtype_name,
    is_made_of_others,
    masked_flops,
    name_arguments,
    other_flops,
    recomputed_flops,
    torch_flops,
)

Buffers = dict[int, StorageWeakRef]
"""The memory that operators have touched. The references keep each address from being given to other memory."""


@dataclass(frozen=True)
class OperatorWork:
    """What one call of an operator does; ``missing`` says what of it is not counted, None if all is."""

    name: str
    dtype: str
    products: Products
    other_flops: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    missing: str | None = None


class OperatorMode(TorchDispatchMode):
    """Sees the operators that run from ``__enter__`` to ``__exit__``."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code that is compiled run compiled; without this torch would run it as it was written."""
        return True

    def begins(self) -> Any:
        """An operator is about to run; what is returned is given to `ended`."""

    def ended(self, begun: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], returned: Any) -> None:
        """It ran."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if base_name(func) in QUERIES:
            return NotImplemented
        if not isinstance(func, HigherOrderOperator):
            device = next((one.device.type for one in _tensors([*args, *kwargs.values()])), "cpu")
            if is_made_of_others(func, device.upper()):
                with self:
                    return func.decompose(*args, **kwargs)
        begun = self.begins()
        result = func(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self.ended(begun, func, args, kwargs, result)
        return result


def describe_call(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], returned: Any, buffers: Buffers
) -> OperatorWork | None:
    """Return what a call did; None if it did nothing but look at memory. ``buffers`` gets what it touched."""
    operator = _Operator(func, args, kwargs, returned)
    if not operator.operands and not operator.results:
        return None
    if not operator.written and operator.is_view(buffers):
        return None
    missing, other = None, 0
    try:
        flops = torch_flops(func, args, kwargs, returned)
    except Exception as error:  # a formula of torch's that does not foresee this call must not end the script
        flops = 0
        missing = f"{operator} ({type(error).__name__} in torch's formula)"
    if flops is None:
        flops, known = 0, other_flops(func, operator.given, operator.results)
        other = known or 0
        if known is None:
            missing = str(operator)
    is_again = is_recomputing() or is_computed_again()  # by torch's checkpoint, or by somebody else's
    reads, writes = ((), ()) if operator.name in BLANK else operator.touched(buffers)
    again = flops if is_again else recomputed_flops(func, operator.given, flops)
    masked = masked_flops(func, operator.given, flops)
    products = Products(flops, dtype_name(func, operator.operands), masked, again)
    kept = next(iter((*operator.results, *operator.operands)))
    dtype = str(kept.dtype).removeprefix("torch.")
    return OperatorWork(operator.name, dtype, products, other, reads, writes, missing)


class _Operator:
    """One call of an operator: its arguments by name, the tensors among them, those it writes to, and its results."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], returned: Any) -> None:
        self.func = func
        self.name = base_name(func)
        schema = getattr(func, "_schema", None)
        arguments = () if schema is None else schema.arguments
        self.given = name_arguments(func, args, kwargs)
        self.operands = list(_tensors(self.given.values()))
        self.written = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
        if getattr(func, "namespace", "") == "c10d":
            self.written = list(self.given)[:1]  # as all of these do, though their schemas do not say so
        kept, needed = WRITTEN_IF.get(self.name, ("", ""))
        if self.given.get(needed) is None:
            self.written = [name for name in self.written if name != kept]
        changed = list(_tensors(self.given.get(name) for name in self.written))
        known = {id(one) for one in self.operands}
        self.outputs = list(_tensors([returned]))
        self.results = [*changed, *(one for one in self.outputs if id(one) not in known)]

    def __str__(self) -> str:
        return str(self.func.name()) if hasattr(self.func, "name") else str(self.func)

    def is_view(self, buffers: Buffers) -> bool:
        keys = {storage_of(one, buffers) for one in self.operands}
        return bool(self.outputs) and all(storage_of(one, buffers) in keys for one in self.outputs)

    def touched(self, buffers: Buffers) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        unread = self._unread()
        reads = [
            _access(one, self._limit_of(name), buffers)
            for name, value in self.given.items()
            if name not in unread
            for one in _tensors([value])
        ]
        writes = [_access(one, None, buffers) for one in self.results]
        return tuple(filter(None, reads)), tuple(filter(None, writes))

    def _unread(self) -> set[str]:
        # Results that are given to be filled are called out by their overload.
        fills = self.name in OVERWRITING or "out" in str(getattr(self.func, "_overloadname", ""))
        return {*UNREAD.get(self.name, ()), *(self.written if fills else ())}

    def _limit_of(self, name: str) -> int | None:
        source, by = LOOKED_UP.get(self.name, ("", None))
        if name != source or not self.results:
            return None
        count = self.results[0].numel() if by is None else self.given[by].numel()
        return int(count) * int(self.given[name].element_size())


def storage_of(tensor: Tensor, buffers: Buffers) -> Hashable:
    """Return what stands for a tensor's memory, which ``buffers`` keeps from being taken for other memory."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return id(tensor)
    storage = StorageWeakRef(tensor.untyped_storage())
    return buffers.setdefault(storage.cdata, storage).cdata


def _access(tensor: Tensor, limit: int | None, buffers: Buffers) -> Access | None:
    """Return what is touched of a tensor: no more than ``limit`` bytes; None for sparse and nested ones."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    key = storage_of(tensor, buffers)
    part = _part(tensor)
    size = tensor.element_size()
    for _, length in part:
        size *= length
    size = size if limit is None else min(size, limit)
    whole = tensor.untyped_storage().nbytes()
    return Access(key, (tensor.storage_offset(), part, size), size, max(whole, size) if whole else size)


def _part(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Return (stride, length) of a tensor's elements in memory: the same however they are ordered and grouped."""
    pairs = sorted(
        (stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if stride and length != 1
    )
    merged: list[tuple[int, int]] = []
    for stride, length in pairs:
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * length)
        else:
            merged.append((stride, length))
    return tuple(merged)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@dataclass(frozen=True)
class GraphPart:
    """Nodes of a graph that were made one after another in the same ``ranges``, and what made them."""

    node_count: int
    ranges: tuple[str, ...]
    operators: tuple[OperatorWork, ...] = ()


@dataclass(frozen=True)
class GraphWork:
    """What a replay does, in order; ``buffers`` is the memory that it touches."""

    parts: tuple[GraphPart, ...]
    buffers: Buffers


ReplayObserver = Callable[[GraphWork | None], None]

replay_observers: list[ReplayObserver] = []
"""They are called on the thread of each replay, within its range, with what it does; None: that is not known."""


class CapturedOperators(OperatorMode):
    """Notes what is captured.

    Args:
        fail: is called with what went wrong; nothing is noted any more then.
    """

    def __init__(self, count_nodes: Callable[[], int | None], fail: Callable[[Exception], None]) -> None:
        super().__init__()
        self._count_nodes = count_nodes
        self._fail = fail
        self.buffers: Buffers = {}
        self.since: list[OperatorWork] = []
        """What made nodes since somebody last took it."""

    def begins(self) -> int | None:
        return self._count_nodes()

    def ended(self, begun: int | None, func: Any, args: Sequence[Any], kwargs: dict[str, Any], returned: Any) -> None:
        try:
            if self._count_nodes() != begun:
                work = describe_call(func, args, kwargs, returned, self.buffers)
                self.since += [] if work is None else [work]
        except Exception as error:  # the script's capture goes on
            self._fail(error)
