"""Counts what a script's operators do while they run: FLOPs by formula, and bytes by which memory they touch.

A ``TorchDispatchMode`` sees each operator below autograd, on the autograd threads too: a backward pass takes the modes
of the thread that began it along (``at::ThreadLocalState``). It computes nothing itself and changes no operator, so
results are the same to the bit; only the gradient of ``prod`` takes another formula in torch while any mode is on, and
may differ in the last bit. Other threads of the script are not seen.

Of compiled code (torch.compile) it sees what the compiler leaves to torch's libraries. The matrix products of a launch
are those of the graph that the code was made of (`profkit.capture.node_work`), under the modules that the launch
computes for. Where they are not known there, because a size is a symbol, what the libraries are asked for counts. What
fused kernels do besides products, and the bytes that they move, is not counted: `missing` says so. It says "compiled
code" where compiled code ran and no launch of it was seen. The replay of a CUDA graph does the launches of compiled
code that were captured; where it has other kernels, `missing` says "replayed CUDA graphs".
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Hashable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from profkit.annotation import RangeObserver, ignore_ranges, observe_ranges
from profkit.capture.compiled.watch import launch_at
from profkit.capture.compiled.work import CompiledInstances
from profkit.capture.graph_nodes import captured
from profkit.capture.operators import (
    BLANK,
    LOOKED_UP,
    OVERWRITING,
    QUERIES,
    UNREAD,
    base_name,
    dtype_name,
    is_made_of_others,
    masked_flops,
    name_arguments,
    other_flops,
    recomputed_flops,
    torch_flops,
)
from profkit.capture.recompute import is_computed_again, is_recomputing
from profkit.capture.work_account import Access, Instance, WorkAccount, summarize_work
from profkit.names import COUNTED, OPTIMIZER, STEP, WARMUP
from profkit.run.compiled_code import CapturedGraph, Launch, LaunchPlace, read_graph_range, read_launch_range
from profkit.run.work import RunWork

_COMPILED = "compiled code"
_FUSED = "fused kernels of compiled code, but for their matrix products"
_REPLAY = "replayed CUDA graphs"
_STEP = re.compile(rf"{STEP} \d+|{WARMUP}|{COUNTED}")


class _Operator:
    """One call of an operator: its arguments by name, the tensors among them, those it writes to, and its results."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], returned: Any) -> None:
        self.func, self.args, self.kwargs, self.returned = func, args, kwargs, returned
        self.name = base_name(func)
        schema = getattr(func, "_schema", None)
        arguments = () if schema is None else schema.arguments
        self.given = name_arguments(func, args, kwargs)
        self.operands = list(_tensors(self.given.values()))
        self.written = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
        if getattr(func, "namespace", "") == "c10d":
            self.written = list(self.given)[:1]  # as all of these do, though their schemas do not say so
        changed = list(_tensors(self.given.get(name) for name in self.written))
        known = {id(one) for one in self.operands}
        self.outputs = list(_tensors([returned]))
        self.results = [*changed, *(one for one in self.outputs if id(one) not in known)]

    def __str__(self) -> str:
        return str(self.func.name()) if hasattr(self.func, "name") else str(self.func)

    @property
    def unread(self) -> set[str]:
        """The names of the arguments with values that do not matter."""
        # Results that are given to be filled are called out by their overload.
        fills = self.name in OVERWRITING or "out" in str(getattr(self.func, "_overloadname", ""))
        return {*UNREAD.get(self.name, ()), *(self.written if fills else ())}

    def limit_of(self, name: str) -> int | None:
        """Return how many bytes of an argument are read at most, None if it is all of them."""
        source, by = LOOKED_UP.get(self.name, ("", None))
        if name != source or not self.results:
            return None
        count = self.results[0].numel() if by is None else self.given[by].numel()
        return int(count) * int(self.given[name].element_size())


class _Launch:
    """A launch of compiled code that runs: its record, if there is one, and whether an operator with products ran."""

    def __init__(self, record: Launch | None) -> None:
        self.record = record
        self.is_known = record is not None and record.flops is not None
        self.has_products = False


class WorkCounter(TorchDispatchMode, RangeObserver):
    """Counts from `start` to `stop`; `content` returns the result."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._account = WorkAccount()
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        self._open: dict[int, list[Instance]] = {}
        self._compiled = CompiledInstances(self._account)
        self._launches: dict[int, list[tuple[int, _Launch]]] = {}
        self._has_seen_launch = False
        self._buffers: dict[int, StorageWeakRef] = {}
        self._missing: set[str] = set()
        self._model_flops = 0
        self._graphs_before = 0
        self._work: dict[tuple[str, ...], Any] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code that is compiled run compiled; without this torch would run it as it was written."""
        return True

    def start(self) -> None:
        """Count from now on, on this thread and the backward passes that it begins."""
        self._main = threading.get_ident()
        observe_ranges(self)
        self.__enter__()

    def stop(self) -> None:
        """Count no more."""
        self.__exit__(None, None, None)
        ignore_ranges(self)
        if _has_compiled() and not self._has_seen_launch:
            self._missing.add(_COMPILED)
        self._work = self._account.by_path(lambda key: not self._buffers[key].expired())  # type: ignore[index]
        self._buffers.clear()

    def content(self) -> RunWork:
        """Return the content of ``work.json``."""
        return summarize_work(self._work, self._model_flops, self._missing)

    def opening(self, name: str) -> None:
        """Take note of a range that opens on this thread."""
        replayed = read_graph_range(name)
        with self._lock:
            thread = threading.get_ident()
            if replayed is None:
                self._opens(name, thread)
            else:
                self._open.setdefault(thread, []).append(self._innermost())
                self._replay(captured.get(replayed), thread)

    def closed(self) -> None:
        """Take note that this thread's innermost range closed; one that was open before counting began is unknown."""
        with self._lock:
            self._closes(threading.get_ident())

    def _opens(self, name: str, thread: int) -> None:
        around, place = self._innermost(), read_launch_range(name)
        if place is not None:
            self._launch(thread, place, around)
            return
        self._compiled.interrupt(thread)
        is_step = around is self._account.step and _STEP.fullmatch(name)
        instance = around if is_step else self._account.open(name, around)
        self._open.setdefault(thread, []).append(instance)

    def _closes(self, thread: int) -> None:
        stack, launches = self._open.get(thread), self._launches.get(thread)
        if launches and stack is not None and launches[-1][0] == len(stack):
            launch = launches.pop()[1]
            if not launches:
                self._launched(launch)
        else:
            self._compiled.interrupt(thread)
        if stack:
            stack.pop()

    def _replay(self, graph: CapturedGraph | None, thread: int) -> None:
        """Count the launches of compiled code that a replay makes, in the ranges of its capture."""
        if graph is None:
            self._missing.add(_REPLAY)
            return
        now: list[str] = []
        for path in (*(run.ranges for run in graph.runs), ()):
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(now, path, strict=False)))
            for _ in now[same:]:
                self._closes(thread)
            for name in path[same:]:
                self._opens(name, thread)
            now = list(path)
        if any(run.kind == "kernel" and not any(map(read_launch_range, run.ranges)) for run in graph.runs):
            self._missing.add(_REPLAY)

    def _launch(self, thread: int, place: LaunchPlace, around: Instance) -> None:
        """Count the products of a launch of compiled code, which begins."""
        self._has_seen_launch = True
        stack, launches = self._open.setdefault(thread, []), self._launches.setdefault(thread, [])
        # A launch within another says nothing: the outer one is what the program called.
        innermost = around if launches else self._compiled.enter(thread, place, around)
        stack.append(innermost)
        launch = _Launch(launch_at(place.graph, place.line))
        launches.append((len(stack), launch))
        record = launch.record
        # What is captured into a CUDA graph runs when that is replayed.
        if len(launches) == 1 and record is not None and record.flops and not _is_capturing():
            self._account.add(
                innermost,
                flops=record.flops,
                dtype=record.dtype or "unknown",
                masked_flops=record.masked_flops,
                recomputed_flops=record.recomputed_flops,
            )
            self._add_model_flops(record.flops - record.recomputed_flops, innermost)

    def _launched(self, launch: _Launch) -> None:
        """Note what is not counted of a launch that has ended."""
        if launch.record is None or not launch.record.is_extern:
            self._missing.add(_FUSED)
        if not launch.is_known and not launch.has_products:
            self._missing.add(_COMPILED)

    def _add_model_flops(self, flops: int, innermost: Instance) -> None:
        if OPTIMIZER not in innermost.path:
            self._model_flops += flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if base_name(func) in QUERIES:
            return NotImplemented
        if not isinstance(func, HigherOrderOperator):
            device = next((one.device.type for one in _tensors([*args, *kwargs.values()])), "cpu")
            if is_made_of_others(func, device.upper()):
                with self:
                    return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if not torch.compiler.is_compiling():
            with self._lock:
                self._count(_Operator(func, args, kwargs, result))
        return result

    def _innermost(self) -> Instance:
        """Return the innermost open range: of this thread, else of the one whose backward pass this thread runs."""
        stack = self._open.get(threading.get_ident()) or self._open.get(self._main)
        return stack[-1] if stack else self._account.step

    def _count(self, operator: _Operator) -> None:
        if not operator.operands and not operator.results:
            return
        if not operator.written and self._is_view(operator):
            return
        innermost = self._innermost()
        self._add_flops(operator, innermost)
        if operator.name not in BLANK:
            self._move(operator, innermost)

    def _add_flops(self, operator: _Operator, innermost: Instance) -> None:
        func, other = operator.func, 0
        try:
            flops = torch_flops(func, operator.args, operator.kwargs, operator.returned)
        except Exception as error:  # a formula of torch's that does not foresee this call must not end the script
            flops = 0
            self._missing.add(f"{operator} ({type(error).__name__} in torch's formula)")
        if flops is None:
            flops, known = 0, other_flops(func, operator.given, operator.results)
            other = known or 0
            if known is None:
                self._missing.add(str(operator))
        launches = self._launches.get(threading.get_ident())
        if launches:
            launches[0][1].has_products |= flops > 0
            flops = 0 if launches[0][1].is_known else flops  # what it is known to do counts already
        again = flops if _is_recomputation() else recomputed_flops(func, operator.given, flops)
        self._account.add(
            innermost,
            flops=flops,
            dtype=dtype_name(func, operator.operands),
            masked_flops=masked_flops(func, operator.given, flops),
            recomputed_flops=again,
            other_flops=other,
        )
        self._add_model_flops(flops - again, innermost)

    def _move(self, operator: _Operator, innermost: Instance) -> None:
        reads = [
            self._access(one, operator.limit_of(name))
            for name, value in operator.given.items()
            if name not in operator.unread
            for one in _tensors([value])
        ]
        writes = [self._access(one, None) for one in operator.results]
        self._account.move(innermost, filter(None, reads), filter(None, writes))

    def _is_view(self, operator: _Operator) -> bool:
        """Return whether all that is returned lies in an operand's memory: nothing was done but to look at it."""
        keys = {self._storage(one) for one in operator.operands}
        return bool(operator.outputs) and all(self._storage(one) in keys for one in operator.outputs)

    def _storage(self, tensor: Tensor) -> Hashable:
        """Return what tells a tensor's memory from all others that there were since counting began."""
        if tensor.layout != torch.strided or tensor.is_nested:
            return id(tensor)
        storage = StorageWeakRef(tensor.untyped_storage())
        # The reference keeps the address, not the memory, from being given to another.
        return self._buffers.setdefault(storage.cdata, storage).cdata

    def _access(self, tensor: Tensor, limit: int | None) -> Access | None:
        """Return what is touched of a tensor: no more than ``limit`` bytes; None for sparse and nested ones."""
        if tensor.layout != torch.strided or tensor.is_nested:
            return None
        key = self._storage(tensor)
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


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_recomputation() -> bool:
    """Return whether activations are computed again, by torch's checkpoint or by somebody else's."""
    return is_recomputing() or is_computed_again()


def _has_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
