"""The text that PyTorch's allocator keeps for each thread and writes into each event of its history (torch 2.10 and
later): here the phase and the module that the thread works for.

The autograd thread has no Python stack, so more than half of the bytes of a training step would otherwise carry nothing
that says whose they are.
"""

from __future__ import annotations

import torch

from profkit.names import FORWARD, MEMORY_TEXT


def can_write() -> bool:
    """Return whether this torch can store a text with each allocation."""
    return hasattr(torch.cuda.memory, "_get_memory_metadata") and hasattr(torch._C, "_cuda_setMemoryMetadata")


def write(phase: str | None, module: str | None) -> None:
    """Have the allocator write ``profkit:PHASE:MODULE`` into what this thread allocates from now on, or nothing.

    MODULE is empty outside every module; a module outside every phase runs forward. A text of the script's own stays.
    """
    text = "" if phase is None and module is None else f"{MEMORY_TEXT}{phase or FORWARD}:{module or ''}"
    before = torch.cuda.memory._get_memory_metadata()
    if not before or before.startswith(MEMORY_TEXT):
        torch.cuda.memory._set_memory_metadata(text)
