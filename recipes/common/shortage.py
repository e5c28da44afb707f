"""Running out of memory: told from other errors, with what was asked for and what was free."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable

import torch

from profkit.cli.quantities import parse_bytes
from recipes.common.machine import free_bytes
from recipes.common.recipe import Device, Row

_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")
_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory", re.IGNORECASE)


def run_short(work: Callable[[], object], device: Device) -> Row | None:
    """Do ``work``; return what was asked for and what was free if it ran out of memory, else None."""
    try:
        work()
        return None
    except (RuntimeError, MemoryError) as error:
        message = str(error)
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(message):
            raise
        free = free_bytes(device)
    # Out here the error is gone, and with it the frames that hold tensors.
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    tried = _TRIED.search(message)
    return {"requested_bytes": parse_bytes(tried[1].replace("bytes", "")) if tried else None, "free_bytes": free}
