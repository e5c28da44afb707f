"""The ledger of owners, written while a memory history is recorded: which tensor is at which address, and what the
allocator reports at every step. Its format is set down in `profkit.run.owners`, which reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from profkit.capture.hooks.module_names import plain_name
from profkit.capture.patches import call_between, patch
from profkit.capture.steps.variable_names import variables_at_hand
from profkit.run.owners import START

_MOST_NODES = 200_000
_NESTING = 3
_RAW = "_raw_saved_"
_SHOWS_CONTENT = hasattr(getattr(torch._C._autograd, "SavedTensor", None), "unpack_hook")


# What a hook may have put in a tensor's place: a checkpoint's mark, or the name of a file.
_HOLDS_NO_TENSOR = {"NoneType", "_Holder", "str", "PosixPath"}


# What autograd saved for a backward pass is read from its graph before that begins; nothing is unpacked or changed. A
# node keeps each saved tensor in a ``SavedTensor``. Newer torch shows what that keeps. Older torch has the unpacked
# tensor alone, and unpacking is harmless unless a hook packed it (`torch.autograd.graph.saved_tensors_hooks`): that of
# a checkpoint computes the tensor again. There nothing is read any more once hooks were used.


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
    """Return the tensors with a graph in the variables of this thread's running functions, the innermost first."""
    tensors: list[Tensor] = []
    for value in variables_at_hand():
        parts = value if type(value) in (tuple, list) else (value,)
        tensors += [part for part in parts if issubclass(type(part), Tensor) and part.grad_fn is not None]
    return tensors


def is_cast_of_parameter(tensor: Tensor) -> bool:
    node = _base(tensor).grad_fn
    if node is None or type(node).__name__ != "ToCopyBackward0":
        return False
    return all(type(following).__name__ == "AccumulateGrad" for following, _ in node.next_functions)


def watch_hooks() -> None:
    """Note from now on whether hooks for saved tensors are used, where torch does not show what they packed."""
    if not _SHOWS_CONTENT:
        note_use = call_between(partial(setattr, _hooks, "were_used", True), None)
        patch("torch._C._autograd._push_saved_tensors_default_hooks", note_use)


_hooks = SimpleNamespace(were_used=False)


class _Walk:
    def __init__(self, note: Callable[[Tensor], None]) -> None:
        self._note = note
        self._unread = 0
        self._names: dict[type, list[str]] = {}
        self._frames: set[int] = set()

    def from_roots(self, roots: Any) -> int:
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
            waiting.extend(following for following, _ in node.next_functions if following is not None)
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
        if saved is None:
            return
        content = saved.data
        if not self._note_tensors(content) and type(content).__name__ not in _HOLDS_NO_TENSOR:
            self._unread += 1
        for cell in getattr(saved.unpack_hook, "__closure__", None) or ():
            frame = cell.cell_contents
            if type(frame).__name__ == "_CheckpointFrame" and id(frame) not in self._frames:
                self._frames.add(id(frame))
                for given in _inputs_of(frame):
                    self._read_content(given)

    def _note_tensors(self, value: Any, nesting: int = _NESTING) -> bool:
        if isinstance(value, Tensor):
            if not isinstance(_base(value), nn.Parameter):
                self._note(value)
            return True
        parts = value if nesting and isinstance(value, tuple | list) else ()
        are_noted = [self._note_tensors(part, nesting - 1) for part in parts]
        return any(are_noted)


def _inputs_of(frame: Any) -> list[Any]:
    if hasattr(frame, "saved_args"):
        return [saved for saved in frame.saved_args if hasattr(saved, "unpack_hook")]
    return list(_each(getattr(getattr(frame, "input_saver", None), "_raw_saved_tensors", ())))


def _nodes(value: Any, nesting: int = _NESTING) -> Iterator[Any]:
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif hasattr(value, "next_functions"):
        yield value
    elif nesting and isinstance(value, tuple | list):
        for part in value:
            yield from _nodes(part, nesting - 1)


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


VERSION = 1

# What has one storage for good is written down when it is new there, not at every step.
_LASTING = {"parameter", "buffer", "optimizer_state"}

_FIGURES = ("allocated_bytes", "requested_bytes", "reserved_bytes")


class OwnerLedger:
    """Writes ``ledger.jsonl`` line by line, each whole when it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", encoding="utf-8", buffering=1)
        self._step: int | None = None
        self._capacity_bytes: dict[int, int] = {}
        self._lasting: dict[tuple[str, str], tuple[int, int]] = {}
        self._peaks: dict[int, list[int]] = {}
        self.allocated_peak_bytes = 0
        """The highest of the allocator's own peaks that were noted, of all devices."""
        self._write({"kind": "header", "version": VERSION, "torch": torch.__version__, "peaks_reset_us": now_us()})

    def close(self) -> None:
        self._file.close()

    def begin_step(self, number: int) -> None:
        """Entries from now on carry this step's number."""
        self._step = number

    def note_step(self, name: str, start_us: int) -> None:
        now = now_us()
        self._write({"kind": "step", "name": name, "start_us": start_us, "end_us": now, "time_us": now})
        self.note_figures(name)

    def note_module(self, module: nn.Module, prefix: str = "") -> None:
        """Write down where the parameters and buffers lie, a tied one by each of its names; before each ``prefix``."""
        parts: tuple[tuple[str, Iterator[tuple[str, Tensor]]], ...] = (
            ("parameter", module.named_parameters(remove_duplicate=False)),
            ("buffer", module.named_buffers(remove_duplicate=False)),
        )
        for role, named in parts:
            self._note(role, ((prefix + plain_name(name), tensor) for name, tensor in named))

    def note_gradients(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._note("gradient", ((name, p.grad) for name, p in parameters if p.grad is not None))

    def note_optimizer(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        for parameter, state in optimizer.state.items():
            owner = names.get(parameter, "(a parameter outside the modules)")
            self._note("optimizer_state", ((f"{owner}.{k}", v) for k, v in state.items() if isinstance(v, Tensor)))

    def note_inputs(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._note("input", tensors)

    def note_saved(self, roots: Any) -> None:
        """Write down what autograd keeps for the backward pass of ``roots``, and how much of that was not found."""
        note = self._noter()
        unread = read_saved(roots, note)
        if unread:
            self._write({"kind": "unread", "time_us": now_us(), "step": self._step, "saved_tensors": unread})

    def note_kept(self, tensors: Iterable[Tensor]) -> None:
        note = self._noter()
        for tensor in tensors:
            note(tensor)

    def _noter(self) -> Callable[[Tensor], None]:
        now = now_us()
        known = set(self._lasting.values())

        def note(tensor: Tensor) -> None:
            role = "autocast" if is_cast_of_parameter(tensor) else "saved"
            for part in filter(self._is_ours, _plain_parts(tensor)):
                place = _place(part)
                if place is not None and place not in known:
                    known.add(place)
                    self._write_owned(now, role, "", part, whole=True)

        return note

    def note_figures(self, moment: str, *, only_higher: bool = False) -> None:
        """Write down the statistics of the allocator of each GPU on which something was allocated by now.

        Args:
            moment: what is written as their moment; `START` for those of before the recording.
            only_higher: leave out GPUs of which no peak is above all noted ones.
        """
        for device in range(torch.cuda.device_count()):
            statistics = torch.cuda.memory_stats(device)
            peaks = [statistics.get(f"{name}.all.peak", 0) for name in _FIGURES]
            noted = self._peaks.get(device, [0] * len(peaks))
            highest = list(map(max, peaks, noted))
            if not statistics.get("reserved_bytes.all.peak", 0) or (only_higher and highest == noted):
                continue
            if moment != START:
                self._peaks[device] = highest
                self.allocated_peak_bytes = max(self.allocated_peak_bytes, peaks[0])
            if device not in self._capacity_bytes:
                self._capacity_bytes[device] = torch.cuda.mem_get_info(device)[1]
            figures = {"capacity_bytes": self._capacity_bytes[device]}
            for name, peak in zip(_FIGURES, peaks, strict=True):
                figures[name] = statistics.get(f"{name}.all.current", 0)
                figures[name.replace("_bytes", "_peak_bytes")] = peak
            self._write({"kind": "figures", "time_us": now_us(), "device": device, "moment": moment, **figures})

    def _note(self, role: str, named: Iterable[tuple[str, Tensor]]) -> None:
        now = now_us()
        for name, tensor in named:
            for part in filter(self._is_ours, _plain_parts(tensor)):
                self._write_owned(now, role, name, part)

    def _write_owned(self, time_us: int, role: str, name: str, tensor: Tensor, *, whole: bool = False) -> None:
        place = _place(tensor)
        if place is None:
            return
        if role in _LASTING:
            if self._lasting.get((role, name)) == place:
                return
            self._lasting[role, name] = place
        device = tensor.device.index or 0
        entry = {"kind": "owned", "time_us": time_us, "device": device, "address": place[0], "bytes": place[1]}
        entry["offset_bytes"] = 0 if whole else tensor.storage_offset() * tensor.element_size()
        entry["own_bytes"] = place[1] if whole else _span_bytes(tensor)
        entry["element_bytes"] = tensor.element_size()
        self._write({**entry, "role": role, "name": name, "step": self._step})

    @staticmethod
    def _is_ours(tensor: Tensor) -> bool:
        return tensor.device.type == "cuda"

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with storages of their own that ``tensor`` is made of: itself, or a distributed one's part."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(tensor, name))
    elif tensor.layout == torch.strided and not is_lazy(tensor):
        yield tensor


def _place(tensor: Tensor) -> tuple[int, int] | None:
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    except RuntimeError:  # a tensor that only stands for one, such as a compiler's or torch.func's
        return None


def _span_bytes(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + steps) * tensor.element_size()


def now_us() -> int:
    """Return the host's clock as the snapshot's events have it: microseconds since the epoch."""
    return time.time_ns() // 1000
