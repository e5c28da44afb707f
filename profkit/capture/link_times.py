"""How long collectives between the GPUs of this machine take, by size; ``python -m profkit.capture.link_times``.

One process a GPU joins NCCL (on the CPU: processes that join gloo) and runs collectives of each size one after another.
On a GPU they are queued behind a large one, so that launching them is in no time; CUDA events stand between them.
Sizes are counted as nccl-tests counts them: of an all-gather the whole output, of a reduce-scatter the whole input.
The arguments are the device (cuda, cpu), the number of ranks, and the file to leave the result in.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import distributed, multiprocessing

_GPU_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_CPU_KINDS = ("all_reduce", "all_gather")
"""What gloo has in every version of torch."""

_LEAST_BYTES, _MOST_BYTES, _MOST_CPU_BYTES = 2**10, 2**30, 2**22
_GROWTH = 4
_UNMEASURED, _MEASURED = 3, 20
_ROUNDS = 3
"""The round with the lowest median counts: what else a machine does may disturb all collectives of a round."""
_LARGE_S = 0.02
"""Of collectives that take longer fewer are measured."""
_FEW = 5
_MOST_S = 0.5
"""No larger ones are measured after one that took longer."""
_TIMEOUT = timedelta(seconds=60)
_ELEMENT_BYTES = 4


class _Buffers:
    """Room for the largest collective: random numbers, in and out."""

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        if device.type == "cuda":
            most_bytes = min(most_bytes, torch.cuda.mem_get_info(device)[0] // 4)
        self.input = torch.randn(most_bytes // _ELEMENT_BYTES, device=device)
        self.output = torch.empty_like(self.input)

    def collective(self, kind: str, count: int) -> Callable[[], object]:
        """Return what runs a collective whose larger side has ``count`` elements, a multiple of the ranks."""
        ranks = distributed.get_world_size()
        whole, part = self.input[:count], self.input[: count // ranks]
        if kind == "all_gather":
            gathered = self.output[:count]
            if distributed.get_backend() == "gloo":
                parts = list(gathered.chunk(ranks))
                return lambda: distributed.all_gather(parts, part)
            return lambda: distributed.all_gather_into_tensor(gathered, part)
        if kind == "reduce_scatter":
            scattered = self.output[: count // ranks]
            return lambda: distributed.reduce_scatter_tensor(scattered, whole)
        if kind == "all_to_all":
            exchanged = self.output[:count]
            return lambda: distributed.all_to_all_single(exchanged, whole)
        return lambda: distributed.all_reduce(whole)


def _measure(rank: int, ranks: int, device_type: str, store: str, result: str) -> None:
    """Be one rank: measure with the others, and as rank 0 leave the result."""
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, store=distributed.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=_TIMEOUT
    )
    most = _MOST_BYTES if device_type == "cuda" else _MOST_CPU_BYTES
    buffers = _Buffers(device, most)
    # Ranks may have different room: all measure what fits on each of them.
    room = torch.tensor(len(buffers.input), device=device)
    distributed.all_reduce(room, op=distributed.ReduceOp.MIN)
    times = [
        {"kind": kind, "bytes": size, "time_ns": time_ns}
        for kind in (_GPU_KINDS if device_type == "cuda" else _CPU_KINDS)
        for size, time_ns in _sweep(buffers, kind, int(room), device)
    ]
    if rank == 0:
        devices = [torch.cuda.get_device_properties(at) for at in range(ranks)] if device_type == "cuda" else []
        uuids = [f"GPU-{one.uuid}" for one in devices if hasattr(one, "uuid")]  # since torch 2.5
        content = {"backend": backend, "ranks": ranks, "times": times, "uuids": uuids}
        Path(result).write_text(json.dumps(content), encoding="utf-8")
    # No rank leaves while another one works. (NCCL's barrier would warn that it has to guess the device.)
    distributed.all_reduce(room, op=distributed.ReduceOp.MIN)
    int(room)
    distributed.destroy_process_group()


def _sweep(buffers: _Buffers, kind: str, room: int, device: torch.device) -> list[tuple[int, int]]:
    """Return (bytes, ns) of each size: the best round's median of this kind, on the rank where it is longest."""
    ranks = distributed.get_world_size()
    found: list[tuple[int, int]] = []
    size, before_s = _LEAST_BYTES, 0.0
    largest = buffers.collective(kind, room // ranks * ranks)
    while size // _ELEMENT_BYTES <= room and before_s <= _MOST_S:
        count = max(size // _ELEMENT_BYTES // ranks, 1) * ranks
        run = buffers.collective(kind, count)
        times = _FEW if before_s > _LARGE_S else _MEASURED
        for _ in range(_UNMEASURED):
            run()
        rounds = 1 if before_s > _LARGE_S else _ROUNDS
        measured = [
            median(_times_on_gpu(run, largest, times) if device.type == "cuda" else _times_on_cpu(run, times))
            for _ in range(rounds)
        ]
        slowest = torch.tensor(min(measured), dtype=torch.float64, device=device)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        before_s = slowest.item()
        found.append((count * _ELEMENT_BYTES, max(round(before_s * 1e9), 1)))
        size *= _GROWTH
    return found


def _times_on_gpu(run: Callable[[], object], largest: Callable[[], object], times: int) -> list[float]:
    largest()  # keeps the GPUs at work while the host queues what is measured
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    run()
    for mark in marks[:-1]:
        mark.record()
        run()
    marks[-1].record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


def _times_on_cpu(run: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        distributed.barrier()
        start = perf_counter()
        run()
        found.append(perf_counter() - start)
    return found


def main() -> None:
    """Start a process for each rank, and leave the result, or an error's line, in the file that is named."""
    device, ranks, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    there = torch.cuda.device_count() if device == "cuda" else ranks
    if ranks > there:
        content: dict[str, Any] = {"error": f"--ranks {ranks}: this torch sees {there} GPUs"}
        path.write_text(json.dumps(content), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(prefix="profkit-") as folder:
        try:
            multiprocessing.spawn(_measure, args=(ranks, device, str(Path(folder) / "store"), str(path)), nprocs=ranks)
        except multiprocessing.ProcessRaisedException as error:
            if torch.cuda.OutOfMemoryError.__name__ not in str(error):
                raise
            path.write_text(json.dumps({"error": "a GPU's memory is full: another process holds it"}), encoding="utf-8")


if __name__ == "__main__":
    main()
