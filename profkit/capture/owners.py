"""The ledger of owners, written while a memory history is recorded: whose storage lies where, and what the allocator
says of itself at every step. Its format is set down in `profkit.snapshot.ledger`, which reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VERSION = 1

_FIGURES = {"allocated_bytes": "allocated", "requested_bytes": "requested", "reserved_bytes": "reserved"}


class OwnerLedger:
    """Writes ``ledger.jsonl`` line by line, each whole when it is written.

    Nothing here allocates memory on the GPU or holds on to a tensor: addresses and sizes are read and written down.
    """

    def __init__(self, path: Path, device: torch.device, peaks_reset_us: int, before: Mapping[str, Any]) -> None:
        """Begin the ledger; ``before`` are the allocator's statistics from just before its peaks were reset."""
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._device = device
        self._step: int | None = None
        self._capacity_bytes = torch.cuda.mem_get_info(device)[1]
        self._write(
            {"kind": "header", "version": VERSION, "torch": torch.__version__, "peaks_reset_us": peaks_reset_us}
        )
        self._write_figures("start", before)

    def close(self) -> None:
        """End the ledger."""
        self._file.close()

    def begin_step(self, number: int | None) -> None:
        """Entries from now on carry this step's number (None: warm-up)."""
        self._step = number

    def note_step(self, name: str, start_us: int) -> None:
        """Write down that a step began then and ends now, and the allocator's figures."""
        now = now_us()
        self._write({"kind": "step", "name": name, "start_us": start_us, "end_us": now, "time_us": now})
        self.note_figures(name)

    def note_module(self, module: nn.Module) -> None:
        """Write down where the parameters and buffers lie."""
        self._note("parameter", module.named_parameters())
        self._note("buffer", module.named_buffers())

    def note_gradients(self, module: nn.Module) -> None:
        """Write down where the gradients lie that the parameters have now."""
        self._note("gradient", ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None))

    def note_optimizer(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """Write down where the optimizer's state lies, named by parameter and state."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        for parameter, state in optimizer.state.items():
            owner = names.get(parameter, "(a parameter outside the module)")
            self._note("optimizer_state", ((f"{owner}.{k}", v) for k, v in state.items() if isinstance(v, Tensor)))

    def note_inputs(self, tensors: dict[str, Tensor]) -> None:
        """Write down where the batch lies."""
        self._note("input", tensors.items())

    def saved_tensors(self) -> AbstractContextManager[Any]:
        """Return a context in which every tensor that autograd saves for backward is written down."""

        def pack(tensor: Tensor) -> Tensor:
            self._note("saved", [("", tensor)])
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def note_figures(self, moment: str) -> None:
        """Write down the allocator's own statistics."""
        self._write_figures(moment, torch.cuda.memory_stats(self._device))

    def _write_figures(self, moment: str, statistics: Mapping[str, Any]) -> None:
        figures: dict[str, Any] = {"capacity_bytes": self._capacity_bytes}
        for name in _FIGURES:
            figures[name] = statistics.get(f"{name}.all.current", 0)
            figures[name.replace("_bytes", "_peak_bytes")] = statistics.get(f"{name}.all.peak", 0)
        self._write({"kind": "figures", "time_us": now_us(), "device": self._index, "moment": moment, **figures})

    @property
    def _index(self) -> int:
        return self._device.index if self._device.index is not None else torch.cuda.current_device()

    def _note(self, role: str, named: Iterable[tuple[str, Tensor]]) -> None:
        now = now_us()
        for name, tensor in named:
            if not self._is_ours(tensor):
                continue
            storage = tensor.untyped_storage()
            device = self._index if tensor.device.index is None else tensor.device.index
            entry = {"kind": "owned", "time_us": now, "device": device, "address": storage.data_ptr()}
            self._write({**entry, "bytes": storage.nbytes(), "role": role, "name": name, "step": self._step})

    @staticmethod
    def _is_ours(tensor: Tensor) -> bool:
        """Return whether the CUDA allocator gave the tensor its memory."""
        return tensor.device.type == "cuda"

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")


def now_us() -> int:
    """Return the host's clock as the snapshot's events have it: microseconds since the epoch."""
    return time.time_ns() // 1000
