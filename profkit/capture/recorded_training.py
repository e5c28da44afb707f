"""A built-in model whose memory is recorded from before it is made: whose tensors they are is written down beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from profkit.capture.backward_owners import backward_owners
from profkit.capture.memory import call_when_full, dump, switch_off, switch_on
from profkit.capture.memory_observer import MemoryObserver
from profkit.capture.owners import OwnerLedger, now_us
from profkit.capture.step import StepObserver, TrainingStep
from profkit.models.workload import MemoryOrder, Workload


@contextmanager
def recorded_training(
    workload: Workload,
    device: torch.device,
    memory: MemoryOrder,
    observe: Callable[[OwnerLedger, TrainingStep], StepObserver] | None = None,
) -> Iterator[TrainingStep]:
    """Yield the step of a model that was made under the recording; the files are there at the block's end.

    Args:
        observe: makes what follows the step instead of a `MemoryObserver`.
    """
    snapshot, ledger = Path(memory.snapshot_path), Path(memory.ledger_path)
    with recorded_memory(snapshot, ledger, device, stacks=memory.stacks, max_entries=memory.max_entries) as owners:
        step = TrainingStep(workload, device)
        step.observe(observe(owners, step) if observe else MemoryObserver(owners, step, saved=memory.saved))
        # Compiled code runs its backward as one node: there are no modules in it to name.
        with backward_owners(step.module, on=workload.compile_mode == "none"):
            yield step


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
        owners.note_figures("out of memory")
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
