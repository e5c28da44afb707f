"""A built-in model whose memory is recorded from before it is made: whose tensors they are is written down beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from profkit.capture.backward_owners import backward_owners
from profkit.capture.memory import recorded_memory
from profkit.capture.memory_observer import MemoryObserver
from profkit.capture.owners import OwnerLedger
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
