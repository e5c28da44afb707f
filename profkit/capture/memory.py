"""Recording the allocator's history into a snapshot, with a ledger of owners beside it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from profkit.capture.owners import OwnerLedger, now_us
from profkit.ranges import record_in_torch

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
    _switch_on(stacks, max_entries)
    owners = OwnerLedger(ledger, device, reset_us, before)

    def dump_when_full(*_: Any) -> None:
        # Called while the failing allocation is still on the stack: what filled the memory is all there.
        owners.note_figures("out of memory")
        dump(snapshot)

    torch._C._cuda_attach_out_of_memory_observer(dump_when_full)
    record_in_torch(True)
    try:
        yield owners
        torch.cuda.synchronize(device)
        owners.note_figures("dump")
        dump(snapshot)
    finally:
        record_in_torch(False)
        torch.cuda.memory._record_memory_history(None)
        owners.close()


def dump(path: Path) -> None:
    """Write the allocator's snapshot as a pickle; ``path`` appears whole or not at all."""
    partial = path.with_name(f"partial.{path.name}")
    with partial.open("wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(), file, protocol=_PROTOCOL)
    os.replace(partial, path)


def _switch_on(stacks: str, max_entries: int) -> None:
    options: dict[str, Any] = {"enabled": "all", "context": "alloc", "stacks": stacks, "max_entries": max_entries}
    known = signature(torch.cuda.memory._record_memory_history).parameters
    # Older torch keeps annotations of the recording thread alone, or none.
    for name in ("clear_history", "global_record_annotations"):
        if name in known:
            options[name] = True
    torch.cuda.memory._record_memory_history(**options)
