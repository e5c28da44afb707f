"""How long collectives between GPUs take, by size; ``python -m profkit.capture.link_times``.

One process a GPU joins NCCL (on the CPU: processes that join gloo) and runs collectives of each size one after another.
On a GPU they are queued behind a large one, so that launching them is in no time; CUDA events stand between them.
Sizes are counted as nccl-tests counts them: of an all-gather the whole output, of a reduce-scatter the whole input. A
send goes from a group's first rank to its second, while the others do nothing.

The arguments are the device (auto, cuda, cpu), the number of ranks to start on this machine (``all``: one a GPU), and
the file to leave the result in. With 0 this process is a rank that a launcher started, and the others may be on other
machines.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import distributed, multiprocessing

from profkit.run.job import local_rank_number, node_number

_GPU_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
_CPU_KINDS = ("all_reduce", "all_gather", "broadcast", "send")
"""What gloo has in every version of torch."""

_LEAST_BYTES, _MOST_BYTES, _MOST_CPU_BYTES = 2**10, 2**30, 2**22
_GROWTH = 4
_UNMEASURED, _MEASURED = 3, 20
_ROUNDS = 3
"""The round with the lowest median counts: what else a machine does may disturb all collectives of a round."""
_LARGE_S = 0.02
"""Of collectives that take longer fewer are measured."""
_FEW = 5
_MOST_S = 0.1
"""No larger ones are measured after one that took longer."""
_LAUNCHING_S = 0.003
"""What is measured is queued behind a collective that takes as long: launching all of it takes less."""
_TIMEOUT = timedelta(seconds=60)
_ELEMENT_BYTES = 4
_QUIET = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""Whether torch warns that sends wait for what was called before them, which is no matter here."""

_Run = Callable[[], object]


def group_shapes(machine_of: Sequence[str]) -> list[list[list[int]]]:
    """Return which groups of ranks are measured: one list after another, the groups of a list all at once.

    On one machine that is the group of all ranks. On several: the ranks of each machine (of those with most ranks), all
    ranks, and the ranks of the same place on each machine, as pipelines and hybrid sharding use them.

    Args:
        machine_of: the machine of each rank.
    """
    found: dict[str, list[int]] = {}
    for rank, machine in enumerate(machine_of):
        found.setdefault(machine, []).append(rank)
    machines = list(found.values())
    if len(machines) == 1:
        return [machines]
    most = max(map(len, machines))
    everyone = [list(range(len(machine_of)))]
    if most == 1:
        return [everyone]
    within = [ranks for ranks in machines if len(ranks) == most]
    return [within, everyone, [list(ranks) for ranks in zip(*machines, strict=False)]]


class _Groups:
    """Groups of one size that work at once; of this rank's own one, its ranks and the process group (None: in none)."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        self.ranks: Sequence[int] = groups[0]
        self.process_group: Any = None
        self.is_member = False
        for ranks in groups:
            # Every rank has to make every group.
            made = distributed.group.WORLD if len(ranks) == world else distributed.new_group(list(ranks))
            if rank in ranks:
                self.ranks, self.process_group, self.is_member = ranks, made, True


class _Buffers:
    """Room for the largest collective: random numbers, in and out."""

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        if device.type == "cuda":
            most_bytes = min(most_bytes, torch.cuda.mem_get_info(device)[0] // 4)
        self.input = torch.randn(most_bytes // _ELEMENT_BYTES, device=device)
        self.output = torch.empty_like(self.input)

    def collective(self, kind: str, count: int, groups: _Groups) -> _Run:
        """Return what runs a collective whose larger side has ``count`` elements, a multiple of the ranks."""
        if not groups.is_member:
            return _idle
        ranks, group, first, second = len(groups.ranks), groups.process_group, *groups.ranks[:2]
        whole, part, output = self.input[:count], self.input[: count // ranks], self.output[:count]
        parts = list(output.chunk(ranks))
        runs: dict[str, _Run] = {
            "all_reduce": lambda: distributed.all_reduce(whole, group=group),
            "all_gather": lambda: distributed.all_gather_into_tensor(output, part, group),
            "reduce_scatter": lambda: distributed.reduce_scatter_tensor(parts[0], whole, group=group),
            "all_to_all": lambda: distributed.all_to_all_single(output, whole, group=group),
            "broadcast": lambda: distributed.broadcast(whole, first, group),
        }
        if distributed.get_backend() == "gloo":
            runs["all_gather"] = lambda: distributed.all_gather(parts, part, group)
        pair: dict[int, _Run] = {
            first: lambda: distributed.send(whole, second, group),
            second: lambda: distributed.recv(whole, first, group),
        }
        return pair.get(distributed.get_rank(), _idle) if kind == "send" else runs[kind]


def _idle() -> None:
    """Do nothing, while others send."""


def _start(rank: int, ranks: int, device_type: str, store: str, result: str) -> None:
    """Be one of the ranks of this machine, and as rank 0 leave the result."""
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    content = _measure(device, "", store=distributed.FileStore(store, ranks), rank=rank, world_size=ranks)
    if rank == 0:
        Path(result).write_text(json.dumps(content), encoding="utf-8")


def _measure(device: torch.device, machine: str, **rendezvous: Any) -> dict[str, Any]:
    """Measure with the other ranks, and return what all of them found; ``machine`` is where this one runs."""
    uuid, backend = None, "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # since torch 2.5
        backend = "nccl"
        rendezvous["device_id"] = device  # one communicator for collectives and sends, made now
        os.environ.setdefault(_QUIET, "false")
    distributed.init_process_group(backend, timeout=_TIMEOUT, **rendezvous)
    places: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(places, (machine, uuid and f"GPU-{uuid}"))
    machines = [place for place, _ in places]
    buffers = _Buffers(device, _MOST_BYTES if device.type == "cuda" else _MOST_CPU_BYTES)
    # Ranks may have different room: all measure what fits on each of them.
    room = -round(_longest(-len(buffers.input), device))
    measured = []
    for shape in group_shapes(machines):
        groups = _Groups(shape)
        spanned = len({machines[rank] for rank in shape[0]})
        kinds = _GPU_KINDS if device.type == "cuda" else _CPU_KINDS
        times = [
            {"kind": kind, "bytes": size, "time_ns": time_ns}
            for kind in kinds
            if kind != "send" or spanned in (1, len(shape[0]))  # else the first two ranks may be on one machine
            for size, time_ns in _sweep(buffers, kind, groups, room, device)
        ]
        measured.append({"backend": backend, "ranks": len(shape[0]), "machines": spanned, "times": times})
    # No rank leaves while another one works.
    _longest(0, device)
    distributed.destroy_process_group()
    return {"measured": measured, "uuids": [uuid for place, uuid in places if place == machines[0] and uuid]}


def _sweep(buffers: _Buffers, kind: str, groups: _Groups, room: int, device: torch.device) -> list[tuple[int, int]]:
    """Return (bytes, ns) of each size: the best round's median of this kind, on the rank where it is longest."""
    ranks = len(groups.ranks)
    found: list[tuple[int, int]] = []
    size, before_s = _LEAST_BYTES, 0.0
    ahead = _ahead(buffers, groups, room, device) if device.type == "cuda" else _idle
    while size // _ELEMENT_BYTES <= room and before_s <= _MOST_S:
        count = max(size // _ELEMENT_BYTES // ranks, 1) * ranks
        run = buffers.collective(kind, count, groups)
        is_large = before_s > _LARGE_S
        times = _FEW if is_large else _MEASURED
        for _ in range(1 if is_large else _UNMEASURED):
            run()
        measured = [
            median(_times_on_gpu(run, ahead, times) if device.type == "cuda" else _times_on_cpu(run, times))
            for _ in range(1 if is_large else _ROUNDS)
        ]
        before_s = _longest(min(measured), device)
        found.append((count * _ELEMENT_BYTES, max(round(before_s * 1e9), 1)))
        size *= _GROWTH
    return found


def _ahead(buffers: _Buffers, groups: _Groups, room: int, device: torch.device) -> _Run:
    """Return an all-reduce that keeps the GPUs at work while their hosts queue what is measured behind it."""
    ranks, size = len(groups.ranks), _LEAST_BYTES
    while True:
        run = buffers.collective("all_reduce", max(size // _ELEMENT_BYTES // ranks, 1) * ranks, groups)
        run()
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        torch.cuda.synchronize()
        size *= _GROWTH
        if _longest(perf_counter() - start, device) > _LAUNCHING_S or size // _ELEMENT_BYTES > room:
            return run


def _longest(value: float, device: torch.device) -> float:
    """Return the largest value of any rank."""
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return float(shared.item())


def _times_on_gpu(run: _Run, ahead: _Run, times: int) -> list[float]:
    ahead()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    run()
    for mark in marks[:-1]:
        mark.record()
        run()
    marks[-1].record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


def _times_on_cpu(run: _Run, times: int) -> list[float]:
    found = []
    for _ in range(times):
        distributed.barrier()
        start = perf_counter()
        run()
        found.append(perf_counter() - start)
    return found


def _launched(device_type: str) -> dict[str, Any]:
    """Be the rank that a launcher made this process, and return what all ranks found."""
    node = node_number(os.environ)
    machine = socket.gethostname() if node is None else str(node)
    if device_type == "cpu":
        return _measure(torch.device("cpu"), machine)
    local, count = local_rank_number(os.environ) or 0, torch.cuda.device_count()
    if local >= count > 1:
        return {"error": f"rank {local} of this machine has no GPU: this torch sees {count}"}
    return _measure(torch.device("cuda", local % count), machine)


def _spawned(device_type: str, ranks: int, path: Path) -> None:
    """Start a process for each rank on this machine; they leave the result in a file."""
    with tempfile.TemporaryDirectory(prefix="profkit-") as folder:
        store = str(Path(folder) / "store")
        multiprocessing.spawn(_start, args=(ranks, device_type, store, str(path)), nprocs=ranks)


def main() -> None:
    """Measure, and leave the result, or an error's line, in the file that is named."""
    wanted, path, there = sys.argv[1], Path(sys.argv[3]), torch.cuda.device_count()
    ranks = there if sys.argv[2] == "all" else int(sys.argv[2])
    device_type = ("cuda" if there else "cpu") if wanted == "auto" else wanted
    content: dict[str, Any] | None = None
    if sys.argv[2] == "all" and ranks < 2:
        content = {"measured": [], "uuids": []}
    elif device_type == "cuda" and (ranks > there or not there):
        asked = f"--ranks {ranks}" if ranks else "--device cuda"
        content = {"error": f"{asked}: this torch sees {there} GPUs"}
    else:
        try:
            if ranks:
                _spawned(device_type, ranks, path)
            else:
                content = _launched(device_type)
        except (multiprocessing.ProcessRaisedException, torch.cuda.OutOfMemoryError) as error:
            if torch.cuda.OutOfMemoryError.__name__ not in f"{type(error).__name__} {error}":
                raise
            content = {"error": "a GPU's memory is full: another process holds it"}
    if content is not None:
        path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
