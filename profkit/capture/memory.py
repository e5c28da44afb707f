"""Recording the allocator's history into a snapshot, with a ledger of owners beside it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from profkit.annotation import record_in_torch
from profkit.capture.owners import OwnerLedger, now_us
from profkit.capture.whole_files import partial_of

OUT_OF_MEMORY = "out of memory"
"""``moment`` of the figures when an allocation failed."""

_PROTOCOL = 4


@contextmanager
def recorded_memory(
    snapshot: Path, ledger: Path, device: torch.device, *, stacks: str, max_entries: int
) -> Iterator[OwnerLedger]:
    """Record every event of the allocator within the block; write ``snapshot`` at its end, or when memory ran out.

    Begin it before the model is built: what was allocated earlier has no owner. Peaks count from here. Recording is
    switched off whatever happens; the snapshot appears whole or not at all.

    Args:
        stacks: ``python``, or ``all`` for C++ frames too, which cost more.
        max_entries: how many events are kept; beyond it the oldest are lost.
    """
    torch.cuda.init()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    reset_us = now_us()
    switch_on(stacks, max_entries)
    owners = OwnerLedger(ledger, device, reset_us, before)

    def dump_when_full(_device: int) -> None:
        owners.note_figures(OUT_OF_MEMORY)
        dump(snapshot)

    call_when_full(dump_when_full)
    try:
        yield owners
        torch.cuda.synchronize(device)
        owners.note_figures("dump")
        dump(snapshot)
    finally:
        switch_off()
        owners.close()


def switch_on(stacks: str, max_entries: int) -> None:
    """Begin to record the allocator's events, and profkit's ranges with them."""
    options: dict[str, Any] = {"enabled": "all", "context": "alloc", "stacks": stacks, "max_entries": max_entries}
    known = signature(torch.cuda.memory._record_memory_history).parameters
    # Older torch keeps annotations of the recording thread alone, or none.
    for name in ("clear_history", "global_record_annotations"):
        if name in known:
            options[name] = True
    torch.cuda.memory._record_memory_history(**options)
    record_in_torch(True)


def switch_off() -> None:
    """End the recording; what it holds is gone."""
    record_in_torch(False)
    torch.cuda.memory._record_memory_history(None)


def call_when_full(full: Callable[[int], None]) -> None:
    """Have ``full(device)`` run when an allocation fails, for as long as the process lives.

    The failing allocation is still on the stack then: what filled the memory is all there.
    """
    torch._C._cuda_attach_out_of_memory_observer(lambda device, *_: full(device))


def dump(path: Path) -> None:
    """Write the allocator's snapshot as a pickle; ``path`` appears whole or not at all."""
    partial = partial_of(path)
    with partial.open("wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(), file, protocol=_PROTOCOL)
    os.replace(partial, path)
