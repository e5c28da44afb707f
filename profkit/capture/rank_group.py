"""A worker as one of several ranks: its own files, its own GPU, and the group that it joins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from profkit.errors import UsageError
from profkit.models.workload import Order
from profkit.run_directory import name_of_rank


def order_of_this_rank(order: Order) -> Order:
    """Return the order with the names of this rank's own files; rank 0 has the plain ones."""
    if order.workload.ranks == 1:
        return order

    def own(text: str) -> str:
        path = Path(text)
        return str(path.with_name(name_of_rank(path.name, int(os.environ["RANK"]))))

    memory = order.memory
    if memory is not None:
        memory = replace(memory, snapshot_path=own(memory.snapshot_path), ledger_path=own(memory.ledger_path))
    trace_path = None if order.trace_path is None else own(order.trace_path)
    return replace(order, result_path=own(order.result_path), trace_path=trace_path, memory=memory)


@contextmanager
def joined(order: Order, device: torch.device) -> Iterator[None]:
    """Be one of the order's ranks in the block: NCCL with a GPU of its own, gloo on the CPU; nothing if it is alone.

    Raises:
        UsageError: there are fewer GPUs than ranks.
    """
    count = order.workload.ranks
    if count == 1:
        yield
        return
    if device.type == "cuda":
        if torch.cuda.device_count() < count:
            raise UsageError(f"--nproc-per-node {count}: this machine has {torch.cuda.device_count()} GPUs to train on")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def decided_by_first(decision: bool, device: torch.device) -> bool:
    """Return the first rank's decision on all of them: clocks differ, and a step takes every rank."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return decision
    told = torch.tensor([int(decision)], device=device)
    distributed.broadcast(told, src=0)
    return bool(told.item())
